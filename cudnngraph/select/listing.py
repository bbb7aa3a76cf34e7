"""What a search would try for a graph, without trying it: its parts, and the candidates of each."""

from __future__ import annotations

from collections.abc import Iterator

from ..device.rules import Values
from ..ir.key import step_digest
from ..ir.spec import GraphSpec
from ..partition.analysis import CutGraph
from ..partition.cuts import subgraph_of
from ..partition.regions import regions
from ..policy import Policy
from ..rewrite.alternatives import of_graph
from ..rewrite.passes import legalize
from .autotune import rooted, whole
from .bench import Bench
from .decision import ALIAS
from .regions import roots_of
from .search import Search
from .ways import Part, StepSearch


def parts(spec: GraphSpec, policy: Policy, bench: Bench) -> Iterator[Part]:
    """The parts that a search of a declared graph may build, each opened; equal ones once.

    They come in the order in which a search opens them: the form of the graph by the thresholds
    before other forms; in a form the whole, or its regions, before what it can be cut into. Views,
    which nothing runs, are left out.
    """
    forms: list[Values] = [(), *of_graph(spec, policy)]
    steps: dict[str, StepSearch] = {}
    listed: set[int] = set()
    for values in forms:
        search = Search(policy, bench, steps=steps)
        roots = _roots(search, legalize(spec, policy, values), policy)
        for part in (*roots, *search.order):
            if id(part.step) in listed or ALIAS in part.step.lost:
                continue
            listed.add(id(part.step))
            search.open([part])
            yield part


def _roots(search: Search, spec: GraphSpec, policy: Policy) -> list[Part]:
    """The parts of which one runs the graph, or each of its regions that differ."""
    if policy.fallback == "error":
        return [whole(search, spec)]
    graph = CutGraph(spec)
    borders = regions(graph)
    if not borders:
        return rooted(search, spec)[1]
    found: dict[str, list[Part]] = {}
    for group in borders:
        region = subgraph_of(graph, group)
        digest = step_digest(region)
        if digest not in found:
            found[digest] = roots_of(search, graph, region, group)
    return [root for roots in found.values() for root in roots]
