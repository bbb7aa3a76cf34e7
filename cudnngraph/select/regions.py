"""A large graph, searched region by region: equal regions once, close plans again in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..backend.plan import Plan
from ..ir.key import step_digest
from ..ir.spec import GraphSpec
from ..partition.analysis import CutGraph, Group, compute_nodes
from ..partition.cuts import subgraph_of
from ..policy import Policy
from ..rewrite.channels_last import with_dense_images
from .bench import Bench
from .config import (
    IN_CONTEXT_BUDGETS,
    IN_CONTEXT_GAIN,
    IN_CONTEXT_LARGE_SHARE,
    IN_CONTEXT_RATIO,
    IN_CONTEXT_SHARE,
    IN_CONTEXT_VARIANTS,
)
from .decision import ALIAS, Decision, Hints, Selection, StepPlan
from .joining import joined
from .kernels import Kernels
from .search import Contender, Part, Search, StepSearch, Variant, of_cuts, of_others, step_plan

Progress = Callable[[int, int], None]


@dataclass
class _Region:
    """A region that was searched: of all regions equal to it, the first.

    ``dense`` is the graph of its winner where that is not the region's own: it makes dense images
    and copies them to where they belong.
    """

    spec: GraphSpec
    dense: GraphSpec | None
    search: Search
    winner: Contender
    rivals: list[Contender]


@dataclass
class _PlacedStep:
    """A step of the whole graph, the part that was searched for it, and the way that it takes."""

    spec: GraphSpec
    part: Part
    way: Variant
    region: _Region


class RegionSearch:
    """A large graph, searched region by region; equal regions are searched once.

    A plan chosen so is fast alone, in a warm cache. So close plans of the slowest steps are timed
    once more in the end, in their place, with the whole graph around them.
    """

    def __init__(
        self,
        graph: CutGraph,
        borders: Sequence[Group],
        policy: Policy,
        bench: Bench,
        kernels: Kernels | None,
        hints: Hints | None = None,
    ) -> None:
        self._hints = hints
        self._kernels = kernels
        self._graph = graph
        self._borders = borders
        self._policy = policy
        self._bench = bench
        self._steps: dict[str, StepSearch] = {}
        self._replayed: dict[tuple[int, int], Plan] = {}
        self._checked: set[int] = set()

    def tuned(self, progress: Progress | None) -> Selection:
        """The choice. ``progress(done, known)`` is told how many plans were built."""
        regions = [(subgraph_of(self._graph, group), group) for group in self._borders]
        begun: dict[str, tuple[Search, list[Part]]] = {}
        for spec, group in regions:  # all of them first: what builds elsewhere has begun then
            digest = step_digest(spec)
            if digest not in begun:
                begun[digest] = self._begun(spec, group)
        for search, _ in begun.values():
            search.try_kernels(search.order)
        found: dict[str, _Region] = {}
        places: list[_PlacedStep] = []
        for spec, group in regions:
            digest = step_digest(spec)
            if digest not in found:
                found[digest] = self._searched(spec, group, *begun[digest], progress)
            places += self._placed(spec, found[digest])
        self._bench.close()
        self._compare_in_place(places)
        steps: list[StepPlan] = []
        first_of: dict[int, int] = {}
        for number, place in enumerate(places):
            decisions = self._decisions(place, first_of.setdefault(id(place.part), number), number)
            if number == 0:
                kinds, count = len(found), len(self._borders)
                reason = f"cut at its anchors into {count} regions, {kinds} of them different"
                decisions = (Decision("the whole graph", True, reason), *decisions)
            steps.append(step_plan(place.spec, place.way, self._plan(place), decisions))
        dense = tuple(
            tuple(node.name for node in group)
            for spec, group in regions
            if found[step_digest(spec)].dense is not None
        )
        built = [self._plan(place) for place in places]
        if self._kernels is not None:
            best = Search(self._policy, self._bench, None, self._steps).known
            steps, built = joined(self._graph, steps, built, self._kernels, self._bench, best)
        return Selection(tuple(steps), tuple(built), dense=dense)

    def _begun(self, spec: GraphSpec, group: Group) -> tuple[Search, list[Part]]:
        """The search of a region and its roots, with every part opened."""
        search = Search(self._policy, self._bench, self._kernels, self._steps, self._hints)
        roots = [search.part(self._graph, group)]
        dense = with_dense_images(spec)
        if dense is not spec:  # a slice of what is joined: written at once, or copied there
            graph = CutGraph(dense)
            roots.append(search.part(graph, compute_nodes(graph.spec.nodes)))
        for part in search.order:
            search.open(part)
        return search, roots

    def _searched(
        self,
        spec: GraphSpec,
        group: Group,
        search: Search,
        roots: Sequence[Part],
        progress: Progress | None,
    ) -> _Region:
        anchors = max(1, sum(map(self._graph.is_anchor, group)))
        deadline = time.perf_counter() + self._policy.budget_s * anchors
        for done, known in search.explore(roots, deadline):
            if progress is not None:
                progress(done, known)
        winner, rivals = search.settle(roots[0].spec, roots)
        made = {name for part, _ in winner.runs.steps for name in part.spec.tensors}
        dense = None if made <= set(spec.tensors) else with_dense_images(spec)
        return _Region(spec, dense, search, winner, rivals)

    def _placed(self, spec: GraphSpec, region: _Region) -> list[_PlacedStep]:
        """The steps of a region that is equal to one that was searched."""
        graph, searched = self._graph, region.spec
        if region.dense is not None:
            spec, searched = with_dense_images(spec), region.dense
            graph = CutGraph(spec)
        like = {a.name: b for a, b in zip(searched.nodes, spec.nodes, strict=True)}
        return [
            _PlacedStep(
                subgraph_of(graph, [like[node.name] for node in compute_nodes(part.spec.nodes)]),
                part,
                way,
                region,
            )
            for part, way in region.winner.runs.steps
        ]

    def _plan(self, place: _PlacedStep) -> Plan | None:
        """The plan of a step, replayed once for all steps that are equal."""
        if place.way.choice is None:
            return None
        key = (id(place.part.step), id(place.way))
        if key not in self._replayed:
            self._replayed[key] = self._bench.replay(place.spec, place.way.choice)
        return self._replayed[key]

    def _compare_in_place(self, places: Sequence[_PlacedStep]) -> None:
        """Give each step that matters the plan that makes the whole graph fastest."""
        total = sum(place.way.time_us for place in places)
        same: dict[int, list[_PlacedStep]] = {}
        for place in places:
            same.setdefault(id(place.part.step), []).append(place)
        deadline = time.perf_counter() + IN_CONTEXT_BUDGETS * self._policy.budget_s
        for alike in sorted(same.values(), key=lambda each: -sum(p.way.time_us for p in each)):
            taken, step = alike[0].way, alike[0].part.step
            others = [
                way
                for way in sorted(step.ways, key=lambda way: way.time_us)
                if way is not taken and way.time_us <= IN_CONTEXT_RATIO * taken.time_us
            ][:IN_CONTEXT_VARIANTS]
            share = sum(place.way.time_us for place in alike) / total if total else 0.0
            if not others or share < IN_CONTEXT_SHARE or time.perf_counter() > deadline:
                continue
            ways = [taken, *others]
            chains = [
                [(p.spec, way.plan if p.part.step is step else p.way.plan) for p in places]
                for way in ways
            ]
            times = self._bench.chain_times_us(
                self._graph.spec, chains, alike=share < IN_CONTEXT_LARGE_SHARE
            )
            if times is None:
                return
            for way, time_us in sorted(
                zip(ways[1:], times[1:], strict=True), key=lambda pair: pair[1]
            ):
                search = alike[0].region.search
                if time_us < IN_CONTEXT_GAIN * times[0] and search.check(step, way, self._checked):
                    for place in alike:
                        place.way = way
                    break

    def _decisions(self, place: _PlacedStep, first: int, number: int) -> tuple[Decision, ...]:
        if first != number:
            if ALIAS in place.part.step.lost:
                return (ALIAS,)
            return (Decision("all plans", True, f"as for step {first + 1}, which is equal"),)
        region = place.region
        decisions = region.search.decisions(place.part, place.way)
        if place.part is region.winner.runs.steps[0][0]:
            compared = of_cuts(region.winner, region.rivals)
            decisions = (*compared, *of_others(region.search, region.winner.runs), *decisions)
        return decisions
