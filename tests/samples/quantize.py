"""8-bit data: convolutions, matmuls, attention and conversions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.ir.spec import dense_strides
from tests.samples.case import (
    BF16,
    E4,
    E5,
    F16,
    F32,
    F64,
    I8,
    SHORT,
    Case,
    Fill,
    Layout,
    Shape,
    Tensors,
    activate,
    at_layout,
    exactly,
    normal,
    small_whole,
    table_case,
    uniform,
)


def rounded(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y in an 8-bit dtype, saturated; a yardstick in float64 stays so, but for int8."""
    if dtype == I8:
        return y.round().clamp(-128, 127).to(I8)
    most = torch.finfo(dtype).max
    return y.clamp(-most, most).to(dtype).to(y.dtype if y.dtype == F64 else dtype)


@dataclass(frozen=True)
class Quantized:
    """A product of 8-bit data and what follows it: scale, bias, activation, rounding to 8 bits.

    ``w`` is the weight's shape; ``kind`` is "conv", "conv_transpose" or "matmul", ``options`` the
    keywords of a convolution. ``scale`` is None (the bare product), "tensor", "one" (of shape (1,))
    or "channel" (along ``dim``). ``out`` is the 8-bit dtype of the result, rounded by ``out_scale``
    (as ``scale``); without it the result is of ``y_dtype``.
    """

    x: Shape
    w: Shape
    dtype: torch.dtype = I8
    w_dtype: torch.dtype | None = None
    kind: str = "conv"
    options: tuple[tuple[str, Any], ...] = ()
    scale: str | None = "channel"
    dim: int = 1
    bias: bool = True
    act: str | None = "relu"
    residual: torch.dtype | None = None
    amax: bool = False
    out: torch.dtype | None = None
    out_scale: str | None = "tensor"
    y_dtype: torch.dtype = F32
    x_at: Layout = "channels_last"
    w_at: Layout = "channels_last"
    y_at: Layout = None  # whatever the op passes on
    full: bool = False  # int8 at the ends of its range: sums past 2^24

    @property
    def terms(self) -> int:
        """Products behind one element."""
        if self.kind == "matmul":
            return self.x[-1]
        groups = int(dict(self.options).get("groups", 1))
        lead = self.w[0] // groups if self.kind == "conv_transpose" else self.w[1]
        return lead * math.prod(self.w[2:])

    def _product(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if self.kind == "matmul":
            return x @ w
        rank, options = len(self.x) - 2, dict(self.options)
        many = {"conv": (F.conv1d, F.conv2d, F.conv3d)}.get(
            self.kind, (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
        )
        padding = options.pop("padding", 0)
        if isinstance(padding, tuple):
            x, padding = F.pad(x, [side for pair in reversed(padding) for side in pair]), 0
        return many[rank - 1](x, w, padding=padding, **options)

    def build(self) -> cg.Graph:
        g = cg.Graph("quantized")
        matmul = self.kind == "matmul"
        x = g.input("x", self.x, self.dtype, **at_layout(None if matmul else self.x_at))
        w = g.input("w", self.w, self.w_dtype or self.dtype, **at_layout(self.w_at))
        y = getattr(g, self.kind)(x, w, **dict(self.options))
        if self.scale is None:
            g.output(
                "y", y, dtype=None if self.dtype == I8 else self.y_dtype, **at_layout(self.y_at)
            )
            return g
        shapes = {"tensor": (), "one": (1,), "channel": (y.shape[self.dim],)}
        s = g.input("s", shapes[self.scale], F32)
        y = g.dequantize(y, s, dim=self.dim)
        if self.residual is not None:
            z: cg.Value = g.input("z", y.shape, self.residual, stride=y.stride)
            if self.residual not in (F16, BF16, F32):
                z = g.dequantize(z, g.input("s_z", (), F32))
            y = y + z
        if self.bias:
            b = g.input("b", (y.shape[self.dim],), F32)
            y = y + b if matmul else g.bias(y, b)
        y = g.activation(y, self.act)
        if self.amax:
            g.output("amax", g.reduction(y, mode="amax"))
        if self.out is not None:
            so = None
            if self.out_scale is not None:
                so = g.input("s_out", shapes[self.out_scale], F32)
            y = g.quantize(y, so, dtype=self.out, dim=self.dim)
        g.output("y", y, dtype=None if self.out is not None else self.y_dtype)
        return g

    def eager(self, t: Tensors) -> Tensors:
        yardstick = t["x"].dtype == F64 or (self.dtype == I8 and t.get("s", t["x"]).dtype == F64)
        if self.scale is None and self.dtype == I8:
            return {"y": self._product(t["x"].double(), t["w"].double()).to(torch.int32)}
        wide = F64 if yardstick else F32
        exact = F64 if self.dtype == I8 else wide
        y = self._product(t["x"].to(exact), t["w"].to(exact)).to(wide)
        narrow = (lambda y: y) if yardstick else (lambda y: y.to(self.y_dtype))
        if self.scale is None:
            return {"y": narrow(y)}
        along = [1] * y.dim()
        along[self.dim] = -1
        y = y * t["s"].view(along if t["s"].dim() else ())
        if self.residual is not None:
            y = y + t["z"].to(wide) * t.get("s_z", torch.ones((), device=y.device))
        if self.bias:
            y = y + t["b"].view(along)
        y = activate(y, self.act, {})
        found = {"amax": y.abs().amax()} if self.amax else {}
        if self.out is None:
            return {**found, "y": narrow(y)}
        if self.out_scale is not None:
            y = y / t["s_out"].view(along if t["s_out"].dim() else ())
        return {**found, "y": rounded(y, self.out)}

    @property
    def fills(self) -> dict[str, Fill]:
        """Sums of about 1 behind the scale; results over half the range of the 8-bit dtype."""
        scale: Fill = uniform(0.5, 1.5)
        fills: dict[str, Fill] = {}
        if self.dtype == I8:
            data = small_whole(126, 128) if self.full else small_whole(-128, 128)
            typical = 127**2 * self.terms if self.full else 74**2 * math.sqrt(self.terms)
            fills, scale = {"x": data, "w": data}, uniform(0.5 / typical, 1.5 / typical)
        else:
            fills = {"w": normal(1.0 / math.sqrt(self.terms))}
        most = 127 if self.out == I8 else 448 if self.out == E4 else 57344
        fills |= {"s": scale, "s_out": uniform(2.0 / most, 4.0 / most), "s_z": uniform(0.01, 0.02)}
        if self.residual == I8:
            fills["z"] = small_whole(-128, 128)
        return fills


def _quantized_case(name: str, one: Quantized, note: str = "") -> Case:
    family = "int8" if one.dtype == I8 else "fp8"
    return Case(
        f"{family}-{one.kind}-{name}-{SHORT[one.dtype]}",
        family,
        one.dtype,
        one.build,
        one.eager,
        fills=one.fills,
        terms=one.terms,
        note=note,
    )


def _options(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


def _quantized_convs(dtype: torch.dtype) -> Iterator[Case]:
    conv = Quantized((2, 32, 9, 10), (48, 32, 3, 3), dtype, options=_options(padding=1))
    bare = replace(conv, scale=None)
    cases: list[tuple[str, Quantized, str]] = [
        ("bare", bare, ""),
        ("bare_k1", replace(bare, w=(48, 32, 1, 1), options=()), ""),
        ("bare_s2", replace(bare, options=_options(stride=2, padding=1)), ""),
        ("bare_dilation2", replace(bare, options=_options(dilation=2, padding=2)), ""),
        ("bare_groups2", replace(bare, w=(48, 16, 3, 3), options=_options(groups=2)), ""),
        ("bare_c3", replace(bare, x=(2, 3, 9, 10), w=(48, 3, 3, 3)), "cudnn-frontend#131: C = 3"),
        ("bare_k5", replace(bare, w=(5, 32, 3, 3)), "K not a multiple of 4"),
        ("bare_contiguous", replace(bare, x_at=None, w_at=None), "cudnn-frontend#422: NCHW"),
        ("bare_to_contiguous", replace(bare, y_at="contiguous"), "the output in another layout"),
        ("bare_hw1", replace(bare, x=(4, 32, 1, 1), w=(48, 32, 1, 1), options=()), "H = W = 1"),
        ("relu", conv, "cudnn-frontend#422: NHWC with ReLU"),
        ("relu_fp16", replace(conv, y_dtype=F16), ""),
        ("relu_bf16", replace(conv, y_dtype=BF16), ""),
        ("relu_contiguous", replace(conv, x_at=None, w_at=None), "cudnn-frontend#422: NCHW"),
        ("per_tensor", replace(conv, scale="tensor"), ""),
        ("per_tensor_one", replace(conv, scale="one", y_dtype=F16), "a scale of shape (1,)"),
        ("no_bias_no_act", replace(conv, bias=False, act=None, y_dtype=F16), ""),
        ("rounded", replace(conv, out=dtype), ""),
        ("rounded_per_tensor", replace(conv, scale="tensor", out=dtype), ""),
        ("rounded_per_channel", replace(conv, out=dtype, out_scale="channel"), ""),
        ("rounded_no_act", replace(conv, act=None, out=dtype), "both signs"),
        ("rounded_silu", replace(conv, act="silu", out=dtype), ""),
        ("rounded_gelu", replace(conv, act="gelu", out=dtype), ""),
        ("rounded_s2", replace(conv, options=_options(stride=2, padding=1), out=dtype), ""),
        (
            "rounded_asymmetric",
            replace(conv, options=_options(padding=((0, 1), (2, 1))), out=dtype),
            "pytorch#45667",
        ),
        ("rounded_c24_k20", replace(conv, x=(2, 24, 9, 10), w=(20, 24, 3, 3), out=dtype), ""),
        ("rounded_depthwise", replace(conv, w=(32, 1, 3, 3), options=_options(groups=32)), ""),
        ("rounded_1d", replace(conv, x=(2, 32, 30), w=(48, 32, 3), out=dtype), ""),
        ("rounded_3d", replace(conv, x=(1, 16, 5, 5, 6), w=(16, 16, 3, 3, 3), out=dtype), ""),
        ("amax", replace(conv, amax=True, out=dtype), "the largest result, for the next scale"),
        ("amax_fp32", replace(conv, act=None, amax=True), ""),
        ("residual", replace(conv, residual=dtype, out=dtype), "an 8-bit residual"),
        ("residual_fp16", replace(conv, residual=F16, y_dtype=F16), ""),
    ]
    for name, one, note in cases:
        yield _quantized_case(name, one, note)


def _quantized_products(dtype: torch.dtype) -> Iterator[Case]:
    product = Quantized((64, 32), (32, 48), dtype, kind="matmul", w_at=(1, 32))
    bare = replace(product, scale=None)
    batch = replace(product, x=(3, 40, 32), w=(3, 32, 48), w_at=None, dim=2)
    cases: list[tuple[str, Quantized, str]] = [
        ("bare", bare, "(N, K) in memory"),
        ("bare_rows", replace(bare, w_at=None), "(K, N) in memory"),
        ("bare_batch", replace(batch, scale=None), ""),
        ("bare_sequence", replace(bare, x=(4, 24, 32)), "two dims of rows fold"),
        ("bare_odd_sizes", replace(bare, x=(63, 31), w=(31, 47), w_at=None), ""),
        ("bare_one_row", replace(bare, x=(1, 32)), "M = 1"),
        ("gelu_fp16", replace(product, act="gelu", y_dtype=F16), ""),
        ("per_tensor_bf16", replace(product, scale="tensor", y_dtype=BF16), ""),
        ("rounded", replace(product, out=dtype), ""),
        ("rounded_batch", replace(batch, out=dtype), ""),
        ("amax", replace(product, amax=True, out=dtype), ""),
    ]
    for name, one, note in cases:
        yield _quantized_case(name, one, note)


def _quantized_transposed(dtype: torch.dtype) -> Iterator[Case]:
    # Channels of x fastest in memory: so cuDNN takes FP8.
    at = (1, 9 * 32 * 1, 3 * 32, 32)
    one = Quantized(
        (2, 32, 7, 8), (32, 48, 3, 3), dtype, kind="conv_transpose", options=_options(padding=1)
    )
    cases: list[tuple[str, Quantized, str]] = [
        ("bare", replace(one, scale=None, w_at=at), ""),
        ("bare_channels_last", replace(one, scale=None), "a weight that FP8 is refused with"),
        ("bare_s2", replace(one, scale=None, w_at=at, options=_options(stride=2, padding=1)), ""),
        ("rounded", replace(one, w_at=at, out=dtype), ""),
        ("relu_fp16", replace(one, w_at=at, y_dtype=F16), ""),
    ]
    for name, case, note in cases:
        yield _quantized_case(name, case, note)


def _conversions(dtype: torch.dtype) -> Iterator[Case]:
    """Rounding to 8 bits and back, by themselves and before a product."""
    family = "int8" if dtype == I8 else "fp8"
    data = {"x": small_whole(-128, 128)} if dtype == I8 else {}
    yield table_case(
        family,
        "dequantize",
        {"x": ((16, 64), dtype, None), "s": ((64,), F32, None)},
        lambda g, v: {"y": g.dequantize(v["x"], v["s"])},
        lambda t: {"y": t["x"].to(t["s"].dtype) * t["s"]},
        data,
    )
    most = 127.0 if dtype == I8 else torch.finfo(dtype).max
    scales = {"s": uniform(2.0 / most, 4.0 / most)}
    for source in (F16, F32):
        yield table_case(
            family,
            f"quantize_{SHORT[dtype]}",
            {"x": ((16, 64), source, None), "s": ((), F32, None)},
            lambda g, v: {"y": g.quantize(v["x"], v["s"], dtype=dtype)},
            lambda t: {"y": rounded(t["x"].to(t["s"].dtype) / t["s"], dtype)},
            scales,
            note="some are beyond the range",
        )
    yield table_case(
        family,
        f"quantize_unscaled_{SHORT[dtype]}",
        {"x": ((4, 16, 6, 6), F32, "channels_last")},
        lambda g, v: {"y": g.quantize(v["x"], dtype=dtype)},
        lambda t: {"y": rounded(t["x"], dtype)},
        {"x": normal(50.0)},
    )

    def chained(t: Tensors) -> Tensors:
        wide = t["s"].dtype
        x = rounded(t["x"].to(wide) / t["s"], dtype)
        exact = F64 if dtype == I8 else wide
        y = (x.to(exact) @ t["w"].to(exact)).to(wide)
        return {"y": (y * t["s"] * t["s_w"]).to(F16 if wide == F32 else wide)}

    yield table_case(
        family,
        f"dynamic_{SHORT[dtype]}",
        {
            "x": ((40, 64), F16, None),
            "w": ((64, 48), dtype, (1, 64)),
            "s": ((), F32, None),
            "s_w": ((48,), F32, None),
        },
        lambda g, v: {
            "y": g.dequantize(
                g.dequantize(g.quantize(v["x"], v["s"], dtype=dtype) @ v["w"], v["s"]), v["s_w"]
            )
        },
        chained,
        {**scales, "s_w": uniform(1e-3, 2e-3), **({"w": data["x"]} if data else {})},
        note="a product of what the same graph rounds",
        terms=64,
        result=F16,
    )


@dataclass(frozen=True)
class Attention8:
    """Attention of FP8 data; q (b, h, s, d), k and v (b, h_kv, keys, d and d_v)."""

    dtype: torch.dtype = E4
    b: int = 2
    h: int = 4
    s: int = 64
    d: int = 32
    h_kv: int | None = None
    keys: int | None = None
    d_v: int | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    alignment: str = "top_left"
    len_kv: tuple[int, ...] | None = None
    scale: float | None = None
    lse: bool = False
    bshd: bool = False  # heads behind rows in memory

    @property
    def shapes(self) -> dict[str, Shape]:
        kv, keys = self.h_kv or self.h, self.keys or self.s
        return {
            "q": (self.b, self.h, self.s, self.d),
            "k": (self.b, kv, keys, self.d),
            "v": (self.b, kv, keys, self.d_v or self.d),
        }

    def build(self) -> cg.Graph:
        g = cg.Graph("attention")
        order = (0, 2, 1, 3) if self.bshd else (0, 1, 2, 3)
        data = [
            g.input(name, shape, self.dtype, stride=dense_strides(shape, order))
            for name, shape in self.shapes.items()
        ]
        scales = [g.input(name, (), F32) for name in _SCALES_8]
        lengths = None if self.len_kv is None else g.input("len_kv", (self.b,), torch.int32)
        o, *rest = g.sdpa_fp8(
            *data,
            *scales,
            seq_len_kv=lengths,
            scale=self.scale,
            is_causal=self.causal,
            window=self.window,
            diagonal_alignment=self.alignment,
            return_lse=self.lse,
        )
        g.output("o", o)
        if self.lse:
            g.output("lse", rest[0])
        return g

    def eager(self, t: Tensors) -> Tensors:
        """The weights are not rounded here: what that makes is part of what o may be off by."""
        wide = t["descale_q"].dtype
        q, k, v = (t[name].to(wide) * t[f"descale_{name}"] for name in "qkv")
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = q @ k.transpose(-1, -2) * (self.d**-0.5 if self.scale is None else self.scale)
        row = torch.arange(q.shape[2], device=q.device).view(-1, 1)
        key = torch.arange(k.shape[2], device=q.device)
        shift = k.shape[2] - q.shape[2] if self.alignment == "bottom_right" else 0
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        kept = torch.ones_like(scores, dtype=torch.bool)
        if right is not None:
            kept &= key <= row + shift + right
        if left is not None:
            kept &= key >= row + shift - left
        if self.len_kv is not None:
            kept &= key < t["len_kv"].view(-1, 1, 1, 1)
        scores = scores.masked_fill(~kept, -torch.inf)
        o = torch.softmax(scores, -1) @ v * (t["scale_s"] * t["descale_s"] * t["scale_o"])
        most = torch.finfo(self.dtype).max
        o = o.clamp(-most, most)
        found = {"o": o if wide == F64 else o.to(self.dtype)}
        return {**found, "lse": torch.logsumexp(scores, -1)} if self.lse else found

    @property
    def fills(self) -> dict[str, Fill]:
        """Scales that use the range of the 8 bits."""
        fills = {name: uniform(0.5, 1.5) for name in ("descale_q", "descale_k", "descale_v")}
        fills |= {"scale_s": uniform(200.0, 400.0), "descale_s": uniform(1 / 400, 1 / 200)}
        fills["scale_o"] = uniform(50.0, 100.0)
        if self.len_kv is not None:
            fills["len_kv"] = exactly(self.len_kv)
        return fills


_SCALES_8 = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


def _attentions_8() -> Iterator[Case]:
    one = Attention8()
    cases: list[tuple[str, Attention8, str]] = [
        ("plain", one, ""),
        ("causal", replace(one, causal=True), ""),
        ("lse", replace(one, lse=True), ""),
        ("causal_lse", replace(one, causal=True, lse=True), ""),
        ("window", replace(one, causal=True, window=(16, 0)), ""),
        ("gqa_4_2", replace(one, h_kv=2), ""),
        ("mqa", replace(one, h_kv=1, causal=True), ""),
        ("d_64", replace(one, d=64), ""),
        ("d_128", replace(one, d=128, causal=True), ""),
        ("d_256", replace(one, d=256), ""),
        ("d_v_64", replace(one, d_v=64), "d_v unlike d"),
        ("d_40", replace(one, d=40), "not a multiple of 16"),
        ("s_197", replace(one, s=197), "no multiple of anything"),
        ("s_320", replace(one, s=320, causal=True), "several tiles of keys"),
        ("keys_over_rows", replace(one, keys=160), ""),
        ("rows_over_keys", replace(one, s=160, keys=64, causal=True), ""),
        ("bottom_right", replace(one, keys=160, causal=True, alignment="bottom_right"), ""),
        ("decode", replace(one, s=1, keys=128), "one row"),
        ("bshd", replace(one, bshd=True, causal=True), "heads behind rows in memory"),
        ("scale", replace(one, scale=0.05), ""),
        ("lengths", replace(one, len_kv=(64, 20)), ""),
        ("e5m2", replace(one, dtype=E5), ""),
        ("e5m2_causal", replace(one, dtype=E5, causal=True, d=128), ""),
    ]
    for name, case, note in cases:
        yield Case(
            f"fp8-sdpa-{name}-{SHORT[case.dtype]}",
            "fp8",
            case.dtype,
            case.build,
            case.eager,
            fills=case.fills,
            terms=max(case.shapes["k"][2:]),
            note=note,
        )


def quantized() -> Iterator[Case]:
    yield from _attentions_8()
    for dtype in (I8, E4):
        yield from _quantized_convs(dtype)
        yield from _quantized_products(dtype)
        yield from _quantized_transposed(dtype)
    conv = Quantized((2, 32, 9, 10), (48, 32, 3, 3), E5, options=_options(padding=1))
    product = Quantized((64, 32), (32, 48), E5, kind="matmul", w_at=(1, 32))
    for name, one in (("conv", conv), ("matmul", product)):
        yield _quantized_case(f"{name}_bare", replace(one, scale=None))
        yield _quantized_case(f"{name}_rounded", replace(one, out=E5))
        yield _quantized_case(f"{name}_by_e4m3", replace(one, w_dtype=E4, out=E4), "two formats")
    deep = Quantized((2, 256, 5, 5), (16, 256, 3, 3), full=True, options=_options(padding=1))
    yield _quantized_case("bare_past_2_24", replace(deep, scale=None), "float32 holds no such sums")
    yield _quantized_case("rounded_past_2_24", replace(deep, out=I8))
    for dtype in (I8, E4, E5):
        yield from _conversions(dtype)
