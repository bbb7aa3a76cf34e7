"""Whether convolutions write into the whole that they are parts of, or a kernel joins them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.device.rules import changed
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.rewrite import alternatives
from cudnngraph.rewrite.passes import legalize
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.select.inputs import random_inputs
from tests import numerics

F16, F32 = torch.float16, torch.float32
POLICY = cg.Policy(allow_tf32=False, kernels=True)

Given = Callable[[dict[str, torch.Tensor]], torch.Tensor]


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


def left_over(kind: str) -> tuple[GraphSpec, Given]:
    """A concatenation of two parts, one of which is an output of a kernel ("kernel"), an input, or
    of a convolution ("plan"), and the same in torch. A convolution reads it, but for "nothing"."""
    g = cg.Graph(kind)

    def new(name: str, *shape: int) -> cg.Value:
        return g.input(name, shape, F16, layout="channels_last")

    x = new("x", 2, 32, 6, 6)
    part = g.max_pool(x, 3, 1, 1) if kind == "pooled" else g.silu(new("z", 2, 32, 6, 6))
    other = x
    if kind == "kernel":
        other = g.gelu(x)
        g.output("other", other)
    elif kind == "plan":
        other = g.relu(g.conv(x, new("v", 32, 32, 1, 1)))
    whole = g.concat([other, part], 1)
    whole = g.silu(whole) if kind == "nothing" else g.conv(whole, new("w", 32, 64, 1, 1))
    g.output("y", whole)

    def by_torch(t: dict[str, torch.Tensor]) -> torch.Tensor:
        x = t["x"]
        part = F.max_pool2d(x, 3, 1, 1) if kind == "pooled" else F.silu(t["z"])
        other = F.gelu(x) if kind == "kernel" else x
        other = F.conv2d(x, t["v"]).relu() if kind == "plan" else other
        whole = torch.cat([other, part], 1)
        return F.silu(whole) if kind == "nothing" else F.conv2d(whole, t["w"])

    return g.spec(), by_torch


@pytest.mark.parametrize(
    ("kind", "parts", "copies"),
    [("kernel", 2, 1), ("input", 1, 0), ("plan", 1, 0), ("nothing", 1, 0), ("pooled", 2, 1)],
)
def test_a_part_that_is_left_over_is_copied_where_that_moves_less(
    kind: str, parts: int, copies: int
) -> None:
    spec, by_torch = left_over(kind)
    found = legalize(spec, POLICY)
    assert written_into(found) == parts
    assert sum(node.op == "identity" for node in found.nodes) == copies
    inputs = random_inputs(spec, torch.device("cpu"))
    results = compile_spec(spec, "cpu", policy=POLICY)(*inputs)
    named = dict(zip(spec.inputs, (each.double() for each in inputs), strict=True))
    several = results if isinstance(results, tuple) else (results,)
    y = dict(zip(spec.outputs, several, strict=True))["y"]
    numerics.check(y, by_torch(named), F16, terms=64)


def test_a_part_beside_one_number_is_not_copied_apart() -> None:
    """As the weight of a head of two classes, which trains with eight."""
    g = cg.Graph("head")
    x = g.input("x", (2, 64, 6, 6), F16, layout="channels_last")
    w = g.cast(g.input("w", (2, 64, 1, 1), F32), F16)
    g.output("kept", w)
    rest = g.expand(g.cast(g.input("n", (), F32), F16), (6, 64, 1, 1), ())
    g.output("y", g.conv(x, g.concat([w, rest], 0)))
    spec = g.spec()
    found = legalize(spec, POLICY)
    assert not any(node.op == "identity" for node in found.nodes)
    inputs = random_inputs(spec, torch.device("cpu"))
    _, y = compile_spec(spec, "cpu", policy=POLICY)(*inputs)
    x64, w64, n64 = (each.double() for each in inputs)
    whole = torch.cat([w64.half().double(), n64.half().double().expand(6, 64, 1, 1)])
    numerics.check(y, F.conv2d(x64, whole), F16, terms=64)
