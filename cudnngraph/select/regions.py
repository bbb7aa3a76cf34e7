"""A large graph, searched region by region: equal regions once, close plans again in place."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..backend.plan import Plan
from ..ir.key import step_digest
from ..ir.spec import GraphSpec
from ..partition.analysis import CutGraph, Group, compute_nodes
from ..partition.cuts import subgraph_of
from ..policy import Policy
from ..rewrite.annotate import marked, marks
from ..rewrite.channels_last import with_dense_images
from .bench import Bench
from .config import (
    AT_ONCE,
    BUILT_TOGETHER,
    CLOSE_RATIO,
    EXPLORED_SHARE,
    IN_CONTEXT_AT_ONCE,
    IN_CONTEXT_BUDGETS,
    IN_CONTEXT_GAIN,
    IN_CONTEXT_LARGE_SHARE,
    IN_CONTEXT_LEFT,
    IN_CONTEXT_RATIO,
    IN_CONTEXT_SHARE,
    IN_CONTEXT_VARIANTS,
    KERNELS_OF,
    LEFT_SHARE,
    REGIONS_AHEAD,
    UNCOMPARED_SHARE,
)
from .cost import Floor, no_floor
from .decision import ALIAS, WHOLE_GRAPH, Decision, Hints, Selection, StepPlan
from .joining import joined
from .kernels import Kernels
from .search import Search, of_others
from .ways import Contender, Part, StepSearch, Variant, of_cuts, step_plan

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


@dataclass
class _Begun:
    """A region whose search has begun, and how many regions of the graph are equal to it."""

    spec: GraphSpec
    search: Search
    roots: Sequence[Part]
    anchors: int
    count: int = 0
    next: StepSearch | None = None  # whose plan is tried next, once that is known

    def us(self) -> float:
        """The time of all these regions, as far as it is known."""
        found = self.search.us(self.roots)
        return self.count * found if math.isfinite(found) else 0.0

    def gain_us(self, *, doubt: bool = False) -> float:
        """How much faster the graph may be by these regions."""
        return self.count * self.search.gain_us(self.roots, doubt=doubt)

    def promising(self) -> StepSearch | None:
        """The step whose next plan is worth most, or None."""
        if self.next is None or not (self.next.queue or self.next.kernels):
            self.next = self.search.most_promising(self.roots)
        return self.next


def _worth_comparing(begun: Iterable[_Begun]) -> set[int]:
    """The regions whose close ways are measured again: all but those of little time together."""
    listed = sorted(begun, key=_Begun.us)
    left = UNCOMPARED_SHARE * sum(each.us() for each in listed)
    found: set[int] = set()
    for each in listed:
        left -= each.us() * (1 - 1 / CLOSE_RATIO)
        if left < 0:
            found.add(id(each))
    return found


def _doubted(begun: Sequence[_Begun]) -> list[_Begun]:
    """Check the first plans because of which others are given up, where the graph might gain by
    those; return the regions of which one was wrong."""
    gains = {id(each): each.gain_us(doubt=True) for each in begun}
    found: list[_Begun] = []
    for each in sorted(begun, key=lambda each: -gains[id(each)]):
        if sum(gains.values()) <= LEFT_SHARE * sum(each.us() for each in begun):
            break
        if each.search.doubt(each.roots):
            found.append(each)
        gains[id(each)] = 0.0
    return found


def roots_of(search: Search, graph: CutGraph, spec: GraphSpec, group: Group) -> list[Part]:
    """A region as the parts of which one runs it: as it is, and with dense images."""
    roots = [search.part(graph, group)]
    dense = with_dense_images(spec)
    if dense is not spec:  # a slice of what is joined: written at once, or copied there
        other = CutGraph(dense)
        roots.append(search.part(other, compute_nodes(other.spec.nodes)))
    return roots


#: Places of equal steps, and other ways to run them that are nearly as fast.
_Close = tuple[list[_PlacedStep], list[Variant]]


def _close_in_place(places: Sequence[_PlacedStep]) -> Iterator[tuple[list[_Close], bool]]:
    """Yield the steps to compare in their place, as many as are timed side by side, the slowest
    first; and whether it is one that loads the GPU in its own way."""
    total = sum(place.way.time_us for place in places)
    same: dict[int, list[_PlacedStep]] = {}
    for place in places:
        same.setdefault(id(place.part.step), []).append(place)
    group: list[_Close] = []
    for step in sorted(same.values(), key=lambda each: -sum(p.way.time_us for p in each)):
        taken = step[0].way
        ways = [
            way
            for way in sorted(step[0].part.step.ways, key=lambda way: way.time_us)
            if way is not taken and way.time_us <= IN_CONTEXT_RATIO * taken.time_us
        ][:IN_CONTEXT_VARIANTS]
        share = sum(place.way.time_us for place in step) / total if total else 0.0
        if not ways or share < IN_CONTEXT_SHARE:
            continue
        if share >= IN_CONTEXT_LARGE_SHARE:
            yield [(step, ways)], True
            continue
        if sum(len(each) for _, each in group) + len(ways) > IN_CONTEXT_AT_ONCE:
            yield group, False
            group = []
        group.append((step, ways))
    if group:
        yield group, False


class RegionSearch:
    """A large graph, searched region by region; equal regions are searched once.

    The search goes on where the whole graph may gain most, and ends when it may gain little. A plan
    chosen so is fast alone, in a warm cache. So close plans of the slowest steps are timed once
    more in the end, in their place, with the whole graph around them.
    """

    def __init__(
        self,
        graph: CutGraph,
        borders: Sequence[Group],
        policy: Policy,
        bench: Bench,
        kernels: Kernels | None,
        hints: Hints | None = None,
        floor: Floor = no_floor,
        *,
        brief: bool = False,
        ends: float = math.inf,
    ) -> None:
        self._ends = ends
        self._hints = hints
        self._floor = floor
        self._brief = brief
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
        begun: dict[str, _Begun] = {}
        for spec, group in regions:
            digest = step_digest(spec)
            if digest not in begun:
                begun[digest] = self._begun(spec, group)
            begun[digest].count += 1
        for told in self._explored(list(begun.values())):
            if progress is not None:
                progress(*told)
        self._bench.close()  # what is built ahead by now is not worth the wait
        found: dict[str, _Region] = {}
        compared = _worth_comparing(begun.values())
        places: list[_PlacedStep] = []
        for spec, _ in regions:
            digest = step_digest(spec)
            if digest not in found:
                each = begun[digest]
                found[digest] = self._settled(each, compare=id(each) in compared)
            places += self._placed(spec, found[digest])
        self._bench.close()
        if not self._brief:
            self._compare_in_place(places)
        steps: list[StepPlan] = []
        first_of: dict[int, int] = {}
        for number, place in enumerate(places):
            decisions = self._decisions(place, first_of.setdefault(id(place.part), number), number)
            if number == 0:
                kinds, count = len(found), len(self._borders)
                reason = f"cut at its anchors into {count} regions, {kinds} of them different"
                decisions = (Decision(WHOLE_GRAPH, True, reason), *decisions)
            steps.append(step_plan(place.spec, place.way, self._plan(place), decisions))
        dense = tuple(
            tuple(node.name for node in group)
            for spec, group in regions
            if found[step_digest(spec)].dense is not None
        )
        built = [self._plan(place) for place in places]
        if self._kernels is not None:
            best = Search(self._policy, self._bench, None, self._steps).known
            bench, ends = self._bench, self._ends
            steps, built = joined(
                self._graph, steps, built, self._kernels, bench, best, brief=self._brief, ends=ends
            )
        return Selection(tuple(steps), tuple(built), dense=dense)

    def _begun(self, spec: GraphSpec, group: Group) -> _Begun:
        """The search of a region and its roots, none of them opened yet."""
        search = Search(
            self._policy,
            self._bench,
            self._kernels,
            self._steps,
            self._hints,
            self._floor,
            self._ends,
        )
        roots = roots_of(search, self._graph, spec, group)
        anchors = max(1, sum(map(self._graph.is_anchor, group)))
        return _Begun(spec, search, roots, anchors)

    def _explored(self, begun: Sequence[_Begun]) -> Iterator[tuple[int, int]]:
        """Search all regions, that first in which the graph may gain most, until it may gain
        little; yields (done, known)."""
        budget_s = self._policy.budget_s * sum(each.anchors for each in begun)
        now = time.perf_counter()
        deadline = now + min(budget_s, EXPLORED_SHARE * (self._ends - now))
        known = {id(each): each for each in begun}
        roots = [root for each in begun for root in each.roots]
        yield from self._started(begun, roots, deadline)
        gains = {id(each): each.gain_us() for each in begun}
        times = {id(each): each.us() for each in begun}
        while time.perf_counter() < deadline:
            if sum(gains.values()) <= LEFT_SHARE * sum(times.values()):
                # Regions share steps: one may have become faster by the search of another.
                times = {id(each): each.us() for each in begun}
                gains = {key: gain and known[key].gain_us() for key, gain in gains.items()}
                if sum(gains.values()) <= LEFT_SHARE * sum(times.values()):
                    doubted = _doubted(begun)
                    if not doubted:
                        break
                    again = [part for each in begun for part in each.search.unstarted(each.roots)]
                    yield from self._started(begun, again, deadline)
                    gains.update((id(each), each.gain_us()) for each in doubted)
                    continue
            some = [known[key] for key, gain in gains.items() if gain > 0]
            chosen = self._of_most_worth(some, gains, LEFT_SHARE * sum(times.values()))
            for each, _ in chosen:
                gains[id(each)], times[id(each)] = each.gain_us(), each.us()
            if chosen:
                yield chosen[0][0].search.progress()
        for each in begun:
            each.search.stop(each.roots, deadline)

    def _of_most_worth(
        self, begun: Sequence[_Begun], gains: dict[int, float], enough_us: float
    ) -> list[tuple[_Begun, StepSearch]]:
        """Try a plan of the regions in which the graph may gain most, of which some are built while
        others are timed; return these regions and steps. Those that could gain ``enough_us``
        together at most are left alone."""
        worth: dict[int, tuple[_Begun, StepSearch]] = {}
        left_us = sum(gains.values())
        for each in sorted(begun, key=lambda each: -gains[id(each)]):
            if left_us <= enough_us or len(worth) == REGIONS_AHEAD:
                break  # the others need not be tried at all, as it seems now
            left_us -= gains[id(each)]
            step = each.promising()
            if step is None:  # nothing by itself
                gains[id(each)] = 0.0
            else:
                worth.setdefault(id(step), (each, step))
        wanted = list(worth.values())
        for _, step in wanted:
            self._bench.ahead(step.spec, BUILT_TOGETHER + 1)
        if wanted and wanted[0][1].kernels:
            tried = [each for each in wanted if each[1].kernels][:KERNELS_OF]
        else:
            there = [each for each in wanted if each[0].search.ready(each[1])]
            tried = there[:AT_ONCE] or wanted[:1]
        if tried:
            tried[0][0].search.advance([step for _, step in tried])
        for each, _ in tried:
            each.next = None
        return tried

    def _started(
        self, begun: Sequence[_Begun], parts: list[Part], deadline: float
    ) -> Iterator[tuple[int, int]]:
        """Start parts, then all that may be steps of the fastest way, those first in whose regions
        the graph may gain most; yields (done, known). Once it is late only what is owed is started.

        What is asked for and built elsewhere is that of all regions at a time.
        """
        owed = True
        while parts:
            for told in begun[0].search.start(parts):
                yield told
                if not owed and time.perf_counter() >= deadline:
                    break
            owed = time.perf_counter() >= deadline
            by_gain = sorted(begun, key=lambda each: -each.gain_us())
            parts = [
                part
                for each in by_gain
                for part in (each.search.owed if owed else each.search.unstarted)(each.roots)
            ]

    def _settled(self, begun: _Begun, *, compare: bool) -> _Region:
        spec = begun.spec
        winner, rivals = begun.search.settle(begun.roots[0].spec, begun.roots, compare=compare)
        made = {name for part, _ in winner.runs.steps for name in part.spec.tensors}
        dense = None if made <= set(spec.tensors) else with_dense_images(spec)
        return _Region(spec, dense, begun.search, winner, rivals)

    def _placed(self, spec: GraphSpec, region: _Region) -> list[_PlacedStep]:
        """The steps of a region that is equal to one that was searched."""
        graph, searched = self._graph, region.spec
        if region.dense is not None:
            spec, searched = with_dense_images(spec), region.dense
            graph = CutGraph(spec)
        like = {a.name: b for a, b in zip(searched.nodes, spec.nodes, strict=True)}
        return [
            _PlacedStep(
                marked(
                    subgraph_of(
                        graph, [like[node.name] for node in compute_nodes(part.spec.nodes)]
                    ),
                    marks(part.spec),
                ),
                part,
                way,
                region,
            )
            for part, way in region.winner.runs.steps
        ]

    def _plan(self, place: _PlacedStep) -> Plan | None:
        """The plan of a step, replayed once for all steps that are equal; none for a search whose
        times alone are asked for."""
        if place.way.choice is None or self._brief:
            return None
        key = (id(place.part.step), id(place.way))
        if key not in self._replayed:
            self._replayed[key] = self._bench.replay(place.spec, place.way.choice)
        return self._replayed[key]

    def _compare_in_place(self, places: Sequence[_PlacedStep]) -> None:
        """Give each step that matters the plan that makes the whole graph fastest."""
        now = time.perf_counter()
        budget_s = IN_CONTEXT_BUDGETS * self._policy.budget_s
        deadline = now + min(budget_s, IN_CONTEXT_LEFT * (self._ends - now))
        for group, alone in _close_in_place(places):
            if time.perf_counter() > deadline:
                return
            tried = [(step, way) for step, ways in group for way in ways]
            chains = [[(place.spec, place.way.plan) for place in places]]
            for step, way in tried:
                mine = id(step[0].part.step)
                chains.append(
                    [(p.spec, (way if id(p.part.step) == mine else p.way).plan) for p in places]
                )
            times = self._bench.chain_times_us(self._graph.spec, chains, alike=not alone)
            if times is None:
                return
            found = sorted(zip(times[1:], tried, strict=True), key=lambda each: each[0])
            done: set[int] = set()
            for time_us, (step, way) in found:
                searched, search = step[0].part.step, step[0].region.search
                if id(searched) in done or time_us >= IN_CONTEXT_GAIN * times[0]:
                    continue
                if search.check(searched, way, self._checked):
                    done.add(id(searched))
                    for place in step:
                        place.way = way

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
