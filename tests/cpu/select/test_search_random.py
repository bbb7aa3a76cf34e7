"""Searches on random graphs with random times: no way to run is faster than the one taken."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.select import search
from cudnngraph.select.rules import why_never_one
from tests.cuttings import every_way, pieces, rewritten
from tests.partitions import BINARY, UNARY, random_graph, two_branches
from tests.searches import POLICY, Bench, Offer, digest, ops, run, totals


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
# A function that is written out, which is cut by its name alone.
WRITTEN_OUT: dict[str, Any] = {"steps": [("sigmoid", 0, 0), ("mul", 0, 1)], "extra": [], "seed": 0}


@settings(max_examples=120, deadline=None)
@given(**RANDOM)
@example(**IN_PLACE_OF_A_WRONG_ONE)
@example(**WRITTEN_OUT)
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
        offered = bench._offers(step.spec) if why_never_one(step.spec) is None else ()
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
        if why_never_one(step) is None
    }
    assert steps == set(bench.timed)
