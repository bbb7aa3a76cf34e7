"""Rules for gradients of activations, from their results or from what went in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...graph.value import Value
from ...ops.base import LOW_PRECISION
from ...ops.pointwise import SOFTPLUS_THRESHOLD
from .base import Arguments, Rule, Skip, rounds_once

if TYPE_CHECKING:
    from ..convert import Importer


def _operands(c: Importer, a: Arguments) -> tuple[Value, Value]:
    """The gradient, and the activation's operand or result."""
    names = ("self", "output", "result", "self_or_result", "input")
    return c.value(a["grad_output"]), c.value(next(a[name] for name in names if name in a))


def _gelu(c: Importer, a: Arguments) -> Value:
    tanh = a["approximate"] == "tanh"
    return (c.g.gelu_tanh_backward if tanh else c.g.gelu_backward)(*_operands(c, a))


def _silu(c: Importer, a: Arguments) -> Value:
    return c.g.silu_backward(*_operands(c, a))


def _sigmoid(c: Importer, a: Arguments) -> Value:
    dy, y = _operands(c, a)
    return c.g.mul(c.g.mul(dy, c.g.sub(1.0, y)), y)


def _tanh(c: Importer, a: Arguments) -> Value:
    dy, y = _operands(c, a)
    return c.g.mul(dy, c.g.sub(1.0, c.g.mul(y, y)))


def _threshold(c: Importer, a: Arguments) -> Value:
    dy, x = _operands(c, a)
    if a["threshold"] == 0:
        return c.g.relu_backward(dy, x)
    return c.g.where(c.g.le(x, float(a["threshold"])), 0.0, dy)  # of NaN it is dy


def _leaky_relu(c: Importer, a: Arguments) -> Value:
    return c.g.relu_backward(*_operands(c, a), float(a["negative_slope"]))


def _hardtanh(c: Importer, a: Arguments) -> Value:
    dy, x = _operands(c, a)
    flat = c.g.logical_or(c.g.le(x, float(a["min_val"])), c.g.ge(x, float(a["max_val"])))
    return c.g.where(flat, 0.0, dy)  # of NaN it is dy


def _hardsigmoid(c: Importer, a: Arguments) -> Value:
    dy, x = _operands(c, a)
    within = c.g.logical_and(c.g.gt(x, -3.0), c.g.lt(x, 3.0))  # not NaN
    return c.g.where(within, c.g.mul(dy, 1.0 / 6.0), 0.0)


def _hardswish(c: Importer, a: Arguments) -> Value:
    dy, x = _operands(c, a)
    slope = c.g.add(c.g.mul(x, 1.0 / 3.0), 0.5)
    sloped = c.g.where(c.g.lt(x, 3.0), c.g.mul(dy, slope), dy)  # and of NaN
    return c.g.where(c.g.le(x, -3.0), 0.0, sloped)


def _elu(c: Importer, a: Arguments) -> Value:
    scale, inner = float(a["scale"]), float(a["input_scale"])
    dy, x = _operands(c, a)
    if (scale, inner) != (1, 1) and not c.kernels and x.dtype in LOW_PRECISION:
        raise Skip  # which torch rounds once
    alpha = float(a["alpha"]) * scale
    slope = c.g.add(x, alpha) if a["is_result"] else c.g.mul(c.g.exp(_times(c, x, inner)), alpha)
    slope = _times(c, slope, inner)
    above = dy if scale == 1 else c.g.mul(dy, scale)  # and of NaN
    return c.g.where(c.g.le(x, 0.0), c.g.mul(dy, slope), above)


def _times(c: Importer, x: Value, number: float) -> Value:
    return x if number == 1 else c.g.mul(x, number)


def _log_sigmoid(c: Importer, a: Arguments) -> Value:
    dy, x = _operands(c, a)
    return c.g.mul(dy, c.g.sigmoid(c.g.neg(x)))


def _softplus(c: Importer, a: Arguments) -> Value:
    dy, x = _operands(c, a)
    if a["threshold"] != SOFTPLUS_THRESHOLD:
        rounds_once(c, x)
    inner = c.g.mul(x, float(a["beta"]))
    sloped = c.g.mul(dy, c.g.sigmoid(inner))
    return c.g.where(c.g.gt(inner, float(a["threshold"])), dy, sloped)


def _mish(c: Importer, a: Arguments) -> Value:
    """dy * (t + x * sigmoid(x) * (1 - t * t)) with t = tanh(softplus(x))."""
    dy, x = _operands(c, a)
    t = c.g.tanh(c.g.softplus(x))
    rest = c.g.mul(c.g.mul(x, c.g.sigmoid(x)), c.g.sub(1.0, c.g.mul(t, t)))
    return c.g.mul(dy, c.g.add(t, rest))


def _dropout(c: Importer, a: Arguments) -> Value:
    scaled = c.g.mul(c.value(a["grad_output"]), float(a["scale"]))
    return c.g.where(c.value(a["mask"]), scaled, 0.0)


RULES: dict[str, Rule] = {
    "gelu_backward": _gelu,
    "silu_backward": _silu,
    "sigmoid_backward": _sigmoid,
    "tanh_backward": _tanh,
    "threshold_backward": _threshold,
    "leaky_relu_backward": _leaky_relu,
    "hardtanh_backward": _hardtanh,
    "hardsigmoid_backward": _hardsigmoid,
    "hardswish_backward": _hardswish,
    "elu_backward": _elu,
    "log_sigmoid_backward": _log_sigmoid,
    "softplus_backward": _softplus,
    "mish_backward": _mish,
    "native_dropout_backward": _dropout,
}
