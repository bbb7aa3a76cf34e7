"""Neighbours among the steps of a choice by measurement, joined where one kernel is faster."""

from __future__ import annotations

from collections.abc import Sequence

from ..backend.plan import Choice, Plan
from ..ir.spec import GraphSpec
from ..partition.analysis import CutGraph, Group, compute_nodes
from ..partition.cuts import subgraph_of
from .bench import Bench
from .config import FINAL_ROUNDS
from .decision import Decision, StepPlan
from .kernels import Item, Kernels, grown


def joined(
    graph: CutGraph,
    steps: Sequence[StepPlan],
    built: Sequence[Plan | None],
    kernels: Kernels,
    bench: Bench,
) -> tuple[list[StepPlan], list[Plan | None]]:
    """The steps and their plans, with a kernel in place of those that it does faster together.

    ``steps`` were measured one by one; those of other nodes than the graph's stay as they are.
    """
    nodes = {node.name: node for node in graph.spec.nodes}
    known: dict[Group, tuple[StepPlan, Plan | None]] = {}
    items: list[Item] = []
    for step, plan in zip(steps, built, strict=True):
        group = compute_nodes(step.spec.nodes)
        mine = all(nodes.get(node.name) == node for node in group)
        free = mine and len(group) == 1 and graph.is_free(group[0])
        can = mine and not free and step.kind != "cudnn"
        open_ = can and isinstance(kernels.choice(graph, group), Choice)
        items.append(Item(group, open=open_, free=free))
        known[group] = step, plan
    chosen: list[tuple[StepPlan, Plan | None]] = []
    for item in grown(graph, items, kernels):
        if item.nodes in known:
            chosen.append(known[item.nodes])
            continue
        parts = [known[each.nodes] for each in items if each.names <= item.names]
        one = _faster(subgraph_of(graph, item.nodes), parts, kernels, bench)
        chosen += parts if one is None else [one]
    return [step for step, _ in chosen], [plan for _, plan in chosen]


def _faster(
    spec: GraphSpec,
    parts: Sequence[tuple[StepPlan, Plan | None]],
    kernels: Kernels,
    bench: Bench,
) -> tuple[StepPlan, Plan | None] | None:
    """The fastest kernel for a region, if it takes less time than its parts one by one."""
    label = " | ".join(" ".join(node.op for node in compute_nodes(s.spec.nodes)) for s, _ in parts)
    apart = sum(step.time_us or 0.0 for step, _ in parts)
    choices = kernels.choices(spec)
    made = bench.kernels([(spec, choice) for choice in choices])
    plans = [plan for plan in made if not isinstance(plan, str)]
    if not plans:
        return None
    times = bench.times_us(spec, plans, FINAL_ROUNDS)
    measured = [(t, n) for n, t in enumerate(times) if not isinstance(t, str)]
    if not measured or min(measured)[0] >= apart:
        return None
    time_us, best = min(measured)
    plan = bench.replay(spec, plans[best].choice)
    decisions = [
        Decision(f"steps {label}"[:300], False, f"{apart / time_us:.2f} times the time"),
        Decision(str(plan.choice), True, "the fastest", plan.choice, plan.workspace_bytes, time_us),
    ]
    for other, each in measured:
        if each != best:
            reason = f"{other / time_us:.2f} times the time of the one taken"
            choice = plans[each].choice
            decisions.append(Decision(str(choice), False, reason, choice, None, other))
    step = StepPlan(
        spec, plan.choice, plan.workspace_bytes, tuple(decisions), time_us, plan.verified
    )
    return step, plan
