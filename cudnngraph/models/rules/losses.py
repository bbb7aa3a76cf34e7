"""Rules for losses and their gradients: of classes, of differences, of logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value
from ...ops.base import LOW_PRECISION
from .base import Arguments, Rule, Skip, in_kernels, reads

if TYPE_CHECKING:
    from ..convert import Importer

_REDUCTIONS = ("none", "mean", "sum")  # by torch's numbers


_X, _Y = ("tensor", 0), ("tensor", 1)  # of an op of torch's


def _nll_loss(c: Importer, a: Arguments) -> tuple[Value, Any]:
    """With the sum of the weights of the rows that count, where classes have weights."""
    x, target = c.value(a["self"]), c.value(a["target"])
    how, ignored = _REDUCTIONS[a["reduction"]], int(a["ignore_index"])
    if len(x.shape) == 1:  # one row, of which torch has the sum where none is asked for
        x, target = c.g.reshape(x, (1, *x.shape)), c.g.reshape(target, (1,))
        how = "sum" if how == "none" else how
    if a["weight"] is None:
        if reads(c.node, 1):
            raise Skip
        return c.g.nll_loss(x, target, how, ignored), None
    weights = _weights_of_rows(c, c.value(a["weight"]), target, ignored)
    each = c.g.mul(c.g.nll_loss(x, target, "none", ignored), weights)
    if how == "none":
        return each, torch.zeros((), dtype=x.dtype, device=c.device)
    loss, total = (c.g.reduction(value, None, "sum") for value in (each, weights))
    return c.g.div(loss, total) if how == "mean" else loss, total


def _nll_loss_backward(c: Importer, a: Arguments) -> Value:
    """Without the number of rows that the forward has counted: they are counted again."""
    dy, target = c.value(a["grad_output"]), c.value(a["target"])
    made: tuple[int, ...] = tuple(c.node.meta["val"].shape)
    how, ignored, shape = _REDUCTIONS[a["reduction"]], int(a["ignore_index"]), made
    if len(made) == 1:
        shape, target = (1, *made), c.g.reshape(target, (1,))
        how = "sum" if how == "none" else how
    if a["weight"] is not None:
        weights = _weights_of_rows(c, c.value(a["weight"]), target, ignored)
        dy = c.g.div(dy, c.value(a["total_weight"])) if how == "mean" else dy
        dy, how = c.g.mul(weights, dy), "none"
    dx = c.g.nll_loss_backward(dy, target, shape, how, ignored)
    return dx if shape == made else c.g.reshape(dx, made)


def _weights_of_rows(c: Importer, weight: Value, target: Value, ignored: int) -> Value:
    """The weight of the class of each row, 0 of one that does not count."""
    if not in_kernels(c, weight):
        raise Skip  # torch's own is one kernel
    counts = c.g.aten([target], "aten.ne.Scalar", (_X, ignored))
    known = c.g.aten([counts, target], "aten.where.ScalarOther", (_X, _Y, 0))
    found = c.g.aten([weight, known], "aten.index.Tensor", (_X, ("list", _Y)))
    return c.g.where(counts, found, 0.0)


def _pair(c: Importer, a: Arguments) -> tuple[Value, Value]:
    """The two operands of a loss; of 16 bits where a kernel rounds them no more than torch's."""
    x, target = c.value(a["self"]), c.value(a["target"])
    if x.dtype in LOW_PRECISION and not c.kernels:
        raise Skip
    if x.dtype != target.dtype or x.shape != target.shape:
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
        made = _averaged(c, slope(c, c.g.sub(x, target), a), x, a["reduction"])
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


def _of_probabilities(c: Importer, a: Arguments) -> Value:
    """-target * log(x) - (1 - target) * log(1 - x), of which no logarithm is below -100."""
    x, target = _probabilities(c, a)
    of_true = c.g.clamp(c.g.log(x), LEAST_LOGARITHM, None)
    of_false = c.g.clamp(_log_of_one_and(c, c.g.neg(x)), LEAST_LOGARITHM, None)
    loss = c.g.sub(c.g.mul(c.g.sub(target, 1.0), of_false), c.g.mul(target, of_true))
    loss = loss if a["weight"] is None else c.g.mul(loss, c.value(a["weight"]))
    return _reduced(c, loss, a["reduction"])


def _of_probabilities_backward(c: Importer, a: Arguments) -> Value:
    x, target = _probabilities(c, a)
    slope = c.g.maximum(c.g.mul(c.g.sub(1.0, x), x), LEAST_SLOPE)
    dx = c.g.div(c.g.mul(c.value(a["grad_output"]), c.g.sub(x, target)), slope)
    dx = dx if a["weight"] is None else c.g.mul(dx, c.value(a["weight"]))
    return _averaged(c, dx, x, a["reduction"])


#: As torch has them of binary cross entropy.
LEAST_LOGARITHM, LEAST_SLOPE = -100.0, 1e-12


def _probabilities(c: Importer, a: Arguments) -> tuple[Value, Value]:
    x, target = _pair(c, a)
    if not in_kernels(c, x):
        raise Skip  # torch's own is one kernel
    return x, target


def _log_of_one_and(c: Importer, x: Value) -> Value:
    made: Value = c.g.aten([x], "aten.log1p.default", (_X,))
    return made


def _of_margins(c: Importer, a: Arguments) -> Value:
    """log(1 + exp(-target * x)), which overflows where torch's does."""
    return _reduced(c, _log_of_one_and(c, _powers(c, a)[1]), a["reduction"])


def _of_margins_backward(c: Importer, a: Arguments) -> Value:
    target, power = _powers(c, a)
    dx = c.g.div(c.g.mul(c.g.neg(target), power), c.g.add(power, 1.0))
    dx = c.g.mul(dx, c.value(a["grad_output"]))
    return _averaged(c, dx, target, a["reduction"])


def _powers(c: Importer, a: Arguments) -> tuple[Value, Value]:
    x, target = _probabilities(c, a)
    return target, c.g.exp(c.g.mul(c.g.neg(target), x))


def _averaged(c: Importer, dx: Value, x: Value, reduction: int) -> Value:
    """A gradient by the number of elements, of a mean."""
    if _REDUCTIONS[reduction] != "mean":
        return dx
    return c.g.mul(dx, 1.0 / max(1, math.prod(x.shape)))


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
    "binary_cross_entropy": _of_probabilities,
    "binary_cross_entropy_backward": _of_probabilities_backward,
    "soft_margin_loss": _of_margins,
    "soft_margin_loss_backward": _of_margins_backward,
}
