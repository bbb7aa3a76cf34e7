"""Neighbours among the steps of a choice by measurement, joined where one kernel is faster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..backend.plan import Choice, Plan
from ..ir.spec import GraphSpec
from ..partition.analysis import CutGraph, Group, compute_nodes
from ..partition.cuts import subgraph_of
from .bench import Bench
from .config import FINAL_ROUNDS
from .decision import Decision, StepPlan
from .epilogues import behind_product
from .kernels import Item, Kernels, grown, moves
from .ways import Variant, step_plan

Step = tuple[StepPlan, Plan | None]
Best = Callable[[GraphSpec], "Variant | None"]


def joined(
    graph: CutGraph,
    steps: Sequence[StepPlan],
    built: Sequence[Plan | None],
    kernels: Kernels,
    bench: Bench,
    best: Best,
    *,
    brief: bool = False,
    ends: float = math.inf,
) -> tuple[list[StepPlan], list[Plan | None]]:
    """The steps and their plans, with a kernel in place of those that it does faster together.

    ``steps`` were measured one by one; those of other nodes than the graph's stay as they are.
    ``best`` is the fastest way that was measured of a step. The plan of a product gives up what
    stands behind it where a kernel of that and of the steps behind is faster. A ``brief`` search
    builds no plan to be kept. Once the time ``ends`` only the kernels by rule are tried.
    """
    nodes = {node.name: node for node in graph.spec.nodes}
    known: dict[Group, Step] = {}
    items: list[Item] = []
    plans: list[Item] = []
    for step, plan in zip(steps, built, strict=True):
        group = compute_nodes(step.spec.nodes)
        mine = all(nodes.get(node.name) == node for node in group)
        free = mine and len(group) == 1 and graph.is_free(group[0])
        can = mine and not free and step.kind != "cudnn"
        open_ = can and isinstance(kernels.choice(graph, group), Choice)
        items.append(Item(group, open=open_, free=free))
        known[group] = step, plan
        if mine and step.kind == "cudnn":
            plans.append(items[-1])
    for item in plans:
        if time.perf_counter() < ends:
            items = _given_up(graph, item, items, known, kernels, bench, best, brief=brief)
    order = grown(graph, items, kernels)
    # Those that are known may be of another graph, which copies dense images to their places.
    new = [item.nodes for item in order if item.nodes not in known]
    wholes = {nodes: subgraph_of(graph, nodes) for nodes in new}
    asked = {
        nodes: [(spec, choice) for choice in kernels.choices(spec)]
        for nodes, spec in wholes.items()
    }
    if time.perf_counter() >= ends:  # what rules would take is a contender all the same
        asked = {nodes: each[:1] for nodes, each in asked.items()}
    made = iter(bench.kernels([pair for each in asked.values() for pair in each]))
    plans_of = {nodes: [next(made) for _ in each] for nodes, each in asked.items()}
    chosen: list[Step] = []
    single: list[Item] = []
    for item in order:
        if item.nodes in known:
            chosen.append(known[item.nodes])
            single.append(item)
            continue
        own = [each for each in items if each.names <= item.names]
        parts = [known[each.nodes] for each in own]
        one = _faster(wholes[item.nodes], parts, plans_of[item.nodes], bench, brief=brief)
        chosen += parts if one is None else [one]
        single += own if one is None else [item]
    if time.perf_counter() < ends:
        chosen = _moved(graph, single, chosen, kernels, bench, brief=brief)
    return [step for step, _ in chosen], [plan for _, plan in chosen]


def _moved(
    graph: CutGraph,
    items: Sequence[Item],
    steps: Sequence[Step],
    kernels: Kernels,
    bench: Bench,
    *,
    brief: bool,
) -> list[Step]:
    """The steps of items, with ops moved from one kernel to another where both are faster then."""
    of = dict(zip(items, steps, strict=True))
    mine = [item for item in items if of[item][0].kind == "kernel"]
    found = list(moves(graph, mine, kernels))
    specs = [subgraph_of(graph, item.nodes) for move in found for item in (move.left, move.more)]
    asked = [[(spec, choice) for choice in kernels.choices(spec)] for spec in specs]
    made = iter(bench.kernels([pair for each in asked for pair in each]))
    timed = iter(
        _timed(spec, [next(made) for _ in each], bench)
        for spec, each in zip(specs, asked, strict=True)
    )
    for move in found:
        left, more = next(timed), next(timed)
        before = [of[move.source], of[move.target]]
        if left is None or more is None or left.time_us + more.time_us >= _sum_us(before):
            continue
        told = _told(before, _sum_us(before) / (left.time_us + more.time_us))
        of[move.source], of[move.target] = (_kept(t, told, bench, brief) for t in (left, more))
    return [of[item] for item in items]


def _given_up(
    graph: CutGraph,
    item: Item,
    items: list[Item],
    known: dict[Group, Step],
    kernels: Kernels,
    bench: Bench,
    best: Best,
    *,
    brief: bool,
) -> list[Item]:
    """The items, with a bare product in place of one with an epilogue, if a kernel of the epilogue
    and of steps behind it makes up for that; ``known`` has both then."""
    product = behind_product(graph, item.nodes)
    if product is None:
        return items
    front, behind = product
    spec = subgraph_of(graph, front)
    way = best(spec)
    if way is None or not isinstance(kernels.choice(graph, behind), Choice):
        return items
    at = items.index(item)
    parted = [*items[:at], Item(front), Item(behind, open=True), *items[at + 1 :]]
    names = Item(behind).names
    whole = next((each for each in grown(graph, parted, kernels) if names < each.names), None)
    if whole is None:
        return items
    mine = [each for each in items if each is item or each.names <= whole.names]
    parts = [known[each.nodes] for each in mine]
    made = subgraph_of(graph, whole.nodes)
    built = bench.kernels([(made, choice) for choice in kernels.choices(made)])
    beside = subgraph_of(graph, [*front, *whole.nodes]), spec, way
    one = _faster(made, parts, built, bench, brief=brief, beside=beside)
    if one is None or (way.plan is not None and bench.why_wrong(spec, way.plan) is not None):
        return items
    plan = None if way.choice is None or brief else bench.replay(spec, way.choice)
    subject = "torch" if way.choice is None else str(way.choice)
    reason = "the fastest, with the kernel behind it"
    told = Decision(subject, True, reason, way.choice, way.workspace_bytes, way.time_us)
    known[front] = step_plan(spec, way, plan, (told,)), plan
    known[whole.nodes] = one
    left = [each for each in parted if not each.names <= whole.names]
    return [*left, Item(whole.nodes, open=True)]


def _faster(
    spec: GraphSpec,
    parts: Sequence[Step],
    made: Sequence[Plan | str],
    bench: Bench,
    *,
    brief: bool,
    beside: tuple[GraphSpec, GraphSpec, Variant] | None = None,
) -> Step | None:
    """The fastest of the kernels ``made`` for a region, if it takes less time than the parts.

    ``beside``: the graph that the parts make up where they are more than the region, what else of
    it is to run then, and how. Both are timed in turn, as they are to run, but in a ``brief``
    search: alone, a small part finds its data in a cache that all of them together do not fit into.
    """
    timed = _timed(spec, made, bench)
    if timed is None:
        return None
    whole = spec
    instead: list[tuple[GraphSpec, Plan | None]] = [(spec, timed.plans[timed.best][1])]
    times = [_sum_us(parts), timed.time_us]
    if beside is not None:
        whole, front, way = beside
        instead.insert(0, (front, way.plan))
        times[1] += way.time_us
    if not brief:
        chains = [[(step.spec, plan) for step, plan in parts], instead]
        times = bench.chain_times_us(whole, chains, alike=True) or times
    before_us, after_us = times
    if after_us >= before_us:
        return None
    return _kept(timed, _told(parts, before_us / after_us), bench, brief)


@dataclass(frozen=True)
class _Timed:
    """Kernels of a region with their times."""

    spec: GraphSpec
    plans: Sequence[tuple[float, Plan]]

    @property
    def best(self) -> int:
        """The place of the fastest."""
        return min(range(len(self.plans)), key=lambda at: self.plans[at][0])

    @property
    def time_us(self) -> float:
        """The time of the fastest."""
        return self.plans[self.best][0]


def _timed(spec: GraphSpec, made: Sequence[Plan | str], bench: Bench) -> _Timed | None:
    """The kernels ``made`` for a region, timed; None if none runs."""
    plans = [plan for plan in made if not isinstance(plan, str)]
    times = bench.times_us(spec, plans, FINAL_ROUNDS) if plans else []
    found = [(us, plan) for us, plan in zip(times, plans, strict=True) if not isinstance(us, str)]
    return _Timed(spec, found) if found else None


def _sum_us(parts: Sequence[Step]) -> float:
    return sum(step.time_us or 0.0 for step, _ in parts)


def _told(parts: Sequence[Step], ratio: float) -> Decision:
    """What is to be said of the parts that take ``ratio`` times as long."""
    label = " | ".join(" ".join(node.op for node in compute_nodes(s.spec.nodes)) for s, _ in parts)
    return Decision(f"steps {label}"[:300], False, f"{ratio:.2f} times the time")


def _kept(timed: _Timed, told: Decision, bench: Bench, brief: bool) -> Step:
    """The fastest kernel of a region as a step. A ``brief`` search builds none to be kept."""
    time_us, fastest = timed.plans[timed.best]
    plan = fastest if brief else bench.replay(timed.spec, fastest.choice)
    taken = Decision(
        str(plan.choice), True, "the fastest", plan.choice, plan.workspace_bytes, time_us
    )
    left = [
        Decision(
            *(str(other.choice), False, f"{us / time_us:.2f} times the time of the one taken"),
            *(other.choice, None, us),
        )
        for us, other in timed.plans
        if other is not fastest
    ]
    step = StepPlan(
        *(timed.spec, plan.choice, plan.workspace_bytes, (told, taken, *left)),
        *(time_us, plan.verified),
    )
    return step, plan
