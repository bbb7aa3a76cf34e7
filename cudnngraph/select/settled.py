"""What a choice by measurement says of steps of any graph: how each took the least time.

A step is settled as a plan. One with a product or a convolution may be settled as a torch step too,
or apart: as the product alone, and a generated kernel of what stands behind it. A choice without
measuring follows the latter two in place of the rules of :mod:`~cudnngraph.select.epilogues`. Of a
plan it takes no more than which: what reads the step elsewhere may make it better apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from ..backend.plan import Choice
from ..ir.spec import GraphSpec, Node
from ..ops.table import OPS
from ..partition.analysis import CutGraph, Group, compute_nodes
from ..partition.cuts import subgraph_of
from ..partition.regions import regions
from ..rewrite.annotate import marks
from .decision import StepPlan
from .worker import from_choice, to_choice

TORCH: Final = "torch"
APART: Final = "apart"
NoPlan = Literal["torch", "apart"]
Way = Choice | NoPlan


def settled(spec: GraphSpec, steps: Sequence[StepPlan]) -> Iterator[tuple[GraphSpec, Way]]:
    """The steps that a choice by measurement for the legal graph ``spec`` settles, and how."""
    for step in steps:
        if step.time_us is None:
            continue
        if step.kind == "cudnn" and step.choice is not None:
            yield step.spec, step.choice
        elif step.kind == "torch" and any(map(multiplies, step.spec.nodes)):
            yield step.spec, TORCH
    graph = CutGraph(spec)
    home = {node.name: step for step in steps for node in step.spec.nodes}
    for group in regions(graph) or (compute_nodes(spec.nodes),):
        if _is_apart(graph, group, home):
            yield subgraph_of(graph, group), APART


def multiplies(node: Node) -> bool:
    """Whether a node is a product or a convolution."""
    return node.op == "matmul" or OPS[node.op].has("convolution")


def _is_apart(graph: CutGraph, group: Group, home: Mapping[str, StepPlan]) -> bool:
    """Whether the steps of a region are its product alone and a kernel of what stands behind it.

    One of more than that, such as of a norm that reads it, says nothing of where there is no norm.
    """
    anchors = [node for node in group if graph.is_anchor(node)]
    if len(anchors) != 1 or len(group) == 1 or not multiplies(anchors[0]):
        return False
    alone = home[anchors[0].name]
    rest = {id(home[node.name]): home[node.name] for node in group if node not in anchors}
    steps = (alone, *rest.values())
    if any(step.time_us is None or marks(step.spec) for step in steps):
        return False
    if any(not graph.spec.tensors.keys() >= step.spec.tensors.keys() for step in steps):
        return False  # it was searched in another form, such as with dense images
    sizes = [len(compute_nodes(step.spec.nodes)) for step in steps]
    return sizes == [1, len(group) - 1] and steps[1].kind == "kernel"


def from_way(way: Way) -> Any:
    """A way as JSON data."""
    return from_choice(way) if isinstance(way, Choice) else way


def to_way(data: Any) -> Way:
    """The way that :func:`from_way` made ``data`` of. Raises :class:`ValueError` or
    :class:`TypeError` for what is none."""
    if data == TORCH:
        return TORCH
    return APART if data == APART else to_choice(data)
