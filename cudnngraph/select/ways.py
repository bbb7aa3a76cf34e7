"""What a search by measurement knows: ways to run steps, parts of a graph, and their times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backend.candidates import Candidate
from ..backend.plan import KERNEL, Choice, Plan
from ..device.import_rules import Stage
from ..ir.spec import GraphSpec
from ..rewrite.annotate import marks
from .config import TIE_RATIO
from .decision import Decision, StepPlan, instead_of_rules


@dataclass
class Variant:
    """One way to run a step: a built plan, or torch for ``plan`` None."""

    rank: int
    plan: Plan | None
    choice: Choice | None
    workspace_bytes: int
    time_us: float
    final: bool = False  # measured again beside the fastest others, which alone compares them
    right: bool = False  # its plan has passed its check, in this search or before


@dataclass
class StepSearch:
    """The trials of one step; parts that are equal but for names share it."""

    spec: GraphSpec
    hints: Mapping[Choice, str] = field(default_factory=dict)  # tried before all others
    queue: list[Candidate] = field(default_factory=list)
    proposals: Any = None
    ways: list[Variant] = field(default_factory=list)
    lost: list[Decision] = field(default_factory=list)
    opened: bool = False  # asked for what can run it
    started: bool = False  # its first plan was tried
    floor_us: float = 0.0  # no way to run it takes less
    kernels: list[Choice] | None = None  # generated ones left to try, None before they are known
    built: int = 0
    in_vain: int = 0
    thrown_out: int = 0  # plans that were measured, and turned out wrong
    compared: bool = False  # its fastest ways, side by side

    def add(self, way: Variant) -> None:
        """One more way; whatever was compared was not compared with it."""
        self.ways.append(way)
        self.compared = False
        for each in self.ways:
            each.final = False

    def plans(self) -> list[Variant]:
        """The ways by plans of cuDNN's list, in the order of their trials."""
        own = (way for way in self.ways if way.choice is not None and way.choice.engine != KERNEL)
        return sorted(own, key=lambda way: way.rank)

    def unfounded(self) -> bool:
        """Whether plans are left to try, and none that was tried is known to be right."""
        return bool(self.queue) and not any(way.right for way in self.plans())

    def told(self) -> str:
        """What is known of it, in words."""
        ops = " ".join(dict.fromkeys(node.op for node in self.spec.nodes if node.op != "constant"))
        refused, known = len(self.lost), len(self.ways) + len(self.lost) + len(self.queue)
        best = self.best()
        end = "nothing runs it yet"
        if best is not None and math.isfinite(best.time_us):
            by = "torch" if best.choice is None else str(best.choice)
            end = f"best {best.time_us:.1f} us by {by}"
        measured = f"{self.built} plans built, {len(self.ways)} ways measured, {refused} left out"
        return f"{ops[:60]}: {known} known, {measured}; {end}"

    def best(self) -> Variant | None:
        """The fastest way, or one that is nearly as fast and needs less workspace."""
        ways = [way for way in self.ways if way.final] or self.ways
        if not ways:
            return None
        least = min(way.time_us for way in ways)
        near = [way for way in ways if way.time_us <= TIE_RATIO * least]
        return min(near, key=lambda way: (way.workspace_bytes, way.time_us, way.rank))


@dataclass
class Part:
    """A group of nodes, the step that it makes up, and its cuts.

    A cut into one part is the same step as another threshold has it, which only ``by`` runs.
    """

    spec: GraphSpec
    step: StepSearch
    cuts: tuple[tuple[Part, ...], ...] = ()
    size: int = 1
    by: Stage = ""


@dataclass(frozen=True)
class Schedule:
    """A way to run a part: its total time, and the steps in order."""

    time_us: float
    steps: tuple[tuple[Part, Variant], ...]


@dataclass
class Contender:
    """A way to cut the whole graph, with the fastest ways to run its parts."""

    label: str
    runs: Schedule
    time_us: float = math.nan

    def __post_init__(self) -> None:
        self.time_us = self.runs.time_us

    @property
    def workspace_bytes(self) -> int:
        return max(way.workspace_bytes for _, way in self.runs.steps)


def measured(time_us: float) -> float | None:
    """A time as it is recorded: None where nothing could be measured."""
    return time_us if math.isfinite(time_us) else None


def step_plan(
    spec: GraphSpec, way: Variant, plan: Plan | None, decisions: tuple[Decision, ...]
) -> StepPlan:
    """A step of the choice, by the way that it is to run and that way's plan."""
    values = marks(spec)
    if values:
        decisions = (instead_of_rules(values), *decisions)
    verified = None if plan is None else plan.verified
    time_us = measured(way.time_us)
    return StepPlan(spec, way.choice, way.workspace_bytes, decisions, time_us, verified)


def decided(way: Variant, reason: str, *, accepted: bool = False) -> Decision:
    subject = "torch" if way.choice is None else str(way.choice)
    need, time_us = way.workspace_bytes, measured(way.time_us)
    return Decision(subject, accepted, reason, way.choice, need, time_us)


def in_turn(parts: Sequence[Schedule]) -> Schedule:
    """The parts one after the other."""
    return Schedule(
        sum(each.time_us for each in parts), tuple(step for each in parts for step in each.steps)
    )


def of_cuts(winner: Contender, rivals: Sequence[Contender]) -> list[Decision]:
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
        elif ratio > TIE_RATIO:
            reason = f"{ratio:.2f} times the time"
        need, time_us = rival.workspace_bytes, measured(rival.time_us)
        made.append(Decision(rival.label, taken, reason, None, need, time_us))
    return made
