"""Torch steps, run on the CPU: what the reference says, in the dtype of the data."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.device import rules, tf32
from cudnngraph.executor import copies, reference, torch_steps
from cudnngraph.executor.linear import runs_whole
from cudnngraph.ir.spec import GraphSpec, TensorSpec, overlaps_itself
from cudnngraph.ops.table import OPS
from cudnngraph.partition.analysis import CutGraph
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.rewrite.packed import prefers_flash
from tests import numerics
from tests.chunks import each_case
from tests.copies import check_slices
from tests.cuttings import every_cutting
from tests.flash import flash_attention_forward
from tests.samples import Case, enumerate_cases, make_inputs

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")
CASES = [case for case in enumerate_cases() if case.on_gpu]


def outputs_of(spec: GraphSpec) -> list[torch.Tensor]:
    """Memory for the outputs as they are declared, full of what must be overwritten."""
    made = []
    for declared in (spec.tensors[name] for name in spec.outputs):
        out = torch.empty_strided(declared.shape, declared.stride, dtype=declared.dtype)
        made.append(out.fill_(1 if declared.dtype == torch.bool else 77))
    return made


def inputs_of(spec: GraphSpec, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [laid_out(spec.tensors[name], values[name]) for name in spec.inputs]


def laid_out(declared: TensorSpec, value: torch.Tensor) -> torch.Tensor:
    if value.stride() == declared.stride:
        return value
    out = torch.empty_strided(declared.shape, declared.stride, dtype=declared.dtype)
    assert not overlaps_itself(declared.shape, declared.stride)
    return out.copy_(value)


def check(spec: GraphSpec, inputs: list[torch.Tensor], out: torch.Tensor, terms: int) -> None:
    """Against the reference in float64: one rounding of the dtype, or its bound for long sums."""
    (declared,) = (spec.tensors[name] for name in spec.outputs[:1])
    want = reference.run(spec, inputs, torch.float64)[0]
    if not out.dtype.is_floating_point:
        exact = reference.run(spec, inputs)[0]
        assert torch.equal(out, exact)
        return
    error = numerics.relative_error(out, want.to(torch.float64))
    data = spec.tensors[spec.inputs[0]].dtype if spec.inputs else declared.dtype
    anchor = any(not OPS[node.op].pointwise for node in spec.nodes)
    allowed = numerics.ROUNDOFF[declared.dtype] * (1.01 if declared.dtype != F32 else 2.0)
    if anchor:
        allowed = max(allowed, numerics.bound(data, declared.dtype, terms=terms))
    assert error <= allowed, f"{[node.op for node in spec.nodes]}: {error:.3g}, {allowed:.3g}"


@each_case(CASES)
def test_every_op_of_a_sample_computes_what_the_reference_says(case: Case) -> None:
    """Op by op, each step on what those before it made, into memory as it is declared."""
    spec = case.build().spec()
    values = dict(make_inputs(case))
    for step in every_cutting(spec)[-1] if len(spec.nodes) > 1 else (spec,):
        given = inputs_of(step, values)
        before = [tensor.clone() for tensor in given]
        out = outputs_of(step)
        places = [tensor.data_ptr() for tensor in out]
        assert torch_steps.launcher(step, given, out, allow_tf32=False)() is None
        check(step, given, out[0], case.terms)
        for name, tensor, place in zip(step.outputs, out, places, strict=True):
            assert tensor.data_ptr() == place, "the step took memory of its own"
            assert tensor.stride() == step.tensors[name].stride
            values[name] = tensor
        for a, b in zip(before, given, strict=True):
            same = torch.equal(a.double().nan_to_num(), b.double().nan_to_num())
            assert same, "an input was written over"


def test_the_samples_run_by_torchs_own_calls_and_by_the_reference() -> None:
    """The test above covers both roads."""
    roads = set()
    for case in CASES:
        spec = case.build().spec()
        for step in every_cutting(spec)[-1]:
            single = torch_steps._single(step, CPU)
            roads |= {(node.op, single is not None) for node in step.nodes}
    ours = {op for op, own in roads if own}
    assert {"conv", "conv_transpose", "matmul", "bias", "relu", "silu", "add"} <= ours
    assert {"sdpa", "layer_norm", "batch_norm"} <= {op for op, own in roads if not own}


def single(op: str, *given: Any, dtype: torch.dtype | None = None, **options: Any) -> GraphSpec:
    """A graph of one op on inputs of the given (shape, dtype), or on plain numbers."""
    g = cg.Graph("g")
    operands = [
        g.input(f"in{place}", *each) if isinstance(each, tuple) else each
        for place, each in enumerate(given)
    ]
    made = getattr(g, op)(*operands)
    g.output("out", made, **({"dtype": dtype} if dtype else {}), **options)
    return g.spec()


def run(spec: GraphSpec, *inputs: torch.Tensor) -> torch.Tensor:
    (out,) = outputs_of(spec)
    torch_steps.launcher(spec, inputs, [out], allow_tf32=False)()
    return out


def test_numbers_are_operands_of_torchs_own_call() -> None:
    spec = single("mul", ((64,), F16), 0.1)
    assert torch_steps._single(spec, CPU) is not None
    x = torch.linspace(-3, 3, 64).half()
    want = (x.double() * 0.1).half()
    assert (run(spec, x) - want).abs().max() <= 2.0**-11 * 0.5
    check(spec, [x], run(spec, x), 1)


@pytest.mark.parametrize("other", [F32, F16])
@pytest.mark.parametrize("result", [F32, F16, BF16])
@pytest.mark.parametrize("op", ["add", "mul", "sub", "maximum", "div"])
def test_mixed_dtypes_are_rounded_once(op: str, other: torch.dtype, result: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(1)
    a = torch.rand(512, generator=gen).add(0.5).half()
    b = torch.rand(512, generator=gen).add(0.5).to(other)
    spec = single(op, ((512,), F16), ((512,), other), dtype=result)
    check(spec, [a, b], run(spec, a, b), 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_normalized_by_norms_in_float32(dtype: torch.dtype) -> None:
    """In float16 the least norm would be 0, and rows of zeros NaN; nor is a norm rounded first."""
    g = cg.Graph("normalize")
    g.output("y", g.normalize(g.input("x", (3, 64), dtype)))
    spec = g.spec()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0.0
    y = torch.empty_like(x)
    torch_steps.prepare(spec, allow_tf32=False, device=torch.device("cpu"))([x], [y])
    wide = x.double()
    exact = wide / wide.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    assert torch.equal(y, exact.to(dtype))


def test_a_vector_in_float32_on_data_in_16_bits_is_not_rounded_first() -> None:
    """1 + 2^-11 is 1 in float16: rounded before the product, the vector would say nothing."""
    spec = single("scale", ((1, 4, 2, 2), F16), ((4,), F32))
    x = torch.full((1, 4, 2, 2), 1.0).half() * 3
    vector = torch.full((4,), 1.0 + 1.5 * 2.0**-11)
    want = (x.double() * vector.double().view(1, 4, 1, 1)).half()
    assert torch.equal(run(spec, x, vector), want)
    assert not torch.equal(want, x)


@pytest.mark.parametrize("op", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("dtypes", [(F16, F16), (F16, F32), (F32, F32)], ids=str)
def test_comparisons_give_bools(op: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 1.0]).to(dtypes[0])
    b = torch.tensor([1.0, 3.0, 2.0, 1.0 + 2.0**-12]).to(dtypes[1])
    spec = single(op, ((4,), dtypes[0]), ((4,), dtypes[1]))
    out = run(spec, a, b)
    assert out.dtype == torch.bool
    assert torch.equal(out, getattr(torch, op)(a.double(), b.double()))


@pytest.mark.parametrize("op", ["relu", "silu", "gelu", "sigmoid", "neg", "identity"])
def test_results_are_written_in_the_declared_layout(op: str) -> None:
    spec = single(op, ((2, 4, 3, 3), F16), layout="channels_last")
    x = torch.randn(2, 4, 3, 3).half()
    out = run(spec, x)
    assert out.is_contiguous(memory_format=torch.channels_last) and not out.is_contiguous()
    check(spec, [x], out, 1)


def test_a_result_with_gaps_leaves_the_gaps_alone() -> None:
    spec = single("relu", ((2, 3, 4), F16), stride=(24, 8, 1))
    buffer = torch.full((48,), 5.0).half()
    out = buffer.as_strided((2, 3, 4), (24, 8, 1))
    x = torch.randn(2, 3, 4).half()
    torch_steps.launcher(spec, [x], [out], allow_tf32=False)()
    assert torch.equal(out, x.relu())
    rest = torch.ones(48, dtype=torch.bool)
    rest.as_strided((2, 3, 4), (24, 8, 1)).fill_(False)
    assert bool((buffer[rest] == 5.0).all()) and int(rest.sum()) == 24


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_numbers_are_chosen_by_one_call_into_rows_with_gaps(dtype: torch.dtype) -> None:
    """An additive mask for attention is made so."""
    keep = torch.rand(3, 5) < 0.5
    for zero in (0.0, -0.0):
        spec = single("where", ((3, 5), torch.bool), zero, -2.5, dtype=dtype, stride=(8, 1))
        assert torch_steps._single(spec, CPU) is not None
        out = run(spec, keep)
        assert out.stride() == (8, 1)
        assert torch.equal(out, torch.where(keep, 0.0, -2.5).to(dtype))
        assert torch.equal(out.signbit(), ~keep | (math.copysign(1.0, zero) < 0))


def test_tensors_are_chosen_in_their_dtype_alone() -> None:
    same = single("where", ((4,), torch.bool), ((4,), F16), ((4,), F16), dtype=F16)
    other = single("where", ((4,), torch.bool), ((4,), F16), ((4,), F32), dtype=F16)
    assert torch_steps._single(same, CPU) is not None
    assert torch_steps._single(other, CPU) is None
    keep, x = torch.tensor([True, False, True, False]), torch.arange(4.0).half()
    assert run(same, keep, x, -x).tolist() == [0.0, -1.0, 2.0, -3.0]
    assert run(other, keep, x, -x.float()).tolist() == [0.0, -1.0, 2.0, -3.0]


ROLLS: dict[str, tuple[tuple[Any, ...], bool]] = {  # arguments of torch.roll, and whether ours
    "windows": (((-3, -3), (1, 2)), True),
    "one dim, far": (((17,), (-2,)), True),
    "by nothing": (((0, 6), (3, 1)), True),
    "a dim twice": (((1, 2), (1, -3)), False),
    "the whole": (((5,),), False),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [F16, F32, torch.int64])
@pytest.mark.parametrize("name", ROLLS)
def test_rolling_several_dims_is_one_pass(
    name: str, dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "LEAST_BYTES", 0)
    arguments, ours = ROLLS[name]
    x = torch.arange(2 * 6 * 5 * 8).view(2, 6, 5, 8).to(dtype)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    g = cg.Graph("g")
    encoded = tuple(("list", *each) for each in arguments)
    made = g.aten(
        [g.input("x", tuple(x.shape), dtype, layout=layout)],
        "aten.roll.default",
        (("tensor", 0), *encoded),
    )
    g.output("y", made)
    (node,) = g.spec().nodes
    assert (copies.roll_shifts(dict(node.attrs), 4) is not None) is ours
    assert torch.equal(run(g.spec(), x), torch.roll(x, *arguments))


@pytest.mark.parametrize("dtype", [F16, F32, torch.bool])
@pytest.mark.parametrize("back", [False, True], ids=["into windows", "back"])
def test_a_reshape_that_copies_does_so_once(
    back: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of an image that has its channels last, and the image of its windows."""
    shape = (2, 2, 2, 3, 3, 8) if back else (2, 2, 3, 2, 3, 8)
    g = cg.Graph("g")
    x = g.input("x", shape, dtype)
    turned = g.permute(x, (0, 1, 3, 2, 4, 5))
    g.output("y", g.reshape(turned, (2, 6, 6, 8) if back else (8, 9, 8)))
    given = torch.arange(576).view(shape).remainder(7).to(dtype)
    made: list[torch.Tensor] = []
    copied = copies.copied
    monkeypatch.setattr(torch_steps, "copied", lambda x, out: (made.append(x), copied(x, out))[1])
    want = given.permute(0, 1, 3, 2, 4, 5).reshape((2, 6, 6, 8) if back else (8, 9, 8))
    (step,) = [
        subgraph_of(CutGraph(g.spec()), [node]) for node in g.spec().nodes if node.op == "reshape"
    ]
    out = torch.empty_like(want)
    torch_steps.launcher(step, [given.permute(0, 1, 3, 2, 4, 5)], [out], allow_tf32=False)()
    assert torch.equal(out, want)
    assert [each.data_ptr() for each in made] == [given.data_ptr()]


def test_nothing_is_rolled_where_nothing_is() -> None:
    x = torch.empty(2, 0, 3)
    copies.rolled(x, {1: 2, 2: 1}, torch.empty(2, 0, 3))


@pytest.mark.parametrize("case", ["gaps", "dense", "small"])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_what_lies_with_gaps_is_joined_part_by_part(
    dtype: torch.dtype, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The four neighbours of every second pixel, as a Swin transformer joins them. What is dense,
    or small, is joined in one call."""
    if case != "small":
        monkeypatch.setattr(copies, "LEAST_BYTES", 0)
    x = torch.randn(2, 6, 4, 8).to(dtype)
    parts = [x[:, a::2, b::2] for b in range(2) for a in range(2)]
    if case == "dense":
        parts = [each.contiguous() for each in parts]
    want, out = torch.cat(parts, 3), torch.empty(2, 3, 2, 32, dtype=dtype)
    calls: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(
        torch, "cat", lambda *args, **more: (calls.append(1), cat(*args, **more))[1]
    )
    copies.concatenated(parts, 3, out)
    assert torch.equal(out, want)
    assert bool(calls) is (case != "gaps")


def test_memory_that_begins_elsewhere_or_is_shown_negated_is_copied_element_by_element(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "LEAST_BYTES", 0)
    block = torch.zeros(1024, dtype=torch.uint8)
    start = -block.data_ptr() % 16
    there = torch.frombuffer(block.numpy(), dtype=F32, count=64, offset=start).view(4, 16)
    past = torch.frombuffer(block.numpy(), dtype=F32, count=64, offset=start + 8).view(4, 16)
    assert copies._wide(there, 1) is not None and copies._wide(past, 1) is None
    x = torch.randn(4, 16)
    assert torch.equal(copies.copied(x, past), x)
    negated = torch._neg_view(torch.randn(4, 16))
    assert torch.equal(copies.copied(negated, torch.empty(4, 16)), negated.clone())


@pytest.mark.parametrize("op", ["conv", "conv_transpose"])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_convolution_in_16_bits_runs_in_16_bits(op: str, dtype: torch.dtype) -> None:
    spec = single(op, ((1, 4, 5, 5), dtype), ((4, 4, 3, 3), dtype), dtype=dtype)
    x, w = torch.randn(1, 4, 5, 5).to(dtype), torch.randn(4, 4, 3, 3).to(dtype)
    assert torch_steps._single(spec, CPU) is not None
    check(spec, [x, w], run(spec, x, w), 36)


def test_a_convolution_with_another_result_is_left_to_the_reference() -> None:
    spec = single("conv", ((1, 4, 5, 5), F16), ((4, 4, 3, 3), F16), dtype=F32)
    x, w = torch.randn(1, 4, 5, 5).half(), torch.randn(4, 4, 3, 3).half()
    assert torch_steps._single(spec, CPU) is None
    check(spec, [x, w], run(spec, x, w), 36)


def test_a_launcher_runs_again_on_what_is_there_then() -> None:
    spec = single("relu", ((4,), F32))
    x, out = torch.tensor([-1.0, 1.0, -2.0, 2.0]), torch.empty(4)
    launch = torch_steps.launcher(spec, [x], [out], allow_tf32=False)
    launch()
    x.neg_()
    launch()
    assert out.tolist() == [1.0, 0.0, 2.0, 0.0]


def test_no_step_makes_a_graph_for_gradients() -> None:
    for op, shapes in (("relu", (((4,), F32),)), ("log", (((4,), F32),))):
        spec = single(op, *shapes)
        x, out = torch.ones(4, requires_grad=True), torch.empty(4)
        torch_steps.launcher(spec, [x], [out], allow_tf32=False)()
        assert not out.requires_grad and out.grad_fn is None


# -- a linear layer --------------------------------------------------------------------------------


def linear(
    act: str | None = None,
    dtype: torch.dtype = F16,
    bias: tuple[int, ...] = (24,),
    bias_first: bool = False,
    out: torch.dtype | None = None,
) -> GraphSpec:
    g = cg.Graph("linear")
    x, w = g.input("x", (16, 32), dtype), g.input("w", (32, 24), dtype)
    b = g.input("b", bias, dtype)
    y = b + x @ w if bias_first else x @ w + b
    g.output("y", y if act is None else getattr(g, act)(y), dtype=out or dtype)
    return g.spec()


@pytest.mark.parametrize("act", [None, "relu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("bias_first", [False, True])
def test_a_linear_layer_is_one_call_of_torch(
    act: str | None, dtype: torch.dtype, bias_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = linear(act, dtype, bias_first=bias_first)
    assert runs_whole(spec)
    gen = torch.Generator().manual_seed(5)
    values = {n: torch.randn(spec.tensors[n].shape, generator=gen).to(dtype) for n in spec.inputs}
    inputs, (out,) = [values[name] for name in spec.inputs], outputs_of(spec)
    launch = torch_steps.launcher(spec, inputs, [out], allow_tf32=False)
    monkeypatch.setattr(reference, "run_into", None)  # it is not the reference that runs
    launch()
    want = reference.run(spec, inputs, torch.float64)[0]
    plain = values["x"] @ values["w"] + values["b"]
    theirs = {"relu": torch.relu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh")}
    numerics.check(out, want, dtype, theirs[act](plain) if act else plain, terms=32)


@pytest.mark.parametrize(
    "spec",
    [
        linear("silu"),
        linear("gelu"),
        linear(dtype=F32),
        linear(bias=(16, 24)),
        linear(bias=(1,)),
        linear("relu", out=F32),
    ],
    ids=["silu", "gelu", "float32", "residual", "number", "wide"],
)
def test_what_is_no_linear_layer_is_none(spec: GraphSpec) -> None:
    assert not runs_whole(spec)


# -- TF32 ------------------------------------------------------------------------------------------


@pytest.fixture
def switches() -> Any:
    """torch's own TF32 switches, put back after the test."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def stands() -> tuple[bool, bool]:
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("outside", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("allowed", [True, False])
def test_the_switches_stand_as_the_policy_says_while_a_step_runs_and_then_as_before(
    outside: tuple[bool, bool], allowed: bool, switches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = outside
    seen = []
    real = reference.RULES["conv"]

    def conv(inputs: Any, attrs: Any) -> Any:
        seen.append(stands())
        return real(inputs, attrs)

    monkeypatch.setattr(torch_steps, "NATIVE", {**torch_steps.NATIVE, "conv": conv})
    spec = single("conv", ((1, 2, 5, 5), F32), ((2, 2, 3, 3), F32))
    x, w = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)
    launch = torch_steps.launcher(spec, [x, w], outputs_of(spec), allow_tf32=allowed)
    assert stands() == outside
    launch()
    assert seen == [(allowed, allowed)]
    assert stands() == outside


@pytest.mark.parametrize("outside", [True, False])
def test_the_switches_are_put_back_when_a_step_fails(outside: bool, switches: None) -> None:
    torch.backends.cudnn.allow_tf32 = outside
    before = stands()
    with pytest.raises(ZeroDivisionError), tf32.scope(not outside):
        assert torch.backends.cudnn.allow_tf32 is not outside
        raise ZeroDivisionError
    assert stands() == before


def test_a_step_that_multiplies_nothing_touches_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(allowed: bool) -> Any:
        raise AssertionError("the switches were touched")

    monkeypatch.setattr(torch_steps.tf32, "scope", refuse)
    x = torch.ones(4)
    assert run(single("relu", ((4,), F32)), x).tolist() == [1.0] * 4
    half = torch.ones(1, 2, 5, 5).half(), torch.ones(2, 2, 3, 3).half()
    spec = single("conv", ((1, 2, 5, 5), F16), ((2, 2, 3, 3), F16), dtype=F16)
    assert float(run(spec, *half)[0, 0, 0, 0]) == 18.0


@pytest.mark.parametrize("act", [None, "relu", "gelu_tanh"])
def test_a_linear_layer_of_tokens_is_one_call_of_torch(
    act: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(B, S, K) as rows; the reference, which would run it in several, is not asked."""
    g = cg.Graph("g")
    x = g.input("x", (2, 5, 16), F16)
    w, b = g.input("w", (16, 8), F16, stride=(1, 16)), g.input("b", (8,), F16)
    g.output("y", g.activation(g.add(g.matmul(x, w), b), act))
    spec = g.spec()
    assert runs_whole(spec)
    gen = torch.Generator().manual_seed(2)
    given = [
        torch.empty_strided(t.shape, t.stride, dtype=t.dtype).copy_(
            0.5 * torch.randn(t.shape, generator=gen)
        )
        for t in (spec.tensors[name] for name in spec.inputs)
    ]
    (want,) = reference.run(spec, given, torch.float64)
    monkeypatch.setattr(reference, "run_into", None)
    numerics.check(run(spec, *given), want, F16)


def test_tokens_that_lie_apart_are_no_rows() -> None:
    g = cg.Graph("g")
    x = g.input("x", (2, 5, 16), F16, stride=(16, 32, 1))
    g.output("y", g.matmul(x, g.input("w", (16, 8), F16)) + g.input("b", (8,), F16))
    assert not runs_whole(g.spec())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8], ids=str)
def test_slices_are_copied_as_they_are(dtype: torch.dtype) -> None:
    check_slices(dtype, "cpu")


@pytest.mark.parametrize(
    ("of", "to"),
    [
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.int32),
        (torch.float16, torch.float32),
        (torch.uint8, torch.int8),
    ],
    ids=str,
)
def test_what_is_copied_into_another_dtype_is_converted(of: torch.dtype, to: torch.dtype) -> None:
    x = torch.arange(2 * 32 * 3 * 5).remainder(100).view(2, 32, 3, 5).to(of)
    x = x.contiguous(memory_format=torch.channels_last)
    whole = torch.zeros(2, 64, 3, 5).to(to).contiguous(memory_format=torch.channels_last)
    copies.copied(x, whole[:, :32])
    assert torch.equal(whole[:, :32], x.to(to)) and not whole[:, 32:].any()


# -- statistics of groups by those of their channels -----------------------------------------------


def affine_step(spec: GraphSpec) -> torch_steps.Run | None:
    """The torch step of a graph of one op."""
    (node,) = spec.nodes
    return torch_steps._run_group_affine(spec, node, CPU)


@pytest.mark.parametrize("layout", ["channels_last", "contiguous", "gaps"])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(
    "shape", [(3, 16, 6, 5), (1, 16, 6, 5), (2, 16, 8, 8), (2, 16, 3, 4, 2)], ids=str
)
def test_what_makes_a_group_norm_is_of_its_channels_statistics(
    shape: tuple[int, ...], weighed: bool, layout: str
) -> None:
    torch.manual_seed(0)
    x = (
        torch.randn(shape) * 2 + 3 * torch.randn(shape[1]).view(-1, *(1,) * (len(shape) - 2))
    ).half()
    if layout == "channels_last":
        last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
        x = x.contiguous(memory_format=last)
    elif layout == "gaps":
        x = torch.cat([x, x], -1)[..., : shape[-1]]
    w = torch.rand(16).half() + 0.5 if weighed else None
    g = cg.Graph("affine")
    value = None if w is None else g.input("w", like=w)
    made = g.group_affine(g.input("x", like=x), 4, value, eps=1e-3)
    for name, each in zip(("shift", "factor"), made, strict=True):
        g.output(name, each)
    spec = g.spec()
    given = {"x": x, "w": w}
    inputs: list[Any] = [given[name] for name in spec.inputs]
    run = affine_step(spec)
    assert run is not None
    outputs = outputs_of(spec)
    run(inputs, outputs)
    wanted = reference.run(spec, inputs, torch.float64)
    for out, want in zip(outputs, wanted, strict=True):
        assert numerics.relative_error(out, want) < 1e-6
    norm = F.group_norm(x.double(), 4, None if w is None else w.double(), None, 1e-3)
    assert numerics.relative_error((x.double() + outputs[0]) * outputs[1], norm) < 1e-6


def test_statistics_of_groups_are_written_in_16_bits_too() -> None:
    g = cg.Graph("affine")
    x = torch.randn(2, 8, 4, 3).half()
    for name, each in zip(
        ("shift", "factor"), g.group_affine(g.input("x", like=x), 2), strict=True
    ):
        g.output(name, each, dtype=F16)
    spec = g.spec()
    run, outputs = affine_step(spec), outputs_of(spec)
    assert run is not None and {out.dtype for out in outputs} == {F16}
    run([x], outputs)
    for out, want in zip(outputs, reference.run(spec, [x], torch.float64), strict=True):
        assert numerics.relative_error(out, want) < 1e-3


def test_groups_of_one_number_have_no_deviation() -> None:
    g = cg.Graph("affine")
    x = torch.full((2, 4, 3, 3), 7.0).contiguous(memory_format=torch.channels_last)
    g.output("factor", g.group_affine(g.input("x", like=x), 2, eps=1e-4)[1])
    run, out = affine_step(g.spec()), torch.empty(2, 4, 1, 1)
    assert run is not None
    for each in (x, x.contiguous()):
        run([each], [out])
        torch.testing.assert_close(out, torch.full((2, 4, 1, 1), 100.0))


def test_statistics_of_groups_are_the_references_where_torch_has_no_other() -> None:
    for shape, dtype in (((0, 4, 3, 3), F16), ((2, 4, 3, 3), torch.float64)):
        g = cg.Graph("affine")
        g.output("factor", g.group_affine(g.input("x", shape, dtype), 2)[1])
        assert affine_step(g.spec()) is None
        assert g.compile("cpu")(x=torch.randn(shape, dtype=dtype)).shape == (shape[0], 4, 1, 1)


@pytest.mark.parametrize(
    ("size", "parts"), [((64, 64), 64), ((16, 16), 32), ((8, 8), 8), ((7, 7), 1), ((1, 1), 1)]
)
def test_rows_of_channels_are_cut_until_they_are_short(size: tuple[int, int], parts: int) -> None:
    x = torch.randn(2, 12, *size).contiguous(memory_format=torch.channels_last)
    rows = torch_steps._by_channel(x, 3, rules.rules())
    assert rows.shape == (2, size[0] * size[1] // parts, parts, 3, 4)
    assert rows.data_ptr() == x.data_ptr()
    torch.testing.assert_close(rows.sum((1, 2)).flatten(1), x.sum((2, 3)))


# -- packed attention by torch's flash attention ---------------------------------------------------

PACKED = [case for case in CASES if case.family == "sdpa_varlen"]


def flash_run(monkeypatch: pytest.MonkeyPatch, spec: GraphSpec) -> torch_steps.Run | None:
    """The torch step on a GPU, with a flash attention that runs here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fake = SimpleNamespace(_flash_attention_forward=flash_attention_forward)
    monkeypatch.setattr(torch_steps, "_aten", fake)
    return torch_steps._run_packed(spec, spec.nodes[0], torch.device("cuda"))


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_attention_by_flash_attention_is_the_references(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = case.build().spec()
    inputs = inputs_of(spec, make_inputs(case))
    run = flash_run(monkeypatch, spec)
    narrow = case.dtype in (F16, BF16)
    assert (run is not None) == (narrow and prefers_flash(spec.nodes[0], spec.tensors))
    if run is None:
        assert not narrow or not {"plain", "cross", "own", "bottom_right"} & {case.id.split("-")[1]}
        return
    outputs = outputs_of(spec)
    run(inputs, outputs)
    wanted = reference.run(spec, inputs, torch.float64)
    for out, want in zip(outputs, wanted, strict=True):
        ends = torch.isneginf(want)
        assert torch.equal(torch.isneginf(out), ends)
        error = numerics.relative_error(out.masked_fill(ends, 0.0), want.masked_fill(ends, 0.0))
        assert error <= numerics.bound(case.dtype, terms=case.terms)
    low = [torch.empty_like(out, dtype=F16) for out in outputs]
    run(inputs, low)
    assert all(torch.equal(each, out.to(F16)) for each, out in zip(low, outputs, strict=True))


def test_flash_attention_is_for_what_it_takes_and_where_nothing_is_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def takes(
        width: int = 64,
        own: bool = True,
        longest: int | tuple[int, int] = 32,
        stride: int = 256,
        v_width: int | None = None,
        tokens: int = 64,
        **options: Any,
    ) -> bool:
        g = cg.Graph("packed")
        q = g.input("q", (tokens, 4, width), F16, stride=(stride, stride // 4, 1))
        v = g.input("v", (tokens, 4, v_width or width), F16)
        ends = g.input("ends", (5,), torch.int32)
        other = ends if own else g.input("other", (5,), torch.int32)
        most = longest if isinstance(longest, tuple) else (longest, longest)
        g.output("o", g.sdpa_varlen(q, q, v, ends, other, *most, **options))
        (node,) = g.spec().nodes
        return prefers_flash(node, g.spec().tensors)

    assert takes() and takes(is_causal=True) and takes(window=(3, 0))
    with monkeypatch.context() as built:  # for a GPU, without it
        built.setattr(torch.version, "cuda", "13.0")
        built.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
        assert not takes()
        built.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        assert takes()
    assert not takes(finite_padding=True)  # a plan is faster
    assert not takes(longest=1)  # torch folds heads into rows there
    assert takes(own=False) and not takes(own=False, is_causal=True)
    assert not takes(own=False, window=(3, None))
    right = {"own": False, "diagonal_alignment": "bottom_right"}
    assert takes(is_causal=True, **right) and takes(window=(3, None), **right)
    assert not takes(longest=(40, 32), window=(3, None), **right)  # torch widens it to all keys
    assert takes(longest=(40, 32), is_causal=True, window=(3, None), **right)
    assert takes(width=256, stride=1024) and not takes(width=264, stride=1056)
    assert not takes(width=60, stride=240) and not takes(v_width=32) and not takes(stride=260)
    assert not takes(tokens=0)


def test_without_flash_attention_packed_attention_is_the_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = next(case for case in PACKED if case.id == "sdpa_varlen-own-fp16")
    spec = case.build().spec()
    assert flash_run(monkeypatch, spec) is not None
    assert torch_steps._run_packed(spec, spec.nodes[0], CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert torch_steps._run_packed(spec, spec.nodes[0], torch.device("cuda")) is None


@pytest.mark.parametrize("odd", range(3))
def test_what_lies_at_an_odd_address_or_apart_is_copied_for_flash_attention(
    odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q, k or v at an odd element; where sequences end in every second number."""
    case = next(case for case in PACKED if case.id == "sdpa_varlen-own-fp16")
    spec = case.build().spec()
    run = flash_run(monkeypatch, spec)
    assert run is not None
    inputs, outputs = inputs_of(spec, make_inputs(case)), outputs_of(spec)
    apart = torch.empty(inputs[odd].numel() + 1, dtype=F16)[1:].view(inputs[odd].shape)
    assert apart.data_ptr() % 16
    ends = torch.stack([inputs[3], inputs[3]], 1)[:, 0]
    given = [apart.copy_(x) if at == odd else x for at, x in enumerate(inputs[:3])]
    run([*given, ends], outputs)
    want = reference.run(spec, inputs, torch.float64)[0]
    assert numerics.relative_error(outputs[0], want) <= numerics.bound(F16, terms=case.terms)


def test_the_lse_of_a_row_of_nan_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in PACKED if case.id == "sdpa_varlen-own-fp16")
    spec = case.build().spec()
    run = flash_run(monkeypatch, spec)
    assert run is not None
    inputs, outputs = inputs_of(spec, make_inputs(case)), outputs_of(spec)
    inputs[0][50] = math.nan
    run(inputs, outputs)
    assert outputs[1][50].isnan().all() and outputs[1].isnan().sum() == 4


UNARY: dict[str, Any] = {
    **{
        name: lambda g, x, name=name: getattr(g, name)(x)
        for name in (
            *("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "erf", "sigmoid", "tanh"),
            *("relu", "leaky_relu", "elu", "gelu", "gelu_tanh", "silu"),
        )
    },
    "clamp": lambda g, x: g.clamp(x, 0.3, 0.9),
    "softmax": lambda g, x: g.softmax(x, dim=1),
    "log_softmax": lambda g, x: g.log_softmax(x, dim=1),
    "max_pool": lambda g, x: g.max_pool(x, 2),
    "avg_pool": lambda g, x: g.avg_pool(x, 2),
    "adaptive_avg_pool": lambda g, x: g.adaptive_avg_pool(x, (3, 1)),
    "adaptive_max_pool": lambda g, x: g.adaptive_max_pool(x, (3, 1)),
    "interpolate": lambda g, x: g.interpolate(x, size=(8, 12), mode="nearest"),
    "normalize": lambda g, x: g.normalize(x),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", sorted(UNARY))
def test_a_result_of_another_dtype_is_written_all_the_same(op: str, dtype: torch.dtype) -> None:
    """An H200 met pools, softmax and neg of float32 into 16 bits, whose out variants refuse."""
    g = cg.Graph(op)
    x = g.input("x", (2, 3, 4, 6), torch.float32)
    g.output("y", UNARY[op](g, x), dtype=dtype)
    (step,) = [node for node in g.spec().nodes if node.op != "constant"]
    torch.manual_seed(0)
    given = [torch.rand(2, 3, 4, 6) + 0.25]
    out = outputs_of(g.spec())
    torch_steps.launcher(g.spec(), given, out, allow_tf32=False)()
    numerics.check(out[0], reference.run(g.spec(), given, torch.float64)[0], dtype)
    assert step.op == op


@pytest.mark.parametrize("left", [(5, 3), (2, 5, 3), (2, 7, 5, 3)])
@pytest.mark.parametrize("right", [(3, 4), (2, 3, 4), (2, 7, 3, 4)])
def test_a_product_is_written_in_any_order_of_dims(left: Any, right: Any) -> None:
    """torch takes matrices that share an operand as one, and raised where out lay otherwise."""
    torch.manual_seed(0)
    try:
        shape = torch.matmul(torch.rand(left), torch.rand(right)).shape
    except RuntimeError:
        pytest.skip("no product")
    for order in itertools.permutations(range(len(shape))):
        g = cg.Graph("product")
        a, b = g.input("a", left, torch.float32), g.input("b", right, torch.float32)
        strides = [
            math.prod(shape[each] for each in order[order.index(dim) + 1 :])
            for dim in range(len(shape))
        ]
        g.output("y", g.matmul(a, b), stride=strides)
        given, out = [torch.rand(left), torch.rand(right)], outputs_of(g.spec())
        assert out[0].stride() == tuple(strides)
        torch_steps.launcher(g.spec(), given, out, allow_tf32=False)()
        numerics.check(out[0], given[0].double() @ given[1].double(), torch.float32)
