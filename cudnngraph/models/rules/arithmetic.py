"""Rules for arithmetic of several operands: products that are added, gates, signs, and batch norms
by the statistics of the batch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value
from ...ops.base import FLOATS
from .base import Arguments, Rule, Skip, rounds_once
from .norm import as_kept
from .shape import part

if TYPE_CHECKING:
    from ..convert import Importer


def _added(method: str) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        x, one, two = (c.value(a[name]) for name in ("self", "tensor1", "tensor2"))
        rounds_once(c, x)
        made = getattr(c.g, method)(one, two)
        factor = float(a.get("value", 1))
        return c.g.add(x, made if factor == 1 else c.g.mul(made, factor))

    return rule


def _lerp(c: Importer, a: Arguments) -> Value:
    x, end, weight = c.value(a["self"]), c.value(a["end"]), a["weight"]
    rounds_once(c, x)
    if not isinstance(weight, (int, float)):
        raise Skip
    way = c.g.sub(end, x)
    if weight < 0.5:  # as torch does: exact at both ends
        return c.g.add(x, c.g.mul(way, float(weight)))
    return c.g.sub(end, c.g.mul(way, 1.0 - float(weight)))


def _sign(c: Importer, a: Arguments) -> Value:
    x = c.value(a["self"])
    if x.dtype not in FLOATS:
        raise Skip
    zero = c.constant(torch.zeros((), dtype=x.dtype, device=c.device), "zero")
    return c.g.where(c.g.gt(x, 0.0), 1.0, c.g.where(c.g.lt(x, 0.0), -1.0, zero))


def _halves(c: Importer, a: Arguments) -> tuple[Value, Value, int]:
    x = c.value(a["self"])
    dim = a["dim"] % len(x.shape)
    half = x.shape[dim] // 2
    return part(c, x, dim, 0, half), part(c, x, dim, half, 2 * half), dim


def _glu(c: Importer, a: Arguments) -> Value:
    x, gate, _ = _halves(c, a)
    rounds_once(c, x)
    return c.g.mul(x, c.g.sigmoid(gate))


def _glu_backward(c: Importer, a: Arguments) -> Value:
    dy = c.value(a["grad_output"])
    x, gate, dim = _halves(c, a)
    rounds_once(c, x)
    opened = c.g.sigmoid(gate)
    dx = c.g.mul(dy, opened)
    return c.g.concat([dx, c.g.mul(c.g.mul(dx, c.g.sub(1.0, opened)), x)], dim)


def _prelu(c: Importer, a: Arguments) -> Value:
    x, weight = c.value(a["self"]), c.value(a["weight"])
    return c.g.where(c.g.gt(x, 0.0), x, c.g.mul(x, weight))


def _prelu_backward(c: Importer, a: Arguments) -> tuple[Value, Value]:
    dy, x, weight = (c.value(a[name]) for name in ("grad_output", "self", "weight"))
    positive = c.g.gt(x, 0.0)
    dx = c.g.where(positive, dy, c.g.mul(dy, weight))
    return dx, c.g.where(positive, 0.0, c.g.mul(dy, x))


def _norm_of_batch(c: Importer, a: Arguments) -> tuple[Any, ...]:
    """A batch norm that keeps no statistics, as those of instances are."""
    if "running_mean" in a or not a["training"]:
        raise Skip
    x = c.value(a["input"])
    wide = torch.promote_types(x.dtype, torch.float32)

    def vector(name: str, number: float) -> Value:
        if a[name] is not None:
            return c.value(a[name])
        return c.constant(torch.full(x.shape[1:2], number, dtype=wide, device=c.device))

    weight, bias = vector("weight", 1.0), vector("bias", 0.0)
    return as_kept(c, a, c.g.batch_norm_train(x, weight, bias, eps=float(a["eps"])))


RULES: dict[str, Rule] = {
    "addcmul": _added("mul"),
    "addcdiv": _added("div"),
    "lerp": _lerp,
    **dict.fromkeys(("sign", "sgn"), _sign),
    "glu": _glu,
    "glu_backward": _glu_backward,
    "_prelu_kernel": _prelu,
    "_prelu_kernel_backward": _prelu_backward,
    "_native_batch_norm_legit": _norm_of_batch,
}
