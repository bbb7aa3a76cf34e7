"""What a search of a large graph tries first, when it stops, and what is built meanwhile."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import cudnngraph as cg
from cudnngraph.backend.plan import Choice
from cudnngraph.ir.key import step_digest
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.rewrite.passes import legalize
from cudnngraph.select import alternatives, autotune, effort, joining, regions, search
from cudnngraph.select.bench import GpuBench
from cudnngraph.select.config import BUILT_TOGETHER, LEFT_SHARE, PRUNED_OVER, REGIONS_AHEAD
from cudnngraph.select.effort import Effort
from tests.searches import F16, POLICY, Bench, Offer, digest, ops, run, table, taken

KINDS = ("relu", "tanh", "sigmoid", "silu", "elu", "softplus", "abs", "neg")


def tower(counts: Sequence[int]) -> GraphSpec:
    """Products, ``counts[n]`` of them with the nth kind of op behind them."""
    g = cg.Graph("tower")
    y = g.input("x", (32, 16), F16)
    for kind, count in zip(KINDS, counts, strict=False):
        for number in range(count):
            w = g.input(f"w_{kind}_{number}", (16, 16), F16)
            y = getattr(g, kind)(g.matmul(y, w))
    g.output("y", y)
    return g.spec()


def kinds(offers: dict[str, Sequence[Offer]]) -> Bench:
    """Plans of a product and what is behind it; nothing else is worth a thought."""
    listed = {f"matmul {kind}": plans for kind, plans in offers.items()}
    return table(listed, **dict.fromkeys(("matmul", *KINDS), 1e5))


class Clock:
    """Seconds that pass when a plan is built."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        for module in (alternatives, autotune, effort, joining, regions, search):
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        return self.now_s

    def tick(self) -> None:
        self.now_s += 1.0


def order(bench: Bench) -> list[str]:
    return [step.removeprefix("matmul ") for step, _ in bench.built]


def test_plans_that_are_predicted_to_be_slow_are_not_built_behind_others() -> None:
    slow, near = PRUNED_OVER + 0.01, PRUNED_OVER
    offers = [Offer(20.0, slower=slow), Offer(10.0, slower=1.0), Offer(9.0, slower=near)]
    bench = kinds({"relu": [*offers, Offer(1.0, slower=slow), Offer(8.0)]})
    selection = run(tower([1]), bench)
    assert [engine for step, engine in bench.built if step == "matmul relu"] == [1, 2, 4]
    (step,) = selection.steps
    left = [each for each in step.decisions if "predicted" in each.reason]
    assert [each.choice.engine for each in left if each.choice] == [0, 3]
    assert left[0].reason == "not tried: predicted to take over 1.35 of the least"


def test_plans_that_are_predicted_to_be_slow_are_built_where_no_other_builds() -> None:
    offers = [
        Offer(10.0, slower=1.0, refused="no"),
        Offer(20.0, slower=3.0),
        Offer(5.0, slower=2.0),
    ]
    bench = kinds({"relu": offers})
    run(tower([1]), bench)
    assert bench.built[0] == ("matmul relu", 1) and len(bench.built) == 1


def test_plans_that_are_predicted_to_be_slow_are_built_if_they_were_fast_nearby() -> None:
    bench = kinds({"relu": [Offer(10.0, slower=1.0), Offer(9.0, slower=3.0)]})
    spec = tower([1])
    step = step_digest(legalize(spec, POLICY))
    run(spec, bench, hints={step: {Choice(1, (("TILE", 1),)): "an entry of another batch"}})
    assert bench.built[:2] == [("matmul relu", 1), ("matmul relu", 0)]


def test_plans_are_tried_where_the_whole_graph_may_gain_most() -> None:
    """How often a part occurs counts as its time does."""
    bench = kinds({kind: [Offer(10.0), Offer(9.9)] for kind in KINDS[:4]})
    bench.ready = lambda spec, choice: False  # type: ignore[method-assign]
    run(tower([1, 8, 2, 4]), bench)
    assert order(bench)[:4] == ["relu", "tanh", "sigmoid", "silu"], "a first plan of each"
    assert order(bench)[4:] == ["tanh", "silu", "sigmoid", "relu"]


def test_a_part_near_its_floor_is_worth_little(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = kinds({kind: [Offer(10.0), Offer(9.9)] for kind in KINDS[:3]})
    bench.ready = lambda spec, choice: False  # type: ignore[method-assign]
    near = {"matmul relu": 9.95, "matmul tanh": 6.0, "matmul sigmoid": 8.0}
    run(tower([4, 4, 4]), bench, floor=lambda spec: near.get(ops(spec), 0.0))
    assert order(bench)[3:] == ["tanh", "sigmoid"], "relu could gain under 1 % of the graph"


class Workers(Bench):
    """Builds a plan while so many others are timed; counts what the search waits for."""

    def __init__(self, bench: Bench, takes: int) -> None:
        super().__init__(bench._offers, bench._torch_us)
        self.takes = takes
        self.begun: dict[str, int] = {}
        self.waits = 0
        self.ahead_of: list[tuple[str, int]] = []

    def ahead(self, spec: GraphSpec, count: int) -> None:
        self.ahead_of.append((ops(spec), count))
        self.begun.setdefault(digest(spec), len(self.rounds))

    def ready(self, spec: GraphSpec, choice: Choice) -> bool:
        begun = self.begun.get(digest(spec), math.inf)
        return len(self.rounds) >= begun + self.takes

    def proposals(self, spec: GraphSpec, known: Any = None) -> Any:
        found = super().proposals(spec, known)
        inner = found.build

        def build(candidate: Any) -> Any:
            self.waits += not self.ready(spec, candidate.choice)
            self.begun.pop(digest(spec), None)
            return inner(candidate)

        found.build = build
        return found


def test_the_next_plans_of_all_worthy_parts_are_built_while_others_are_timed() -> None:
    offers = {kind: [Offer(10.0 - 0.1 * n) for n in range(10)] for kind in KINDS}
    bench = Workers(kinds(offers), takes=4)
    run(tower([3] * 8), bench)
    tried = len(bench.built) - len(KINDS)
    assert tried == 40, "five of each in vain"
    asked = Counter(step for step, _ in bench.ahead_of)
    assert all(asked[f"matmul {kind}"] for kind in KINDS)
    assert all(count == BUILT_TOGETHER + 1 for _, count in bench.ahead_of)
    assert bench.waits - len(KINDS) < tried / 4, "it times what is there"
    alone = Workers(kinds(offers), takes=10**9)
    run(tower([3] * 8), alone)
    assert alone.waits == len(alone.built), "and waits if nothing is"
    assert Counter(alone.built) == Counter(bench.built)


def test_no_more_parts_are_built_ahead_than_there_are_places() -> None:
    seen: list[int] = []

    class Counted(Workers):
        def ahead(self, spec: GraphSpec, count: int) -> None:
            super().ahead(spec, count)
            seen.append(len(self.begun))

    bench = Counted(kinds({kind: [Offer(10.0)] * 3 for kind in KINDS}), takes=10**9)
    run(tower([2] * 8), bench)
    assert 0 < max(seen) <= REGIONS_AHEAD


@pytest.mark.parametrize("seed", range(12))
def test_what_is_ready_first_changes_no_choice_where_there_is_time(seed: int) -> None:
    """Nor do the batches in which plans are timed: the best of each part is found."""
    drawn = random.Random(seed)
    counts = [drawn.randint(1, 5) for _ in KINDS]
    counts[0] += 6
    offers = {
        kind: [Offer(round(drawn.uniform(5.0, 40.0), 1)) for _ in range(drawn.randint(1, 5))]
        for kind in KINDS
    }
    least = sum(
        count * min(each.time_us for each in offers[kind])  # type: ignore[type-var,operator]
        for kind, count in zip(KINDS, counts, strict=True)
    )
    found = []
    for takes in (0, 3, 10**9):
        bench = Workers(kinds(offers), takes)
        selection = run(tower(counts), bench, floor=lambda spec: 1.0)
        assert [step.kind for step in selection.steps] == ["cudnn"] * sum(counts)
        found.append(sum(step.time_us or 0.0 for step in selection.steps))
    assert max(found) <= 1.02 * (1 + LEFT_SHARE) * least, "but for ties and what little is left"


@pytest.mark.parametrize("total_s", [0.0, 5.0, 20.0, 1e6])
def test_the_time_for_the_whole_ends_the_search_with_the_best_so_far(
    total_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    policy = replace(POLICY, total_s=total_s)
    plans = {kind: [Offer(20.0 - n) for n in range(9)] for kind in KINDS}
    bench = kinds(plans)
    bench.ready = lambda spec, choice: False  # type: ignore[method-assign]
    bench.on_build = clock.tick
    found = alternatives.by_measurement(
        tower([2] * 8),
        policy,
        bench,  # type: ignore[arg-type]
        left_s=total_s,
    )
    first = Counter(step for step, engine in bench.built if engine == 0)
    assert first == {f"matmul {kind}": 1 for kind in KINDS}, "what has no plan yet is built"
    later = len(bench.built) - len(KINDS)
    assert later == (0 if total_s <= 5.0 else 4 if total_s == 20.0 else 64)
    assert all((step.time_us or 99.0) <= 20.0 for step in found.steps), "the first plan contends"
    why = {d.reason for step in found.steps for d in step.decisions if d.time_us is None}
    spent = any("budget of" in reason or "for the whole were spent" in reason for reason in why)
    assert spent is (total_s < 1e6)


def test_a_search_that_is_late_has_timed_what_rules_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A depthwise convolution apart from its epilogue is faster than both as one plan."""
    clock = Clock(monkeypatch)
    g = cg.Graph("depthwise")
    last = {"layout": "channels_last"}
    y = g.input("x", (2, 8, 6, 6), F16, **last)
    for number in range(8):
        w = g.input(f"w{number}", (8, 1, 3, 3), F16, **last)
        y = g.conv_bias_act(y, w, g.input(f"b{number}", (8,), F16), padding=1, groups=8)
    g.output("y", y)
    bench = table(
        {
            "conv bias relu last": [Offer(90.0)],
            "conv last": [Offer(8.0)],
            "bias relu last": [Offer(4.0)],
        }
    )
    bench.on_build = clock.tick
    found = alternatives.by_measurement(
        g.spec(),
        replace(POLICY, total_s=0.0),
        bench,  # type: ignore[arg-type]
        left_s=0.0,
    )
    assert taken(found) == [("conv last", 0), ("bias relu last", 0)] * 8


def test_a_brief_search_builds_no_plan_to_be_kept() -> None:
    plans = {kind: [Offer(10.0), Offer(8.0)] for kind in KINDS}
    bench, brief = kinds(plans), kinds(plans)
    spec = tower([2] * 8)
    one = alternatives.by_measurement(spec, POLICY, bench)  # type: ignore[arg-type]
    other = alternatives.by_measurement(spec, POLICY, brief, brief=True)  # type: ignore[arg-type]
    assert len(bench.replayed) == 8 and brief.replayed == []
    assert [step.time_us for step in one.steps] == [step.time_us for step in other.steps]


def test_the_log_says_what_a_search_is_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    bench = kinds({kind: [Offer(20.0), Offer(12.5)] for kind in KINDS})
    bench.effort = Effort()
    bench.on_build = clock.tick
    with caplog.at_level(logging.INFO, logger="cudnngraph.select.effort"):
        run(tower([2] * 8), bench)
    lines = [record.getMessage() for record in caplog.records]
    took_s = clock.now_s - 100.0
    assert 2 <= len(lines) <= took_s, "at most one a second"
    assert any(
        "2 plans built, 2 ways measured, 0 left out; best 12.5 us by" in line for line in lines
    )
    assert "16 plans built" in str(bench.effort)


def test_seconds_are_told_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    spent = Effort()
    with spent.spent(effort.MEASURING):
        clock.tick()
    with pytest.raises(ValueError), spent.spent(effort.BUILDING):
        clock.tick()
        raise ValueError
    clock.tick()
    spent.seconds[effort.CHECKED] += 0.5
    assert str(spent) == (
        "3.0 s: waiting for rankings 0.0, waiting for builds 1.0, waiting for the GPU 0.0, "
        "measuring 1.0, comparing 0.0, comparing in place 0.0, other 1.0; "
        "workers: building 0.0, checking 0.5 s"
    )


def test_plans_that_are_timed_together_take_one_turn_and_a_wait_ends_it() -> None:
    """While a process has the GPU to itself no worker checks a plan: it must not wait for one."""
    log: list[str] = []

    @contextmanager
    def gate() -> Iterator[None]:
        log.append("taken")
        try:
            yield
        finally:
            log.append("given back")

    bench: Any = GpuBench.__new__(GpuBench)
    bench._alone, bench.effort = gate, Effort()
    bench.effort.let_go = bench._let_go

    def measured() -> None:
        with bench._measuring(effort.MEASURING):
            log.append("timed")

    one = ["taken", "timed", "given back"]
    measured()
    measured()
    assert log == one * 2, "each by itself"
    log.clear()
    with bench.alone():
        assert not log, "nothing is timed yet"
        measured()
        with bench.alone():
            measured()
        bench.effort.let_go()  # as before a wait for a worker
        measured()
    assert log == ["taken", "timed", "timed", "given back", *one]
    log.clear()
    with pytest.raises(ValueError), bench.alone():
        measured()
        raise ValueError
    measured()
    assert log == one * 2, "a failure gives it back"
