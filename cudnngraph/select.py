"""Plan selection: which steps run a graph, which plan each step uses, and why.

``heuristic`` measures nothing: it takes the whole graph as one plan where cuDNN has one, and goes
down the cuts of :mod:`~cudnngraph.partition` where it has none, to a torch step for an op that
cuDNN cannot run at all. Every step keeps its decisions. Nothing here touches the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .backend.plan import Choice, Outcome, Plan
from .errors import NotSupported
from .ir import GraphSpec
from .partition import split
from .policy import Policy

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Decision:
    """A candidate for a step, and what became of it. ``choice`` is None for what is no plan."""

    subject: str
    accepted: bool
    reason: str
    choice: Choice | None = None
    workspace_bytes: int | None = None


@dataclass(frozen=True)
class StepPlan:
    """One step: a subgraph and the plan that runs it; ``choice`` is None for a torch step."""

    spec: GraphSpec
    choice: Choice | None
    workspace_bytes: int
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class Selection:
    """The steps in order, and for each cuDNN step the plan as this thread built it."""

    steps: tuple[StepPlan, ...]
    built: tuple[Plan | None, ...]


Build = Callable[[GraphSpec], "tuple[Plan, tuple[Outcome, ...]]"]


def torch_only(spec: GraphSpec) -> str | None:
    """Why a graph is not shown to cuDNN at all, or None."""
    tensors = spec.tensors.values()
    if any(tensor.numel == 0 for tensor in tensors):
        return "a tensor is empty"
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return "cuDNN graphs have no float64"
    large = [tensor for tensor in tensors if max(tensor.numel, tensor.extent) > INT32_MAX]
    if large:
        return f"'{large[0].name}' spans {large[0].extent} elements, over 2^31 - 1"
    return None


def heuristic(spec: GraphSpec, policy: Policy, build: Build) -> Selection:
    """Choose without measuring. ``build(spec)`` gives the first plan that the policy allows.

    Raises :class:`NotSupported` when cuDNN refuses and ``policy.fallback`` is "error".
    """
    steps: list[StepPlan] = []
    built: list[Plan | None] = []

    def torch_step(part: GraphSpec, decisions: tuple[Decision, ...]) -> None:
        steps.append(StepPlan(part, None, 0, decisions))
        built.append(None)

    def resolve(part: GraphSpec, earlier: tuple[Decision, ...]) -> None:
        try:
            plan, outcomes = build(part)
        except NotSupported as refusal:
            if policy.fallback == "error":
                raise
            refused = tuple(
                Decision(f"'{part.name}' as one plan", False, reason) for reason in refusal.reasons
            )
            pieces = split(part)
            if pieces is None:
                torch_step(part, earlier + refused)
                return
            for index, piece in enumerate(pieces):
                resolve(piece, earlier + refused if index == 0 else ())
            return
        decided = tuple(
            Decision(
                str(outcome.candidate.choice),
                outcome.accepted,
                outcome.reason or "first of cuDNN's ranking that builds",
                outcome.candidate.choice,
                outcome.workspace_bytes,
            )
            for outcome in outcomes
        )
        steps.append(StepPlan(part, plan.choice, plan.workspace_bytes, earlier + decided))
        built.append(plan)

    reason = torch_only(spec)
    if reason is not None:
        torch_step(spec, (Decision(f"'{spec.name}' with cuDNN", False, reason),))
    else:
        resolve(spec, ())
    return Selection(tuple(steps), tuple(built))


def reference_only(spec: GraphSpec, reason: str) -> Selection:
    """The whole graph as one step of the reference executor."""
    return Selection(
        (StepPlan(spec, None, 0, (Decision("the reference executor", True, reason),)),), (None,)
    )
