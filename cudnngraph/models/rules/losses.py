"""Rules for losses and their gradients: of classes, of differences, of logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...graph.value import Value
from ...ops.base import LOW_PRECISION
from .base import Arguments, Rule, Skip, reads

if TYPE_CHECKING:
    from ..convert import Importer

_REDUCTIONS = ("none", "mean", "sum")  # by torch's numbers


def _nll_loss(c: Importer, a: Arguments) -> tuple[Value, None]:
    x, target = c.value(a["self"]), c.value(a["target"])
    if a["weight"] is not None or len(x.shape) < 2 or reads(c.node, 1):
        raise Skip
    return c.g.nll_loss(x, target, _REDUCTIONS[a["reduction"]], int(a["ignore_index"])), None


def _nll_loss_backward(c: Importer, a: Arguments) -> Value:
    """Without the number of rows that the forward has counted: they are counted again."""
    dy, target = c.value(a["grad_output"]), c.value(a["target"])
    shape = tuple(c.node.meta["val"].shape)
    if a["weight"] is not None or len(shape) < 2:
        raise Skip
    reduction, ignored = _REDUCTIONS[a["reduction"]], int(a["ignore_index"])
    return c.g.nll_loss_backward(dy, target, shape, reduction, ignored)


def _pair(c: Importer, a: Arguments) -> tuple[Value, Value]:
    """The two operands of a loss, whose differences torch rounds but once."""
    x, target = c.value(a["self"]), c.value(a["target"])
    if x.dtype in LOW_PRECISION or x.dtype != target.dtype or x.shape != target.shape:
        raise Skip
    return x, target


def _reduced(c: Importer, each: Value, reduction: int) -> Value:
    how = _REDUCTIONS[reduction]
    return each if how == "none" else c.g.reduction(each, None, how)


Each = Callable[["Importer", Value, Arguments], Value]


def _of_difference(each: Each) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        difference = c.g.sub(*_pair(c, a))
        return _reduced(c, each(c, difference, a), a["reduction"])

    return rule


def _of_difference_backward(slope: Each) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        x, target = _pair(c, a)
        made = slope(c, c.g.sub(x, target), a)
        if _REDUCTIONS[a["reduction"]] == "mean":
            made = c.g.mul(made, 1.0 / max(1, math.prod(x.shape)))
        return c.g.mul(made, c.value(a["grad_output"]))

    return rule


def _square(c: Importer, x: Value, a: Arguments) -> Value:
    return c.g.mul(x, x)


def _twice(c: Importer, x: Value, a: Arguments) -> Value:
    return c.g.mul(x, 2.0)


def _bound(a: Arguments, name: str) -> float:
    """Where a loss passes from squares to differences."""
    bound = float(a[name])
    if bound <= 0:
        raise Skip
    return bound


def _smooth(c: Importer, x: Value, a: Arguments) -> Value:
    beta, size = _bound(a, "beta"), c.g.abs(x)
    square = c.g.mul(c.g.mul(size, size), 0.5 / beta)
    return c.g.where(c.g.lt(size, beta), square, c.g.sub(size, 0.5 * beta))


def _smooth_slope(c: Importer, x: Value, a: Arguments) -> Value:
    return c.g.clamp(c.g.mul(x, 1.0 / _bound(a, "beta")), -1.0, 1.0)


def _huber(c: Importer, x: Value, a: Arguments) -> Value:
    delta, size = _bound(a, "delta"), c.g.abs(x)
    square, line = c.g.mul(c.g.mul(size, size), 0.5), c.g.mul(c.g.sub(size, 0.5 * delta), delta)
    return c.g.where(c.g.le(size, delta), square, line)


def _huber_slope(c: Importer, x: Value, a: Arguments) -> Value:
    delta = _bound(a, "delta")
    return c.g.clamp(x, -delta, delta)


def _of_logits(c: Importer, a: Arguments) -> Value:
    """(1 - target) * x + log(1 + exp(-x)), the logarithm 1 + (p - 1) * target times with a weight p
    of what is true; all of it times another weight."""
    x, target = _pair(c, a)
    loss = c.g.softplus(c.g.neg(x))
    weight, positive = (a.get(name) for name in ("weight", "pos_weight"))
    if positive is not None:
        loss = c.g.mul(
            c.g.add(c.g.mul(c.g.sub(c.value(positive), 1.0), target), 1.0),
            loss,
        )
    each = c.g.add(c.g.mul(c.g.sub(1.0, target), x), loss)
    each = each if weight is None else c.g.mul(each, c.value(weight))
    return _reduced(c, each, a.get("reduction", 1))


_DIFFERENCES: dict[str, tuple[Each, Each]] = {
    "mse_loss": (_square, _twice),
    "smooth_l1_loss": (_smooth, _smooth_slope),
    "huber_loss": (_huber, _huber_slope),
}

RULES: dict[str, Rule] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll_loss),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_loss_backward),
    **{name: _of_difference(each) for name, (each, _) in _DIFFERENCES.items()},
    **{
        f"{name}_backward": _of_difference_backward(slope)
        for name, (_, slope) in _DIFFERENCES.items()
    },
    "binary_cross_entropy_with_logits": _of_logits,
}
