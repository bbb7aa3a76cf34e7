"""Graphs run channels last: copies at the edges, and none between."""

from __future__ import annotations

import pytest

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec, is_channels_last, same_layout
from cudnngraph.partition.analysis import CutGraph
from cudnngraph.rewrite.channels_last import channels_last
from tests.partitions import F16, attention, block


def nchw(*, out: str = "contiguous") -> GraphSpec:
    g = cg.Graph("g")
    x, w = g.input("x", (2, 8, 6, 6), F16), g.input("w", (16, 8, 3, 3), F16)
    z = g.input("z", (2, 16, 4, 4), F16, layout="channels_last")
    y = g.bias(g.conv(x, w), g.input("b", (16,), F16)) + z
    g.output("y", y.relu(), layout=out)
    return g.spec()


def test_channels_last_copies_at_the_edges_and_nowhere_else() -> None:
    spec = nchw()
    last = channels_last(spec)
    for name in (*spec.inputs, *spec.outputs):
        assert last.tensors[name] == spec.tensors[name], "what the caller gives is as declared"
    copies = {node.operands[0]: node.results[0] for node in last.nodes if node.op == "identity"}
    assert copies == {"x": "x_last", "w": "w_last", "y_last": "y"}
    for node in last.nodes:
        for name in (*node.operands, *node.results) if node.op != "identity" else ():
            tensor = last.tensors[name]
            assert len(tensor.shape) != 4 or is_channels_last(tensor.shape, tensor.stride), name
    graph = CutGraph(last)
    assert all(graph.is_anchor(node) for node in last.nodes if node.op == "identity")


def test_an_output_that_lies_channels_last_is_not_copied() -> None:
    last = channels_last(nchw(out="channels_last"))
    assert {n.results[0] for n in last.nodes if n.op == "identity"} == {"x_last", "w_last"}


def test_an_intermediate_in_another_layout_is_laid_channels_last_without_a_copy() -> None:
    last = channels_last(nchw())
    for name in last.intermediates:
        tensor = last.tensors[name]
        assert is_channels_last(tensor.shape, tensor.stride)
    assert not any(
        same_layout(t.shape, t.stride, last.tensors[f"{name}_last"].stride)
        for name, t in last.tensors.items()
        if f"{name}_last" in last.tensors
    )


@pytest.mark.parametrize(
    "spec", [block().spec(), attention(F16, None)], ids=["lies_so_already", "no_convolution"]
)
def test_other_graphs_are_not_run_channels_last(spec: GraphSpec) -> None:
    assert channels_last(spec) is spec


def test_a_graph_with_another_anchor_is_not_run_channels_last() -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (2, 8, 6, 6), F16), g.input("w", (8, 8, 1, 1), F16)
    g.output("y", g.matmul(g.conv(x, w), g.input("m", (6, 6), F16)))
    spec = g.spec()
    assert channels_last(spec) is spec
