"""The search over plans and cuts, on a bench whose times are made up."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.env import EnvKey
from cudnngraph.backend.plan import Choice
from cudnngraph.cache.codec import StaleRecord, dense_regions, steps_of, to_record
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.key import graph_key
from cudnngraph.ir.spec import GraphSpec, is_channels_last
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.memory import Layout, StepMemory
from cudnngraph.rewrite.passes import legalize
from cudnngraph.select import autotune, search
from cudnngraph.select.config import FINAL_ROUNDS, PATIENCE
from cudnngraph.select.decision import ALIAS, Decision, Selection
from cudnngraph.select.rules import why_split
from plans_cache.record import from_json
from tests.cpu.partition.test_partition import BINARY, UNARY, random_graph, two_branches
from tests.cuttings import every_way, pieces, rewritten
from tests.fakes import FakePlan

F16, F32 = torch.float16, torch.float32
POLICY = cg.Policy(tune="autotune", allow_tf32=False, budget_s=1e6)
TORCH_US = 1000.0


def ops(spec: GraphSpec) -> str:
    """The ops of a step; "last" where its first image lies channels last."""
    image = next((t for t in map(spec.tensors.get, spec.inputs) if t and len(t.shape) == 4), None)
    last = image is not None and is_channels_last(image.shape, image.stride)
    return " ".join(node.op for node in compute_nodes(spec.nodes)) + (" last" if last else "")


class Offer:
    """One plan that the made-up library has: its engine, its time, what becomes of it."""

    def __init__(
        self,
        time_us: float | str,
        workspace: int = 0,
        *,
        wrong: str | None = None,
        refused: str | None = None,
        final_us: float | None = None,
    ) -> None:
        self.time_us = time_us
        self.workspace = workspace
        self.wrong = wrong
        self.refused = refused
        self.final_us = final_us


class Bench:
    """A library of offers by step; a step without any is refused. Keeps what it was asked."""

    def __init__(
        self,
        offers: Callable[[GraphSpec], Sequence[Offer]],
        torch_us: Callable[[GraphSpec], float | str] = lambda spec: TORCH_US,
    ) -> None:
        self._offers = offers
        self._torch_us = torch_us
        self.asked: list[str] = []
        self.built: list[tuple[str, int]] = []
        self.timed: dict[str, dict[int | None, float | str]] = {}
        self.rounds: list[tuple[int, int]] = []
        self.checked: list[tuple[str, int]] = []
        self.replayed: list[tuple[GraphSpec, Choice]] = []
        self.chains: list[list[str]] = []
        self.whole_us: Callable[..., list[float] | None] = self.sums_us
        self.on_build: Callable[[], None] = lambda: None

    def offer(self, spec: GraphSpec, engine: int) -> Offer:
        return self._offers(spec)[engine]

    def proposals(self, spec: GraphSpec) -> Any:
        self.asked.append(ops(spec))
        offers = self._offers(spec)
        if not offers:
            raise cg.NotSupported("this graph", [f"no engine for {ops(spec)}"])

        def build(candidate: Candidate) -> tuple[Outcome, FakePlan | None]:
            self.on_build()
            engine = candidate.choice.engine
            offer = offers[engine]
            if offer.refused is not None:
                return Outcome(candidate, False, offer.refused), None
            self.built.append((ops(spec), engine))
            plan = FakePlan(candidate.choice, offer.workspace)
            return Outcome(candidate, True, "", offer.workspace), plan

        listed = [Candidate(n, Choice(n, (("TILE", n),)), f"eng{n}") for n in range(len(offers))]
        return SimpleNamespace(candidates=listed, build=build)

    def times_us(
        self, spec: GraphSpec, plans: Sequence[FakePlan | None], rounds: int
    ) -> list[float | str]:
        times: list[float | str] = []
        self.rounds.append((rounds, len(plans)))
        for plan in plans:
            if plan is None:
                took = self._torch_us(spec)
            else:
                offer = self.offer(spec, plan.choice.engine)
                again = rounds == FINAL_ROUNDS and offer.final_us is not None
                took = offer.final_us if again else offer.time_us  # type: ignore[assignment]
            mine = self.timed.setdefault(digest(spec), {})
            mine[None if plan is None else plan.choice.engine] = took
            times.append(took)
        return times

    def close(self) -> None:
        """Nothing is built ahead."""

    def chain_times_us(
        self,
        spec: GraphSpec,
        chains: Sequence[Sequence[tuple[GraphSpec, FakePlan | None]]],
        *,
        alike: bool = False,
    ) -> list[float] | None:
        self.chains.append([" | ".join(ops(step) for step, _ in chain) for chain in chains])
        for chain in chains:
            there = set(spec.inputs)
            for step, _ in chain:
                assert there.issuperset(step.inputs), "the chain is out of order"
                there |= set(step.outputs)
            assert there.issuperset(spec.outputs)
        return self.whole_us(chains)

    def sums_us(
        self, chains: Sequence[Sequence[tuple[GraphSpec, FakePlan | None]]]
    ) -> list[float] | None:
        """As if a step took in the chain what it takes alone."""
        return [sum(self._took_us(*step) for step in chain) for chain in chains]

    def _took_us(self, spec: GraphSpec, plan: FakePlan | None) -> float:
        took = self.timed[digest(spec)][None if plan is None else plan.choice.engine]
        return math.inf if isinstance(took, str) else took

    def why_wrong(self, spec: GraphSpec, plan: FakePlan) -> str | None:
        self.checked.append((ops(spec), plan.choice.engine))
        return self.offer(spec, plan.choice.engine).wrong

    def replay(self, spec: GraphSpec, choice: Choice) -> FakePlan:
        self.replayed.append((spec, choice))
        return FakePlan(choice)


def digest(spec: GraphSpec) -> str:
    try:
        return graph_key(spec, POLICY).digest
    except cg.UnkeyableError:  # with the -inf of a converted mask
        return str(spec)


def table(offers: Mapping[str, Sequence[Offer]], **torch_us: float | str) -> Bench:
    """A bench by the ops of a step; for torch 1000 µs where nothing is said."""
    return Bench(
        lambda spec: offers.get(ops(spec), ()),
        lambda spec: torch_us.get(ops(spec).removesuffix(" last"), TORCH_US),
    )


def run(spec: GraphSpec, bench: Bench, policy: cg.Policy = POLICY) -> Selection:
    selection: Selection = autotune.autotune(legalize(spec, policy), policy, bench)
    return selection


def taken(selection: Selection) -> list[tuple[str, int | None]]:
    return [(ops(s.spec), None if s.choice is None else s.choice.engine) for s in selection.steps]


def reasons(selection: Selection) -> list[str]:
    return [decision.reason for step in selection.steps for decision in step.decisions]


def of(selection: Selection, engine: int, step: int = 0) -> Decision:
    """The one decision about that engine in a step."""
    (found,) = (
        d for d in selection.steps[step].decisions if d.choice and d.choice.engine == engine
    )
    return found


def block(layout: str = "channels_last", groups: int = 1) -> GraphSpec:
    g = cg.Graph("block")
    x = g.input("x", (2, 8, 6, 6), F16, layout=layout)
    w = g.input("w", (8, 8 // groups, 3, 3), F16, layout=layout)
    y = g.conv_bias_act(x, w, g.input("b", (8,), F16), padding=1, groups=groups)
    g.output("y", y)
    return g.spec()


def chain(second: str = "tanh") -> GraphSpec:
    g = cg.Graph("chain")
    last = {"layout": "channels_last"}
    x = g.input("x", (2, 8, 6, 6), F16, **last)
    w1, w2 = (g.input(name, (8, 8, 1, 1), F16, **last) for name in ("w1", "w2"))
    g.output("y", getattr(g, second)(g.conv(g.relu(g.conv(x, w1)), w2)))
    return g.spec()


WHOLE, CONV, EPILOGUE = "conv bias relu last", "conv last", "bias relu last"


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
    """What steps take alone does not tell of the gaps between them."""
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


def test_what_a_rule_advises_against_is_not_asked_for() -> None:
    spec = block(groups=8)
    assert why_split(spec) is not None
    bench = table({WHOLE: [Offer(1.0)], CONV: [Offer(8.0)], EPILOGUE: [Offer(4.0)]})
    selection = run(spec, bench)
    assert taken(selection) == [(CONV, 0), (EPILOGUE, 0)]
    assert WHOLE not in bench.asked
    assert why_split(spec) in reasons(selection)


def test_progress_is_told_and_never_goes_back() -> None:
    told: list[tuple[int, int]] = []
    bench = table({WHOLE: [Offer(20.0 - n) for n in range(4)], CONV: [Offer(5.0)]})
    autotune.autotune(
        legalize(block(), POLICY), POLICY, bench, lambda done, known: told.append((done, known))
    )
    done = [each for each, _ in told]
    assert done == sorted(done) and done[-1] == len(bench.built)
    assert all(each <= known for each, known in told)


# -- what is wrong, or does not run ----------------------------------------------------------------


def test_a_wrong_plan_is_thrown_out_and_the_next_best_taken() -> None:
    offers = [Offer(10.0), Offer(5.0, wrong="writes over its inputs"), Offer(7.0)]
    bench = table({WHOLE: offers})
    selection = run(block(), bench)
    assert taken(selection) == [(WHOLE, 2)]
    lost = of(selection, 1)
    assert (lost.accepted, lost.reason, lost.time_us) == (False, "writes over its inputs", 5.0)
    assert bench.checked == [(WHOLE, 1), (WHOLE, 2)], "what is not taken needs no check"


def test_a_wrong_plan_of_a_way_that_is_left_is_still_told() -> None:
    bench = table(
        {
            WHOLE: [Offer(5.0, wrong="wrong: 'y' is off by 0.3, at most 0.002 is right")],
            CONV: [Offer(8.0)],
            EPILOGUE: [Offer(4.0)],
        }
    )
    selection = run(block(), bench)
    assert taken(selection) == [(CONV, 0), (EPILOGUE, 0)]
    assert "wrong: 'y' is off by 0.3, at most 0.002 is right" in reasons(selection)


def test_what_cudnn_refused_is_told_where_a_cut_is_taken() -> None:
    selection = run(block(), table({CONV: [Offer(8.0)], EPILOGUE: [Offer(4.0)]}))
    assert taken(selection) == [(CONV, 0), (EPILOGUE, 0)]
    refused = [d for d in selection.steps[0].decisions if d.subject == "'block' as one plan"]
    assert [(d.accepted, d.reason) for d in refused] == [(False, f"no engine for {WHOLE}")]


def test_where_every_plan_is_wrong_torch_runs_the_ops() -> None:
    wrong = [Offer(1.0, wrong="does not run: CUDNN_STATUS_EXECUTION_FAILED")] * 2
    bench = table(dict.fromkeys([WHOLE, CONV, EPILOGUE, "bias last", "relu last"], wrong))
    selection = run(block(), bench)
    assert taken(selection) == [(CONV, None), ("bias last", None), ("relu last", None)]
    assert selection.built == (None, None, None)
    assert bench.replayed == []
    said = {d.subject for d in selection.steps[0].decisions if d.reason == wrong[0].wrong}
    assert said == {
        "engine 0 (TILE=0)",
        "engine 0 (TILE=0) for 'block'",
        "engine 1 (TILE=1) for 'block'",
        "engine 1 (TILE=1)",
        "engine 0 (TILE=0) for 'bias_relu'",
        "engine 1 (TILE=1) for 'bias_relu'",
    }


def test_a_plan_that_cannot_be_timed_loses_with_the_reason() -> None:
    selection = run(block(), table({WHOLE: [Offer("out of memory", 99), Offer(5.0)]}))
    assert taken(selection) == [(WHOLE, 1)]
    lost = of(selection, 0)
    assert (lost.reason, lost.time_us, lost.workspace_bytes) == ("out of memory", None, 99)


def test_an_op_for_which_nothing_can_be_timed_is_left_to_torch() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (4,), F16).relu())
    selection = run(g.spec(), table({}, relu="out of memory"))
    assert taken(selection) == [("relu", None)]
    assert selection.steps[0].time_us is None


def test_a_mistake_of_ours_goes_through() -> None:
    bench = table({WHOLE: [Offer(5.0)]})

    def broken() -> None:
        raise ZeroDivisionError("a mistake of ours")

    bench.on_build = broken
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        run(block(), bench)


# -- fallback="error" ------------------------------------------------------------------------------

STRICT = replace(POLICY, fallback="error")


def test_fallback_error_takes_the_best_single_plan_and_looks_at_nothing_else() -> None:
    bench = table({WHOLE: [Offer(50.0), Offer(40.0)], CONV: [Offer(1.0)]}, conv=1.0)
    assert taken(run(block(), bench, STRICT)) == [(WHOLE, 1)]
    assert bench.asked == [WHOLE]


@pytest.mark.parametrize(
    ("offers", "said"),
    [
        ((), (f"no engine for {WHOLE}",)),
        ((Offer(1.0, refused="is too large"),), ("is too large",)),
        ((Offer(1.0, wrong="writes over its inputs"),) * 2, ("writes over its inputs",)),
        (
            (Offer("out of memory"), Offer(1.0, refused="does not launch")),
            ("out of memory", "does not launch"),
        ),
    ],
    ids=["refused", "not_built", "wrong", "not_run"],
)
def test_fallback_error_raises_with_the_reasons(
    offers: tuple[Offer, ...], said: tuple[str, ...]
) -> None:
    with pytest.raises(cg.NotSupported) as caught:
        run(block(), table({WHOLE: offers}), STRICT)
    assert caught.value.reasons == said
    assert "cuDNN has no plan for graph 'block'" in str(caught.value)


def test_fallback_error_never_gives_a_torch_step() -> None:
    g = cg.Graph("g")
    g.output("y", g.input("x", (4,), F16).relu())
    with pytest.raises(cg.NotSupported, match="no engine for relu"):
        run(g.spec(), table({}, relu=1.0), STRICT)


def test_fallback_error_asks_for_what_a_rule_advises_against() -> None:
    """Slow is not refused: who wants one plan or none gets it."""
    selection = run(block(groups=8), table({WHOLE: [Offer(178.0)]}), STRICT)
    assert taken(selection) == [(WHOLE, 0)]


# -- random graphs, random times -------------------------------------------------------------------


def dice(spec: GraphSpec, seed: int) -> random.Random:
    """The same for parts that are equal but for names."""
    return random.Random(f"{digest(spec)} {seed}")


def random_bench(seed: int, most: int) -> Bench:
    """Whole microseconds up to 40: no two times are within 2 % and apart."""

    def offers(spec: GraphSpec) -> list[Offer]:
        roll = dice(spec, seed)
        if roll.random() < 0.25:
            return []
        return [
            Offer(
                float(roll.randint(1, 40)) if roll.random() < 0.9 else "out of memory",
                wrong="wrong" if roll.random() < 0.2 else None,
                refused="does not build" if roll.random() < 0.1 else None,
            )
            for _ in range(roll.randint(1, most))
        ]

    return Bench(offers, lambda spec: float(dice(spec, -seed - 1).randint(1, 40)))


def right_us(bench: Bench, spec: GraphSpec) -> float:
    """The least time that was measured of a step, plans that are wrong left out."""
    return min(
        (
            took
            for engine, took in bench.timed.get(digest(spec), {}).items()
            if not isinstance(took, str)
            and (engine is None or bench.offer(spec, engine).wrong is None)
        ),
        default=math.inf,
    )


def totals(bench: Bench, spec: GraphSpec) -> list[float]:
    """The time of every way to run the graph, its steps by the best that was measured of each."""
    masked = rewritten(spec)
    variants = [each for each in masked if each is not spec or len(masked) == 1] or [spec]
    if masked[-1] is not spec and not any("sdpa" in node.op for node in spec.nodes):
        variants = masked
    found = []
    for variant in variants:
        graph = CutGraph(variant)
        for way in every_way(graph, compute_nodes(variant.nodes)):
            found.append(sum(right_us(bench, step) for step in pieces(graph, way)))
    return found


RANDOM = {
    "steps": st.lists(
        st.tuples(
            st.sampled_from(("conv", "conv_transpose", *UNARY, *BINARY, "bias", "shift")),
            st.integers(0, 99),
            st.integers(0, 99),
        ),
        min_size=1,
        max_size=12,
    ),
    "extra": st.lists(st.integers(0, 99), max_size=2),
    "seed": st.integers(0, 2**30),
}


# Its tanh has a wrong plan beside torch, and a right one that is built only when that is found out.
IN_PLACE_OF_A_WRONG_ONE: dict[str, Any] = {
    "steps": [
        *[("maximum", 0, 0), ("tanh", 1, 0), ("relu", 14, 0), ("conv", 0, 0), ("conv", 28, 0)],
        *[("conv", 0, 0), ("relu", 59, 0), ("conv", 0, 0), ("conv", 0, 0), ("shift", 97, 0)],
    ],
    "extra": [3, 34],
    "seed": 503474,
}


@settings(max_examples=120, deadline=None)
@given(**RANDOM)
@example(**IN_PLACE_OF_A_WRONG_ONE)
def test_no_way_to_run_a_random_graph_is_faster_than_the_one_taken(
    steps: list[tuple[str, int, int]], extra: list[int], seed: int
) -> None:
    """Against every way there is, listed without the search's own bookkeeping."""
    spec = random_graph(steps, extra).spec()
    bench = random_bench(seed, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "TIE_RATIO", 1.0)  # with it a way may be taken that is 2 % slower
        selection = run(spec, bench)
    total = sum(step.time_us or math.inf for step in selection.steps)
    assert total == min(totals(bench, spec))


@settings(max_examples=120, deadline=None)
@given(**RANDOM)
def test_no_candidate_of_a_random_graph_is_lost(
    steps: list[tuple[str, int, int]], extra: list[int], seed: int
) -> None:
    spec = random_graph(steps, extra).spec()
    bench = random_bench(seed, 12)
    selection = run(spec, bench, replace(POLICY, max_candidates=1 + seed % 9))
    for step, plan in zip(selection.steps, selection.built, strict=True):
        single = len(compute_nodes(step.spec.nodes)) == 1
        assert (plan is None) == (step.choice is None)
        assert single or plan is not None, "torch runs single ops alone"
        assert all(decision.reason for decision in step.decisions)
        if any(decision.subject == "all plans" for decision in step.decisions):
            continue  # it stands at the first of the steps that are equal
        listed = Counter(d.choice.engine for d in step.decisions if d.choice is not None)
        offered = bench._offers(step.spec) if why_split(step.spec) is None else ()
        mine = {engine for engine in listed if engine < len(offered)}
        assert mine == set(range(len(offered)))
        by_torch = [d for d in step.decisions if d.subject == "torch"]
        assert bool(by_torch) == single
        accepted = {d.choice for d in step.decisions if d.accepted and (d.choice or d in by_torch)}
        assert accepted == {step.choice}
    for step in selection.steps:
        engines = [d.choice.engine for d in step.decisions if d.choice is not None]
        assert len(engines) == len(set(engines)), "one decision for each"
    assert bench.replayed == [(s.spec, s.choice) for s in selection.steps if s.choice is not None]


@settings(max_examples=60, deadline=None)
@given(**RANDOM)
def test_every_plan_that_is_taken_was_checked_and_is_right(
    steps: list[tuple[str, int, int]], extra: list[int], seed: int
) -> None:
    spec = random_graph(steps, extra).spec()
    bench = random_bench(seed, 4)
    for step in run(spec, bench).steps:
        if step.choice is not None:
            assert (ops(step.spec), step.choice.engine) in bench.checked
            assert bench.offer(step.spec, step.choice.engine).wrong is None


def test_two_branches_are_compared_in_every_way() -> None:
    """All that there is to compare was measured: own and late epilogues, apart, op by op."""
    spec = two_branches()
    bench = Bench(lambda part: [Offer(10.0)])
    run(spec, bench)
    steps = {
        digest(step)
        for variant in rewritten(spec)
        for way in every_way(CutGraph(variant), compute_nodes(variant.nodes))
        for step in pieces(CutGraph(variant), way)
        if why_split(step) is None
    }
    assert steps == set(bench.timed)


# -- large graphs ----------------------------------------------------------------------------------


def tower(blocks: int) -> GraphSpec:
    """A chain of equal blocks, a convolution with bias and relu each, and one that is different."""
    g = cg.Graph("tower")
    last = {"layout": "channels_last"}
    y = g.input("x", (2, 8, 6, 6), F16, **last)
    for number in range(blocks):
        w = g.input(f"w{number}", (8, 8, 3, 3), F16, **last)
        y = g.conv_bias_act(y, w, g.input(f"b{number}", (8,), F16), padding=1)
    g.output("y", g.tanh(g.conv(y, g.input("v", (8, 8, 1, 1), F16, **last))))
    return g.spec()


LAST = "conv tanh last"


def test_equal_regions_of_a_large_graph_are_searched_once_and_share_a_plan() -> None:
    bench = table({WHOLE: [Offer(30.0), Offer(20.0)], LAST: [Offer(5.0)]})
    selection = run(tower(20), bench)
    assert taken(selection) == [(WHOLE, 1)] * 20 + [(LAST, 0)]
    assert Counter(bench.asked)[WHOLE] == Counter(bench.asked)[LAST] == 1
    assert Counter(bench.checked) == {(WHOLE, 1): 1, (LAST, 0): 1}
    assert [choice.engine for _, choice in bench.replayed] == [1, 0]
    assert len({id(plan) for plan in selection.built[:20]}) == 1
    there = {"x"}
    for step in selection.steps:  # each reads what the one before made, and its own weights
        assert there & set(step.spec.inputs)
        there = set(step.spec.outputs)
    assert there == {"y"}


def test_a_large_graph_says_how_it_was_cut_and_which_steps_are_equal() -> None:
    bench = table({WHOLE: [Offer(30.0), Offer(20.0)], LAST: [Offer(5.0)]})
    selection = run(tower(20), bench)
    first = selection.steps[0].decisions
    assert first[0].reason == "cut at its anchors into 21 regions, 2 of them different"
    assert of(selection, 0).reason == "1.50 times the time of the one taken"
    for step in selection.steps[1:20]:
        assert [d.reason for d in step.decisions] == ["as for step 1, which is equal"]
        assert step.time_us == 20.0


def test_a_region_of_a_large_graph_may_be_split_and_so_are_its_likes() -> None:
    bench = table({WHOLE: [Offer(90.0)], CONV: [Offer(8.0)], EPILOGUE: [Offer(4.0)]}, conv=99.0)
    selection = run(tower(8), bench)
    kinds = taken(selection)
    assert kinds[:16] == [(CONV, 0), (EPILOGUE, 0)] * 8
    for number in range(0, 16, 2):
        (made,) = selection.steps[number].spec.outputs
        assert made in selection.steps[number + 1].spec.inputs


def test_the_search_of_a_large_graph_grows_with_its_kinds_of_regions_alone() -> None:
    counts = []
    for blocks in (10, 60):
        bench = table({WHOLE: [Offer(30.0 - n) for n in range(5)], LAST: [Offer(5.0)]})
        run(tower(blocks), bench)
        counts.append((len(bench.built), len(bench.asked), len(bench.rounds)))
    assert counts[0] == counts[1]


def test_a_close_plan_that_is_faster_in_its_place_is_taken() -> None:
    """Timed with the whole graph around it, for all steps that are equal."""
    bench = table({WHOLE: [Offer(20.0), Offer(21.0), Offer(40.0)], LAST: [Offer(5.0)]})

    def whole(chains: Sequence[Any]) -> list[float]:
        used = [[plan.choice.engine for _, plan in chain] for chain in chains]
        assert used == [[0] * 8 + [0], [1] * 8 + [0]], "the slow plan is not worth it"
        return [200.0, 150.0]

    bench.whole_us = whole
    selection = run(tower(8), bench)
    assert taken(selection) == [(WHOLE, 1)] * 8 + [(LAST, 0)]
    assert (WHOLE, 1) in bench.checked
    bench = table({WHOLE: [Offer(20.0), Offer(21.0, wrong="wrong: it is")], LAST: [Offer(5.0)]})
    bench.whole_us = lambda chains: [200.0, 150.0]
    assert taken(run(tower(8), bench))[0] == (WHOLE, 0)
    bench = table({WHOLE: [Offer(20.0), Offer(21.0)], LAST: [Offer(5.0)]})
    bench.whole_us = lambda chains: [200.0, 199.8]
    assert taken(run(tower(8), bench))[0] == (WHOLE, 0), "no gain to speak of"


def test_a_large_graph_takes_seconds_even_with_hundreds_of_anchors() -> None:
    bench = table({WHOLE: [Offer(30.0), Offer(20.0)], LAST: [Offer(5.0)]})
    start = time.perf_counter()
    selection = run(tower(200), bench)
    assert len(selection.steps) == 201
    assert time.perf_counter() - start < 20.0


def joins(blocks: int) -> GraphSpec:
    """Blocks of two convolutions whose results are joined: slices of one image."""
    g = cg.Graph("joins")
    last = {"layout": "channels_last"}
    y = g.input("x", (2, 16, 6, 6), F16, **last)
    for number in range(blocks):
        w, v = (
            g.input(f"{n}{number}", (8, c, 3, 3), F16, **last) for n, c in (("w", 16), ("v", 8))
        )
        a = g.conv_bias_act(y, w, g.input(f"b{number}", (8,), F16), padding=1)
        y = g.concat([a, g.conv_bias_act(a, v, g.input(f"c{number}", (8,), F16), padding=1)], 1)
    g.output("y", g.conv(y, g.input("u", (8, 16, 1, 1), F16, **last)))
    return g.spec()


def slower_on_slices(copy_us: float) -> Bench:
    """Convolutions that take ten times as long to write a slice, and copies of ``copy_us``."""

    def offers(spec: GraphSpec) -> Sequence[Offer]:
        if spec.nodes[0].op != "conv":
            return ()
        made = [spec.tensors[name] for name in spec.outputs]
        dense = all(is_channels_last(each.shape, each.stride) for each in made)
        return [Offer(10.0 if dense else 100.0)]

    return Bench(offers, lambda spec: copy_us if ops(spec).startswith("identity") else TORCH_US)


@pytest.mark.parametrize("copy_us", [20.0, 200.0])
def test_what_is_joined_is_written_in_its_place_or_copied_there(copy_us: float) -> None:
    """Engines may be much slower on a slice; what they make beside it is copied then."""
    selection = run(joins(4), slower_on_slices(copy_us))
    kinds = [kind.removesuffix(" last") for kind, _ in taken(selection)]
    copied = copy_us < 90.0
    assert kinds.count("identity") == (8 if copied else 0)
    assert kinds.count("conv bias relu") == 8
    steps = [StepMemory(s.spec, s.choice is not None, 0) for s in selection.steps]
    layout = Layout(steps, {*joins(4).inputs, *joins(4).outputs})  # each reads what is there
    joined = [n for n, s in enumerate(selection.steps) if s.spec.nodes[-1].op == "concat"]
    assert len(joined) == 4 and set(joined) <= layout.free, "nothing is left to join"


@pytest.mark.parametrize("copy_us", [20.0, 200.0])
def test_regions_with_dense_images_come_back_from_their_record(copy_us: float) -> None:
    spec = canonical(joins(4))
    selection = run(spec, slower_on_slices(copy_us))
    assert len(selection.dense) == (8 if copy_us < 90.0 else 0) and not selection.channels_last
    env = EnvKey(91900, "1.28.0", "NVIDIA H200", (9, 0), 132, 1)
    record = to_record(spec, graph_key(spec, POLICY), env, POLICY, selection)
    record, legal = from_json(record.to_json()), legalize(spec, POLICY)
    assert [step.spec for step in steps_of(record, legal)] == [s.spec for s in selection.steps]
    assert dense_regions(record) == selection.dense
    for wrong in ([["nowhere"]], [["n0", "n0"]], ["n0"], [[1]], 1) if selection.dense else ():
        other = replace(record, extra={**record.extra, "dense_regions": wrong})
        with pytest.raises(StaleRecord):
            steps_of(other, legal)


def test_views_between_equal_regions_are_views_wherever_they_stand() -> None:
    g = cg.Graph("turns")
    y = g.input("x", (4, 8, 16), F16)
    for number in range(8):
        flat = g.matmul(y.reshape((32, 16)), g.input(f"w{number}", (16, 16), F16))
        y = flat.reshape((4, 8, 16))
    g.output("y", g.tanh(y))
    selection = run(g.spec(), table({"matmul": [Offer(5.0)], "tanh": [Offer(1.0)]}))
    shown = [s for s in selection.steps if s.spec.nodes[-1].op == "reshape"]
    assert len(shown) == 16
    assert all(ALIAS in step.decisions for step in shown)
    assert [ops(s.spec) for s in selection.steps if s.choice is not None] == ["matmul"] * 8 + [
        "tanh"
    ]
