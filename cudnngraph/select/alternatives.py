"""The choice by measurement among the forms that the rewrites give a graph.

The form by the GPU's thresholds is searched first. Then each threshold whose other value leads to
another form is tried, one at a time, and kept if the steps that differ take less time together.
Steps that two forms have in common are known by then, and not measured again.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..device.rules import Values
from ..device.values import told
from ..errors import NotSupported
from ..ir.key import step_digest
from ..ir.spec import GraphSpec
from ..partition.analysis import compute_nodes, is_anchor
from ..policy import Policy
from ..rewrite.alternatives import of_graph
from ..rewrite.passes import legalize
from .autotune import autotune
from .bench import Bench
from .config import BEGUN_SHARE, MIN_GAIN
from .cost import Floor, no_floor
from .decision import INSTEAD_OF_RULES, Decision, Hints, Selection, StepPlan, instead_of_rules
from .kernels import Kernels
from .regions import Progress


def by_measurement(
    spec: GraphSpec,
    policy: Policy,
    bench: Bench,
    progress: Progress | None = None,
    kernels: Kernels | None = None,
    hints: Hints | None = None,
    floor: Floor = no_floor,
    *,
    brief: bool = False,
    left_s: float = math.inf,
) -> Selection:
    """Choose for a graph as it was declared; see :func:`~cudnngraph.select.autotune.autotune`.

    Other forms than that by the thresholds are searched while the budget of the graph lasts, and
    most of the ``left_s`` seconds that there are for the whole.
    """
    now = time.perf_counter()
    ends = now + left_s
    deadline = now + min(budget_s(spec, policy), BEGUN_SHARE * left_s)

    def searched(values: Values, *, brief: bool) -> Selection:
        legal = legalize(spec, policy, values)
        found = autotune(
            legal, policy, bench, progress, kernels, hints, floor, brief=brief, ends=ends
        )
        return replace(found, instead=values)

    best = searched((), brief=brief)
    lost: list[Decision] = []
    for (one,) in of_graph(spec, policy):
        values = (*best.instead, one)
        if one[0] in dict(best.instead):
            continue
        if time.perf_counter() >= deadline:
            lost.append(_decision(values, "not tried: the budget was spent"))
            continue
        try:
            other = searched(values, brief=True)
        except NotSupported as refusal:
            lost.append(_decision(values, refusal.reasons[0]))
            continue
        mine, theirs = times_apart(best.steps, other.steps)
        if theirs < MIN_GAIN * mine:
            best = other if brief else searched(values, brief=False)
        else:
            ratio = theirs / mine if mine else math.inf
            lost.append(_decision(values, f"{ratio:.2f} times the time of the steps that differ"))
    taken = [instead_of_rules(best.instead)] if best.instead else []
    return best.told(*taken, *lost)


def budget_s(spec: GraphSpec, policy: Policy) -> float:
    """The time that a search for a graph may take."""
    anchors = sum(is_anchor(node, spec.tensors) for node in compute_nodes(spec.nodes))
    return policy.budget_s * max(1, anchors)


def times_apart(mine: Sequence[StepPlan], others: Sequence[StepPlan]) -> tuple[float, float]:
    """The times of the steps that are in one choice and not in the other."""
    digests = [[step_digest(step.spec) for step in steps] for steps in (mine, others)]
    common = Counter(digests[0]) & Counter(digests[1])
    return _rest_us(mine, digests[0], common), _rest_us(others, digests[1], common)


def _rest_us(steps: Sequence[StepPlan], digests: Sequence[str], common: Counter[str]) -> float:
    """The time of the steps that are not in common; infinite if it is not known."""
    left = Counter(common)
    total = 0.0
    for step, digest in zip(steps, digests, strict=True):
        if left[digest] > 0:
            left[digest] -= 1
        else:
            total += math.inf if step.time_us is None else step.time_us
    return total


def _decision(values: Values, reason: str) -> Decision:
    return Decision(f"{INSTEAD_OF_RULES}: {told(values)}", False, reason)
