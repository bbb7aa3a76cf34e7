"""What a threshold decides is measured: other forms of a step, and of the whole graph."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cudnngraph as cg
from cudnngraph.backend.env import EnvKey
from cudnngraph.backend.plan import Choice
from cudnngraph.cache.codec import StaleRecord, instead_of, legal_of, steps_of, to_record
from cudnngraph.device import rules
from cudnngraph.device.import_rules import ANY, NO
from cudnngraph.device.rules import DeviceRules, following, others
from cudnngraph.ir import wire
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.key import graph_key, step_digest
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.rewrite.alternatives import ASKS, of_graph, of_step
from cudnngraph.rewrite.annotate import INSTEAD, marked, marks
from cudnngraph.select import heuristic, search
from cudnngraph.select.config import QUICK_ROUNDS
from cudnngraph.select.decision import ALIAS, INSTEAD_OF_RULES, Selection
from cudnngraph.select.remembered import RememberedBench
from plans_cache.record import PlanRecord, from_json
from tests.cpu.select.test_remembered import Memo
from tests.fakes import FakePlan
from tests.searches import F16, POLICY, TORCH_US, Bench, Offer, ops, run, taken

ENV = EnvKey(91900, "1.28.0", "NVIDIA H200", (9, 0), 132, 1)
GELU = (("gelu_by_tanh_behind_matmul", False),)
MASK = (("mask_copy_min_scores", ANY),)


def feed_forward(layers: int = 1) -> GraphSpec:
    g = cg.Graph("ff")
    y = g.input("x", (64, 32), F16)
    for n in range(layers):
        y = g.gelu(g.matmul(y, g.input(f"w{n}", (32, 32), F16)))
    g.output("y", y)
    return canonical(g.spec())


def masked(keys: int = 577) -> GraphSpec:
    """Attention whose mask has odd rows, with enough scores for a copy of it to pay."""
    g = cg.Graph("masked")
    q = g.input("q", (8, 16, keys, 64), F16)
    g.output("o", g.sdpa(q, q, q, g.input("mask", (1, 1, keys, keys), F16)))
    return canonical(g.spec())


def by_form(plain: float, other: float, **torch_us: float) -> Bench:
    """A plan for every step with a product, of another time where the step is marked."""

    def offers(spec: GraphSpec) -> Sequence[Offer]:
        if "matmul" not in ops(spec):
            return ()
        both = "gelu" in ops(spec)
        return [Offer((other if marks(spec) else plain) if both else 900.0)]

    return Bench(offers, lambda spec: torch_us.get(ops(spec), TORCH_US))


def record_of(spec: GraphSpec, selection: Selection) -> PlanRecord:
    record = to_record(spec, graph_key(spec, POLICY), ENV, POLICY, selection)
    return from_json(record.to_json())


def come_back(spec: GraphSpec, selection: Selection) -> None:
    """The steps of a choice are those that its record gives."""
    record = record_of(spec, selection)
    back = steps_of(record, legal_of(record, spec, POLICY))
    assert [(s.spec, s.choice) for s in back] == [(s.spec, s.choice) for s in selection.steps]
    assert instead_of(record) == selection.instead


# -- data ------------------------------------------------------------------------------------------


def test_every_threshold_of_a_step_has_a_rule_that_says_which_steps_ask_it() -> None:
    stages = {"cudnn", "torch"}
    fields = [f for f in DeviceRules.__dataclass_fields__.values() if f.metadata["stage"] in stages]
    assert {field.name for field in fields} == set(ASKS)


def test_the_other_values_are_those_that_do_not_hold_now() -> None:
    tried = dict(others("graph"))
    assert tried["packed_by_flash"] is False
    with following((("packed_by_flash", False),)):
        assert not rules.rules().packed_by_flash
        assert dict(others("graph"))["packed_by_flash"] is True
    assert rules.rules().packed_by_flash


def test_a_mark_survives_the_way_to_a_worker_and_tells_steps_apart() -> None:
    step = marked(feed_forward(), GELU)
    sent = wire.to_spec(json.loads(json.dumps(wire.from_spec(step))))
    assert sent == step and marks(sent) == GELU
    assert step_digest(step) != step_digest(feed_forward())
    assert not list(of_step(step)), "one threshold at a time"


@pytest.mark.parametrize(("row", "value"), [(16, NO), (32, NO), (64, ANY), (128, ANY), (256, None)])
def test_a_norm_is_tried_on_the_other_side_of_its_threshold(row: int, value: int | None) -> None:
    g = cg.Graph("norm")
    g.output("y", g.rms_norm(g.input("x", (640, row), F16), g.input("w", (row,), F16)))
    found = [marks(form) for _, form in of_step(g.spec())]
    expected = [] if value is None else [(("rms_norm_by_matmul_faster_row", value),)]
    assert found == expected


# -- a step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3, 12])
def test_the_other_form_of_a_step_is_taken_where_it_is_faster(layers: int) -> None:
    """In one region and in several; each of two equal steps by the same measurement."""
    bench = by_form(10.0, 7.0)
    spec = feed_forward(layers)
    selection = run(spec, bench)
    assert [marks(step.spec) for step in selection.steps] == [GELU] * layers
    assert taken(selection) == [("matmul gelu", 0)] * layers
    assert Counter(bench.built)["matmul gelu", 0] == 2, "a plan of each form"
    told = [d for d in selection.steps[0].decisions if d.subject == INSTEAD_OF_RULES]
    assert [d.accepted for d in told] == [True] and GELU[0][0] in told[0].reason
    come_back(spec, selection)


def test_the_form_by_the_rule_stays_where_it_is_as_fast() -> None:
    spec = feed_forward()
    selection = run(spec, by_form(10.0, 10.0))
    said = {d.subject: d.accepted for d in selection.steps[0].decisions}
    assert said["steps matmul gelu gelu_by_tanh_behind_matmul=False"] is False
    assert [marks(step.spec) for step in selection.steps] == [()]
    assert record_of(spec, selection).steps[0].extra == {}


def test_the_other_form_is_checked_and_its_plan_replayed() -> None:
    bench = by_form(10.0, 7.0)
    run(feed_forward(), bench)
    assert [marks(spec) for spec, _ in bench.replayed] == [GELU]
    wrong = Bench(
        lambda spec: [Offer(7.0, wrong="off by 3")] if marks(spec) else [Offer(10.0)],
    )
    assert [marks(step.spec) for step in run(feed_forward(), wrong).steps] == [()]


def test_torch_runs_the_form_of_a_step_that_is_torchs() -> None:
    g = cg.Graph("norm")
    shift, factor = g.group_affine(g.input("x", (2, 16, 8, 8), F16), 4)
    g.output("shift", shift)
    g.output("factor", factor)
    bench = Bench(lambda spec: (), lambda spec: 5.0 if marks(spec) else 9.0)
    selection = run(canonical(g.spec()), bench)
    (step,) = selection.steps
    assert marks(step.spec) == (("reduction_max_parts", 1),) and step.choice is None
    assert bench.asked == ["group_affine"], "cuDNN is not asked twice"
    come_back(canonical(g.spec()), selection)


# -- the whole graph -------------------------------------------------------------------------------


def copying(copy_us: float, odd_us: float, even_us: float = 100.0) -> Bench:
    """Attention that takes longer if the rows of its mask are odd, and the copy of a mask."""

    def offers(spec: GraphSpec) -> Sequence[Offer]:
        if ops(spec) != "sdpa":
            return ()
        mask = spec.tensors[spec.inputs[-1]]
        return [Offer(odd_us if mask.stride[-2] % 8 else even_us)]

    return Bench(offers, lambda spec: copy_us if "identity" in ops(spec) else TORCH_US)


@pytest.mark.parametrize(("copy_us", "copied"), [(20.0, True), (60.0, False)])
def test_a_mask_is_copied_where_that_is_faster(copy_us: float, copied: bool) -> None:
    spec = masked()
    assert list(of_graph(spec, POLICY)) == [MASK]
    selection = run(spec, copying(copy_us, 150.0))
    kinds = [kind for kind, _ in taken(selection)]
    assert kinds == (["identity last", "sdpa"] if copied else ["sdpa"])
    assert selection.instead == (() if copied else MASK)
    told = [d for d in selection.steps[0].decisions if INSTEAD_OF_RULES in d.subject]
    assert [d.accepted for d in told] == [not copied]
    come_back(spec, selection)


def test_a_small_mask_is_copied_where_that_is_faster() -> None:
    spec = masked(33)
    assert list(of_graph(spec, POLICY)) == [(("mask_copy_min_scores", NO),)]
    assert run(spec, copying(20.0, 150.0)).instead == (("mask_copy_min_scores", NO),)
    assert run(spec, copying(60.0, 150.0)).instead == ()


def test_a_form_that_is_hardly_faster_is_not_taken() -> None:
    assert run(masked(), copying(51.0, 150.0)).instead == ()
    assert run(masked(), copying(52.0, 150.0)).instead == (), "by 1.3 %"
    assert run(masked(), copying(54.0, 150.0)).instead == MASK, "by 2.6 %"


def test_other_forms_are_tried_within_the_budget_alone() -> None:
    bench = copying(60.0, 150.0)
    selection = run(masked(), bench, replace(POLICY, budget_s=1e-9))
    assert selection.instead == () and [kind for kind, _ in taken(selection)][-1] == "sdpa"
    told = [d for d in selection.steps[0].decisions if INSTEAD_OF_RULES in d.subject]
    assert [d.reason for d in told] == ["not tried: the budget was spent"]


def test_what_two_forms_have_in_common_is_measured_once() -> None:
    g = cg.Graph("both")
    q = g.input("q", (8, 16, 577, 64), F16)
    o = g.sdpa(q, q, q, g.input("mask", (1, 1, 577, 577), F16))
    g.output("y", g.matmul(o, g.input("w", (64, 64), F16)))
    bench = copying(60.0, 150.0)
    run(canonical(g.spec()), RememberedBench(bench, Memo()))  # type: ignore[arg-type]
    assert Counter(bench.asked)["matmul"] == 1
    assert Counter(bench.built)["sdpa", 0] == 2


@pytest.mark.parametrize(
    "said",
    [
        *({"nothing": 1}, {"mask_copy_min_scores": 3}, {"mask_copy_min_scores": True}),
        *({"gelu_by_tanh_behind_matmul": False}, {"packed_by_flash": 0}, ["packed_by_flash"], 7),
    ],
    ids=str,
)
def test_a_record_that_names_what_no_search_tries_is_stale(said: Any) -> None:
    spec = masked()
    record = record_of(spec, run(spec, copying(60.0, 150.0)))
    assert record.extra[INSTEAD] == dict(MASK)
    with pytest.raises(StaleRecord):
        legal_of(replace(record, extra={**record.extra, INSTEAD: said}), spec, POLICY)


def test_a_step_of_a_record_that_names_what_no_search_tries_is_stale() -> None:
    spec = feed_forward()
    record = record_of(spec, run(spec, by_form(10.0, 7.0)))
    (step,) = record.steps
    assert step.extra[INSTEAD] == dict(GELU)
    for said in ({"packed_by_flash": False}, {GELU[0][0]: 0}, "gelu"):
        other = replace(record, steps=(replace(step, extra={INSTEAD: said}),))
        with pytest.raises(StaleRecord):
            steps_of(other, legal_of(other, spec, POLICY))


# -- random graphs with random times ---------------------------------------------------------------

KINDS = ("gelu", "matmul", "rms", "relu", "add", "attention", "enlarge", "groups")


def random_graph(kinds: Sequence[str], seed: int) -> GraphSpec:
    """A graph whose steps ask every threshold that is measured: rows of 32 and images of them."""
    roll = random.Random(seed)
    g = cg.Graph("random")
    width = roll.choice((32, 64, 128))
    y = g.input("x", (roll.choice((33, 64, 577)), width), F16)
    for number, kind in enumerate(kinds):
        rows = y.shape[0]
        if kind in ("gelu", "matmul"):
            y = g.matmul(y, g.input(f"w{number}", (width, width), F16))
            y = g.gelu(y) if kind == "gelu" else y
        elif kind == "rms":
            y = g.rms_norm(y, g.input(f"w{number}", (width,), F16))
        elif kind == "relu":
            y = g.relu(y)
        elif kind == "add":
            y = g.add(y, g.input(f"z{number}", (rows, width), F16))
        elif kind == "attention":
            q = y.reshape((1, width // 16, rows, 16))
            mask = g.input(f"m{number}", (1, 1, rows, rows), F16)
            y = g.sdpa(q, q, q, mask).reshape((rows, width))
        elif kind == "enlarge":
            image = y.reshape((1, rows, width // 8, 8))
            large = g.interpolate(image, scale_factor=2.0, mode="bilinear")
            y = g.slice(large.reshape((4 * rows, width)), 0, 0, rows)
        else:
            shift, _ = g.group_affine(y.reshape((1, width, rows, 1)), 4)
            g.output(f"shift{number}", shift)
    g.output("y", g.relu(y))
    return canonical(g.spec())


def random_bench(seed: int) -> Bench:
    def dice(spec: GraphSpec, salt: int) -> random.Random:
        return random.Random(f"{step_digest(spec)} {seed} {salt}")

    def offers(spec: GraphSpec) -> list[Offer]:
        roll = dice(spec, 0)
        if roll.random() < 0.2:
            return []
        return [
            Offer(
                float(roll.randint(1, 40)),
                wrong="wrong" if roll.random() < 0.15 else None,
                refused="does not build" if roll.random() < 0.1 else None,
            )
            for _ in range(roll.randint(1, 3))
        ]

    return Bench(offers, lambda spec: float(dice(spec, 1).randint(1, 40)))


def by_rules(bench: Bench, spec: GraphSpec) -> float:
    """The time of what ``heuristic`` takes: the first plan that builds and is right."""

    def build(part: GraphSpec) -> Any:
        for engine, offer in enumerate(bench._offers(part)):
            if offer.refused is None and offer.wrong is None:
                return FakePlan(Choice(engine, (("TILE", engine),))), ()
        raise cg.NotSupported("this graph", ["no plan"])

    total = 0.0
    for step in heuristic.heuristic(spec, POLICY, build).steps:
        if step.choice is not None:
            total += float(bench.offer(step.spec, step.choice.engine).time_us)
        elif ALIAS not in step.decisions:
            total += float(bench._torch_us(step.spec))
    return total


RANDOM = {
    "kinds": st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    "seed": st.integers(0, 2**30),
}


@settings(max_examples=80, deadline=None)
@given(**RANDOM)
@example(
    kinds=["gelu", "relu"], seed=481
)  # a first plan that is slow and wrong, a right one behind
def test_what_is_measured_is_never_slower_than_the_rules(kinds: list[str], seed: int) -> None:
    spec, bench = random_graph(kinds, seed), random_bench(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "TIE_RATIO", 1.0)  # with it a way may be taken that is 2 % slower
        selection = run(spec, bench)
    total = sum(step.time_us or 0.0 for step in selection.steps)
    assert math.isfinite(total) and total <= by_rules(bench, spec)
    for step in selection.steps:
        if step.choice is not None:
            assert bench.offer(step.spec, step.choice.engine).wrong is None
            assert (ops(step.spec), step.choice.engine) in bench.checked


@settings(max_examples=60, deadline=None)
@given(**RANDOM)
def test_records_of_random_choices_give_the_same_steps(kinds: list[str], seed: int) -> None:
    spec = random_graph(kinds, seed)
    come_back(spec, run(spec, random_bench(seed)))


@settings(max_examples=60, deadline=None)
@given(**RANDOM)
def test_no_part_is_measured_twice(kinds: list[str], seed: int) -> None:
    """Of all forms of a graph, and of equal parts within one."""
    spec, bench = random_graph(kinds, seed), random_bench(seed)
    quick: Counter[tuple[str, int | None]] = Counter()
    timed = bench.times_us

    def times_us(part: GraphSpec, plans: Any, rounds: int) -> Any:
        if rounds == QUICK_ROUNDS:
            quick.update((step_digest(part), None if p is None else p.choice.engine) for p in plans)
        return timed(part, plans, rounds)

    bench.times_us = times_us  # type: ignore[method-assign]
    run(spec, RememberedBench(bench, Memo()))  # type: ignore[arg-type]
    assert quick and max(quick.values()) == 1


def test_the_random_graphs_reach_every_threshold() -> None:
    """Else the generator is not worth its name."""
    seen: set[str] = set()
    for seed in range(40):
        roll = random.Random(seed)
        spec = random_graph([*roll.choices(KINDS, k=4), "attention"], seed)
        selection = run(spec, random_bench(seed))
        seen |= {name for name, _ in selection.instead}
        seen |= {name for step in selection.steps for name, _ in marks(step.spec)}
    assert seen == {*ASKS, "mask_copy_min_scores"}
