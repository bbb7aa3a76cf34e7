"""Random calls of :mod:`cudnngraph.functional`, each beside torch's own functions.

A call is made by its seed alone. ``theirs`` is built of :mod:`torch.nn.functional` and runs in any
dtype. Some calls are spoilt: one tensor or option no longer fits. What torch then refuses has to be
an error of :mod:`cudnngraph.errors`.

``RANDOM_CALLS=5000 pytest tests/cpu/functional/test_random_functions.py`` makes so many;
``RANDOM_FIRST=1234 RANDOM_CALLS=1`` that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.random_tensors import BF16, F16, F32, F64, Maker
from tests.samples import case

Tensors = dict[str, torch.Tensor | None]
Theirs = Callable[..., Any]

ACTIVATIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    **case.ACTIVATIONS,
    "softplus": lambda x, beta=1.0: _softplus(x, beta),
}
ATTRS: Mapping[str, Callable[[Maker], dict[str, float]]] = {
    "leaky_relu": lambda m: {"negative_slope": m.pick(0.2, 0.0, -0.5, 1.0)},
    "elu": lambda m: {"alpha": m.pick(0.7, 2.0, 1.0)},
    "softplus": lambda m: {"beta": m.pick(0.5, 1.0, 3.0)},
    "clamp": lambda m: m.pick({"min": -0.5}, {"max": 0.5}, {"min": -0.5, "max": 1.0}),
}


@dataclass
class Call:
    """A function, its tensors by keyword, options, and what torch makes of the same."""

    name: str
    dtype: torch.dtype
    tensors: Tensors
    options: dict[str, Any]
    theirs: Theirs
    terms: int
    spoilt: str = ""
    written: tuple[str, ...] = ()  # tensors that the call writes to
    judged: bool = True  # whether ``theirs`` knows of all options

    def __str__(self) -> str:
        told = [
            f"{name}={None if t is None else (tuple(t.shape), t.stride(), str(t.dtype)[6:])}"
            for name, t in self.tensors.items()
        ]
        told += [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.name}({', '.join(told)}){' spoilt: ' * bool(self.spoilt)}{self.spoilt}"


def _acted(m: Maker, p: float = 0.7) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """An activation's keywords, and torch's."""
    if not m.chance(p):
        return {}, lambda x: x
    kind = m.pick(*ACTIVATIONS)
    attrs = ATTRS[kind](m) if kind in ATTRS and m.chance(0.8) else {}
    if kind == "clamp" and not attrs:
        attrs = {"min": 0.0}
    return {"activation": kind, **attrs}, lambda x: ACTIVATIONS[kind](x, **attrs)


def _sizes(m: Maker, rank: int, least: int = 1) -> tuple[int, ...]:
    return tuple(m.rng.randint(least, 7) for _ in range(rank))


def _some(m: Maker, rank: int, values: tuple[int, ...]) -> Any:
    """One number, or one for each dim as a tuple or a list."""
    if m.chance(0.5):
        return m.pick(*values)
    made = [m.pick(*values) for _ in range(rank)]
    return made if m.chance(0.3) else tuple(made)


def _conv(m: Maker, dtype: torch.dtype) -> Call:
    rank, transposed = m.pick(1, 2, 2, 2, 3), m.chance(0.35)
    normed = m.chance(0.35) and rank == 2
    groups = m.pick(1, 1, 1, 2, 3)
    inner, outer = groups * m.pick(1, 2, 3), groups * m.pick(1, 2, 4)
    kernel, sizes = tuple(m.pick(1, 2, 3) for _ in range(rank)), _sizes(m, rank, 2)
    batch = m.pick(0, 1, 2, 3)
    shape = (batch, inner, *sizes)
    if m.chance(0.1) and not normed:
        shape = shape[1:]
    weight = (inner, outer // groups, *kernel) if transposed else (outer, inner // groups, *kernel)
    options: dict[str, Any] = {"groups": groups}
    for name, values in (("stride", (1, 2)), ("padding", (0, 1, 2)), ("dilation", (1, 2))):
        if m.chance(0.6):
            options[name] = _some(m, rank, values)
    if transposed and m.chance(0.4):
        options["output_padding"] = _some(m, rank, (0, 1))
    if not transposed and m.chance(0.15):
        options["padding"] = m.pick("same", "valid")
    tensors: Tensors = {"input": m.tensor(shape, dtype), "weight": m.tensor(weight, dtype)}
    if m.chance(0.6):
        tensors["bias"] = m.tensor((outer,), dtype)
    torchs: Any = getattr(F, f"conv{'_transpose' * transposed}{rank}d")
    geometry = dict(options)

    def convolved(t: Tensors) -> Any:
        bias = t.get("bias")
        return torchs(t["input"], t["weight"], bias, **geometry)

    # Torch does not look at the geometry of an empty batch.
    one: Any = tensors["input"] if batch else torch.zeros(1, *shape[1:], dtype=dtype)
    made = _shape_of(lambda: convolved({**tensors, "input": one}))
    spoilt = "" if made is not None and 0 not in made else "geometry"
    if made is not None and len(shape) == rank + 2:
        made = (batch, *made[1:])
    more, acted = _acted(m)
    if made is not None and m.chance(0.35):
        tensors["residual"] = m.tensor(made, dtype)
    terms = math.prod(weight[1:]) * (batch or 1) * 16

    def added(t: Tensors, y: Any) -> Any:
        return y if t.get("residual") is None else y + t["residual"]

    if not normed:
        name = f"conv{'_transpose' * transposed}{rank}d"
        alphas: dict[str, float] = {}
        if m.chance(0.3):
            name = f"conv{'_transpose' * transposed}_bias_act"
            more = more or {"activation": None}
            alphas = {"alpha1": 0.5, "alpha2": -2.0} if m.chance(0.3) else {}

        def plain(t: Tensors) -> Any:
            if not alphas:
                return acted(added(t, convolved(t)))
            y = 0.5 * convolved({**t, "bias": None})
            y = y if t.get("residual") is None else y - 2.0 * t["residual"]  # type: ignore[operator]
            return acted(y if t.get("bias") is None else y + t["bias"].view(-1, *(1,) * rank))  # type: ignore[union-attr]

        options |= {**more, **alphas}
        return Call(name, dtype, tensors, options, plain, terms, spoilt)
    training, eps, momentum = m.chance(0.5), m.pick(1e-5, 1e-3), m.pick(0.1, 0.3, 1.0)
    if made is not None and batch * math.prod(made[2:]) < 8:  # of two, a gradient is all rounding
        training = False
    stats = not training or m.chance(0.7)
    wide = F32 if dtype in (F16, BF16) and m.chance(0.5) else dtype
    for name, positive in (("running_mean", False), ("running_var", True)):
        tensors[name] = m.tensor((outer,), wide, positive=positive, plain=True) if stats else None
    for name in ("bn_weight", "bn_bias"):
        if m.chance(0.7):
            tensors[name] = m.tensor((outer,), wide)
    more = more or {"activation": None}
    norm = {"training": training, "eps": eps, "momentum": momentum}

    def normal(t: Tensors) -> Any:
        y = F.batch_norm(
            convolved(t),
            t["running_mean"],
            t["running_var"],
            t.get("bn_weight"),
            t.get("bn_bias"),
            training,
            momentum,
            eps,
        )
        return acted(added(t, y))

    name = f"conv{'_transpose' * transposed}_bn_act"
    written = ("running_mean", "running_var") if training and stats else ()
    options |= {**more, **norm}
    return Call(name, dtype, tensors, options, normal, terms * 8, spoilt, written)


def _shape_of(function: Callable[[], torch.Tensor]) -> tuple[int, ...] | None:
    try:
        return tuple(function().shape)
    except (RuntimeError, ValueError):
        return None


def _standard(x: torch.Tensor, dims: tuple[int, ...], eps: float, centred: bool) -> torch.Tensor:
    """Not by torch's norms: those refuse some sizes, and the backward of its group norm, given one
    of weight and bias, ends the process."""
    x = x - x.mean(dims, keepdim=True) if centred else x
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)


def _softplus(x: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    """torch's, whose slope is 1 beyond the threshold, by its own slope."""
    sloped = torch.logaddexp(torch.zeros_like(x), beta * x) / beta
    return F.softplus(x, beta).detach() + (sloped - sloped.detach())


def _norm(m: Maker, dtype: torch.dtype) -> Call:
    kind = m.pick("layer_norm", "rms_norm", "group_norm", "instance_norm")
    wide = F32 if dtype in (F16, BF16) and m.chance(0.5) else dtype
    options: dict[str, Any] = {}
    tensors: Tensors
    if kind in ("layer_norm", "rms_norm"):
        shape = tuple(m.pick(1, 2, 3, 5, 8) for _ in range(m.pick(1, 2, 3, 3, 4)))
        if m.chance(0.08) and len(shape) > 1:
            shape = (0, *shape[1:])
        last = m.rng.randint(1, len(shape))
        sizes = shape[-last:]
        options["normalized_shape"] = m.pick(sizes, list(sizes))
        params = sizes
    else:
        groups = m.pick(1, 2, 3)
        channels = groups * m.pick(1, 2)
        shape = (m.pick(0, 1, 2), channels, *_sizes(m, m.pick(1, 2, 2, 3)))
        params = (channels,)
        if kind == "group_norm":
            options["num_groups"] = groups
    if m.chance(0.5):
        options["eps"] = m.pick(1e-5, 1e-3, 1e-6)
    tensors = {"input": m.tensor(shape, dtype)}
    if m.chance(0.7):
        tensors["weight"] = m.tensor(params, wide)
    if m.chance(0.5):
        tensors["bias"] = m.tensor(params, wide)
    if m.chance(0.4):
        tensors["residual"] = m.tensor(shape, dtype)
    more, acted = _acted(m, 0.4)

    def theirs(t: Tensors) -> Any:
        x: Any = t["input"]
        total = x if t.get("residual") is None else x + t["residual"]
        weight, bias = t.get("weight"), t.get("bias")
        eps = options.get("eps", 1e-5)
        if kind == "rms_norm":
            eps = options.get("eps", torch.finfo(F64 if dtype == F64 else F32).eps)
        wide: Any = total if dtype == F64 else total.to(F64 if total.dtype == F64 else F32)
        if kind in ("layer_norm", "rms_norm"):
            y = _standard(wide, tuple(range(-len(params), 0)), eps, kind == "layer_norm")
        else:  # an instance norm is one of as many groups as channels
            count = options.get("num_groups", params[0])
            rows = wide.reshape(len(wide), count, wide.shape[1] // count, *wide.shape[2:])
            y = _standard(rows, tuple(range(2, rows.dim())), eps, True).reshape(wide.shape)
            column = (-1, *(1,) * (wide.dim() - 2))
            weight, bias = (each if each is None else each.view(column) for each in (weight, bias))
        y = y if weight is None else y * weight
        y = (y if bias is None else y + bias).to(x.dtype)
        y = acted(y)
        return y if t.get("residual") is None else (y, total)

    terms = max(math.prod(shape), 1)
    return Call(kind, dtype, tensors, {**options, **more}, theirs, terms)


def _linear(m: Maker, dtype: torch.dtype) -> Call:
    inner, outer = m.pick(1, 3, 8), m.pick(1, 2, 5, 16)
    lead = tuple(m.pick(0, 1, 2, 3, 4) if m.chance(0.15) else m.pick(1, 2, 3) for _ in range(4))
    lead = lead[: m.pick(0, 1, 2, 2, 3, 4)]
    x = m.tensor((*lead, inner), dtype)
    more, acted = _acted(m)
    tensors: Tensors
    if m.chance(0.5):
        tensors = {"input": x, "weight": m.tensor((outer, inner), dtype)}
        if m.chance(0.6):
            tensors["bias"] = m.tensor((outer,), dtype)
        if m.chance(0.4):
            shape = [*lead, outer]
            for at in range(len(shape)):
                if m.chance(0.2):
                    shape[at] = 1
            tensors["residual"] = m.tensor(shape[m.pick(0, 0, len(shape) - 1) :], dtype)

        def line(t: Tensors) -> Any:
            y = F.linear(t["input"], t["weight"], t.get("bias"))  # type: ignore[arg-type]
            return acted(y if t.get("residual") is None else y + t["residual"])

        return Call("linear", dtype, tensors, more, line, 8 * max(x.numel(), 1))
    hidden = m.pick(1, 4, 6)
    more = more or {"activation": None}
    tensors = {"input": x, "up": m.tensor((hidden, inner), dtype), "up_bias": None}
    if m.chance(0.6):
        tensors["up_bias"] = m.tensor((hidden,), dtype)
    tensors["down"] = m.tensor((outer, hidden), dtype)
    if m.chance(0.5):
        tensors["down_bias"] = m.tensor((outer,), dtype)
    if m.chance(0.5):
        tensors["gate"] = m.tensor((hidden, inner), dtype)
        if m.chance(0.5):
            tensors["gate_bias"] = m.tensor((hidden,), dtype)

    def pair(t: Tensors) -> Any:
        up = F.linear(t["input"], t["up"], t["up_bias"])  # type: ignore[arg-type]
        if t.get("gate") is None:
            up = acted(up)
        else:
            up = acted(F.linear(t["input"], t["gate"], t.get("gate_bias"))) * up  # type: ignore[arg-type]
        return F.linear(up, t["down"], t.get("down_bias"))  # type: ignore[arg-type]

    return Call("mlp", dtype, tensors, more, pair, 8 * max(x.numel(), 1))


def spoil(m: Maker, call: Call) -> None:
    """Change one tensor or option so that it may not fit."""
    names = [name for name, tensor in call.tensors.items() if tensor is not None]
    name = m.pick(*names)
    tensor: Any = call.tensors[name]
    way = m.pick("rank", "size", "dtype", "scalar", "option", "empty", "drop", "whole")
    if way == "rank":
        call.tensors[name] = tensor[None] if m.chance(0.5) or not tensor.dim() else tensor[..., 0]
    elif way == "size" and tensor.dim():
        dim = m.rng.randrange(tensor.dim())
        call.tensors[name] = torch.cat(
            [tensor, tensor.narrow(dim, 0, min(1, tensor.shape[dim]))], dim
        )
    elif way == "dtype":
        call.tensors[name] = tensor.to(m.pick(F16, F32, F64, torch.complex64))
    elif way == "whole":
        call.tensors[name] = tensor.nan_to_num().to(m.pick(torch.int64, torch.bool, torch.uint8))
    elif way == "scalar":
        call.tensors[name] = tensor.new_ones(())
    elif way == "empty" and tensor.dim():
        call.tensors[name] = tensor.narrow(m.rng.randrange(tensor.dim()), 0, 0)
    elif way == "option" and call.options:
        name = m.pick(*call.options)
        call.judged = False
        call.options[name] = m.pick(0, -1, 3, 1.5, "relu", "same", (1,), (1, 2, 3, 4), None, True)
    elif way == "drop" and name in ("weight", "input", "down", "running_var"):
        call.tensors[name] = None
    else:
        return
    call.spoilt = f"{way} of {name}"


FAMILIES: Mapping[str, Callable[[Maker, torch.dtype], Call]] = {
    "conv": _conv,
    "norm": _norm,
    "linear": _linear,
}
DTYPES = (F64, F64, F32, F32, F16, BF16)


def call(seed: int) -> Call:
    """The call of a seed."""
    m = Maker(seed)
    dtype = m.pick(*DTYPES)
    made = FAMILIES[m.pick("conv", "conv", "norm", "linear")](m, dtype)
    if m.chance(0.25):
        spoil(m, made)
    return made
