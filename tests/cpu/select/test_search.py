"""The search over plans and cuts, on a bench of made-up times: the fastest way, ties, effort."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import cudnngraph as cg
from cudnngraph.rewrite.passes import legalize
from cudnngraph.select import autotune, search
from cudnngraph.select.config import FINAL_ROUNDS, PATIENCE
from cudnngraph.select.rules import why_split
from tests.searches import (
    CONV,
    EPILOGUE,
    F16,
    POLICY,
    WHOLE,
    Bench,
    Offer,
    block,
    chain,
    digest,
    of,
    reasons,
    run,
    table,
    taken,
)

# -- the fastest way -------------------------------------------------------------------------------


def test_one_plan_is_taken_where_it_is_the_fastest() -> None:
    bench = table({WHOLE: [Offer(30.0), Offer(20.0)], CONV: [Offer(15.0)], EPILOGUE: [Offer(9.0)]})
    selection = run(block(), bench)
    assert taken(selection) == [(WHOLE, 1)]
    (step,) = selection.steps
    assert step.time_us == 20.0
    assert of(selection, 1).accepted and of(selection, 1).reason == "the fastest"
    lost = of(selection, 0)
    assert (lost.accepted, lost.time_us) == (False, 30.0)
    assert lost.reason == "1.50 times the time of the one taken"


def test_a_split_is_taken_where_it_is_faster_than_one_plan() -> None:
    bench = table({WHOLE: [Offer(178.0)], CONV: [Offer(8.0)], EPILOGUE: [Offer(4.0)]})
    selection = run(block(), bench)
    assert taken(selection) == [(CONV, 0), (EPILOGUE, 0)]
    totals = {d.subject: (d.accepted, d.time_us) for d in selection.steps[0].decisions}
    assert totals["one plan"] == (False, 178.0)
    assert totals["steps conv | bias relu"] == (True, 12.0)
    assert "14.83 times the time" in reasons(selection)


def test_the_graphs_parts_may_be_run_in_different_ways() -> None:
    """The first convolution with its relu as one plan, the second apart from its tanh."""
    bench = table(
        {
            "conv relu last": [Offer(10.0)],
            "conv tanh last": [Offer(50.0)],
            CONV: [Offer(9.0)],
            "relu last": [Offer(4.0)],
            "tanh last": [Offer(5.0)],
        }
    )
    selection = run(chain(), bench)
    assert taken(selection) == [("conv relu last", 0), (CONV, 0), ("tanh last", 0)]
    assert sum(step.time_us or 0.0 for step in selection.steps) == 24.0


def test_a_torch_step_is_taken_where_it_is_the_fastest() -> None:
    bench = table({WHOLE: [Offer(90.0)], CONV: [Offer(20.0)], EPILOGUE: [Offer(9.0)]}, conv=3.0)
    selection = run(block(), bench)
    assert taken(selection) == [(CONV, None), (EPILOGUE, 0)]
    assert [plan is None for plan in selection.built] == [True, False]
    torch_step = [d for d in selection.steps[0].decisions if d.subject == "torch"]
    assert [(d.accepted, d.time_us) for d in torch_step] == [(True, 3.0)]


def test_a_graph_may_be_run_channels_last_between_copies() -> None:
    contiguous = {"conv bias relu": [Offer(60.0)], "conv": [Offer(50.0)]}
    bench = table({**contiguous, WHOLE: [Offer(20.0)]}, identity=2.0)
    selection = run(block("contiguous"), bench)
    kinds = taken(selection)
    assert sorted(kinds[:2]) == [("identity", None)] * 2
    assert kinds[2:] == [(WHOLE, 0), ("identity last", None)]
    assert sum(step.time_us or 0.0 for step in selection.steps) == 26.0
    named = [d.subject for d in selection.steps[0].decisions if d.accepted]
    assert any(subject.endswith(", channels last") for subject in named)


def test_a_graph_is_not_run_channels_last_where_the_copies_cost_more() -> None:
    bench = table({"conv bias relu": [Offer(24.0)], WHOLE: [Offer(20.0)]}, identity=2.0)
    assert taken(run(block("contiguous"), bench)) == [("conv bias relu", 0)]


def test_a_boolean_mask_is_converted() -> None:
    g = cg.Graph("g")
    q = g.input("q", (2, 4, 16, 16), F16)
    g.output("o", g.sdpa(q, q, q, g.input("mask", (1, 1, 16, 16), torch.bool)))
    bench = table({"sdpa": [Offer(10.0)], "where last": [Offer(2.0)]})
    assert taken(run(g.spec(), bench)) == [("where last", 0), ("sdpa", 0)]


# -- ties ------------------------------------------------------------------------------------------


def test_of_plans_as_fast_the_smallest_in_memory_is_taken() -> None:
    offers = [Offer(10.0, 4096), Offer(10.19, 64), Offer(10.1, 512), Offer(10.3, 0)]
    selection = run(block(), table({WHOLE: offers}))
    assert taken(selection) == [(WHOLE, 1)], "10.3 is more than 2 % slower"
    assert selection.steps[0].workspace_bytes == 64
    assert of(selection, 0).reason == "as fast, with no less workspace"


def test_of_plans_as_small_the_fastest_is_taken_and_of_equals_cudnns_first() -> None:
    offers = [Offer(20.0), Offer(10.1, 64), Offer(10.0, 64)]
    assert taken(run(block(), table({WHOLE: offers}))) == [(WHOLE, 2)]
    offers = [Offer(20.0), Offer(10.0, 64), Offer(10.0, 64)]
    assert taken(run(block(), table({WHOLE: offers}))) == [(WHOLE, 1)]


def test_of_ways_as_fast_the_coarser_is_taken() -> None:
    bench = table({WHOLE: [Offer(12.0)], CONV: [Offer(8.0)], EPILOGUE: [Offer(4.0)]})
    assert taken(run(block(), bench)) == [(WHOLE, 0)]


def test_of_ways_as_fast_the_one_that_needs_less_memory_is_taken() -> None:
    bench = table({WHOLE: [Offer(12.0, 64)], CONV: [Offer(8.0)], EPILOGUE: [Offer(4.0)]})
    selection = run(block(), bench)
    assert taken(selection) == [(CONV, 0), (EPILOGUE, 0)]
    lost = [d for d in selection.steps[0].decisions if d.subject == "one plan"]
    assert [d.reason for d in lost] == ["as fast, with no less workspace"]


def close_ways() -> Bench:
    return table({WHOLE: [Offer(12.6)], CONV: [Offer(8.0)], EPILOGUE: [Offer(4.0)]})


def test_close_ways_to_cut_a_graph_are_measured_whole_and_that_counts() -> None:
    """The times of single steps leave out the gaps between them."""
    bench = close_ways()
    bench.whole_us = lambda chains: [12.6, 14.0]
    selection = run(block(), bench)
    assert bench.chains == [[WHOLE, f"{CONV} | {EPILOGUE}"]]
    assert taken(selection) == [(WHOLE, 0)]
    totals = {d.subject: (d.accepted, d.time_us) for d in selection.steps[0].decisions}
    assert totals["one plan"] == (True, 12.6)
    assert totals["steps conv | bias relu"] == (False, 14.0)


def test_without_memory_to_measure_them_whole_the_sums_count() -> None:
    bench = close_ways()
    bench.whole_us = lambda chains: None
    assert taken(run(block(), bench)) == [(CONV, 0), (EPILOGUE, 0)]
    assert len(bench.chains) == 1


def test_ways_that_are_not_close_are_not_measured_whole() -> None:
    bench = table({WHOLE: [Offer(14.0)], CONV: [Offer(8.0)], EPILOGUE: [Offer(4.0)]})
    assert taken(run(block(), bench)) == [(CONV, 0), (EPILOGUE, 0)]
    assert bench.chains == []


def test_close_plans_are_measured_again_for_longer_and_that_counts() -> None:
    offers = [Offer(10.0, final_us=10.8), Offer(10.6, final_us=10.1), Offer(12.0, final_us=1.0)]
    bench = table({WHOLE: offers})
    selection = run(block(), bench)
    assert taken(selection) == [(WHOLE, 1)]
    assert (selection.steps[0].time_us, of(selection, 0).time_us) == (10.1, 10.8)
    assert (FINAL_ROUNDS, 2) in bench.rounds, "12.0 is no finalist"


def test_a_first_time_is_not_compared_with_final_ones() -> None:
    """Under load every plan may be slower than what another took from rest."""
    offers = [Offer(10.0, final_us=12.0), Offer(10.5, final_us=12.6), Offer(11.0, final_us=16.0)]
    bench = table({WHOLE: offers})
    selection = run(block(), bench)
    assert taken(selection) == [(WHOLE, 0)]
    assert of(selection, 0).time_us == 12.0
    assert of(selection, 2).time_us == 11.0
    assert of(selection, 2).reason == "over 1.08 times the fastest when first measured"


# -- effort ----------------------------------------------------------------------------------------


def test_no_more_plans_are_built_than_the_policy_allows() -> None:
    bench = table({WHOLE: [Offer(50.0 - n) for n in range(9)]})
    selection = run(block(), bench, replace(POLICY, max_candidates=3))
    assert [engine for step, engine in bench.built if step == WHOLE] == [0, 1, 2]
    for engine in range(3, 9):
        assert of(selection, engine).reason == "not tried: max_candidates=3 were built"


def test_plans_that_do_not_build_are_not_counted() -> None:
    offers = [*[Offer(1.0, refused="does not build")] * 5, Offer(9.0), Offer(8.0)]
    selection = run(block(), table({WHOLE: offers}), replace(POLICY, max_candidates=2))
    assert taken(selection) == [(WHOLE, 6)]
    assert of(selection, 0).reason == "does not build"


def test_a_list_without_any_gain_is_left_alone() -> None:
    offers = [Offer(10.0)] + [Offer(10.0 + n) for n in range(1, 11)]
    bench = table({WHOLE: offers})
    selection = run(block(), bench)
    built = [engine for step, engine in bench.built if step == WHOLE]
    assert built == list(range(1 + PATIENCE))
    assert of(selection, 10).reason == (f"not tried: the {PATIENCE} before it were no faster")


def test_a_gain_starts_patience_anew() -> None:
    slow = [Offer(11.0)] * (PATIENCE - 1)
    offers = [Offer(10.0), *slow, Offer(9.0), *slow, Offer(5.0)]
    selection = run(block(), table({WHOLE: offers}), replace(POLICY, max_candidates=99))
    assert taken(selection) == [(WHOLE, len(offers) - 1)]


class Clock:
    """Seconds that pass when a plan is built."""

    def __init__(self, build_s: float) -> None:
        self.now_s = 100.0
        self.build_s = build_s

    def perf_counter(self) -> float:
        return self.now_s

    def tick(self) -> None:
        self.now_s += self.build_s


@pytest.mark.parametrize(("budget_s", "extra"), [(0.0, 0), (4.0, 2), (60.0, 3)])
def test_the_budget_ends_the_search_but_every_parts_first_plan_is_tried(
    budget_s: float, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(1.0)
    for module in (autotune, search):
        monkeypatch.setattr(module, "time", clock)
    offers = {WHOLE: [Offer(20.0 - n) for n in range(4)], CONV: [Offer(30.0)]}
    bench = table(offers)
    bench.on_build = clock.tick
    selection = run(block(), bench, replace(POLICY, budget_s=budget_s))
    assert (CONV, 0) in bench.built
    assert [engine for step, engine in bench.built if step == WHOLE] == list(range(1 + extra))
    for engine in range(1 + extra, 4):
        assert of(selection, engine).reason == f"not tried: the budget of {budget_s:g} s was spent"


def test_the_budget_is_for_each_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1.0)
    for module in (autotune, search):
        monkeypatch.setattr(module, "time", clock)
    bench = table({"conv relu last": [Offer(20.0 - n) for n in range(9)]})
    bench.on_build = clock.tick
    run(chain("relu"), bench, replace(POLICY, budget_s=2.0))
    assert len(bench.built) == 4, "two convolutions, two seconds each"


def test_plans_of_a_part_that_cannot_win_any_more_are_not_built() -> None:
    bench = table({WHOLE: [Offer(10.0)], CONV: [Offer(50.0)] * 5, EPILOGUE: [Offer(9.0)] * 5})
    run(block(), bench)
    assert Counter(step for step, _ in bench.built) == {WHOLE: 1, CONV: 1, EPILOGUE: 1}


def test_plans_of_a_part_that_could_still_win_are_built() -> None:
    bench = table(
        {
            WHOLE: [Offer(10.0), Offer(9.0)],
            CONV: [Offer(12.0), Offer(14.0), Offer(3.5)],
            EPILOGUE: [Offer(2.0)],
        }
    )
    assert taken(run(block(), bench)) == [(CONV, 2), (EPILOGUE, 0)]


def test_no_part_is_told_apart_by_its_names() -> None:
    """The two convolutions with their relu are one step to be measured."""
    bench = table({"conv relu last": [Offer(10.0), Offer(9.0)], CONV: [Offer(7.0)]})
    selection = run(chain("relu"), bench)
    assert taken(selection) == [("conv relu last", 1)] * 2
    assert Counter(bench.asked)["conv relu last"] == Counter(bench.asked)[CONV] == 1
    assert Counter(bench.built)[("conv relu last", 1)] == 1
    assert bench.checked == [("conv relu last", 1)]
    assert len({spec.name for spec, _ in bench.replayed}) >= 1 and len(bench.replayed) == 2
    assert bench.replayed[0][0].outputs != bench.replayed[1][0].outputs


@pytest.mark.parametrize("whole_us", [1.0, 90.0])
def test_what_a_rule_advises_against_is_measured_all_the_same(whole_us: float) -> None:
    spec = block(groups=8)
    assert why_split(spec) is not None
    bench = table({WHOLE: [Offer(whole_us)], CONV: [Offer(8.0)], EPILOGUE: [Offer(4.0)]})
    faster = [(WHOLE, 0)] if whole_us < 12.0 else [(CONV, 0), (EPILOGUE, 0)]
    assert taken(run(spec, bench)) == faster
    assert bench.timed[digest(spec)][0] == whole_us


def test_progress_is_told_and_never_goes_back() -> None:
    told: list[tuple[int, int]] = []
    bench = table({WHOLE: [Offer(20.0 - n) for n in range(4)], CONV: [Offer(5.0)]})
    autotune.autotune(
        legalize(block(), POLICY), POLICY, bench, lambda done, known: told.append((done, known))
    )
    done = [each for each, _ in told]
    assert done == sorted(done) and done[-1] == len(bench.built)
    assert all(each <= known for each, known in told)
