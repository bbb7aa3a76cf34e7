"""Generated kernels among the contenders: which regions they are, and when they win."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.plan import KERNEL, Choice
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.rewrite.passes import legalize
from cudnngraph.select import autotune, heuristic
from cudnngraph.select.decision import NO_KERNELS, Selection
from cudnngraph.select.kernels import Kernels
from tests import generated
from tests.fakes import FakePlan
from tests.searches import (
    CONV,
    EPILOGUE,
    F16,
    F32,
    POLICY,
    WHOLE,
    Bench,
    Offer,
    block,
    of,
    ops,
    reasons,
    taken,
)

Took = Callable[[GraphSpec, Choice], float | str]


class KernelBench(Bench):
    """A bench on which kernels take made-up times; a text is why one cannot be had."""

    def __init__(self, offers: dict[str, Sequence[Offer]], took: Took) -> None:
        super().__init__(lambda spec: offers.get(ops(spec), ()))
        self._took = took
        self.tried: list[str] = []

    def kernels(self, parts: Sequence[tuple[GraphSpec, Choice]]) -> list[FakePlan | str]:
        self.tried += [ops(spec) for spec, _ in parts]
        made = [(choice, self._took(spec, choice)) for spec, choice in parts]
        return [took if isinstance(took, str) else FakePlan(choice) for choice, took in made]

    def times_us(
        self, spec: GraphSpec, plans: Sequence[FakePlan | None], rounds: int
    ) -> list[float | str]:
        return [
            self._took(spec, plan.choice)
            if plan is not None and plan.choice.engine == KERNEL
            else super(KernelBench, self).times_us(spec, [plan], rounds)[0]
            for plan in plans
        ]

    def _took_us(self, spec: GraphSpec, plan: FakePlan | None) -> float:
        if plan is None or plan.choice.engine != KERNEL:
            return super()._took_us(spec, plan)
        return float(self._took(spec, plan.choice))

    def why_wrong(self, spec: GraphSpec, plan: FakePlan) -> str | None:
        return None if plan.choice.engine == KERNEL else super().why_wrong(spec, plan)


def run(spec: GraphSpec, bench: Bench, kernels: Kernels | None = None) -> Selection:
    legal = legalize(spec, POLICY)
    selection: Selection = autotune.autotune(legal, POLICY, bench, kernels=kernels or Kernels(132))
    return selection


def scores() -> GraphSpec:
    """Rows that are added up and normalised: two parts for the search, one region for kernels."""
    g = cg.Graph("scores")
    x, z = (g.input(name, (64, 256), F16) for name in "xz")
    g.output("y", g.softmax(g.add(x, z), -1))
    return g.spec()


# -- by measurement --------------------------------------------------------------------------------


def test_a_kernel_is_taken_where_it_is_the_fastest() -> None:
    plans = {CONV: [Offer(15.0)], EPILOGUE: [Offer(9.0)], WHOLE: [Offer(30.0)]}
    bench = KernelBench(plans, lambda spec, choice: 3.0)
    selection = run(block(), bench)
    assert taken(selection) == [(CONV, 0), (EPILOGUE, KERNEL)]
    assert selection.steps[1].kind == "kernel" and selection.steps[1].time_us == 3.0
    assert {each.removesuffix(" last") for each in bench.tried} == {"bias relu", "bias", "relu"}


def test_the_fastest_schedule_is_taken() -> None:
    def took(spec: GraphSpec, choice: Choice) -> float:
        fastest = {("team", 512), ("lanes", 8), ("chunks", 2)}
        return 2.0 if set(dict(choice.knobs).items()) >= fastest else 4.0

    selection = run(block(), KernelBench({CONV: [Offer(15.0)]}, took))
    assert dict(selection.steps[1].choice.knobs)["team"] == 512  # type: ignore[union-attr]
    others = [d for d in selection.steps[1].decisions if d.choice and not d.accepted]
    assert len(others) >= 2 and {d.time_us for d in others} == {4.0}


def test_schedules_are_tried_only_where_they_could_win() -> None:
    """Twice as fast, the kernel would still not make up for a whole that takes 2 us."""
    bench = KernelBench({WHOLE: [Offer(2.0)], CONV: [Offer(15.0)]}, lambda spec, choice: 8.0)
    assert taken(run(block(), bench)) == [(WHOLE, 0)]
    assert len(bench.tried) == len({*bench.tried}), "one of each part"


def test_a_plan_is_taken_where_it_is_faster() -> None:
    plans = {CONV: [Offer(15.0)], EPILOGUE: [Offer(9.0)], WHOLE: [Offer(16.0)]}
    assert taken(run(block(), KernelBench(plans, lambda spec, choice: 3.0))) == [(WHOLE, 0)]


def test_a_kernel_that_is_refused_or_does_not_run_is_told_and_left() -> None:
    plans = {CONV: [Offer(15.0)], EPILOGUE: [Offer(9.0)]}
    bench = KernelBench(plans, lambda spec, choice: "wrong: 'y' is off by 2")
    selection = run(block(), bench)
    assert taken(selection) == [(CONV, 0), (EPILOGUE, 0)]
    assert "wrong: 'y' is off by 2" in reasons(selection)


def test_neighbours_are_one_kernel_where_that_is_faster() -> None:
    def took(spec: GraphSpec, choice: Choice) -> float:
        return {"add": 5.0, "softmax": 6.0, "add softmax": together}[ops(spec)]

    together = 7.0
    selection = run(scores(), KernelBench({}, took))
    assert taken(selection) == [("add softmax", KERNEL)]
    decisions = {d.subject: d.reason for d in selection.steps[0].decisions}
    assert decisions["steps add | softmax"] == "1.57 times the time"
    assert selection.steps[0].time_us == together

    together = 12.0
    selection = run(scores(), KernelBench({}, took))
    assert taken(selection) == [("add", KERNEL), ("softmax", KERNEL)]


@pytest.mark.parametrize(
    ("in_turn", "one"), [([15.0, 13.0], True), ([11.0, 13.0], False), (None, False)]
)
def test_neighbours_are_timed_in_turn_beside_their_kernel(
    in_turn: list[float] | None, one: bool
) -> None:
    """Alone a small part finds its data in the cache; without memory for that, alone has to do."""

    def took(spec: GraphSpec, choice: Choice) -> float:
        return {"add": 5.0, "softmax": 6.0, "add softmax": 12.0}[ops(spec)]

    bench = KernelBench({}, took)
    bench.whole_us = lambda chains: in_turn if len(chains[1]) == 1 else bench.sums_us(chains)
    selection = run(scores(), bench)
    apart = [("add", KERNEL), ("softmax", KERNEL)]
    assert taken(selection) == ([("add softmax", KERNEL)] if one else apart)
    assert bench.chains[-1] == ["add | softmax", "add softmax"]


@pytest.mark.parametrize("ends", [0.0, math.inf])
def test_neighbours_are_one_kernel_however_late_it_is(ends: float) -> None:
    """By rule they are one: a search without time left must not be slower for it."""
    bench = KernelBench({}, lambda spec, choice: 5.0)
    legal = legalize(scores(), POLICY)
    selection = autotune.autotune(legal, POLICY, bench, kernels=Kernels(132), ends=ends)
    assert taken(selection) == [("add softmax", KERNEL)]
    tried = bench.tried.count("add softmax")
    assert tried == 1 if ends == 0.0 else tried > 1, "other schedules only while there is time"


def test_a_large_graph_has_kernels_across_its_regions() -> None:
    g = cg.Graph("many")
    x = g.input("x", (64, 64), F16)
    for number in range(8):
        x = g.matmul(x, g.input(f"w{number}", (64, 64), F16))
    g.output("y", g.softmax(g.mul(g.relu(x), x), -1))

    def took(spec: GraphSpec, choice: Choice) -> float:
        return 1.0 + len(ops(spec).split()) / 10

    selection = run(g.spec(), KernelBench({"matmul": [Offer(4.0)]}, took))
    assert taken(selection) == [("matmul", 0)] * 8 + [("relu mul softmax", KERNEL)]


@pytest.mark.parametrize("moved_us", [4.0, 7.0])
def test_ops_move_from_kernel_to_kernel_where_both_are_faster_then(moved_us: float) -> None:
    def took(spec: GraphSpec, choice: Choice) -> float:
        named = ops(spec).split()
        if "rms_norm" in named:
            return 5.0 if "mul" in named else 3.0
        return moved_us if named.count("mul") == 2 else 4.0

    bench = KernelBench({"matmul": [Offer(4.0)]}, took)
    made = [step for step in run(generated.rotated().spec(), bench).steps if step.kind == "kernel"]
    first, second = (ops(step.spec).split() for step in made)
    moved = 3.0 + moved_us < 5.0 + 4.0
    assert ("mul" in first, second.count("mul")) == ((False, 2) if moved else (True, 1))
    assert sum(step.time_us or 0.0 for step in made) == min(3.0 + moved_us, 5.0 + 4.0)


def test_without_kernels_none_are_tried() -> None:
    bench = KernelBench({CONV: [Offer(15.0)]}, lambda spec, choice: 1.0)
    selection = run(block(), bench, Kernels(132, "NVRTC is missing"))
    assert not bench.tried
    assert [step.kind for step in selection.steps] == ["cudnn", "torch", "torch"]


# -- by heuristics ---------------------------------------------------------------------------------


def chosen(spec: GraphSpec, made: str = "", kernels: Kernels | None = None) -> Selection:
    """The steps where cuDNN has convolutions alone; ``made`` is why kernels do not pass."""

    def build(part: GraphSpec) -> tuple[FakePlan, tuple[()]]:
        if ops(part).removesuffix(" last") not in ("conv", "matmul"):
            raise cg.NotSupported("this graph", [f"no engine for {ops(part)}"])
        return FakePlan(Choice(3, ())), ()

    def checked(parts: Sequence[tuple[GraphSpec, Choice]]) -> list[FakePlan | str]:
        return [made or FakePlan(choice) for _, choice in parts]

    found: Selection = heuristic.heuristic(
        spec,
        POLICY,
        build,  # type: ignore[arg-type]
        kernels or Kernels(132),
        checked,  # type: ignore[arg-type]
    )
    return found


def test_what_cudnn_refuses_grows_into_one_kernel() -> None:
    assert taken(chosen(scores())) == [("add softmax", KERNEL)]
    assert taken(chosen(block())) == [(CONV, 3), (EPILOGUE, KERNEL)]


def added(rows: int = 512, blocks: int = 1) -> GraphSpec:
    """Products with a bias and a residual, each with a norm behind it."""
    g = cg.Graph("added")
    x, total = (g.input(name, (rows, 320), F16) for name in "xr")
    for n in range(blocks):
        w, b = g.input(f"w{n}", (320, 320), F16), g.input(f"b{n}", (320,), F16)
        total = g.add(g.add(g.matmul(x, w), b), total)
        x = g.layer_norm(total, *(g.input(f"{name}{n}", (320,), F16) for name in "st"))
    g.output("y", x)
    g.output("sum", total)
    return g.spec()


WITH_RESIDUAL, NORMED = "matmul add add", "add add layer_norm"


@pytest.mark.parametrize("blocks", [1, 4], ids=["small", "by regions"])
@pytest.mark.parametrize("wrong", [None, "writes elsewhere"])
def test_a_plan_gives_up_its_epilogue_to_a_kernel_that_goes_on_to_a_norm(
    blocks: int, wrong: str | None
) -> None:
    """One plan and the norm take 12.8 us, a bare product with two kernels 12.9, with one 10.5."""
    plans = {WITH_RESIDUAL: [Offer(9.8)], "matmul": [Offer(6.5, wrong=wrong)]}
    took = {"add add": 3.4, "layer_norm": 3.0, NORMED: 4.0}
    bench = KernelBench(plans, lambda spec, choice: took.get(ops(spec), 50.0))
    selection = run(added(blocks=blocks), bench)
    apart = [("matmul", 0), (NORMED, KERNEL)] * blocks
    whole = [(WITH_RESIDUAL, 0), ("layer_norm", KERNEL)] * blocks
    assert sorted(taken(selection), key=str) == sorted(whole if wrong else apart, key=str)
    if not wrong:
        first = selection.steps[[ops(s.spec) for s in selection.steps].index("matmul")]
        assert first.decisions[-1].reason == "the fastest, with the kernel behind it"
        reads = {name for step in selection.steps for name in step.spec.inputs}
        made = {name for step in selection.steps for name in step.spec.outputs}
        assert reads <= {*added(blocks=blocks).inputs} | made
    took[NORMED] = 6.4  # 12.9 with the product
    bench = KernelBench(plans, lambda spec, choice: took.get(ops(spec), 50.0))
    assert sorted(taken(run(added(blocks=blocks), bench)), key=str) == sorted(whole, key=str)


def test_nothing_is_joined_around_what_runs_elsewhere() -> None:
    """x + 1 is read by the product and by the sum behind it: one kernel would wait for itself."""
    g = cg.Graph("around")
    x, w = g.input("x", (64, 64), F16), g.input("w", (64, 64), F16)
    first = g.add(x, 1.0)
    g.output("y", g.add(g.matmul(first, w), first))
    assert taken(chosen(g.spec())) == [("add", KERNEL), ("matmul", 3), ("add", KERNEL)]


def test_a_kernel_that_does_not_pass_leaves_the_op_to_plans_and_torch() -> None:
    selection = chosen(scores(), made="wrong: 'y' is off by 3")
    assert [step.kind for step in selection.steps] == ["torch", "torch"]
    assert "wrong: 'y' is off by 3" in reasons(selection)


def test_why_there_is_no_kernel_is_told() -> None:
    g = cg.Graph("digamma")
    g.output("y", g.aten([g.input("x", (8,), F16)], "aten.digamma.default", (("tensor", 0),)))
    assert "no kernel is generated for aten.digamma.default" in reasons(chosen(g.spec()))
    selection = chosen(scores(), kernels=Kernels(132, "NVRTC is missing"))
    (decision,) = (d for d in selection.steps[0].decisions if d.subject == NO_KERNELS)
    assert decision.reason == "NVRTC is missing"


def test_a_choice_is_accepted_with_its_plan() -> None:
    decision = of(chosen(scores()), KERNEL)
    assert decision.accepted and decision.reason == heuristic.BETWEEN


def test_a_fault_of_the_generator_leaves_the_op_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(spec: GraphSpec, processors: int) -> Choice:
        raise KeyError("a rule")

    monkeypatch.setattr(patterns, "by_rule", fails)
    selection = chosen(scores())
    assert [step.kind for step in selection.steps] == ["torch", "torch"]
    assert "the generator fails: KeyError: 'a rule'" in reasons(selection)
    assert Kernels(132).choices(scores()) == []
    assert "no kernel is generated for 'scores'" in caplog.text


@pytest.mark.parametrize("capability", [86, 89, 90])
def test_fp8_takes_a_gpu_that_has_it(capability: int) -> None:
    g = cg.Graph("eight")
    g.output("y", g.dequantize(g.input("x", (64,), torch.float8_e4m3fn), g.input("s", (1,), F32)))
    selection = chosen(g.spec(), kernels=Kernels(132, capability=capability))
    assert [step.kind for step in selection.steps] == ["torch" if capability < 89 else "kernel"]
    said = "numbers of FP8 take a GPU of compute capability 8.9" in reasons(selection)
    assert said == (capability < 89)


def layers(widths: Sequence[int]) -> GraphSpec:
    """Softmaxes of layers, one behind another, with products between them."""
    g = cg.Graph("layers")
    x = g.input("x", (64, widths[0]), F16)
    for at, (width, wide) in enumerate(zip(widths, [*widths[1:], 8], strict=True)):
        x = g.matmul(g.softmax(g.mul(x, x), -1), g.input(f"w{at}", (width, wide), F16))
    g.output("y", x)
    return g.spec()


def test_regions_that_are_alike_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, ...]] = []
    real = patterns.by_rule

    def counted(spec: GraphSpec, processors: int) -> Choice:
        written.append(spec.tensors[spec.outputs[0]].shape)
        return real(spec, processors)

    monkeypatch.setattr(patterns, "by_rule", counted)
    run(layers([32] * 6), KernelBench({}, lambda spec, choice: 3.0))
    alike = len(written)
    written.clear()
    run(layers([32, 48, 64, 80, 96, 112]), KernelBench({}, lambda spec, choice: 3.0))
    assert {width for _, width in written} >= {32, 48, 64, 80, 96, 112}
    assert 3 * alike < len(written)
