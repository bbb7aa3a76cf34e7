"""Rules for pointwise ops: activations, arithmetic, comparisons and masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...graph.builder import Graph
from ...graph.core import input_of
from ...graph.value import Value
from ...ops.base import FLOATS, LOW_PRECISION
from ...ops.pointwise import SOFTPLUS_THRESHOLD
from ..norm_patterns import match_normalize
from .base import Arguments, Rule, Skip, cast_to, first, gives_many, reads, rounds_once
from .norm import written_norm

if TYPE_CHECKING:
    from ..convert import Importer


def _unary(method: str, *attrs: str) -> Rule:
    return lambda c, a: getattr(c.g, method)(c.value(first(a)), *(float(a[each]) for each in attrs))


def _one(function: Callable[[Graph, Value], Value]) -> Rule:
    return lambda c, a: function(c.g, c.value(first(a)))


def _add(c: Importer, a: Arguments) -> Value:
    """x + y, where a bias of either comes last.

    cuDNN has precompiled engines for the order convolution, residual, bias, activation, and a bias
    on both sides is one bias.
    """
    x, y = c.operand(a["self"]), c.operand(a["other"])
    plain = a.get("alpha", 1) == 1 and isinstance(x, Value) and isinstance(y, Value)
    if not plain or not all(each.dtype in FLOATS for each in (x, y)):
        return _two("add")(c, a)  # type: ignore[no-any-return]
    biases: list[torch.Tensor] = []
    parts = []
    for value, node in zip((x, y), c.node.args, strict=True):
        found = c.biased.get(value.name)
        if found is None or len(getattr(node, "users", ())) != 1 or x.shape != y.shape:
            parts.append(value)
        else:
            parts.append(found[0])
            biases.append(found[1])
    made = c.g.add(*parts)
    if not biases:
        return made
    total = biases[0]
    if len(biases) > 1:
        total = (biases[0].double() + biases[1].double()).to(biases[0].dtype)
    return c.biased_value(made, total)


_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")


_OF_BOOLS = {"add": "logical_or", "mul": "logical_and"}


def _alike(c: Importer, x: Any, y: Any) -> tuple[Any, Any]:
    """Operands with bools and whole numbers as floats, where torch computes in floats and a kernel
    casts them."""
    dtypes = {each.dtype for each in (x, y) if isinstance(each, Value)}
    floats = [each for each in dtypes if each in FLOATS] or [c.node.meta["val"].dtype]
    if not c.kernels or len(floats) > 1 or floats[0] not in FLOATS:
        return x, y

    def cast(each: Any) -> Any:
        plain = not isinstance(each, Value) or each.dtype in FLOATS
        return each if plain else cast_to(c, each, floats[0])

    return cast(x), cast(y)


def _as_kept(c: Importer, x: Any, y: Any) -> tuple[Any, Any]:
    """Operands of 16 bits rounded to these where they are asked whether they are equal, as the
    largest of some is to each of them: one may be kept and so rounded, the other not."""
    if not isinstance(x, Value) or not isinstance(y, Value):
        return x, y

    def rounded(each: Value) -> Value:
        computed = input_of(c.g, each.name) is not each
        return cast_to(c, each, each.dtype) if computed and each.dtype in LOW_PRECISION else each

    return rounded(x), rounded(y)


def _two(method: str) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        x, other = c.operand(first(a)), a["exponent"] if "exponent" in a else a["other"]
        if method in _COMPARES and isinstance(other, float) and x.dtype in LOW_PRECISION:
            other = torch.tensor(other, dtype=x.dtype).item()  # as torch compares
        x, y = _alike(c, x, c.operand(other))
        alpha = a.get("alpha", 1)
        if a.get("rounding_mode") is not None:
            raise Skip
        y = y if alpha == 1 else c.g.mul(y, float(alpha))
        if method in ("eq", "ne"):
            x, y = _as_kept(c, x, y)
        bools = all(isinstance(each, Value) and each.dtype == torch.bool for each in (x, y))
        return getattr(c.g, _OF_BOOLS.get(method, method) if bools else method)(x, y)  # type: ignore[no-any-return]

    return rule


def _div(c: Importer, a: Arguments) -> Value:
    floor = match_normalize(c.node)
    if floor is not None:
        return c.g.normalize(c.value(a["self"]), eps=floor)
    norm = written_norm(c)
    return _two("div")(c, a) if norm is None else norm


def _mul(c: Importer, a: Arguments) -> Value:
    norm = written_norm(c)
    return _two("mul")(c, a) if norm is None else norm


def _rsub(c: Importer, a: Arguments) -> Value:
    x, y = _alike(c, c.operand(a["self"]), c.operand(a["other"]))
    alpha = a.get("alpha", 1)
    return c.g.sub(y, x if alpha == 1 else c.g.mul(x, float(alpha)))


def _pow(c: Importer, a: Arguments) -> Value:
    if isinstance(a["exponent"], (int, float)) and a["exponent"] in (2, 3):  # as torch does
        x = c.value(a["self"])
        square = c.g.mul(x, x)
        return square if a["exponent"] == 2 else c.g.mul(square, x)
    return _two("pow")(c, a)  # type: ignore[no-any-return]


def _where(c: Importer, a: Arguments) -> Value:
    x, y = c.operand(a["self"]), c.operand(a["other"])
    if not isinstance(x, Value) and not isinstance(y, Value):  # of which the dtype is one's own
        x = c.value(a["self"])
    dtype = c.node.meta["val"].dtype
    x, y = (_held(c, each, dtype) for each in (x, y))
    return c.g.where(c.value(a["condition"]), x, y)


def _held(c: Importer, number: Value | float, dtype: torch.dtype) -> Value | float:
    """A value or a number; a constant of one that is not finite, which no attribute is."""
    if isinstance(number, Value) or math.isfinite(number):
        return number
    return c.constant(torch.full((), number, dtype=dtype, device=c.device))


def _masked_fill(c: Importer, a: Arguments) -> Value:
    x, number = c.value(a["self"]), c.operand(a["value"])
    if isinstance(number, Value) and number.dtype != x.dtype:
        raise Skip
    return c.g.where(c.value(a["mask"]), _held(c, number, x.dtype), x)


def _gelu(c: Importer, a: Arguments) -> Value:
    return c.g.gelu(c.value(a["self"]), a["approximate"])


def _elu(c: Importer, a: Arguments) -> Value:
    scale = float(a["scale"])
    if a["input_scale"] != 1:
        raise Skip
    x = c.value(a["self"])
    if scale != 1 and not c.kernels and x.dtype in LOW_PRECISION:
        raise Skip  # which torch rounds once
    y = c.g.elu(x, float(a["alpha"]))
    return y if scale == 1 else c.g.mul(y, scale)


def _threshold(c: Importer, a: Arguments) -> Value:
    x = c.value(a["self"])
    number = torch.full((), float(a["value"]), dtype=x.dtype, device=c.device)
    return c.g.where(c.g.le(x, float(a["threshold"])), c.constant(number, "value"), x)


def _rounded_once(c: Importer, *given: Any) -> list[Value]:
    """Operands of an op of torch's that is several of ours, which one kernel is to run."""
    values = [c.value(each) for each in given]
    if not c.kernels and any(each.dtype in LOW_PRECISION for each in values):
        raise Skip
    return values


def _celu(c: Importer, a: Arguments) -> Value:
    alpha = float(a["alpha"])
    if alpha == 1:
        return c.g.elu(c.value(a["self"]), 1.0)
    (x,) = _rounded_once(c, a["self"])
    below = c.g.mul(c.g.elu(c.g.mul(x, 1.0 / alpha), 1.0), alpha)
    return c.g.where(c.g.gt(x, 0.0), x, below)


def _log_sigmoid(c: Importer, a: Arguments) -> Any:
    """With exp(-|x|), which torch's own gradient on a CPU reads."""
    x = c.value(a["self"])
    y = c.g.neg(c.g.softplus(c.g.neg(x)))
    if not gives_many(c.node):
        return y
    return y, c.g.exp(c.g.neg(c.g.abs(x))) if reads(c.node, 1) else None


def _hardshrink(c: Importer, a: Arguments) -> Value:
    x, limit = c.value(a["self"]), float(a["lambd"])
    small = c.g.logical_and(c.g.ge(x, -limit), c.g.le(x, limit))  # not NaN
    return c.g.where(small, 0.0, x)


def _softshrink(c: Importer, a: Arguments) -> Value:
    (x,) = _rounded_once(c, a["self"])
    limit = float(a["lambd"])
    below = c.g.where(c.g.lt(x, -limit), c.g.add(x, limit), c.g.mul(x, 0.0))  # NaN of NaN
    return c.g.where(c.g.gt(x, limit), c.g.sub(x, limit), below)


def _rrelu(c: Importer, a: Arguments) -> Value:
    """In evaluation the slope is the mean of the bounds."""
    if a["training"]:
        raise Skip
    return c.g.leaky_relu(c.value(a["self"]), (float(a["lower"]) + float(a["upper"])) / 2)


def _logit(c: Importer, a: Arguments) -> Value:
    (x,) = _rounded_once(c, a["self"])
    if x.dtype not in FLOATS:
        raise Skip
    eps = a.get("eps")
    x = x if eps is None else c.g.clamp(x, float(eps), 1.0 - float(eps))
    return c.g.log(c.g.div(x, c.g.sub(1.0, x)))


def _nan_to_num(c: Importer, a: Arguments) -> Value:
    x = c.value(a["self"])
    if x.dtype not in FLOATS:
        raise Skip
    most = torch.finfo(x.dtype).max
    nan, above, below = (a.get(name) for name in ("nan", "posinf", "neginf"))
    made = c.g.where(c.g.gt(x, most), _held(c, most if above is None else above, x.dtype), x)
    made = c.g.where(c.g.lt(x, -most), _held(c, -most if below is None else below, x.dtype), made)
    return c.g.where(c.g.ne(x, x), _held(c, nan or 0.0, x.dtype), made)


def _log_add_exp(c: Importer, a: Arguments) -> Value:
    """log(exp(x) + exp(y)), from the larger one; of equal infinities that one."""
    x, y = _rounded_once(c, a["self"], a["other"])
    far = c.g.neg(c.g.abs(c.g.sub(x, y)))
    found = c.g.add(c.g.maximum(x, y), c.g.softplus(far))
    alike = c.g.logical_and(c.g.eq(x, y), c.g.gt(c.g.abs(x), torch.finfo(x.dtype).max))
    return c.g.where(alike, x, found)


def _x_log_y(c: Importer, a: Arguments) -> Value:
    """x log(y), which is 0 where x is, unless y is NaN."""
    x, y = _rounded_once(c, a["self"], a["other"])
    zero = c.g.logical_and(c.g.eq(x, 0.0), c.g.eq(y, y))
    return c.g.where(zero, 0.0, c.g.mul(x, c.g.log(y)))


def _softplus(c: Importer, a: Arguments) -> Value:
    x, beta, threshold = c.value(a["self"]), float(a["beta"]), float(a["threshold"])
    y = c.g.softplus(x, beta)
    if threshold == SOFTPLUS_THRESHOLD:
        return y
    if threshold > SOFTPLUS_THRESHOLD:  # between the two float64 knows the difference
        raise Skip
    rounds_once(c, x)
    return c.g.where(c.g.gt(c.g.mul(x, beta), threshold), x, y)


def _clamp(c: Importer, a: Arguments) -> Value:
    low, high = a.get("min", a.get("min_val")), a.get("max", a.get("max_val"))
    if any(isinstance(each, (torch.Tensor, Value)) for each in (low, high)):
        x = c.value(a["self"])
        x = x if low is None else c.g.maximum(x, c.value(low))
        return x if high is None else c.g.minimum(x, c.value(high))
    low = None if low is None or low == -math.inf else float(low)
    high = None if high is None or high == math.inf else float(high)
    x = c.value(a["self"])
    return x if low is None and high is None else c.g.clamp(x, low, high)


RULES: dict[str, Rule] = {
    **{
        name: _one(lambda g, x, name=name: getattr(g, name)(x))  # type: ignore[misc]
        for name in (
            *("relu", "silu", "sigmoid", "tanh", "neg", "abs", "exp", "log", "sqrt", "rsqrt"),
            *("reciprocal", "erf", "relu6", "hardswish", "mish", "logical_not"),
        )
    },
    "square": _one(lambda g, x: g.mul(x, x)),
    "hardsigmoid": _one(lambda g, x: g.mul(g.clamp(g.add(x, 3.0), 0.0, 6.0), 1.0 / 6.0)),
    "gelu": _gelu,
    "elu": _elu,
    "celu": _celu,
    **dict.fromkeys(("log_sigmoid", "log_sigmoid_forward"), _log_sigmoid),
    "hardshrink": _hardshrink,
    "softshrink": _softshrink,
    "rrelu": _rrelu,
    "logit": _logit,
    "nan_to_num": _nan_to_num,
    "logaddexp": _log_add_exp,
    "xlogy": _x_log_y,
    "leaky_relu": _unary("leaky_relu", "negative_slope"),
    "softplus": _softplus,
    "threshold": _threshold,
    **dict.fromkeys(("clamp", "hardtanh", "clamp_min", "clamp_max"), _clamp),
    "add": _add,
    **{name: _two(name) for name in ("sub", "minimum", "maximum")},
    "mul": _mul,
    "div": _div,
    **{name: _two(name) for name in _COMPARES},
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), _two("logical_and")),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), _two("logical_or")),
    "bitwise_not": _one(lambda g, x: g.logical_not(x)),
    "rsub": _rsub,
    "pow": _pow,
    "where": _where,
    "masked_fill": _masked_fill,
}
