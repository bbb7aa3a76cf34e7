"""The choice by rules is taken where the whole graph is faster so than by what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import cudnngraph as cg
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.key import step_digest
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select.decision import ALIAS, WHOLE_GRAPH, Hints, Selection
from cudnngraph.select.ruled import BY_RULES, no_slower
from tests.cpu.select.test_search_large import LAST, tower
from tests.searches import (
    F16,
    POLICY,
    TORCH_US,
    WHOLE,
    Bench,
    Offer,
    block,
    ops,
    run,
    table,
    taken,
)

OFFERS = {WHOLE: [Offer(30.0), Offer(20.0)], LAST: [Offer(5.0)]}


def beside_rules(
    spec: GraphSpec,
    bench: Bench,
    times: Sequence[float] | None,
    policy: cg.Policy = POLICY,
    hints: Hints | None = None,
) -> tuple[Selection, Selection]:
    """The choice by measurement, and what is left of it beside that by rules."""
    spec = canonical(spec)
    found = run(spec, bench, policy, hints)
    bench.whole_us = lambda chains: None if times is None else list(times)
    bench.chains.clear()
    any_bench: Any = bench
    return found, no_slower(found, spec, policy, any_bench, None, hints)


def told(selection: Selection) -> list[tuple[bool, str]]:
    decisions = selection.steps[0].decisions
    return [(each.accepted, each.reason) for each in decisions if each.subject == BY_RULES]


def test_the_choice_by_rules_is_taken_where_the_whole_is_faster_so() -> None:
    bench = table(OFFERS)
    measured, best = beside_rules(tower(8), bench, [200.0, 150.0])
    assert taken(measured) == [(WHOLE, 1)] * 8 + [(LAST, 0)]
    assert taken(best) == [(WHOLE, 0)] * 8 + [(LAST, 0)]
    reason = "what was measured step by step takes 1.333 times the time, whole"
    assert told(best) == [(True, reason)]
    searched = [d.reason for d in best.steps[0].decisions if d.subject == WHOLE_GRAPH]
    assert searched == ["cut at its anchors into 9 regions, 2 of them different"]
    assert [step.time_us for step in best.steps] == [30.0] * 8 + [5.0]
    assert all(plan is not None for plan in best.built)
    (pair,) = bench.chains
    assert pair[0] == pair[1], "the same steps by other plans"


@pytest.mark.parametrize("times", [[150.0, 200.0], [150.0, 149.7], None])
def test_what_was_measured_stays_where_it_is_as_fast(times: Sequence[float] | None) -> None:
    measured, best = beside_rules(tower(8), table(OFFERS), times)
    assert taken(best) == taken(measured)
    if times is not None:
        assert told(best) == [(False, f"{times[1] / times[0]:.3f} times the time, whole")]


def test_nothing_is_timed_where_both_are_the_same() -> None:
    bench = table({WHOLE: [Offer(20.0), Offer(30.0)], LAST: [Offer(5.0)]})
    measured, best = beside_rules(tower(8), bench, [2.0, 1.0])
    assert best is measured and not bench.chains


def test_a_graph_that_was_searched_whole_is_left_as_it_is() -> None:
    bench = table({WHOLE: [Offer(30.0), Offer(20.0)]})
    measured, best = beside_rules(block(), bench, [2.0, 1.0])
    assert best is measured and not bench.chains


def test_where_a_plan_has_to_be_one_rules_cut_nothing() -> None:
    spec, policy = tower(8), cg.Policy(tune="autotune", allow_tf32=False, fallback="error")
    bench = Bench(lambda spec: [Offer(30.0), Offer(20.0)])
    measured, best = beside_rules(spec, bench, [2.0, 1.0], policy)
    assert best is measured and not bench.chains


def test_rules_take_the_first_plan_that_is_right() -> None:
    offers = [Offer(30.0, wrong="wrong: it is"), Offer(1.0, refused="too new"), Offer(25.0)]
    bench = table({WHOLE: [*offers, Offer(20.0)], LAST: [Offer(5.0)]})
    measured, best = beside_rules(tower(8), bench, [200.0, 150.0])
    assert taken(measured)[0] == (WHOLE, 3)
    assert taken(best)[0] == (WHOLE, 2)
    lost = {d.choice.engine: d.reason for d in best.steps[0].decisions if d.choice}
    assert (lost[0], lost[1]) == ("wrong: it is", "too new")


def test_first_plans_that_nothing_is_known_of_are_built_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, ahead = table(OFFERS), list[tuple[str, int]]()
    monkeypatch.setattr(bench, "ahead", lambda spec, count: ahead.append((ops(spec), count)))
    monkeypatch.setattr(bench, "ready", lambda spec, choice: ops(spec) == WHOLE)
    _, best = beside_rules(tower(8), bench, [200.0, 150.0])
    assert taken(best)[-1] == (LAST, 0)
    assert ahead[-1:] == [(LAST, 1)] and (WHOLE, 1) not in ahead


def test_rules_begin_with_what_hints_name() -> None:
    bench = table({WHOLE: [Offer(30.0), Offer(20.0), Offer(25.0)], LAST: [Offer(5.0)]})
    first = run(canonical(tower(8)), bench).steps[0]
    third = next(d.choice for d in first.decisions if d.choice and d.choice.engine == 2)
    hints = {step_digest(first.spec): {third: "a seed"}}
    measured, best = beside_rules(tower(8), bench, [200.0, 150.0], hints=hints)
    assert (taken(measured)[0], taken(best)[0]) == ((WHOLE, 1), (WHOLE, 2))


def test_what_rules_leave_to_torch_is_timed_too() -> None:
    """The convolution in the end has no plan."""
    measured, best = beside_rules(tower(8), table({WHOLE: OFFERS[WHOLE]}), [200.0, 150.0])
    assert taken(measured)[-2:] == [("conv last", None), ("tanh last", None)]
    assert [step.kind for step in best.steps[-2:]] == ["torch", "torch"]
    assert [step.time_us for step in best.steps] == [30.0] * 8 + [TORCH_US] * 2


def test_views_take_no_time() -> None:
    g = cg.Graph("views")
    y = g.input("x", (4, 8, 8), F16)
    for number in range(8):
        y = g.matmul(g.transpose(y, 1, 2), g.input(f"w{number}", (4, 8, 8), F16))
    g.output("y", y)
    bench = Bench(lambda spec: [Offer(30.0), Offer(20.0)] if "matmul" in ops(spec) else ())
    _, best = beside_rules(g.spec(), bench, [200.0, 150.0])
    free = [step.time_us for step in best.steps if ALIAS in step.decisions]
    assert free and set(free) == {0.0}
    assert {step.time_us for step in best.steps if step.choice} == {30.0}
