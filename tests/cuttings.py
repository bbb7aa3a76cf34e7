"""Every way to cut a graph into steps, by walking all cuts of all cuts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product

from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition.analysis import CutGraph, Group, compute_nodes
from cudnngraph.partition.cuts import cuts, subgraph_of
from cudnngraph.rewrite.channels_last import channels_last
from cudnngraph.rewrite.concat import concat_in_place
from cudnngraph.rewrite.masks import bool_masks_to_additive
from cudnngraph.rewrite.views import alias_views


def every_way(graph: CutGraph, nodes: Group) -> list[tuple[Group, ...]]:
    """The groups of each way to run ``nodes``, the whole first, no two alike."""
    found: dict[tuple[Group, ...], None] = {(nodes,): None}
    for groups in cuts(graph, nodes):
        for chosen in product(*(every_way(graph, group) for group in groups)):
            found.setdefault(tuple(chain(*chosen)))
    return list(found)


def pieces(graph: CutGraph, way: Sequence[Group]) -> tuple[GraphSpec, ...]:
    """The steps of a way, in order."""
    return tuple(subgraph_of(graph, group) for group in way)


def every_cutting(spec: GraphSpec) -> list[tuple[GraphSpec, ...]]:
    """The steps of every way to cut ``spec``, as it is; the whole first."""
    graph = CutGraph(spec)
    return [pieces(graph, way) for way in every_way(graph, compute_nodes(spec.nodes))]


def rewritten(spec: GraphSpec) -> list[GraphSpec]:
    """The graph, and what the rewrites make of it where they change something.

    Views lie in their operands' memory, and slices of a concatenation in its own, in whatever step:
    such a graph is cut as rewritten alone.
    """
    masked = bool_masks_to_additive(spec)
    seen = concat_in_place(alias_views(masked))
    if seen is not masked:
        spec = masked = seen
    return list({id(each): each for each in (spec, masked, channels_last(masked))}.values())
