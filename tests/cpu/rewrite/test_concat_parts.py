"""Whether convolutions write into the whole that they are parts of, or a kernel joins them."""

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
    an activation between), of slices of two tensors, or of one whole tensor, and with relu or an
    activation behind that few engines have."""
    g = cg.Graph(kind.replace(",", "").replace(" ", "_"))
    x, other = (g.input(n, (2, 32, 6, 6), F16, layout="channels_last") for n in ("x", "other"))
    made = []
    for at, source in enumerate((x, other if kind == "two tensors" else x)):
        read = (
            source if kind.startswith("one tensor") else g.slice(source, 1, at * 16, at * 16 + 16)
        )
        w = g.input(f"w{at}", (16, read.shape[1], 3, 3), F16, layout="channels_last")
        y = g.bias(g.conv(read, w, padding=1), g.input(f"b{at}", (16,), F16))
        act = {"activated parts": g.silu, "one tensor, relu": g.relu, "one tensor, silu": g.silu}
        made.append(act[kind](y) if kind in act else y)
    g.output("y", g.silu(g.concat(made, 1)))
    g.output("z", g.relu(other))
    return g.spec()


def written_into(spec: GraphSpec) -> int:
    """How many operands of the concatenation lie in its result."""
    (node,) = (node for node in spec.nodes if node.op == "concat")
    whole = spec.tensors[node.results[0]].stride
    return sum(spec.tensors[name].stride == whole for name in node.operands)


KINDS = {
    "parts": 0,
    "activated parts": 0,
    "two tensors": 0,
    "one tensor": 0,
    "one tensor, relu": 0,
    "one tensor, silu": 2,
}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_engines_copy_are_joined_by_a_kernel(kind: str) -> None:
    spec = joined(kind)
    assert written_into(legalize(spec, POLICY)) == KINDS[kind]
    with changed(convolution_parts_in_place=True):
        assert written_into(legalize(spec, POLICY)) == 2


def test_a_search_tries_both() -> None:
    for kind in ("parts", "one tensor, relu"):
        others = list(alternatives.of_graph(joined(kind), POLICY))
        assert (("convolution_parts_in_place", True),) in others
    assert list(alternatives.of_graph(joined("one tensor, silu"), POLICY)) == []


def test_a_residual_is_joined_and_float32_is_not() -> None:
    for dtype, in_place in ((F16, 0), (torch.float32, 1)):
        g = cg.Graph("residual")
        x = g.input("x", (2, 32, 6, 6), dtype, layout="channels_last")
        w = g.input("w", (32, 32, 3, 3), dtype, layout="channels_last")
        y = g.relu(g.add(g.bias(g.conv(x, w, padding=1), g.input("b", (32,), dtype)), x))
        g.output("y", g.silu(g.concat([y, x], 1)))
        assert written_into(legalize(g.spec(), POLICY)) == in_place


def test_both_ways_compute_the_same() -> None:
    spec = joined("one tensor, relu")
    inputs = random_inputs(spec, torch.device("cpu"))
    found = []
    for value in (False, True):
        cg.cache_clear()
        with changed(convolution_parts_in_place=value):
            found.append(compile_spec(spec, "cpu", policy=POLICY)(*inputs))
    for mine, theirs in zip(*found, strict=True):
        numerics.check(mine, theirs.double(), F16, terms=144)
