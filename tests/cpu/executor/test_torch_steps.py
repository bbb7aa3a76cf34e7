"""Torch steps, run on the CPU: what the reference says, in the dtype of the data."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import copies, reference, torch_steps
from cudnngraph.partition.analysis import CutGraph
from cudnngraph.partition.cuts import subgraph_of
from tests import numerics
from tests.chunks import each_case
from tests.copies import check_slices
from tests.cuttings import every_cutting
from tests.samples import Case, make_inputs
from tests.steps import BF16, CASES, CPU, F16, F32, check, inputs_of, outputs_of, run, single


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


# -- TF32 ------------------------------------------------------------------------------------------


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


# -- packed attention by torch's flash attention ---------------------------------------------------


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
