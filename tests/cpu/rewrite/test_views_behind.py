"""Views of a product behind the pointwise ops that read it: the same numbers, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.device.import_rules import ANY
from cudnngraph.device.rules import changed
from cudnngraph.executor import reference
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.spec import GraphSpec, is_contiguous
from cudnngraph.models.convert import import_model
from cudnngraph.ops.views import is_view
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.partition.regions import regions
from cudnngraph.rewrite import alternatives
from cudnngraph.rewrite.passes import prepared
from cudnngraph.rewrite.views import sink_views
from tests.models import Attends

F16 = torch.float16
S, B, E = 6, 4, 16


def ops(spec: GraphSpec) -> list[str]:
    return [node.op for node in compute_nodes(spec.nodes)]


def same_numbers(spec: GraphSpec, moved: GraphSpec) -> None:
    """In float64, from the same inputs; and every view is still where its operand lies."""
    gen = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(spec.tensors[name].shape, generator=gen, dtype=torch.float64)
        for name in spec.inputs
    ]
    assert (moved.inputs, moved.outputs) == (spec.inputs, spec.outputs)
    want, made = (reference.run(each, inputs, torch.float64) for each in (spec, moved))
    for a, b in zip(want, made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    used = {*moved.inputs, *(name for node in moved.nodes for name in node.results)}
    assert set(moved.tensors) == used
    before = set(moved.inputs)
    for node in moved.nodes:  # in an order that can be run
        assert before.issuperset(node.operands), node
        before |= set(node.results)
    for name in spec.outputs:
        assert moved.tensors[name] == spec.tensors[name]


def product(g: cg.Graph) -> cg.Value:
    x, w = g.input("x", (S * B, E), F16), g.input("w", (E, E), F16)
    y: cg.Value = g.matmul(x, w)
    return y


Build = Callable[[cg.Graph, cg.Value], cg.Value]


def declared(build: Build) -> GraphSpec:
    g = cg.Graph("views")
    y = build(g, product(g))
    g.output("y", y * 1.0)
    return g.spec()


def bias(g: cg.Graph, y: cg.Value) -> cg.Value:
    return g.add(g.reshape(y, (S, B, E)), g.input("b", (E,), F16))


def bias_and_activation(g: cg.Graph, y: cg.Value) -> cg.Value:
    return g.gelu_tanh(g.transpose(bias(g, y), 0, 1))


def residual(g: cg.Graph, y: cg.Value) -> cg.Value:
    r = g.input("r", (B, S, E), F16, stride=(E, B * E, 1))
    return g.add(g.transpose(bias(g, y), 0, 1), r)


def permuted(g: cg.Graph, y: cg.Value) -> cg.Value:
    r = g.input("r", (E, S, B), F16, stride=(1, B * E, E))
    return g.mul(r, g.permute(g.reshape(y, (S, B, E)), (2, 0, 1)))


def scaled_by_channel(g: cg.Graph, y: cg.Value) -> cg.Value:
    return g.mul(g.transpose(y, 0, 1), g.input("c", (E, 1), F16))


def scaled_images(g: cg.Graph, y: cg.Value) -> cg.Value:
    image = g.permute(g.reshape(y, (S, 2, 2, E)), (0, 3, 1, 2))
    r = g.input("r", (S, E, 2, 2), F16, layout="channels_last")
    return g.add(r, g.mul(g.input("c", (E, 1, 1), F16), image))


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (scaled_by_channel, ["matmul", "transpose", "mul", "mul", "transpose"]),
        (bias, ["matmul", "add", "mul", "reshape"]),
        (bias_and_activation, ["matmul", "add", "gelu_tanh", "mul", "reshape", "transpose"]),
        (residual, ["matmul", "add", "transpose", "reshape", "add", "mul", "reshape", "transpose"]),
        (permuted, ["permute", "reshape", "matmul", "mul", "mul", "reshape", "permute"]),
    ],
)
def test_what_reads_a_view_of_a_product_joins_its_plan(build: Build, wanted: list[str]) -> None:
    spec = declared(build)
    moved = sink_views(spec)
    assert ops(moved) == wanted
    same_numbers(spec, moved)


def vector_along_a_moved_dim(g: cg.Graph, y: cg.Value) -> cg.Value:
    return g.add(g.transpose(y, 0, 1), g.input("b", (S * B,), F16))


def residual_to_be_copied(g: cg.Graph, y: cg.Value) -> cg.Value:
    r = g.input("r", (B, S, E), F16)
    return g.add(g.transpose(g.reshape(y, (S, B, E)), 0, 1), r)


def read_twice(g: cg.Graph, y: cg.Value) -> cg.Value:
    shown = g.reshape(y, (S, B, E))
    return g.add(g.relu(shown), shown)


def a_part(g: cg.Graph, y: cg.Value) -> cg.Value:
    return g.relu(g.slice(y, 0, 0, 8))


def with_itself(g: cg.Graph, y: cg.Value) -> cg.Value:
    shown = g.reshape(y, (S, B, E))
    return g.mul(shown, shown)


def of_an_input(g: cg.Graph, y: cg.Value) -> cg.Value:
    g.output("q", y)
    shown = g.reshape(g.input("z", (S * B, E), F16), (S, B, E))
    return g.add(g.relu(shown), g.input("r", (S, B, E), F16))


def broadcast(g: cg.Graph, y: cg.Value) -> cg.Value:
    return g.add(g.reshape(y, (S, B, E)), g.input("b", (S, 1, 1), F16))


@pytest.mark.parametrize(
    "build",
    [
        *(vector_along_a_moved_dim, residual_to_be_copied, read_twice, a_part, with_itself),
        *(of_an_input, broadcast, scaled_images),
    ],
)
def test_what_would_be_copied_or_is_read_elsewhere_stays(build: Build) -> None:
    g = cg.Graph("views")
    y = product(g)
    g.output("p", build(g, y))
    spec = g.spec()
    assert sink_views(spec) is spec


def kept(gelu: str, depth: int = 512) -> GraphSpec:
    """What an activation reads behind a reshape, an output as for its gradient."""
    g = cg.Graph("kept")
    x, w, b = (
        g.input("x", (S * B, depth), F16),
        g.input("w", (depth, E), F16),
        g.input("b", (E,), F16),
    )
    u = g.add(g.matmul(x, w), b)
    g.output("u", u)
    g.output("y", getattr(g, gelu)(g.reshape(u, (S, B, E))))
    return g.spec()


@pytest.mark.parametrize("gelu", ["gelu", "gelu_tanh"])
def test_a_plan_makes_what_gelu_reads_and_what_it_makes(gelu: str) -> None:
    spec = kept(gelu)
    moved = sink_views(spec)
    assert ops(moved) == ["matmul", "add", gelu, "reshape"]
    assert moved.nodes[-2].operands == ("u",)
    same_numbers(spec, moved)
    with changed(product_kept_min_depth=1024):
        assert sink_views(spec) == spec
    forms = list(alternatives.of_graph(spec, cg.Policy()))
    assert (("product_kept_min_depth", ANY),) in forms, "a search measures the other way"


def test_gelu_behind_a_short_product_stays_a_kernel_where_what_it_reads_is_kept() -> None:
    assert sink_views(kept("gelu", 256)) == kept("gelu", 256)
    assert sink_views(kept("silu")) == kept("silu"), "a sigmoid is slow in a plan"


def test_an_output_in_between_stays() -> None:
    g = cg.Graph("views")
    shown = g.reshape(product(g), (S, B, E))
    g.output("shown", shown)
    g.output("y", g.relu(shown))
    spec = g.spec()
    assert sink_views(spec) is spec


VIEWS = st.lists(
    st.sampled_from(["split", "swap", "turn", "merge", "bias", "relu", "residual", "scale"]),
    min_size=2,
    max_size=8,
)


@settings(deadline=None)
@given(VIEWS, st.booleans())
def test_any_chain_gives_the_same_numbers(chain: list[str], strange: bool) -> None:
    g = cg.Graph("views")
    y = product(g)
    for number, kind in enumerate(chain):
        spec = y.spec
        assert spec is not None
        shape = spec.shape
        if kind == "split":
            splits = shape[-1] % 2 == 0 and len(shape) < 8  # dims, as many as there may be
            y = g.reshape(y, (*shape[:-1], shape[-1] // 2, 2)) if splits else y
        elif kind == "swap":
            y = g.transpose(y, 0, len(shape) - 1)
        elif kind == "turn":
            y = g.permute(y, (*range(1, len(shape)), 0))
        elif kind == "merge":
            y = g.reshape(y, (shape[0] * shape[1], *shape[2:])) if len(shape) > 2 else y
        elif kind == "bias":
            y = g.add(y, g.input(f"b{number}", shape[-1:], F16))
        elif kind == "residual":
            at = {"stride": spec.stride} if strange else {}
            y = g.add(g.input(f"r{number}", shape, F16, **at), y)
        else:
            y = g.relu(y) if kind == "relu" else g.mul(y, 0.5)
    g.output("y", g.identity(y))
    spec = canonical(g.spec())
    same_numbers(spec, sink_views(spec))
    same_numbers(spec, prepared(spec))


def test_torchs_attention_adds_its_biases_in_the_plans_of_its_products() -> None:
    torch.manual_seed(0)
    model: Any = Attends(E).eval()
    spec = import_model(model, (torch.randn(B, S, E),)).spec
    assert spec is not None
    spec = canonical(spec)
    ready = prepared(spec)
    same_numbers(spec, ready)
    graph = CutGraph(ready)
    parts = [subgraph_of(graph, group) for group in regions(graph)]
    groups = [" ".join(ops(each)) for each in parts if "matmul" in ops(each)]
    assert all(group.startswith("matmul add") for group in groups), groups
    assert all(is_contiguous(t.shape, t.stride) for t in ready.tensors.values() if t.name == "y")
    assert any(is_view(ready.tensors, node) for node in ready.nodes)


def test_long_chains_of_pointwise_ops_are_walked_once() -> None:
    """Each level of the second doubles the ways back; the first is longer than Python recurses."""
    g = cg.Graph("chain")
    y = product(g)
    for _ in range(1200):
        y = g.add(y, 1.0)
    for _ in range(60):
        y = g.mul(y, g.sigmoid(y))
    z = g.reshape(y, (-1,))
    g.output("z", g.add(z, z))
    assert "matmul" in ops(sink_views(g.spec()))


def convolved(
    layout: Any, *, groups: int = 1, biased: bool = True, rows: bool = False
) -> GraphSpec:
    """An activation of an image that is shown as tokens: (B, S, C)."""
    g = cg.Graph("tokens")
    x = g.input("x", (B, E, 3, 4), F16, layout=layout)
    w = g.input("w", (E, E // groups, 3, 3), F16, layout=layout)
    y = g.conv(x, w, padding=1, groups=groups)
    y = g.bias(y, g.input("b", (E,), F16)) if biased else y
    shown = g.gelu(g.transpose(g.reshape(y, (B, E, 12)), 1, 2))
    if rows:
        shown = g.mul(shown, g.input("gain", (E,), F16))
    g.output("y", g.exp(shown))
    return canonical(g.spec())


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("groups", [1, E])
@pytest.mark.parametrize("biased", [True, False])
def test_the_activation_of_an_image_as_tokens_stands_behind_the_convolution(
    layout: Any, groups: int, biased: bool
) -> None:
    spec = convolved(layout, groups=groups, biased=biased)
    ready = prepared(spec)
    assert ops(ready) == ["conv", *["bias"] * biased, "gelu", "reshape", "transpose", "exp"]
    same_numbers(spec, ready)


def test_a_factor_for_each_channel_of_tokens_stays_behind_the_views() -> None:
    spec = convolved("channels_last", rows=True)
    ready = prepared(spec)
    assert ops(ready) == ["conv", "bias", "gelu", "reshape", "transpose", "mul", "exp"]
    same_numbers(spec, ready)
