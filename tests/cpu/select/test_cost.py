"""Lower bounds of times, what they spare a search, and what an early end costs."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.key import step_digest
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.ops.work import bytes_of, flops_of
from cudnngraph.partition.analysis import CutGraph, Group, compute_nodes
from cudnngraph.partition.cuts import cuts, subgraph_of
from cudnngraph.partition.regions import regions as regions_of_graph
from cudnngraph.rewrite.channels_last import channels_last
from cudnngraph.rewrite.passes import legalize
from cudnngraph.select import config, cost, regions, search
from cudnngraph.select.cost import Rates, least_bytes, least_flops, measured
from tests.chunks import each_case
from tests.cpu.select.test_alternatives import KINDS, by_rules, random_graph
from tests.fakes import FakePlan
from tests.partitions import random_graph as random_convolutions
from tests.samples import Case, enumerate_cases
from tests.searches import (
    CONV,
    EPILOGUE,
    F16,
    POLICY,
    WHOLE,
    Bench,
    Offer,
    block,
    digest,
    ops,
    reasons,
    right_us,
    run,
    table,
    taken,
)

H100S = Rates(1.0, 1e6, {F16: 1e9})  # of no GPU: round numbers


# -- what a step takes at least --------------------------------------------------------------------


def one(op: str, *shapes: tuple[int, ...], **attrs: Any) -> GraphSpec:
    g = cg.Graph("g")
    given = [g.input(f"x{n}", shape, F16) for n, shape in enumerate(shapes)]
    g.output("y", getattr(g, op)(*given, **attrs))
    return canonical(g.spec())


def test_a_pointwise_op_moves_its_operands_and_its_result() -> None:
    assert least_bytes(one("relu", (8, 64))) == 2 * 2 * 512
    assert least_bytes(one("add", (8, 64), (1, 64))) == 2 * (2 * 512 + 64)
    assert least_flops(one("relu", (8, 64))) == {}


def test_a_view_takes_nothing() -> None:
    assert least_bytes(one("reshape", (8, 64), shape=(512,))) == 0
    assert H100S.floor_us(one("reshape", (8, 64), shape=(512,))) == 0.0


@pytest.mark.parametrize(
    ("size", "kernel", "options", "whole"),
    [
        (8, 1, {}, True),
        (8, 3, {"padding": 1}, True),
        (9, 3, {"stride": 2, "padding": 1}, True),
        (8, 1, {"stride": 2}, False),  # it reads every other pixel
        (9, 2, {"stride": 2}, False),  # the last row is not read
        (9, 2, {"stride": 2, "dilation": 2}, False),
    ],
)
def test_a_convolution_reads_its_image_where_windows_leave_no_gap(
    size: int, kernel: int, options: dict[str, int], whole: bool
) -> None:
    spec = one("conv", (2, 8, size, size), (8, 8, kernel, kernel), **options)
    image = 2 * 2 * 8 * size * size
    assert least_bytes(spec) == bytes_of(spec) - (0 if whole else image)


def test_fast_algorithms_save_all_but_one_multiplication_of_a_window() -> None:
    spec = one("conv", (2, 8, 8, 8), (8, 8, 3, 3), padding=1)
    assert least_flops(spec) == {F16: flops_of(spec) // 9}
    spec = one("matmul", (64, 32), (32, 16))
    assert least_flops(spec) == {F16: flops_of(spec)}


def test_the_smallest_kernel_is_a_bound_too() -> None:
    assert H100S.floor_us(one("relu", (1, 8))) == 1.0
    assert H100S.floor_us(one("relu", (1000, 1000))) == 4.0
    assert H100S.floor_us(one("matmul", (1000, 1000), (1000, 1000))) == 6.0


@each_case(enumerate_cases())
def test_no_sample_moves_or_multiplies_more_at_least_than_in_all(case: Case) -> None:
    spec = case.build().spec()
    assert 0 <= least_bytes(spec) <= bytes_of(spec)
    assert sum(least_flops(spec).values()) <= flops_of(spec)
    graph = CutGraph(legalize(canonical(spec), POLICY))
    nodes = compute_nodes(graph.spec.nodes)
    for node in nodes:  # a part of a graph is no exception
        part = subgraph_of(graph, (node,))
        if graph.is_free(node) and len(nodes) > 1:
            continue
        assert 0 <= least_bytes(part) <= bytes_of(part)


# -- the rates of a GPU ----------------------------------------------------------------------------


def gpu(kernel_us: float, bytes_per_us: float, flops_per_us: float) -> Bench:
    """Torch's steps on a GPU of these rates."""

    def torch_us(spec: GraphSpec) -> float:
        return kernel_us + bytes_of(spec) / bytes_per_us + flops_of(spec) / flops_per_us

    return Bench(lambda spec: (), torch_us)


def test_rates_are_measured_by_copies_and_a_product() -> None:
    bench: Any = gpu(2.0, 4e6, 5e8)
    found = measured(bench, one("matmul", (64, 32), (32, 16)))
    assert found.kernel_us == pytest.approx(2.0 / config.FASTEST_RATE, rel=1e-3)
    assert found.bytes_per_us == pytest.approx(4e6 * config.FASTEST_RATE, rel=1e-2)
    least = 5e8 * config.FASTEST_RATE
    assert 0.8 * least < found.flops_per_us[F16] <= least
    assert set(measured(bench, one("relu", (8, 64))).flops_per_us) == set()


def test_rates_that_cannot_be_measured_bound_nothing() -> None:
    bench: Any = Bench(lambda spec: (), lambda spec: "out of memory")
    for spec in (one("matmul", (64, 32), (32, 16)), one("relu", (1000, 1000))):
        assert measured(bench, spec).floor_us(spec) == 0.0


def test_a_product_that_cannot_be_measured_bounds_no_product() -> None:
    bench: Any = gpu(2.0, 4e6, 5e8)
    fine = bench._torch_us
    bench._torch_us = lambda spec: "out of memory" if "matmul" in ops(spec) else fine(spec)
    spec = one("matmul", (4096, 4096), (4096, 4096))
    found = measured(bench, spec).floor_us(spec)
    assert 0.0 < found < 100.0, "by its bytes alone"


def test_dtypes_without_a_probe_are_bounded_by_bytes_alone() -> None:
    g = cg.Graph("g")
    a, b = (g.input(name, (64, 64), torch.int8) for name in "ab")
    g.output("y", g.matmul(a, b))
    assert least_flops(g.spec()) == {} and least_bytes(g.spec()) > 0


# -- what is not built -----------------------------------------------------------------------------


def floors(**by_ops: float) -> Any:
    return lambda spec: by_ops.get(ops(spec).replace(" ", "_"), 0.0)


def test_what_cannot_win_is_not_built() -> None:
    slow = {CONV: [Offer(8.0)], EPILOGUE: [Offer(4.0)]}
    bench = table({WHOLE: [Offer(10.0)], **slow})
    floor = floors(conv_last=7.0, bias_relu_last=3.5, bias_last=2.0, relu_last=2.0)
    assert taken(run(block(), bench, floor=floor)) == [(WHOLE, 0)]
    assert {step for step, _ in bench.built} == {WHOLE}
    bench = table({WHOLE: [Offer(10.0)], **slow})
    run(block(), bench, floor=floors(conv_last=5.0, bias_relu_last=3.5))
    assert {CONV, EPILOGUE} <= {step for step, _ in bench.built}


def test_what_could_not_win_is_built_where_the_winner_is_wrong() -> None:
    bench = table({WHOLE: [Offer(10.0, wrong="off")], CONV: [Offer(8.0)], EPILOGUE: [Offer(4.0)]})
    floor = floors(conv_last=7.0, bias_relu_last=3.5)
    assert taken(run(block(), bench, floor=floor)) == [(CONV, 0), (EPILOGUE, 0)]


def test_a_step_near_its_floor_is_not_searched() -> None:
    offers = [Offer(10.0)] * 6
    for floor_us, built in ((9.95, 1), (5.0, 6)):
        bench = table({WHOLE: offers})
        selection = run(block(), bench, floor=floors(conv_bias_relu_last=floor_us))
        assert Counter(step for step, _ in bench.built)[WHOLE] == built
        assert ("under 1% of its time" in reasons(selection)[-1]) or built == 6


def regions_of(count: int) -> GraphSpec:
    """Equal blocks as that of ``block``: one, or a graph that is searched by regions."""
    g = cg.Graph("regions")
    last = {"layout": "channels_last"}
    y = g.input("x", (2, 8, 6, 6), F16, **last)
    for n in range(count):
        w = g.input(f"w{n}", (8, 8, 3, 3), F16, **last)
        y = g.conv_bias_act(y, w, g.input(f"b{n}", (8,), F16), padding=1)
    g.output("y", y)
    return canonical(g.spec())


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("wrong", [1, 3])
def test_no_part_is_given_up_because_of_a_first_plan_that_is_wrong(count: int, wrong: int) -> None:
    """It says nothing of the others, which may be more than twice as fast."""
    offers = [*[Offer(90.0 + n, wrong="off") for n in range(wrong)], Offer(5.0)]
    split = {CONV: [Offer(20.0)], EPILOGUE: [Offer(9.0)]}
    bench = table({WHOLE: offers, **split})
    assert taken(run(regions_of(count), bench)) == [(WHOLE, wrong)] * count
    assert Counter(bench.checked) == {(WHOLE, n): 1 for n in range(wrong + 1)}


@pytest.mark.parametrize("count", [1, 20])
def test_a_part_is_given_up_because_of_a_first_plan_that_is_right(count: int) -> None:
    bench = table({WHOLE: [Offer(90.0), Offer(5.0)], CONV: [Offer(20.0)], EPILOGUE: [Offer(9.0)]})
    selection = run(regions_of(count), bench)
    assert taken(selection) == [(CONV, 0), (EPILOGUE, 0)] * count
    assert (WHOLE, 1) not in bench.built and Counter(bench.checked)[WHOLE, 0] == 1


def test_a_plan_that_was_checked_when_it_was_built_is_not_checked_again() -> None:
    class Checking(Bench):
        def passed(self, spec: GraphSpec, plan: FakePlan) -> bool:
            return self.offer(spec, plan.choice.engine).wrong is None

    offers = {WHOLE: [Offer(90.0), Offer(5.0)], CONV: [Offer(20.0)], EPILOGUE: [Offer(9.0)]}
    bench = Checking(lambda spec: offers.get(ops(spec), ()))
    run(block(), bench)
    assert (WHOLE, 1) not in bench.built
    assert Counter(bench.checked) == {(CONV, 0): 1, (EPILOGUE, 0): 1}, "what is taken"


def test_no_plan_is_doubted_once_the_budget_is_spent() -> None:
    offers = [Offer(90.0, wrong="off"), Offer(5.0)]
    bench = table({WHOLE: offers, CONV: [Offer(20.0)], EPILOGUE: [Offer(9.0)]})
    selection = run(block(), bench, replace(POLICY, budget_s=1e-9))
    assert taken(selection) == [(CONV, 0), (EPILOGUE, 0)]
    assert Counter(bench.checked) == {(CONV, 0): 1, (EPILOGUE, 0): 1}


def tower(blocks: int, width: int) -> GraphSpec:
    """Equal blocks, then a small one."""
    g = cg.Graph("tower")
    last = {"layout": "channels_last"}
    y = g.input("x", (2, 8, 16, 16), F16, **last)
    for n in range(blocks):
        y = g.relu(g.conv(y, g.input(f"w{n}", (8, 8, 3, 3), F16, **last), padding=1))
    w = g.input("small", (width, 8, 1, 1), F16, **last)
    g.output("y", g.tanh(g.conv(y, w, stride=8)))
    return canonical(g.spec())


def test_a_region_of_little_time_is_not_searched() -> None:
    many = {"conv relu last": [Offer(100.0 - n) for n in range(6)]}
    for small_us, built in ((3.0, 1), (300.0, 6)):
        small = {"conv tanh last": [Offer(small_us)] * 6}
        bench = table({**many, **small}, conv=1e6, relu=1e6, tanh=1e6)
        run(tower(12, 8), bench)
        counts = Counter(step for step, _ in bench.built)
        assert counts["conv relu last"] == 6
        assert counts["conv tanh last"] == built


def test_close_ways_of_little_time_are_not_measured_again() -> None:
    many = {"conv relu last": [Offer(100.0), Offer(101.0)]}
    for small_us, again in ((1.0, False), (300.0, True)):
        small = {"conv tanh last": [Offer(small_us), Offer(1.01 * small_us)]}
        bench = table({**many, **small}, conv=1e6, relu=1e6, tanh=1e6)
        finals: list[str] = []
        timed = bench.times_us

        def times_us(
            part: GraphSpec, plans: Any, rounds: int, timed: Any = timed, finals: Any = finals
        ) -> Any:
            if rounds == config.FINAL_ROUNDS:
                finals.append(ops(part))
            return timed(part, plans, rounds)

        bench.times_us = times_us  # type: ignore[method-assign]
        run(tower(12, 8), bench)
        assert ("conv tanh last" in finals) is again and "conv relu last" in finals


# -- random graphs with random times ---------------------------------------------------------------


class Timed:
    """Random plans for every step, none over twice as fast as the first, and their true floors."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.asked: list[GraphSpec] = []  # the steps whose plans were asked for

    def dice(self, spec: GraphSpec, salt: int) -> random.Random:
        return random.Random(f"{step_digest(spec)} {self.seed} {salt}")

    def offers(self, spec: GraphSpec) -> Sequence[Offer]:
        self.asked.append(spec)
        roll = self.dice(spec, 0)
        if roll.random() < 0.2:
            return []
        first = roll.uniform(5.0, 40.0)
        others = (first * roll.uniform(0.5, 1.5) for _ in range(roll.randint(0, 7)))
        return [
            Offer(time_us, wrong="wrong" if number and roll.random() < 0.1 else None)
            for number, time_us in enumerate((first, *others))
        ]

    def torch_us(self, spec: GraphSpec) -> float:
        self.asked.append(spec)
        return self.dice(spec, 1).uniform(20.0, 60.0)

    def best_us(self, spec: GraphSpec) -> float:
        """The fastest way to run it as one step."""
        times = [float(each.time_us) for each in self.offers(spec) if each.wrong is None]
        if len(compute_nodes(spec.nodes)) == 1:
            times.append(self.torch_us(spec))
        return min(times, default=math.inf)

    def floor(self, spec: GraphSpec) -> float:
        """A share of the fastest way to run it as one step, be it wrong."""
        times = [float(each.time_us) for each in self.offers(spec)]
        if len(compute_nodes(spec.nodes)) == 1:
            times.append(self.torch_us(spec))
        return self.dice(spec, 2).uniform(0.3, 1.0) * min(times, default=0.0)

    def bench(self) -> Bench:
        return Bench(self.offers, self.torch_us)

    def total(self, spec: GraphSpec, floor: Any = cost.no_floor) -> tuple[float, Bench]:
        bench = self.bench()
        policy = replace(POLICY, max_candidates=99)
        selection = run(spec, bench, policy, floor=floor)
        return sum(step.time_us or 0.0 for step in selection.steps), bench


def exact(patch: pytest.MonkeyPatch, share: float) -> None:
    """No limits but the early end: no ties, no end of patience, all close ways compared."""
    patch.setattr(search, "TIE_RATIO", 1.0)
    patch.setattr(search, "PATIENCE", 99)
    patch.setattr(regions, "UNCOMPARED_SHARE", 0.0)
    for module in (search, regions):
        patch.setattr(module, "LEFT_SHARE", share)


CONVOLUTIONS = st.lists(
    st.tuples(
        st.sampled_from(("conv", "conv", "relu", "tanh", "add", "bias")),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    min_size=2,
    max_size=14,
)


def least_us(spec: GraphSpec, us: Callable[[GraphSpec], float]) -> float:
    """The time of the fastest way to run a graph, if its steps take so long."""
    legal = legalize(spec, POLICY)
    borders = regions_of_graph(CutGraph(legal))
    forms = [legal] if borders else [legal, channels_last(legal)]
    return min(
        sum(_least_us(graph, nodes, us, {}) for nodes in borders or [graph.compute_nodes])
        for graph in map(CutGraph, forms)
    )


def _least_us(
    graph: CutGraph,
    nodes: Group,
    us: Callable[[GraphSpec], float],
    known: dict[tuple[str, ...], float],
) -> float:
    place = tuple(node.name for node in nodes)
    if place not in known:
        free = len(nodes) == 1 and graph.is_free(nodes[0])
        ways = [0.0 if free else us(subgraph_of(graph, nodes))]
        ways += [
            sum(_least_us(graph, group, us, known) for group in groups)
            for groups in cuts(graph, nodes)
        ]
        known[place] = min(ways)
    return known[place]


def gained_by_one(made: Timed, spec: GraphSpec, bench: Bench) -> float:
    """The time of a graph if of one step that was searched all plans had been tried, at best."""
    found = {digest(step): step for step in made.asked}

    def known(step: GraphSpec) -> float:
        return right_us(bench, step)

    least = least_us(spec, known)
    for name, one in found.items():
        if name in bench.timed:
            best = made.best_us(one)
            least = min(
                least, least_us(spec, lambda s, n=name, t=best: t if digest(s) == n else known(s))
            )
    return least


@settings(max_examples=40, deadline=None)
@given(steps=CONVOLUTIONS, seed=st.integers(0, 2**30), share=st.sampled_from((0.0, 0.01, 0.1)))
@example(steps=[("conv", 0, 0), ("relu", 0, 0)], seed=73, share=0.01)  # the winner is wrong
def test_after_an_early_end_no_step_alone_would_gain_more_than_the_share(
    steps: list[tuple[str, int, int]], seed: int, share: float
) -> None:
    """Plans of several steps that are faster only together may be missed, as without an end."""
    spec, made = canonical(random_convolutions(steps, []).spec()), Timed(seed)
    with pytest.MonkeyPatch.context() as patch:
        exact(patch, share)
        early, bench = made.total(spec, made.floor)
    assert early * (1 - share) <= gained_by_one(made, spec, bench) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6), seed=st.integers(0, 2**30))
def test_a_search_that_ends_early_is_never_slower_than_the_rules(
    kinds: list[str], seed: int
) -> None:
    spec, made = random_graph(kinds, seed), Timed(seed)
    with pytest.MonkeyPatch.context() as patch:
        exact(patch, config.LEFT_SHARE)
        early, bench = made.total(spec, made.floor)
    assert early <= by_rules(bench, spec) * (1 + 1e-9)


def test_the_random_searches_are_worth_comparing() -> None:
    """The early end and the floors spare builds, and graphs of many regions are among them."""
    spared = built = large = 0
    for seed in range(20):
        roll = random.Random(seed)
        kinds = ["conv"] * 9 + roll.choices(("relu", "tanh", "add", "bias"), k=5)
        roll.shuffle(kinds)
        steps = [(kind, roll.randrange(99), roll.randrange(99)) for kind in kinds]
        spec, made = canonical(random_convolutions(steps, []).spec()), Timed(seed)
        with pytest.MonkeyPatch.context() as patch:
            exact(patch, 0.0)
            _, whole = made.total(spec)
            exact(patch, 0.05)
            _, few = made.total(spec, made.floor)
        built += len(whole.built)
        spared += len(whole.built) - len(few.built)
        large += bool(few.chains)
    assert spared > built // 20 and large
