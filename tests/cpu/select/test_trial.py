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
from cudnngraph.ir.spec import GraphSpec, TensorSpec
from cudnngraph.ops.attention.dense import FP8_SCALES
from cudnngraph.select import inputs as inputs_module
from cudnngraph.select import trial
from cudnngraph.select.inputs import random_inputs, strided
from cudnngraph.select.tolerance import TF32_TOLERANCE, relative_error, tolerance
from cudnngraph.select.trial import GUARD_BYTES, StepTrial
from tests import numerics
from tests.chunks import each_case
from tests.samples import Case, enumerate_cases

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")
CASES = [case for case in enumerate_cases() if case.on_gpu]

# -- random data -----------------------------------------------------------------------------------


@each_case(CASES)
def test_random_inputs_of_a_sample_are_as_declared_and_give_numbers(case: Case) -> None:
    """No case is so far out that the reference gives NaN, which any plan would be right about."""
    spec = case.build().spec()
    inputs = random_inputs(spec, CPU)
    for name, tensor in zip(spec.inputs, inputs, strict=True):
        declared = spec.tensors[name]
        assert (tensor.shape, tensor.stride()) == (declared.shape, declared.stride)
        assert tensor.dtype == declared.dtype
    for result in reference.run(spec, inputs, torch.float64):
        assert not bool(result.isnan().any())
        # An lse of -inf is right where no key is in reach.
        assert not result.numel() or bool(result.isfinite().any())


def graph(build: Callable[[cg.Graph], Any]) -> GraphSpec:
    g = cg.Graph("g")
    g.output("y", build(g))
    return g.spec()


def test_floats_are_on_both_sides_of_zero() -> None:
    (x,) = random_inputs(graph(lambda g: g.input("x", (4096,), F32).relu()), CPU)
    assert -1.0 <= float(x.min()) < -0.99 and 0.99 < float(x.max()) <= 1.0
    assert abs(float(x.mean())) < 0.05


@pytest.mark.parametrize("op", ["log", "sqrt", "rsqrt", "reciprocal"])
def test_floats_are_positive_where_an_op_wants_that(op: str) -> None:
    (x,) = random_inputs(graph(lambda g: getattr(g, op)(g.input("x", (4096,), F32))), CPU)
    assert 0.5 <= float(x.min()) < 0.51 and 1.49 < float(x.max()) <= 1.5


INPUT = {"x": (16, 16), "v": (16,), "w": (16, 16)}
POSITIVE: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "a divisor": (lambda g, x, v, w: x / v + w, {"v"}),
    "a divisor and more": (lambda g, x, v, w: x @ w / (v + 1e-5), {"v"}),
    "a norm by hand": (
        lambda g, x, v, w: x * g.rsqrt(g.reduction(x * x, 1, "mean", True) + 1e-5) * v + w,
        set(),
    ),
    "a gate": (lambda g, x, v, w: x / (g.exp(w) + 1.0) + v, set()),
    "a square": (lambda g, x, v, w: g.pow(x @ w, 2.0) + v, set()),
    "a root of an input": (lambda g, x, v, w: g.sqrt(g.relu(x) * v) @ w, {"x", "v"}),
    "a product": (lambda g, x, v, w: g.log(x @ w) + v, {"x", "v", "w"}),
    "a difference": (lambda g, x, v, w: g.sqrt(x - v) + w, {"x", "v", "w"}),
}


@pytest.mark.parametrize("name", POSITIVE)
def test_no_more_is_positive_than_has_to_be(name: str) -> None:
    build, positive = POSITIVE[name]
    g = cg.Graph("g")
    given = [g.input(each, shape, F32) for each, shape in INPUT.items()]
    g.output("y", build(g, *given))
    spec = g.spec()
    drawn = dict(zip(spec.inputs, random_inputs(spec, CPU), strict=True))
    assert {each for each, values in drawn.items() if float(values.min()) > 0.0} == positive
    (y,) = reference.run(spec, list(drawn.values()), torch.float64)
    assert bool(y.isfinite().any())


def test_a_tensor_that_is_read_again_and_again_is_looked_at_once() -> None:
    """Each residual doubles the ways from the root to the inputs: 2^60 of them."""

    def build(g: cg.Graph) -> Any:
        y = g.input("x", (8,), F32)
        for _ in range(60):
            y = y + g.relu(y) * 0.5
        return g.sqrt(y)

    (x,) = random_inputs(graph(build), CPU)
    assert float(x.min()) >= 0.5


def test_bools_are_drawn_but_a_mask_hides_nothing() -> None:
    spec = graph(
        lambda g: g.where(g.input("c", (4096,), torch.bool), g.input("x", (4096,), F32), 0.0)
    )
    drawn = dict(zip(spec.inputs, random_inputs(spec, CPU), strict=True))["c"]
    assert 0.4 < float(drawn.float().mean()) < 0.6
    spec = attention(mask=(8, 8), mask_dtype=torch.bool)
    mask = dict(zip(spec.inputs, random_inputs(spec, CPU), strict=True))["mask"]
    assert bool(mask.all())


@pytest.mark.parametrize(("rows", "length"), [(8, 6), (5, 4), (4, 3), (2, 2), (1, 1)])
def test_a_quarter_of_a_sequence_is_padding(rows: int, length: int) -> None:
    g = cg.Graph("attention")
    q = g.input("q", (3, 4, rows, 16), F16)
    k, v = (g.input(name, (3, 2, 8, 16), F16) for name in "kv")
    lengths = {name: g.input(name, (3,), torch.int32) for name in ("seq_len_q", "seq_len_kv")}
    g.output("o", g.sdpa(q, k, v, **lengths))
    spec = g.spec()
    given = dict(zip(spec.inputs, random_inputs(spec, CPU), strict=True))
    assert given["seq_len_q"].tolist() == [length] * 3
    assert given["seq_len_kv"].tolist() == [6] * 3


SHARED = {
    "plain": {},
    "mask": {"attn_mask": ((8, 8), F16)},
    "bool": {"attn_mask": ((3, 1, 8, 8), torch.bool)},
    "causal": {"is_causal": True},
    "lengths": {"seq_len_q": ((3,), torch.int32), "seq_len_kv": ((3,), torch.int32)},
}


@pytest.mark.parametrize("options", SHARED.values(), ids=SHARED)
def test_the_gradient_of_attention_is_given_the_results_of_its_operands(
    options: dict[str, Any],
) -> None:
    def build(backward: bool) -> GraphSpec:
        g = cg.Graph("g")
        q = g.input("q", (3, 4, 8, 16), F16)
        k, v = (g.input(name, (3, 2, 8, 16), F16) for name in "kv")
        given = {
            name: g.input(name, *value) if isinstance(value, tuple) else value
            for name, value in options.items()
        }
        if backward:
            do, o = (g.input(name, (3, 4, 8, 16), F16) for name in ("do", "o"))
            made = g.sdpa_backward(do, q, k, v, o, g.input("lse", (3, 4, 8), F32), **given)
            names: tuple[str, ...] = ("dq", "dk", "dv")
        else:
            made = g.sdpa(q, k, v, return_lse=True, **given)
            names = ("o", "lse")
        for name, value in zip(names, made, strict=True):
            g.output(name, value)
        return g.spec()

    spec, forward = build(True), build(False)
    given = dict(zip(spec.inputs, random_inputs(spec, CPU), strict=True))
    o, lse = reference.run(forward, [given[name] for name in forward.inputs], torch.float64)
    assert torch.equal(given["o"], o.half())
    # A row without a key has a large number in place of -inf.
    assert torch.equal(given["lse"], torch.where(lse == -math.inf, 1e30, lse).float())
    assert bool((given["lse"] == 1e30).any()) is ("seq_len_q" in options)
    for result in reference.run(spec, list(given.values()), torch.float64):
        assert bool(result.isfinite().all()) and float(result.norm()) > 0.1


def test_for_large_attention_the_lse_is_about_that_of_even_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own would take the reference too long."""
    monkeypatch.setattr(inputs_module, "LARGE_SCORES", 0)
    g = cg.Graph("g")
    q, k, v, do, o = (g.input(name, (1, 2, 8, 16), F16) for name in ("q", "k", "v", "do", "o"))
    made = g.sdpa_backward(do, q, k, v, o, g.input("lse", (1, 2, 8), F32))
    for name, grad in zip(("dq", "dk", "dv"), made, strict=True):
        g.output(name, grad)
    spec = g.spec()
    inputs = random_inputs(spec, CPU)
    given = dict(zip(spec.inputs, inputs, strict=True))
    assert torch.equal(given["lse"], torch.full((1, 2, 8), math.log(8) + 1.0))
    for result in reference.run(spec, inputs, torch.float64):
        assert bool(result.isfinite().all()) and float(result.norm()) > 0.1


def test_results_of_attention_that_are_no_inputs_are_left_alone() -> None:
    g = cg.Graph("g")
    q, k, v, do = (g.input(name, (1, 2, 8, 16), F16) for name in ("q", "k", "v", "do"))
    o, lse = g.sdpa(q, k, v, return_lse=True)
    for name, grad in zip(("dq", "dk", "dv"), g.sdpa_backward(do, q, k, v, o, lse), strict=True):
        g.output(name, grad)
    assert [tensor.shape for tensor in random_inputs(g.spec(), CPU)] == [q.shape] * 4
    g = cg.Graph("g")
    q, k, v, do, o = (g.input(name, (1, 2, 8, 16), F16) for name in ("q", "k", "v", "do", "o"))
    made = g.sdpa_backward(do, g.relu(q), k, v, o, g.input("lse", (1, 2, 8), F32))
    for name, grad in zip(("dq", "dk", "dv"), made, strict=True):
        g.output(name, grad)
    spec = g.spec()
    given = dict(zip(spec.inputs, random_inputs(spec, CPU), strict=True))
    assert float(given["lse"].abs().max()) <= 1.0, "random: its q is computed"


def test_the_seed_makes_the_data() -> None:
    spec = graph(lambda g: g.input("x", (64,), F32).relu())
    a, b, c = (random_inputs(spec, CPU, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_what_is_repeated_is_stored_once() -> None:
    declared = TensorSpec("x", (3, 4, 5), (5, 0, 1), F16)
    values = torch.arange(60).view(3, 4, 5).float()
    made = strided(declared, values, CPU)
    assert made.stride() == (5, 0, 1)
    assert torch.equal(made, values[:, :1].half().expand(3, 4, 5))


# -- how far off -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "ref", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-9], [0.0, 0.0], math.inf),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([-math.inf, 1.0], [math.inf, 1.0], math.inf),
        ([1.0, 1.0], [math.nan, 1.0], math.inf),
        ([math.nan, 1.0], [2.0, 1.0], math.inf),
        ([math.inf, 1.0], [2.0, 1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_relative_error(out: list[float], ref: list[float], error: float) -> None:
    given = torch.tensor(out), torch.tensor(ref, dtype=torch.float64)
    assert relative_error(*given) == pytest.approx(error)
    assert numerics.relative_error(*given) == pytest.approx(error), "the tests' own yardstick"


def test_bools_are_off_by_a_single_one() -> None:
    ref = torch.tensor([True, False, True, True])
    assert relative_error(ref, ref) == 0.0
    assert relative_error(torch.tensor([True, True, True, True]), ref) > tolerance(
        torch.bool, tf32=True
    )


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_the_tolerance_lets_nothing_through_that_is_far_beyond_the_tests_own(
    dtype: torch.dtype,
) -> None:
    """Looser than the policy of the tests, for any op and any data, but by 25 times at most."""
    assert numerics.bound(dtype) <= tolerance(dtype, tf32=False) <= 25 * numerics.bound(dtype)


def test_tf32_loosens_float32_alone() -> None:
    assert tolerance(F32, tf32=True) == TF32_TOLERANCE > tolerance(F32, tf32=False)
    assert tolerance(F16, tf32=True) == tolerance(F16, tf32=False)
    assert tolerance(torch.bool, tf32=True) == tolerance(torch.int32, tf32=False) == 0.0


# -- guard bytes -----------------------------------------------------------------------------------

DENSE = TensorSpec("y", (3, 5), (5, 1), F16)
GAPS = TensorSpec("y", (3, 5), (8, 1), F16)
EVERY_OTHER = TensorSpec("y", (4, 3), (6, 2), F32)
BOOLS = TensorSpec("y", (7,), (1,), torch.bool)


def guarded(spec: TensorSpec) -> Any:
    return trial._Redzone(spec.extent * spec.dtype.itemsize, CPU)


@pytest.mark.parametrize("spec", [DENSE, GAPS, EVERY_OTHER, BOOLS], ids=str)
def test_a_whole_result_touches_nothing_outside(spec: TensorSpec) -> None:
    memory = guarded(spec)
    memory.view(spec).fill_(1)
    assert not memory.touched_outside(spec)
    assert bool((memory.view(spec) == 1).all())


@pytest.mark.parametrize("spec", [DENSE, GAPS, EVERY_OTHER, BOOLS], ids=str)
@pytest.mark.parametrize("place", ["before", "behind", "far_before", "far_behind"])
def test_one_byte_outside_is_seen(spec: TensorSpec, place: str) -> None:
    memory = guarded(spec)
    memory.view(spec).fill_(1)
    size = spec.extent * spec.dtype.itemsize
    at = {
        "before": GUARD_BYTES - 1,
        "behind": GUARD_BYTES + size,
        "far_before": 0,
        "far_behind": memory.block.numel() - 1,
    }[place]
    memory.block[at] ^= 1
    assert memory.touched_outside(spec)


@pytest.mark.parametrize("spec", [GAPS, EVERY_OTHER], ids=str)
def test_every_byte_of_every_gap_is_seen(spec: TensorSpec) -> None:
    mine = torch.zeros(spec.extent, dtype=torch.bool)
    mine.as_strided(spec.shape, spec.stride).fill_(True)
    gaps = [at for at in range(spec.extent) if not mine[at]]
    assert gaps
    for element in gaps:
        for byte in range(spec.dtype.itemsize):
            memory = guarded(spec)
            memory.view(spec).fill_(1)
            memory.inner[element * spec.dtype.itemsize + byte] ^= 1
            assert memory.touched_outside(spec)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_what_is_not_written_is_not_a_number(dtype: torch.dtype) -> None:
    spec = TensorSpec("y", (4,), (1,), dtype)
    assert bool(guarded(spec).view(spec).isnan().all())


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257])
def test_a_workspace_may_be_written_all_over_and_no_further(size: int) -> None:
    memory = trial._Redzone(size, CPU)
    memory.inner.fill_(3)
    assert memory.inner.numel() == size and not memory.touched_outside(None)
    for at in (GUARD_BYTES - 1, GUARD_BYTES + size):
        memory.block[at] ^= 1
        assert memory.touched_outside(None)
        memory.block[at] ^= 1


# -- plans on trial --------------------------------------------------------------------------------


def at(address: int, spec: TensorSpec, elements: int | None = None) -> torch.Tensor:
    """The memory at an address as a tensor."""
    count = spec.extent if elements is None else elements
    raw = (ctypes.c_byte * (count * spec.dtype.itemsize)).from_address(address)
    flat = torch.frombuffer(raw, dtype=spec.dtype)
    return flat.as_strided(spec.shape, spec.stride) if elements is None else flat


class Plan:
    """Does what the reference does, through pointers; ``then`` does something more."""

    def __init__(
        self,
        spec: GraphSpec,
        then: Callable[[Plan, Sequence[int], int], None] | None = None,
        workspace_bytes: int = 300,
    ) -> None:
        self.spec = spec
        self.then = then
        self.workspace_bytes = workspace_bytes
        self.runs = 0

    def pointers(self, tensors: Sequence[int]) -> list[int]:
        return list(tensors)

    def result(self, pointers: Any, place: int = 0) -> torch.Tensor:
        return at(
            pointers[len(self.spec.inputs) + place], self.spec.tensors[self.spec.outputs[place]]
        )

    def execute(self, pointers: Any, workspace: int, handle: object) -> None:
        self.runs += 1
        spec = self.spec
        inputs = [
            at(pointer, spec.tensors[name])
            for name, pointer in zip(spec.inputs, pointers, strict=False)
        ]
        for place, made in enumerate(reference.run(spec, inputs)):
            self.result(pointers, place).copy_(made)
        ctypes.memset(workspace, 7, self.workspace_bytes)
        if self.then is not None:
            self.then(self, pointers, workspace)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "handle_on_current_stream", lambda index: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


def product(**options: Any) -> GraphSpec:
    g = cg.Graph("product")
    x, w = g.input("x", (2, 4, 5, 5), F16), g.input("w", (4, 4, 3, 3), F16)
    g.output("y", g.conv(x, w), **options)
    return g.spec()


POLICY = cg.Policy(allow_tf32=False)


def why(plan: Plan, policy: cg.Policy = POLICY) -> str | None:
    return StepTrial(plan.spec, policy, CPU).why_wrong(plan)


@each_case(CASES)
def test_the_reference_passes_its_own_check(case: Case) -> None:
    spec = case.build().spec()
    if all(spec.tensors[name].numel for name in (*spec.inputs, *spec.outputs)):
        assert why(Plan(spec)) is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_plan_runs_again_only_where_it_must_be_deterministic(deterministic: bool) -> None:
    plan = Plan(product())
    policy = cg.Policy(allow_tf32=False, deterministic=deterministic)
    assert why(plan, policy) is None
    assert plan.runs == 1 + deterministic


def scales(plan: Plan, pointers: Sequence[int], workspace: int) -> None:
    plan.result(pointers).mul_(1.01)


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


# -- large attention: its corners ------------------------------------------------------------------


def attention(
    heads: tuple[int, int] = (4, 2),
    mask: tuple[int, ...] | None = None,
    mask_dtype: torch.dtype = F16,
    lengths: bool = False,
    lse: bool = False,
) -> GraphSpec:
    """3 sequences of 8, heads of q and of k and v as given."""
    g = cg.Graph("attention")
    q = g.input("q", (3, heads[0], 8, 16), F16)
    k, v = (g.input(name, (3, heads[1], 8, 16), F16) for name in "kv")
    options: dict[str, Any] = {}
    if mask is not None:
        options["attn_mask"] = g.input("mask", mask, mask_dtype)
    if lengths:
        for name in ("seq_len_q", "seq_len_kv"):
            options[name] = g.input(name, (3,), torch.int32)
    made = g.sdpa(q, k, v, **options, **({"return_lse": True} if lse else {}))
    for name, value in zip(("o", "lse"), made if lse else (made,), strict=False):
        g.output(name, value)
    return g.spec()


ATTENTIONS = {
    "gqa": attention(),
    "mqa": attention((4, 1)),
    "as_many": attention((4, 4)),
    "one_head": attention((1, 1)),
    "mask_2d": attention(mask=(8, 8)),
    "mask_heads": attention(mask=(1, 4, 8, 8)),
    "mask_batch": attention(mask=(3, 1, 8, 8)),
    "mask_all": attention(mask=(3, 4, 8, 8)),
    "mask_row": attention(mask=(3, 1, 1, 8)),
    "mask_all_mqa": attention((4, 1), mask=(3, 4, 8, 8)),
    "mask_bool": attention(mask=(3, 4, 8, 8), mask_dtype=torch.bool),
    "lengths": attention(lengths=True),
    "lse": attention(lse=True),
    "all": attention((6, 2), mask=(1, 6, 8, 8), lengths=True, lse=True),
}


def varied(spec: GraphSpec) -> list[torch.Tensor]:
    """Random inputs, lengths and masks that differ from batch to batch and head to head."""
    gen = torch.Generator().manual_seed(7)
    made = []
    for name, tensor in zip(spec.inputs, random_inputs(spec, CPU), strict=True):
        if name.startswith("seq"):
            tensor = torch.tensor([8, 3, 5], dtype=torch.int32).view(tensor.shape)
        elif tensor.dtype == torch.bool:
            tensor = torch.rand(tensor.shape, generator=gen) < 0.7
        made.append(tensor)
    return made


@pytest.mark.parametrize("spec", ATTENTIONS.values(), ids=ATTENTIONS)
def test_a_corner_of_attention_is_the_corner_of_the_whole(spec: GraphSpec) -> None:
    inputs = varied(spec)
    whole = reference.run(spec, inputs, torch.float64)
    k = spec.tensors["k"]
    for batch in range(3):
        for head in range(k.shape[1]):
            part = [
                trial._corner(spec, name, tensor, batch, head)
                for name, tensor in zip(spec.inputs, inputs, strict=True)
            ]
            made = reference.run(spec, part, torch.float64)
            for name, result, full in zip(spec.outputs, made, whole, strict=True):
                want = trial._corner(spec, name, full, batch, head)
                assert result.shape == want.shape
                assert want.numel() * 3 * k.shape[1] == full.numel(), "one part of that many"
                assert torch.allclose(result, want, rtol=1e-12, atol=0)


def test_small_attention_is_compared_whole() -> None:
    assert trial._corner_heads(ATTENTIONS["gqa"]) is None


def test_only_attention_alone_is_compared_by_corners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LARGE_SCORES", 0)
    assert trial._corner_heads(ATTENTIONS["gqa"]) == [(0, 0), (2, 1)]
    assert trial._corner_heads(product()) is None
    g = cg.Graph("g")
    q = g.input("q", (1, 1, 8, 16), F16)
    g.output("o", g.relu(g.sdpa(q, q, q)))
    assert trial._corner_heads(g.spec()) is None
    g = cg.Graph("g")
    q = g.input("q", (1, 1, 8, 16), F16)
    g.output("o", g.sdpa(q, q, q))
    assert trial._corner_heads(g.spec()) == [(0, 0)], "both ends are the same"


@pytest.mark.parametrize("spec", ATTENTIONS.values(), ids=ATTENTIONS)
def test_large_attention_is_checked_at_both_ends(
    spec: GraphSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LARGE_SCORES", 0)
    assert why(Plan(spec)) is None
    for place in (0, -1):

        def spoils(plan: Plan, pointers: Sequence[int], workspace: int, place: int = place) -> None:
            plan.result(pointers)[place, place].add_(1.0)

        said = why(Plan(spec, spoils))
        assert said is not None and said.startswith("wrong: 'o' is off by")


def test_large_attention_of_fp8_is_checked_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of all its weights is no part of an end, and is left alone."""
    monkeypatch.setattr(trial, "LARGE_SCORES", 0)
    g = cg.Graph("attention")
    q = g.input("q", (3, 4, 8, 16), torch.float8_e4m3fn)
    k, v = (g.input(name, (3, 2, 8, 16), torch.float8_e4m3fn) for name in "kv")
    scales = [g.input(name, (), F32) for name in FP8_SCALES]
    o, lse, amax_s, _ = g.sdpa_fp8(q, k, v, *scales, return_lse=True)
    for name, value in {"o": o, "lse": lse, "amax_s": amax_s}.items():
        g.output(name, value)
    spec = g.spec()
    assert trial._corner_heads(spec) == [(0, 0), (2, 1)]
    assert why(Plan(spec)) is None
    for place in (0, -1):

        def spoils(plan: Plan, pointers: Sequence[int], workspace: int, place: int = place) -> None:
            part = plan.result(pointers)[place, place]
            part.copy_(part.float() + 8.0)

        said = why(Plan(spec, spoils))
        assert said is not None and said.startswith("wrong: 'o' is off by")
