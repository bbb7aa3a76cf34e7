"""Rules for matrix multiplications; one that ends attention written out becomes attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value
from ...ops.checks import broadcast_shapes
from .attention import written
from .base import Arguments, Rule, Skip, rounds_once

if TYPE_CHECKING:
    from ..convert import Importer


def _transposed(c: Importer, weight: Any) -> Value:
    """A matrix with its dims exchanged; one that is constant is so by its strides."""
    if isinstance(weight, torch.Tensor):
        return c.constant(weight.t(), "weight")
    return c.g.transpose(c.value(weight), 0, 1)


_MOST_DIMS = 4  # of an operand of a product


def _product(c: Importer, x: Value, y: Value) -> Value:
    """x @ y, with the dims in front of more than four as one; a tensor that does not have all of
    them is repeated, as torch does."""
    if max(len(x.shape), len(y.shape)) <= _MOST_DIMS:
        return c.g.matmul(x, y)
    if min(len(x.shape), len(y.shape)) < 2:
        raise Skip
    batch = broadcast_shapes([x.shape[:-2], y.shape[:-2]])
    made = (*batch, x.shape[-2], y.shape[-1])
    if len(y.shape) == 2:
        x = c.g.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    else:
        whole = (
            z if z.shape[:-2] == batch else c.g.expand(z, (*batch, *z.shape[-2:])) for z in (x, y)
        )
        x, y = (c.g.reshape(z, (math.prod(batch), *z.shape[-2:])) for z in whole)
    return c.g.reshape(c.g.matmul(x, y), made)


def _linear(c: Importer, a: Arguments) -> Value:
    y = _product(c, c.value(a["input"]), _transposed(c, a["weight"]))
    return y if a["bias"] is None else c.g.add(y, c.value(a["bias"]))


def _matmul(c: Importer, a: Arguments) -> Value:
    attended = written(c)
    if attended is not None:
        return attended
    other = a["mat2"] if "mat2" in a else a["other"]
    x, y = c.value(a["self"]), c.value(other)
    if min(len(x.shape), len(y.shape)) > 1:
        return _product(c, x, y)
    rows = x if len(x.shape) > 1 else c.g.reshape(x, (1, *x.shape))
    columns = y if len(y.shape) > 1 else c.g.reshape(y, (*y.shape, 1))
    made = _product(c, rows, columns)
    shape = made.shape[:-2] + made.shape[-2:-1] * (rows is x) + made.shape[-1:] * (columns is y)
    return c.g.reshape(made, shape)


def _of_vector(c: Importer, a: Arguments) -> Value:
    """A matrix times a vector, or one vector times another, as a product of two matrices."""
    x = c.value(a["mat"] if "mat" in a else a["self"])
    y = c.value(next(a[n] for n in ("vec", "tensor", "other") if n in a))
    rows = x if len(x.shape) == 2 else c.g.reshape(x, (1, *x.shape))
    made = c.g.matmul(rows, c.g.reshape(y, (*y.shape, 1)))
    return c.g.reshape(made, tuple(x.shape[:-1]))


def _outer(c: Importer, a: Arguments) -> Value:
    x, y = c.value(a["vec1"]), c.value(a["vec2"])
    made: Value = c.g.mul(c.g.reshape(x, (*x.shape, 1)), y)
    return made


def _of_batches(c: Importer, a: Arguments) -> Value:
    return _product(c, c.value(a["batch1"]), c.value(a["batch2"]))


def _of_matrices(c: Importer, a: Arguments) -> Value:
    return _product(c, c.value(a["mat1"]), c.value(a["mat2"]))


def _added(product: Rule) -> Rule:
    """beta * self + alpha * product."""

    def rule(c: Importer, a: Arguments) -> Value:
        alpha, beta = float(a.get("alpha", 1)), float(a.get("beta", 1))
        made: Value = product(c, a)
        if (alpha, beta) != (1, 1):
            rounds_once(c, made)
        made = made if alpha == 1 else c.g.mul(made, alpha)
        if beta == 0:  # whatever stands there
            return made
        x = c.value(a["self"])
        return c.g.add(made, x if beta == 1 else c.g.mul(x, beta))

    return rule


#: How ``_trilinear`` repeats its operands, and what it sums over, for ``nn.Bilinear``.
_BILINEAR = {
    "expand1": [1, 3],
    "expand2": [0],
    "expand3": [1, 2],
    "sumdim": [2, 3],
}


def _trilinear(c: Importer, a: Arguments) -> Value:
    """The product of ``nn.Bilinear``, sum of x[n, i] w[k, i, j] y[n, j], as two matmuls."""
    if any(list(a[name]) != dims for name, dims in _BILINEAR.items()):
        raise Skip
    x, y, weight = c.value(a["i1"]), c.value(a["i3"]), a["i2"]
    results, first, second = weight.shape
    if isinstance(weight, torch.Tensor):
        columns = c.constant(weight.transpose(0, 1).reshape(first, results * second), "weight")
    else:
        columns = c.g.reshape(c.g.transpose(weight, 0, 1), (first, results * second))
    rows = c.g.reshape(c.g.matmul(x, columns), (x.shape[0], results, second))
    made = c.g.matmul(rows, c.g.reshape(y, (*y.shape, 1)))
    return c.g.reshape(made, (x.shape[0], results))


RULES: dict[str, Rule] = {
    "linear": _linear,
    "addmm": _added(_of_matrices),
    "baddbmm": _added(_of_batches),
    "addmv": _added(_of_vector),
    "addr": _added(_outer),
    **dict.fromkeys(("mm", "bmm", "matmul"), _matmul),
    "_trilinear": _trilinear,
    **dict.fromkeys(("mv", "dot", "vdot"), _of_vector),
}
