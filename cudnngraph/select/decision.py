"""What is known of a choice: the steps of a graph, their plans, and the decisions behind them."""

from __future__ import annotations

from dataclasses import dataclass

from ..backend.plan import Choice, Plan, Verified
from ..ir.spec import GraphSpec


@dataclass(frozen=True)
class Decision:
    """A candidate for a step, and what became of it. ``choice`` is None for what is no plan."""

    subject: str
    accepted: bool
    reason: str
    choice: Choice | None = None
    workspace_bytes: int | None = None
    time_us: float | None = None


@dataclass(frozen=True)
class StepPlan:
    """One step: a subgraph and the plan that runs it; ``choice`` is None for a torch step.

    ``time_us`` is what was measured of it, None where nothing was; ``verified`` that the plan was
    right on random data, None where it was not run on any.
    """

    spec: GraphSpec
    choice: Choice | None
    workspace_bytes: int
    decisions: tuple[Decision, ...]
    time_us: float | None = None
    verified: Verified | None = None


@dataclass(frozen=True)
class Selection:
    """The steps in order, and for each cuDNN step the plan as this thread built it."""

    steps: tuple[StepPlan, ...]
    built: tuple[Plan | None, ...]


FREE = Decision("a view", True, "the operand's memory, seen in another way: nothing runs")
