"""Convolutions: epilogues, chains, transposed ones, and their weight gradients."""

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
    F16,
    F32,
    F64,
    SHORT,
    Case,
    Fill,
    Layout,
    Shape,
    Tensors,
    activate,
    at_layout,
    gradient_case,
    grads_of,
    normal,
    uniform,
)


@dataclass(frozen=True)
class Conv:
    """A convolution with its epilogue; x (N, C, spatial...), ``k`` output channels.

    ``padding`` is one int, one per dim, (before, after) pairs, or "same". ``bias`` is "data" (the
    dtype of x), "fp32" or None; ``bn`` the same for batch-norm parameters, with ``affine``.
    """

    x: Shape
    k: int
    kernel: int | Shape = 3
    dtype: torch.dtype = F16
    stride: int | Shape = 1
    padding: Any = 0
    dilation: int | Shape = 1
    groups: int = 1
    transposed: bool = False
    output_padding: int | Shape = 0
    bias: str | None = "data"
    bn: str | None = None
    affine: bool = True
    eps: float = 1e-5
    act: str | None = "relu"
    act_attrs: tuple[tuple[str, Any], ...] = ()
    residual: bool = False
    alpha1: float = 1.0
    alpha2: float = 1.0
    x_at: Layout = "channels_last"
    w_at: Layout = "channels_last"
    y_at: Layout = None  # None: whatever the op passes on
    z_at: Layout = "channels_last"
    y_dtype: torch.dtype | None = None
    pre: bool = False  # the value before the activation is an output too

    @property
    def rank(self) -> int:
        return len(self.x) - 2

    def many(self, value: int | Shape) -> Shape:
        return (value,) * self.rank if isinstance(value, int) else tuple(value)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Padding as (before, after), by torch's rules."""
        if self.padding == "same":
            reach = [
                d * (r - 1)
                for d, r in zip(self.many(self.dilation), self.many(self.kernel), strict=True)
            ]
            return tuple((total // 2, total - total // 2) for total in reach)
        listed = (self.padding,) * self.rank if isinstance(self.padding, int) else self.padding
        return tuple((p, p) if isinstance(p, int) else tuple(p) for p in listed)

    @property
    def weight(self) -> Shape:
        c = self.x[1]
        lead = (c, self.k // self.groups) if self.transposed else (self.k, c // self.groups)
        return (*lead, *self.many(self.kernel))

    @property
    def terms(self) -> int:
        """Products behind one output element."""
        return self.x[1] // self.groups * math.prod(self.many(self.kernel))

    @property
    def out(self) -> Shape:
        sizes = []
        for n, r, s, d, (before, after), extra in zip(
            self.x[2:],
            self.many(self.kernel),
            self.many(self.stride),
            self.many(self.dilation),
            self.pairs,
            self.many(self.output_padding),
            strict=True,
        ):
            if self.transposed:
                sizes.append((n - 1) * s - before - after + d * (r - 1) + extra + 1)
            else:
                sizes.append((n + before + after - d * (r - 1) - 1) // s + 1)
        return (self.x[0], self.k, *sizes)

    def build(self) -> cg.Graph:
        g = cg.Graph("sample")
        x = g.input("x", self.x, self.dtype, **at_layout(self.x_at))
        w = g.input("w", self.weight, self.dtype, **at_layout(self.w_at))
        vector = {"data": self.dtype, "fp32": F32}
        options: dict[str, Any] = {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
            "alpha1": self.alpha1,
            "alpha2": self.alpha2,
            "activation": None if self.pre else self.act,
        }
        if self.transposed:
            options["output_padding"] = self.output_padding
        if not self.pre:
            options |= dict(self.act_attrs)
        b = None if self.bias is None else g.input("b", (self.k,), vector[self.bias])
        if self.bn is not None:
            names = ["mean", "var"] + ["gamma", "beta"] * self.affine
            given = [g.input(name, (self.k,), vector[self.bn]) for name in names]
            options |= {"bias": b, "eps": self.eps}
        else:
            given = [b] if b is not None else []
        if self.residual:
            options["residual"] = g.input("z", self.out, self.dtype, **at_layout(self.z_at))
        if self.bn is not None:
            y = g.conv_bn_act(x, w, *given, **options)
        elif self.transposed:
            y = g.conv_transpose_bias_act(x, w, *given, **options)
        else:
            y = g.conv_bias_act(x, w, *given, **options)
        if self.pre:
            g.output("pre", y, **at_layout(self.y_at))
            y = g.activation(y, self.act, **dict(self.act_attrs))
        g.output("y", y, dtype=self.y_dtype, **at_layout(self.y_at))
        return g

    def _convolved(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        pairs, index = self.pairs, self.rank - 1
        even = all(before == after for before, after in pairs)
        same = tuple(before for before, _ in pairs)
        if not self.transposed:
            run = (F.conv1d, F.conv2d, F.conv3d)[index]
            if not even:
                x, same = F.pad(x, [side for pair in reversed(pairs) for side in pair]), 0
            return run(x, w, b, self.stride, same, self.dilation, self.groups)
        run = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[index]
        if even:
            return run(x, w, b, self.stride, same, self.output_padding, self.groups, self.dilation)
        y = run(x, w, None, self.stride, 0, self.output_padding, self.groups, self.dilation)
        y = y if b is None else y + b.view(-1, *(1,) * self.rank)
        for dim, ((before, _), size) in enumerate(zip(pairs, self.out[2:], strict=True), 2):
            y = y.narrow(dim, before, size)
        return y

    def eager(self, t: Tensors) -> Tensors:
        b = t["b"].to(t["x"].dtype) if self.bias is not None else None
        plain = self.bn is not None or not (self.residual or self.alpha1 != 1.0)
        y = self._convolved(t["x"], t["w"], b if plain else None)
        if self.bn is not None:
            y = F.batch_norm(
                y, t["mean"], t["var"], t.get("gamma"), t.get("beta"), False, 0.0, self.eps
            )
        if self.alpha1 != 1.0:
            y = self.alpha1 * y
        if self.residual:
            y = y + (t["z"] if self.alpha2 == 1.0 else self.alpha2 * t["z"])
        if not plain and b is not None:
            y = y + b.view(-1, *(1,) * self.rank)
        done = {"y": activate(y, self.act, dict(self.act_attrs))}
        return {"pre": y, **done} if self.pre else done

    @property
    def fills(self) -> dict[str, Fill]:
        return {
            "w": normal(1.0 / math.sqrt(self.terms)),
            "mean": normal(0.2),
            "var": uniform(0.5, 1.5),
            "gamma": uniform(0.5, 1.5),
        }


def _conv_case(name: str, conv: Conv, note: str = "") -> Case:
    family = "conv_transpose" if conv.transposed else "conv_bias_act"
    if conv.bn is not None:
        family = "conv_bn_act"
    return Case(
        f"{family}-{name}-{SHORT[conv.dtype]}",
        family,
        conv.dtype,
        conv.build,
        conv.eager,
        fills=conv.fills,
        terms=conv.terms,
        note=note,
    )


CONTIGUOUS: dict[str, Layout] = {"x_at": None, "w_at": None, "z_at": None}


_ACTIVATIONS: tuple[tuple[str, str | None, tuple[tuple[str, Any], ...]], ...] = (
    ("relu", "relu", ()),
    ("leaky_relu", "leaky_relu", ()),
    ("leaky_relu_0.2", "leaky_relu", (("negative_slope", 0.2),)),
    ("elu", "elu", ()),
    ("elu_0.7", "elu", (("alpha", 0.7),)),
    ("gelu", "gelu", ()),
    ("gelu_tanh", "gelu_tanh", ()),
    ("silu", "silu", ()),
    ("sigmoid", "sigmoid", ()),
    ("tanh", "tanh", ()),
    ("softplus", "softplus", ()),
    ("softplus_2", "softplus", (("beta", 2.0),)),
    ("clamp", "clamp", (("min", -0.5), ("max", 0.75))),
    ("clamp_low", "clamp", (("min", -0.25),)),
    ("relu6", "relu6", ()),
    ("hardswish", "hardswish", ()),
    ("none", None, ()),
    ("mish", "mish", ()),
)


def _conv_activations() -> Iterator[Case]:
    base = Conv((2, 16, 9, 10), 32, padding=1)
    for name, act, attrs in _ACTIVATIONS:
        yield _conv_case(f"act_{name}", replace(base, act=act, act_attrs=attrs))
    for name, act, attrs in _ACTIVATIONS[::2]:
        one = replace(base, act=act, act_attrs=attrs, dtype=F32, **CONTIGUOUS)
        yield _conv_case(f"act_{name}", one)
    for name, act, attrs in _ACTIVATIONS[:2] + _ACTIVATIONS[5:8]:
        yield _conv_case(f"act_{name}", replace(base, act=act, act_attrs=attrs, dtype=BF16))


def _conv_geometry() -> Iterator[Case]:
    x = (2, 16, 11, 13)
    base = Conv(x, 32)
    cases: list[tuple[str, Conv, str]] = [
        ("k1_s1_p0", replace(base, kernel=1), ""),
        ("k1_s2_p0", replace(base, kernel=1, stride=2), ""),
        ("k3_s1_p0", base, ""),
        ("k3_s1_p1", replace(base, padding=1), ""),
        ("k3_s2_p1", replace(base, stride=2, padding=1), ""),
        ("k7_s2_p3_c3", Conv((2, 3, 22, 20), 16, 7, stride=2, padding=3), "C = 3, 7x7"),
        ("k5_dilation2", replace(base, kernel=5, dilation=2, padding=4), ""),
        ("k3x1", replace(base, kernel=(3, 1), padding=(1, 0)), ""),
        ("k1x5_s1x2", replace(base, kernel=(1, 5), stride=(1, 2), padding=(0, 2)), ""),
        ("dilation_3x1", replace(base, dilation=(3, 1), padding=(3, 1)), ""),
        ("groups2", replace(base, groups=2, padding=1), ""),
        ("groups4_s2", replace(base, groups=4, stride=2, padding=1), ""),
        ("depthwise", replace(base, k=16, groups=16, padding=1), "pytorch#91735"),
        ("depthwise_x2", replace(base, groups=16, padding=1), "two filters a channel"),
        (
            "asymmetric",
            replace(base, padding=((0, 1), (2, 1)), stride=2),
            "pytorch#45667: padding must not be made symmetric",
        ),
        ("asymmetric_one_dim", replace(base, padding=((1, 0), (1, 1))), "pytorch#45667"),
        ("same_k3", replace(base, padding="same"), ""),
        ("same_k4", replace(base, kernel=4, padding="same"), "one more behind than before"),
        ("same_k2_dilation3", replace(base, kernel=2, dilation=3, padding="same"), ""),
        (
            "kernel_over_input",
            Conv((2, 16, 5, 5), 16, 7, stride=2, padding=3),
            "pytorch#103665: kernel larger than the input with stride 2",
        ),
        ("c1", Conv((2, 1, 12, 12), 16, padding=1), "C = 1: strides do not tell the layout"),
        ("hw1", Conv((4, 16, 1, 1), 32, 1), "H = W = 1: strides do not tell the layout"),
        ("c1_hw1", Conv((4, 1, 1, 1), 16, 1), "pytorch#31952"),
        ("c208", Conv((1, 208, 6, 6), 16, padding=1), "pytorch#103665: a multiple of 8"),
        ("c209", Conv((1, 209, 6, 6), 16, padding=1), "pytorch#103665: no multiple of 8"),
        ("k7", replace(base, k=7, padding=1), "odd number of output channels"),
        ("w_out1", Conv((2, 16, 3, 11), 32), "output of height 1"),
        ("batch1", Conv((1, 16, 9, 9), 32, padding=1), ""),
    ]
    for name, conv, note in cases:
        yield _conv_case(name, conv, note)
    for name, conv, note in cases:
        yield _conv_case(name, replace(conv, dtype=F32, **CONTIGUOUS), note)
    for name, conv, note in cases[3:15:4]:
        yield _conv_case(name, replace(conv, dtype=BF16), note)


def _conv_ranks() -> Iterator[Case]:
    line = Conv((2, 16, 40), 32)
    lines = {
        "1d": replace(line, padding=1),
        "1d_s2_k5": replace(line, kernel=5, stride=2, padding=2),
        "1d_dilation_groups": replace(line, dilation=2, padding=2, groups=4),
        "1d_asymmetric": replace(line, padding=((2, 0),)),
    }
    volume = Conv((1, 16, 5, 6, 7), 16)
    volumes = {
        "3d": replace(volume, padding=1),
        "3d_k1": replace(volume, kernel=1),
        "3d_s2": replace(volume, stride=2, padding=1),
        "3d_asymmetric": replace(volume, padding=((1, 0), (0, 1), (1, 1))),
        "3d_groups": replace(volume, groups=2, padding=(1, 0, 1), kernel=(3, 1, 3)),
    }
    for name, conv in (lines | volumes).items():
        yield _conv_case(name, conv, "conv3d in bf16: pytorch#163539" if "3d" in name else "")
        yield _conv_case(f"{name}_contiguous", replace(conv, dtype=F32, **CONTIGUOUS))
    for name in ("1d", "3d"):
        yield _conv_case(name, replace((lines | volumes)[name], dtype=BF16))


def _conv_layouts() -> Iterator[Case]:
    conv = Conv((2, 16, 8, 10), 32, padding=1)
    x, out = conv.x, conv.out
    whcn = dense_strides(x, (3, 1, 2, 0))
    for dtype in (F16, F32):
        one = replace(conv, dtype=dtype)
        yield _conv_case("x_last_w_contiguous", replace(one, w_at=None))
        yield _conv_case("x_contiguous_w_last", replace(one, x_at=None))
        yield _conv_case("contiguous", replace(one, **CONTIGUOUS, y_at=None))
        yield _conv_case("last_to_contiguous", replace(one, y_at="contiguous"), "output layout")
        yield _conv_case("contiguous_to_last", replace(one, **CONTIGUOUS, y_at="channels_last"))
        yield _conv_case("odd_dense_x", replace(one, x_at=whcn), "dense strides in order W C H N")
        yield _conv_case(
            "odd_dense_y", replace(one, y_at=dense_strides(out, (2, 0, 1, 3))), "order H N C W"
        )
        yield _conv_case(
            "x_is_a_slice", replace(one, x_at=(8 * 10 * 24, 1, 10 * 24, 24)), "16 of 24 channels"
        )
        yield _conv_case(
            "y_into_a_slice",
            replace(one, y_at=(8 * 10 * 48, 1, 10 * 48, 48)),
            "a slice of a concatenated buffer",
        )
        yield _conv_case(
            "expanded_batch", replace(one, x_at=(0, 1, 10 * 16, 16)), "stride 0 along N"
        )
        yield _conv_case("mixed_residual", replace(one, residual=True, z_at=None))


def _conv_epilogues() -> Iterator[Case]:
    conv = Conv((2, 16, 9, 11), 32, padding=1)
    for dtype in (F16, BF16, F32):
        one = replace(conv, dtype=dtype)
        yield _conv_case("residual", replace(one, residual=True))
        yield _conv_case("residual_alphas", replace(one, residual=True, alpha1=0.5, alpha2=-1.5))
        yield _conv_case("two_outputs", replace(one, act="silu", pre=True), "pre-activation too")
    for dtype in (F16, BF16):
        one = replace(conv, dtype=dtype)
        yield _conv_case("bias_fp32", replace(one, bias="fp32"), "oneDNN#3324, pytorch#77295")
        yield _conv_case("fp32_result", replace(one, y_dtype=F32), "float32 of 16-bit data")
    yield _conv_case("no_bias", replace(conv, bias=None))
    yield _conv_case("no_bias_no_act", replace(conv, bias=None, act=None), "a bare convolution")
    yield _conv_case("no_bias_no_act", replace(conv, bias=None, act=None, dtype=F32, **CONTIGUOUS))
    yield _conv_case("alpha1_only", replace(conv, alpha1=0.25, act="gelu"))
    yield _conv_case("residual_no_bias", replace(conv, bias=None, residual=True, alpha2=2.0))
    yield _conv_case("plain", replace(conv, dtype=F64))
    yield _conv_case("residual_gelu", replace(conv, dtype=F64, residual=True, act="gelu"))


def _chain(dtype: torch.dtype) -> Case:
    """Two convolutions in one graph, the second on the output of the first."""

    def build() -> cg.Graph:
        g = cg.Graph("chain")
        x = g.input("x", (2, 16, 8, 8), dtype, layout="channels_last")
        w1 = g.input("w1", (32, 16, 3, 3), dtype, layout="channels_last")
        w2 = g.input("w2", (16, 32, 1, 1), dtype, layout="channels_last")
        b1, b2 = g.input("b1", (32,), dtype), g.input("b2", (16,), dtype)
        y = g.conv_bias_act(x, w1, b1, padding=1)
        g.output("middle", y)
        g.output("y", g.conv_bias_act(y, w2, b2, activation="silu"))
        return g

    def eager(t: Tensors) -> Tensors:
        y = F.relu(F.conv2d(t["x"], t["w1"], t["b1"], padding=1))
        return {"middle": y, "y": F.silu(F.conv2d(y, t["w2"], t["b2"]))}

    return Case(
        f"conv_bias_act-chain-{SHORT[dtype]}",
        "conv_bias_act",
        dtype,
        build,
        eager,
        fills={"w1": normal(1 / 12), "w2": normal(32**-0.5)},
        terms=144,
        note="an output that another op uses; two anchors",
    )


def _separable(dtype: torch.dtype) -> Case:
    """A convolution of each channel by itself, then one of 1 x 1."""

    def build() -> cg.Graph:
        g = cg.Graph("separable")
        x = g.input("x", (2, 32, 14, 12), dtype, layout="channels_last")
        d = g.input("d", (32, 1, 3, 3), dtype, layout="channels_last")
        p = g.input("p", (48, 32, 1, 1), dtype, layout="channels_last")
        a, b = g.input("a", (32,), dtype), g.input("b", (48,), dtype)
        acts = {"activation": "silu", "pointwise_activation": "gelu"}
        g.output("y", g.depthwise_separable(x, d, p, a, b, padding=1, **acts))
        return g

    def eager(t: Tensors) -> Tensors:
        y = F.silu(F.conv2d(t["x"], t["d"], t["a"], padding=1, groups=32))
        return {"y": F.gelu(F.conv2d(y, t["p"], t["b"]))}

    fills = {"d": normal(1.0 / 3.0), "p": normal(1.0 / 6.0)}
    name = f"conv_bias_act-separable-{SHORT[dtype]}"
    return Case(name, "conv_bias_act", dtype, build, eager, fills, terms=32)


def _branches(dtype: torch.dtype) -> Case:
    """Two convolutions of one input, added: cuDNN refuses it as one plan."""

    def build() -> cg.Graph:
        g = cg.Graph("branches")
        x = g.input("x", (2, 16, 8, 8), dtype, layout="channels_last")
        w1 = g.input("w1", (32, 16, 3, 3), dtype, layout="channels_last")
        w2 = g.input("w2", (32, 16, 1, 1), dtype, layout="channels_last")
        y = g.conv(x, w1, padding=1) + g.conv(x, w2)
        g.output("y", y.relu())
        return g

    def eager(t: Tensors) -> Tensors:
        y = F.conv2d(t["x"], t["w1"], padding=1) + F.conv2d(t["x"], t["w2"])
        return {"y": F.relu(y)}

    return Case(
        f"conv_bias_act-branches-{SHORT[dtype]}",
        "conv_bias_act",
        dtype,
        build,
        eager,
        fills={"w1": normal(1 / 12), "w2": normal(0.25)},
        terms=160,
        note="two convolutions added: refused as one plan",
    )


def _scaled(dtype: torch.dtype, vector: torch.dtype) -> Case:
    """Convolution, scale and bias per channel, and a gate made of comparison and selection."""

    def build() -> cg.Graph:
        g = cg.Graph("scaled")
        x = g.input("x", (2, 16, 8, 8), dtype, layout="channels_last")
        w = g.input("w", (32, 16, 3, 3), dtype, layout="channels_last")
        s, b = g.input("s", (32,), vector), g.input("b", (1, 32, 1, 1), vector)
        y = g.bias(g.scale(g.conv(x, w, padding=1), s), b)
        g.output("y", g.where(y > 0.0, y, 0.125 * y))
        return g

    def eager(t: Tensors) -> Tensors:
        y = F.conv2d(t["x"], t["w"], padding=1)
        y = y * t["s"].view(-1, 1, 1).to(y.dtype) + t["b"].to(y.dtype)
        return {"y": torch.where(y > 0.0, y, 0.125 * y)}

    return Case(
        f"conv_bias_act-scale_where_{SHORT[vector]}-{SHORT[dtype]}",
        "conv_bias_act",
        dtype,
        build,
        eager,
        fills={"w": normal(1 / 12), "s": uniform(0.5, 1.5)},
        terms=144,
        note="scale, bias of rank 4, comparison and selection behind a convolution",
    )


def conv_bias_act() -> Iterator[Case]:
    yield from _conv_activations()
    yield from _conv_geometry()
    yield from _conv_ranks()
    yield from _conv_layouts()
    yield from _conv_epilogues()
    yield from (_chain(F16), _chain(F32), _branches(F16), _branches(F32))
    yield from (_separable(F16), _separable(BF16), _separable(F32))
    yield from (_scaled(F16, F16), _scaled(F16, F32), _scaled(F32, F32))


def conv_bn_act() -> Iterator[Case]:
    conv = Conv((2, 16, 9, 10), 32, padding=1, bias=None, bn="data")
    for dtype in (F16, BF16, F32):
        one = replace(conv, dtype=dtype)
        yield _conv_case("relu", one)
        yield _conv_case("no_affine", replace(one, affine=False))
        yield _conv_case("residual", replace(one, residual=True))
        yield _conv_case("s2_silu", replace(one, stride=2, act="silu", eps=1e-3))
    for dtype in (F16, BF16):
        one = replace(conv, dtype=dtype, bn="fp32")
        yield _conv_case("fp32_statistics", one, "statistics in float32 beside 16-bit data")
    contiguous = replace(conv, **CONTIGUOUS)
    yield _conv_case("fp32_statistics_residual", replace(conv, bn="fp32", residual=True))
    yield _conv_case("alphas", replace(conv, residual=True, alpha1=0.5, alpha2=2.0))
    yield _conv_case("conv_bias", replace(conv, bias="data"), "bias before the norm")
    yield _conv_case("no_act", replace(conv, act=None))
    yield _conv_case("two_outputs", replace(conv, act="tanh", pre=True))
    yield _conv_case("leaky", replace(conv, act="leaky_relu", act_attrs=(("negative_slope", 0.1),)))
    steep = (("negative_slope", 2.0),)
    yield _conv_case("steep", replace(conv, act="leaky_relu", act_attrs=steep))
    yield _conv_case("hardswish", replace(conv, act="hardswish"))
    yield _conv_case("depthwise", replace(conv, k=16, groups=16))
    yield _conv_case("groups4", replace(conv, groups=4))
    yield _conv_case(
        "c3_k7", Conv((2, 3, 20, 20), 16, 7, stride=2, padding=3, bias=None, bn="fp32")
    )
    yield _conv_case("asymmetric", replace(conv, padding=((0, 1), (0, 1)), stride=2))
    yield _conv_case("contiguous", replace(contiguous, dtype=F16))
    yield _conv_case("contiguous_residual", replace(contiguous, dtype=F32, residual=True))
    yield _conv_case("contiguous_k1", replace(contiguous, dtype=F32, kernel=1, padding=0))
    yield _conv_case("to_contiguous", replace(conv, y_at="contiguous"))
    line = Conv((2, 16, 30), 32, padding=1, bias=None, bn="data")
    volume = Conv((1, 16, 5, 5, 6), 16, padding=1, bias=None, bn="data")
    for name, one in (("1d", line), ("3d", volume)):
        yield _conv_case(name, one)
        yield _conv_case(name, replace(one, dtype=F32, **CONTIGUOUS))
    yield _conv_case("plain", replace(conv, dtype=F64, bias="data", residual=True))


def conv_transpose() -> Iterator[Case]:
    conv = Conv((2, 16, 7, 8), 24, padding=1, transposed=True)
    cases: list[tuple[str, Conv, str]] = [
        ("k3_s1_p1", conv, ""),
        ("k2_s2", replace(conv, kernel=2, stride=2, padding=0), ""),
        ("k4_s2_p1", replace(conv, kernel=4, stride=2), ""),
        ("k3_s2_p1_op1", replace(conv, stride=2, output_padding=1), "pytorch#964"),
        ("k3_s3_op_0x2", replace(conv, stride=3, output_padding=(0, 2)), "pytorch#964"),
        (
            "dilation2_op1",
            replace(conv, dilation=2, padding=2, output_padding=1),
            "pytorch#14272: output_padding below dilation, above stride",
        ),
        ("k5_dilation2_s2", replace(conv, kernel=5, dilation=2, stride=2, padding=3), ""),
        ("k1_s1", replace(conv, kernel=1, padding=0), ""),
        ("k1_s2", replace(conv, kernel=1, stride=2, padding=0), "gaps between the outputs"),
        ("k3x1", replace(conv, kernel=(3, 1), padding=(1, 0), stride=(2, 1)), ""),
        ("groups2", replace(conv, groups=2, stride=2), ""),
        ("depthwise", replace(conv, k=16, groups=16, stride=2, kernel=4), ""),
        ("asymmetric", replace(conv, padding=((0, 1), (1, 0)), stride=2), "pytorch#45667"),
        ("c1", Conv((2, 1, 6, 6), 16, padding=1, transposed=True), "C = 1"),
        ("k1_channel", Conv((2, 16, 6, 6), 1, 4, stride=2, padding=1, transposed=True), "K = 1"),
        ("hw1", Conv((4, 16, 1, 1), 24, 4, transposed=True), "H = W = 1"),
        ("c3_k7", Conv((1, 3, 9, 9), 7, padding=1, transposed=True), "C = 3, K = 7"),
        ("silu", replace(conv, stride=2, act="silu"), ""),
        ("no_bias_no_act", replace(conv, bias=None, act=None), "a bare transposed convolution"),
        ("residual_alphas", replace(conv, residual=True, alpha1=0.5, alpha2=1.5), ""),
        ("two_outputs", replace(conv, stride=2, act="gelu", pre=True), ""),
        ("1d_s2", Conv((2, 16, 20), 24, 4, stride=2, padding=1, transposed=True), ""),
        ("3d_s2", Conv((1, 16, 4, 4, 5), 16, stride=2, padding=1, transposed=True), ""),
        (
            "3d_op1",
            Conv((1, 8, 3, 4, 4), 8, stride=2, padding=1, output_padding=1, transposed=True),
            "",
        ),
    ]
    for name, one, note in cases:
        yield _conv_case(name, one, note)
    for name, one, note in cases:
        yield _conv_case(name, replace(one, dtype=F32, **CONTIGUOUS), note)
    for name, one, note in cases[:4]:
        yield _conv_case(name, replace(one, dtype=BF16), note)
    up = replace(conv, stride=2)
    yield _conv_case("bias_fp32", replace(up, bias="fp32"), "pytorch#77295")
    yield _conv_case("bias_fp32", replace(up, bias="fp32", dtype=BF16), "pytorch#77295")
    yield _conv_case("fp32_result", replace(up, y_dtype=F32))
    yield _conv_case("contiguous", replace(up, **CONTIGUOUS))
    yield _conv_case("x_last_w_contiguous", replace(up, w_at=None))
    yield _conv_case("to_contiguous", replace(up, y_at="contiguous"))
    yield _conv_case("odd_dense_y", replace(up, y_at=dense_strides(up.out, (2, 0, 1, 3))))
    yield _conv_case("no_bias_s2", replace(up, bias=None))
    yield _conv_case("channels_last", replace(up, dtype=F32))
    uneven = replace(up, padding=((1, 2), (1, 0)), output_padding=(1, 0))
    yield _conv_case("asymmetric_op1", uneven, "output_padding cuts less, or adds zeros")
    yield _conv_case("asymmetric_op1", replace(uneven, dtype=F64, padding=((1, 0), (0, 2))))
    yield _conv_case("plain", replace(up, dtype=F64))


def _wgrad_case(name: str, conv: Conv, note: str = "", scaled: bool = False) -> Case:
    """The weight's gradient of ``conv``, without its epilogue; ``scaled`` by input channel."""

    def build() -> cg.Graph:
        g = cg.Graph("wgrad")
        dy = g.input("dy", conv.out, conv.dtype, **at_layout(conv.x_at))
        x = g.input("x", conv.x, conv.dtype, **at_layout(conv.x_at))
        dw = g.conv_wgrad(
            dy,
            x,
            kernel=conv.kernel,
            stride=conv.stride,
            padding=conv.pairs,
            dilation=conv.dilation,
            groups=conv.groups,
        )
        if scaled:
            dw = dw * g.input("s", (1, conv.weight[1], *(1,) * (len(conv.weight) - 2)), conv.dtype)
        g.output("dw", dw, **at_layout(conv.w_at))
        return g

    def eager(t: Tensors) -> Tensors:
        w = torch.zeros(conv.weight, dtype=t["x"].dtype, device=t["x"].device)
        (dw,) = grads_of(lambda w: conv._convolved(t["x"], w, None), [w], t["dy"])
        return {"dw": dw * t["s"] if scaled else dw}

    terms = math.prod(conv.out) // conv.k
    return gradient_case(f"wgrad_{name}", conv.dtype, build, eager, note=note, terms=terms)


def wgrads() -> Iterator[Case]:
    base = Conv((2, 16, 9, 10), 32, padding=1)
    cases: dict[str, Conv] = {
        "k3": base,
        "k1": replace(base, kernel=1, padding=0),
        "k3_s2": replace(base, stride=2),
        "k5_dilation2": replace(base, kernel=5, dilation=2, padding=4),
        "groups2": replace(base, groups=2),
        "depthwise": replace(base, k=16, groups=16),
        "asymmetric": replace(base, padding=((0, 1), (2, 1)), stride=2),
        "c3_k7": Conv((2, 3, 20, 20), 16, 7, stride=2, padding=3),
        "1d": Conv((2, 16, 40), 32, padding=1),
        "3d": Conv((1, 16, 5, 6, 7), 16, padding=1),
    }
    for name, conv in cases.items():
        yield _wgrad_case(name, conv)
        yield _wgrad_case(name, replace(conv, dtype=F32, x_at=None, w_at=None))
    for dtype in (BF16, F64):
        yield _wgrad_case("k3", replace(base, dtype=dtype))
    for dtype in (F16, BF16):
        yield _wgrad_case("scaled", replace(base, dtype=dtype), scaled=True)
    yield _wgrad_case("contiguous", replace(base, x_at=None, w_at=None))
    yield _wgrad_case("last_to_contiguous", replace(base, w_at=None))
