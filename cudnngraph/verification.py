"""Plans are run once on random data, between guard bytes, against the reference, before they
compute anything for a user: by :mod:`~cudnngraph.worker` in a process of its own, or in this one.

A plan that is wrong, faults or hangs is rejected with its reason. Whoever runs this in a process of
its own is told before each attempt what comes next, so that a process that dies has named its
cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .backend.plan import Candidate, Choice, Outcome, Plan, Proposals, replay
from .errors import NotSupported
from .ir import GraphSpec
from .policy import Policy
from .trial import Trial

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

    ``rejected`` is what must not be tried, with the reason. ``tell`` is called before each attempt.
    """

    def __init__(
        self,
        spec: GraphSpec,
        policy: Policy,
        device_index: int,
        *,
        rejected: Rejected | None = None,
        tell: Tell = lambda choice: None,
        more: bool = False,
    ) -> None:
        self._proposals = Proposals(spec, policy, device_index, more=more)
        self._trial = Trial(spec, policy, torch.device("cuda", device_index))
        self._rejected = rejected or {}
        self._tell = tell
        self.candidates = self._proposals.candidates

    def take(self, rejected: Rejected, tell: Tell) -> None:
        """What must not be tried from now on, and who is told."""
        self._rejected, self._tell = rejected, tell

    def attempt(self, candidate: Candidate) -> tuple[Outcome, Plan | None, float | None]:
        """Build and check one; there is a plan when the outcome is accepted."""
        why = self._rejected.get(candidate.choice)
        if why is not None:
            return Outcome(candidate, False, why), None, None
        self._tell(candidate.choice)
        outcome, plan = self._proposals.build(candidate, launch=False)
        if plan is None:
            return outcome, None, None
        why, error = _checked(self._trial, plan)
        torch.cuda.synchronize()  # a fault stays, whatever was caught
        if why is not None:
            return Outcome(candidate, False, why, outcome.workspace_bytes, wrong=True), None, None
        return outcome, plan, error

    def first(self) -> Found:
        """The first of cuDNN's ranking that passes."""
        outcomes: list[Outcome] = []
        for candidate in self.candidates:
            outcome, plan, error = self.attempt(candidate)
            outcomes.append(outcome)
            if plan is not None:
                return Found(plan, tuple(outcomes), error)
        return Found(None, tuple(outcomes), None)


def none_passes(spec: GraphSpec, outcomes: Sequence[Outcome]) -> NotSupported:
    """The error that says what became of each candidate."""
    reasons = dict.fromkeys(outcome.reason for outcome in outcomes)
    return NotSupported(
        f"graph '{spec.name}'",
        [f"{len(outcomes)} candidates, none allowed, buildable and right", *reasons],
    )


def check(
    spec: GraphSpec, policy: Policy, choice: Choice, device_index: int
) -> tuple[str | None, float | None]:
    """What is wrong with a choice that was made before, and the error of its results."""
    plan = replay(spec, choice, device_index)
    return _checked(Trial(spec, policy, torch.device("cuda", device_index)), plan)


def _checked(trial: Trial, plan: Plan) -> tuple[str | None, float | None]:
    try:
        why = trial.why_wrong(plan)
    except torch.OutOfMemoryError:
        return None, None
    return why, trial.error
