"""Convolutions of a few groups each: whether they write into the whole that they are parts of."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg
from cudnngraph.device.rules import changed
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.rewrite import alternatives
from cudnngraph.rewrite.passes import legalize
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.select.inputs import random_inputs
from tests import numerics

F16 = torch.float16
POLICY = cg.Policy(allow_tf32=False, kernels=True)


def joined(kind: str) -> GraphSpec:
    """Two convolutions whose results are concatenated: of slices of one tensor ("parts", and with
    an activation between), of slices of two tensors, or of one whole tensor."""
    g = cg.Graph(kind.replace(" ", "_"))
    x, other = (g.input(n, (2, 32, 6, 6), F16, layout="channels_last") for n in ("x", "other"))
    made = []
    for at, source in enumerate((x, other if kind == "two tensors" else x)):
        read = source if kind == "one tensor" else g.slice(source, 1, at * 16, at * 16 + 16)
        w = g.input(f"w{at}", (16, read.shape[1], 3, 3), F16, layout="channels_last")
        y = g.bias(g.conv(read, w, padding=1), g.input(f"b{at}", (16,), F16))
        made.append(g.relu(y) if kind == "activated parts" else y)
    g.output("y", g.silu(g.concat(made, 1)))
    g.output("z", g.relu(other))
    return g.spec()


def written_into(spec: GraphSpec) -> int:
    """How many operands of the concatenation lie in its result."""
    (node,) = (node for node in spec.nodes if node.op == "concat")
    whole = spec.tensors[node.results[0]].stride
    return sum(spec.tensors[name].stride == whole for name in node.operands)


@pytest.mark.parametrize(
    ("kind", "in_place"),
    [("parts", 0), ("activated parts", 0), ("two tensors", 2), ("one tensor", 2)],
)
def test_parts_of_a_grouped_convolution_are_joined_by_a_kernel(kind: str, in_place: int) -> None:
    spec = joined(kind)
    assert written_into(legalize(spec, POLICY)) == in_place
    with changed(convolution_parts_in_place=True):
        assert written_into(legalize(spec, POLICY)) == 2


def test_a_search_tries_both() -> None:
    others = list(alternatives.of_graph(joined("parts"), POLICY))
    assert (("convolution_parts_in_place", True),) in others
    assert list(alternatives.of_graph(joined("one tensor"), POLICY)) == []


def test_both_ways_compute_the_same() -> None:
    spec = joined("activated parts")
    inputs = random_inputs(spec, torch.device("cpu"))
    found = []
    for value in (False, True):
        cg.cache_clear()
        with changed(convolution_parts_in_place=value):
            found.append(compile_spec(spec, "cpu", policy=POLICY)(*inputs))
    for mine, theirs in zip(*found, strict=True):
        numerics.check(mine, theirs.double(), F16, terms=144)
