"""Regions of a large graph: it is cut at each anchor before anything else is tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.spec import GraphSpec, Node
from ..ops.table import OPS
from .analysis import CutGraph, Group, compute_nodes, is_copy
from .cuts import cuts


def _as_early_as_can_be(graph: CutGraph, nodes: Sequence[Node]) -> Group:
    """The nodes by how many anchors have to run before: of two branches that are joined, what is
    joined belongs to the longer one then, and the shorter one may run beside it."""
    level: dict[str, int] = {}
    for node in nodes:
        before = max((level[source.name] for source in graph.sources(node)), default=0)
        level[node.name] = before + graph.is_anchor(node)
    return tuple(sorted(nodes, key=lambda node: level[node.name]))


MAX_ANCHORS_AS_ONE = 6  # a graph with more of them is cut at each


def regions(graph: CutGraph) -> tuple[Group, ...]:
    """A large graph cut at its natural borders, in an order that can be run; () for a small one.

    A region is an anchor with the pointwise ops behind it, up to the next anchor: an op belongs to
    the last anchor that it depends on, if it is as large as that one's result. Pointwise ops of no
    anchor are regions too, unless they only serve one epilogue, which they then are part of.
    """
    nodes, tensors = compute_nodes(graph.spec.nodes), graph.spec.tensors
    anchors = [node for node in nodes if graph.is_anchor(node) and not OPS[node.op].view]
    if len(anchors) <= MAX_ANCHORS_AS_ONE:
        return ()
    nodes = _as_early_as_can_be(graph, nodes)
    groups: list[list[Node]] = []
    home: dict[str, int] = {}
    for node in nodes:
        place = max((home[source.name] for source in graph.sources(node)), default=-1)
        if place >= 0 and not graph.is_anchor(node):
            first = groups[place][0]
            takes = OPS[first.op].pointwise or graph.takes_epilogue(first)
            size = tensors[first.results[0]].numel
            if takes and not is_copy(first, tensors) and size == tensors[node.results[0]].numel:
                groups[place].append(node)
                home[node.name] = place
                continue
        home[node.name] = len(groups)
        groups.append([node])
    for place, group in enumerate(groups):
        if any(map(graph.is_anchor, group)):
            continue
        results = [name for node in group for name in node.results]
        users = [user for name in results for user in graph.readers.get(name, ())]
        homes = {home[user.name] for user in users} - {place}
        if len(homes) != 1 or not set(graph.spec.outputs).isdisjoint(results):
            continue
        (other,) = homes
        if other > place and not any(
            graph.is_anchor(user) for user in users if home[user.name] == other
        ):
            groups[other] += group
            home.update((node.name, other) for node in group)
            groups[place] = []
    order = {node.name: place for place, node in enumerate(nodes)}
    return tuple(tuple(sorted(g, key=lambda node: order[node.name])) for g in groups if g)


def rounded_between(graph: CutGraph) -> GraphSpec:
    """The graph with each tensor that crosses from one of its parts to another in the dtype that it
    crosses in: as one step it computes about what the steps of a cut do."""
    nodes = compute_nodes(graph.spec.nodes)
    parts = regions(graph) or next(iter(cuts(graph, nodes)), (nodes,))
    home = {node.name: place for place, group in enumerate(parts) for node in group}
    crossing = {
        name: form
        for name, form in graph.passed.items()
        if {home[reader.name] for reader in graph.readers.get(name, ())}
        - {home[graph.producer[name].name]}
    }
    return replace(graph.spec, tensors={**graph.spec.tensors, **crossing})
