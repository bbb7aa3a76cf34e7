"""8-bit data: exact sums, one rounding, saturation, and mistakes in the words that mend them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.lowering import pointwise
from cudnngraph.executor import reference, torch_steps
from cudnngraph.ops.operands import exactly
from cudnngraph.ops.quantize import saturated
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.cuts import cuts, subgraph_of
from cudnngraph.select.inputs import random_inputs
from cudnngraph.select.tolerance import multiplies_fp8, relative_error, tolerance
from tests import numerics

F16, F32, F64 = torch.float16, torch.float32, torch.float64
I8, I32 = torch.int8, torch.int32
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def whole(low: int, high: int, *shape: int, dtype: torch.dtype = I8) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


# -- mistakes --------------------------------------------------------------------------------------

Declare = Callable[[cg.Graph], object]


def _conv(x: torch.dtype, w: torch.dtype, k: tuple[int, ...] = (32, 16, 3, 3)) -> Declare:
    return lambda g: g.conv(g.input("x", (2, k[1], 8, 8), x), g.input("w", k, w), name="c")


def _product(x: torch.dtype, w: torch.dtype, terms: int = 64) -> Declare:
    return lambda g: g.matmul(g.input("x", (8, terms), x), g.input("w", (terms, 8), w), name="m")


def _quantize(dtype: torch.dtype = F16, scale: tuple[int, ...] | None = None, **options) -> Declare:
    def declare(g: cg.Graph) -> object:
        x = g.input("x", (2, 16, 8, 8), dtype)
        s = None if scale is None else g.input("s", scale, options.pop("s_dtype", F32))
        return g.quantize(x, s, name="q", **{"dtype": I8, **options})

    return declare


def _dequantize(dtype: torch.dtype, scale: tuple[int, ...] = (), **options: object) -> Declare:
    def declare(g: cg.Graph) -> object:
        x = g.input("x", (2, 16, 8, 8), dtype)
        return g.dequantize(x, g.input("s", scale, F32), name="d", **options)

    return declare


BAD: dict[str, tuple[Declare, str]] = {
    "conv_mixed": (
        _conv(I8, F16),
        "conv 'c': weight 'w' is float16, x 'x' is int8; expected int8 for both, FP8 for both or "
        "one floating dtype for both (quantize one, or dequantize the other)",
    ),
    "conv_int8_by_fp8": (
        _conv(I8, E4),
        "weight 'w' is float8_e4m3fn, x 'x' is int8; expected int8",
    ),
    "matmul_mixed": (_product(F16, E5), "matmul 'm': y 'w' is float8_e5m2, x 'x' is float16;"),
    "matmul_terms": (
        _product(I8, I8, 1 << 17),
        "matmul 'm': sums up 131072 products of int8, which int32 need not hold; expected fewer "
        "than 131072 (cut it and add the parts)",
    ),
    "conv_terms": (_conv(I8, I8, (4, 1 << 14, 3, 3)), "conv 'c': sums up 147456 products of int8"),
    "zero_point": (
        _quantize(zero_point=3),
        "quantize 'q': zero_point=3; expected 0: quantisation is symmetric here (shift the data "
        "instead)",
    ),
    "zero_point_back": (
        _dequantize(I8, zero_point=-1),
        "dequantize 'd': zero_point=-1; expected 0",
    ),
    "to_int32": (
        lambda g: g.quantize(g.input("x", (4,), F32), dtype=I32, name="q"),
        "quantize 'q': dtype=torch.int32 is no 8-bit dtype; expected torch.int8 or "
        "torch.float8_e4m3fn or torch.float8_e5m2",
    ),
    "quantize_int8": (
        _quantize(I8),
        "quantize 'q': x 'x' is int8; expected float16, bfloat16, float32 or float64",
    ),
    "dequantize_fp16": (
        _dequantize(F16),
        "dequantize 'd': x 'x' is float16; expected int8, FP8, or the int32 or float32 that their "
        "products give (multiply or scale it)",
    ),
    "scale_shape": (
        _quantize(scale=(8,)),
        "quantize 'q': scale 's' has shape (8,); expected () or (1,) for all of x, or (16,) along "
        "dim 1 of x (2, 16, 8, 8)",
    ),
    "scale_dim": (
        _dequantize(I8, (8,), dim=4),
        "dequantize 'd': dim=4 is no dim of x; expected -4",
    ),
    "scale_dtype": (_quantize(scale=(), s_dtype=F16), "scale 's' is float16; expected float32"),
    "relu_of_int32": (
        lambda g: g.relu(_conv(I8, I8)(g), name="r"),
        "relu 'r': x 'c' is int32; expected float16, bfloat16, float32 or float64 (dequantize or",
    ),
    "relu_of_fp8": (
        lambda g: g.relu(g.input("x", (4,), E4), name="r"),
        "relu 'r': x 'x' is float8_e4m3fn; expected float16, bfloat16, float32 or float64 (deq",
    ),
    "out_scale_alone": (
        lambda g: g.quantized_conv_bias_act(
            g.input("x", (2, 16, 8, 8), I8),
            g.input("w", (32, 16, 3, 3), I8),
            g.input("s", (), F32),
            out_scale=g.input("s_out", (), F32),
        ),
        "quantized_conv_bias_act: out_scale without dtype; expected both or neither",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_reported_in_the_words_that_mend_it(name: str) -> None:
    declare, says = BAD[name]
    g = cg.Graph("bad")
    g.output("y", declare(g))  # type: ignore[arg-type]
    with pytest.raises(cg.GraphError) as caught:
        g.spec()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("given", "wanted", "says"),
    [
        (F32, I8, "output 'y': dtype=int8 of a number; expected a floating dtype (g.quantize it"),
        (
            F16,
            E4,
            "output 'y': dtype=float8_e4m3fn of a number; expected a floating dtype (g.quant",
        ),
        (I8, F32, "output 'y': dtype=float32 of int32; expected int32 (g.dequantize it first)"),
        (I8, I8, "output 'y': dtype=int8 of int32; expected int32 (g.dequantize it first)"),
    ],
    ids=str,
)
def test_an_output_does_not_round_to_8_bits_nor_from_them(
    given: torch.dtype, wanted: torch.dtype, says: str
) -> None:
    g = cg.Graph("g")
    g.output("y", _conv(given, given)(g), dtype=wanted)  # type: ignore[arg-type]
    with pytest.raises(cg.GraphError) as caught:
        g.spec()
    assert says in str(caught.value)


def test_tensors_of_another_8_bit_dtype_do_not_bind() -> None:
    g = cg.Graph("g")
    g.output("y", g.matmul(g.input("x", (8, 16), E4), g.input("w", (16, 8), E4)))
    exe = g.compile("cpu")
    with pytest.raises(cg.BindError) as caught:
        exe(x=torch.zeros(8, 16).to(E5), w=torch.zeros(16, 8))
    assert "tensor 'x': is float8_e5m2; expected float8_e4m3fn (convert it)" in str(caught.value)
    assert "tensor 'w': is float32; expected float8_e4m3fn (convert it)" in str(caught.value)


# -- numbers ---------------------------------------------------------------------------------------


def test_sums_of_int8_products_are_exact_past_what_float32_holds() -> None:
    x, w = whole(-128, 128, 4, 60000), whole(-128, 128, 60000, 3)
    x[0], w[:, 0] = 127, 127
    x[0, 0] = 126
    g = cg.Graph("g")
    g.output("y", g.matmul(g.input("x", (4, 60000), I8), g.input("w", (60000, 3), I8)))
    y = g.compile("cpu")(x=x, w=w)
    assert y.dtype == I32
    want = x.long() @ w.long()
    assert int(want[0, 0]) == 127 * 127 * 60000 - 127 > 1 << 24
    assert float(torch.tensor(int(want[0, 0])).float()) != int(want[0, 0])
    assert torch.equal(y.long(), want)


def test_sums_of_int8_are_rounded_to_the_whole_number_that_they_are() -> None:
    """An algorithm by FFT, as a GPU may take, is a hair off it."""
    product = exactly(lambda inputs, attrs: inputs[0] @ inputs[1] * (1 - 2.0**-50))
    x, w = whole(-128, 127, 8, 32), whole(-128, 127, 32, 8)
    assert torch.equal(product([x, w], {}).long(), x.long() @ w.long())


@pytest.mark.parametrize("op", ["conv", "conv_transpose"])
def test_convolutions_of_int8_are_those_of_int64(op: str) -> None:
    x, w = whole(-128, 128, 2, 6, 5, 7), whole(-128, 128, 6, 6, 3, 3)
    g = cg.Graph("g")
    g.output("y", getattr(g, op)(g.input("x", like=x), g.input("w", like=w)))
    y = g.compile("cpu")(x=x, w=w)
    columns = torch.zeros(y.shape, dtype=torch.long)
    for i in range(3):
        for j in range(3):
            if op == "conv":
                part = x[:, :, i : i + 3, j : j + 5].long()
                columns += torch.einsum("nchw,kc->nkhw", part, w[:, :, i, j].long())
            else:
                part = torch.einsum("nchw,ck->nkhw", x.long(), w[:, :, i, j].long())
                columns[:, :, i : i + 5, j : j + 7] += part
    assert y.dtype == I32
    assert torch.equal(y.long(), columns)


@pytest.mark.parametrize(
    ("dtype", "given", "wanted"),
    [
        (I8, [0.5, 1.5, 2.5, -0.5, -1.5], [0, 2, 2, 0, -2]),
        (I8, [127.4, 127.5, 1e9, -128.5, -128.6, -1e9], [127, 127, 127, -128, -128, -128]),
        (E4, [17.0, 19.0, -17.0, 448.0, 470.0, -1e9], [16, 20, -16, 448, 448, -448]),
        (E5, [9.0, 11.0, 57344.0, 1e9, -1e9], [8, 12, 57344, 57344, -57344]),
        (E4, [2.0**-9, 2.0**-10, 1.5 * 2.0**-9], [2.0**-9, 0, 2.0**-8]),
        (E5, [2.0**-16, 2.0**-17, 1.5 * 2.0**-16], [2.0**-16, 0, 2.0**-15]),
    ],
)
def test_rounding_is_to_nearest_with_ties_to_even_and_saturates(
    dtype: torch.dtype, given: list[float], wanted: list[float]
) -> None:
    g = cg.Graph("g")
    x, s = g.input("x", (len(given),), F32), g.input("s", (), F32)
    g.output("y", g.quantize(x, s, dtype=dtype))
    exe = g.compile("cpu")
    y = exe(x=torch.tensor(given) * 0.25, s=torch.tensor(0.25))
    assert y.dtype == dtype
    assert y.double().tolist() == wanted


@pytest.mark.parametrize("dtype", [E4, E5], ids=str)
def test_what_is_not_finite_is_nan_in_fp8(dtype: torch.dtype) -> None:
    g = cg.Graph("g")
    g.output("y", g.quantize(g.input("x", (4,), F32), dtype=dtype))
    y = g.compile("cpu")(x=torch.tensor([math.inf, -math.inf, math.nan, 2.0]))
    assert y.double().isnan().tolist() == [True, True, True, False]


def test_the_arithmetic_that_rounds_in_a_plan_rounds_to_even() -> None:
    """Adding and taking away 1.5 * 2^23, in float32, of what is clamped to int8's range."""
    x = torch.cat([torch.linspace(-140, 140, 100_001), torch.arange(-257, 257) / 2.0])
    clamped = x.clamp(-128, 127)
    made = (clamped + pointwise._ROUND_TO_INT) - pointwise._ROUND_TO_INT
    assert torch.equal(made.to(I8), saturated(x, I8))
    assert torch.equal(made, made.round())


def test_the_scale_of_quantize_is_that_of_dequantize() -> None:
    x = torch.linspace(-6.0, 6.0, 97).view(1, 97)
    g = cg.Graph("g")
    s = g.input("s", (), F32)
    g.output("y", g.dequantize(g.quantize(g.input("x", (1, 97), F32), s, dtype=I8), s))
    y = g.compile("cpu")(x=x, s=torch.tensor(0.05))
    assert float((y - x).abs().max()) <= 0.025 * 1.001


def test_a_number_quantised_within_a_graph_is_rounded_there() -> None:
    g = cg.Graph("g")
    x = g.input("x", (3,), F32)
    q = g.quantize(x, dtype=E4)
    one = g.input("one", (), F32)
    g.output("y", g.dequantize(q, one))
    assert g.spec().tensors[g.spec().intermediates[0]].dtype == E4
    y = g.compile("cpu")(x=torch.tensor([17.0, 0.3, 1e6]), one=torch.ones(()))
    assert y.tolist() == [16.0, 0.3125, 448.0]


def test_per_channel_scales_lie_along_the_dim_that_is_said() -> None:
    x, s = whole(-128, 128, 3, 4, 5), torch.tensor([0.5, 2.0, 4.0, 8.0])
    g = cg.Graph("g")
    g.output("y", g.dequantize(g.input("x", like=x), g.input("s", like=s), dim=-2))
    assert dict(g.spec().nodes[0].attrs)["dim"] == 1
    assert torch.equal(g.compile("cpu")(x=x, s=s), x * s.view(1, 4, 1))


def test_the_composition_is_what_it_says() -> None:
    x, w = whole(-9, 10, 2, 8, 6, 6), whole(-9, 10, 4, 8, 3, 3)
    s, b, s_out = torch.rand(4) / 100, torch.randn(4), torch.tensor(0.07)
    g = cg.Graph("g")
    given = [g.input(name, like=t) for name, t in {"x": x, "w": w, "s": s, "b": b}.items()]
    y = g.quantized_conv_bias_act(
        *given,
        out_scale=g.input("s_out", (), F32),
        dtype=I8,
        activation="leaky_relu",
        negative_slope=0.25,
        padding=1,
    )
    g.output("y", y)
    made = g.compile("cpu")(x=x, w=w, s=s, b=b, s_out=s_out)
    y64 = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    y64 = y64 * s.double().view(1, 4, 1, 1) + b.double().view(1, 4, 1, 1)
    y64 = torch.where(y64 > 0, y64, 0.25 * y64) / s_out.double()
    numerics.check(made, y64.round().clamp(-128, 127).to(I8), I8)


def test_the_amax_is_of_what_has_a_sign_and_of_a_plain_number() -> None:
    g = cg.Graph("g")
    g.output("y", g.reduction(g.input("x", (2, 3), F32), mode="amax"))
    g.output("n", g.reduction(g.input("z", (), F32), mode="amax"))
    x = torch.tensor([[1.0, -7.0, 2.0], [6.0, 0.0, -3.0]])
    y, n = g.compile("cpu")(x=x, z=torch.tensor(-2.0))
    assert (float(y), float(n)) == (7.0, 2.0)


# -- attention -------------------------------------------------------------------------------------

SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


def _attend(
    g: cg.Graph, kind: torch.dtype = E4, depth: int = 16, **options: object
) -> tuple[cg.Value, ...]:
    data = [g.input(name, (1, 2, 8, depth), kind) for name in "qkv"]
    return g.sdpa_fp8(*data, *(g.input(name, (), F32) for name in SCALES), name="a", **options)


BAD_ATTENTION: dict[str, tuple[Declare, str]] = {
    "fp16": (
        lambda g: _attend(g, F16)[0],
        "sdpa_fp8 'a': q 'q' is float16; expected float8_e4m3fn or float8_e5m2 (quantize it, or "
        "use sdpa)",
    ),
    "format": (
        lambda g: _attend(g, E4, dtype=E5)[0],
        "sdpa_fp8 'a': dtype=torch.float8_e5m2; expected None or torch.float8_e4m3fn, that of q",
    ),
    "mixed": (
        lambda g: g.sdpa_fp8(
            *(g.input(name, (1, 2, 8, 16), E5 if name == "v" else E4) for name in "qkv"),
            *(g.input(name, (), F32) for name in SCALES),
        )[0],
        "v 'v' is float8_e5m2, q 'q' is float8_e4m3fn; expected one dtype",
    ),
    "scale": (
        lambda g: g.sdpa_fp8(
            *(g.input(name, (1, 2, 8, 16), E4) for name in "qkv"),
            *(g.input(name, (2,) if name == "scale_o" else (), F32) for name in SCALES),
        )[0],
        "scale_o 'scale_o' is float32 (2,); expected float32 () or (1,): one number",
    ),
    "alignment": (
        lambda g: _attend(g, diagonal_alignment="middle")[0],
        "sdpa_fp8 'a': diagonal_alignment='middle' is unknown; expected 'top_left' or",
    ),
}


@pytest.mark.parametrize("name", BAD_ATTENTION)
def test_a_mistake_in_attention_is_reported_in_the_words_that_mend_it(name: str) -> None:
    declare, says = BAD_ATTENTION[name]
    g = cg.Graph("bad")
    g.output("o", declare(g))  # type: ignore[arg-type]
    with pytest.raises(cg.GraphError) as caught:
        g.spec()
    assert says in str(caught.value)


@pytest.mark.parametrize("dtype", [E4, E5], ids=str)
def test_attention_rounds_its_weights_and_its_result_and_tells_the_largest(
    dtype: torch.dtype,
) -> None:
    """By loops over rows, in float64."""
    g = cg.Graph("g")
    o, lse, amax_s, amax_o = _attend(g, dtype, is_causal=True, return_lse=True)
    for name, value in {"o": o, "lse": lse, "amax_s": amax_s, "amax_o": amax_o}.items():
        g.output(name, value)
    gen = torch.Generator().manual_seed(0)
    t = {n: (2 * torch.randn(1, 2, 8, 16, generator=gen)).to(dtype) for n in "qkv"}
    scales = {"descale_q": 0.5, "descale_k": 1.5, "descale_v": 0.75}
    scales |= {"descale_s": 1 / 256, "scale_s": 256.0, "scale_o": 90.0}
    t |= {name: torch.tensor(value) for name, value in scales.items()}
    made = g.compile("cpu")(**t)
    q, k, v = (t[name].double()[0] for name in "qkv")
    wanted, largest, sums = torch.zeros(2, 8, 16, dtype=F64), 0.0, torch.zeros(2, 8, dtype=F64)
    for head in range(2):
        for row in range(8):
            scores = (k[head, : row + 1] @ q[head, row]) * 0.5 * 1.5 / 4.0
            p = torch.exp(scores - scores.max())
            rounded = (p * 256.0).clamp(max=torch.finfo(dtype).max).to(dtype).double()
            wanted[head, row] = (rounded @ v[head, : row + 1]) / 256.0 * 0.75 / p.sum()
            largest = max(largest, float((p / p.sum()).max()))
            sums[head, row] = scores.logsumexp(0)
    assert made.o.dtype == dtype
    most = torch.finfo(dtype).max
    rounded = (wanted * 90.0).clamp(-most, most).to(dtype).double()
    assert float((rounded.abs() == most).double().mean()) < 0.1
    numerics.check(made.o[0], rounded, dtype)
    torch.testing.assert_close(made.lse[0].double(), sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(float(made.amax_s), largest, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(float(made.amax_o), float(wanted.abs().max()), rtol=1e-5, atol=0.0)


def test_attention_to_padding_ignores_what_is_in_it_and_dead_rows_are_zero() -> None:
    g = cg.Graph("g")
    data = [g.input(name, (2, 2, 8, 16), E4) for name in "qkv"]
    scales = [g.input(name, (), F32) for name in SCALES]
    o, lse, *_ = g.sdpa_fp8(
        *data, *scales, seq_len_kv=g.input("n", (2,), torch.int32), return_lse=True
    )
    g.output("o", o)
    g.output("lse", lse)
    gen = torch.Generator().manual_seed(0)
    t = {n: torch.randn(2, 2, 8, 16, generator=gen).to(E4) for n in "qkv"}
    for name in "kv":
        t[name][0, :, 5:] = math.nan
        t[name][1] = math.nan
    t |= dict.fromkeys(SCALES, torch.ones(()))
    o, lse = g.compile("cpu")(**t, n=torch.tensor([5, 0], dtype=torch.int32))  # type: ignore
    assert bool(o.double().isfinite().all())
    assert bool((o[0].double() != 0).any())
    assert bool((o[1].double() == 0).all())
    assert bool((lse[1] == -math.inf).all()) and bool(lse[0].isfinite().all())


def test_attention_in_fp8_has_no_gradient_and_names_the_op_that_has() -> None:
    g = cg.Graph("g")
    g.output("o", g.dequantize(_attend(g)[0], g.input("s", (), F32), name="d"))
    with pytest.raises(cg.GraphError, match=r"sdpa_fp8 'a': has no gradient: .*; sdpa has one"):
        cg.differentiate(g, ["scale_o"])


# -- gradients -------------------------------------------------------------------------------------


def test_the_gradient_of_amax_is_that_of_torch() -> None:
    x = torch.tensor([[1.0, -7.0, 2.0, 7.0], [6.0, 0.0, -3.0, 1.0]], dtype=F64)
    g = cg.Graph("g")
    g.output("y", g.reduction(g.input("x", (2, 4), F64), (1,), mode="amax"))
    exe = g.compile("cpu", training=True)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (exe(x=ours) * torch.tensor([2.0, 3.0])).sum().backward()
    (theirs.abs().amax(1) * torch.tensor([2.0, 3.0])).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_8_bit_data_have_no_gradient_and_say_so() -> None:
    g = cg.Graph("g")
    x = g.input("x", (8, 16), F16)
    s = g.input("s", (), F32)
    y = g.matmul(g.quantize(x, s, dtype=E4, name="q"), g.input("w", (16, 8), E4))
    g.output("y", g.dequantize(y, s, name="d"))
    with pytest.raises(cg.GraphError, match="quantize 'q': rounds, and has no gradient"):
        cg.differentiate(g, ["x"])
    with pytest.raises(cg.GraphError, match="dequantize 'd': has no gradient: 8-bit data are con"):
        cg.differentiate(g, ["s"])
    with pytest.raises(cg.GraphError, match="wrt 'w': is float8_e4m3fn; expected a floating inp"):
        cg.differentiate(g, ["w"])


# -- cuts, torch steps, trials ---------------------------------------------------------------------


def _graph(dtype: torch.dtype) -> cg.Graph:
    g = cg.Graph("g")
    x = g.input("x", (2, 16, 8, 8), dtype, layout="channels_last")
    w = g.input("w", (32, 16, 3, 3), dtype, layout="channels_last")
    s, b, s_out = g.input("s", (32,), F32), g.input("b", (32,), F32), g.input("s_out", (), F32)
    g.output("y", g.quantized_conv_bias_act(x, w, s, b, out_scale=s_out, dtype=dtype, padding=1))
    return g


@pytest.mark.parametrize(("dtype", "sums"), [(I8, I32), (E4, F32), (E5, F32)], ids=str)
def test_what_crosses_between_steps_is_the_sum_itself(
    dtype: torch.dtype, sums: torch.dtype
) -> None:
    graph = CutGraph(_graph(dtype).spec())
    conv, rest = next(c for c in cuts(graph, compute_nodes(graph.spec.nodes)) if len(c) == 2)
    first, second = subgraph_of(graph, conv), subgraph_of(graph, rest)
    (name,) = first.outputs
    assert first.tensors[name].dtype == second.tensors[name].dtype == sums


@pytest.mark.parametrize("dtype", [I8, E4, E5], ids=str)
def test_a_trial_tells_a_right_result_from_a_truncated_one(dtype: torch.dtype) -> None:
    """The data of a trial neither overflow nor vanish, and the tolerance is one of roundings."""
    spec = _graph(dtype).spec()
    inputs = random_inputs(spec, torch.device("cpu"))
    out = torch.empty_strided(
        spec.tensors["y"].shape, spec.tensors["y"].stride, dtype=spec.tensors["y"].dtype
    )
    torch_steps.launcher(spec, inputs, [out], allow_tf32=False)()
    want = reference.run(spec, inputs, F64)[0]
    bound = tolerance(dtype, tf32=False, fp8=multiplies_fp8(spec))
    assert relative_error(out, want) <= bound / 4
    limit = 127 if dtype == I8 else torch.finfo(dtype).max
    assert float((out.double() != 0).double().mean()) > 0.2
    assert float((out.double().abs() >= limit).double().mean()) < 0.1
    if dtype == I8:
        assert relative_error(out - (out > 0).to(I8), want) > bound  # rounded down
    else:
        shrunk = (out.double() * (1 - 1.5 * bound)).to(dtype)
        assert relative_error(shrunk, want) > bound


def test_a_few_int8_elements_may_be_one_step_off_in_a_trial() -> None:
    want = whole(-100, 100, 4000)
    out = want.clone()
    out[:4] += 1
    assert relative_error(out, want) == 0.0
    out[4] += 1
    assert relative_error(out, want) > 0.0
    out = want.clone()
    out[0] += 2
    assert relative_error(out, want) > 0.0


@pytest.mark.parametrize("dtype", [F16, torch.bfloat16])
@pytest.mark.parametrize("op", ["relu", "gelu", "silu", "leaky_relu", "elu", "gelu_tanh"])
def test_a_torch_step_of_an_activation_writes_a_narrower_dtype(op: str, dtype: torch.dtype) -> None:
    """As behind sums of 8-bit products, which cross in float32."""
    g = cg.Graph("g")
    g.output("y", getattr(g, op)(g.input("x", (64,), F32)), dtype=dtype)
    x, out = torch.linspace(-3, 3, 64), torch.empty(64, dtype=dtype)
    torch_steps.launcher(g.spec(), [x], [out], allow_tf32=False)()
    assert torch.equal(out, reference.run(g.spec(), [x])[0])
