"""Random graphs of int8 and FP8, each op beside torch's in float64.

A case is made by its seed alone: products of 8-bit data, what follows them, largest values, and
rounding to 8 bits, of which a further product may be made. Every value is an output. The float64 of
an op starts from what the graph gave for its operands, so that a tie that fell to the other side is
one step of one element, and nothing behind it.

``RANDOM_BYTES=3000 pytest tests/cpu/ops/test_random_bytes.py`` makes so many;
``RANDOM_FIRST=1234 RANDOM_BYTES=1`` that one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

import cudnngraph as cg
from tests import numerics
from tests.random_functions import ACTIVATIONS
from tests.random_tensors import F32, F64, Maker, laid

I8, E4, E5 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 2 * torch.finfo(F32).smallest_normal
Theirs = Callable[..., torch.Tensor]


def rounded(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y in an 8-bit dtype, ties to even, saturated; what is not finite is NaN in FP8."""
    if dtype == I8:
        return y.round().clamp(-128, 127)
    most = torch.finfo(dtype).max
    y = y.masked_fill(y.abs() > torch.finfo(F32).max, math.inf)  # where float32 ends
    return (y.clamp(-most, most) + y * 0.0).to(F32).to(dtype).to(F64)


def along(scale: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    if scale.numel() == 1:
        return scale.reshape(())
    return scale.reshape([-1 if at == dim % x.dim() else 1 for at in range(x.dim())])


@dataclass
class Made:
    """A value of the graph: the op's text, its operands by their names, and the op by torch."""

    text: str
    operands: tuple[str, ...]
    theirs: Theirs
    terms: int = 1


@dataclass
class Case:
    """A graph under way, its inputs, and the values made of them."""

    m: Maker
    g: cg.Graph = field(default_factory=lambda: cg.Graph("bytes"))
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    made: dict[str, Made] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)  # values of the graph
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def __str__(self) -> str:
        told = [
            f"  {n} = {tuple(t.shape)} {str(t.dtype)[6:]} {t.stride()}"
            for n, t in self.tensors.items()
        ]
        told += [f"  {n} = {e.text}({', '.join(e.operands)})" for n, e in self.made.items()]
        return "\n".join(told)

    def data(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """An input, 8 bits over their whole range or near to 1."""
        name = f"x{len(self.tensors)}"
        values = torch.randn(shape, generator=self.m.numbers, dtype=F64)
        if dtype == I8:
            values = (values * self.m.pick(3, 40, 100)).round().clamp(-128, 127)
        elif dtype in (E4, E5):
            values = rounded(values * self.m.pick(0.01, 1, 30, 300), dtype)
        layout = self.m.pick("contiguous", "last", "last", "permuted", "sliced")
        plain = values.to(dtype)
        if dtype in (E4, E5):  # which has no kernels to copy by
            bits = laid(plain.view(torch.uint8), layout, self.m.rng.randrange(len(shape)))
            self.tensors[name] = bits.view(dtype)
        else:
            place = self.m.rng.randrange(len(shape)) if shape else 0
            self.tensors[name] = laid(plain, layout, place)
        self.held[name] = self.g.input(name, like=self.tensors[name])
        self.dtypes[name] = dtype
        return name

    def scale(self, size: int, near: float) -> str:
        """A scale: one number, or one along a dim."""
        shape = self.m.pick((), (1,), (size,), (size,))
        name = f"s{len(self.tensors)}"
        values = torch.rand(shape, generator=self.m.numbers) * near + near / 4
        if self.m.chance(0.1):
            values = values * self.m.pick(1e-20, 1e20)
        self.tensors[name] = values.to(F32)
        self.held[name] = self.g.input(name, like=self.tensors[name])
        self.dtypes[name] = F32
        return name

    def add(
        self, value: Any, text: str, operands: tuple[str, ...], theirs: Theirs, terms: int = 1
    ) -> str:
        name = f"y{len(self.made)}"
        self.made[name] = Made(text, operands, theirs, terms)
        self.held[name] = value
        self.g.output(name, value)
        self.dtypes[name] = value.dtype
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.held[name].shape)

    def right(self, found: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """An op in float64, of what the graph gave for its operands."""
        of = self.made[name]
        known = {**self.tensors, **found}
        return of.theirs(*(known[each].to(F64) for each in of.operands))


def _product(c: Case, x: str) -> str:
    m, shape, dtype = c.m, c.shape(x), c.dtypes[x]
    weight_dtype = I8 if dtype == I8 else m.pick(dtype, E4, E5)
    if len(shape) < 3 or (len(shape) < 5 and m.chance(0.25)):
        width = m.pick(1, 2, 5, 16)
        lead = shape[:-2] if m.chance(0.3) else ()
        w = c.data((*lead, shape[-1], width), weight_dtype)
        y = c.g.matmul(c.held[x], c.held[w])
        return c.add(y, "matmul", (x, w), lambda a, b: a @ b, shape[-1])
    rank, channels = len(shape) - 2, shape[1]
    groups = m.pick(*(n for n in (1, 1, 2, 4) if channels % n == 0))
    kernel = tuple(m.pick(1, 1, 2, 3) for _ in range(rank))
    outer = groups * m.pick(1, 2, 4)
    transposed = m.chance(0.25)
    options: dict[str, Any] = {
        "groups": groups,
        "stride": m.pick(1, 2),
        "dilation": m.pick(1, 1, 2),
    }
    reach = [options["dilation"] * (k - 1) for k in kernel]
    options["padding"] = m.pick(0, 1)
    if transposed:
        least = min((shape[2 + at] - 1) * options["stride"] + reach[at] for at in range(rank))
        options["padding"] = min(options["padding"], least // 2)
    else:
        least = max(reach[at] + 1 - shape[2 + at] for at in range(rank))
        options["padding"] = max(options["padding"], -(-least // 2), 0)
    sides = (outer // groups, channels) if transposed else (channels // groups, outer)
    w = c.data((sides[1], sides[0], *kernel), weight_dtype)
    kind = f"conv{'_transpose' * transposed}"
    y = getattr(c.g, kind)(c.held[x], c.held[w], **options)
    run: Any = getattr(F, f"{kind}{rank}d")
    terms = channels // groups * math.prod(kernel)
    return c.add(y, f"{kind} {options}", (x, w), lambda a, b: run(a, b, **options), terms)


def _dequantize(c: Case, x: str) -> str:
    rank = len(c.shape(x))
    dim = c.m.rng.randrange(-rank, rank) if rank else 1
    s = c.scale(c.shape(x)[dim] if rank else 1, 0.01)
    y = c.g.dequantize(c.held[x], c.held[s], dim=dim)
    return c.add(y, f"dequantize dim {dim}", (x, s), lambda a, b: a * along(b, a, dim))


def _quantize(c: Case, x: str) -> str:
    rank, dtype = len(c.shape(x)), c.m.pick(I8, I8, E4, E5)
    dim = c.m.rng.randrange(-rank, rank) if rank else 1
    if c.m.chance(0.2):
        y = c.g.quantize(c.held[x], dtype=dtype)
        return c.add(y, f"quantize {dtype}", (x,), lambda a: rounded(a, dtype))
    s = c.scale(c.shape(x)[dim] if rank else 1, 0.05)
    y = c.g.quantize(c.held[x], c.held[s], dtype=dtype, dim=dim)
    text = f"quantize {dtype} dim {dim}"
    return c.add(y, text, (x, s), lambda a, b: rounded(a / along(b, a, dim), dtype))


def _pointwise(c: Case, x: str) -> str:
    m, g, value, shape = c.m, c.g, c.held[x], c.shape(x)
    way = m.pick("act", "act", "bias", "add", "number", "residual")
    if way == "bias" and len(shape) >= 3:
        b = c.data((shape[1],), F32)
        y = g.bias(value, c.held[b])
        return c.add(y, "bias", (x, b), lambda a, b: a + along(b, a, 1))
    if way == "add":
        b = c.data(shape[-1:], F32)
        return c.add(value + c.held[b], "add", (x, b), lambda a, b: a + b)
    if way == "number":
        number = m.pick(0.5, -3.0, 1e-3)
        return c.add(value * number, f"times {number}", (x,), lambda a: a * number)
    if way == "residual":
        z = c.data(shape, m.pick(I8, E4, F32))
        if c.dtypes[z] != F32:
            z = _dequantize(c, z)
        return c.add(value + c.held[z], "add", (x, z), lambda a, b: a + b)
    kind = m.pick("relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "hardswish", "mish")
    return c.add(g.activation(value, kind), kind, (x,), lambda a: ACTIVATIONS[kind](a))


def case(seed: int) -> Case:
    """The case of a seed."""
    m = Maker(seed)
    c = Case(m)
    rank = m.pick(2, 2, 3, 4, 4, 4, 5)
    batch = m.pick(1, 2, 3) if m.chance(0.93) else 0
    shape = (batch, m.pick(1, 2, 4, 8, 16), *(m.pick(1, 3, 5, 8) for _ in range(rank - 2)))
    x = c.data(shape, m.pick(I8, I8, E4, E5))
    for _ in range(m.pick(1, 1, 2, 3)):
        if c.dtypes[x] in (I8, E4, E5):
            x = _product(c, x) if m.chance(0.85) else _dequantize(c, x)
        if c.dtypes[x] == torch.int32 or m.chance(0.7):
            x = _dequantize(c, x)
        for _ in range(m.pick(0, 0, 1, 2)):
            x = _pointwise(c, x)
        if math.prod(c.shape(x)) and m.chance(0.4):
            y = c.g.reduction(c.held[x], mode="amax")
            c.add(y, "amax", (x,), lambda a: a.abs().amax())
        if m.chance(0.7):
            x = _quantize(c, x)
    return c


def off(c: Case, name: str, ours: torch.Tensor, right: torch.Tensor) -> str:
    """How a value is farther from float64 than the tests allow, "" for no farther."""
    of = c.made[name]
    data = {c.dtypes[each] for each in of.operands}
    dtype = next((each for each in (E4, E5) if each in data), F32)
    if "quantize" in of.text:
        dtype = F32
    if ours.is_floating_point():
        right = torch.where(right.abs() > torch.finfo(F32).max, right.sign() * math.inf, right)
        if not bool(
            (right.nan_to_num(nan=1.0).abs() > SMALLEST).any()
        ):  # float32 has few digits of it, or none
            return "" if bool((ours.double().abs() <= SMALLEST).all()) else f"{name} is not tiny"
    try:
        numerics.check(ours, right, dtype, terms=max(of.terms, 64), what=name)
    except AssertionError as error:
        return str(error)
    return ""


# -- attention -------------------------------------------------------------------------------------


@dataclass
class Attention:
    """Attention of FP8 data; NaN past the lengths."""

    dtype: torch.dtype
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]

    def __str__(self) -> str:
        told = [f"{n} {tuple(t.shape)} {t.stride()}" for n, t in self.tensors.items()]
        return f"sdpa_fp8 {self.dtype} {self.options}\n  " + ", ".join(told)

    def graph(self) -> cg.Graph:
        g = cg.Graph("fp8")
        values = {name: g.input(name, like=t) for name, t in self.tensors.items()}
        names = ("o", "lse", "amax_s", "amax_o")
        if not self.options["return_lse"]:
            names = (names[0], *names[2:])
        for name, value in zip(names, g.sdpa_fp8(**values, **self.options), strict=True):
            g.output(name, value)
        return g

    def right(self) -> dict[str, torch.Tensor]:
        t = {name: value.to(F64) for name, value in self.tensors.items()}
        (batch, heads, rows, _), keys = t["q"].shape, t["k"].shape[2]
        o, lse = t["v"].new_zeros(batch, heads, rows, t["v"].shape[3]), t["q"].new_zeros(1)
        lse = torch.full((batch, heads, rows), -math.inf, dtype=F64)
        amax_s = amax_o = 0.0
        most_q = t.get("seq_len_q", torch.full((batch,), rows)).tolist()
        most_k = t.get("seq_len_kv", torch.full((batch,), keys)).tolist()
        left, right = self.options["window"] or (None, None)
        right = 0 if self.options["is_causal"] else right
        scale = self.options["scale"] or 1.0 / math.sqrt(t["q"].shape[3])
        for b, h, row in itertools.product(range(batch), range(heads), range(rows)):
            shift = 0 if self.options["diagonal_alignment"] == "top_left" else most_k[b] - most_q[b]
            near = 0 if left is None else max(0, int(row + shift - left))
            far = keys if right is None else int(row + shift + right) + 1
            far = int(min(far, most_k[b]))
            if row >= most_q[b] or near >= far:
                continue
            shared = h // (heads // t["k"].shape[1])
            k, v = (t[name][b, shared, near:far] for name in "kv")
            scores = (k @ t["q"][b, h, row]) * t["descale_q"] * t["descale_k"] * scale
            weights = torch.exp(scores - scores.max())
            whole = rounded(weights * t["scale_s"], self.dtype)
            o[b, h, row] = whole @ v * t["descale_s"] * t["descale_v"] / weights.sum()
            lse[b, h, row] = torch.logsumexp(scores, 0)
            amax_s = max(amax_s, float((weights / weights.sum()).max()))
            amax_o = max(amax_o, float(o[b, h, row].abs().max()))
        found = {"amax_s": torch.tensor(amax_s), "amax_o": torch.tensor(amax_o), "lse": lse}
        return {**found, "o": rounded(o * t["scale_o"], self.dtype)}


def attention(seed: int) -> Attention:
    """The attention of a seed."""
    m = Maker(seed)
    dtype, shared = m.pick(E4, E5), m.pick(1, 2, 3)
    batch, heads = m.pick(1, 2, 3), m.pick(1, 2)
    rows, keys, d = m.pick(1, 2, 5), m.pick(1, 3, 8), m.pick(1, 4, 16)
    tensors: dict[str, torch.Tensor] = {}
    lengths: dict[str, list[int]] = {}
    for name, longest in (("seq_len_q", rows), ("seq_len_kv", keys)):
        if m.chance(0.35):
            lengths[name] = [m.pick(0, 1, longest, m.rng.randint(0, longest)) for _ in range(batch)]
    for name, count, length, width in (
        ("q", heads * shared, rows, d),
        ("k", heads, keys, d),
        ("v", heads, keys, m.pick(d, 3)),
    ):
        values = torch.randn(batch, count, length, width, generator=m.numbers, dtype=F64)
        values = rounded(values * m.pick(0.5, 2.0), dtype)
        for at, valid in enumerate(lengths.get("seq_len_q" if name == "q" else "seq_len_kv", ())):
            values[at, :, valid:] = math.nan
        bits = laid(values.to(dtype).view(torch.uint8), m.pick("contiguous", "permuted"), 2)
        tensors[name] = bits.view(dtype)
    shape = m.pick((), (1,))
    for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"):
        near = m.pick(1.0, 16.0) if name == "scale_s" else 1.0
        tensors[name] = (torch.rand(shape, generator=m.numbers) + 0.25) * near
    for name, each in lengths.items():
        tensors[name] = torch.tensor(each, dtype=torch.int32)
    options = {
        "is_causal": m.chance(0.3),
        "window": m.pick(None, None, (1, 1), (None, 2), (0, None)),
        "diagonal_alignment": m.pick("top_left", "bottom_right"),
        "scale": m.pick(None, 0.5),
        "return_lse": m.chance(0.5),
    }
    return Attention(dtype, tensors, options)
