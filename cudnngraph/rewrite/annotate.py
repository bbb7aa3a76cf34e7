"""Annotate nodes with facts for the executors: attributes that no user can set."""

from __future__ import annotations

from dataclasses import replace

from ..device.rules import Values
from ..ir.spec import (
    GraphSpec,
    Node,
)
from ..ops.table import OPS
from ..partition.analysis import CutGraph

#: Attributes that only the steps' own graphs have. Of max pools: that they read no -inf. Of
#: gradients of attention: to be the same bits in every run. Of any op: the thresholds that whoever
#: runs the step follows, in this process or another, in place of those of the GPU.
BOUNDED, REPEATABLE, INSTEAD = "bounded", "repeatable", "instead"


def annotate(spec: GraphSpec, deterministic: bool) -> GraphSpec:
    """The graph, before it is cut, with marks for those who run its steps: on max pools that read
    no -inf, being behind a ReLU, say; where it has to be ``deterministic`` on gradients of
    attention, for which cuDNN has another way, and no note of its plans tells them apart."""
    graph = CutGraph(spec)

    def bounded(node: Node) -> bool:
        made: Node | None = node
        while made is not None and (made.op in ("max_pool", "identity") or OPS[made.op].view):
            made = graph.producer.get(made.operands[0])
        return made is not None and OPS[made.op].has("bounded_below")

    def mark(node: Node) -> Node:
        if node.op == "max_pool" and bounded(node):
            return replace(node, attrs=((BOUNDED, True), *node.attrs))
        if OPS[node.op].has("attention_gradient") and deterministic:
            return replace(node, attrs=((REPEATABLE, True), *node.attrs))
        return node

    nodes = tuple(map(mark, spec.nodes))
    return spec if nodes == spec.nodes else replace(spec, nodes=nodes)


def marked(spec: GraphSpec, values: Values) -> GraphSpec:
    """A step whose nodes say which values whoever runs it follows."""
    if not values:
        return spec
    attribute = (INSTEAD, values)
    nodes = tuple(
        node if node.op == "constant" else replace(node, attrs=(attribute, *node.attrs))
        for node in spec.nodes
    )
    return replace(spec, nodes=nodes)


def marks(spec: GraphSpec) -> Values:
    """The values that the nodes of a step are marked with."""
    found: Values = next((dict(node.attrs).get(INSTEAD, ()) for node in reversed(spec.nodes)), ())
    return found
