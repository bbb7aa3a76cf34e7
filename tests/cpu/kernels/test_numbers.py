"""Kernels on NaN, infinities, and data that lie in memory in unusual ways: exactly as torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels.row_kernels import write
from cudnngraph.kernels.rows import Schedule, rows_of, schedule_for
from cudnngraph.kernels.scalars import number
from cudnngraph.kernels.source import Source
from cudnngraph.kernels.tape import Refused
from tests import host_kernels, numerics

NAN, INF = math.nan, math.inf
SPECIAL = (NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 30.0, -30.0, 1e-30, 3e38, -3e38)
PAIRS = tuple((a, b) for a in SPECIAL for b in SPECIAL)
F32 = torch.float32


@pytest.fixture(autouse=True, scope="module")
def _together() -> None:
    """All kernels are compiled at once, with the first that is run."""
    every = [unary(op) for op in UNARY] + [binary(op) for op in (*BINARY, *BACKWARD)]
    every += [row(op, times) for op in ROW_OPS for times in TIMES]
    for spec in every:
        host_kernels.expect(by_rule(spec))
    places = [sliced(dtype, *cut) for dtype in DTYPES for cut in CUTS]
    places += [spread(*each) for each in STRIDES]
    places += [joined(sizes, dim).spec() for sizes in SIZES for dim in (0, 1)]
    for spec in places:
        for source in by_lanes(spec):
            host_kernels.expect(source)


def by_rule(spec: GraphSpec) -> Source:
    rows = rows_of(spec)
    return write(spec, schedule_for(rows, 1), rows)


def by_lanes(spec: GraphSpec) -> list[Source]:
    rows = rows_of(spec)
    return [write(spec, Schedule(n, 32), rows) for n in (1, 2, 4, 8) if n <= rows.lanes]


def made(spec: GraphSpec, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the kernel of a graph makes."""
    outputs = [spec.tensors[name].empty("cpu") for name in spec.outputs]
    host_kernels.run(by_rule(spec), [*inputs, *outputs])
    return outputs


def same(spec: GraphSpec, inputs: Sequence[torch.Tensor]) -> None:
    """NaN and infinities are where torch has them in float32, and the other numbers are as near to
    float64 as the policy wants them."""
    theirs, exact = reference.run(spec, inputs), reference.run(spec, inputs, torch.float64)
    for out, in32, in64 in zip(made(spec, inputs), theirs, exact, strict=True):
        if not out.dtype.is_floating_point:
            assert torch.equal(out, in32)
            continue
        assert torch.equal(out.isnan(), in32.isnan()), (out, in32)
        infinite = in32.isinf() | out.isinf()
        assert torch.equal(out[infinite], in32[infinite]), (out, in32)
        plain = out.isfinite() & in64.isfinite()
        large = in64.abs() > 1e30  # beside these the others do not count
        for some in (plain & large, plain & ~large):
            numerics.check(out[some], in64[some], F32, in32[some])


UNARY: dict[str, Callable[[cg.Graph, cg.Value], cg.Value]] = {
    **{
        name: lambda g, x, name=name: getattr(g, name)(x)
        for name in (
            *("relu", "elu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "softplus", "mish"),
            *("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "erf", "identity"),
        )
    },
    "leaky_relu": lambda g, x: g.leaky_relu(x, 0.1),
    "clamp": lambda g, x: g.clamp(x, -0.5, 1.5),
    "clamp_min": lambda g, x: g.clamp(x, min=0.25),
    "clamp_max": lambda g, x: g.clamp(x, max=0.25),
    "relu6": lambda g, x: g.relu6(x),
    "hardswish": lambda g, x: g.hardswish(x),
    "softplus_3": lambda g, x: g.softplus(x, 3.0),
    "pow_2": lambda g, x: g.pow(x, 2.0),
    "pow_half": lambda g, x: g.pow(x, 0.5),
    "pow_minus_half": lambda g, x: g.pow(x, -0.5),
    "maximum_0": lambda g, x: g.maximum(x, 0.0),
}


@pytest.fixture(scope="module")
def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([a for a, _ in PAIRS]), torch.tensor([b for _, b in PAIRS])


@pytest.mark.parametrize("op", UNARY)
def test_an_op_of_one_number(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch on a CPU makes NaN of an infinity here, and an infinity of 3e38; on a GPU it does not.
    monkeypatch.setitem(reference.RULES, "gelu", lambda inputs, attrs: by_erf(inputs[0]))  # type: ignore[index, arg-type]
    same(unary(op), [torch.tensor(SPECIAL)])


@pytest.mark.parametrize(("op", "power"), [("pow_half", 0.5), ("pow_minus_half", -0.5)])
def test_a_power_of_a_half_is_a_root_as_torchs(op: str, power: float) -> None:
    """C's powf has the magnitude of -inf, and loses the sign of -0."""
    x = torch.tensor(SPECIAL)
    wanted = torch.pow(x, power)
    (by_kernel,), (by_reference,) = made(unary(op), [x]), reference.run(unary(op), [x])
    for found in (by_kernel, by_reference):
        strange = ~wanted.isfinite() | (wanted == 0)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found[strange].nan_to_num(7.0), wanted[strange].nan_to_num(7.0))
        assert torch.equal(found.signbit() & ~found.isnan(), wanted.signbit() & ~wanted.isnan())
        numerics.check(found[~strange], torch.pow(x[~strange].double(), power), F32)
    (wide,) = reference.run(unary(op), [x.double()], torch.float64)
    torch.testing.assert_close(wide, torch.pow(x.double(), power), rtol=0, atol=0, equal_nan=True)


def unary(op: str) -> GraphSpec:
    g = cg.Graph(op)
    g.output("y", UNARY[op](g, g.input("x", (len(SPECIAL),), F32)))
    return g.spec()


def by_erf(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


BINARY = (
    *("add", "sub", "mul", "div", "minimum", "maximum", "pow"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
)
BACKWARD = ("relu_backward", "gelu_backward", "gelu_tanh_backward", "silu_backward")


@pytest.mark.parametrize("op", (*BINARY, *BACKWARD))
def test_an_op_of_two_numbers(op: str, pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    same(binary(op), pairs)


def binary(op: str) -> GraphSpec:
    g = cg.Graph(op)
    x, y = (g.input(name, (len(PAIRS),), F32) for name in "xy")
    g.output("z", getattr(g, op)(x, y))
    return g.spec()


def test_a_choice_between_numbers(pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    g = cg.Graph("where")
    x, y = (g.input(name, (len(PAIRS),), F32) for name in "xy")
    g.output("z", g.where(g.gt(x, y), x, y))
    same(g.spec(), pairs)


ROWS = (
    [1.0, 2.0, 3.0, 4.0],
    [NAN, 2.0, 3.0, 4.0],
    [1.0, 2.0, 3.0, NAN],
    [1.0, INF, 3.0, 4.0],
    [1.0, -INF, 3.0, 4.0],
    [INF, -INF, 3.0, 4.0],
    [INF, NAN, -INF, 4.0],
    [-INF, -INF, -INF, -INF],
    [INF, INF, INF, INF],
    [0.0, 0.0, 0.0, 0.0],
    [3e38, 3e38, 3e38, 3e38],
    [1e4, -1e4, 1e4, 90.0],
)
ROW_OPS = (
    *("softmax", "log_softmax", "sum", "mean", "max", "min", "amax"),
    *("normalize", "layer_norm", "rms_norm"),
)
TIMES = (1, 40)  # of 4 numbers: rows of one thread's, and of many threads'


def row(op: str, times: int) -> GraphSpec:
    g = cg.Graph(op)
    x = g.input("x", (len(ROWS), 4 * times), F32)
    w = g.input("w", (4 * times,), F32)
    b = g.input("b", (4 * times,), F32)
    if op in ("softmax", "log_softmax"):
        y = getattr(g, op)(x, 1)
    elif op == "normalize":
        y = g.normalize(x)
    elif op == "layer_norm":
        y = g.layer_norm(x, w, b)
    elif op == "rms_norm":
        y = g.rms_norm(x, w)
    else:
        y = g.reduction(x, (1,), op, keepdim=True)
    g.output("y", y)
    g.drop_unused_inputs()
    return g.spec()


@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize("times", TIMES)
def test_an_op_of_a_row(op: str, times: int) -> None:
    spec, rows = row(op, times), torch.tensor(ROWS).repeat(1, times)
    inputs = [rows, *(torch.ones(4 * times) for _ in spec.inputs[1:])]
    (theirs,), (exact,) = reference.run(spec, inputs), reference.run(spec, inputs, torch.float64)
    (out,) = made(spec, inputs)
    usual = [0, 9] if "softmax" not in op else [0, 9, 11]
    numerics.check(out[usual], exact[usual], F32, theirs[usual], terms=160)
    strange = [at for at, row in enumerate(ROWS) if not all(abs(n) < 1e30 for n in row)]
    assert torch.equal(out[strange].isnan(), theirs[strange].isnan()), (out, theirs)
    assert torch.equal(out[strange].isinf(), theirs[strange].isinf()), (out, theirs)
    infinite = theirs.isinf()
    assert torch.equal(out[infinite], theirs[infinite])


@pytest.mark.parametrize("size", [1e39, -1e39, -2.5, -0.0, 3.4028235677973366e38])
def test_numbers_of_a_graph_are_those_of_float32(size: float) -> None:
    g = cg.Graph("number")
    x = g.input("x", (3,), F32)
    g.output("y", g.sub(g.maximum(x, size), size))
    same(g.spec(), [torch.tensor([0.5, -4.0, INF])])
    assert eval_of(number(size)) == float(torch.tensor(size, dtype=F32))


def eval_of(code: str) -> float:
    """The value of C++ for a number."""
    if code.startswith("bits_float"):
        return {"0x7f800000u": INF, "0xff800000u": -INF}[code[11:-1]]
    return float.fromhex(code.strip("()").removesuffix("f"))


# -- places in memory ------------------------------------------------------------------------------


def run_in_place(spec: GraphSpec) -> None:
    """By every number of lanes, on data amid NaN; right to the last bit, since nothing rounds."""
    gen = torch.Generator().manual_seed(0)
    inputs = []
    for tensor in (spec.tensors[name] for name in spec.inputs):
        blank = NAN if tensor.dtype.is_floating_point else 99
        memory = torch.full((tensor.extent,), blank, dtype=tensor.dtype)
        core = [1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride, strict=True)]
        memory.as_strided(core, tensor.stride).copy_(torch.randn(core, generator=gen) * 4)
        inputs.append(memory.as_strided(tensor.shape, tensor.stride))
    wanted = reference.run(spec, inputs)
    for source in by_lanes(spec):
        outputs = [spec.tensors[name].empty("cpu").fill_(7) for name in spec.outputs]
        host_kernels.run(source, [*inputs, *outputs])
        for out, want in zip(outputs, wanted, strict=True):
            assert torch.equal(out.float(), want.float()), (source, out, want)


DTYPES = (torch.float16, torch.float32, torch.int8)
CUTS = ((0, 1, 4, 1), (1, 1, 15, 1), (1, 3, 16, 2), (2, 5, 29, 1), (2, 1, 9, 4))


def sliced(dtype: torch.dtype, dim: int, start: int, stop: int, step: int) -> GraphSpec:
    g = cg.Graph("slice")
    part = g.slice(g.input("x", (4, 16, 32), dtype), dim, start, stop, step)
    g.output("y", g.neg(part) if dtype.is_floating_point else part)
    return g.spec()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, start, stop, step", CUTS)
def test_slices_at_odd_places(
    dtype: torch.dtype, dim: int, start: int, stop: int, step: int
) -> None:
    run_in_place(sliced(dtype, dim, start, stop, step))


STRIDES: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = (
    ((4, 8, 16), (0, 16, 1)),
    ((4, 8, 16), (128, 0, 1)),
    ((4, 8, 16), (8, 1, 0)),
    ((4, 8, 16), (0, 0, 1)),
    ((4, 8, 16), (0, 0, 0)),
    ((4, 8, 16), (200, 19, 1)),
    ((4, 8, 16), (256, 32, 2)),
    ((4, 8, 16), (1, 4, 32)),
    ((1, 8, 16), (77, 16, 1)),
    ((4, 1, 16), (16, 3, 1)),
    ((4, 8, 1), (8, 1, 5)),
    ((1, 1, 1), (1, 1, 1)),
    ((1,), (1,)),
    ((3, 5, 7), (35, 7, 1)),
)


@pytest.mark.parametrize("shape, stride", STRIDES)
def test_inputs_of_any_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    run_in_place(spread(shape, stride))


def spread(shape: tuple[int, ...], stride: tuple[int, ...]) -> GraphSpec:
    g = cg.Graph("strides")
    x, y = g.input("x", shape, torch.float16, stride=stride), g.input("y", shape, torch.float16)
    g.output("z", g.maximum(x, y))
    return g.spec()


SIZES = ((1, 1), (3, 5), (8, 8), (1, 31), (16, 2, 14))


def joined(sizes: tuple[int, ...], dim: int) -> cg.Graph:
    g = cg.Graph("joined")
    shapes = [(n, 6) if dim == 0 else (6, n) for n in sizes]
    parts = [g.input(f"x{at}", shape, torch.float16) for at, shape in enumerate(shapes)]
    g.output("whole", g.concat([g.neg(part) for part in parts], dim))
    return g


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_joined_at_odd_places(sizes: tuple[int, ...], dim: int) -> None:
    run_in_place(joined(sizes, dim).spec())


def test_an_empty_tensor_is_no_kernel() -> None:
    g = cg.Graph("empty")
    g.output("y", g.relu(g.input("x", (4, 0, 3), torch.float16)))
    with pytest.raises(Refused, match="empty"):
        rows_of(g.spec())


def test_more_tensors_than_parameters_hold_are_no_kernel() -> None:
    """500 branches take long to compile, too."""
    g = cg.Graph("many")
    g.output("y", g.concat([g.input(f"x{at}", (3,), F32) for at in range(500)], 0))
    with pytest.raises(Refused, match="501 tensors, of which a kernel takes 480"):
        rows_of(g.spec())


def test_a_schedule_of_other_rows_is_refused() -> None:
    """It would read beside them: a kept choice may be of a version that counted otherwise."""
    g = cg.Graph("rows")
    g.output("y", g.softmax(g.input("x", (4, 12), F32), 1))
    wrong = [Schedule(8, 32), Schedule(4, 48), Schedule(4, 96), Schedule(4, 1024, 2)]
    for schedule in wrong:
        with pytest.raises(Refused):
            write(g.spec(), schedule)


# -- more elements than 32 bits count --------------------------------------------------------------


def far_apart(rows: bool) -> GraphSpec:
    """Rows of 4 numbers, 2^31 bytes from each other, copied or summed."""
    g = cg.Graph("far")
    x = g.to_float(g.input("x", (3, 4), torch.int8, stride=(2**31, 1)))
    g.output("y", g.reduction(x, (1,), "sum", keepdim=True) if rows else x)
    return g.spec()


@pytest.mark.parametrize("rows", [False, True])
def test_elements_that_lie_4_gib_apart(rows: bool) -> None:
    spec = far_apart(rows)
    memory = torch.empty(2**32 + 4, dtype=torch.int8)  # of which three pages are touched
    x = memory.as_strided((3, 4), (2**31, 1))
    x.copy_(torch.arange(12).reshape(3, 4))
    (out,) = made(spec, [x])
    assert torch.equal(out, x.float().sum(1, keepdim=True) if rows else x.float())


FAR = 2**31


@pytest.mark.parametrize("op", ["max_pool", "avg_pool", "nearest", "bilinear"])
def test_windows_read_places_that_lie_4_gib_apart(op: str) -> None:
    g = cg.Graph(op)
    stride = (4 * FAR, 4 * FAR, FAR, 1)
    x = g.to_float(g.input("x", (1, 1, 3, 4), torch.int8, stride=stride))
    if op.endswith("pool"):
        g.output("y", getattr(g, op)(x, kernel_size=2, stride=1, padding=1))
    else:
        g.output("y", g.interpolate(x, size=(6, 8), mode=op))
    given = torch.empty(2 * FAR + 4, dtype=torch.int8).as_strided((1, 1, 3, 4), stride)
    given.copy_(torch.arange(12).reshape(1, 1, 3, 4))
    (want,) = reference.run(g.spec(), [given])
    (out,) = made(g.spec(), [given])
    assert torch.equal(out, want)


def test_scores_are_picked_of_classes_that_lie_8_gib_apart() -> None:
    g = cg.Graph("picked")
    x, at = g.input("x", (2, 3), torch.float16, stride=(1, FAR)), g.input("t", (2,), torch.int64)
    g.output("y", g.nll_loss(x, at, reduction="none"))
    given = torch.empty(2 * FAR + 2, dtype=torch.float16).as_strided((2, 3), (1, FAR))
    given.copy_(torch.arange(6).reshape(2, 3))
    (out,) = made(g.spec(), [given, torch.tensor([2, 1])])
    assert out.tolist() == [-2.0, -4.0]


def counted(shape: tuple[int, ...], reduced: bool = False) -> str:
    """The text of a kernel that reads so many elements."""
    g = cg.Graph("counted")
    x = g.neg(g.input("x", shape, torch.float16))
    g.output("y", g.softmax(x, 1) if reduced else x)
    return by_rule(g.spec()).text


@pytest.mark.parametrize("reduced", [False, True])
def test_indices_have_64_bits_where_32_are_too_few(reduced: bool) -> None:
    for shape in ((2**11, 2**20), (2**20, 2**11), (2**28, 9)):
        text = counted(shape, reduced)
        assert "u64 k" in text and "u32 k" not in text and "u32 r" not in text
    text = counted((2**10, 2**20), reduced)
    assert "u32 k" in text and "u64 k" not in text and "u64 r" not in text


def test_what_is_joined_is_found_behind_2_to_the_31_elements() -> None:
    """By the text: what is subtracted from a wide index is no wide number of 32 bits."""
    g = cg.Graph("joined")
    parts = [g.input(name, (2**16, 2**15), torch.float16) for name in "xy"]
    g.output("z", g.concat([g.neg(part) for part in parts], 0))
    text = by_rule(g.spec()).text
    assert "u64 k" in text and "- 2147483648u" in text and "-2147483648" not in text
