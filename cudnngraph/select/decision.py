"""Decisions: the steps of a graph, their plans, and why each was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..backend.plan import KERNEL, Choice, Plan, Verified
from ..device.rules import Values
from ..device.values import told
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

    @property
    def kind(self) -> Literal["cudnn", "kernel", "torch"]:
        """By what it runs."""
        if self.choice is None:
            return "torch"
        return "kernel" if self.choice.engine == KERNEL else "cudnn"


@dataclass(frozen=True)
class Selection:
    """The steps in order, and for each cuDNN step the plan as this thread built it.

    ``channels_last`` says that the steps are those of
    :func:`~cudnngraph.rewrite.channels_last.channels_last` of the graph. ``dense`` are the regions,
    by the names of their nodes, whose steps are those of
    :func:`~cudnngraph.rewrite.channels_last.with_dense_images` of the region. ``instead`` are the
    thresholds that the rewrites followed in place of the GPU's, and ``imported`` those that the
    import of the graph's model is to follow; None where that was not measured.
    """

    steps: tuple[StepPlan, ...]
    built: tuple[Plan | None, ...]
    channels_last: bool = False
    dense: tuple[tuple[str, ...], ...] = ()
    instead: Values = ()
    imported: Values | None = None

    @classmethod
    def of(
        cls, spec: GraphSpec, steps: Sequence[StepPlan], built: Sequence[Plan | None]
    ) -> Selection:
        """Steps of the legalized graph ``spec``, or of it channels last, which has more tensors."""
        tensors = {name for step in steps for name in step.spec.tensors}
        return cls(tuple(steps), tuple(built), channels_last=not tensors <= set(spec.tensors))

    def told(self, *first: Decision, last: Sequence[Decision] = ()) -> Selection:
        """The same, whose first step says what was decided for the whole graph: before what it says
        of itself, and behind."""
        if not (first or last):
            return self
        step, *rest = self.steps
        step = replace(step, decisions=(*first, *step.decisions, *last))
        return replace(self, steps=(step, *rest))


#: Choices to begin with, by a step's digest, each with the entry that it comes from.
Hints = Mapping[str, Mapping[Choice, str]]

#: The subject of what a search says of how it went about a graph.
WHOLE_GRAPH = "the whole graph"

#: The subject of a decision that was made where no kernels could be generated.
NO_KERNELS = "generated kernels"

#: The subject of a decision to follow other thresholds than those of the GPU.
INSTEAD_OF_RULES = "in place of the GPU's thresholds"


def instead_of_rules(values: Values) -> Decision:
    """The decision to follow other thresholds, which were faster when measured."""
    return Decision(INSTEAD_OF_RULES, True, f"measured: {told(values)}")


ALIAS = Decision("a view", True, "the operand's memory, seen in another way: nothing runs")
