"""A bench that measures each part once: what is known of a step is kept, and not measured again.

Rankings, builds and times are told to a memo as soon as they are there. A search that is stopped
goes on with them, and so does the search of another graph that has an equal step. A plan that was
measured before is built, and checked, only where it is timed beside others or taken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from ..backend.candidates import UNRANKED, Candidate, Outcome
from ..backend.plan import KERNEL, Choice, Plan, Verified
from ..errors import NotSupported
from ..ir.key import step_digest
from ..ir.spec import GraphSpec
from .bench import Bench
from .config import FINAL_ROUNDS, TIE_RATIO
from .effort import Effort
from .settled import Way, from_way, to_way

Row = Mapping[str, Any]
RANKING = "ranking"  # what a row of cuDNN's candidates says that it is
SETTLED = "settled"  # and a row of how a choice by measurement runs a step
_MOST_INT = 1 << 62


class Memo(Protocol):
    """Measurements that are kept from process to process, in one environment."""

    def of(self, spec: GraphSpec) -> Sequence[Row]:
        """The rows of a step, in the order in which they were made."""

    def add(self, spec: GraphSpec, row: dict[str, Any]) -> bool:
        """One more row of a step; whether later processes have it."""


class KnownPlan:
    """Stands for a plan that was built and measured before: its choice and its workspace."""

    verified: Verified | None = None
    blob: bytes | None = None

    def __init__(self, choice: Choice, workspace_bytes: int) -> None:
        self.choice = choice
        self.workspace_bytes = workspace_bytes


class _Step:
    """What is known of a step."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.candidates: list[Candidate] | None = None
        self.workspaces: dict[Choice, int] = {}
        self.right: set[Choice] = set()
        self.times: dict[tuple[str, frozenset[Choice | None]], dict[Choice | None, float]] = {}
        self.chains: dict[str, list[float]] = {}
        self.way: Way | None = None
        self.real: dict[Choice, Plan | str] = {}
        self.inner: Any = None  # its candidates as cuDNN has them in this process, or its refusal
        for row in rows:
            try:
                self._take(row)
            except (KeyError, TypeError, ValueError):
                continue  # a row that is none

    def _take(self, row: Row) -> None:
        if row["what"] == RANKING:
            self.candidates = [
                Candidate(_whole(index), _choice(choice), str(tag), slower=_slower(*more))
                for index, choice, tag, *more in row["candidates"]
            ]
        elif row["what"] == "built":
            choice = _choice(row["choice"])
            self.workspaces[choice] = _whole(row["workspace_bytes"])
            if row.get("right") is True:
                self.right.add(choice)
        elif row["what"] == "times":
            choices = [None if each is None else _choice(each) for each in row["choices"]]
            times = dict(zip(choices, map(_time, row["times"]), strict=True))
            self.times[str(row["rounds"]), frozenset(choices)] = times
        elif row["what"] == "chains":
            self.chains[str(row["chains"])] = list(map(_time, row["times"]))
        elif row["what"] == SETTLED:
            self.way = to_way(row["way"])


def _whole(value: Any) -> int:
    if type(value) is not int or not -1 <= value <= _MOST_INT:
        raise ValueError("no number")
    return value


def _time(value: Any) -> float:
    if not isinstance(value, float) or not (math.isfinite(value) and value >= 0):
        raise ValueError("no time")
    return value


def _slower(value: Any = 0.0) -> float:
    return _time(value)  # a row of before has none


def _choice(data: Any) -> Choice:
    engine, knobs = data
    return Choice(_whole(engine), tuple((str(name), int(value)) for name, value in knobs))


def _data(choice: Choice | None) -> Any:
    return None if choice is None else [choice.engine, [list(knob) for knob in choice.knobs]]


def _named(plan: Plan | None) -> Any:
    return _data(None if plan is None else plan.choice)


def keep_ranking(memo: Memo, spec: GraphSpec, candidates: Sequence[Candidate]) -> bool:
    """Tell a memo cuDNN's candidates for a step; whether later processes have them."""
    rows = [[each.index, _data(each.choice), each.tag, each.slower] for each in candidates]
    return memo.add(spec, {"what": RANKING, "candidates": rows})


def is_ranked(memo: Memo, spec: GraphSpec) -> bool:
    """Whether a memo has cuDNN's candidates for a step."""
    return _Step(memo.of(spec)).candidates is not None


def fastest(rows: Sequence[Row]) -> Choice | None:
    """The plan of cuDNN's that rows say was fastest for a step, of those that passed their check.

    A graph for which the step was settled as another plan decides, then the last comparison side by
    side, or else the first times. As in a search, of plans that are nearly as fast the one with the
    smallest workspace is taken.
    """
    step = _Step(rows)
    if isinstance(step.way, Choice) and step.way in step.right:
        return step.way
    alone: dict[Choice, float] = {}
    final: dict[Choice, float] = {}
    for (rounds, _), times in step.times.items():
        own = {
            choice: time_us
            for choice, time_us in times.items()
            if choice is not None and choice.engine != KERNEL and choice in step.right
        }
        if rounds == str(FINAL_ROUNDS):
            final = own or final
        else:
            alone |= own
    found = final or alone
    if not found:
        return None
    near = [each for each in found if found[each] <= TIE_RATIO * min(found.values())]
    return min(near, key=lambda each: (step.workspaces[each], found[each]))


def keep_settled(memo: Memo, ways: Iterable[tuple[GraphSpec, Way]]) -> None:
    """Tell a memo how steps are settled, as far as its times do not say so."""
    for spec, way in ways:
        rows = memo.of(spec)
        known = settled_way(rows)
        if known is None and isinstance(way, Choice):
            known = fastest(rows) or way
        if way != known:
            memo.add(spec, {"what": SETTLED, "way": from_way(way)})


def settled_way(rows: Sequence[Row]) -> Way | None:
    """How rows say that a step is settled, None if they do not."""
    return _Step(rows).way


class RememberedBench:
    """``bench`` with a memo. Times that were taken side by side are known side by side alone."""

    def __init__(self, bench: Bench, memo: Memo) -> None:
        self._bench = bench
        self._memo = memo
        self._known: dict[str, _Step] = {}

    def _step(self, spec: GraphSpec) -> _Step:
        digest = step_digest(spec)
        if digest not in self._known:
            self._known[digest] = _Step(self._memo.of(spec))
        return self._known[digest]

    # -- plans -------------------------------------------------------------------------------------

    def proposals(self, spec: GraphSpec, known: Sequence[Candidate] | None = None) -> Any:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        step = self._step(spec)
        if step.candidates is None:
            step.candidates = list(self._asked(spec, step).candidates)
            keep_ranking(self._memo, spec, step.candidates)
        elif not step.workspaces:
            self._asked(spec, step)  # what builds elsewhere begins
        return _Proposals(self, spec, step.candidates)

    def _asked(self, spec: GraphSpec, step: _Step) -> Any:
        if step.inner is None:
            try:
                step.inner = self._bench.proposals(spec, step.candidates)
            except NotSupported as refusal:
                step.inner = refusal
        if isinstance(step.inner, NotSupported):
            raise step.inner
        return step.inner

    def build(self, spec: GraphSpec, candidate: Candidate) -> tuple[Outcome, Plan | None]:
        """A candidate's plan, which is none yet if it was built before."""
        step, choice = self._step(spec), candidate.choice
        need = step.workspaces.get(choice)
        if need is not None:
            return Outcome(candidate, True, "", need), cast(Plan, KnownPlan(choice, need))
        outcome, plan = self._build(spec, step, choice)
        if plan is not None:
            step.real[choice] = plan
            self._built(spec, plan, right=self._bench.passed(spec, plan))
        return outcome, plan

    def _build(self, spec: GraphSpec, step: _Step, choice: Choice) -> tuple[Outcome, Plan | None]:
        """Build a choice, which may be at another place in the ranking of this process."""
        inner = self._asked(spec, step)
        there = (each for each in inner.candidates if each.choice == choice)
        return inner.build(next(there, Candidate(UNRANKED, choice, str(choice))))  # type: ignore[no-any-return]

    def _built(self, spec: GraphSpec, plan: Plan, *, right: bool) -> None:
        step = self._step(spec)
        step.workspaces[plan.choice] = plan.workspace_bytes
        if right:
            step.right.add(plan.choice)
        row = {"what": "built", "choice": _data(plan.choice), "right": right}
        self._memo.add(spec, {**row, "workspace_bytes": plan.workspace_bytes})

    def kernels(self, parts: Sequence[tuple[GraphSpec, Choice]]) -> list[Plan | str]:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        found: list[Plan | str | None] = []
        for spec, choice in parts:
            need = self._step(spec).workspaces.get(choice)
            found.append(None if need is None else cast(Plan, KnownPlan(choice, need)))
        new = [part for part, plan in zip(parts, found, strict=True) if plan is None]
        made = iter(self._bench.kernels(new) if new else ())
        for number, (spec, choice) in enumerate(parts):
            if found[number] is None:
                plan = found[number] = next(made)
                self._step(spec).real[choice] = plan
                if not isinstance(plan, str):
                    self._built(spec, plan, right=self._bench.passed(spec, plan))
        return [plan for plan in found if plan is not None]

    def _real(self, spec: GraphSpec, plan: Plan | None) -> Plan | str | None:
        """The plan that a known one stands for, built and checked, or why there is none."""
        if not isinstance(plan, KnownPlan):
            return plan
        step, choice = self._step(spec), plan.choice
        if choice not in step.real:
            if choice.engine == KERNEL:
                (step.real[choice],) = self._bench.kernels([(spec, choice)])
            else:
                try:
                    outcome, made = self._build(spec, step, choice)
                    step.real[choice] = outcome.reason if made is None else made
                except NotSupported as refusal:
                    step.real[choice] = refusal.reasons[0]
        return step.real[choice]

    def expect(self, specs: Sequence[GraphSpec]) -> None:
        """See :class:`~cudnngraph.select.bench.Bench`; of steps that nothing is known of."""
        steps = [(spec, self._step(spec)) for spec in specs]
        self._bench.expect(
            [spec for spec, step in steps if step.candidates is None and step.inner is None]
        )

    def ahead(self, spec: GraphSpec, count: int) -> None:
        """See :class:`~cudnngraph.select.bench.Bench`; of steps that nothing was known of."""
        if self._step(spec).inner is not None:
            self._bench.ahead(spec, count)

    def ready(self, spec: GraphSpec, choice: Choice) -> bool:
        """See :class:`~cudnngraph.select.bench.Bench`; what was built before is there."""
        return choice in self._step(spec).workspaces or self._bench.ready(spec, choice)

    @property
    def effort(self) -> Effort:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        return self._bench.effort

    def alone(self) -> AbstractContextManager[None]:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        return self._bench.alone()

    # -- times -------------------------------------------------------------------------------------

    def times_us(
        self, spec: GraphSpec, plans: Sequence[Plan | None], rounds: int
    ) -> list[float | str]:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        choices = [None if plan is None else plan.choice for plan in plans]
        step, place = self._step(spec), (str(rounds), frozenset(choices))
        known = step.times.get(place)
        if known is not None:
            return [known[choice] for choice in choices]
        real = [self._real(spec, plan) for plan in plans]
        there = [plan for plan in real if not isinstance(plan, str)]
        taken = iter(self._bench.times_us(spec, there, rounds) if there else ())
        times = [plan if isinstance(plan, str) else next(taken) for plan in real]
        told = [time for time in times if isinstance(time, float) and math.isfinite(time)]
        if len(told) == len(times):
            step.times[place] = dict(zip(choices, told, strict=True))
            row = {"what": "times", "choices": list(map(_data, choices)), "rounds": rounds}
            self._memo.add(spec, {**row, "times": told})
        return times

    def chain_times_us(
        self,
        spec: GraphSpec,
        chains: Sequence[Sequence[tuple[GraphSpec, Plan | None]]],
        *,
        alike: bool = False,
    ) -> list[float] | None:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        named = [[(step_digest(part), _named(plan)) for part, plan in way] for way in chains]
        place = json.dumps([alike, named])
        step = self._step(spec)
        if place in step.chains:
            return list(step.chains[place])
        real: list[list[tuple[GraphSpec, Plan | None]]] = []
        for way in chains:
            real.append([])
            for part, plan in way:
                made = self._real(part, plan)
                if isinstance(made, str):
                    return None  # it is thrown out where it is checked
                real[-1].append((part, made))
        times = self._bench.chain_times_us(spec, real, alike=alike)
        if times is not None and all(map(math.isfinite, times)):
            step.chains[place] = times
            self._memo.add(spec, {"what": "chains", "chains": place, "times": times})
        return times

    # -- the choice --------------------------------------------------------------------------------

    def close(self) -> None:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        self._bench.close()

    def why_wrong(self, spec: GraphSpec, plan: Plan) -> str | None:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        real = self._real(spec, plan)
        assert real is not None
        why = real if isinstance(real, str) else self._bench.why_wrong(spec, real)
        if why is None and not self.passed(spec, plan):
            self._built(spec, plan, right=True)
        return why

    def passed(self, spec: GraphSpec, plan: Plan) -> bool:
        """See :class:`~cudnngraph.select.bench.Bench`; in this search or in one before."""
        return plan.choice in self._step(spec).right

    def replay(self, spec: GraphSpec, choice: Choice) -> Plan:
        """See :class:`~cudnngraph.select.bench.Bench`; no known plan is taken unchecked."""
        step = self._step(spec)
        if choice in step.workspaces and choice not in step.real:
            why = self.why_wrong(spec, cast(Plan, KnownPlan(choice, step.workspaces[choice])))
            if why is not None:
                raise NotSupported(f"graph '{spec.name}'", [why])
        return self._bench.replay(spec, choice)


class _Proposals:
    """cuDNN's candidates for a step, each built at most once in all searches."""

    def __init__(
        self, bench: RememberedBench, spec: GraphSpec, candidates: Sequence[Candidate]
    ) -> None:
        self._bench = bench
        self._spec = spec
        self.candidates = candidates

    def build(self, candidate: Candidate) -> tuple[Outcome, Plan | None]:
        """See :class:`~cudnngraph.backend.candidates.Proposals`."""
        return self._bench.build(self._spec, candidate)
