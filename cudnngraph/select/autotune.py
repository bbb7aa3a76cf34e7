"""The choice by measurement: a graph searched as one plan, part by part or region by region.

Where the policy allows no torch steps, only plans of the whole graph are tried
(:mod:`~cudnngraph.select.search`). A large graph is searched region by region
(:mod:`~cudnngraph.select.regions`).
"""

from __future__ import annotations

import math
import time

from ..backend.plan import Plan
from ..errors import NotSupported
from ..ir.spec import GraphSpec
from ..partition.analysis import CutGraph, compute_nodes
from ..partition.regions import regions
from ..policy import Policy
from ..rewrite.channels_last import channels_last
from .bench import Bench
from .config import EXPLORED_SHARE
from .cost import Floor, no_floor
from .decision import Hints, Selection, StepPlan
from .joining import joined
from .kernels import Kernels
from .regions import Progress, RegionSearch
from .search import Search, of_others
from .ways import Part, of_cuts, step_plan


def autotune(
    spec: GraphSpec,
    policy: Policy,
    bench: Bench,
    progress: Progress | None = None,
    kernels: Kernels | None = None,
    hints: Hints | None = None,
    floor: Floor = no_floor,
    *,
    brief: bool = False,
    ends: float = math.inf,
) -> Selection:
    """Choose for a legalized graph by measuring. ``progress(done, known)`` is told how many plans
    were built. ``hints`` are tried before all others; no step takes less than its ``floor``. A
    ``brief`` search, whose times alone are asked for, builds no plan of a large graph to be kept,
    and measures no steps with such a graph around them. The search finishes when the time ``ends``.

    Raises :class:`NotSupported` when cuDNN refuses and ``policy.fallback`` is "error".
    """
    if policy.fallback == "error":
        kernels = None
    search = Search(policy, bench, kernels, hints=hints, floor=floor, ends=ends)
    graphs = [CutGraph(spec)]
    if policy.fallback == "error":
        roots = [whole(search, spec)]
        _built(roots[0], search)
        anchors = 1
    else:
        borders = regions(graphs[0])
        if borders:
            by_region = RegionSearch(
                graphs[0], borders, policy, bench, kernels, hints, floor, brief=brief, ends=ends
            )
            return by_region.tuned(progress)
        graphs, roots = rooted(search, spec)
        anchors = max(1, sum(map(graphs[0].is_anchor, compute_nodes(spec.nodes))))
    now = time.perf_counter()
    deadline = now + min(policy.budget_s * anchors, EXPLORED_SHARE * (ends - now))
    for done, known in search.explore(roots, deadline):
        if progress is not None:
            progress(done, known)
    winner, rivals = search.settle(roots[0].spec, roots)
    bench.close()
    steps: list[StepPlan] = []
    built: list[Plan | None] = []
    for number, (part, way) in enumerate(winner.runs.steps):
        decisions = search.decisions(part, way)
        if number == 0:
            compared = of_cuts(winner, rivals)
            decisions = (*compared, *of_others(search, winner.runs), *decisions)
        plan = None if way.choice is None else bench.replay(part.spec, way.choice)
        steps.append(step_plan(part.spec, way, plan, decisions))
        built.append(plan)
    if kernels is not None:
        made = {name for step in steps for name in step.spec.tensors}
        graph = next(each for each in graphs if made <= set(each.spec.tensors))
        steps, built = joined(graph, steps, built, kernels, bench, search.known, ends=ends)
    return Selection.of(spec, steps, built)


def rooted(search: Search, spec: GraphSpec) -> tuple[list[CutGraph], list[Part]]:
    """A graph that is searched in one, as it is and with channels-last images, and its parts."""
    graphs = [CutGraph(spec)]
    other = channels_last(spec)
    if other is not spec:
        graphs.append(CutGraph(other))
    return graphs, [search.part(graph, compute_nodes(graph.spec.nodes)) for graph in graphs]


def whole(search: Search, spec: GraphSpec) -> Part:
    """The graph as one plan and nothing else."""
    graph = CutGraph(spec)
    part = search.part(graph, compute_nodes(spec.nodes))
    part.cuts = ()
    search.order[:] = [part]
    part.size = 2  # no torch step
    return part


def _built(part: Part, search: Search) -> None:
    """Try plans of the whole graph until one builds. :class:`NotSupported` where there is none."""
    search.open([part])
    while part.step.queue and not part.step.ways:
        search.advance([part.step])
    if not part.step.ways:
        reasons = dict.fromkeys(decision.reason for decision in part.step.lost)
        raise NotSupported(f"graph '{part.spec.name}'", list(reasons))
