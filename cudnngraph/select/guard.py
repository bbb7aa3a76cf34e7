"""Plans for this process that have passed their check, by workers or here.

A plan computes nothing before it has run once on random data against the reference. What is wrong
there, or ends a process, is kept with its reason, so that no later process tries it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from plans_cache.gate import Gate

from ..backend import env, handles
from ..backend.candidates import Candidate, Outcome, Proposals, build_first, why_passed_over
from ..backend.plan import Choice, Plan, Verified
from ..errors import NotSupported
from ..executor.plans import load, replay
from ..ir.key import step_digest
from ..ir.spec import GraphSpec
from ..policy import Policy
from . import verification, workers
from .bench import GpuBench
from .config import BUILT_TOGETHER
from .cost import is_slow
from .effort import BUILDING, BUILT, CHECKED, RANKING, Effort
from .heuristic import Built, OncePerStep
from .processes import Unusable
from .workers import Answer

_log = logging.getLogger(__name__)

FIRST = 1  # candidates of a step that are built before the search asks for any

_in_process = ""  # why no worker can be had, once that has turned out


class Kept(Protocol):
    """Rejected choices, kept from process to process."""

    def of(self, spec: GraphSpec, policy: Policy) -> Mapping[Choice, str]:
        """The choices that were rejected for a step, with the reasons."""

    def add(self, spec: GraphSpec, policy: Policy, rejected: Mapping[Choice, str]) -> None:
        """Keep more of them."""

    @property
    def gate(self) -> Path | None:
        """The directory by which processes leave the GPU to one that measures."""


def how(policy: Policy) -> str:
    """Return how plans are checked under a policy: "isolated", "inprocess" or "off"."""
    return "inprocess" if policy.verify == "isolated" and _in_process else str(policy.verify)


def _without_workers(error: Unusable) -> None:
    """From now on plans are checked in this process."""
    global _in_process
    if not _in_process:
        _in_process = str(error)
        _log.warning(
            "plans are checked in this process, which one that faults would end: %s", error
        )


def _heard(
    asked: Future[Answer], effort: Effort | None = None, kind: str = BUILDING
) -> Answer | None:
    """What a worker answers; None if there are no workers, or no more."""
    try:
        if effort is None:
            return asked.result()
        if not asked.done():
            effort.let_go()
        with effort.spent(kind):
            answer = asked.result()
        effort.seconds[BUILT] += answer.built_s
        effort.seconds[CHECKED] += answer.checked_s
        return answer
    except Unusable as error:
        _without_workers(error)
        return None


#: The choice that was measured fastest for a step, and where that is known from; None if nowhere.
Fastest = Callable[[GraphSpec], "tuple[Choice, str] | None"]


class Builder:
    """The first plan of a step that passes, beginning with what was measured fastest for an equal
    step; of steps that are equal, once."""

    def __init__(
        self,
        policy: Policy,
        device_index: int,
        kept: Kept,
        fastest: Fastest = lambda spec: None,
        effort: Effort | None = None,
    ) -> None:
        self._effort = effort
        self._policy = policy
        self._index = device_index
        self._kept = kept
        self._fastest = fastest
        self._measured: dict[str, tuple[Choice, str] | None] = {}
        self._once = OncePerStep(self._made)
        self._ahead: dict[str, Future[Answer]] = {}
        self._kernels_ahead: dict[tuple[str, Choice], Future[Answer]] = {}

    def expect(self, parts: Iterable[GraphSpec]) -> None:
        """Have steps built that will be asked for, several at a time."""
        for part in parts if how(self._policy) == "isolated" else ():
            digest = step_digest(part)
            if digest not in self._once and digest not in self._ahead:
                self._ahead[digest] = self._submitted(part)

    def expect_kernels(self, parts: Iterable[tuple[GraphSpec, Choice]]) -> None:
        """Have kernels built that may be asked for, behind all else."""
        for part, choice in parts if how(self._policy) == "isolated" else ():
            place = step_digest(part), choice
            if place not in self._kernels_ahead and choice not in self._rejected(part):
                self._kernels_ahead[place] = self._check_begun(part, choice, urgent=False)

    def cancel(self) -> None:
        """Build nothing ahead any more."""
        for ahead in (self._ahead, self._kernels_ahead):
            while ahead:
                ahead.popitem()[1].cancel()

    def __call__(self, part: GraphSpec) -> Built:
        """The plan and what became of the candidates before it. Raises :class:`NotSupported`."""
        return self._once(part)

    def _made(self, part: GraphSpec) -> Built:
        plan, outcomes = self._built(part, step_digest(part))
        return plan, self._explained(part, outcomes)

    def kernels(self, parts: Sequence[tuple[GraphSpec, Choice]]) -> list[Plan | str]:
        """The kernels of regions, each checked, or why there is none."""
        asked: dict[tuple[str, Choice], Plan | str | Future[Answer]] = {}
        places = [(step_digest(part), choice) for part, choice in parts]
        for place, (part, choice) in zip(places, parts, strict=True):
            if place not in asked:
                asked[place] = self._begun(part, choice)
        for place, (part, choice) in zip(places, parts, strict=True):
            found = asked[place]
            if isinstance(found, Future):
                asked[place] = self._kernel(part, choice, found)
        return [found for found in map(asked.__getitem__, places) if not isinstance(found, Future)]

    def _begun(self, part: GraphSpec, choice: Choice) -> Plan | str | Future[Answer]:
        """The check of a kernel by a worker, begun, or its outcome here."""
        why = self._rejected(part).get(choice)
        if why is not None:
            return why
        if how(self._policy) != "isolated":
            return self._kernel(part, choice, None)
        begun = self._kernels_ahead.pop((step_digest(part), choice), None)
        return begun or self._check_begun(part, choice, urgent=True)

    def _check_begun(self, part: GraphSpec, choice: Choice, *, urgent: bool) -> Future[Answer]:
        given, gate = (part, self._policy, choice), self._kept.gate
        return workers.on(self._index).check(*given, gate=gate, urgent=urgent)

    def _kernel(self, part: GraphSpec, choice: Choice, asked: Future[Answer] | None) -> Plan | str:
        try:
            if how(self._policy) == "off":
                return replay(part, choice, self._index)
            isolated = how(self._policy) == "isolated"
            answer = _heard(asked, self._effort) if asked is not None and isolated else None
            if answer is not None and answer.refused:
                return answer.refused[0]
            if answer is None:
                plan, wrong, off = verification.built(part, self._policy, choice, self._index)
                plan.verified = None if wrong else Verified.here(self._index, off)
            else:
                wrong = answer.wrong
                if wrong is None:
                    return _from_worker(part, choice, answer, self._index)
        except NotSupported as refusal:
            return refusal.reasons[0]
        if wrong is None:
            return plan
        self._kept.add(part, self._policy, {choice: wrong})
        return wrong

    def _rejected(self, part: GraphSpec) -> Mapping[Choice, str]:
        return self._kept.of(part, self._policy)

    def _submitted(self, part: GraphSpec) -> Future[Answer]:
        given = part, self._policy, self._rejected(part)
        ahead, gate = self._ahead_of(part), self._kept.gate
        return workers.on(self._index).first(*given, gate=gate, ahead=ahead)

    def _measured_of(self, part: GraphSpec) -> tuple[Choice, str] | None:
        digest = step_digest(part)
        if digest not in self._measured:
            self._measured[digest] = self._fastest(part)
        return self._measured[digest]

    def _ahead_of(self, part: GraphSpec) -> Choice | None:
        """The choice to be tried before cuDNN's ranking."""
        found = self._measured_of(part)
        return None if found is None else found[0]

    def _explained(self, part: GraphSpec, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
        """The outcomes, of which the one that is taken says so if it was measured fastest."""
        found, taken = self._measured_of(part), outcomes[-1]
        if found is None or taken.candidate.choice != found[0]:
            return outcomes
        return (*outcomes[:-1], replace(taken, reason=found[1]))

    def _built(self, part: GraphSpec, digest: str) -> Built:
        if how(self._policy) == "off":
            return build_first(part, self._policy, self._index, self._ahead_of(part))
        if how(self._policy) == "isolated":
            asked = self._ahead.pop(digest, None) or self._submitted(part)
            handles.handle(self._index)  # what this process needs then, while it waits
            answer = _heard(asked)
            if answer is not None:
                return self._taken(part, answer)
        given = part, self._policy, self._index
        checks = verification.Checks(*given, rejected=self._rejected(part))
        found = checks.first(self._ahead_of(part))
        self._kept.add(part, self._policy, wrong_of(found.outcomes))
        if found.plan is None:
            raise verification.none_passes(part, found.outcomes)
        found.plan.verified = Verified.here(self._index, found.error)
        return found.plan, found.outcomes

    def _taken(self, part: GraphSpec, answer: Answer) -> Built:
        """Build the plan that a worker has found, in this process."""
        self._kept.add(part, self._policy, {**wrong_of(answer.outcomes), **answer.faults})
        if answer.refused:
            raise NotSupported(f"graph '{part.name}'", answer.refused)
        if not answer.outcomes or not answer.outcomes[-1].accepted:
            raise verification.none_passes(part, answer.outcomes)
        return had(part, answer.outcomes[-1], answer, self._index), answer.outcomes


def wrong_of(outcomes: Sequence[Outcome]) -> dict[Choice, str]:
    """The choices among the outcomes that ran and are not to be tried again."""
    return {each.candidate.choice: each.reason for each in outcomes if each.wrong}


def had(spec: GraphSpec, outcome: Outcome, answer: Answer, device_index: int) -> Plan:
    """The plan that a worker has checked, in this process."""
    return _from_worker(spec, outcome.candidate.choice, answer, device_index)


def _from_worker(spec: GraphSpec, choice: Choice, answer: Answer, device_index: int) -> Plan:
    plan: Plan | None = None
    if answer.blob is not None:
        try:
            plan = load(answer.blob, choice, device_index)
            plan.blob = answer.blob
        except NotSupported as error:
            _log.info("%s of '%s' is built again: %s", choice, spec.name, error)
    if plan is None:
        plan = replay(spec, choice, device_index)
    plan.verified = Verified.here(device_index, answer.error)
    return plan


def check(
    spec: GraphSpec, policy: Policy, choice: Choice, device_index: int, kept: Kept
) -> tuple[str | None, Verified | None]:
    """Check a choice that was made before: return what is wrong with it, or where it passed."""
    why = kept.of(spec, policy).get(choice)
    error: float | None = None
    if why is None:
        why, error = _checked(spec, policy, choice, device_index, kept)
        if why is not None:
            kept.add(spec, policy, {choice: why})
    return (why, None) if why is not None else (None, Verified.here(device_index, error))


def _checked(
    spec: GraphSpec, policy: Policy, choice: Choice, device_index: int, kept: Kept
) -> tuple[str | None, float | None]:
    if how(policy) == "isolated":
        asked = workers.on(device_index).check(spec, policy, choice, gate=kept.gate)
        answer = _heard(asked)
        if answer is not None:
            return (answer.refused[0] if answer.refused else answer.wrong), answer.error
    return verification.check(spec, policy, choice, device_index)


# -- for the search --------------------------------------------------------------------------------


def ranking(spec: GraphSpec, policy: Policy, device_index: int, kept: Kept) -> Future[Answer]:
    """cuDNN's ranking for a step, asked for by a worker."""
    return workers.on(device_index).rank(spec, policy, kept.of(spec, policy))


class _Isolated:
    """cuDNN's candidates for a step, each built and checked by a worker, some of them early."""

    def __init__(
        self,
        spec: GraphSpec,
        policy: Policy,
        device_index: int,
        kept: Kept,
        asked: Future[Answer] | None = None,
        known: Sequence[Candidate] | None = None,
        effort: Effort | None = None,
    ) -> None:
        self._effort = effort
        self._spec = spec
        self._policy = policy
        self._index = device_index
        self._kept = kept
        self._rejected = kept.of(spec, policy)
        self._proposals: Proposals | None = None  # of this process, if there are no workers
        if known is None:
            known = self._ranked(asked or ranking(spec, policy, device_index, kept))
        else:
            verification.refuse_ranking(spec, self._rejected)
        self.candidates = known
        wanted = (each for each in self.candidates if not is_slow(each))
        self._queue = [each.choice for each in wanted if self._why_not(each) is None]
        self._ahead: dict[Choice, Future[Answer]] = {}
        self._submit(FIRST)

    def _ranked(self, asked: Future[Answer]) -> Sequence[Candidate]:
        """cuDNN's ranking, as a worker has it. Raises :class:`NotSupported`."""
        answer = _heard(asked, self._effort, RANKING)
        if answer is None:
            verification.refuse_ranking(self._spec, self._rejected)
            return self._here().candidates
        self._kept.add(self._spec, self._policy, answer.faults)
        if answer.refused:
            raise NotSupported(f"graph '{self._spec.name}'", answer.refused)
        return answer.candidates

    def _here(self) -> Proposals:
        """The candidates in this process."""
        if self._proposals is None:
            self._proposals = Proposals(self._spec, self._policy, self._index, more=True)
        return self._proposals

    def _build_here(self, candidate: Candidate) -> tuple[Outcome, Plan | None]:
        """Build a candidate in this process, in whose ranking it may be at another place."""
        here = self._here()
        return here.build(
            next((each for each in here.candidates if each.choice == candidate.choice), candidate)
        )

    def _why_not(self, candidate: Candidate) -> str | None:
        capability = env.capability(self._index)
        return why_passed_over(
            candidate, self._spec, self._policy, capability, device_index=self._index
        ) or self._rejected.get(candidate.choice)

    def _submit(self, count: int) -> None:
        """Have the next few built, some of them by one worker, which knows the graph then."""
        choices, self._queue = self._queue[:count], self._queue[count:]
        for at in range(0, len(choices), BUILT_TOGETHER):
            self._ask(choices[at : at + BUILT_TOGETHER], urgent=False)

    def ahead(self, count: int) -> None:
        """Have so many of them built, those that nobody has asked for yet among them."""
        if len(self._ahead) <= count - min(count, BUILT_TOGETHER):
            self._submit(count - len(self._ahead))

    def ready(self, choice: Choice) -> bool:
        """Whether a candidate is built, or nobody has to build it."""
        future = self._ahead.get(choice)
        if future is not None:
            return future.done() and not future.cancelled()
        return how(self._policy) != "isolated" or choice in self._rejected

    def _ask(self, choices: Sequence[Choice], *, urgent: bool) -> None:
        if choices:
            at_work = workers.on(self._index)
            futures = at_work.these(
                self._spec, self._policy, choices, gate=self._kept.gate, urgent=urgent
            )
            self._ahead.update(zip(choices, futures, strict=True))

    def close(self) -> None:
        """Build nothing ahead for now."""
        left = [choice for choice, future in self._ahead.items() if future.cancel()]
        for choice in left:
            del self._ahead[choice]
        self._queue = [*left, *self._queue]

    def build(self, candidate: Candidate) -> tuple[Outcome, Plan | None]:
        """See :class:`~cudnngraph.backend.candidates.Proposals`."""
        why = self._why_not(candidate)
        if why is not None:
            return Outcome(candidate, False, why), None
        if how(self._policy) != "isolated":
            return self._build_here(candidate)
        choice = candidate.choice
        if choice in self._queue:
            self._queue.remove(choice)
        future = self._ahead.get(choice)
        if future is None or (not future.done() and future.cancel()) or future.cancelled():
            self._ask([choice], urgent=True)  # before what waits for a worker to be built ahead
        answer = _heard(self._ahead.pop(choice), self._effort)
        if answer is None:
            return self._build_here(candidate)
        self._kept.add(self._spec, self._policy, {**wrong_of(answer.outcomes), **answer.faults})
        if answer.faults or answer.refused:
            reason = answer.wrong or ", ".join(answer.refused)
            return Outcome(candidate, False, reason, wrong=bool(answer.faults)), None
        (outcome,) = answer.outcomes
        if not outcome.accepted:
            return outcome, None
        return outcome, had(self._spec, outcome, answer, self._index)


class _Here:
    """cuDNN's candidates for a step but for those that are not to be tried again."""

    def __init__(self, proposals: Proposals, rejected: Mapping[Choice, str]) -> None:
        self._proposals = proposals
        self._rejected = rejected
        self.candidates = proposals.candidates

    def build(self, candidate: Candidate) -> tuple[Outcome, Plan | None]:
        """See :class:`~cudnngraph.backend.candidates.Proposals`."""
        why = self._rejected.get(candidate.choice)
        if why is not None:
            return Outcome(candidate, False, why), None
        return self._proposals.build(candidate)


class GuardedBench(GpuBench):
    """Trials of plans that workers have built and checked."""

    def __init__(
        self, policy: Policy, device: Any, kept: Kept, alone: Any, effort: Effort | None = None
    ) -> None:
        super().__init__(policy, device, alone, effort)
        self._kept = kept
        self._passed: dict[tuple[str, Choice], Plan] = {}
        self._isolated: dict[str, _Isolated] = {}
        self._ranked: dict[str, Future[Answer]] = {}

    def proposals(self, spec: GraphSpec, known: Sequence[Candidate] | None = None) -> Any:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        if how(self._policy) == "off":
            return super().proposals(spec)
        if how(self._policy) == "inprocess":
            rejected = self._kept.of(spec, self._policy)
            verification.refuse_ranking(spec, rejected)
            return _Here(super().proposals(spec), rejected)
        asked = self._ranked.pop(step_digest(spec), None)
        index = self._device.index
        found = _Isolated(spec, self._policy, index, self._kept, asked, known, self.effort)
        self._isolated[step_digest(spec)] = found
        return found

    def expect(self, specs: Sequence[GraphSpec]) -> None:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        for spec in specs if how(self._policy) == "isolated" else ():
            digest = step_digest(spec)
            if digest not in self._ranked and digest not in self._isolated:
                asked = ranking(spec, self._policy, self._device.index, self._kept)
                self._ranked[digest] = asked

    def ahead(self, spec: GraphSpec, count: int) -> None:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        found = self._isolated.get(step_digest(spec))
        if found is not None:
            found.ahead(count)

    def ready(self, spec: GraphSpec, choice: Choice) -> bool:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        found = self._isolated.get(step_digest(spec))
        return found is None or found.ready(choice)

    def kernels(self, parts: Sequence[tuple[GraphSpec, Choice]]) -> list[Plan | str]:
        """See :class:`~cudnngraph.select.bench.Bench`; each is checked."""
        index = self._device.index
        made = Builder(self._policy, index, self._kept, effort=self.effort).kernels(parts)
        for (spec, _), plan in zip(parts, made, strict=True):
            if not isinstance(plan, str):
                self._passed[step_digest(spec), plan.choice] = plan
        return made

    def close(self) -> None:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        for each in self._isolated.values():
            each.close()
        for asked in self._ranked.values():
            asked.cancel()
        self._ranked.clear()

    def why_wrong(self, spec: GraphSpec, plan: Plan) -> str | None:
        """See :class:`~cudnngraph.select.bench.Bench`; what a worker has checked is right."""
        if plan.verified is None:
            why, error = verification.checked(lambda: self._trial(spec), plan, Gate(None))
            if why is not None:
                self._kept.add(spec, self._policy, {plan.choice: why})
                return why
            plan.verified = Verified.here(self._device.index, error)
        self._passed[step_digest(spec), plan.choice] = plan
        return None

    def replay(self, spec: GraphSpec, choice: Choice) -> Plan:
        """See :class:`~cudnngraph.select.bench.Bench`."""
        passed = self._passed.get((step_digest(spec), choice))
        plan: Plan | None = None
        if passed is not None and passed.blob is not None:
            with contextlib.suppress(NotSupported):
                plan = load(passed.blob, choice, self._device.index)
                plan.blob = passed.blob
        if plan is None:
            plan = super().replay(spec, choice)
        plan.verified = None if passed is None else passed.verified
        return plan
