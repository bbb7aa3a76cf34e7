"""Selection by measurement: every way to run every part of a graph that is worth trying, timed.

A part (a group of nodes, see :mod:`~cudnngraph.partition.cuts`) can run as one plan of cuDNN's
list, as a torch step where it is a single op, or as the parts of one of its cuts. Parts are
measured one by one; the fastest way to run the graph is the one whose parts take the least time
together. The winner's plans are checked against the reference executor; a wrong one is thrown out
and the choice made again.

Effort goes where it can matter: first every part's first plan, then more plans of a part while
twice their speed could still win, until the budget is spent.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from ..backend.plan import Candidate, Choice, Plan, Proposals, replay
from ..device.timing import HEAVY_US, measure
from ..errors import NotSupported
from ..executor.torch_steps import runs_whole
from ..ir.key import step_digest
from ..ir.spec import GraphSpec
from ..partition.cuts import Graph, Group, cuts, piece, regions, work
from ..policy import Policy
from ..rewrite.passes import channels_last, marked, prepared
from .dropout_probe import draws
from .heuristic import FREE, Decision, Selection, StepPlan, torch_only, why_apart
from .trial import Chain, Trial

TIE = 1.02  # within this factor the smaller workspace wins
HOPE = 2.0  # how much faster than its first plan a part's best plan may be
PATIENCE = 5  # plans in a row that are no gain, after which the rest of a list is left alone
GAIN = 0.98
CLOSE = 1.12  # ways to cut the graph within this factor are measured whole
FINALISTS = 1.08  # ways within this factor of a part's best are measured again, longer
FINAL_WAYS = 5
QUICK_ROUNDS, FINAL_ROUNDS = 5, 21
TRIALS_KEPT = 8  # steps whose random data stay on the GPU
PLACES = 4  # in memory, at which short kernels are compared
SPACER_BYTES = 11 << 20
IN_PLACE_WAYS = 3  # plans of a step that are timed with the whole graph around them,
IN_PLACE = 1.12  # those within this factor of the one that is fastest alone,
IN_PLACE_SHARE = 0.01  # of a step that takes this share of the graph's time,
IN_PLACE_LARGE = 0.1  # (with a plan for this share of it, graphs load the GPU differently)
IN_PLACE_BUDGETS = 4.0  # within this many budgets of an anchor;
IN_PLACE_GAIN = 0.997  # a plan has to bring the graph's time below this
ALIKE_ROUNDS, ALIKE = 11, 1.003  # of graphs that differ in one step; out at this factor


class Bench(Protocol):
    """Builds, times and checks plans; on a GPU :class:`GpuBench`."""

    def proposals(self, spec: GraphSpec) -> Any:
        """cuDNN's candidates with a ``build``, as :class:`~cudnngraph.backend.plan.Proposals`."""

    def times_us(
        self, spec: GraphSpec, plans: Sequence[Plan | None], rounds: int
    ) -> list[float | str]:
        """Time of each plan of a step (None: torch) side by side, or why it did not run."""

    def chain_times_us(
        self,
        spec: GraphSpec,
        chains: Sequence[Sequence[tuple[GraphSpec, Plan | None]]],
        *,
        alike: bool = False,
    ) -> list[float] | None:
        """Time of each chain of steps that runs ``spec``, side by side; None without memory.

        ``alike``: the chains differ in a small part of their work.
        """

    def close(self) -> None:
        """No more plans are asked for; those that were to be built ahead are not."""

    def why_wrong(self, spec: GraphSpec, plan: Plan) -> str | None:
        """What is wrong with what a plan does, or None."""

    def replay(self, spec: GraphSpec, choice: Choice) -> Plan:
        """The plan of a choice alone, to be kept."""


class GpuBench:
    """Trials on one GPU. Use it with that device current.

    Measurements hold ``alone()``, so that processes which tune on the same GPU at the same time
    take turns at it and only build in parallel.
    """

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._policy = policy
        self._device = device
        self._alone = alone
        stream: Any = torch.cuda.Stream
        self._stream: torch.cuda.Stream = stream(device)
        self._trials: OrderedDict[int, Trial] = OrderedDict()
        self._chain: tuple[GraphSpec, Chain] | None = None  # the whole graph that was timed last

    def proposals(self, spec: GraphSpec) -> Proposals:
        """See :class:`Bench`."""
        return Proposals(spec, self._policy, self._device.index, more=True)

    def _trial(self, spec: GraphSpec) -> Trial:
        found = self._trials.get(id(spec))
        if found is None:
            found = self._trials[id(spec)] = Trial(spec, self._policy, self._device)
        self._trials.move_to_end(id(spec))
        while len(self._trials) > TRIALS_KEPT:
            self._trials.popitem(last=False)
        return found

    def times_us(
        self, spec: GraphSpec, plans: Sequence[Plan | None], rounds: int
    ) -> list[float | str]:
        """See :class:`Bench`."""
        try:
            times = self._times_us(self._trial(spec), plans, rounds)
            if len(plans) == 1 or min(times) >= HEAVY_US:
                return list(times)
            # Where tensors lie moves a short kernel's time by some percent: so elsewhere too.
            taken: list[list[float]] = [times]
            kept: list[Any] = []
            for place in range(1, PLACES):
                kept.append(
                    torch.empty(place * SPACER_BYTES, dtype=torch.uint8, device=self._device)
                )
                kept.append(Trial(spec, self._policy, self._device))
                taken.append(self._times_us(kept[-1], plans, rounds))
            return [statistics.fmean(each) for each in zip(*taken, strict=True)]
        except torch.OutOfMemoryError:
            return ["out of memory"] * len(plans)

    def _times_us(self, trial: Trial, plans: Sequence[Plan | None], rounds: int) -> list[float]:
        launches = [trial.launch(plan) for plan in plans]
        with self._alone():
            return measure(launches, self._stream, rounds=rounds, quick=rounds == QUICK_ROUNDS)

    def chain_times_us(
        self,
        spec: GraphSpec,
        chains: Sequence[Sequence[tuple[GraphSpec, Plan | None]]],
        *,
        alike: bool = False,
    ) -> list[float] | None:
        """See :class:`Bench`."""
        try:
            if self._chain is None or self._chain[0] is not spec:
                self._chain = (spec, Chain(spec, self._policy, self._device))
            launches = [self._chain[1].launch(steps) for steps in chains]
            with self._alone():
                if alike:
                    return measure(
                        launches, self._stream, rounds=ALIKE_ROUNDS, drop_over=ALIKE, alike=True
                    )
                return measure(launches, self._stream, rounds=FINAL_ROUNDS, drop_over=FINALISTS)
        except torch.OutOfMemoryError:
            self._chain = None
            return None

    def close(self) -> None:
        """See :class:`Bench`."""

    def why_wrong(self, spec: GraphSpec, plan: Plan) -> str | None:
        """See :class:`Bench`."""
        try:
            return self._trial(spec).why_wrong(plan)
        except torch.OutOfMemoryError:
            return None  # it cannot be checked here; the plan itself needs less

    def replay(self, spec: GraphSpec, choice: Choice) -> Plan:
        """See :class:`Bench`."""
        return replay(spec, choice, self._device.index)


# -- parts -----------------------------------------------------------------------------------------


@dataclass
class _Way:
    """One way to run a step: a built plan, or torch for ``plan`` None."""

    rank: int
    plan: Plan | None
    choice: Choice | None
    workspace_bytes: int
    time_us: float
    final: bool = False  # measured again beside the fastest others, which alone compares them


@dataclass
class _Step:
    """The trials of one step; parts that are equal but for names share it."""

    spec: GraphSpec
    queue: list[Candidate] = field(default_factory=list)
    proposals: Any = None
    ways: list[_Way] = field(default_factory=list)
    lost: list[Decision] = field(default_factory=list)
    built: int = 0
    in_vain: int = 0
    compared: bool = False  # its fastest ways, side by side

    def add(self, way: _Way) -> None:
        """One more way; whatever was compared was not compared with it."""
        self.ways.append(way)
        self.compared = False
        for each in self.ways:
            each.final = False

    def best(self) -> _Way | None:
        """The fastest way, or one that is nearly as fast and needs less workspace."""
        ways = [way for way in self.ways if way.final] or self.ways
        if not ways:
            return None
        least = min(way.time_us for way in ways)
        near = [way for way in ways if way.time_us <= TIE * least]
        return min(near, key=lambda way: (way.workspace_bytes, way.time_us, way.rank))


@dataclass
class _Part:
    """A group of nodes, the step that it makes up, and its cuts."""

    spec: GraphSpec
    step: _Step
    cuts: tuple[tuple[_Part, ...], ...] = ()
    size: int = 1


@dataclass(frozen=True)
class _Assembly:
    """A way to run a part: its total time, and the steps in order."""

    time_us: float
    steps: tuple[tuple[_Part, _Way], ...]


@dataclass
class _Rival:
    """A way to cut the whole graph, with the fastest ways to run its parts."""

    label: str
    runs: _Assembly
    time_us: float = math.nan

    def __post_init__(self) -> None:
        self.time_us = self.runs.time_us

    @property
    def workspace_bytes(self) -> int:
        return max(way.workspace_bytes for _, way in self.runs.steps)


def _measured(time_us: float) -> float | None:
    """A time as it is recorded: None where nothing could be measured."""
    return time_us if math.isfinite(time_us) else None


def _decided(way: _Way, reason: str, *, accepted: bool = False) -> Decision:
    subject = "torch" if way.choice is None else str(way.choice)
    need, time_us = way.workspace_bytes, _measured(way.time_us)
    return Decision(subject, accepted, reason, way.choice, need, time_us)


def _joined(parts: Sequence[_Assembly]) -> _Assembly:
    """The parts one after the other."""
    return _Assembly(
        sum(each.time_us for each in parts), tuple(step for each in parts for step in each.steps)
    )


class _Search:
    """The tree of parts and what is known of them."""

    def __init__(self, policy: Policy, bench: Bench, steps: dict[str, _Step] | None = None) -> None:
        self._policy = policy
        self._bench = bench
        self._steps: dict[str, _Step] = {} if steps is None else steps  # by digest
        self._parts: dict[tuple[int, tuple[str, ...]], _Part] = {}
        self.order: list[_Part] = []
        self._why_left = ""

    # -- the tree ----------------------------------------------------------------------------------

    def part(self, graph: Graph, nodes: Group) -> _Part:
        """The part that ``nodes`` make up, with everything below it."""
        place = (id(graph), tuple(node.name for node in nodes))
        found = self._parts.get(place)
        if found is None:
            spec = piece(graph, nodes)
            step = self._steps.setdefault(step_digest(spec), _Step(spec))
            found = self._parts[place] = _Part(spec, step, size=len(nodes))
            if len(nodes) == 1 and graph.is_free(nodes[0]) and not step.ways:
                step.ways.append(_Way(0, None, None, 0, 0.0))
                step.lost.append(FREE)
            self.order.append(found)
            found.cuts = tuple(
                tuple(self.part(graph, group) for group in groups) for groups in cuts(graph, nodes)
            )
        return found

    def best(self, part: _Part, known: dict[int, _Assembly | None]) -> _Assembly | None:
        """The fastest way known to run a part."""
        if id(part) in known:
            return known[id(part)]
        options: list[_Assembly] = []
        way = part.step.best()
        if way is not None:
            options.append(_Assembly(way.time_us, ((part, way),)))
        for groups in part.cuts:
            below = [self.best(group, known) for group in groups]
            whole = [each for each in below if each is not None]
            if len(whole) == len(below):
                options.append(_joined(whole))
        # The first of equals: one plan before a cut, a coarse cut before a fine one.
        known[id(part)] = min(options, key=lambda each: each.time_us) if options else None
        return known[id(part)]

    # -- trials ------------------------------------------------------------------------------------

    def open(self, part: _Part) -> None:
        """Ask cuDNN for the candidates of a part, and time torch where it is a single op."""
        step = part.step
        if step.proposals is not None or step.ways or step.lost:
            return
        subject = f"'{step.spec.name}' as one plan"
        # Who wants one plan or none gets it, slow as it may be.
        why = None if self._policy.fallback == "error" else why_apart(step.spec)
        if why is None:
            try:
                step.proposals = self._bench.proposals(step.spec)
                step.queue = list(step.proposals.candidates)
            except NotSupported as refusal:
                step.lost += [Decision(subject, False, reason) for reason in refusal.reasons]
        else:
            step.lost.append(Decision(subject, False, why))
        if part.size == 1 or runs_whole(step.spec):
            (time_us,) = self._bench.times_us(step.spec, [None], QUICK_ROUNDS)
            time_us = math.inf if isinstance(time_us, str) else time_us
            if step.proposals is not None and draws(step.spec):
                time_us = math.inf  # torch drops others: forward and backward have to agree
            step.ways.append(_Way(1 << 20, None, None, 0, time_us))

    def advance(self, step: _Step) -> bool:
        """Build and time the next candidate; False when there is none left to try."""
        while step.queue:
            if step.built >= self._policy.max_candidates:
                reason = f"not tried: max_candidates={self._policy.max_candidates} were built"
                self.give_up(step, reason)
                return False
            if step.in_vain >= PATIENCE:
                self.give_up(step, f"not tried: the {PATIENCE} before it were no faster")
                return False
            candidate = step.queue.pop(0)
            outcome, plan = step.proposals.build(candidate)
            choice, need = candidate.choice, outcome.workspace_bytes
            if plan is None:
                step.lost.append(Decision(str(choice), False, outcome.reason, choice, need))
                continue
            step.built += 1
            (time_us,) = self._bench.times_us(step.spec, [plan], QUICK_ROUNDS)
            if isinstance(time_us, str):
                step.lost.append(Decision(str(choice), False, time_us, choice, need))
                continue
            least = min(
                (way.time_us for way in step.ways if way.plan is not None), default=math.inf
            )
            step.in_vain = 0 if time_us < GAIN * least else step.in_vain + 1
            step.add(_Way(step.built, plan, choice, plan.workspace_bytes, time_us))
            return True
        return False

    def give_up(self, step: _Step, reason: str) -> None:
        """Leave the remaining candidates of a step alone."""
        step.lost += [Decision(str(each.choice), False, reason, each.choice) for each in step.queue]
        step.queue = []

    def explore(self, roots: Sequence[_Part], deadline: float) -> Iterator[tuple[int, int]]:
        """Try plans until nothing can win any more or the time is up; yields (done, known)."""
        for part in self.order:  # all of them first: what builds elsewhere has begun then
            self.open(part)
        for part in self.order:
            self.advance(part.step)
            yield self.progress()
        while time.perf_counter() < deadline:
            chosen = self._most_promising(roots)
            if chosen is None:
                break
            self.advance(chosen)
            yield self.progress()
        late = time.perf_counter() >= deadline
        self._why_left = (
            f"not tried: the budget of {self._policy.budget_s:g} s was spent"
            if late
            else f"not tried: a plan {HOPE:g} times faster than the first would not win"
        )

    def _most_promising(self, roots: Sequence[_Part]) -> _Step | None:
        """Of the steps that could still make the graph faster, the one with most time to gain."""
        known: dict[int, _Assembly | None] = {}
        totals = [self.best(root, known) for root in roots]
        best_us = min((each.time_us for each in totals if each is not None), default=math.inf)
        open_steps: dict[int, tuple[float, _Step]] = {}
        for part in self.order:
            step = part.step
            way = step.best()
            if not step.queue or way is None:
                continue
            hoped = self._hoped(roots, part)
            if hoped < best_us:
                open_steps[id(step)] = (hoped, step)
        return min(open_steps.values(), key=lambda each: each[0])[1] if open_steps else None

    def _hoped(self, roots: Sequence[_Part], part: _Part) -> float:
        """The graph's time if this part had a plan ``HOPE`` times faster than its best one."""
        way = part.step.best()
        assert way is not None
        kept, way.time_us = way.time_us, way.time_us / HOPE
        try:
            known: dict[int, _Assembly | None] = {}
            totals = [self.best(root, known) for root in roots]
            using = [
                each.time_us
                for each in totals
                if each is not None and any(w is way for _, w in each.steps)
            ]
            return min(using, default=math.inf)
        finally:
            way.time_us = kept

    def progress(self) -> tuple[int, int]:
        """How many candidates were built, and how many might be."""
        steps = list(self._steps.values())
        done = sum(step.built for step in steps)
        limit = self._policy.max_candidates
        left = sum(min(len(step.queue), limit - step.built) for step in steps)
        return done, done + left

    # -- the choice --------------------------------------------------------------------------------

    def rivals(self, roots: Sequence[_Part]) -> list[_Rival]:
        """The best of every way to cut the graph at its root, that has one; coarse to fine."""
        known: dict[int, _Assembly | None] = {}
        found: list[_Rival] = []
        for root in roots:
            copies = "" if root is roots[0] else ", channels last"
            way = root.step.best()
            if way is not None:
                label = "torch" if way.plan is None else "one plan"
                found.append(_Rival(f"{label}{copies}", _Assembly(way.time_us, ((root, way),))))
            for groups in root.cuts:
                below = [self.best(group, known) for group in groups]
                whole = [each for each in below if each is not None]
                if len(whole) == len(below):
                    label = " | ".join(
                        " ".join(node.op for node in work(group.spec.nodes)) for group in groups
                    )
                    found.append(_Rival(f"steps {label}"[:300] + copies, _joined(whole)))
        return found

    def settle(self, spec: GraphSpec, roots: Sequence[_Part]) -> tuple[_Rival, list[_Rival]]:
        """The winner and all its rivals.

        Close ways to run a step are measured again, side by side; so are close ways to cut the
        graph, whole. The winner's plans are checked. Raises :class:`NotSupported` when every way to
        run the graph turned out wrong.
        """
        checked: set[int] = set()
        while True:
            rivals = self.rivals(roots)
            if not rivals:
                reasons = dict.fromkeys(lost.reason for root in roots for lost in root.step.lost)
                raise NotSupported(f"graph '{roots[0].spec.name}'", list(reasons))
            least = min(rival.time_us for rival in rivals)
            close = [rival for rival in rivals if rival.time_us <= CLOSE * least]
            steps = {id(part.step): part.step for each in close for part, _ in each.runs.steps}
            fresh = [step for step in steps.values() if not step.compared]
            if fresh:
                for step in fresh:
                    self._compare(step)
                    step.compared = True
                continue
            if len(close) > 1:
                chains = [
                    [(part.spec, way.plan) for part, way in rival.runs.steps] for rival in close
                ]
                times = self._bench.chain_times_us(spec, chains)
                for rival, time_us in zip(close, times or [], strict=False):
                    rival.time_us = time_us
                least = min(rival.time_us for rival in close)
            near = [rival for rival in close if rival.time_us <= TIE * least]
            winner = min(near, key=lambda rival: (rival.workspace_bytes, rival.time_us))
            if all([self.check(part.step, way, checked) for part, way in winner.runs.steps]):
                return winner, rivals

    def check(self, step: _Step, way: _Way, checked: set[int]) -> bool:
        """Whether a way does what it should; one that does not is thrown out."""
        if way.plan is None or id(way.plan) in checked:
            return True
        if way not in step.ways:  # another part of the same step has thrown it out
            return False
        why = self._bench.why_wrong(step.spec, way.plan)
        if why is None:
            checked.add(id(way.plan))
            return True
        step.ways.remove(way)
        step.lost.append(_decided(way, why))
        while step.queue and all(each.plan is None for each in step.ways):
            self.advance(step)  # the rest of the list is better than no plan
        return False

    def _compare(self, step: _Step) -> None:
        """Measure the fastest few ways of a step again, side by side; the others are out.

        A first time is that of one plan from rest, a final one may be under load: the two do not
        compare.
        """
        least = min((way.time_us for way in step.ways), default=0.0)
        near = sorted(
            (way for way in step.ways if way.time_us <= FINALISTS * least),
            key=lambda way: way.time_us,
        )[:FINAL_WAYS]
        if len(near) < 2 and least < HEAVY_US:
            return
        again = self._bench.times_us(step.spec, [way.plan for way in near], FINAL_ROUNDS)
        for way, time_us in zip(near, again, strict=True):
            if not isinstance(time_us, str):
                way.time_us, way.final = time_us, True

    def decisions(self, part: _Part, taken: _Way) -> tuple[Decision, ...]:
        """Everything that was considered for a step."""
        step = part.step
        self.give_up(step, self._why_left)
        made = []
        for way in sorted(step.ways, key=lambda way: way.time_us):
            ratio = way.time_us / taken.time_us if taken.time_us else math.inf
            reason = "as fast, with no less workspace"
            if way is taken or ratio > TIE:
                reason = (
                    "the fastest"
                    if way is taken
                    else f"{ratio:.2f} times the time of the one taken"
                )
            if taken.final and not way.final:
                reason = f"over {FINALISTS:g} times the fastest when first measured"
            made.append(_decided(way, reason, accepted=way is taken))
        return (*made, *step.lost)


Progress = Callable[[int, int], None]


def autotune(
    spec: GraphSpec, policy: Policy, bench: Bench, progress: Progress | None = None
) -> Selection:
    """Choose by measuring. ``progress(done, known)`` is told how many plans were built.

    Raises :class:`NotSupported` when cuDNN refuses and ``policy.fallback`` is "error".
    """
    assert torch_only(spec) is None, "there is nothing to measure"
    spec = marked(spec, policy.deterministic)
    search = _Search(policy, bench)
    if policy.fallback == "error":
        roots = [_whole(search, spec)]
        anchors = 1
    else:
        spec = prepared(spec)
        graphs = [Graph(spec)]
        borders = regions(graphs[0])
        if borders:
            return _Regions(graphs[0], borders, policy, bench).tuned(progress)
        other = channels_last(spec)
        if other is not spec:
            graphs.append(Graph(other))
        roots = [search.part(graph, work(graph.spec.nodes)) for graph in graphs]
        anchors = max(1, sum(map(graphs[0].is_anchor, work(spec.nodes))))
    deadline = time.perf_counter() + policy.budget_s * anchors
    for done, known in search.explore(roots, deadline):
        if progress is not None:
            progress(done, known)
    winner, rivals = search.settle(roots[0].spec, roots)
    bench.close()
    steps, built = [], []
    for number, (part, way) in enumerate(winner.runs.steps):
        decisions = search.decisions(part, way)
        if number == 0:
            compared = _of_cuts(winner, rivals)
            decisions = (*compared, *_of_others(search, winner.runs), *decisions)
        plan = None if way.choice is None else bench.replay(part.spec, way.choice)
        time_us = _measured(way.time_us)
        verified = None if plan is None else plan.verified
        steps.append(
            StepPlan(part.spec, way.choice, way.workspace_bytes, decisions, time_us, verified)
        )
        built.append(plan)
    return Selection(tuple(steps), tuple(built))


# -- large graphs ----------------------------------------------------------------------------------


@dataclass
class _Region:
    """A region that was searched: of all regions equal to it, the first.

    ``dense`` is the graph of its winner where that is not the region's own: it makes dense images
    and copies them to where they belong.
    """

    spec: GraphSpec
    dense: GraphSpec | None
    search: _Search
    winner: _Rival
    rivals: list[_Rival]


@dataclass
class _Place:
    """A step of the whole graph, the part that was searched for it, and the way that it takes."""

    spec: GraphSpec
    part: _Part
    way: _Way
    region: _Region


class _Regions:
    """A large graph, searched region by region; equal regions are searched once.

    What is chosen so is fast alone, in a warm cache. So in the end close plans of the steps that
    take most of the time are timed once more in their place, with the whole graph around them.
    """

    def __init__(
        self, graph: Graph, borders: Sequence[Group], policy: Policy, bench: Bench
    ) -> None:
        self._graph = graph
        self._borders = borders
        self._policy = policy
        self._bench = bench
        self._steps: dict[str, _Step] = {}
        self._replayed: dict[tuple[int, int], Plan] = {}
        self._checked: set[int] = set()

    def tuned(self, progress: Progress | None) -> Selection:
        """The choice. ``progress(done, known)`` is told how many plans were built."""
        regions = [(piece(self._graph, group), group) for group in self._borders]
        begun: dict[str, tuple[_Search, list[_Part]]] = {}
        for spec, group in regions:  # all of them first: what builds elsewhere has begun then
            digest = step_digest(spec)
            if digest not in begun:
                begun[digest] = self._begun(spec, group)
        found: dict[str, _Region] = {}
        places: list[_Place] = []
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
            way, plan = place.way, self._plan(place)
            verified = None if plan is None else plan.verified
            time_us = _measured(way.time_us)
            steps.append(
                StepPlan(place.spec, way.choice, way.workspace_bytes, decisions, time_us, verified)
            )
        return Selection(tuple(steps), tuple(self._plan(place) for place in places))

    def _begun(self, spec: GraphSpec, group: Group) -> tuple[_Search, list[_Part]]:
        """The search of a region and its roots, with every part opened."""
        search = _Search(self._policy, self._bench, self._steps)
        roots = [search.part(self._graph, group)]
        dense = channels_last(spec, spec.outputs)
        if dense is not spec:  # a slice of what is joined: written at once, or copied there
            graph = Graph(dense)
            roots.append(search.part(graph, work(graph.spec.nodes)))
        for part in search.order:
            search.open(part)
        return search, roots

    def _searched(
        self,
        spec: GraphSpec,
        group: Group,
        search: _Search,
        roots: Sequence[_Part],
        progress: Progress | None,
    ) -> _Region:
        anchors = max(1, sum(map(self._graph.is_anchor, group)))
        deadline = time.perf_counter() + self._policy.budget_s * anchors
        for done, known in search.explore(roots, deadline):
            if progress is not None:
                progress(done, known)
        winner, rivals = search.settle(roots[0].spec, roots)
        made = {name for part, _ in winner.runs.steps for name in part.spec.tensors}
        dense = None if made <= set(spec.tensors) else channels_last(spec, spec.outputs)
        return _Region(spec, dense, search, winner, rivals)

    def _placed(self, spec: GraphSpec, region: _Region) -> list[_Place]:
        """The steps of a region that is equal to one that was searched."""
        graph, searched = self._graph, region.spec
        if region.dense is not None:
            spec, searched = channels_last(spec, spec.outputs), region.dense
            graph = Graph(spec)
        like = {a.name: b for a, b in zip(searched.nodes, spec.nodes, strict=True)}
        return [
            _Place(
                piece(graph, [like[node.name] for node in work(part.spec.nodes)]),
                part,
                way,
                region,
            )
            for part, way in region.winner.runs.steps
        ]

    def _plan(self, place: _Place) -> Plan | None:
        """The plan of a step, replayed once for all steps that are equal."""
        if place.way.choice is None:
            return None
        key = (id(place.part.step), id(place.way))
        if key not in self._replayed:
            self._replayed[key] = self._bench.replay(place.spec, place.way.choice)
        return self._replayed[key]

    def _compare_in_place(self, places: Sequence[_Place]) -> None:
        """Give each step that matters the plan that makes the whole graph fastest."""
        total = sum(place.way.time_us for place in places)
        same: dict[int, list[_Place]] = {}
        for place in places:
            same.setdefault(id(place.part.step), []).append(place)
        deadline = time.perf_counter() + IN_PLACE_BUDGETS * self._policy.budget_s
        for alike in sorted(same.values(), key=lambda each: -sum(p.way.time_us for p in each)):
            taken, step = alike[0].way, alike[0].part.step
            others = [
                way
                for way in sorted(step.ways, key=lambda way: way.time_us)
                if way is not taken and way.time_us <= IN_PLACE * taken.time_us
            ][:IN_PLACE_WAYS]
            share = sum(place.way.time_us for place in alike) / total if total else 0.0
            if not others or share < IN_PLACE_SHARE or time.perf_counter() > deadline:
                continue
            ways = [taken, *others]
            chains = [
                [(p.spec, way.plan if p.part.step is step else p.way.plan) for p in places]
                for way in ways
            ]
            times = self._bench.chain_times_us(
                self._graph.spec, chains, alike=share < IN_PLACE_LARGE
            )
            if times is None:
                return
            for way, time_us in sorted(
                zip(ways[1:], times[1:], strict=True), key=lambda pair: pair[1]
            ):
                search = alike[0].region.search
                if time_us < IN_PLACE_GAIN * times[0] and search.check(step, way, self._checked):
                    for place in alike:
                        place.way = way
                    break

    def _decisions(self, place: _Place, first: int, number: int) -> tuple[Decision, ...]:
        if first != number:
            if FREE in place.part.step.lost:
                return (FREE,)
            return (Decision("all plans", True, f"as for step {first + 1}, which is equal"),)
        region = place.region
        decisions = region.search.decisions(place.part, place.way)
        if place.part is region.winner.runs.steps[0][0]:
            compared = _of_cuts(region.winner, region.rivals)
            decisions = (*compared, *_of_others(region.search, region.winner.runs), *decisions)
        return decisions


def _of_cuts(winner: _Rival, rivals: Sequence[_Rival]) -> list[Decision]:
    """The ways to cut the graph that were compared, and what each took."""
    if len(rivals) < 2:
        return []
    made = []
    for rival in rivals:
        taken = rival is winner
        ratio = rival.time_us / winner.time_us if winner.time_us else math.inf
        reason = "as fast, with no less workspace"
        if taken:
            reason = "the fastest way to cut it"
        elif ratio > TIE:
            reason = f"{ratio:.2f} times the time"
        need, time_us = rival.workspace_bytes, _measured(rival.time_us)
        made.append(Decision(rival.label, taken, reason, None, need, time_us))
    return made


def _whole(search: _Search, spec: GraphSpec) -> _Part:
    """The graph as one plan and nothing else. :class:`NotSupported` where there is none."""
    graph = Graph(spec)
    part = search.part(graph, work(spec.nodes))
    part.cuts = ()
    search.order[:] = [part]
    part.size = 2  # no torch step
    search.open(part)
    while part.step.queue and not part.step.ways:
        search.advance(part.step)
    if not part.step.ways:
        reasons = dict.fromkeys(decision.reason for decision in part.step.lost)
        raise NotSupported(f"graph '{spec.name}'", list(reasons))
    return part


def _of_others(search: _Search, winner: _Assembly) -> tuple[Decision, ...]:
    """What was refused, failed or was wrong in parts that are no step in the end."""
    mine = {id(part.step) for part, _ in winner.steps}
    others = {id(part.step): part.step for part in search.order if id(part.step) not in mine}
    return tuple(
        lost
        if lost.choice is None
        else replace(lost, subject=f"{lost.subject} for '{step.spec.name}'", choice=None)
        for step in others.values()
        for lost in step.lost
        if not lost.reason.startswith("not tried")
    )
