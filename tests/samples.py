"""Sample graphs of every family: what they are, inputs for them, and what torch would compute.

``enumerate_cases()`` is cheap and makes no tensor; ``make_inputs(case, device, seed)`` fills
tensors of the declared shapes, strides and dtypes, the same numbers on every device;
``torch_eager(case, inputs)`` is what a user of torch would write in the dtype of the inputs. Run on
``in_float64(inputs)`` the last one is the yardstick: it shares no code with the package.

The CPU tests run every case, ``tests/deviceless`` lowers each, ``tests/gpu`` runs each on a GPU.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.ir.spec import dense_strides

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I8, E4, E5 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
SHORT = {F16: "fp16", BF16: "bf16", F32: "fp32", F64: "fp64", I8: "int8", E4: "e4m3", E5: "e5m2"}

Shape = tuple[int, ...]
Layout = str | Shape | None  # "channels_last", strides in elements, or None for contiguous
Tensors = dict[str, torch.Tensor]
Fill = Callable[[torch.Generator, Shape], torch.Tensor]  # float64 numbers on the CPU


@dataclass(frozen=True)
class Case:
    """One sample graph.

    ``dtype`` is that of the data. ``fills`` says how an input is filled (default: standard normal),
    ``packed`` names inputs that are slices of one buffer, in the order of their offsets. ``terms``
    is the longest sum behind one element of an output. ``note`` says which trap the case is for.
    ``drawn``: what is dropped is drawn by a generator that the reference alone has.
    """

    id: str
    family: str
    dtype: torch.dtype
    build: Callable[[], cg.Graph] = field(repr=False)
    eager: Callable[[Tensors], Tensors] = field(repr=False)
    fills: Mapping[str, Fill] = field(default_factory=dict, repr=False)
    packed: tuple[str, ...] = ()
    terms: int = 1
    note: str = ""
    drawn: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the case is meant for a GPU too: float64 is for the CPU, and so is a draw."""
        return self.dtype != F64 and not self.drawn

    def __str__(self) -> str:
        return self.id


# -- filling tensors -------------------------------------------------------------------------------


def normal(std: float = 1.0, mean: float = 0.0) -> Fill:
    """Normally distributed."""
    return lambda gen, shape: torch.randn(shape, generator=gen, dtype=torch.float64) * std + mean


def uniform(low: float, high: float) -> Fill:
    """Uniform in [low, high)."""
    return lambda gen, shape: (
        low + (high - low) * torch.rand(shape, generator=gen, dtype=torch.float64)
    )


def exactly(values: Sequence[float]) -> Fill:
    """These numbers."""
    return lambda gen, shape: torch.tensor(values, dtype=torch.float64).reshape(shape)


def small_whole(low: int, high: int) -> Fill:
    """Whole numbers in [low, high), so that equal ones are found."""
    return lambda gen, shape: torch.randint(low, high, shape, generator=gen).double()


def make_inputs(
    case: Case, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, torch.Tensor]:
    """Tensors for every input of ``case``, strides as declared; gaps between elements hold NaN."""
    spec = case.build().spec()
    gen = torch.Generator().manual_seed(zlib.crc32(case.id.encode()) + seed)
    made: dict[str, torch.Tensor] = {}
    for name in spec.inputs:
        tensor = spec.tensors[name]
        core = tuple(
            1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride, strict=True)
        )
        values = case.fills.get(name, normal())(gen, core)
        blank = float("nan") if tensor.dtype.is_floating_point else 0
        memory = torch.full((tensor.extent,), blank, dtype=tensor.dtype)
        memory.as_strided(core, tensor.stride).copy_(values)
        made[name] = memory.to(device).as_strided(tensor.shape, tensor.stride)
    if case.packed:
        _pack(made, case.packed)
    return made


def _pack(made: dict[str, torch.Tensor], names: Sequence[str]) -> None:
    """Move tensors into one buffer, each behind the one before: (B, S, slices, H, D) in memory."""
    first = made[names[0]]
    heads, depth = first.shape[1], first.shape[3]
    extent = 1 + sum((n - 1) * s for n, s in zip(first.shape, first.stride(), strict=True))
    buffer = torch.full(
        (extent + (len(names) - 1) * heads * depth,),
        float("nan"),
        dtype=first.dtype,
        device=first.device,
    )
    for place, name in enumerate(names):
        tensor = made[name]
        slot = buffer.as_strided(tensor.shape, tensor.stride(), place * heads * depth)
        made[name] = slot.copy_(tensor)


def in_float64(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same numbers in float64 on the CPU; bools and integers stay what they are."""
    return {
        name: value.detach().to("cpu", F64 if value.dtype.is_floating_point else value.dtype)
        for name, value in inputs.items()
    }


def torch_eager(case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torch computes for ``case``, by output name, in the dtype of the inputs."""
    with torch.no_grad():
        return case.eager(dict(inputs))


# -- activations -----------------------------------------------------------------------------------

ACTIVATIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "clamp": torch.clamp,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "identity": lambda x: x,
}


def activate(y: torch.Tensor, kind: str | None, attrs: Mapping[str, Any]) -> torch.Tensor:
    """torch's own activation by our name of it."""
    return y if kind is None else ACTIVATIONS[kind](y, **attrs)


# -- convolutions ----------------------------------------------------------------------------------


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
        x = g.input("x", self.x, self.dtype, **_at(self.x_at))
        w = g.input("w", self.weight, self.dtype, **_at(self.w_at))
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
            options["residual"] = g.input("z", self.out, self.dtype, **_at(self.z_at))
        if self.bn is not None:
            y = g.conv_bn_act(x, w, *given, **options)
        elif self.transposed:
            y = g.conv_transpose_bias_act(x, w, *given, **options)
        else:
            y = g.conv_bias_act(x, w, *given, **options)
        if self.pre:
            g.output("pre", y, **_at(self.y_at))
            y = g.activation(y, self.act, **dict(self.act_attrs))
        g.output("y", y, dtype=self.y_dtype, **_at(self.y_at))
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


def _at(layout: Layout) -> dict[str, Any]:
    if layout is None:
        return {}
    return {"layout": layout} if isinstance(layout, str) else {"stride": layout}


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


def _of_images(dtype: torch.dtype, vectors: torch.dtype, layout: Layout) -> Case:
    """A scale and a bias of its own for each image, as diffusion models condition on a step."""

    def build() -> cg.Graph:
        g = cg.Graph("of_images")
        x = g.input("x", (2, 16, 6, 10), dtype, **_at(layout))
        s, b = (g.input(key, (2, 16, 1, 1), vectors) for key in ("s", "b"))
        g.output("y", g.bias(g.scale(x, s), b).silu())
        return g

    def eager(t: Tensors) -> Tensors:
        wide = torch.promote_types(t["x"].dtype, t["s"].dtype)
        return {"y": F.silu(t["x"].to(wide) * t["s"] + t["b"]).to(t["x"].dtype)}

    name = f"{'nchw' if layout is None else 'nhwc'}_{SHORT[vectors]}_vectors"
    return Case(f"pointwise-of_images_{name}-{SHORT[dtype]}", "pointwise", dtype, build, eager)


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


def _conv_bias_act() -> Iterator[Case]:
    yield from _conv_activations()
    yield from _conv_geometry()
    yield from _conv_ranks()
    yield from _conv_layouts()
    yield from _conv_epilogues()
    yield from (_chain(F16), _chain(F32), _branches(F16), _branches(F32))
    yield from (_separable(F16), _separable(BF16), _separable(F32))
    yield from (_scaled(F16, F16), _scaled(F16, F32), _scaled(F32, F32))


def _conv_bn_act() -> Iterator[Case]:
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


def _conv_transpose() -> Iterator[Case]:
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


# -- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """Scaled dot-product attention: q (b, h, s_q, d), k (b, h_kv, s_kv, d), v (b, h_kv, s_kv, d_v).

    ``mask`` is "bool", "data" or "fp32" with ``mask_shape``; ``dead_rows`` first rows of it attend
    to nothing. ``memory`` is "bhsd", "bshd", "packed" or "expanded" (k and v stored for one head).
    ``dropped`` says what tells which weights ``dropout`` drops: a "mask", or a "seed", of which the
    reference alone has this generator. With ``low`` every score is about -120: exp(-lse) is more
    than float32 holds.
    """

    b: int = 2
    h: int = 4
    h_kv: int | None = None
    s_q: int = 64
    s_kv: int | None = None
    d: int = 64
    d_v: int | None = None
    dtype: torch.dtype = F16
    scale: float | None = None
    causal: bool = False
    alignment: str = "top_left"
    window: tuple[int | None, int | None] | None = None
    mask: str | None = None
    mask_shape: Shape = ()
    mask_stride: Shape | None = None
    dead_rows: int = 0
    holes: bool = False  # an additive mask with -inf at about a third of its places
    len_q: tuple[int, ...] | None = None
    len_kv: tuple[int, ...] | None = None
    dirty: bool = False  # q, k and v hold NaN behind the given lengths
    lse: bool = False
    memory: str = "bhsd"
    dropout: float = 0.0
    dropped: str = "mask"
    softcap: float | None = None
    alibi: str | None = None  # "standard" slopes, or "given" ones
    sink: bool = False
    finite: bool = False
    low: bool = False

    @property
    def keys(self) -> int:
        return self.s_q if self.s_kv is None else self.s_kv

    @property
    def q_shape(self) -> Shape:
        return (self.b, self.h, self.s_q, self.d)

    @property
    def k_shape(self) -> Shape:
        return (self.b, self.h_kv or self.h, self.keys, self.d)

    @property
    def v_shape(self) -> Shape:
        return (*self.k_shape[:3], self.d_v or self.d)

    def _stride(self, name: str, shape: Shape) -> Shape | None:
        _, h, s, d = shape
        if self.memory == "bshd":
            return (s * h * d, d, h * d, 1)
        if self.memory == "packed":
            return (s * 3 * h * d, d, 3 * h * d, 1)
        if self.memory == "expanded" and name != "q":
            return (s * d, 0, d, 1)
        return None

    def declare(self, g: cg.Graph) -> tuple[list[cg.Value], dict[str, Any]]:
        """q, k and v, and the keywords of attention."""
        data = [
            g.input(name, shape, self.dtype, stride=self._stride(name, shape))
            for name, shape in (("q", self.q_shape), ("k", self.k_shape), ("v", self.v_shape))
        ]
        options: dict[str, Any] = {
            "is_causal": self.causal,
            "scale": self.scale,
            "diagonal_alignment": self.alignment,
            "window": self.window,
        }
        if self.mask is not None:
            dtype = {"bool": torch.bool, "data": self.dtype, "fp32": F32}[self.mask]
            options["attn_mask"] = g.input("mask", self.mask_shape, dtype, stride=self.mask_stride)
        if self.len_q is not None:
            options["seq_len_q"] = g.input("len_q", (self.b,), torch.int32)
        if self.len_kv is not None:
            options["seq_len_kv"] = g.input("len_kv", (self.b,), torch.int32)
        per_head = F64 if self.dtype == F64 else F32
        options |= {"softcap": self.softcap, "dropout_p": self.dropout}
        options["finite_padding"] = self.finite
        options |= {"alibi": True} if self.alibi == "standard" else {}
        if self.alibi == "given":
            options["alibi_slopes"] = g.input("slopes", (self.h,), per_head)
        if self.dropout and self.dropped == "mask":
            shape = (*self.q_shape[:3], self.keys)
            options["dropout_mask"] = g.input("dropped", shape, torch.bool)
        elif self.dropout:
            options["dropout_seed"] = g.input("seed", (1,), torch.int64)
            options["dropout_offset"] = g.input("offset", (), torch.int64)
        return data, options

    def sinks(self, g: cg.Graph) -> dict[str, Any]:
        """The keyword of attention that its gradient has not."""
        per_head = F64 if self.dtype == F64 else F32
        return {"sink": g.input("sink", (self.h,), per_head)} if self.sink else {}

    def build(self) -> cg.Graph:
        g = cg.Graph("attention")
        data, options = self.declare(g)
        result = g.sdpa(*data, return_lse=self.lse, **options, **self.sinks(g))
        if self.lse:
            g.output("o", result[0])
            g.output("lse", result[1])
        else:
            g.output("o", result)
        return g

    def _kept(self, t: Tensors) -> torch.Tensor | None:
        """Which (row, key) pairs may meet, (B, 1, S_q, S_kv); None for all."""
        bounded = self.causal or self.window is not None
        if not bounded and self.len_q is None and self.len_kv is None:
            return None
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        kept = torch.zeros(self.b, 1, self.s_q, self.keys, dtype=torch.bool)
        for batch in range(self.b):
            rows = self.s_q if self.len_q is None else self.len_q[batch]
            keys = self.keys if self.len_kv is None else self.len_kv[batch]
            shift = keys - rows if self.alignment == "bottom_right" else 0
            place = torch.arange(keys)[None, :] - torch.arange(rows)[:, None] - shift
            allowed = torch.ones_like(place, dtype=torch.bool)
            if right is not None:
                allowed &= place <= right
            if left is not None:
                allowed &= place >= -left
            kept[batch, 0, :rows, :keys] = allowed
        return kept.to(t["q"].device)

    def eager(self, t: Tensors) -> Tensors:
        q, k, v = t["q"], t["k"], t["v"]
        if self.dirty:
            q, k, v = (x.nan_to_num(0.0) for x in (q, k, v))
        repeat = q.shape[1] // k.shape[1]
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        kept, given = self._kept(t), t.get("mask")
        if self.dropout or self.softcap or self.alibi or self.sink:
            return self._written_out(q, k, v, t)
        plain = self.causal and self.window is None and self.alignment == "top_left"
        if plain and given is None and self.len_q is None and self.len_kv is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            mask = None if kept is None else torch.zeros_like(kept, dtype=q.dtype)
        else:
            mask = None
            if given is not None:
                mask = given
                if given.dtype == torch.bool:
                    mask = torch.zeros(given.shape, dtype=q.dtype, device=q.device)
                    mask = mask.masked_fill(~given, -torch.inf)
                mask = mask.to(q.dtype)
            if kept is not None:
                mask = torch.zeros((), dtype=q.dtype, device=q.device) if mask is None else mask
                mask = torch.where(kept, mask, -torch.inf)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        dead = None
        if mask is not None:
            if kept is not None:
                mask = torch.where(kept, mask, -torch.inf)
            dead = (mask == -torch.inf).all(-1, keepdim=True)
            out = torch.where(dead, 0.0, out)
        if not self.lse:
            return {"o": out}
        scale = self.d**-0.5 if self.scale is None else self.scale
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, F32)) * scale
        if mask is not None:
            scores = scores + mask
        return {"o": out, "lse": torch.logsumexp(scores, -1)}

    def _written_out(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Tensors
    ) -> Tensors:
        """Attention whose scores are changed one thing after the other."""
        scores = (q @ k.transpose(-1, -2)) * (self.d**-0.5 if self.scale is None else self.scale)
        scores = scores.to(torch.promote_types(q.dtype, F32))
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        given, kept = t.get("mask"), self._kept(t)
        if given is not None:
            scores = (
                scores.masked_fill(~given, -math.inf) if self.mask == "bool" else scores + given
            )
        if self.alibi:
            shift = self.keys - self.s_q if self.alignment == "bottom_right" else 0
            row, key = torch.arange(self.s_q)[:, None] + shift, torch.arange(self.keys)[None, :]
            away = (row - key).abs().to(scores.device, scores.dtype)
            slopes = t.get("slopes", torch.tensor(ALIBI[self.h]).to(scores.device))
            scores = scores - slopes.to(scores.dtype).view(-1, 1, 1) * away
        if kept is not None:
            scores = scores.masked_fill(~kept, -math.inf)
        dead = (scores == -math.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(dead, 0.0)
        if self.sink:
            column = t["sink"].to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        weights = weights.masked_fill(dead, 0.0)
        if self.dropout:
            weights = weights * self._dropped(t) / (1.0 - self.dropout)
        out = {"o": weights.to(v.dtype) @ v}
        if self.lse:
            parts = scores.masked_fill(dead, -math.inf)
            out["lse"] = torch.logsumexp(torch.cat([parts, column], -1) if self.sink else parts, -1)
        return out

    def _dropped(self, t: Tensors) -> torch.Tensor:
        """Which weights dropout keeps."""
        if self.dropped == "mask":
            return t["dropped"]
        shape = (*self.q_shape[:3], self.keys)
        words = philox_words(int(t["seed"]), int(t["offset"]), math.prod(shape))
        return torch.from_numpy(words >= round(self.dropout * 2**32)).view(shape)

    def _masked(self, gen: torch.Generator, shape: Shape) -> torch.Tensor:
        if self.mask == "bool":
            values = (torch.rand(shape, generator=gen) < 0.7).double()
            values[..., 0] = 1.0
        else:
            values = torch.randn(shape, generator=gen, dtype=F64)
            if self.holes:
                closed = torch.rand(shape, generator=gen) < 0.3
                closed[..., 0] = False
                values = values.masked_fill(closed, -math.inf)
        if self.dead_rows:
            values[..., : self.dead_rows, :] = 0.0 if self.mask == "bool" else -math.inf
        return values

    def _data(self, lengths: tuple[int, ...] | None, first: float = 0.0) -> Fill:
        """Standard normal; where scores are low, the first of a row's numbers is ``first``."""

        def fill(gen: torch.Generator, shape: Shape) -> torch.Tensor:
            values = torch.randn(shape, generator=gen, dtype=F64)
            if self.low and first:
                values[..., 0] = first
            if self.dirty and lengths is not None:
                for batch, length in enumerate(lengths):
                    values[batch, :, length:] = math.nan
            return values

        return fill

    @property
    def fills(self) -> dict[str, Fill]:
        scale = self.d**-0.5 if self.scale is None else self.scale
        fills: dict[str, Fill] = {
            "q": self._data(self.len_q, -15.0 / scale),
            "k": self._data(self.len_kv, 8.0),
            "v": self._data(self.len_kv),
            "mask": self._masked,
        }
        if self.len_q is not None:
            fills["len_q"] = exactly(self.len_q)
        if self.len_kv is not None:
            fills["len_kv"] = exactly(self.len_kv)
        fills |= {"slopes": uniform(0.02, 0.4), "seed": exactly([-(2**40) - 5])}
        fills |= {"offset": exactly([2**33 + 8]), "dropped": self._thrown}
        return fills

    def _thrown(self, gen: torch.Generator, shape: Shape) -> torch.Tensor:
        return (torch.rand(shape, generator=gen) >= self.dropout).double()


# The slopes of ALiBi as its authors' code has them, by the number of heads.
ALIBI = {
    4: [0.25, 0.0625, 0.015625, 0.00390625],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625],
}


def philox_words(seed: int, offset: int, count: int) -> np.ndarray:
    """The first word of Philox4x32-10 for counters (i, offset) and key ``seed``, in numpy."""
    low, wide = np.uint64(0xFFFFFFFF), np.uint64(32)
    place = np.arange(count, dtype=np.uint64)
    a, b = place & low, place >> wide
    c, d = (np.full(count, (offset >> shift) & 0xFFFFFFFF, np.uint64) for shift in (0, 32))
    x, y = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (
            (q >> wide) ^ b ^ np.uint64(x),
            q & low,
            (p >> wide) ^ d ^ np.uint64(y),
            p & low,
        )
        x, y = (x + 0x9E3779B9) & 0xFFFFFFFF, (y + 0xBB67AE85) & 0xFFFFFFFF
    return a.astype(np.int64)


def _attention_case(name: str, attention: Attention, note: str = "") -> Case:
    return Case(
        f"sdpa-{name}-{SHORT[attention.dtype]}",
        "sdpa",
        attention.dtype,
        attention.build,
        attention.eager,
        fills=attention.fills,
        packed=("q", "k", "v") if attention.memory == "packed" else (),
        terms=max(attention.d, attention.keys),
        note=note,
        drawn=attention.dropped == "seed",
    )


def _attention_cases() -> list[tuple[str, Attention, str]]:
    a = Attention()
    short, long = replace(a, s_q=32, s_kv=64), replace(a, s_q=64, s_kv=32)
    full = (2, 4, 64, 64)
    right = {"causal": True, "alignment": "bottom_right"}
    low = replace(a, b=1, h=2, low=True)
    tail = "pytorch#196678: half of the last 128 keys, and a low lse"
    return [
        ("plain", a, ""),
        ("scale", replace(a, scale=0.3), "flashinfer#4014: the scale is part of the key"),
        ("causal", replace(a, causal=True), ""),
        ("causal_short_q", replace(short, causal=True), "top left, S_q < S_kv"),
        ("causal_long_q", replace(long, causal=True), "top left, S_q > S_kv"),
        ("bottom_right_square", replace(a, **right), ""),
        ("bottom_right_short_q", replace(short, **right), "ort#29020: S_q < S_kv"),
        (
            "bottom_right_long_q",
            replace(long, **right),
            "S_q > S_kv: the first rows attend to nothing",
        ),
        ("window_left", replace(a, window=(9, 0)), "sliding window"),
        ("window_causal", replace(a, window=(9, None), causal=True), "causal with a window"),
        ("window_both", replace(a, window=(7, 5)), ""),
        ("window_left_only", replace(a, window=(12, None)), ""),
        ("window_right_only", replace(a, window=(None, 6)), ""),
        (
            "window_bottom_right",
            replace(short, window=(9, 0), alignment="bottom_right"),
            "window along the bottom-right diagonal",
        ),
        ("mask_add", replace(a, mask="data", mask_shape=full), ""),
        ("mask_add_fp32", replace(a, mask="fp32", mask_shape=full), "float32 beside 16-bit data"),
        ("mask_add_1hsk", replace(a, mask="data", mask_shape=(1, 4, 64, 64)), "jax#30593"),
        ("mask_add_11sk", replace(a, mask="fp32", mask_shape=(1, 1, 64, 64)), ""),
        ("mask_add_b11k", replace(a, mask="data", mask_shape=(2, 1, 1, 64)), "jax#28974"),
        ("mask_add_sk", replace(a, mask="data", mask_shape=(64, 64)), "a mask of rank 2"),
        (
            "mask_add_expanded",
            replace(a, mask="data", mask_shape=full, mask_stride=(0, 0, 64, 1)),
            "a mask of stride 0",
        ),
        ("mask_add_holes", replace(a, mask="data", mask_shape=full, holes=True), "-inf in places"),
        (
            "mask_add_dead_rows",
            replace(a, mask="data", mask_shape=full, dead_rows=3),
            "pytorch#103963: rows of -inf give zeros",
        ),
        ("mask_add_causal", replace(a, mask="data", mask_shape=full, causal=True), ""),
        ("mask_bool", replace(a, mask="bool", mask_shape=full), "diffusers#14342: not 0 and 1"),
        ("mask_bool_111k", replace(a, mask="bool", mask_shape=(1, 1, 1, 64)), "jax#28974"),
        ("mask_bool_b11k", replace(a, mask="bool", mask_shape=(2, 1, 1, 64)), ""),
        ("mask_bool_1hsk", replace(a, mask="bool", mask_shape=(1, 4, 64, 64)), ""),
        (
            "mask_bool_dead_rows",
            replace(a, mask="bool", mask_shape=full, dead_rows=5, lse=True),
            "pytorch#103963: fully masked rows give zeros and -inf",
        ),
        ("mask_bool_causal", replace(a, mask="bool", mask_shape=(2, 1, 64, 64), causal=True), ""),
        *(
            (
                f"mask_{'add' if kind == 'data' else kind}_s_{s}",
                replace(low, s_q=64, s_kv=s, mask=kind, mask_shape=(1, 1, 64, s)),
                tail,
            )
            for s in (320, 704)
            for kind in ("data", "bool")
        ),
        ("lengths", replace(a, len_q=(64, 40), len_kv=(50, 64)), ""),
        ("lengths_zero", replace(a, len_q=(64, 0), len_kv=(0, 30)), "cudnn-frontend#943"),
        ("length_q_only", replace(a, len_q=(33, 64)), "one of the two lengths"),
        ("length_kv_only", replace(a, len_kv=(64, 17)), "one of the two lengths"),
        ("lengths_causal", replace(a, len_q=(64, 40), len_kv=(64, 40), causal=True), ""),
        (
            "lengths_bottom_right",
            replace(a, len_q=(30, 64), len_kv=(64, 50), **right),
            "ort#29714: the diagonal of each sequence",
        ),
        (
            "lengths_dirty",
            replace(a, len_q=(64, 40), len_kv=(50, 40), dirty=True),
            "pytorch#101967: NaN behind the lengths; select, never multiply by 0",
        ),
        ("lengths_lse", replace(a, len_q=(64, 40), len_kv=(64, 20), lse=True), ""),
        ("lengths_finite", replace(a, len_q=(64, 40), len_kv=(50, 64), finite=True), "a promise"),
        (
            "lengths_finite_causal",
            replace(a, len_q=(64, 40), len_kv=(64, 40), causal=True, finite=True, d=128, lse=True),
            "a promise",
        ),
        (
            "lengths_finite_gqa",
            replace(a, h=8, h_kv=2, len_kv=(50, 64), finite=True),
            "a promise",
        ),
        ("gqa_8_2", replace(a, h=8, h_kv=2), "grouped query heads"),
        ("gqa_causal", replace(a, h=8, h_kv=2, causal=True), ""),
        ("mqa", replace(a, h=4, h_kv=1), "one head of keys"),
        ("gqa_mask", replace(a, h=8, h_kv=2, mask="data", mask_shape=(2, 8, 64, 64)), ""),
        ("d_v_32", replace(a, d_v=32), "d_v < d_qk"),
        ("d_v_128", replace(a, d_v=128), "d_v > d_qk"),
        ("d_128", replace(a, d=128), ""),
        ("d_256", replace(a, d=256, h=2), "pytorch#128348"),
        ("d_20", replace(a, d=20), "head dim not a multiple of 8: TE#341"),
        ("d_72", replace(a, d=72), ""),
        ("s_32", replace(a, s_q=32), "jax#24607"),
        (
            "s_192_mask",
            replace(a, s_q=192, h=2, mask="data", mask_shape=(1, 1, 192, 192)),
            "pytorch#196678",
        ),
        ("s_197", replace(a, s_q=197, h=2), "a length that is no multiple of anything"),
        ("decode", replace(a, s_q=1, s_kv=128), "S_q = 1"),
        ("decode_gqa", replace(a, s_q=1, s_kv=128, h=8, h_kv=2), "cudnn-frontend#1083"),
        ("decode_low", replace(low, s_q=1, s_kv=128), "cudnn-frontend#1072: a low lse"),
        (
            "decode_lengths",
            replace(a, s_q=1, s_kv=128, len_kv=(100, 7)),
            "one new token behind a cache",
        ),
        ("s_q_7_s_kv_50", replace(a, s_q=7, s_kv=50), ""),
        ("bshd", replace(a, memory="bshd"), "permuted views"),
        ("bshd_causal_gqa", replace(a, memory="bshd", h=8, h_kv=2, causal=True), ""),
        ("bshd_lse", replace(a, memory="bshd", lse=True), ""),
        ("packed", replace(a, memory="packed"), "flashinfer#4625: slices of one buffer"),
        ("packed_b3", replace(a, memory="packed", b=3, s_q=40, causal=True), "flashinfer#4625"),
        ("expanded_kv", replace(a, memory="expanded"), "pytorch#175764: k and v of stride 0"),
        ("lse", replace(a, lse=True), ""),
        ("lse_causal", replace(a, lse=True, causal=True), ""),
        (
            "lse_bottom_right_long_q",
            replace(long, **right, lse=True),
            "rows without a key: -inf in lse",
        ),
        ("one_key", replace(a, s_q=5, s_kv=1), "softmax over one key"),
        ("b1_h1", replace(a, b=1, h=1), ""),
        *_changed_scores(a),
    ]


def _changed_scores(a: Attention) -> list[tuple[str, Attention, str]]:
    """Dropout, sinks, ALiBi, and soft caps."""
    short, long = replace(a, s_q=32, s_kv=64), replace(a, s_q=64, s_kv=32)
    full = (2, 4, 64, 64)
    right = {"causal": True, "alignment": "bottom_right"}
    dropped = replace(a, dropout=0.25)
    masked = replace(a, mask="data", mask_shape=full)
    return [
        ("dropout", dropped, ""),
        ("dropout_causal", replace(dropped, causal=True, lse=True), "dropout is not in lse"),
        ("dropout_gqa", replace(dropped, h=8, h_kv=2), ""),
        ("dropout_window", replace(dropped, window=(9, 0)), ""),
        ("dropout_mask_add", replace(masked, dropout=0.1), ""),
        ("dropout_mask_bool", replace(dropped, mask="bool", mask_shape=full), "two boolean masks"),
        ("dropout_lengths", replace(dropped, len_q=(64, 40), len_kv=(50, 64)), ""),
        ("dropout_bottom_right", replace(dropped, s_q=32, s_kv=64, **right), ""),
        ("sink", replace(a, sink=True), ""),
        ("sink_lse", replace(a, sink=True, lse=True, causal=True), "the sink is part of lse"),
        ("sink_window", replace(a, sink=True, window=(9, 0)), "windows with sinks, as gpt-oss"),
        ("sink_gqa", replace(a, sink=True, h=8, h_kv=2, d=128), ""),
        (
            "sink_dead_rows",
            replace(long, sink=True, **right, lse=True),
            "rows without a key: zeros, and the sink in lse",
        ),
        ("sink_lengths", replace(a, sink=True, len_q=(64, 40), len_kv=(50, 64)), ""),
        ("sink_decode", replace(a, sink=True, s_q=1, s_kv=128), "S_q = 1"),
        ("sink_dropout", replace(dropped, sink=True), ""),
        ("alibi", replace(a, alibi="standard", causal=True), ""),
        ("alibi_6", replace(a, alibi="standard", h=6, causal=True), "no power of two of heads"),
        ("alibi_full", replace(a, alibi="standard"), "both ways from the diagonal"),
        ("alibi_bottom_right", replace(short, alibi="standard", **right), ""),
        ("alibi_window", replace(a, alibi="standard", window=(9, 0)), ""),
        ("slopes", replace(a, alibi="given", causal=True), ""),
        ("slopes_full", replace(a, alibi="given"), ""),
        (
            "slopes_right",
            replace(short, alibi="given", alignment="bottom_right"),
            "of the diagonal",
        ),
        ("slopes_bottom_right", replace(short, alibi="given", **right, lse=True), ""),
        ("softcap", replace(a, softcap=0.7), "Gemma 2"),
        ("softcap_causal", replace(a, softcap=0.7, causal=True, lse=True), ""),
        ("softcap_window", replace(a, softcap=0.7, window=(9, 0), h=8, h_kv=2), "Gemma 2"),
        ("softcap_both_sides", replace(a, softcap=0.7, window=(7, 5)), ""),
        ("softcap_mask_add", replace(masked, softcap=0.7), "the mask is added to capped scores"),
        ("softcap_dead_rows", replace(long, softcap=0.7, **right), "rows without a key"),
        ("softcap_lengths", replace(a, softcap=0.7, len_q=(64, 40), len_kv=(50, 64)), ""),
        ("softcap_slopes_sink", replace(a, softcap=0.7, alibi="given", sink=True), ""),
        ("softcap_dropout", replace(dropped, softcap=0.7), ""),
    ]


# Cases of attention that are also run in other dtypes than float16.
_AGAIN: Mapping[torch.dtype, tuple[str, ...]] = {
    BF16: (
        "plain",
        "causal",
        "bottom_right_short_q",
        "window_causal",
        "mask_add",
        "mask_add_fp32",
        "mask_bool",
        "lengths",
        "gqa_8_2",
        "mqa",
        "d_128",
        "d_256",
        "decode",
        "bshd",
        "packed",
        "lse",
        "dropout_causal",
        "sink_lse",
        "alibi",
        "slopes",
        "softcap_causal",
    ),
    F32: (
        "plain",
        "causal",
        "mask_add",
        "mask_bool_dead_rows",
        "lengths",
        "gqa_8_2",
        "d_v_32",
        "s_197",
        "lse",
        *("window_causal", "alibi", "slopes", "softcap", "sink", "dropout"),
    ),
    F64: (
        *("plain", "bottom_right_long_q", "mask_bool_dead_rows", "lengths_lse", "window_both"),
        *("dropout_mask_bool", "sink_dead_rows", "sink_lengths", "alibi_6", "slopes_right"),
        *("softcap_slopes_sink", "softcap_dropout"),
    ),
}


def _seeded() -> Iterator[tuple[str, Attention, str]]:
    """Dropout by a seed: the reference's generator, so for the CPU."""
    note = "which weights are dropped is Philox of the seed, the offset and the place"
    a = Attention(dtype=F64, dropout=0.3, dropped="seed")
    yield "dropout_seed", a, note
    yield "dropout_seed_causal_gqa", replace(a, h=8, h_kv=2, causal=True, lse=True), note


def _sdpa() -> Iterator[Case]:
    cases = {name: (attention, note) for name, attention, note in _attention_cases()}
    for name, (attention, note) in cases.items():
        yield _attention_case(name, attention, note)
    for dtype, names in _AGAIN.items():
        for name in names:
            attention, note = cases[name]
            yield _attention_case(name, replace(attention, dtype=dtype), note)
    for name, attention, note in _seeded():
        for dtype in (F64, F32, F16, BF16):
            yield _attention_case(name, replace(attention, dtype=dtype), note)


@dataclass(frozen=True)
class Packed:
    """Attention within packed sequences of ``len_q`` tokens of q and ``len_kv`` of k and v.

    ``tail`` tokens follow the last sequence. ``memory`` is "thd", "htd" (heads first) or "packed":
    q, k and v are slices of one buffer.
    """

    len_q: tuple[int, ...] = (40, 64, 3)
    len_kv: tuple[int, ...] | None = None
    h: int = 4
    h_kv: int | None = None
    d: int = 64
    d_v: int | None = None
    dtype: torch.dtype = F16
    causal: bool = False
    alignment: str = "top_left"
    window: tuple[int | None, int | None] | None = None
    lse: bool = False
    memory: str = "thd"
    longest: int = 0  # more than the longest sequence has
    finite: bool = False
    own: bool = False  # keys are of the rows' sequences: one tensor says where both end

    @property
    def keys(self) -> tuple[int, ...]:
        return self.len_q if self.len_kv is None else self.len_kv

    def shapes(self) -> dict[str, Shape]:
        heads, rows, keys = self.h_kv or self.h, sum(self.len_q), sum(self.keys)
        return {
            "q": (rows, self.h, self.d),
            "k": (keys, heads, self.d),
            "v": (keys, heads, self.d_v or self.d),
        }

    def declare(self, g: cg.Graph) -> tuple[list[cg.Value], list[Any], dict[str, Any]]:
        """q, k and v; what says where sequences lie; the keywords."""
        data = []
        for name, (tokens, heads, depth) in self.shapes().items():
            stride = {"htd": (depth, tokens * depth, 1), "packed": (3 * heads * depth, depth, 1)}
            at = stride.get(self.memory)
            data.append(g.input(name, (tokens, heads, depth), self.dtype, stride=at))
        count = (len(self.len_q) + 1,)
        ends = ("q",) if self.own else ("q", "kv")
        where: list[Any] = [g.input(f"cu_{of}", count, torch.int32) for of in ends]
        where *= 3 - len(where)
        where += [max(self.len_q) + self.longest, max(self.keys) + self.longest]
        options = {
            "is_causal": self.causal,
            "diagonal_alignment": self.alignment,
            "window": self.window,
        }
        return data, where, options

    def build(self) -> cg.Graph:
        g = cg.Graph("packed")
        data, where, options = self.declare(g)
        options["finite_padding"] = self.finite
        result = g.sdpa_varlen(*data, *where, return_lse=self.lse, **options)
        for name, value in zip(("o", "lse"), result if self.lse else (result,), strict=False):
            g.output(name, value)
        return g

    def eager(self, t: Tensors) -> Tensors:
        """One sequence after the other."""
        outs, logs = [], []
        starts = [0, 0]
        for rows, keys in zip(self.len_q, self.keys, strict=True):
            q = t["q"][starts[0] : starts[0] + rows]
            k, v = (t[name][starts[1] : starts[1] + keys] for name in "kv")
            one = Attention(
                *(1, self.h, self.h_kv, rows, keys, self.d, self.d_v, self.dtype),
                causal=self.causal,
                alignment=self.alignment,
                window=self.window,
                lse=True,
            )
            many = {n: x.transpose(0, 1)[None] for n, x in (("q", q), ("k", k), ("v", v))}
            if keys == 0:
                outs.append(q.new_zeros(rows, self.h, self.d_v or self.d))
                logs.append(q.new_full((rows, self.h), -math.inf))
            elif rows:
                done = one.eager(many)
                outs.append(done["o"][0].transpose(0, 1))
                logs.append(done["lse"][0].transpose(0, 1))
            starts = [starts[0] + rows, starts[1] + keys]
        made = {"o": torch.cat(outs)}
        return {**made, "lse": torch.cat(logs)} if self.lse else made

    @property
    def fills(self) -> dict[str, Fill]:
        ends = {"cu_q": self.len_q, "cu_kv": self.keys}
        return {name: exactly([0, *accumulate(lengths)]) for name, lengths in ends.items()}


def _packed_cases() -> list[tuple[str, Packed, str]]:
    p = Packed()
    cross = replace(p, len_kv=(50, 70, 8))
    right = {"causal": True, "alignment": "bottom_right"}
    return [
        ("plain", p, ""),
        ("causal", replace(p, causal=True), ""),
        ("cross", cross, "other lengths of k than of q"),
        ("bottom_right", replace(cross, **right, lse=True), "of each sequence"),
        ("window", replace(p, window=(9, 0)), ""),
        ("gqa", replace(p, h=8, h_kv=2, causal=True), ""),
        ("d_128", replace(p, d=128, lse=True), ""),
        ("d_v", replace(p, d_v=32), "two widths of a token"),
        ("packed", replace(p, memory="packed", causal=True), "slices of one buffer"),
        ("heads_first", replace(p, memory="htd"), ""),
        ("longest", replace(p, longest=30), "max_seqlen above the longest sequence"),
        ("finite", replace(p, causal=True, finite=True), "a promise"),
        ("own", replace(p, own=True, causal=True, lse=True), "torch's flash attention on a GPU"),
        ("own_window", replace(p, own=True, window=(9, 3)), ""),
        ("one", replace(p, len_q=(65,), causal=True), "a batch of one"),
        ("ones", replace(p, len_q=(1, 1, 1, 1), len_kv=(20, 7, 33, 64)), "one row each"),
    ]


def _packed() -> Iterator[Case]:
    cases = {name: (packed, note) for name, packed, note in _packed_cases()}
    again = {
        BF16: ("causal", "gqa", "bottom_right", "own"),
        F32: ("causal", "cross"),
        F64: ("bottom_right", "packed", "d_v"),
    }
    empty = Packed((40, 0, 16), (30, 20, 0), lse=True)
    for dtype, names in ((F16, tuple(cases)), *again.items()):
        for name in names:
            packed, note = cases[name]
            yield _packed_case(name, replace(packed, dtype=dtype), note)
    note = "a sequence without rows, one without keys"
    yield _packed_case("empty", replace(empty, dtype=F64), note)
    yield _packed_case("empty", empty, note)


def _packed_case(name: str, packed: Packed, note: str) -> Case:
    return Case(
        f"sdpa_varlen-{name}-{SHORT[packed.dtype]}",
        "sdpa_varlen",
        packed.dtype,
        packed.build,
        packed.eager,
        fills=packed.fills,
        terms=max(packed.d, *packed.keys),
        note=note,
    )


@dataclass(frozen=True)
class Paged:
    """Attention of (b, h, s_q, d) to ``len_kv`` keys of each sequence, in pages of a cache.

    ``memory`` is "hpd" for (pages, H, page, D) in memory, "phd" for (pages, page, H, D).
    """

    len_kv: tuple[int, ...] = (50, 7)
    h: int = 8
    h_kv: int = 2
    s_q: int = 1
    d: int = 64
    page: int = 16
    pages: int = 12  # of the whole cache
    columns: int = 4  # of the table
    dtype: torch.dtype = F16
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    len_q: tuple[int, ...] | None = None
    lse: bool = False
    two_tables: bool = False
    memory: str = "hpd"
    finite: bool = False

    def build(self) -> cg.Graph:
        g = cg.Graph("paged")
        batch = len(self.len_kv)
        q = g.input("q", (batch, self.h, self.s_q, self.d), self.dtype)
        shape = (self.pages, self.h_kv, self.page, self.d)
        order = {"hpd": (0, 1, 2, 3), "phd": (0, 2, 1, 3)}[self.memory]
        stride = dense_strides(shape, order)
        cache = [g.input(f"{n}_cache", shape, self.dtype, stride=stride) for n in "kv"]
        table = g.input("table", (batch, self.columns), torch.int32)
        options: dict[str, Any] = {"is_causal": self.causal, "window": self.window}
        options["finite_padding"] = self.finite
        lengths = g.input("len_kv", (batch,), torch.int32)
        if self.two_tables:
            options["page_table_v"] = g.input("table_v", (batch, self.columns), torch.int32)
        if self.len_q is not None:
            options["seq_len_q"] = g.input("len_q", (batch,), torch.int32)
        result = g.sdpa_paged(q, *cache, table, lengths, return_lse=self.lse, **options)
        for name, value in zip(("o", "lse"), result if self.lse else (result,), strict=False):
            g.output(name, value)
        return g

    def eager(self, t: Tensors) -> Tensors:
        """The pages of one sequence after the other, put behind each other."""
        outs, logs = [], []
        for batch, keys in enumerate(self.len_kv):
            rows = self.s_q if self.len_q is None else self.len_q[batch]
            k, v = (
                torch.cat(
                    [t[f"{n}_cache"][page] for page in t[table][batch, : -(-keys // self.page)]], 1
                )
                for n, table in (("k", "table"), ("v", "table_v" if self.two_tables else "table"))
            )
            one = Attention(
                *(1, self.h, self.h_kv, rows, keys, self.d, None, self.dtype),
                causal=self.causal,
                alignment="bottom_right",
                window=self.window,
                lse=True,
            )
            many = {"q": t["q"][batch : batch + 1, :, :rows], "k": k[None, :, :keys]}
            done = one.eager({**many, "v": v[None, :, :keys]})
            rest = self.s_q - rows
            outs.append(F.pad(done["o"], (0, 0, 0, rest)))
            logs.append(F.pad(done["lse"], (0, rest), value=-math.inf))
        made = {"o": torch.cat(outs)}
        return {**made, "lse": torch.cat(logs)} if self.lse else made

    def _table(self, gen: torch.Generator, shape: Shape) -> torch.Tensor:
        """Pages in any order, each once; past the pages of a sequence any number."""
        order = torch.randperm(self.pages, generator=gen).double()
        made = torch.full(shape, float(self.pages - 1), dtype=F64)
        used = 0
        for batch, keys in enumerate(self.len_kv):
            many = -(-keys // self.page)
            made[batch, :many] = order[used : used + many]
            used += many
        return made

    @property
    def fills(self) -> dict[str, Fill]:
        fills = {"table": self._table, "table_v": self._table, "len_kv": exactly(self.len_kv)}
        return fills if self.len_q is None else {**fills, "len_q": exactly(self.len_q)}


def _paged() -> Iterator[Case]:
    p = Paged()
    prefill = replace(p, s_q=32, len_kv=(50, 33), causal=True)
    cases = [
        ("decode", p, "one new token behind a cache"),
        ("decode_lse", replace(p, lse=True), ""),
        ("decode_mha", replace(p, h=4, h_kv=4, d=128), ""),
        ("decode_phd", replace(p, memory="phd"), "(pages, page, H, D), as vLLM's caches"),
        ("decode_two_tables", replace(p, two_tables=True), ""),
        ("decode_page_1", replace(p, page=1, pages=70, columns=60), "pages of one key"),
        ("decode_causal", replace(p, causal=True), "the last row sees every key"),
        ("decode_window", replace(p, window=(20, 0)), ""),
        ("prefill", prefill, "several rows behind a cache"),
        ("prefill_lengths", replace(prefill, len_q=(32, 20), lse=True), ""),
        ("prefill_full", replace(prefill, causal=False), ""),
        ("prefill_finite", replace(prefill, finite=True), "a promise"),
    ]
    for name, paged, note in cases:
        yield _paged_case(name, paged, note)
    for dtype, many in {BF16: ("decode", "prefill"), F32: ("decode", "prefill"), F64: None}.items():
        for name, paged, note in cases:
            if many is None or name in many:
                yield _paged_case(name, replace(paged, dtype=dtype), note)


def _paged_case(name: str, paged: Paged, note: str) -> Case:
    return Case(
        f"sdpa_paged-{name}-{SHORT[paged.dtype]}",
        "sdpa_paged",
        paged.dtype,
        paged.build,
        paged.eager,
        fills=paged.fills,
        terms=max(paged.d, *paged.len_kv),
        note=note,
    )


def _blocks() -> Iterator[Case]:
    """Attention under a mask of blocks, whole ones and cut ones."""

    def build(dtype: torch.dtype) -> cg.Graph:
        g = cg.Graph("blocks")
        q, k, v = (g.input(name, (2, 4, 80, 64), dtype) for name in "qkv")
        mask = g.block_mask(g.input("blocks", (2, 1, 3, 3), torch.bool), 80, 80, 32)
        g.output("o", g.sdpa(q, k, v, mask))
        return g

    def eager(t: Tensors) -> Tensors:
        mask = t["blocks"].repeat_interleave(32, -2).repeat_interleave(32, -1)[..., :80, :80]
        return {"o": F.scaled_dot_product_attention(t["q"], t["k"], t["v"], mask)}

    fills = {"blocks": exactly([1, 0, 1, 0, 1, 0, 1, 1, 0] * 2)}
    for dtype in (F16, BF16, F32, F64):
        made = lambda dtype=dtype: build(dtype)  # noqa: E731
        yield Case(f"sdpa-block_mask-{SHORT[dtype]}", "sdpa", dtype, made, eager, fills, terms=80)


# -- tables of inputs ------------------------------------------------------------------------------

Inputs = Mapping[str, tuple[Shape, torch.dtype, Layout]]
Declare = Callable[[cg.Graph, dict[str, cg.Value]], dict[str, cg.Value]]
Eager = Callable[[Tensors], Tensors]


def _table_case(
    family: str,
    name: str,
    inputs: Inputs,
    declare: Declare,
    eager: Eager,
    fills: Mapping[str, Fill] | None = None,
    note: str = "",
    terms: int = 1,
    result: torch.dtype | None = None,
    **placed: Any,
) -> Case:
    """``result`` is the dtype of every output, ``placed`` are more keywords of ``Graph.output``."""
    dtype = next(iter(inputs.values()))[1]

    def build() -> cg.Graph:
        g = cg.Graph(family)
        values = {
            key: g.input(key, shape, kind, **_at(layout))
            for key, (shape, kind, layout) in inputs.items()
        }
        for key, value in declare(g, values).items():
            g.output(key, value, dtype=result, **placed)
        return g

    return Case(
        f"{family}-{name}-{SHORT[dtype]}",
        family,
        dtype,
        build,
        eager,
        fills or {},
        terms=terms,
        note=note,
    )


# -- matrix products -------------------------------------------------------------------------------


def _product_case(
    name: str,
    x: Shape,
    y: Shape,
    dtype: torch.dtype,
    x_at: Layout = None,
    y_at: Layout = None,
    more: Inputs | None = None,
    declare: Declare = lambda g, v: {"z": v["x"] @ v["y"]},
    eager: Eager = lambda t: {"z": t["x"] @ t["y"]},
    note: str = "",
    **placed: Any,
) -> Case:
    inputs = {"x": (x, dtype, x_at), "y": (y, dtype, y_at), **(more or {})}
    fills = {"y": normal(1.0 / math.sqrt(max(1, x[-1])))}
    return _table_case("matmul", name, inputs, declare, eager, fills, note, terms=x[-1], **placed)


def _matmul() -> Iterator[Case]:
    for dtype in (F16, BF16, F32):
        yield _product_case("plain", (64, 32), (32, 48), dtype)
        yield _product_case("odd_sizes", (63, 31), (31, 47), dtype)
        yield _product_case(
            "of_a_linear_layer", (64, 32), (32, 48), dtype, y_at=(1, 32), note="(N, K) in memory"
        )
        yield _product_case("transposed_x", (64, 32), (32, 48), dtype, x_at=(1, 64))
        yield _product_case("batch", (3, 40, 32), (3, 32, 48), dtype)
        yield _product_case(
            "rows_of_a_sequence", (4, 24, 64), (64, 40), dtype, note="two dims of rows fold"
        )
        yield _product_case("two_batch_dims", (2, 3, 40, 32), (2, 3, 32, 24), dtype)
        yield _product_case(
            "bias_gelu",
            (4, 24, 64),
            (64, 40),
            dtype,
            more={"b": ((40,), dtype, None)},
            declare=lambda g, v: {"z": (v["x"] @ v["y"] + v["b"]).gelu()},
            eager=lambda t: {"z": F.gelu(t["x"] @ t["y"] + t["b"])},
        )
    for slope in (0.2, -0.3, 2.0):
        for dtype, result in ((F16, None), (BF16, None), (F16, F32)):
            yield _product_case(
                f"leaky_relu_{slope}{'_float32' * (result is not None)}",
                (96, 64),
                (64, 128),
                dtype,
                declare=lambda g, v, slope=slope: {"z": g.leaky_relu(v["x"] @ v["y"], slope)},  # type: ignore[misc]
                eager=lambda t, slope=slope: {"z": F.leaky_relu(t["x"] @ t["y"], slope)},  # type: ignore[misc]
                result=result,
            )
    yield _product_case(
        "gelu_float32",
        (96, 64),
        (64, 128),
        F16,
        declare=lambda g, v: {"z": (v["x"] @ v["y"]).gelu()},
        eager=lambda t: {"z": F.gelu(t["x"] @ t["y"])},
        result=F32,
    )
    yield _product_case("plain", (6, 8), (8, 5), F64)
    yield _product_case("batch_broadcast", (2, 1, 5, 8), (3, 8, 5), F64)
    yield _product_case(
        "batch_of_y", (40, 32), (3, 32, 48), F16, note="every product with the same x"
    )
    yield _product_case("y_per_batch_1", (3, 40, 32), (1, 32, 48), BF16)
    yield _product_case("broadcast_both_ways", (2, 1, 40, 32), (1, 3, 32, 24), F16)
    yield _product_case(
        "expanded_x", (3, 40, 32), (3, 32, 48), F16, x_at=(0, 32, 1), note="stride 0"
    )
    yield _product_case(
        "heads_of_a_sequence",
        (2, 4, 24, 32),
        (2, 4, 32, 24),
        BF16,
        x_at=(3072, 32, 128, 1),
        y_at=(3072, 32, 1, 128),
        note="q k^T of (B, S, H, D) in memory: the batch dims do not merge",
    )
    yield _product_case("slice_of_columns", (64, 32), (32, 48), F16, x_at=(80, 1))
    yield _product_case("slice_of_a_sequence", (4, 24, 64), (64, 40), F16, x_at=(3072, 64, 1))
    yield _product_case("one_row", (1, 64), (64, 48), F16)
    yield _product_case("one_row_apart", (1, 64), (64, 48), F16, x_at=(1, 40))
    yield _product_case("one_column", (40, 64), (64, 1), BF16)
    yield _product_case("outer", (40, 1), (1, 48), F16, note="K = 1")
    yield _product_case("no_terms", (5, 0), (0, 7), F16, note="K = 0 gives zeros")
    yield _product_case("no_rows", (0, 8), (8, 7), F16)
    yield _product_case("long", (16, 4096), (4096, 16), F32)
    yield _product_case(
        "square",
        (48, 48),
        (1, 48),
        F16,
        declare=lambda g, v: {"z": v["x"] @ v["x"] + v["y"]},
        eager=lambda t: {"z": t["x"] @ t["x"] + t["y"]},
        note="one tensor as both operands",
    )
    yield _product_case("column_major", (64, 32), (32, 48), F16, stride=(1, 64))
    yield _product_case(
        "column_major_relu",
        (64, 32),
        (32, 48),
        BF16,
        declare=lambda g, v: {"z": (v["x"] @ v["y"]).relu()},
        eager=lambda t: {"z": F.relu(t["x"] @ t["y"])},
        stride=(1, 64),
    )
    yield _product_case("float32_result", (64, 32), (32, 48), BF16, result=F32)
    yield _product_case(
        "residual",
        (4, 24, 64),
        (64, 40),
        BF16,
        more={"b": ((40,), F32, None), "r": ((4, 24, 40), BF16, None)},
        declare=lambda g, v: {"z": v["r"] + (v["x"] @ v["y"] + v["b"])},
        eager=lambda t: {"z": t["r"] + (t["x"] @ t["y"] + t["b"]).to(t["r"].dtype)},
        note="a float32 bias beside 16-bit data",
        result=BF16,
    )
    yield _product_case(
        "residual_of_a_sequence",
        (4, 24, 64),
        (64, 40),
        F16,
        more={"r": ((24, 40), F16, None)},
        declare=lambda g, v: {"z": v["x"] @ v["y"] + v["r"]},
        eager=lambda t: {"z": t["x"] @ t["y"] + t["r"]},
        note="positions, the same for every sequence: the rows cannot fold",
    )
    yield _product_case(
        "after_relu",
        (64, 32),
        (32, 48),
        F16,
        declare=lambda g, v: {"z": v["x"].relu() @ v["y"]},
        eager=lambda t: {"z": F.relu(t["x"]) @ t["y"]},
        note="a pointwise op before the product",
    )
    yield _product_case(
        "bias_per_column",
        (64, 32),
        (32, 48),
        F16,
        more={"b": ((48,), F16, None)},
        declare=lambda g, v: {"z": (v["x"] @ v["y"]).bias(v["b"]).silu()},
        eager=lambda t: {"z": F.silu(t["x"] @ t["y"] + t["b"])},
        note="the columns are the channels of (N, C)",
    )
    yield _product_case(
        "two_products",
        (64, 32),
        (32, 48),
        F16,
        more={"u": ((32, 48), F16, None)},
        declare=lambda g, v: {"z": (v["x"] @ v["y"]).silu() * (v["x"] @ v["u"])},
        eager=lambda t: {"z": F.silu(t["x"] @ t["y"]) * (t["x"] @ t["u"])},
        note="SwiGLU",
    )


# -- norms over trailing dims ----------------------------------------------------------------------


def _norm_case(
    op: str,
    name: str,
    x: Shape,
    dtype: torch.dtype,
    x_at: Layout = None,
    over: int = 1,
    bias: bool = True,
    params: torch.dtype | None = None,
    w_at: Layout = None,
    eps: float = 1e-5,
    stats: bool = False,
    more: Inputs | None = None,
    after: Callable[[Any, Any], Any] = lambda y, v: y,
    note: str = "",
    **placed: Any,
) -> Case:
    """A norm over the last ``over`` dims; ``after`` works on graph values and tensors alike."""
    shape, kind = x[len(x) - over :], params or dtype
    inputs = {"x": (x, dtype, x_at), "w": (shape, kind, w_at)}
    inputs |= {"b": (shape, kind, w_at)} if bias else {}

    def declare(g: cg.Graph, v: dict[str, cg.Value]) -> dict[str, cg.Value]:
        made = getattr(g, op)(v["x"], v["w"], v.get("b"), eps=eps, return_stats=stats)
        y, *rest = made if stats else (made,)
        return {"y": after(y, v), **dict(zip(("inv_std", "mean"), reversed(rest), strict=False))}

    def eager(t: Tensors) -> Tensors:
        wide, w = t["x"], t["w"].to(t["x"].dtype)
        b = t["b"].to(wide.dtype) if bias else None
        if op == "layer_norm":
            y = F.layer_norm(wide, shape, w, b, eps)
        else:
            y = F.rms_norm(wide, shape, w, eps)
            y = y if b is None else y + b
        done = {"y": after(y, t)}
        if stats:
            dims = tuple(range(len(x) - over, len(x)))
            wide = wide if dtype == F64 or wide.dtype == F64 else wide.float()
            mean = wide.mean(dims, keepdim=True)
            centred = wide - mean if op == "layer_norm" else wide
            done["inv_std"] = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
            if op == "layer_norm":
                done["mean"] = mean
        return done

    fills = {"x": normal(1.5, 0.4), "w": uniform(0.5, 1.5)}
    inputs |= more or {}
    return _table_case(
        op, name, inputs, declare, eager, fills, note, terms=math.prod(shape), **placed
    )


def _norms() -> Iterator[Case]:
    for op in ("layer_norm", "rms_norm"):
        for dtype in (F16, BF16, F32):
            yield _norm_case(op, "rows", (64, 768), dtype)
            yield _norm_case(op, "sequence", (2, 24, 256), dtype, bias=False)
            yield _norm_case(op, "odd_sizes", (5, 7, 77), dtype)
            yield _norm_case(op, "stats", (4, 12, 128), dtype, stats=True)
        yield _norm_case(op, "stats", (3, 5, 16), F64, stats=True)
        for dtype in (F16, BF16):
            yield _norm_case(op, "float32_params", (48, 256), dtype, params=F32)
        yield _norm_case(op, "short_rows", (6, 3, 40, 32), F16)
        yield _norm_case(op, "short_rows", (6, 3, 40, 64), BF16, x_at=(40 * 576, 64, 576, 1))
        yield _norm_case(op, "short_rows_float32_params", (48, 128), F16, params=F32)
        yield _norm_case(op, "one_row", (512,), F16, note="rank 1: no dim before the weight's")
        yield _norm_case(op, "two_dims", (8, 12, 16, 32), F16, over=2)
        yield _norm_case(op, "three_dims", (6, 4, 8, 8), BF16, over=3)
        yield _norm_case(
            op,
            "three_dims_channels_last",
            (6, 4, 8, 8),
            F16,
            x_at="channels_last",
            w_at=(1, 32, 4),
            over=3,
            note="x and the weight in one order that is not the logical one",
        )
        yield _norm_case(
            op,
            "weight_in_another_order",
            (6, 4, 8, 8),
            F16,
            x_at="channels_last",
            over=3,
            note="x and the weight lie in different orders",
        )
        yield _norm_case(
            op, "sequence_first", (2, 24, 256), F16, x_at=(256, 512, 1), note="(S, B, D) in memory"
        )
        yield _norm_case(
            op, "columns", (24, 64), F16, x_at=(1, 24), note="the normalised dim is not the fastest"
        )
        yield _norm_case(
            op, "gaps", (24, 64), F16, x_at=(96, 1), note="a slice: gaps between the rows"
        )
        yield _norm_case(op, "eps", (24, 256), BF16, eps=0.5)
        yield _norm_case(op, "eps_0", (24, 256), F16, eps=0.0)
        yield _norm_case(op, "one_column", (24, 1), F32, note="a norm of one number")
        yield _norm_case(op, "no_rows", (0, 64), F16)
        yield _norm_case(op, "to_float16", (24, 256), F32, result=F16)
        yield _norm_case(
            op,
            "silu",
            (4, 12, 256),
            F16,
            after=lambda y, v: y.silu() if isinstance(y, cg.Value) else F.silu(y),
        )
        twice: dict[str, Callable[[Any, Any], Any]] = {
            "squared": lambda y, v: y * y,
            "doubled": lambda y, v: y + y,
            "squared_shifted": lambda y, v: y * y - 0.5,
        }
        for name, after in twice.items():
            yield _norm_case(op, name, (96, 256), F16, after=after)
        second: dict[str, Callable[[Any, Any], Any]] = {
            "taken_away": lambda y, v: v["r"] - y,
            "as_a_factor": lambda y, v: v["r"] * y,
            "behind_a_gate": lambda y, v: (
                (v["r"].silu() if isinstance(y, cg.Value) else F.silu(v["r"])) * y
            ),
        }
        for name, after in second.items():
            more: Inputs = {"r": ((96, 256), F16, None)}
            yield _norm_case(op, name, (96, 256), F16, more=more, after=after)
        yield _norm_case(
            op,
            "residual",
            (4, 12, 256),
            BF16,
            more={"r": ((4, 12, 256), BF16, None)},
            after=lambda y, v: y + v["r"],
        )
        yield _norm_case(
            op,
            "gate_per_row",
            (4, 12, 256),
            F16,
            more={"r": ((4, 12, 1), F16, None)},
            after=lambda y, v: y * v["r"],
        )
        yield _norm_case(
            op,
            "scale_per_sequence",
            (4, 12, 256),
            F16,
            more={"r": ((4, 1, 1), F16, None)},
            after=lambda y, v: y * v["r"],
            note="broadcasts within the rows",
        )


# -- instance and group norms ----------------------------------------------------------------------


@dataclass(frozen=True)
class ImageNorm:
    """A norm over the elements of each channel, or of ``groups`` groups of channels, of an image.

    ``params`` is the dtype of weight and bias, None for none; ``residual`` is added in front.
    """

    x: Shape
    dtype: torch.dtype = F16
    groups: int = 0
    params: torch.dtype | None = F32
    at: Layout = None
    eps: float = 1e-5
    residual: bool = False
    act: str | None = None
    stats: bool = False
    affine: bool = False  # by a factor and a shift for each channel

    def declare(self, g: cg.Graph) -> dict[str, cg.Value]:
        """x, weight and bias, and the residual."""
        made = {"x": g.input("x", self.x, self.dtype, **_at(self.at))}
        if self.params is not None:
            made |= {key: g.input(key, (self.x[1],), self.params) for key in ("w", "b")}
        if self.residual:
            made["z"] = g.input("z", self.x, self.dtype, **_at(self.at))
        return made

    def build(self) -> cg.Graph:
        """The graph of the forward."""
        g = cg.Graph("norm")
        v = self.declare(g)
        x = v["x"] + v["z"] if self.residual else v["x"]
        params = (v.get("w"), v.get("b"))
        if self.stats:
            y, mean, inv_std = g.instance_norm(x, *params, eps=self.eps, return_stats=True)
            g.output("mean", mean)
            g.output("inv_std", inv_std)
        elif self.affine:
            shift, factor = g.group_affine(x, self.groups, *params[:1], eps=self.eps)
            y = g.scale(g.bias(x, shift), factor)
            if params[1] is not None:
                column = (*self.x[:2], *(1,) * (len(self.x) - 2))
                y = g.bias(y, g.reshape(g.expand(params[1], self.x[:2], (1,)), column))
        elif self.groups:
            y = g.group_norm(x, self.groups, *params, eps=self.eps)
        else:
            y = g.instance_norm(x, *params, eps=self.eps)
        g.output("y", g.activation(y, self.act))
        return g

    def forward(self, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        """torch's own norm, in the wider of the dtypes of x and the parameters."""
        wide = torch.promote_types(x.dtype, params[0].dtype) if params else x.dtype
        w, b = (p.to(wide) for p in params) if params else (None, None)
        groups = self.groups or self.x[1]
        return F.group_norm(x.to(wide), groups, w, b, self.eps).to(x.dtype)

    def eager(self, t: Tensors) -> Tensors:
        """What a user of torch would write."""
        x = t["x"] + t["z"] if self.residual else t["x"]
        y = self.forward(x, *(t[key] for key in ("w", "b") if key in t))
        made = {"y": activate(y, self.act, {})}
        if self.stats:
            wide = x.to(torch.promote_types(x.dtype, F32))
            dims = tuple(range(2, x.dim()))
            var, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
            made |= {"mean": mean, "inv_std": torch.rsqrt(var + self.eps)}
        return made

    def backward(self) -> cg.Graph:
        """The gradient of instance norm, with the forward that gives its statistics."""
        g = cg.Graph("norm_gradient")
        v = self.declare(g)
        dy = g.input("dy", self.x, self.dtype, **_at(self.at))
        params = (v.get("w"), v.get("b"))
        y, mean, inv_std = g.instance_norm(v["x"], *params, eps=self.eps, return_stats=True)
        g.output("y", y)
        grads = g.instance_norm_backward(dy, v["x"], mean, inv_std, v.get("w"))
        many = grads if isinstance(grads, tuple) else (grads,)
        for key, grad in zip(("dx", "dw", "db"), many, strict=False):
            g.output(key, grad)
        return g

    def eager_backward(self, t: Tensors) -> Tensors:
        """torch autograd."""
        of = [t[key] for key in ("x", "w", "b") if key in t]
        grads = _grads(self.forward, of, t["dy"])
        made = dict(zip(("dx", "dw", "db"), grads, strict=False))
        return {**made, "y": self.forward(*of)}


_IMAGE_FILLS: Mapping[str, Fill] = {"w": uniform(0.5, 1.5), "x": normal(2.0, 0.5)}
# Far from 0 beside their deviation, where what is added must not be rounded to 16 bits.
_FAR_FILLS: Mapping[str, Fill] = {"w": uniform(0.5, 1.5), "x": normal(1.0, 30.0)}


def _normalized(
    name: str,
    x: Shape,
    dtype: torch.dtype,
    x_at: Layout = None,
    eps: float = 1e-12,
    mean: float = 0.0,
    note: str = "",
    factor: Shape | None = None,
) -> Case:
    """Rows by their norms, and behind them a product with numbers of ``factor``'s shape."""
    inputs: dict[str, tuple[Shape, torch.dtype, Layout]] = {"x": (x, dtype, x_at)}
    inputs |= {} if factor is None else {"f": (factor, dtype, None)}

    def declare(g: cg.Graph, v: dict[str, cg.Value]) -> dict[str, cg.Value]:
        y = g.normalize(v["x"], eps=eps)
        return {"y": y if factor is None else g.mul(y, v["f"])}

    def eager(t: Tensors) -> Tensors:
        y = F.normalize(t["x"], dim=-1, eps=eps)
        return {"y": y if factor is None else y * t["f"]}

    fills = {"x": normal(1.5, mean), "f": uniform(0.5, 2.0)}
    return _table_case("normalize", name, inputs, declare, eager, fills, note, terms=x[-1])


def _normalize() -> Iterator[Case]:
    for dtype in (F16, BF16, F32):
        yield _normalized("rows", (48, 64), dtype)
        yield _normalized("one_row", (64,), dtype)
        yield _normalized("odd_sizes", (5, 7, 77), dtype)
    yield _normalized("rows", (5, 16), F64)
    for dtype in (F16, BF16):
        yield _normalized(
            "heads", (8, 3, 16, 32), dtype, x_at=(16 * 288, 32, 288, 1), factor=(1, 3, 1, 32)
        )
    yield _normalized("one_head", (8, 1, 16, 32), F16, x_at=(16 * 96, 32, 96, 1))
    yield _normalized("heads_first", (3, 40, 32), F16)
    yield _normalized("beyond_16_bits", (40, 32), F16, mean=400.0, note="squares over 65504")
    yield _normalized("large_eps", (40, 32), F16, eps=8.5, note="about half of the norms are less")
    yield _normalized("scaled", (2, 4, 24, 64), F16, factor=(64,))


def _image_norms() -> Iterator[Case]:
    image, last = (3, 16, 12, 10), "channels_last"
    norms = {
        **{
            f"instance_{SHORT[dtype]}_{name}": ImageNorm(image, dtype, params=params, at=at)
            for dtype in (F16, BF16, F32)
            for name, params, at in (
                ("nchw", F32, None),
                ("nhwc", dtype, last),
                ("without_affine", None, last),
            )
        },
        "instance_relu": ImageNorm(image, act="relu", at=last),
        "instance_residual_silu": ImageNorm(image, residual=True, act="silu"),
        "instance_stats": ImageNorm(image, stats=True, at=last),
        "instance_stats_relu": ImageNorm(image, BF16, stats=True, act="relu"),
        "instance_line": ImageNorm((3, 16, 50)),
        "instance_volume": ImageNorm((2, 8, 5, 6, 7), at=last, eps=1e-3),
        "instance_gaps": ImageNorm(image, at=(4000, 200, 12, 1)),
        "instance_float64": ImageNorm(image, F64, params=F64),
        "instance_no_images": ImageNorm((0, 16, 12, 10)),
        **{
            f"group_{SHORT[dtype]}": ImageNorm(image, dtype, 4, params=params)
            for dtype, params in ((F16, F32), (BF16, BF16), (F32, F32))
        },
        "group_residual_silu": ImageNorm(image, BF16, 4, params=BF16, residual=True, act="silu"),
        "group_channels_last": ImageNorm(image, F16, 4, at=last),
        "group_one": ImageNorm(image, F16, 1),
        "group_each": ImageNorm(image, F16, 16),
        "group_without_affine": ImageNorm(image, F32, 4, params=None),
        "group_line": ImageNorm((3, 16, 50), F32, 4),
        "group_flat": ImageNorm((6, 64), F32, 4),
        "group_float64": ImageNorm(image, F64, 4, params=F64),
    }
    affine = {
        **{
            SHORT[dtype]: ImageNorm(image, dtype, 4, params=params, at=last)
            for dtype, params in ((F16, F16), (BF16, F32), (F32, F32), (F64, F64))
        },
        "silu": ImageNorm(image, F16, 8, params=F16, act="silu", at=last),
        "one": ImageNorm(image, BF16, 1, params=BF16, at=last),
        "each": ImageNorm(image, F16, 16, params=None, at=last),
        "bare": ImageNorm(image, F16, 4, params=None, at=last),
        "single": ImageNorm((1, 64, 6, 8), F16, 32, params=F16, at=last),
        "volume": ImageNorm((2, 8, 5, 6, 7), F16, 4, params=F16, at=last),
        "contiguous": ImageNorm(image, F16, 4, params=F16),
    }
    affine = {name: replace(norm, affine=True) for name, norm in affine.items()}
    for family, many in (("image_norm", norms), ("group_affine", affine)):
        for name, norm in many.items():
            terms = math.prod(norm.x) // max(norm.x[0], 1)
            far = norm.affine and norm.dtype in (F16, BF16)
            fills = _FAR_FILLS if far else _IMAGE_FILLS
            label = f"{family}-{name}"
            yield Case(label, family, norm.dtype, norm.build, norm.eager, fills, terms=terms)


def _image_norm_gradients() -> Iterator[Case]:
    image, last = (3, 16, 12, 10), "channels_last"
    norms = {
        **{
            f"{SHORT[dtype]}_{name}": ImageNorm(image, dtype, params=params, at=at)
            for dtype in (F16, BF16, F32)
            for name, params, at in (("nchw", F32, None), ("nhwc", dtype, last))
        },
        "without_affine": ImageNorm(image, F16, params=None),
        "line": ImageNorm((3, 16, 50), F16),
        "volume": ImageNorm((2, 8, 5, 6, 7), BF16, at=last),
        "float64": ImageNorm(image, F64, params=F64, at=last),
    }
    for name, norm in norms.items():
        yield _gradient_case(
            f"instance_norm_{name}",
            norm.dtype,
            norm.backward,
            norm.eager_backward,
            _IMAGE_FILLS,
            terms=math.prod(norm.x),
        )


# -- views and concatenation -----------------------------------------------------------------------


def _view_case(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    view: Callable[[Any], Any],
    at: Layout = None,
    note: str = "",
) -> Case:
    """``view`` works on graph values and on tensors alike."""
    return _table_case(
        "view",
        name,
        {"x": (shape, dtype, at)},
        lambda g, v: {"y": view(v["x"])},
        lambda t: {"y": view(t["x"])},
        note=note,
    )


def _sliced(x: Any, dim: int, start: int, stop: int | None, step: int = 1) -> Any:
    if isinstance(x, cg.Value):
        return x.slice(dim, start, stop, step)
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, stop, step),)]


def _joined(
    name: str,
    shapes: Sequence[Shape],
    dim: int,
    dtype: torch.dtype,
    at: Sequence[Layout] | None = None,
    note: str = "",
) -> Case:
    names = [f"x{place}" for place in range(len(shapes))]
    return _table_case(
        "concat",
        name,
        {
            key: (shape, dtype, layout)
            for key, shape, layout in zip(names, shapes, at or [None] * len(names), strict=True)
        },
        lambda g, v: {"y": g.concat([v[key] for key in names], dim)},
        lambda t: {"y": torch.cat([t[key] for key in names], dim)},
        note=note,
    )


def _mlp_case(dtype: torch.dtype, gate: str | None) -> Case:
    """Both layers of a transformer's feed-forward part; SwiGLU and GeGLU have a gate."""
    act = gate or "gelu"
    names = ("up", "gate") if gate else ("up",)
    shapes: Inputs = {
        "x": ((4, 24, 64), dtype, None),
        **{name: ((96, 64), dtype, None) for name in names},
        **{f"{name}_bias": ((96,), dtype, None) for name in names},
        "down": ((40, 96), dtype, None),
        "down_bias": ((40,), dtype, None),
    }

    def declare(g: cg.Graph, v: dict[str, cg.Value]) -> dict[str, cg.Value]:
        more = {key: v[key] for key in ("gate", "gate_bias") if key in v}
        y = g.mlp(v["x"], v["up"], v["up_bias"], v["down"], v["down_bias"], activation=act, **more)
        return {"y": y}

    def eager(t: Tensors) -> Tensors:
        inner = F.linear(t["x"], t["up"], t["up_bias"])
        if gate is None:
            inner = F.gelu(inner)
        else:
            inner = ACTIVATIONS[gate](F.linear(t["x"], t["gate"], t["gate_bias"])) * inner
        return {"y": F.linear(inner, t["down"], t["down_bias"])}

    fills = {name: normal(1.0 / 8.0) for name in ("up", "gate")} | {"down": normal(0.1)}
    name = {None: "mlp", "silu": "mlp_swiglu", "gelu": "mlp_geglu"}[gate]
    return _table_case("view", name, shapes, declare, eager, fills, terms=96)


def _torchs_own() -> Iterator[Case]:
    """Ops that only torch has, between ops that cuDNN has."""
    image, last = (2, 16, 12, 10), "channels_last"
    x, pair = ("tensor", 0), ("list", 2, 2)
    for dtype in (F16, BF16, F32, F64):
        yield _table_case(
            "aten",
            "pad",
            {"x": (image, dtype, last)},
            lambda g, v: {
                "y": g.relu(
                    g.aten(
                        [v["x"] * 2.0],
                        "aten.constant_pad_nd.default",
                        (x, ("list", 1, 2, 0, 3), 0.25),
                    )
                )
            },
            lambda t: {"y": F.relu(F.pad(t["x"] * 2.0, (1, 2, 0, 3), value=0.25))},
        )
        yield _table_case(
            "aten",
            "softmax",
            {"x": ((6, 40), dtype, None)},
            lambda g, v: {"y": g.aten([v["x"]], "aten._softmax.default", (x, -1, False))},
            lambda t: {"y": torch.softmax(t["x"], -1)},
        )
    yield _table_case(
        "aten",
        "two_results",
        {"x": (image, F16, last)},
        lambda g, v: dict(
            zip(
                ("y", "at"),
                g.aten([v["x"]], "aten.max_pool2d_with_indices.default", (x, pair, pair)),
                strict=True,
            )
        ),
        lambda t: dict(zip(("y", "at"), F.max_pool2d(t["x"], 2, return_indices=True), strict=True)),
    )
    yield _table_case(
        "aten",
        "gather",
        {"x": ((5, 8), F16, None), "at": ((3, 4), torch.int64, None)},
        lambda g, v: {
            "y": g.neg(
                g.aten([v["x"], v["at"]], "aten.embedding.default", (("tensor", 0), ("tensor", 1)))
            )
        },
        lambda t: {"y": -F.embedding(t["at"], t["x"])},
        {"at": small_whole(0, 5)},
    )
    yield _table_case(
        "aten",
        "cast",
        {"z": ((5, 8), F16, None), "x": ((5, 8), F32, None)},
        lambda g, v: {
            "y": g.relu(
                g.aten([v["x"]], "aten._to_copy.default", (x,), (("dtype", ("dtype", "float16")),))
                + v["z"]
            )
        },
        lambda t: {"y": F.relu(t["x"].to(t["z"].dtype) + t["z"])},
    )


def _views() -> Iterator[Case]:
    image, last = (2, 16, 6, 10), "channels_last"
    for dtype in (F16, BF16, F32):
        yield _view_case("flatten", image, dtype, lambda x: x.reshape((2, -1)))
        yield _view_case("heads", (2, 24, 64), dtype, lambda x: x.reshape((2, 24, 4, 16)))
        yield _view_case("transpose", (24, 40), dtype, lambda x: x.transpose(0, 1))
        yield _view_case("last_two", (2, 3, 24, 40), dtype, lambda x: x.transpose(-1, -2))
        yield _view_case("to_nhwc", image, dtype, lambda x: x.permute((0, 2, 3, 1)), last)
        yield _view_case("reverse", (3, 5, 7), dtype, lambda x: x.permute((2, 1, 0)))
        yield _view_case("channels", image, dtype, lambda x: _sliced(x, 1, 4, 12))
        yield _view_case("crop", image, dtype, lambda x: _sliced(_sliced(x, 2, 1, -1), 3, 2, -2))
        yield _joined("channels", [(2, 16, 6, 10), (2, 8, 6, 10), (2, 1, 6, 10)], 1, dtype)
        yield _joined(
            "channels_last", [(2, 16, 6, 10), (2, 8, 6, 10)], 1, dtype, (last, last), "stays so"
        )
    yield _view_case("flatten_channels_last", image, F16, lambda x: x.reshape((2, -1)), last)
    yield _view_case(
        "tokens_of_channels_last",
        image,
        F16,
        lambda x: x.reshape((2, 16, 60)).transpose(1, 2),
        last,
        "no element moves: (N, HW, C) in memory",
    )
    yield _view_case("split_a_dim", (24, 10), F16, lambda x: x.reshape((2, 3, 4, 10)), (1, 24))
    yield _view_case("merge_apart", (4, 6), F16, lambda x: x.reshape((24,)), (10, 1), "a copy")
    yield _view_case("ones", (1, 24, 1), F16, lambda x: x.reshape((24, 1, 1, 1)))
    yield _view_case("scalar", (1, 1), F32, lambda x: x.reshape(()))
    yield _view_case("empty", (0, 6), F16, lambda x: x.reshape((3, 0, 2)))
    yield _view_case("expanded", (4, 6), F16, lambda x: x.reshape((2, 2, 6)), (0, 1), "stride 0")
    yield _view_case("same", (4, 6), F64, lambda x: x.reshape((4, 6)).transpose(0, 0))
    yield _view_case("expanded_transpose", (4, 6), F16, lambda x: x.transpose(0, 1), (0, 1))
    yield _view_case("of_slice", (4, 6), F16, lambda x: x.transpose(0, 1), (10, 1), "gaps")
    yield _view_case("every_third", (4, 20), F16, lambda x: _sliced(x, -1, 1, None, 3), None)
    yield _view_case("from_the_end", (20, 4), BF16, lambda x: _sliced(x, 0, -5, 100))
    yield _view_case("nothing", (4, 6), F16, lambda x: _sliced(x, 0, 3, 2), None, "empty")
    yield _view_case("one_channel", image, F32, lambda x: _sliced(x, 1, 3, 4), last)
    yield _view_case("permute_scalar", (), F32, lambda x: x.permute(()))
    yield _view_case("five_dims", (2, 3, 4, 5, 6), F16, lambda x: x.permute((4, -2, 0, 1, 2)))
    yield _joined("rows", [(3, 8), (5, 8)], 0, F16)
    yield _joined("last", [(3, 8), (3, 1), (3, 7)], -1, BF16)
    yield _joined("one", [(3, 8)], 0, F16, note="a list of one")
    yield _joined("ten", [(2, place, 3) for place in range(10)], 1, F32, note="one is empty")
    yield _joined("layouts", [image, image], 1, F16, (last, None), "do not agree")
    yield _joined("float64", [(2, 3), (2, 4)], 1, F64)
    yield _joined(
        "one_channel", [(2, 16, 6, 10), (2, 1, 6, 10)], 1, F16, (last, None), "says no layout"
    )
    yield _joined("slices", [(3, 8), (4, 8)], 0, F16, ((16, 1), (8, 1)))
    yield _table_case(
        "view",
        "bools",
        {"x": ((4, 6), F16, None), "y": ((6, 4), F16, None)},
        lambda g, v: {"z": g.concat([(v["x"] > 0.0).transpose(0, 1), v["y"] > 0.0], 1)},
        lambda t: {"z": torch.cat([(t["x"] > 0.0).transpose(0, 1), t["y"] > 0.0], 1)},
        note="bools are moved as well",
    )
    yield _table_case(
        "concat",
        "twice",
        {"x": ((4, 6), F16, None)},
        lambda g, v: {"y": g.concat([v["x"], v["x"]])},
        lambda t: {"y": torch.cat([t["x"], t["x"]])},
        note="one tensor twice",
    )
    for dtype in (F16, BF16, F32):
        yield _table_case(
            "view",
            "linear",
            {
                "x": ((4, 24, 64), dtype, None),
                "w": ((40, 64), dtype, None),
                "b": ((40,), dtype, None),
            },
            lambda g, v: {"y": g.linear(v["x"], v["w"], v["b"]).gelu()},
            lambda t: {"y": F.gelu(F.linear(t["x"], t["w"], t["b"]))},
            {"w": normal(1.0 / 8.0)},
            terms=64,
        )
        yield _table_case(
            "view",
            "norm_of_channels",
            {
                "x": ((2, 16, 6, 10), dtype, "channels_last"),
                "w": ((32, 16, 3, 3), dtype, "channels_last"),
                "gamma": ((32,), dtype, None),
                "beta": ((32,), dtype, None),
            },
            lambda g, v: {
                "y": g.conv(v["x"], v["w"], padding=1)
                .permute((0, 2, 3, 1))
                .layer_norm(v["gamma"], v["beta"], eps=1e-6)
                .permute((0, 3, 1, 2))
            },
            lambda t: {
                "y": F.layer_norm(
                    F.conv2d(t["x"], t["w"], padding=1).permute(0, 2, 3, 1),
                    (32,),
                    t["gamma"],
                    t["beta"],
                    1e-6,
                ).permute(0, 3, 1, 2)
            },
            {"w": normal(1.0 / 12.0)},
            terms=144,
            note="a ConvNeXt stem",
        )
    yield _table_case(
        "view",
        "linear_without_bias",
        {"x": ((24, 64), F16, None), "w": ((40, 64), F16, None)},
        lambda g, v: {"y": g.linear(v["x"], v["w"])},
        lambda t: {"y": F.linear(t["x"], t["w"])},
        {"w": normal(1.0 / 8.0)},
        terms=64,
    )
    yield _table_case(
        "view",
        "swiglu",
        {
            "x": ((4, 24, 64), BF16, None),
            "gate": ((64, 48), BF16, None),
            "up": ((64, 48), BF16, None),
        },
        lambda g, v: {"y": g.swiglu(v["x"], v["gate"], v["up"])},
        lambda t: {"y": F.silu(t["x"] @ t["gate"]) * (t["x"] @ t["up"])},
        {"gate": normal(1.0 / 8.0), "up": normal(1.0 / 8.0)},
        terms=64,
    )
    for gate in (None, "silu", "gelu"):
        for dtype in (F16, BF16, F32, F64):
            yield _mlp_case(dtype, gate)


# -- pooling and interpolation ---------------------------------------------------------------------

_TORCH_POOLS: Mapping[str, Sequence[Callable[..., torch.Tensor]]] = {
    "max_pool": (F.max_pool1d, F.max_pool2d, F.max_pool3d),
    "avg_pool": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    "adaptive_avg_pool": (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    "adaptive_max_pool": (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    "interpolate": (F.interpolate,) * 3,
}


def _resample_case(
    op: str,
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    at: Layout = None,
    note: str = "",
    backward: bool = False,
    **attrs: Any,
) -> Case:
    """A pool or an interpolation of x, or its gradient; ``attrs`` go by name to both sides."""
    run = _TORCH_POOLS[op][len(shape) - 3]

    def eager(t: Tensors) -> Tensors:
        if not backward:
            return {"y": run(t["x"], **attrs)}
        x = t.get("x", torch.zeros(shape, dtype=t["dy"].dtype, device=t["dy"].device))
        return {"dx": _grads(lambda x: run(x, **attrs), [x], t["dy"])[0]}

    def build() -> cg.Graph:
        g = cg.Graph(op)
        if not backward:
            g.output("y", getattr(g, op)(g.input("x", shape, dtype, **_at(at)), **attrs))
            return g
        out = getattr(cg.Graph(), op)  # its result's shape is that of dy
        dy = g.input("dy", out(out.__self__.input("x", shape, dtype), **attrs).shape, dtype)
        more = {} if "max" in op else {"input_size": shape[2:]}
        x = [g.input("x", shape, dtype, **_at(at))] if "max" in op else []
        g.output("dx", getattr(g, f"{op}_backward")(dy, *x, **attrs, **more))
        return g

    if backward:
        return _gradient_case(f"{op}_backward_{name}", dtype, build, eager, note=note, terms=64)
    label = f"resample-{op}_{name}-{SHORT[dtype]}"
    return Case(label, "resample", dtype, build, eager, note=note, terms=64)


def _resamples() -> Iterator[Case]:
    image, volume, line, last = (2, 16, 12, 9), (2, 4, 5, 6, 8), (2, 16, 30), "channels_last"
    window = {"kernel_size": 3, "stride": 2, "padding": 1}
    for dtype in (F16, BF16, F32):
        for op in ("max_pool", "avg_pool"):
            yield _resample_case(op, "3x3", image, dtype, **window)
            yield _resample_case(op, "3x3_channels_last", image, dtype, last, **window)
        yield _resample_case("adaptive_avg_pool", "of_unequal", image, dtype, last, output_size=5)
        for mode in ("nearest", "bilinear"):
            yield _resample_case(
                "interpolate", f"{mode}_x2", image, dtype, last, scale_factor=2, mode=mode
            )
    for op in ("max_pool", "avg_pool"):
        yield _resample_case(op, "line", line, F16, kernel_size=4)
        yield _resample_case(op, "line_last", line, F16, last, kernel_size=4, padding=2)
        # torch averages volumes of float16 on no CPU.
        deep = F32 if op == "avg_pool" else F16
        yield _resample_case(op, "volume", volume, deep, kernel_size=(1, 2, 3), stride=1)
        yield _resample_case(op, "volume_last", volume, deep, last, **window)
        yield _resample_case(op, "ceil", image, F32, ceil_mode=True, **window)
        yield _resample_case(op, "ceil_leaves_one", image, F32, ceil_mode=True, kernel_size=2)
        yield _resample_case(op, "gaps", image, F16, (2000, 120, 10, 1), "a slice", **window)
        yield _resample_case(op, "no_images", (0, 16, 12, 9), F16, last, "empty", **window)
        yield _resample_case(op, "float64", image, F64, **window)
    yield _resample_case("max_pool", "dilated", image, F16, kernel_size=3, dilation=2, padding=1)
    yield _resample_case("avg_pool", "inside", image, F16, count_include_pad=False, **window)
    yield _resample_case("avg_pool", "one_channel", (2, 1, 12, 9), F16, last, **window)
    for kind in ("avg", "max"):
        op = f"adaptive_{kind}_pool"
        yield _resample_case(op, "of_equal", image, F16, last, output_size=(4, 3))
        yield _resample_case(op, "one", image, F16, last, output_size=1)
        yield _resample_case(op, "some", image, F16, output_size=(None, 4))
        yield _resample_case(op, "line", line, F32, output_size=7)
        yield _resample_case(op, "volume", volume, F32, last, output_size=(2, 4, 3))
        yield _resample_case(op, "larger", image, F64, output_size=(16, 20))
    sized = "interpolate"
    yield _resample_case(sized, "size", image, F16, last, size=(5, 20), mode="bilinear")
    yield _resample_case(
        sized, "corners", image, F16, last, size=(23, 17), mode="bilinear", align_corners=True
    )
    yield _resample_case(sized, "to_one", image, F32, size=1, mode="bilinear", align_corners=True)
    # Coordinates that float32 rounds move the weights by more than float32's bound.
    yield _resample_case(sized, "uneven", image, F16, scale_factor=(1.7, 0.6), mode="bilinear")
    yield _resample_case(sized, "exact", image, F16, last, size=(7, 20), mode="nearest-exact")
    yield _resample_case(sized, "cubic", image, F32, scale_factor=2, mode="bicubic")
    yield _resample_case(sized, "line", line, F16, scale_factor=1.5, mode="linear")
    yield _resample_case(sized, "line_nearest", line, F16, size=47)
    yield _resample_case(sized, "volume", volume, F16, last, scale_factor=2, mode="trilinear")
    yield _resample_case(sized, "volume_nearest", volume, F16, scale_factor=(2, 1, 3))
    yield _resample_case(sized, "gaps", image, F16, (2000, 120, 10, 1), "a slice", size=(5, 20))
    yield _resample_case(sized, "float64", image, F64, scale_factor=2, mode="bilinear")
    # Large enough for products of matrices (resample.LEAST), or of one element.
    for dtype in (F16, BF16):
        for at in (last, None):
            name = "x8" if at is None else "x8_channels_last"
            yield _resample_case(
                sized, name, (1, 21, 32, 32), dtype, at, scale_factor=8, mode="bilinear"
            )
    yield _resample_case(
        sized, "x2_large", (2, 16, 96, 104), F16, last, scale_factor=2, mode="bilinear"
    )
    yield _resample_case(
        *(sized, "corners_large", (1, 16, 33, 33), F16, last),
        size=(257, 257),
        mode="bilinear",
        align_corners=True,
    )
    yield _resample_case(sized, "line_large", (2, 128, 512), F16, scale_factor=8, mode="linear")
    for mode in ("nearest", "bilinear", "bicubic"):
        yield _resample_case(
            sized, f"one_{mode}", (2, 16, 1, 1), F16, last, size=(12, 9), mode=mode
        )
    for dtype, layout in ((F16, last), (F32, None)):
        for name, shape in (("pixel_shuffle", image), ("pixel_unshuffle", (2, 3, 12, 8))):
            yield _table_case(
                "resample",
                name,
                {"x": (shape, dtype, layout)},
                lambda g, v, name=name: {"y": getattr(g, name)(v["x"], 2)},
                lambda t, name=name: {"y": getattr(F, name)(t["x"], 2)},
            )
    yield _table_case(
        "resample",
        "decoder",
        {"x": ((2, 16, 48, 64), F16, last), "skip": ((2, 8, 192, 256), F16, last)},
        lambda g, v: {
            "y": g.concat([g.interpolate(v["x"], scale_factor=4, mode="bilinear"), v["skip"]], 1)
        },
        lambda t: {
            "y": torch.cat([F.interpolate(t["x"], scale_factor=4, mode="bilinear"), t["skip"]], 1)
        },
        note="enlarged into a slice",
    )
    for dtype in (F16, F32):
        yield _table_case(
            "resample",
            "stem",
            {
                "x": ((2, 3, 20, 20), dtype, last),
                "w": ((16, 3, 3, 3), dtype, last),
                "b": ((16,), dtype, None),
            },
            lambda g, v: {
                "y": g.interpolate(
                    g.max_pool(g.conv_bias_act(v["x"], v["w"], v["b"]), 3, 2, 1),
                    scale_factor=2,
                    mode="bilinear",
                )
                * 2.0
            },
            lambda t: {
                "y": F.interpolate(
                    F.max_pool2d(F.relu(F.conv2d(t["x"], t["w"], t["b"])), 3, 2, 1),
                    scale_factor=2,
                    mode="bilinear",
                )
                * 2.0
            },
            {"w": normal(0.2)},
            terms=64,
            note="torch steps between cuDNN's",
        )


def _resample_gradients() -> Iterator[Case]:
    image, volume, line, last = (2, 16, 12, 9), (2, 4, 5, 6, 8), (2, 16, 30), "channels_last"
    window = {"kernel_size": 3, "stride": 2, "padding": 1}
    options: dict[str, dict[str, Any]] = {
        "max_pool": window,
        "avg_pool": {**window, "ceil_mode": True},
        "adaptive_avg_pool": {"output_size": 5},
        "adaptive_max_pool": {"output_size": 5},
        "interpolate": {"scale_factor": 1.5},
    }
    for op, attrs in options.items():
        for dtype in (F16, BF16, F32, F64):
            yield _resample_case(op, "image", image, dtype, last, backward=True, **attrs)
        yield _resample_case(op, "line", line, F32, backward=True, **attrs)
        yield _resample_case(op, "volume", volume, F32, backward=True, **attrs)
    for shape, mode in ((line, "linear"), (image, "bilinear"), (volume, "trilinear")):
        for corners in (False, True):
            yield _resample_case(
                "interpolate",
                f"{mode}_corners" if corners else mode,
                shape,
                F16,
                backward=True,
                size=7,
                mode=mode,
                align_corners=corners,
            )


# -- softmax, losses, dropout, optimizers, pixels --------------------------------------------------


def _softmaxes() -> Iterator[Case]:
    for dtype in (F16, BF16, F32, F64):
        for op in ("softmax", "log_softmax"):
            run = getattr(F, op)
            yield _table_case(
                "softmax",
                op,
                {"x": ((24, 64), dtype, None)},
                lambda g, v, op=op: {"y": getattr(g, op)(v["x"], -1)},
                lambda t, run=run: {"y": run(t["x"], -1)},
                {"x": normal(3.0)},
                terms=64,
            )
    for name, shape, dim, at in (
        ("channels", (2, 16, 6, 10), 1, None),
        ("channels_last", (2, 16, 6, 10), 1, "channels_last"),
        ("first", (24, 64), 0, None),
        ("gaps", (24, 64), 1, (100, 1)),
    ):
        yield _table_case(
            "softmax",
            f"softmax_{name}",
            {"x": (shape, F16, at)},
            lambda g, v, dim=dim: {"y": g.softmax(v["x"], dim)},
            lambda t, dim=dim: {"y": F.softmax(t["x"], dim)},
            terms=64,
        )
    yield _table_case(
        "softmax",
        "softmax_between",
        {"x": ((24, 64), F16, None), "w": ((64, 64), F16, None)},
        lambda g, v: {"y": g.softmax((v["x"] @ v["w"]) * 0.125, -1) @ v["w"]},
        lambda t: {"y": F.softmax((t["x"] @ t["w"]) * 0.125, -1) @ t["w"]},
        terms=64,
        note="a torch step between products",
    )


def _loss_case(
    name: str, shape: Shape, dtype: torch.dtype, backward: bool = False, **options: Any
) -> Case:
    """Cross entropy over classes at dim 1; every fourth class or so is ignored (-1)."""
    rows = (shape[0], *shape[2:])
    options = {"ignore_index": -1, **options}

    def build() -> cg.Graph:
        g = cg.Graph("loss")
        target = g.input("t", rows, torch.int64)
        if backward:
            dy = g.input("dy", rows if options.get("reduction") == "none" else (), dtype)
            g.output("dx", g.nll_loss_backward(dy, target, shape, **options))
        else:
            g.output("y", g.cross_entropy(g.input("x", shape, dtype), target, **options))
        return g

    def eager(t: Tensors) -> Tensors:
        if backward:
            x = torch.zeros(shape, dtype=t["dy"].dtype, device=t["dy"].device)
            return {"dx": _grads(lambda x: F.nll_loss(x, t["t"], **options), [x], t["dy"])[0]}
        return {"y": F.cross_entropy(t["x"], t["t"], **options)}

    fills = {"t": small_whole(-1, min(shape[1], 4))}
    terms = math.prod(shape)
    if backward:
        return _gradient_case(f"nll_loss_{name}", dtype, build, eager, fills, terms=terms)
    label = f"loss-{name}-{SHORT[dtype]}"
    return Case(label, "loss", dtype, build, eager, fills, terms=terms)


def _losses(backward: bool = False) -> Iterator[Case]:
    for dtype in (F16, BF16, F32, F64):
        yield _loss_case("mean", (64, 10), dtype, backward)
    yield _loss_case("sum", (16, 10), F32, backward, reduction="sum")
    yield _loss_case("none", (16, 10), F16, backward, reduction="none")
    yield _loss_case("pixels", (2, 5, 6, 7), F32, backward)
    yield _loss_case("one_class", (16, 1), F32, backward, ignore_index=-1)


def _softmax_gradients() -> Iterator[Case]:
    for op in ("softmax", "log_softmax"):
        run = getattr(F, op)
        for dtype in (F16, BF16, F32, F64):

            def build(op: str = op, dtype: torch.dtype = dtype) -> cg.Graph:
                g = cg.Graph("gradient")
                dy, x = (g.input(key, (24, 64), dtype) for key in ("dy", "x"))
                g.output("dx", getattr(g, f"{op}_backward")(dy, getattr(g, op)(x, 1), 1))
                return g

            yield _gradient_case(
                op,
                dtype,
                build,
                lambda t, run=run: {"dx": _grads(lambda x: run(x, 1), [t["x"]], t["dy"])[0]},
                terms=64,
            )
    yield from _losses(backward=True)


def _adamw_case(name: str, shape: Shape, number: Shape, **options: Any) -> Case:
    """The third step of AdamW, as torch's own rule is written."""
    options = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, **options}
    tensors = ("p", "g", "m", "v")

    def build() -> cg.Graph:
        g = cg.Graph("adamw")
        given = [g.input(key, shape, F32) for key in tensors]
        numbers = [g.input(key, number, F32) for key in ("lr", "c1", "c2")]
        for key, value in zip("pmv", g.adamw(*given, *numbers, **options), strict=True):
            g.output(f"next_{key}", value)
        return g

    def eager(t: Tensors) -> Tensors:
        p, grad, m, v = (t[key] for key in tensors)
        (beta1, beta2), decay = options["betas"], options["weight_decay"]
        p = p * (1.0 - t["lr"] * decay)
        m, v = beta1 * m + (1.0 - beta1) * grad, beta2 * v + (1.0 - beta2) * grad * grad
        spread = v.sqrt() / t["c2"].sqrt() + options["eps"]
        return {"next_p": p - t["lr"] / t["c1"] * m / spread, "next_m": m, "next_v": v}

    fills = {
        "v": uniform(0.1, 2.0),
        "lr": uniform(1e-3, 1e-2),
        "c1": uniform(0.2, 0.3),
        "c2": uniform(0.02, 0.03),
    }
    return Case(f"pointwise-adamw_{name}-fp32", "pointwise", F32, build, eager, fills)


def _others() -> Iterator[Case]:
    for dtype in (F16, BF16, F32):
        yield _table_case(
            "pointwise",
            "dropout_add",
            {
                "x": ((24, 64), dtype, None),
                "z": ((24, 64), dtype, None),
                "keep": ((24, 64), torch.bool, None),
            },
            lambda g, v: {"y": v["z"] + g.dropout(v["x"], v["keep"], 0.25)},
            lambda t: {"y": t["z"] + torch.where(t["keep"], t["x"] / 0.75, 0.0).to(t["x"].dtype)},
            {"keep": small_whole(0, 2)},
        )
    yield _adamw_case("matrix", (24, 64), (1,))
    yield _adamw_case("vector", (4096,), (), weight_decay=0.0)
    for dtype in (F16, BF16, F32):
        yield _table_case(
            "pointwise",
            f"pixels_to_{SHORT[dtype]}",
            {
                "scale": ((40, 3), F32, None),
                "shift": ((40, 3), F32, None),
                "x": ((2, 24, 40, 3), torch.uint8, None),
            },
            lambda g, v: {"y": g.normalize_images(v["x"], v["scale"], v["shift"])},
            lambda t, dtype=dtype: {
                "y": (t["x"] * t["scale"] + t["shift"])
                .permute(0, 3, 1, 2)
                .to(torch.float64 if t["scale"].dtype == torch.float64 else dtype)
            },
            {"x": small_whole(0, 256), "scale": uniform(0.01, 0.02), "shift": uniform(-2.0, -1.0)},
            result=dtype,
        )
    for kind in (torch.int8, torch.int32):
        yield _table_case(
            "pointwise",
            f"{str(kind).removeprefix('torch.')}_to_float",
            {"s": ((64,), F32, None), "x": ((24, 64), kind, None)},
            lambda g, v: {"y": v["x"].to_float() * v["s"]},
            lambda t: {"y": t["x"] * t["s"]},
            {"x": small_whole(-128, 128)},
        )


# -- pointwise -------------------------------------------------------------------------------------


def _pointwise_case(
    name: str,
    inputs: Inputs,
    declare: Declare,
    eager: Eager,
    fills: Mapping[str, Fill] | None = None,
    note: str = "",
    **placed: Any,
) -> Case:
    return _table_case("pointwise", name, inputs, declare, eager, fills, note, **placed)


def _unary_tail(g: cg.Graph, v: dict[str, cg.Value]) -> dict[str, cg.Value]:
    x = v["x"]
    return {
        "roots": x.sqrt() + x.rsqrt() + x.reciprocal(),
        "logs": g.sub(x.log(), x.neg().exp()),
        "error": g.mul(x.erf(), g.abs(x)),
    }


def _pointwise() -> Iterator[Case]:
    image = (2, 16, 6, 10)
    for layout in (None, "channels_last"):
        yield _of_images(F16, F32, layout)
        yield _of_images(BF16, BF16, layout)
        yield _of_images(F64, F64, layout)
    for dtype in (F16, BF16, F32):
        x = {"x": (image, dtype, "channels_last")}
        both: Inputs = {**x, "y": (image, dtype, "channels_last")}
        matrix: Inputs = {"x": ((24, 64), dtype, None), "y": ((24, 64), dtype, None)}
        yield _pointwise_case(
            "arithmetic",
            both,
            lambda g, v: {"z": (v["x"] + v["y"]) * v["x"] - v["y"] / 3.0 + 0.5},
            lambda t: {"z": (t["x"] + t["y"]) * t["x"] - t["y"] / 3.0 + 0.5},
        )
        yield _pointwise_case(
            "divide_pow",
            matrix,
            lambda g, v: {"z": v["x"] / v["y"] + v["y"] ** 2.0, "p": g.pow(v["y"], v["x"])},
            lambda t: {"z": t["x"] / t["y"] + t["y"] ** 2.0, "p": torch.pow(t["y"], t["x"])},
            {"y": uniform(0.5, 2.0)},
        )
        yield _pointwise_case(
            "unary",
            {"x": (image, dtype, None)},
            _unary_tail,
            lambda t: {
                "roots": t["x"].sqrt() + t["x"].rsqrt() + t["x"].reciprocal(),
                "logs": t["x"].log() - t["x"].neg().exp(),
                "error": t["x"].erf() * t["x"].abs(),
            },
            {"x": uniform(0.25, 3.0)},
        )
        yield _pointwise_case(
            "compare_where",
            both,
            lambda g, v: {"z": g.where(v["x"] > v["y"], v["x"], 2.0 * v["y"])},
            lambda t: {"z": torch.where(t["x"] > t["y"], t["x"], 2.0 * t["y"])},
        )
        yield _pointwise_case(
            "min_max_clamp",
            matrix,
            # No 16-bit number is the bound: at it, torch's gradient is another from 2.14 on.
            lambda g, v: {"z": g.clamp(g.maximum(v["x"], v["y"]), None, 0.5001).minimum(v["y"])},
            lambda t: {
                "z": torch.minimum(torch.clamp(torch.maximum(t["x"], t["y"]), max=0.5001), t["y"])
            },
        )
        yield _pointwise_case(
            "broadcast",
            {
                **x,
                "row": ((10,), dtype, None),
                "channel": ((16, 1, 1), dtype, None),
                "column": ((2, 1, 6, 1), dtype, None),
            },
            lambda g, v: {"z": (v["x"] + v["row"]) * v["channel"] - v["column"]},
            lambda t: {"z": (t["x"] + t["row"]) * t["channel"] - t["column"]},
            note="operands of lower rank",
        )
        yield _pointwise_case(
            "bias_act",
            {**x, "b": ((16,), dtype, None)},
            lambda g, v: {"z": v["x"].bias(v["b"]).gelu()},
            lambda t: {"z": F.gelu(t["x"] + t["b"].view(-1, 1, 1))},
            note="an epilogue alone",
        )
    whole = small_whole(-3, 4)
    logic: Inputs = {"x": ((8, 64), F16, None), "y": ((8, 64), F16, None)}
    yield _pointwise_case(
        "comparisons",
        logic,
        lambda g, v: {
            "eq": g.eq(v["x"], v["y"]),
            "ne": g.ne(v["x"], v["y"]),
            "lt": v["x"] < v["y"],
            "le": v["x"] <= v["y"],
            "gt": v["x"] > 1.0,
            "ge": v["x"] >= v["y"],
        },
        lambda t: {
            "eq": t["x"] == t["y"],
            "ne": t["x"] != t["y"],
            "lt": t["x"] < t["y"],
            "le": t["x"] <= t["y"],
            "gt": t["x"] > 1.0,
            "ge": t["x"] >= t["y"],
        },
        {"x": whole, "y": whole},
        note="outputs of bools",
    )
    yield _pointwise_case(
        "logic",
        logic,
        lambda g, v: {
            "z": g.where(
                g.logical_or(
                    g.logical_and(v["x"] > 0.0, v["y"] > 0.0), g.logical_not(v["x"] <= 1.0)
                ),
                v["x"],
                v["y"],
            )
        },
        lambda t: {
            "z": torch.where(((t["x"] > 0.0) & (t["y"] > 0.0)) | ~(t["x"] <= 1.0), t["x"], t["y"])
        },
        {"x": whole, "y": whole},
    )
    yield _pointwise_case(
        "select_over_nan",
        {"x": ((8, 64), F32, None), "c": ((8, 64), torch.bool, None)},
        lambda g, v: {"z": g.where(v["c"], v["x"].log(), 0.0)},
        lambda t: {"z": torch.where(t["c"], t["x"].log(), 0.0)},
        {
            "x": lambda gen, shape: torch.linspace(-1.0, 3.0, 512, dtype=F64).reshape(shape),
            "c": lambda gen, shape: (torch.linspace(-1.0, 3.0, 512) > 0).reshape(shape),
        },
        note="pytorch#103963: what is not selected may be NaN",
    )
    yield _pointwise_case(
        "mixed_dtypes",
        {"x": (image, F16, "channels_last"), "y": (image, F32, "channels_last")},
        lambda g, v: {"z": v["x"] * v["y"] + v["x"]},
        lambda t: {"z": t["x"] * t["y"] + t["x"]},
        note="float32 beside 16-bit data gives float32",
    )
    for dtype in (F16, F32):
        yield _pointwise_case(
            "to_channels_last",
            {"x": (image, dtype, None)},
            lambda g, v: {"z": g.identity(v["x"])},
            lambda t: {"z": t["x"]},
            layout="channels_last",
            note="a change of layout",
        )
    yield _pointwise_case(
        "convert",
        {"x": (image, F32, None)},
        lambda g, v: {"z": g.identity(v["x"])},
        lambda t: {"z": t["x"].to(F16)} if t["x"].dtype == F32 else {"z": t["x"]},
        result=F16,
        note="a change of dtype",
    )
    yield _pointwise_case(
        "vector",
        {"x": ((64,), F16, None), "y": ((64,), F16, None)},
        lambda g, v: {"z": g.silu(v["x"]) * v["y"]},
        lambda t: {"z": F.silu(t["x"]) * t["y"]},
        note="rank 1",
    )
    yield _pointwise_case(
        "expanded",
        {"x": ((8, 16, 32), F16, (0, 32, 1)), "y": ((8, 16, 32), F16, None)},
        lambda g, v: {"z": v["x"] + v["y"]},
        lambda t: {"z": t["x"] + t["y"]},
        note="stride 0",
    )
    yield _pointwise_case(
        "everything",
        {"x": ((4, 32), F64, None), "y": ((4, 32), F64, None)},
        lambda g, v: {"z": g.softplus(v["x"], beta=1.5) * v["y"].tanh() - v["x"].elu(0.3)},
        lambda t: {"z": F.softplus(t["x"], 1.5) * t["y"].tanh() - F.elu(t["x"], 0.3)},
    )


# -- the ops of gradients --------------------------------------------------------------------------


def _grads(
    function: Callable[..., torch.Tensor], of: Sequence[torch.Tensor], upstream: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """torch autograd's gradients of ``function(*of)``."""
    with torch.enable_grad():
        leaves = [value.detach().clone().requires_grad_() for value in of]
        return torch.autograd.grad(function(*leaves), leaves, upstream)


def _gradient_case(
    name: str,
    dtype: torch.dtype,
    build: Callable[[], cg.Graph],
    eager: Callable[[Tensors], Tensors],
    fills: Mapping[str, Fill] | None = None,
    note: str = "",
    terms: int = 1,
) -> Case:
    return Case(
        f"gradients-{name}-{SHORT[dtype]}",
        "gradients",
        dtype,
        build,
        eager,
        fills or {},
        terms=terms,
        note=note,
    )


def _wgrad_case(name: str, conv: Conv, note: str = "", scaled: bool = False) -> Case:
    """The weight's gradient of ``conv``, without its epilogue; ``scaled`` by input channel."""

    def build() -> cg.Graph:
        g = cg.Graph("wgrad")
        dy = g.input("dy", conv.out, conv.dtype, **_at(conv.x_at))
        x = g.input("x", conv.x, conv.dtype, **_at(conv.x_at))
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
        g.output("dw", dw, **_at(conv.w_at))
        return g

    def eager(t: Tensors) -> Tensors:
        w = torch.zeros(conv.weight, dtype=t["x"].dtype, device=t["x"].device)
        (dw,) = _grads(lambda w: conv._convolved(t["x"], w, None), [w], t["dy"])
        return {"dw": dw * t["s"] if scaled else dw}

    terms = math.prod(conv.out) // conv.k
    return _gradient_case(f"wgrad_{name}", conv.dtype, build, eager, note=note, terms=terms)


def _wgrads() -> Iterator[Case]:
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


_REDUCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
}


def _reduction_case(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    dims: Shape | None,
    mode: str = "sum",
    keepdim: bool | Shape = False,
    layout: Layout = "channels_last",
    y_dtype: torch.dtype | None = None,
    note: str = "",
) -> Case:
    def build() -> cg.Graph:
        g = cg.Graph("reduction")
        x = g.input("x", shape, dtype, **_at(layout))
        g.output("y", g.reduction(x, dims, mode, keepdim), dtype=y_dtype)
        return g

    def eager(t: Tensors) -> Tensors:
        every = tuple(range(len(shape))) if dims is None else dims
        kept = keepdim if isinstance(keepdim, bool) else True
        y = _REDUCTIONS[mode](t["x"], every, keepdim=kept)
        if not isinstance(keepdim, bool):
            y = y.squeeze([dim for dim in every if dim not in keepdim])
        return {"y": y if y_dtype is None or y.dtype == F64 else y.to(y_dtype)}

    terms = math.prod(shape[dim] for dim in (range(len(shape)) if dims is None else dims))
    return _gradient_case(
        f"{mode}_{name}", dtype, build, eager, {"x": normal(1.0, 0.5)}, note=note, terms=terms
    )


def _reductions() -> Iterator[Case]:
    image = (4, 16, 6, 10)
    for mode in ("sum", "mean", "max", "min"):
        yield _reduction_case("channels", image, F32, (0, 2, 3), mode)
        yield _reduction_case("channels", image, F16, (0, 2, 3), mode, y_dtype=F32)
        yield _reduction_case("everything", image, F32, None, mode)
    for dtype in (F16, BF16, F32, F64):
        yield _reduction_case("kept", image, dtype, (0, 2, 3), keepdim=True)
    yield _reduction_case("over_channels", image, F32, (1,), keepdim=True)
    yield _reduction_case("pool", image, F32, (2, 3), "mean", note="dims between others")
    yield _reduction_case("contiguous", image, F32, (0, 2, 3), layout=None)
    yield _reduction_case("rows", (48, 64), F32, (1,), layout=None)
    yield _reduction_case("columns", (48, 64), F32, (-2,), layout=None)
    yield _reduction_case("some_kept", (3, 4, 8, 16), F32, (0, 1, 2), keepdim=(2,), layout=None)
    yield _reduction_case("1d", (300,), F32, (0,), "mean", layout=None)

    def fused() -> cg.Graph:
        g = cg.Graph("bias_gradient")
        dy, y = (g.input(name, image, F16, layout="channels_last") for name in ("dy", "y"))
        g.output("db", g.reduction(g.relu_backward(dy, y), (0, 2, 3)), dtype=F32)
        return g

    yield _gradient_case(
        "sum_behind_relu_backward",
        F16,
        fused,
        lambda t: {"db": torch.where(t["y"] > 0, t["dy"].to(t["dy"].dtype), 0).sum((0, 2, 3))},
        terms=240,
        note="a bias's gradient",
    )


def _expands() -> Iterator[Case]:
    image = (2, 16, 6, 10)
    forms: dict[str, tuple[Shape, Shape | None]] = {
        "channels": ((16,), (1,)),
        "column": ((2, 1, 1, 1), None),
    }
    for dtype in (F16, F32):
        for name, (shape, dims) in forms.items():

            def build(
                dtype: torch.dtype = dtype, shape: Shape = shape, dims: Shape | None = dims
            ) -> cg.Graph:
                g = cg.Graph("expand")
                x = g.input("x", image, dtype, layout="channels_last")
                g.output("y", x * g.expand(g.input("b", shape, dtype), image, dims))
                return g

            yield _gradient_case(
                f"expand_{name}",
                dtype,
                build,
                lambda t: {"y": t["x"] * (t["b"].view(-1, 1, 1) if t["b"].dim() == 1 else t["b"])},
            )

    def alone() -> cg.Graph:
        g = cg.Graph("expand")
        g.output("y", g.expand(g.input("x", (3, 8), F32), (3, 5, 8), (0, 2)))
        return g

    yield _gradient_case(
        "expand_alone", F32, alone, lambda t: {"y": t["x"].unsqueeze(1).expand(3, 5, 8)}
    )


def _activation_gradients() -> Iterator[Case]:
    image = (2, 16, 6, 10)
    kinds: dict[str, tuple[Callable[..., torch.Tensor], dict[str, float]]] = {
        "relu": (F.relu, {}),
        "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), {"negative_slope": 0.2}),
        "gelu": (F.gelu, {}),
        "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), {}),
        "silu": (F.silu, {}),
    }
    for name, (function, attrs) in kinds.items():
        for dtype in (F16, BF16, F32, F64):

            def build(
                name: str = name, attrs: dict[str, float] = attrs, dtype: torch.dtype = dtype
            ) -> cg.Graph:
                g = cg.Graph("activation")
                dy, x = (g.input(key, image, dtype, layout="channels_last") for key in ("dy", "x"))
                method = "relu" if "relu" in name else name
                g.output("dx", getattr(g, f"{method}_backward")(dy, x, **attrs))
                return g

            def eager(t: Tensors, function: Callable[..., torch.Tensor] = function) -> Tensors:
                return {"dx": _grads(function, [t["x"]], t["dy"])[0]}

            yield _gradient_case(f"{name}_backward", dtype, build, eager)


@dataclass(frozen=True)
class TrainingNorm:
    """Batch normalisation in training; x (N, C, ...)."""

    x: Shape = (4, 16, 6, 10)
    dtype: torch.dtype = F32
    params: torch.dtype = F32
    running: bool = True
    statistics: bool = True  # mean and inv_std are outputs too
    relu: bool = False  # behind the norm
    shift: bool = False  # a number per channel added between the two
    layout: Layout = "channels_last"
    eps: float = 1e-5
    momentum: float = 0.1

    def forward(self) -> cg.Graph:
        g = cg.Graph("norm")
        x = g.input("x", self.x, self.dtype, **_at(self.layout))
        names = ["gamma", "beta"] + ["mean", "var"] * self.running
        given = [g.input(name, (self.x[1],), self.params) for name in names]
        y, *results = g.batch_norm_train(x, *given, eps=self.eps, momentum=self.momentum)
        if self.shift:
            y = y + g.input("shift", (1, self.x[1], *(1,) * (len(self.x) - 2)), self.dtype)
        g.output("y", g.relu(y) if self.relu else y)
        if self.statistics:
            g.output("batch_mean", results[0])
            g.output("inv_std", results[1])
        if self.running:
            g.output("next_mean", results[2])
            g.output("next_var", results[3])
        return g

    def eager(self, t: Tensors) -> Tensors:
        x = t["x"]
        running = [t[name].clone() for name in ("mean", "var")] if self.running else [None, None]
        wide = torch.promote_types(x.dtype, F32)
        gamma, beta = (t[name].to(t["gamma"].dtype) for name in ("gamma", "beta"))
        done = {"y": F.batch_norm(x, *running, gamma, beta, True, self.momentum, self.eps)}
        if self.shift:
            done["y"] = done["y"] + t["shift"]
        if self.relu:
            done["y"] = F.relu(done["y"])
        if self.statistics:
            dims = [dim for dim in range(x.dim()) if dim != 1]
            var, mean = torch.var_mean(x.to(wide), dims, correction=0)
            done |= {"batch_mean": mean, "inv_std": (var + self.eps).rsqrt()}
        if self.running:
            done |= dict(zip(("next_mean", "next_var"), running, strict=True))
        return done

    def backward(self) -> cg.Graph:
        g = cg.Graph("norm_backward")
        dy = g.input("dy", self.x, self.dtype, **_at(self.layout))
        x = g.input("x", self.x, self.dtype, **_at(self.layout))
        gamma, beta = (g.input(name, (self.x[1],), self.params) for name in ("gamma", "beta"))
        _, mean, inv_std = g.batch_norm_train(x, gamma, beta, eps=self.eps)[:3]
        grad = dy
        if self.relu:
            grad = g.relu_backward(dy, g.batch_norm_apply(x, mean, inv_std, gamma, beta))
        grads = g.batch_norm_backward(grad, x, gamma, mean, inv_std)
        for name, grad in zip(("dx", "dgamma", "dbeta"), grads, strict=True):
            g.output(name, grad)
        return g

    def eager_backward(self, t: Tensors) -> Tensors:
        def forward(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
            y = F.batch_norm(x, None, None, gamma, beta, True, 0.1, self.eps)
            return F.relu(y) if self.relu else y

        grads = _grads(
            forward,
            [t["x"], t["gamma"], t["beta"]],
            t["dy"],
        )
        return dict(zip(("dx", "dgamma", "dbeta"), grads, strict=True))

    @property
    def terms(self) -> int:
        return math.prod(self.x) // self.x[1]


def _training_norms() -> Iterator[Case]:
    norm = TrainingNorm()
    cases: dict[str, TrainingNorm] = {
        "plain": norm,
        "no_running": replace(norm, running=False),
        "y_alone": replace(norm, running=False, statistics=False),
        "contiguous": replace(norm, layout=None),
        "rows": replace(norm, x=(24, 16), layout=None),
        "1d": replace(norm, x=(4, 16, 20), layout=None),
        "3d": replace(norm, x=(2, 16, 3, 4, 5)),
        "momentum": replace(norm, momentum=0.3, eps=1e-3),
        "half": replace(norm, dtype=F16),
        "half_params": replace(norm, dtype=F16, params=F16),
        "bfloat": replace(norm, dtype=BF16),
        "double": replace(norm, dtype=F64, params=F64),
        "relu": replace(norm, relu=True),
        "relu_half": replace(norm, dtype=F16, relu=True),
        "relu_bfloat": replace(norm, dtype=BF16, relu=True),
        "relu_3d": replace(norm, x=(2, 16, 3, 4, 5), dtype=F16, relu=True),
        "shift_relu_half": replace(norm, dtype=F16, relu=True, shift=True),
        "relu_rows": replace(norm, x=(32, 16), layout=None, dtype=BF16, relu=True),
    }
    fills = {"gamma": uniform(0.5, 1.5), "var": uniform(0.5, 1.5), "x": normal(1.5, 0.5)}
    for name, one in cases.items():
        yield _gradient_case(
            f"norm_{name}", one.dtype, one.forward, one.eager, fills, terms=one.terms
        )
        if one.statistics and one.running and not one.shift:
            yield _gradient_case(
                f"norm_backward_{name}",
                one.dtype,
                one.backward,
                one.eager_backward,
                fills,
                terms=one.terms,
            )


def _trailing_norm_gradients() -> Iterator[Case]:
    """The gradients of layer_norm and rms_norm, with the forward that gives their statistics."""
    shapes: dict[str, tuple[Shape, Shape, Layout]] = {
        "plain": ((4, 24, 64), (64,), None),
        "two_dims": ((6, 5, 8, 16), (8, 16), None),
        "flat": ((32, 128), (128,), None),
    }
    for kind in ("layer_norm", "rms_norm"):
        for name, (shape, last, layout) in shapes.items():
            for dtype, params, bias in (
                (F16, F32, True),
                (F16, F16, True),
                (BF16, F32, False),
                (F32, F32, True),
                (F64, F64, True),
            ):
                if name != "plain" and dtype in (BF16, F64):
                    continue

                def build(
                    kind: str = kind,
                    shape: Shape = shape,
                    last: Shape = last,
                    layout: Layout = layout,
                    dtype: torch.dtype = dtype,
                    params: torch.dtype = params,
                    bias: bool = bias,
                ) -> cg.Graph:
                    g = cg.Graph(f"{kind}_gradient")
                    dy, x = (g.input(key, shape, dtype, **_at(layout)) for key in ("dy", "x"))
                    w = g.input("w", last, params)
                    _, *stats = getattr(g, kind)(x, w, return_stats=True)
                    method = getattr(g, f"{kind}_backward")
                    grads = method(dy, x, w, *stats, bias_grad=bias)
                    for key, grad in zip(("dx", "dw", "db"), grads, strict=False):
                        g.output(key, grad)
                    return g

                def eager(t: Tensors, kind: str = kind, bias: bool = bias) -> Tensors:
                    w = t["w"].to(t["w"].dtype)
                    zero = torch.zeros_like(w)

                    def forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                        wide = torch.promote_types(x.dtype, w.dtype)
                        run = F.layer_norm if kind == "layer_norm" else F.rms_norm
                        y = run(x.to(wide), w.shape, w.to(wide), eps=1e-5)
                        return (y + b).to(x.dtype)

                    dx, dw, db = _grads(forward, [t["x"], w, zero], t["dy"])
                    done = {"dx": dx, "dw": dw}
                    return {**done, "db": db} if bias else done

                vectors = "" if params == dtype else "_fp32_params"
                yield _gradient_case(
                    f"{kind}_{name}{vectors}",
                    dtype,
                    build,
                    eager,
                    {"w": uniform(0.5, 1.5), "x": normal(1.0, 0.3)},
                    terms=math.prod(shape),
                )


def _attention_gradient(name: str, attention: Attention, note: str) -> Case:
    """Attention and its gradient in one graph, so that o and lse are those of q, k and v."""
    with_mask = attention.mask in ("data", "fp32")

    def build() -> cg.Graph:
        g = cg.Graph("attention_gradient")
        data, options = attention.declare(g)
        do = g.input("do", (*attention.q_shape[:3], attention.v_shape[3]), attention.dtype)
        o, lse = g.sdpa(*data, return_lse=True, **options, **attention.sinks(g))
        grads = g.sdpa_backward(do, *data, o, lse, mask_grad=with_mask, **options)
        for key, grad in zip(("dq", "dk", "dv", "dmask"), grads, strict=False):
            # Beside 16-bit data the gradient of a float32 mask is no better than 16 bits: o is.
            g.output(key, grad, dtype=attention.dtype)
        return g

    def eager(t: Tensors) -> Tensors:
        names = ["q", "k", "v"] + ["mask"] * with_mask
        grads = _grads(
            lambda *leaves: attention.eager({**t, **dict(zip(names, leaves, strict=True))})["o"],
            [t[key] for key in names],
            t["do"],
        )
        return {f"d{key}": grad.to(t["q"].dtype) for key, grad in zip(names, grads, strict=True)}

    case = _gradient_case(
        f"attention_{name}",
        attention.dtype,
        build,
        eager,
        attention.fills,
        note,
        terms=max(attention.d, attention.keys),
    )
    return replace(case, packed=("q", "k", "v") if attention.memory == "packed" else ())


def _attention_gradients() -> Iterator[Case]:
    cases = {name: (attention, note) for name, attention, note in _attention_cases()}
    wanted = [
        "plain",
        "scale",
        "causal",
        "causal_short_q",
        "bottom_right_short_q",
        "bottom_right_long_q",
        "window_causal",
        "window_both",
        "mask_add",
        "mask_add_1hsk",
        "mask_add_b11k",
        "mask_add_sk",
        "mask_add_dead_rows",
        "mask_add_fp32",
        "mask_bool",
        "mask_bool_dead_rows",
        "lengths",
        "lengths_zero",
        "lengths_bottom_right",
        *("lengths_finite", "lengths_finite_causal", "lengths_finite_gqa"),
        "gqa_8_2",
        "mqa",
        "gqa_mask",
        "d_v_32",
        "d_128",
        "d_20",
        "s_192_mask",
        *(f"mask_{kind}_s_{s}" for s in (320, 704) for kind in ("add", "bool")),
        "s_197",
        *("decode", "decode_gqa", "decode_low"),
        "bshd",
        "packed",
        "expanded_kv",
        *("dropout", "dropout_gqa", "dropout_mask_add", "dropout_bottom_right"),
        *("sink", "sink_window", "sink_dead_rows", "alibi", "alibi_full", "slopes_bottom_right"),
        *("softcap", "softcap_window", "softcap_mask_add", "softcap_slopes_sink"),
        "softcap_dropout",
    ]
    for name in wanted:
        yield _attention_gradient(name, *cases[name])
    again = {
        BF16: ("plain", "causal", "mask_add", "gqa_8_2", "lengths"),
        F32: ("plain", "causal", "mask_bool_dead_rows", "gqa_8_2"),
        F64: (
            *("plain", "mask_add_b11k", "mask_add_dead_rows", "lengths_zero", "gqa_mask"),
            *("dropout_gqa", "dropout_lengths", "sink_dead_rows", "softcap_mask_add"),
            *("softcap_slopes_sink", "softcap_dropout", "slopes_right"),
        ),
    }
    for dtype, names in again.items():
        for name in names:
            attention, note = cases[name]
            yield _attention_gradient(name, replace(attention, dtype=dtype), note)
    for name, attention, note in _seeded():
        yield _attention_gradient(name, replace(attention, lse=False), note)


def _packed_gradients() -> Iterator[Case]:
    cases = {name: (packed, note) for name, packed, note in _packed_cases()}

    def gradient(name: str, packed: Packed, note: str) -> Case:
        def build() -> cg.Graph:
            g = cg.Graph("packed_gradient")
            data, where, options = packed.declare(g)
            rows, heads, _ = packed.shapes()["q"]
            do = g.input("do", (rows, heads, packed.d_v or packed.d), packed.dtype)
            o, lse = g.sdpa_varlen(*data, *where, return_lse=True, **options)
            grads = g.sdpa_varlen_backward(do, *data, o, lse, *where, **options)
            for key, grad in zip(("dq", "dk", "dv"), grads, strict=True):
                g.output(key, grad)
            return g

        def eager(t: Tensors) -> Tensors:
            grads = _grads(
                lambda *leaves: packed.eager({**t, **dict(zip("qkv", leaves, strict=True))})["o"],
                [t[key] for key in "qkv"],
                t["do"],
            )
            return {f"d{key}": grad for key, grad in zip("qkv", grads, strict=True)}

        return _gradient_case(
            f"packed_attention_{name}",
            packed.dtype,
            build,
            eager,
            packed.fills,
            note,
            terms=max(packed.d, *packed.keys),
        )

    for name in ("plain", "causal", "cross", "gqa", "d_v", "packed", "bottom_right"):
        packed, note = cases[name]
        yield gradient(name, replace(packed, lse=False), note)
    for dtype, names in {BF16: ("causal",), F32: ("causal",), F64: ("gqa", "cross")}.items():
        for name in names:
            packed, note = cases[name]
            yield gradient(name, replace(packed, dtype=dtype), note)
    empty = Packed((40, 0, 16), (30, 20, 0), dtype=F64)
    yield gradient("empty", empty, "a sequence without rows, one without keys")


def _rope() -> Iterator[Case]:
    """Columns turned in pairs."""

    def eager(interleaved: bool) -> Eager:
        def run(t: Tensors) -> Tensors:
            x, cos, sin = t["x"], t["cos"], t["sin"]
            a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
            turned = a * cos - b * sin, b * cos + a * sin
            y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
            return {"y": y}

        return run

    bshd = (40 * 4 * 64, 64, 4 * 64, 1)
    forms: list[tuple[str, Shape, Shape, Layout]] = [
        ("positions", (2, 4, 40, 64), (40, 32), None),
        ("batches", (2, 4, 40, 64), (2, 1, 40, 32), None),
        ("bshd", (2, 4, 40, 64), (40, 32), bshd),
        ("tokens", (40, 4, 16), (40, 1, 8), None),
    ]
    for name, shape, table, layout in forms:
        for dtype in (F16, BF16, F32, F64) if name == "positions" else (F16, F64):
            for interleaved in (False, True):
                yield _table_case(
                    "rope",
                    f"{name}{'_interleaved' * interleaved}",
                    {"x": (shape, dtype, layout), **{n: (table, dtype, None) for n in _TURNS}},
                    lambda g, v, i=interleaved: {
                        "y": g.rope(v["x"], v["cos"], v["sin"], interleaved=i)
                    },
                    eager(interleaved),
                    {n: uniform(-1.0, 1.0) for n in _TURNS},
                )


_TURNS = ("cos", "sin")


def _ragged() -> Iterator[Case]:
    """Where sequences lie, in whole numbers."""

    def eager(t: Tensors) -> Tensors:
        q, kv = t["cu_q"], t["cu_kv"]
        lengths = [F.pad(ends.diff(), (0, 1)) for ends in (q, kv)]
        return {"y": torch.stack([*lengths, q * 24, q, kv * 24])}

    def build() -> cg.Graph:
        g = cg.Graph("ragged")
        q, kv = (g.input(f"cu_{of}", (4,), torch.int32) for of in ("q", "kv"))
        g.output("y", g.ragged_offsets(q, kv, (24, 1), (24,)))
        return g

    fills = {"cu_q": exactly([0, 5, 5, 9]), "cu_kv": exactly([0, 2, 7, 11])}
    yield Case("ragged_offsets-int32", "ragged_offsets", F32, build, eager, fills)


def _gradients() -> Iterator[Case]:
    yield from _wgrads()
    yield from _resample_gradients()
    yield from _softmax_gradients()
    yield from _reductions()
    yield from _expands()
    yield from _activation_gradients()
    yield from _training_norms()
    yield from _trailing_norm_gradients()
    yield from _image_norm_gradients()
    yield from _attention_gradients()
    yield from _packed_gradients()


# -- 8-bit data ------------------------------------------------------------------------------------


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
        x = g.input("x", self.x, self.dtype, **_at(None if matmul else self.x_at))
        w = g.input("w", self.w, self.w_dtype or self.dtype, **_at(self.w_at))
        y = getattr(g, self.kind)(x, w, **dict(self.options))
        if self.scale is None:
            g.output("y", y, dtype=None if self.dtype == I8 else self.y_dtype, **_at(self.y_at))
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
    yield _table_case(
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
        yield _table_case(
            family,
            f"quantize_{SHORT[dtype]}",
            {"x": ((16, 64), source, None), "s": ((), F32, None)},
            lambda g, v: {"y": g.quantize(v["x"], v["s"], dtype=dtype)},
            lambda t: {"y": rounded(t["x"].to(t["s"].dtype) / t["s"], dtype)},
            scales,
            note="some are beyond the range",
        )
    yield _table_case(
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

    yield _table_case(
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


def _quantized() -> Iterator[Case]:
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


# -- all of them -----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def enumerate_cases() -> tuple[Case, ...]:
    """Every case, ids all different. Makes no tensor."""
    cases = (
        *_conv_bias_act(),
        *_conv_bn_act(),
        *_conv_transpose(),
        *_matmul(),
        *_norms(),
        *_normalize(),
        *_image_norms(),
        *_torchs_own(),
        *_views(),
        *_resamples(),
        *_softmaxes(),
        *_losses(),
        *_others(),
        *_sdpa(),
        *_packed(),
        *_paged(),
        *_ragged(),
        *_rope(),
        *_blocks(),
        *_pointwise(),
        *_gradients(),
        *_quantized(),
    )
    ids = [case.id for case in cases]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    assert not twice, f"case ids declared twice: {twice}"
    return cases
