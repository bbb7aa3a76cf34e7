"""Selection by measurement: every way to run every part of a graph that is worth trying, timed.

A part (a group of nodes, see :mod:`~cudnngraph.partition.cuts`) can run as one plan of cuDNN's
list, as a torch step where it is a single op, or as the parts of one of its cuts. Parts are
measured one by one; the fastest way to run the graph is the one whose parts take the least time
together. The winner's plans are checked against the reference executor; a wrong one is thrown out
and the choice made again.

Effort goes where it can matter: first the first plan of every part that could win, then more plans
of a part while twice their speed could still win. It ends when the graph could gain little, or the
budget is spent. No part is given up because of a first plan that is wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..backend.candidates import UNRANKED, Candidate
from ..backend.plan import KERNEL, Choice, Plan
from ..device.import_rules import Stage
from ..device.timing import HEAVY_US
from ..errors import NotSupported
from ..executor.linear import runs_whole
from ..ir.key import step_digest
from ..ir.spec import GraphSpec
from ..partition.analysis import CutGraph, Group, compute_nodes
from ..partition.cuts import cuts, subgraph_of
from ..policy import Policy
from ..rewrite.alternatives import of_step
from ..rewrite.annotate import marks
from .bench import Bench
from .config import (
    AT_ONCE,
    BUILT_AHEAD,
    CLOSE_RATIO,
    FINAL_ROUNDS,
    FINAL_VARIANTS,
    FINALIST_RATIO,
    LEFT_SHARE,
    MAX_EXPECTED_SPEEDUP,
    MIN_GAIN,
    PATIENCE,
    PRUNED_OVER,
    QUICK_ROUNDS,
    TIE_RATIO,
)
from .cost import Floor, is_slow, no_floor
from .decision import ALIAS, Decision, Hints
from .dropout_probe import has_seeded_dropout
from .kernels import Kernels
from .rules import why_never_one, why_split
from .ways import Contender, Part, Schedule, StepSearch, Variant, decided, in_turn


def hinted_first(candidates: Sequence[Candidate], hints: Mapping[Choice, str]) -> list[Candidate]:
    """The candidates, behind those that hints name, whether cuDNN ranks them here or not; those
    that are predicted to be slow are last."""
    ranked = {candidate.choice: candidate for candidate in candidates}
    wanted = [choice for choice in hints if choice.engine != KERNEL]
    first = [ranked.get(choice) or Candidate(UNRANKED, choice, str(choice)) for choice in wanted]
    others = (each for each in candidates if each.choice not in hints)
    return [*first, *sorted(others, key=is_slow)]


class Search:
    """The tree of parts and what is known of them."""

    def __init__(
        self,
        policy: Policy,
        bench: Bench,
        kernels: Kernels | None = None,
        steps: dict[str, StepSearch] | None = None,
        hints: Hints | None = None,
        floor: Floor = no_floor,
        ends: float = math.inf,
    ) -> None:
        self._ends = ends
        self._hints = hints or {}
        self._floor = floor
        self._policy = policy
        self._bench = bench
        self._kernels = kernels
        self._steps: dict[str, StepSearch] = {} if steps is None else steps  # by digest
        self._parts: dict[tuple[int, tuple[str, ...]], Part] = {}
        self.order: list[Part] = []
        self._why_left = ""
        # Of a search that has stopped: the time when it had to, and the plans that were wrong.
        self._deadline, self._thrown = math.inf, 0

    def part(self, graph: CutGraph, nodes: Group) -> Part:
        """The part that ``nodes`` make up, with everything below it."""
        place = (id(graph), tuple(node.name for node in nodes))
        found = self._parts.get(place)
        if found is None:
            spec = subgraph_of(graph, nodes)
            step = self._step(spec)
            found = self._parts[place] = Part(spec, step, size=len(nodes))
            if len(nodes) == 1 and graph.is_free(nodes[0]) and not step.ways:
                step.floor_us = 0.0
                step.ways.append(Variant(0, None, None, 0, 0.0))
                step.lost.append(ALIAS)
            self.order.append(found)
            others = () if ALIAS in step.lost else of_step(spec)
            found.cuts = (
                *(
                    tuple(self.part(graph, group) for group in groups)
                    for groups in cuts(graph, nodes)
                ),
                *((self._other(form, len(nodes), by),) for by, form in others),
            )
        return found

    def _other(self, spec: GraphSpec, size: int, by: Stage) -> Part:
        """A part as another threshold has it."""
        made = Part(spec, self._step(spec), size=size, by=by)
        self.order.append(made)
        return made

    def _step(self, spec: GraphSpec) -> StepSearch:
        digest = step_digest(spec)
        if digest not in self._steps:
            hints = self._hints.get(digest, {})
            self._steps[digest] = StepSearch(spec, hints, floor_us=self._floor(spec))
        return self._steps[digest]

    def best(self, part: Part, known: dict[int, Schedule | None]) -> Schedule | None:
        """The fastest way known to run a part."""
        if id(part) in known:
            return known[id(part)]
        options: list[Schedule] = []
        way = part.step.best()
        if way is not None:
            options.append(Schedule(way.time_us, ((part, way),)))
        for groups in part.cuts:
            below = [self.best(group, known) for group in groups]
            whole = [each for each in below if each is not None]
            if len(whole) == len(below):
                options.append(in_turn(whole))
        # The first of equals: one plan before a cut, a coarse cut before a fine one.
        known[id(part)] = min(options, key=lambda each: each.time_us) if options else None
        return known[id(part)]

    # -- trials ------------------------------------------------------------------------------------

    def _why_never(self, part: Part) -> str | None:
        """Why a part is no plan of cuDNN's; with fallback="error" it is one or nothing."""
        return None if self._policy.fallback == "error" else why_never_one(part.spec)

    def expect(self, parts: Sequence[Part]) -> None:
        """Say which parts will be opened, so that cuDNN can be asked for several at a time."""
        steps = {
            id(part.step): part.step.spec
            for part in parts
            if not (part.step.opened or part.step.ways or part.by == "torch")
            and self._why_never(part) is None
        }
        self._bench.expect(list(steps.values()))

    def open(self, parts: Sequence[Part]) -> None:
        """Ask cuDNN for the candidates of parts, and time torch where they are single ops."""
        asked = [part for part in parts if self._asked(part)]
        for at in range(0, len(asked), AT_ONCE):
            with self._bench.alone():
                for part in asked[at : at + AT_ONCE]:
                    self._time_torch(part)

    def _asked(self, part: Part) -> bool:
        """Ask cuDNN for the candidates of a part, unless it was asked before."""
        step = part.step
        if step.opened or step.ways:
            return False
        step.opened = True
        subject = f"'{step.spec.name}' as one plan"
        why = self._why_never(part)
        if part.by == "torch":
            pass
        elif why is None:
            try:
                step.proposals = self._bench.proposals(step.spec)
                step.queue = hinted_first(step.proposals.candidates, step.hints)
            except NotSupported as refusal:
                step.lost += [Decision(subject, False, reason) for reason in refusal.reasons]
        else:
            step.lost.append(Decision(subject, False, why))
        return True

    def _time_torch(self, part: Part) -> None:
        step = part.step
        if part.by != "cudnn" and (part.size == 1 or runs_whole(step.spec)):
            (time_us,) = self._bench.times_us(step.spec, [None], QUICK_ROUNDS)
            time_us = math.inf if isinstance(time_us, str) else time_us
            if step.proposals is not None and has_seeded_dropout(step.spec):
                time_us = math.inf  # torch drops others: forward and backward have to agree
            step.ways.append(Variant(1 << 20, None, None, 0, time_us))

    def try_kernels(self, parts: Sequence[Part]) -> None:
        """Build, check and time the generated kernel by rule of each part, several at a time."""
        if self._kernels is None:
            return
        asked: list[tuple[StepSearch, Choice]] = []
        for step in {id(part.step): part.step for part in parts if not part.by}.values():
            if step.kernels is None and ALIAS not in step.lost:
                found = self._kernels.choices(step.spec)
                first = [choice for choice in step.hints if choice in found] + found[:1]
                found = list(dict.fromkeys([*first, *found]))[: self._policy.max_candidates]
                count = len(set(first))
                step.kernels = found[count:]
                asked += [(step, choice) for choice in found[:count]]
        self._try(asked)

    def _try(self, asked: Sequence[tuple[StepSearch, Choice]]) -> None:
        """Build, check and time generated kernels, several at a time."""
        built = self._bench.kernels([(step.spec, choice) for step, choice in asked])
        made = list(zip(asked, built, strict=True))
        for at in range(0, len(made), AT_ONCE):
            with self._bench.alone():
                for (step, choice), plan in made[at : at + AT_ONCE]:
                    self._try_kernel(step, choice, plan)

    def _try_kernel(self, step: StepSearch, choice: Choice, plan: Plan | str) -> None:
        took: float | str = plan if isinstance(plan, str) else 0.0
        if not isinstance(plan, str):
            (took,) = self._bench.times_us(step.spec, [plan], QUICK_ROUNDS)
        if isinstance(plan, str) or isinstance(took, str):
            step.lost.append(Decision(str(choice), False, str(took), choice))
        else:
            self._count("kernels measured")
            step.add(Variant(0, plan, choice, plan.workspace_bytes, took))

    def advance(self, steps: Sequence[StepSearch], *, first: bool = False) -> None:
        """Build and time the next candidate of cuDNN's of each step, or but for the ``first`` time
        all schedules of its generated kernel."""
        asked: list[tuple[StepSearch, Choice]] = []
        left: list[StepSearch] = []
        for step in steps:
            if step.kernels and not first:
                asked += [(step, choice) for choice in step.kernels]
                step.kernels = []
            else:
                left.append(step)
        if asked:
            self._try(asked)
        while left:
            built = [(step, plan) for step in left if (plan := self._next(step)) is not None]
            with self._bench.alone():
                left = [step for step, plan in built if not self._timed(step, plan)]
        for step in steps:
            self._bench.effort.tell(step.told)

    def _next(self, step: StepSearch) -> Plan | None:
        """The next of a step's plans that builds; None when there is none left to try."""
        while step.queue:
            if step.built >= self._policy.max_candidates:
                reason = f"not tried: max_candidates={self._policy.max_candidates} were built"
                self.give_up(step, reason)
                return None
            if step.in_vain >= PATIENCE:
                self.give_up(step, f"not tried: the {PATIENCE} before it were no faster")
                return None
            slow = is_slow(step.queue[0]) and step.queue[0].choice not in step.hints
            if slow and step.plans():
                self.give_up(
                    step, f"not tried: predicted to take over {PRUNED_OVER:g} of the least"
                )
                return None
            candidate = step.queue.pop(0)
            outcome, plan = step.proposals.build(candidate)
            self._count("plans refused" if plan is None else "plans built")
            if plan is not None:
                step.built += 1
                return plan  # type: ignore[no-any-return]
            choice, need = candidate.choice, outcome.workspace_bytes
            step.lost.append(Decision(str(choice), False, outcome.reason, choice, need))
        return None

    def _count(self, what: str) -> None:
        self._bench.effort.counts[what] += 1

    def _timed(self, step: StepSearch, plan: Plan) -> bool:
        """Time a plan; whether it is a way to run the step."""
        (time_us,) = self._bench.times_us(step.spec, [plan], QUICK_ROUNDS)
        choice, need = plan.choice, plan.workspace_bytes
        if isinstance(time_us, str):
            step.lost.append(Decision(str(choice), False, time_us, choice, need))
            return False
        least = min((way.time_us for way in step.ways if way.plan is not None), default=math.inf)
        step.in_vain = 0 if time_us < MIN_GAIN * least else step.in_vain + 1
        right = self._bench.passed(step.spec, plan)
        step.add(Variant(step.built, plan, choice, need, time_us, right=right))
        return True

    def ready(self, step: StepSearch) -> bool:
        """Whether the next plan of a step is there, without a wait."""
        return bool(step.queue) and self._bench.ready(step.spec, step.queue[0].choice)

    def give_up(self, step: StepSearch, reason: str) -> None:
        """Leave the remaining candidates of a step alone."""
        left = [*(each.choice for each in step.queue), *(step.kernels or ())]
        step.lost += [Decision(str(choice), False, reason, choice) for choice in left]
        step.queue, step.kernels = [], step.kernels and []

    def start(self, parts: Sequence[Part]) -> Iterator[tuple[int, int]]:
        """Try the first plan of each part, and its kernel by rule; yields (done, known).

        Plans are timed as they come: of several parts at a time, the next built meanwhile.
        """
        fresh = [part for part in parts if not part.step.started]
        self.expect(fresh)
        self.open(fresh)  # all of them first: what builds elsewhere has begun then
        self.try_kernels(fresh)
        left = list({id(part.step): part.step for part in fresh}.values())
        while left:
            now = [step for step in left if not step.queue or self.ready(step)][:AT_ONCE]
            now = now or left[:1]
            for step in now:
                step.started = True
            self.advance(now, first=True)
            left = [step for step in left if not step.started]
            yield self.progress()

    def widen(self, roots: Sequence[Part]) -> Iterator[tuple[int, int]]:
        """Start every part that may be a step of the fastest way, as far as that is known."""
        while True:
            parts = self.owed(roots) if self._is_late() else self.unstarted(roots)
            if not parts:
                return
            yield from self.start(parts)

    def unstarted(self, roots: Sequence[Part]) -> list[Part]:
        """The parts of which nothing was tried, and that may be steps of the fastest way."""
        return [part for part in self.hopeful(roots) if not part.step.started]

    def owed(self, roots: Sequence[Part]) -> list[Part]:
        """The parts that are started however late it is: those of a graph that nothing runs yet,
        and those that a choice by rules would take."""
        if not math.isfinite(self.us(roots)):
            return self.unstarted(roots)
        by_rules = (part for root in roots for part in by_rule(root))
        return [part for part in by_rules if not part.step.started]

    def _is_late(self) -> bool:
        return time.perf_counter() >= self._deadline or self.over()

    def over(self) -> bool:
        """Whether all the time is spent that the whole may take."""
        return time.perf_counter() >= self._ends

    def explore(self, roots: Sequence[Part], deadline: float) -> Iterator[tuple[int, int]]:
        """Try plans until little can be gained or the time is up; yields (done, known)."""
        self.expect(self.order)
        self.open(self.order)
        yield from self.start(roots)
        yield from self.widen(roots)
        while time.perf_counter() < deadline:
            if not self._tried(roots, LEFT_SHARE * self.us(roots)):
                if not self.doubt(roots):
                    break
                yield from self.widen(roots)
            yield self.progress()
        self.stop(roots, deadline)

    def _tried(self, roots: Sequence[Part], enough_us: float) -> bool:
        """Try the plan that is worth most, if the graph could gain more than ``enough_us`` and
        there is one."""
        chosen = self.most_promising(roots) if self.gain_us(roots) > enough_us else None
        if chosen is not None:
            self._bench.ahead(chosen.spec, BUILT_AHEAD)
            self.advance([chosen])
        return chosen is not None

    def _reopened(self, roots: Sequence[Part]) -> bool:
        """Go on with a search that stopped because of a plan which turned out wrong since."""
        wrong = self._thrown_out() > self._thrown
        return wrong and self._tried(roots, LEFT_SHARE * self.us(roots))

    def _thrown_out(self) -> int:
        return sum(step.thrown_out for step in {id(p.step): p.step for p in self.order}.values())

    def stop(self, roots: Sequence[Part], deadline: float) -> None:
        """Note why no more plans are tried."""
        self._deadline, self._thrown = deadline, self._thrown_out()
        late = self._is_late()
        self._why_left = f"not tried: the graph could gain under {LEFT_SHARE:.0%} of its time"
        if late and self.over():
            self._why_left = f"not tried: the {self._policy.total_s:g} s for the whole were spent"
        elif late:
            self._why_left = f"not tried: the budget of {self._policy.budget_s:g} s was spent"
        elif self.gain_us(roots) > LEFT_SHARE * self.us(roots):
            self._why_left = (
                f"not tried: a plan {MAX_EXPECTED_SPEEDUP:g} times faster than the first "
                "would not win"
            )

    # -- what may be gained ------------------------------------------------------------------------

    def us(self, roots: Sequence[Part]) -> float:
        """The time of the fastest way that is known."""
        known: dict[int, Schedule | None] = {}
        totals = [self.best(root, known) for root in roots]
        return min((each.time_us for each in totals if each is not None), default=math.inf)

    def gain_us(self, roots: Sequence[Part], *, doubt: bool = False) -> float:
        """How much faster the graph would be if every plan were as fast as may be hoped."""
        known: dict[int, float] = {}
        now = self.us(roots)
        least = min(self._least_us(root, known, doubt) for root in roots)
        return now - least if math.isfinite(now) else 0.0

    def _hoped_us(self, step: StepSearch, doubt: bool = False) -> float:
        """The time that a step's plans which are left to try may take at best.

        In ``doubt`` a first plan that was not checked says nothing of the others.
        """
        way = step.best()
        if not step.started or (doubt and step.unfounded()):
            return step.floor_us
        if way is None:
            return step.floor_us if step.queue or step.kernels else math.inf
        if not (step.queue or step.kernels):
            return way.time_us
        return min(way.time_us, max(step.floor_us, way.time_us / MAX_EXPECTED_SPEEDUP))

    def _least_us(self, part: Part, known: dict[int, float], doubt: bool) -> float:
        """The time that the fastest way to run a part may take at best."""
        if id(part) not in known:
            below = (
                sum(self._least_us(each, known, doubt) for each in groups) for groups in part.cuts
            )
            known[id(part)] = min(self._hoped_us(part.step, doubt), *below, math.inf)
        return known[id(part)]

    def hopeful(self, roots: Sequence[Part], *, doubt: bool = False) -> list[Part]:
        """The parts that may be steps of a way that is faster than the fastest known."""
        known: dict[int, float] = {}
        most: dict[int, float] = {}  # the time that a part may take

        def visit(part: Part, us: float) -> None:
            if most.get(id(part), -1.0) >= us:
                return
            most[id(part)] = us
            for groups in part.cuts:
                below = [self._least_us(each, known, doubt) for each in groups]
                total = sum(below)
                if total < us:
                    for each, least in zip(groups, below, strict=True):
                        visit(each, us - (total - least))

        for root in roots:
            visit(root, self.us(roots))
        return [
            part
            for part in self.order
            if self._hoped_us(part.step, doubt) < most.get(id(part), 0.0)
        ]

    def doubt(self, roots: Sequence[Part]) -> bool:
        """Check the first plans because of which others are given up, until one of them is wrong.

        Return whether one was, which is thrown out then: the search has to go on.
        """
        while self.gain_us(roots, doubt=True) > LEFT_SHARE * self.us(roots):
            parts = self.hopeful(roots, doubt=True)
            step = next((p.step for p in parts if p.step.started and p.step.unfounded()), None)
            if step is None:
                return False
            first = next(iter(step.plans()), None)
            if first is None:
                self.advance([step])
                return True
            if not self.check(step, first, set()):
                return True
        return False

    def most_promising(self, roots: Sequence[Part]) -> StepSearch | None:
        """Return the step with most time to gain, among those that could make the graph faster."""
        best_us = self.us(roots)
        open_steps: dict[int, tuple[float, StepSearch]] = {}
        for part in self.order:
            step = part.step
            if not step.started or not (step.queue or step.kernels) or step.best() is None:
                continue
            hoped = self._with_hope(roots, part)
            if hoped < best_us:
                open_steps[id(step)] = (hoped, step)
        return min(open_steps.values(), key=lambda each: each[0])[1] if open_steps else None

    def _with_hope(self, roots: Sequence[Part], part: Part) -> float:
        """The graph's time if this part's best plan were as fast as it could be."""
        way = part.step.best()
        assert way is not None
        kept, way.time_us = way.time_us, self._hoped_us(part.step)
        try:
            known: dict[int, Schedule | None] = {}
            totals = [self.best(root, known) for root in roots]
            using = [
                each.time_us
                for each in totals
                if each is not None and any(w is way for _, w in each.steps)
            ]
            return min(using, default=math.inf)
        finally:
            way.time_us = kept

    def known(self, spec: GraphSpec) -> Variant | None:
        """The fastest way that was measured of a step, whatever part it is of."""
        step = self._steps.get(step_digest(spec))
        return None if step is None else step.best()

    def progress(self) -> tuple[int, int]:
        """Return how many candidates were built, and how many might be."""
        steps = list(self._steps.values())
        done = sum(step.built for step in steps)
        limit = self._policy.max_candidates
        left = sum(min(len(step.queue), limit - step.built) for step in steps)
        return done, done + left

    # -- the choice --------------------------------------------------------------------------------

    def rivals(self, roots: Sequence[Part]) -> list[Contender]:
        """The best of every way to cut the graph at its root, that has one; coarse to fine."""
        known: dict[int, Schedule | None] = {}
        found: list[Contender] = []
        for root in roots:
            copies = "" if root is roots[0] else ", channels last"
            way = root.step.best()
            if way is not None:
                label = "torch" if way.plan is None else "one plan"
                found.append(Contender(f"{label}{copies}", Schedule(way.time_us, ((root, way),))))
            for groups in root.cuts:
                below = [self.best(group, known) for group in groups]
                whole = [each for each in below if each is not None]
                if len(whole) == len(below):
                    label = " | ".join(
                        " ".join(node.op for node in compute_nodes(group.spec.nodes))
                        + "".join(f" {name}={value}" for name, value in marks(group.spec))
                        for group in groups
                    )
                    found.append(Contender(f"steps {label}"[:300] + copies, in_turn(whole)))
        return found

    def settle(
        self, spec: GraphSpec, roots: Sequence[Part], *, compare: bool = True
    ) -> tuple[Contender, list[Contender]]:
        """The winner and all its rivals.

        Close ways to run a step are measured again, side by side; so are close ways to cut the
        graph, whole; unless ``compare`` is False. The winner's plans are checked. Raises
        :class:`NotSupported` when every way to run the graph turned out wrong.
        """
        checked: set[int] = set()
        while True:
            for _ in self.widen(roots):
                pass  # a way that was to win may have turned out wrong
            if not self._is_late() and (self._reopened(roots) or self.doubt(roots)):
                continue
            rivals = self.rivals(roots)
            if not rivals:
                reasons = dict.fromkeys(lost.reason for root in roots for lost in root.step.lost)
                raise NotSupported(f"graph '{roots[0].spec.name}'", list(reasons))
            least = min(rival.time_us for rival in rivals)
            close = [rival for rival in rivals if rival.time_us <= CLOSE_RATIO * least]
            steps = {id(part.step): part.step for each in close for part, _ in each.runs.steps}
            fresh = [step for step in steps.values() if not step.compared]
            if fresh and compare and not self.over():
                for step in fresh:
                    self._compare(step)
                    step.compared = True
                continue
            if len(close) > 1 and compare and not self.over():
                chains = [
                    [(part.spec, way.plan) for part, way in rival.runs.steps] for rival in close
                ]
                times = self._bench.chain_times_us(spec, chains)
                for rival, time_us in zip(close, times or [], strict=False):
                    rival.time_us = time_us
                least = min(rival.time_us for rival in close)
            near = [rival for rival in close if rival.time_us <= TIE_RATIO * least]
            winner = min(near, key=lambda rival: (rival.workspace_bytes, rival.time_us))
            if all([self.check(part.step, way, checked) for part, way in winner.runs.steps]):
                return winner, rivals

    def check(self, step: StepSearch, way: Variant, checked: set[int]) -> bool:
        """Whether a way does what it should; one that does not is thrown out."""
        if way.plan is None or id(way.plan) in checked:
            return True
        if way not in step.ways:  # another part of the same step has thrown it out
            return False
        why = self._bench.why_wrong(step.spec, way.plan)
        if why is None:
            checked.add(id(way.plan))
            way.right = True
            return True
        step.ways.remove(way)
        step.thrown_out += 1
        step.lost.append(decided(way, why))
        while step.queue and all(each.plan is None for each in step.ways):
            self.advance([step])  # the rest of the list is better than no plan
        return False

    def _compare(self, step: StepSearch) -> None:
        """Measure the fastest few ways of a step again, side by side; the others are out.

        A first time is that of one plan from rest, a final one may be under load: the two do not
        compare.
        """
        least = min((way.time_us for way in step.ways), default=0.0)
        near = sorted(
            (way for way in step.ways if way.time_us <= FINALIST_RATIO * least),
            key=lambda way: way.time_us,
        )[:FINAL_VARIANTS]
        if len(near) < 2 and least < HEAVY_US:
            return
        again = self._bench.times_us(step.spec, [way.plan for way in near], FINAL_ROUNDS)
        for way, time_us in zip(near, again, strict=True):
            if not isinstance(time_us, str):
                way.time_us, way.final = time_us, True

    def decisions(self, part: Part, taken: Variant) -> tuple[Decision, ...]:
        """Everything that was considered for a step."""
        step = part.step
        self.give_up(step, self._why_left)
        made = []
        for way in sorted(step.ways, key=lambda way: way.time_us):
            ratio = way.time_us / taken.time_us if taken.time_us else math.inf
            reason = "as fast, with no less workspace"
            if way is taken or ratio > TIE_RATIO:
                reason = (
                    "the fastest"
                    if way is taken
                    else f"{ratio:.2f} times the time of the one taken"
                )
            if taken.final and not way.final:
                reason = f"over {FINALIST_RATIO:g} times the fastest when first measured"
            if way.choice is not None and way.choice in step.hints:
                reason += f"; tried first, taken from {step.hints[way.choice]}"
            made.append(decided(way, reason, accepted=way is taken))
        return (*made, *step.lost)


def by_rule(root: Part) -> Sequence[Part]:
    """The parts that rules run in place of one plan; none where they take the plan."""
    return root.cuts[0] if root.cuts and why_split(root.spec) is not None else ()


def of_others(search: Search, winner: Schedule) -> tuple[Decision, ...]:
    """Decisions on parts that are no step in the end: refused, failed or wrong."""
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
