"""What rewrites add to a graph has names that the user did not take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cudnngraph as cg
from cudnngraph.device.rules import changed
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec, taken_names
from cudnngraph.rewrite.channels_last import channels_last
from cudnngraph.rewrite.passes import prepared
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.select.inputs import random_inputs
from tests import generated, names, numerics
from tests.names import GRAPHS, convolutions, with_names_taken

CPU = torch.device("cpu")
POLICY = cg.Policy(allow_tf32=False, kernels=True)
TERMS = 289  # the longest sum: of 17 x 17 elements that a resizing by 16 spreads one to


@pytest.fixture(autouse=True)
def masks_of_any_size_are_copied() -> Iterator[None]:
    with changed(mask_copy_min_scores=0):
        yield


def check(spec: GraphSpec, rewrite: names.Rewrite) -> None:
    """That a graph whose names are taken is rewritten as it is without, to the same numbers."""
    taken = with_names_taken(spec, rewrite)
    seen, alone = rewrite(taken), rewrite(spec)
    added = len(taken.inputs) - len(spec.inputs)
    assert added
    labels = [node.name for node in seen.nodes]
    results = [name for node in seen.nodes for name in node.results]
    assert len(set(labels)) == len(labels) and len({*results, *seen.inputs}) == len(
        [*results, *seen.inputs]
    )
    assert len(seen.nodes) == len(alone.nodes) + added
    assert set(seen.tensors) >= {*seen.inputs, *results}
    for name in (*taken.inputs, *taken.outputs):
        assert seen.tensors[name] == taken.tensors[name], name
    given = random_inputs(taken, CPU, 0)
    wanted, made = (reference.run(each, given, torch.float64) for each in (taken, seen))
    for name, a, b in zip(taken.outputs, made, wanted, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("which", GRAPHS)
def test_each_rewrite_keeps_what_has_the_names_it_would_make(which: str) -> None:
    build, endings = GRAPHS[which]
    spec = build()
    made = taken_names(prepared(spec)) - taken_names(spec)
    assert not [end for end in endings if not any(name.endswith(end) for name in made)], made
    check(spec, prepared)


def test_copies_of_images_keep_what_has_their_names() -> None:
    made = taken_names(channels_last(convolutions())) - taken_names(convolutions())
    assert {"x_last", "x_copy", "w_last", "y_last", "y_copy"} <= made
    check(convolutions(), channels_last)


@pytest.mark.parametrize("which", GRAPHS)
def test_such_a_graph_runs_in_kernels_as_in_float64(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = with_names_taken(GRAPHS[which][0](), prepared)
    inputs = random_inputs(spec, CPU, 0)
    generated.install(monkeypatch)
    made = compile_spec(spec, "cpu", policy=POLICY)(*inputs)
    for name, mine, theirs in zip(
        spec.outputs, made, reference.run(spec, inputs, torch.float64), strict=True
    ):
        numerics.check(mine, theirs, spec.tensors[name].dtype, terms=TERMS)
