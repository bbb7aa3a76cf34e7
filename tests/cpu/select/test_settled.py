"""What a choice by measurement settles of the steps of any graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.plan import KERNEL, Choice
from cudnngraph.ir.key import step_digest
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.rewrite.annotate import marked
from cudnngraph.rewrite.channels_last import channels_last
from cudnngraph.select.decision import StepPlan
from cudnngraph.select.remembered import fastest, keep_settled, settled_way
from cudnngraph.select.settled import APART, TORCH, Way, from_way, settled, to_way

F16 = torch.float16
PLAN, GENERATED = Choice(4, (("TILE", 1),)), Choice(KERNEL, ())


def layers(count: int = 1) -> GraphSpec:
    """Convolutions with a bias and a SiLU, one behind the other."""
    g = cg.Graph("layers")
    y = g.input("x", (2, 16, 8, 8), F16, layout="channels_last")
    for number in range(count):
        w = g.input(f"w{number}", (16, 16, 3, 3), F16, layout="channels_last")
        y = g.silu(g.bias(g.conv(y, w, padding=1), g.input(f"b{number}", (16,), F16)))
    g.output("y", y)
    return g.spec()


def made(spec: GraphSpec, *parts: tuple[str, Choice | None], us: float | None = 5.0) -> Any:
    """Steps of the ops that are named, in the order of the graph."""
    graph, left, steps = CutGraph(spec), list(compute_nodes(spec.nodes)), []
    for names, choice in parts:
        mine = [left.pop(0) for _ in names.split()]
        assert [node.op for node in mine] == names.split()
        steps.append(StepPlan(subgraph_of(graph, mine), choice, 0, (), us))
    assert not left
    return steps


def ways(spec: GraphSpec, steps: Any) -> dict[str, Way]:
    """By their ops."""
    found = settled(spec, steps)
    return {" ".join(n.op for n in compute_nodes(part.nodes)): way for part, way in found}


def test_plans_calls_of_torch_and_what_is_apart_are_settled() -> None:
    spec = layers()
    assert ways(spec, made(spec, ("conv bias silu", PLAN))) == {"conv bias silu": PLAN}
    assert ways(spec, made(spec, ("conv bias silu", None))) == {"conv bias silu": TORCH}
    apart = made(spec, ("conv", PLAN), ("bias silu", GENERATED))
    assert ways(spec, apart) == {"conv": PLAN, "conv bias silu": APART}
    apart = made(spec, ("conv", None), ("bias silu", GENERATED))
    assert ways(spec, apart) == {"conv": TORCH, "conv bias silu": APART}


def test_each_region_of_a_large_graph_is_settled() -> None:
    spec = layers(8)
    steps = made(spec, *[("conv", PLAN), ("bias silu", GENERATED)] * 7, ("conv bias silu", PLAN))
    found = list(settled(spec, steps))
    assert [way for _, way in found].count(APART) == 7
    one = layers()
    regions = {step_digest(part) for part, way in found if way == APART}
    assert regions == {step_digest(subgraph_of(CutGraph(one), one.nodes))}


@pytest.mark.parametrize(
    "parts",
    [
        [("conv", PLAN), ("bias silu", PLAN)],
        [("conv", PLAN), ("bias silu", None)],
        [("conv", PLAN), ("bias", GENERATED), ("silu", GENERATED)],
        [("conv bias", PLAN), ("silu", GENERATED)],
        [("conv", GENERATED), ("bias silu", None)],
    ],
    ids=str,
)
def test_what_runs_in_another_way_is_not_apart(parts: Any) -> None:
    spec = layers()
    assert APART not in ways(spec, made(spec, *parts)).values()


def test_a_kernel_of_more_says_nothing_of_the_region_alone() -> None:
    g = cg.Graph("summed")
    x, w = g.input("x", (2, 64, 64), F16), g.input("w", (64, 64), F16)
    y = g.add(g.matmul(x, w), g.input("b", (64,), F16))
    g.output("y", g.softmax(y, dim=-1))
    spec = g.spec()
    joined = made(spec, ("matmul", PLAN), ("add softmax", GENERATED))
    assert ways(spec, joined) == {"matmul": PLAN}


def test_what_is_not_timed_or_follows_other_thresholds_is_not_settled() -> None:
    spec = layers()
    apart = ("conv", PLAN), ("bias silu", GENERATED)
    assert ways(spec, made(spec, *apart, us=None)) == {}
    steps = made(spec, *apart)
    steps[1] = replace(steps[1], spec=marked(steps[1].spec, (("kernel_launch_us", 1.0),)))
    assert APART not in ways(spec, steps).values()


def test_what_was_searched_in_another_form_is_not_apart() -> None:
    """Channels last, where the graph is not: its steps read and write copies."""
    g = cg.Graph("layer")
    x, w = g.input("x", (2, 16, 8, 8), F16), g.input("w", (16, 16, 3, 3), F16)
    g.output("y", g.silu(g.bias(g.conv(x, w, padding=1), g.input("b", (16,), F16))))
    spec = g.spec()
    other = channels_last(spec)
    assert other is not spec
    graph = CutGraph(other)
    nodes = compute_nodes(other.nodes)
    conv = next(node for node in nodes if node.op == "conv")
    behind = [node for node in nodes if node.op in ("bias", "silu")]
    copies = [node for node in nodes if node.op not in ("conv", "bias", "silu")]
    groups = [[node] for node in copies] + [[conv], behind]
    kinds = [GENERATED] * len(copies) + [PLAN, GENERATED]
    steps = [
        StepPlan(subgraph_of(graph, group), choice, 0, (), 5.0)
        for group, choice in zip(groups, kinds, strict=True)
    ]
    assert APART not in ways(spec, steps).values()


@pytest.mark.parametrize("way", [TORCH, APART, PLAN, Choice(39, ())], ids=str)
def test_a_way_comes_back_from_json(way: Way) -> None:
    assert to_way(from_way(way)) == way


@pytest.mark.parametrize("data", [7, None, [], [1], "plan", ["torch"], {}], ids=str)
def test_what_is_no_way_is_refused(data: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        to_way(data)


class Kept:
    """A memo in memory."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Any]] = {}

    def of(self, spec: GraphSpec) -> list[Any]:
        return self.rows.setdefault(step_digest(spec), [])

    def add(self, spec: GraphSpec, row: Any) -> bool:
        self.of(spec).append(row)
        return True


def test_a_memo_is_told_what_is_settled_once_and_what_is_last_counts() -> None:
    memo, spec = Kept(), layers()
    steps = made(spec, ("conv", PLAN), ("bias silu", GENERATED))
    for _ in range(2):
        keep_settled(memo, settled(spec, steps))
    assert [row["way"] for rows in memo.rows.values() for row in rows] == [APART]
    assert settled_way(memo.of(spec)) == APART and fastest(memo.of(spec)) is None
    keep_settled(memo, settled(spec, made(spec, ("conv bias silu", PLAN))))
    assert settled_way(memo.of(spec)) == PLAN
    memo.add(spec, {"what": "settled", "way": "nonsense"})
    assert settled_way(memo.of(spec)) == PLAN


def test_a_graph_may_settle_a_step_as_another_plan_than_is_fastest_alone() -> None:
    """Beside other steps; the last graph decides, and no row says what times do."""
    memo, spec = Kept(), layers()
    (step,) = made(spec, ("conv bias silu", PLAN))
    other = Choice(7, ())
    choices = [[each.engine, [list(knob) for knob in each.knobs]] for each in (PLAN, other)]
    for choice in choices:
        right = {"what": "built", "choice": choice, "right": True, "workspace_bytes": 0}
        memo.add(step.spec, right)
    memo.add(step.spec, {"what": "times", "choices": choices, "times": [9.0, 5.0], "rounds": 21})

    def kept(choice: Choice) -> list[object]:
        keep_settled(memo, settled(spec, made(spec, ("conv bias silu", choice))))
        return [row["way"] for row in memo.of(step.spec) if row["what"] == "settled"]

    assert fastest(memo.of(step.spec)) == other
    assert kept(other) == []
    assert kept(PLAN) == [choices[0]] and fastest(memo.of(step.spec)) == PLAN
    assert kept(PLAN) == [choices[0]]
    assert kept(other) == choices and fastest(memo.of(step.spec)) == other
    memo.add(step.spec, {"what": "settled", "way": [8, []]})
    assert fastest(memo.of(step.spec)) == other, "a plan that never passed its check"
