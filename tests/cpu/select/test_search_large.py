"""Searches on large graphs: equal regions share plans, and concatenations are written in place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import cudnngraph as cg
from cudnngraph.backend.env import EnvKey
from cudnngraph.cache.codec import StaleRecord, dense_regions, legal_of, steps_of, to_record
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.key import graph_key
from cudnngraph.ir.spec import GraphSpec, is_channels_last
from cudnngraph.partition.memory import Layout, StepMemory
from cudnngraph.select.alternatives import by_measurement
from cudnngraph.select.config import IN_CONTEXT_AT_ONCE
from cudnngraph.select.decision import ALIAS
from cudnngraph.select.kernels import Kernels
from plans_cache.record import from_json
from tests.searches import (
    CONV,
    EPILOGUE,
    F16,
    POLICY,
    TORCH_US,
    WHOLE,
    Bench,
    Offer,
    of,
    ops,
    run,
    table,
    taken,
)


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
def test_dense_images_are_copied_also_where_kernels_are_contenders(copy_us: float) -> None:
    """What is copied to its place is no tensor of the graph in which kernels join neighbours."""
    bench = slower_on_slices(copy_us)
    none: Any = lambda parts: ["it does not compile"] * len(parts)  # noqa: E731
    bench.kernels = none  # type: ignore[attr-defined]
    found: Any = bench
    selection = by_measurement(joins(4), POLICY, found, kernels=Kernels(132))
    assert [kind for kind, _ in taken(selection)] == [
        kind for kind, _ in taken(run(joins(4), slower_on_slices(copy_us)))
    ]
    assert len(selection.dense) == (8 if copy_us < 90.0 else 0)


@pytest.mark.parametrize("copy_us", [20.0, 200.0])
def test_regions_with_dense_images_come_back_from_their_record(copy_us: float) -> None:
    spec = canonical(joins(4))
    selection = run(spec, slower_on_slices(copy_us))
    assert len(selection.dense) == (8 if copy_us < 90.0 else 0) and not selection.channels_last
    env = EnvKey(91900, "1.28.0", "NVIDIA H200", (9, 0), 132, 1)
    record = to_record(spec, graph_key(spec, POLICY), env, POLICY, selection)
    record = from_json(record.to_json())
    legal = legal_of(record, spec, POLICY)
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


def test_close_plans_of_several_steps_are_timed_beside_one_another() -> None:
    """Each chain changes one kind of step; what was taken is timed once for several of them."""
    g = cg.Graph("turns")
    y = g.input("x", (4, 8, 16), F16)
    kinds = (
        *("relu", "tanh", "sigmoid", "silu", "elu", "softplus"),
        *("abs", "neg", "sqrt", "mish", "leaky_relu", "erf"),
    )
    for number in range(48):
        flat = g.matmul(y.reshape((32, 16)), g.input(f"w{number}", (16, 16), F16))
        y = getattr(g, kinds[number % 12])(flat).reshape((4, 8, 16))
    g.output("y", y)
    bench = table(
        {f"matmul {kind}": [Offer(10.0), Offer(10.5)] for kind in kinds},
        **dict.fromkeys(("matmul", *kinds), 900.0),
    )
    gains = [1.0, -2.0, 0.0] * 4  # of the second plan, in its place
    seen: list[list[list[int]]] = []

    def whole(chains: Sequence[Any]) -> list[float]:
        used = [[plan.choice.engine for _, plan in chain if plan is not None] for chain in chains]
        seen.append(used)
        return [500.0 - sum(gains[at % 12] * each for at, each in enumerate(u)) for u in used]

    bench.whole_us = whole
    selection = run(g.spec(), bench)
    assert [len(used) for used in seen] == [1 + IN_CONTEXT_AT_ONCE] * 2
    for base, *others in seen:
        changed = [{at % 12 for at in range(48) if use[at] != base[at]} for use in others]
        assert all(len(each) == 1 for each in changed), "one kind of step in each"
    engines = [engine for _, engine in taken(selection) if engine is not None]
    assert engines == [int(gain > 0) for gain in gains] * 4
    faster = {f"matmul {kind}" for kind, gain in zip(kinds, gains, strict=True) if gain > 0}
    assert {step for step, engine in bench.checked if engine == 1} == faster
