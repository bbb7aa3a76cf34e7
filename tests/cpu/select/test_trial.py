"""Trials without a GPU: plans that write through raw pointers, right ones and wrong ones."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import handles
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select.inputs import random_inputs
from cudnngraph.select.tolerance import relative_error
from cudnngraph.select.trial import StepTrial
from tests.chunks import each_case
from tests.samples import Case, enumerate_cases
from tests.trials import BF16, CPU, F16, F32, POLICY, Plan, at, product, scales, why

CASES = [case for case in enumerate_cases() if case.on_gpu]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "handle_on_current_stream", lambda index: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


@each_case(CASES)
def test_the_reference_passes_its_own_check(case: Case) -> None:
    spec = case.build().spec()
    if all(spec.tensors[name].numel for name in (*spec.inputs, *spec.outputs)):
        assert why(Plan(spec)) is None


def test_a_plan_that_lacks_memory_to_run_is_not_wrong() -> None:
    def fails(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        raise RuntimeError("err 2 != CUDA_SUCCESS: CUDA_ERROR_OUT_OF_MEMORY")

    with pytest.raises(torch.OutOfMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        why(Plan(product(), fails))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_plan_runs_again_only_where_it_must_be_deterministic(deterministic: bool) -> None:
    plan = Plan(product())
    policy = cg.Policy(allow_tf32=False, deterministic=deterministic)
    assert why(plan, policy) is None
    assert plan.runs == 1 + deterministic


def leaves_one(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
    plan.result(pointers)[-1, -1, -1, -1] = math.nan


def past_its_output(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
    declared = plan.spec.tensors["y"]
    at(pointers[-1], declared, declared.extent + 1)[-1] = 1.0


def before_its_output(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
    ctypes.memset(pointers[-1] - 1, 7, 1)


def past_its_workspace(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
    ctypes.memset(workspace + plan.workspace_bytes, 7, 1)


def before_its_workspace(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
    ctypes.memset(workspace - 1, 7, 1)


def over_its_input(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
    at(pointers[0], plan.spec.tensors[plan.spec.inputs[0]])[0, 0, 0, 0] += 1.0


def fails(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
    raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED\nand a page of details")


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (scales, "wrong: 'y' is off by 0.01, at most 0.002 is right"),
        (leaves_one, "wrong: 'y' is off by inf, at most 0.002 is right"),
        (past_its_output, "writes outside of its output 'y'"),
        (before_its_output, "writes outside of its output 'y'"),
        (past_its_workspace, "writes outside of its workspace of 300 bytes"),
        (before_its_workspace, "writes outside of its workspace of 300 bytes"),
        (over_its_input, "writes over its inputs"),
        (fails, "does not run: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_with_a_plan_is_said(then: Any, said: str) -> None:
    assert why(Plan(product(), then)) == said


def test_an_operand_that_is_misread_behind_a_long_sum_is_seen() -> None:
    """Engine 7 of cuDNN 9.19 took a column of every other number for one of numbers in a row."""
    g = cg.Graph("g")
    x, w = g.input("x", (16, 209), BF16), g.input("w", (209, 16), BF16)
    column = g.input("c", (16, 1), BF16, stride=(2, 1))
    g.output("y", (g.abs(x @ w + column) + 0.5) / g.input("s", (1, 1), BF16))
    spec = g.spec()

    def misreads(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        inputs = given_to(plan, pointers)
        inputs[2] = inputs[2].as_strided((16, 1), (1, 1)).nan_to_num()
        plan.result(pointers).copy_(reference.run(spec, inputs)[0])

    assert why(Plan(spec)) is None
    assert "is off by" in str(why(Plan(spec, misreads)))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_weights_in_another_order_are_seen_behind_a_batch_norm(dtype: torch.dtype) -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (2, 512, 5, 5), dtype), g.input("w", (8, 512, 3, 3), dtype)
    stats = [g.input(name, (8,), F32) for name in ("mean", "var", "weight", "bias")]
    g.output("y", g.relu(g.batch_norm(g.conv(x, w, padding=1), *stats)))
    spec = g.spec()

    def flips(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        inputs = given_to(plan, pointers)
        inputs[1] = inputs[1].flip(-1)
        plan.result(pointers).copy_(reference.run(spec, inputs)[0])

    assert why(Plan(spec)) is None
    assert "is off by" in str(why(Plan(spec, flips)))


def test_a_plan_that_needs_no_workspace_is_given_none() -> None:
    given: list[int] = []
    plan = Plan(product(), lambda plan, pointers, workspace: given.append(workspace), 0)
    assert why(plan) is None
    assert given == [0]


def test_a_plan_that_writes_into_the_gaps_of_its_output_is_wrong() -> None:
    def into_a_gap(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        declared = plan.spec.tensors["y"]
        at(pointers[-1], declared, declared.extent)[3] = 1.0

    spec = product(stride=(48, 12, 4, 1))
    assert why(Plan(spec)) is None
    assert why(Plan(spec, into_a_gap)) == "writes outside of its output 'y'"


def test_a_plan_that_gives_other_bits_the_second_time_is_not_deterministic() -> None:
    def flips(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        plan.result(pointers)[0, 0, 0, 0] *= 1.0 + plan.runs * 2.0**-10

    strict = cg.Policy(allow_tf32=False, deterministic=True)
    assert why(Plan(product(), flips)) is None
    assert why(Plan(product(), flips), strict) == "gives other bits when it runs again"


def test_a_mistake_of_ours_goes_through() -> None:
    def broken(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        raise ZeroDivisionError("a mistake of ours")

    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        why(Plan(product(), broken))


def test_tf32_is_let_through_where_the_policy_allows_it() -> None:
    g = cg.Graph("g")
    g.output("y", g.conv(g.input("x", (2, 4, 5, 5), F32), g.input("w", (4, 4, 3, 3), F32)))
    spec = g.spec()

    def rounds(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        plan.result(pointers).mul_(1.0 + 2.0**-11)

    assert why(Plan(spec, rounds), cg.Policy(allow_tf32=True)) is None
    said = why(Plan(spec, rounds), cg.Policy(allow_tf32=False))
    assert said == "wrong: 'y' is off by 0.00049, at most 4.2e-07 is right"


def nearly(error: float) -> Callable[[Plan, Sequence[int], int], None]:
    """A result that is off by so much of its size."""
    return lambda plan, pointers, workspace: plan.result(pointers).mul_(1.0 + error)


def pointwise(dtype: torch.dtype, build: Callable[[Any], Any]) -> GraphSpec:
    g = cg.Graph("g")
    g.output("y", build(g.input("x", (64, 64), dtype)), dtype=F32)
    return g.spec()


def test_float32_results_are_about_as_good_as_torchs() -> None:
    """cuDNN's exp is off by 3e-6, in float32."""
    spec = pointwise(F32, lambda x: x.exp())
    assert why(Plan(spec)) is None and why(Plan(spec, nearly(2.0**-23))) is None
    said = why(Plan(spec, nearly(2.0**-19)))
    assert said == "wrong: 'y' is off by 1.9e-06, at most 1.8e-07 is right"
    assert why(Plan(spec, nearly(2.0**-19)), cg.Policy(allow_tf32=True)) is None
    assert why(Plan(pointwise(F16, lambda x: x.exp()), nearly(2.0**-19))) is None, "of 16 bits"


def given_to(plan: Plan, pointers: Sequence[int]) -> list[torch.Tensor]:
    """The inputs of a run, as they lie."""
    tensors = [plan.spec.tensors[name] for name in plan.spec.inputs]
    return [at(pointer, spec) for spec, pointer in zip(tensors, pointers, strict=False)]


@pytest.mark.parametrize(("times", "right"), [(1.45, True), (1.55, False)])
def test_float32_results_may_be_off_by_half_more_than_torchs_are(times: float, right: bool) -> None:
    spec = pointwise(F32, lambda x: (x + 64.0) - 64.0)

    def farther(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        inputs = given_to(plan, pointers)
        (exact,), (off,) = (reference.run(spec, inputs, dtype) for dtype in (torch.float64, F32))
        plan.result(pointers).copy_(exact + times * (off - exact))

    inputs = random_inputs(spec, CPU)
    (exact,), (off,) = (reference.run(spec, inputs, dtype) for dtype in (torch.float64, F32))
    theirs = relative_error(off, exact)
    assert 1e-6 < theirs < 6e-6
    said = f"wrong: 'y' is off by {times * theirs:.2g}, at most {1.5 * theirs:.2g} is right"
    assert why(Plan(spec, farther)) == (None if right else said)


@pytest.mark.parametrize(("least", "most"), [(0.0, 0.3), (1.0, 2.0), (8.0, 20.0)])
def test_a_function_that_is_off_in_some_range_alone_is_found(least: float, most: float) -> None:
    spec = pointwise(F32, lambda x: x.tanh())

    def off_there(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        x = at(pointers[0], plan.spec.tensors["x"]).abs()
        plan.result(pointers).mul_(1.0 + 5e-6 * ((least < x) & (x < most)))

    assert "is off by" in str(why(Plan(spec, off_there)))


def test_what_float32_cannot_hold_is_not_compared() -> None:
    """exp of 89 and more, which float64 holds; and what is made of it."""
    spec = pointwise(F32, lambda x: (x * 4.0).exp() - (x * 4.0).exp())
    (x,) = random_inputs(spec, CPU, power=6)
    assert bool((4 * x > 89).any())
    assert why(Plan(spec)) is None


def of_sums(result: torch.dtype, times: float = 12.0, around: float = 0.0) -> GraphSpec:
    """exp of sums of 16-bit numbers, of which float32 cannot hold some where ``times`` is 12."""
    g = cg.Graph("g")
    x = g.input("x", (512, 64), BF16)
    sums = g.reduction(g.mul(g.cast(x, F32), times), 1)
    if around:
        sums = g.sub(g.add(sums, around), around)
    g.output("y", g.cast(g.exp(sums), result))
    return g.spec()


@pytest.mark.parametrize("result", [F32, F16], ids=str)
def test_results_that_are_too_large_for_their_dtype_are_not_compared(result: torch.dtype) -> None:
    spec = of_sums(result)
    (x,) = random_inputs(spec, CPU)
    (exact,) = reference.run(spec, [x], torch.float64)
    large = exact > torch.finfo(result).max
    assert bool(large.any()) and float((~large).float().mean()) > 0.2
    assert why(Plan(spec)) is None

    def off_elsewhere(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        y = plan.result(pointers)
        y.copy_(torch.where(y.isfinite(), y * 1.01, y))

    assert "is off by 0.01" in str(why(Plan(spec, off_elsewhere)))


def test_an_infinity_that_torch_does_not_make_is_wrong() -> None:
    def overflows(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        y = plan.result(pointers)
        y.copy_(torch.where(y > 1e20, math.inf, y))

    said = why(Plan(of_sums(F32), overflows))
    assert said is not None and said.startswith("wrong: 'y' is off by inf, at most "), said


def test_what_exp_makes_of_the_rounding_of_sums_is_as_good_as_torchs() -> None:
    """Of 16-bit data, too: torch's own results are farther off than 1e-5."""
    spec = of_sums(F32, times=0.7, around=1000.0)
    inputs = random_inputs(spec, CPU)
    (exact,), (off,) = (reference.run(spec, inputs, dtype) for dtype in (torch.float64, F32))
    held = off.isfinite()
    theirs = relative_error(off[held], exact[held])
    assert 1e-5 < theirs < 1e-3

    def farther(times: float) -> Callable[[Plan, Sequence[int], int], None]:
        def then(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
            made = torch.where(held, exact + times * (off - exact), off)
            plan.result(pointers).copy_(made)

        return then

    assert why(Plan(spec, farther(1.45))) is None
    said = f"wrong: 'y' is off by {1.55 * theirs:.2g}, at most {1.5 * theirs:.2g} is right"
    assert why(Plan(spec, farther(1.55))) == said


def test_means_of_rounded_numbers_may_be_off_by_their_rounding() -> None:
    """As a batch norm's statistics of what a bias has been added to in 16 bits."""
    g = cg.Graph("g")
    x, bias = g.input("x", (64, 32), BF16), g.input("bias", (32,), BF16)
    made = g.add(x, bias)
    g.output("made", made, dtype=BF16)
    g.output("mean", g.reduction(made, 0, "mean"), dtype=F32)
    spec = g.spec()
    inputs = random_inputs(spec, CPU)
    (_, exact), (_, rounded) = (reference.run(spec, inputs, kind) for kind in (torch.float64, None))
    theirs = relative_error(rounded, exact)
    assert 3e-5 < theirs < 3e-3, "beyond what float32 alone is off by"

    def farther(times: float) -> Callable[[Plan, Sequence[int], int], None]:
        def then(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
            plan.result(pointers, 1).copy_(exact + times * (rounded - exact))

        return then

    assert why(Plan(spec)) is None, "rounded, as torch does"
    assert why(Plan(spec, farther(0.0))) is None, "or not"
    said = f"wrong: 'mean' is off by {1.55 * theirs:.2g}, at most {1.5 * theirs:.2g} is right"
    assert why(Plan(spec, farther(1.55))) == said


@pytest.mark.parametrize(("times", "right"), [(1.45, True), (1.55, False)])
def test_what_should_be_zero_may_be_as_far_from_it_as_torchs(times: float, right: bool) -> None:
    spec = pointwise(F32, lambda x: ((x + 64.0) - 64.0) - x)

    def farther(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        (off,) = reference.run(spec, given_to(plan, pointers), F32)
        plan.result(pointers).copy_(times * off)

    (exact,) = reference.run(spec, random_inputs(spec, CPU), torch.float64)
    assert not bool(exact.any())
    said = why(Plan(spec, farther))
    assert said is None if right else "'y' is off by inf" in str(said)


@pytest.mark.parametrize("power", [-6, 0, 6])
def test_numbers_of_one_magnitude(power: int) -> None:
    spec = pointwise(F32, lambda x: x.tanh() * 2.0)
    (x,) = random_inputs(spec, CPU, power=power)
    size = x.abs() * 2.0**-power
    assert 0.25 <= float(size.min()) < 0.26 and 0.99 < float(size.max()) <= 1.0
    assert 0.4 < float((x > 0).float().mean()) < 0.6


def test_a_difference_that_cancels_is_seen_where_all_numbers_are_large() -> None:
    """The gradient of tanh, from a tanh that is off by 1e-7 everywhere."""
    g = cg.Graph("g")
    x, dy = (g.input(name, (64, 64), F32) for name in ("x", "dy"))
    y = (x * 0.0625).tanh()
    g.output("dx", dy * (1.0 - y * y))
    spec = g.spec()

    def off(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        x, dy = given_to(plan, pointers)
        y = (x * 0.0625).tanh() + 2.0**-23
        at(pointers[-1], spec.tensors["dx"]).copy_(dy * (1.0 - y * y))

    assert why(Plan(spec)) is None
    assert "of numbers of about " in str(why(Plan(spec, off)))


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("name", ["tanh", "softplus"])
def test_an_exponential_that_overflows_behind_a_product_is_seen(
    name: str, dtype: torch.dtype
) -> None:
    g = cg.Graph("g")
    x, y = g.input("x", (32, 64), dtype), g.input("y", (64, 16), dtype)
    g.output("z", getattr(g, name)(g.matmul(x, y)))
    spec = g.spec()

    def overflows(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        x, y = (each.float() for each in given_to(plan, pointers))
        e = (x @ y).exp()
        by_name = {"tanh": (e * e - 1.0) / (e * e + 1.0), "softplus": (1.0 + e).log()}
        at(pointers[-1], spec.tensors["z"]).copy_(by_name[name])

    assert why(Plan(spec)) is None
    assert str(why(Plan(spec, overflows))).startswith("not finite where torch is, of numbers of")


def test_large_numbers_are_tried_with_results_as_they_are_declared_to_lie() -> None:
    g = cg.Graph("g")
    g.output("y", g.tanh(g.input("x", (4, 8), F16)), stride=(64, 2))
    spec = g.spec()
    plan, trial = Plan(spec), StepTrial(spec, POLICY, CPU)
    (made,) = trial._run(plan, random_inputs(spec, CPU))
    assert made.stride() == (64, 2)
    assert made.untyped_storage().nbytes() >= 2 * spec.tensors["y"].extent
    assert trial.why_wrong(plan) is None


def test_what_lies_between_elements_must_not_count() -> None:
    """cuDNN 9.19's engine 2 multiplied it by 0, for a matrix of strides (16, 2)."""
    g = cg.Graph("g")
    x, y = g.input("x", (32, 64), F16), g.input("y", (64, 8), F16, stride=(16, 2))
    g.output("z", g.matmul(x, y))
    spec = g.spec()

    def between(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        x, y = given_to(plan, pointers)
        gaps = y.as_strided((64, 7), (16, 2), 1).float().sum() * 0.0
        at(pointers[-1], spec.tensors["z"]).copy_(x.float() @ y.float() + gaps)

    assert why(Plan(spec)) is None
    assert "is off by" in str(why(Plan(spec, between)))


def test_both_bools_are_in_a_mask_of_two() -> None:
    """Engine 1 of cuDNN 9.19 took the condition of one row for those of both."""
    g = cg.Graph("g")
    x, y = (g.input(name, (2, 256), F32) for name in "xy")
    g.output("z", g.where(g.input("c", (2, 1), torch.bool), x, y))
    spec = g.spec()

    def misreads(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
        given = dict(zip(spec.inputs, given_to(plan, pointers), strict=True))
        given["c"] = given["c"][1:].expand(2, 1)
        at(pointers[-1], spec.tensors["z"]).copy_(reference.run(spec, list(given.values()))[0])

    for _ in range(4):
        assert why(Plan(spec)) is None
        assert "is off by" in str(why(Plan(spec, misreads)))


@pytest.mark.parametrize(("terms", "right"), [(16, False), (4096, True)])
def test_long_sums_of_float32_may_be_made_term_by_term(terms: int, right: bool) -> None:
    g = cg.Graph("g")
    g.output("y", g.matmul(g.input("a", (8, terms), F32), g.input("b", (terms, 4), F32)))
    assert (why(Plan(g.spec(), nearly(1e-6))) is None) is right
