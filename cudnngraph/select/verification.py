"""Plans are run once on random data, between guard bytes, against the reference, before they
compute anything for a user: by :mod:`~cudnngraph.select.worker` in a process of its own, or in this
one.

A plan that is wrong, faults or hangs is rejected with its reason. Whoever runs this in a process of
its own is told before each attempt what comes next, so that a process that dies has named its
cause.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from plans_cache.gate import Gate

from ..backend import env
from ..backend.candidates import (
    UNCHECKED,
    UNRANKED,
    Candidate,
    Outcome,
    Proposals,
    why_passed_over,
)
from ..backend.lowering.driver import first_line
from ..backend.plan import Choice, Plan
from ..device.allocation import for_want_of_memory, names_shortage
from ..errors import NotSupported
from ..executor.plans import replay
from ..ir.spec import GraphSpec
from ..policy import Policy
from .trial import StepTrial

CHANCES = 2
ONE_OF = f"{CHANCES} others of its engine are not right"
#: Stands for cuDNN's ranking of a step among the choices of that step: it may end a process too.
RANKING = Choice(-1, ())

Tell = Callable[[Choice], None]
Rejected = Mapping[Choice, str]


@dataclass(frozen=True)
class Found:
    """The plan that passed, None where none did; its outcome and those before it; and the largest
    relative error of its results, None where there was no memory to check it."""

    plan: Plan | None
    outcomes: tuple[Outcome, ...]
    error: float | None


class Checks:
    """The candidates of one graph on one GPU, each built and checked. Use it with that GPU current.

    ``rejected`` is what must not be tried, with the reason. ``tell`` is called before each attempt,
    and with :data:`RANKING` before cuDNN is asked for candidates. Plans run while they have a share
    of ``gate``.

    Raises :class:`NotSupported` if there are no candidates, or if asking for them ended a process.
    """

    def __init__(
        self,
        spec: GraphSpec,
        policy: Policy,
        device_index: int,
        *,
        rejected: Rejected | None = None,
        tell: Tell = lambda choice: None,
        gate: Gate | None = None,
        more: bool = False,
    ) -> None:
        self._place = (spec, policy, device_index)
        self._rejected = rejected or {}
        refuse_ranking(spec, self._rejected)
        tell(RANKING)
        self._proposals = Proposals(spec, policy, device_index, more=more)
        self._made: StepTrial | None = None
        self._tell = tell
        self._gate = gate or Gate(None)
        self.candidates = self._proposals.candidates
        self.built_s = self.checked_s = 0.0  # spent so far

    def _trial(self) -> StepTrial:
        """The random data, made for the first check."""
        if self._made is None:
            spec, policy, index = self._place
            self._made = StepTrial(spec, policy, torch.device("cuda", index))
        return self._made

    def take(self, rejected: Rejected, gate: Gate) -> None:
        """Take the choices that must not be tried from now on, and the gate."""
        self._rejected, self._gate = rejected, gate

    def attempt(self, candidate: Candidate) -> tuple[Outcome, Plan | None, float | None]:
        """Build and check one; there is a plan when the outcome is accepted."""
        why = self._rejected.get(candidate.choice)
        if why is not None:
            return Outcome(candidate, False, why), None, None
        self._tell(candidate.choice)
        start = time.perf_counter()
        outcome, plan = self._proposals.build(candidate, launch=False)
        if plan is None and names_shortage(outcome.reason):
            torch.cuda.empty_cache()
            with self._gate.alone():
                outcome, plan = self._proposals.build(candidate, launch=False)
        built = time.perf_counter()
        self.built_s += built - start
        if plan is None:
            return outcome, None, None
        why, error = checked(self._trial, plan, self._gate)
        self.checked_s += time.perf_counter() - built
        if why is not None:
            return Outcome(candidate, False, why, outcome.workspace_bytes, wrong=True), None, None
        return outcome, plan, error

    def first(self, ahead: Choice | None = None) -> Found:
        """The first of cuDNN's ranking that passes, or before all of it the choice ``ahead``. An
        engine that was wrong :data:`CHANCES` times is passed over: its other configurations compute
        the same in other tiles."""
        outcomes: list[Outcome] = []
        wrong = Counter(choice.engine for choice in self._rejected)
        if ahead is not None and ahead not in self._rejected:
            found = self._ahead(ahead)
            if found.plan is not None:
                return found
            outcomes += found.outcomes
            wrong[ahead.engine] += any(outcome.wrong for outcome in outcomes)
        tried = {outcome.candidate.choice for outcome in outcomes}
        for candidate in (each for each in self.candidates if each.choice not in tried):
            if wrong[candidate.choice.engine] >= CHANCES:
                outcomes.append(
                    Outcome(candidate, False, self._rejected.get(candidate.choice, ONE_OF))
                )
                continue
            outcome, plan, error = self.attempt(candidate)
            outcomes.append(outcome)
            wrong[candidate.choice.engine] += outcome.wrong
            if plan is not None:
                return Found(plan, tuple(outcomes), error)
        return Found(None, tuple(outcomes), None)

    def _ahead(self, choice: Choice) -> Found:
        try:
            return self.of(choice)
        except NotSupported as refusal:
            candidate = Candidate(UNRANKED, choice, str(choice))
            return Found(None, (Outcome(candidate, False, refusal.reasons[0]),), None)

    def of(self, choice: Choice) -> Found:
        """One choice, proposed here or not. Raises :class:`NotSupported` where it is not built."""
        for candidate in self.candidates:
            if candidate.choice == choice:
                outcome, plan, error = self.attempt(candidate)
                return Found(plan, (outcome,), error)
        spec, policy, index = self._place
        candidate = Candidate(UNRANKED, choice, str(choice))
        capability = env.capability(index)
        why = why_passed_over(candidate, spec, policy, capability, device_index=index)
        why = why or self._rejected.get(choice)
        if why is not None:
            return Found(None, (Outcome(candidate, False, why),), None)
        self._tell(choice)
        plan = replay(spec, choice, index)
        need, limit = plan.workspace_bytes, policy.workspace_limit
        if limit is not None and need > limit:
            reason = f"needs {need} bytes of workspace, over {limit}"
            return Found(None, (Outcome(candidate, False, reason, need),), None)
        why, error = checked(self._trial, plan, self._gate)
        outcome = Outcome(candidate, why is None, why or "", plan.workspace_bytes, why is not None)
        return Found(plan if why is None else None, (outcome,), error)


def refuse_ranking(spec: GraphSpec, rejected: Rejected) -> None:
    """Raise :class:`NotSupported` if cuDNN's ranking of this step has ended a process before."""
    why = rejected.get(RANKING)
    if why is not None:
        raise NotSupported(f"graph '{spec.name}'", [f"cuDNN's ranking of its engines: {why}"])


def none_passes(spec: GraphSpec, outcomes: Sequence[Outcome]) -> NotSupported:
    """The error that says what became of each candidate."""
    reasons = dict.fromkeys(outcome.reason for outcome in outcomes)
    return NotSupported(
        f"graph '{spec.name}'",
        [f"{len(outcomes)} candidates, none allowed, buildable and right", *reasons],
    )


def check(
    spec: GraphSpec, policy: Policy, choice: Choice, device_index: int, gate: Gate | None = None
) -> tuple[str | None, float | None]:
    """Check a choice that was made before: return what is wrong, and the error of its results."""
    return built(spec, policy, choice, device_index, gate)[1:]


def built(
    spec: GraphSpec, policy: Policy, choice: Choice, device_index: int, gate: Gate | None = None
) -> tuple[Plan, str | None, float | None]:
    """Build a choice and check it: return the plan, what is wrong, and the error of its results."""
    plan = replay(spec, choice, device_index)
    device = torch.device("cuda", device_index)
    trial = lambda: StepTrial(spec, policy, device)  # noqa: E731
    return plan, *checked(trial, plan, gate or Gate(None))


def checked(
    trial: Callable[[], StepTrial], plan: Plan, gate: Gate
) -> tuple[str | None, float | None]:
    """Return what is wrong with a plan, and how far it is off.

    Nothing is known where memory is short for the trial, even without the other processes that
    share the gate. A check that fails by itself is no reason to compute with the plan.
    """
    for alone in (False, True):
        try:
            with gate.alone() if alone else gate.shared():
                on = trial()
                why = on.why_wrong(plan)
                torch.cuda.synchronize()  # a fault stays, whatever was caught
            return why, on.error
        except Exception as error:
            torch.cuda.synchronize()  # raises where the plan has taken the GPU from this process
            if not for_want_of_memory(error, torch.device("cuda", plan.device_index)):
                return f"{UNCHECKED}{type(error).__name__}: {first_line(str(error))}", None
        torch.cuda.empty_cache()
    return None, None
