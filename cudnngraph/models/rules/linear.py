"""Rules for matrix multiplications; one that ends attention written out becomes attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value
from ...ops.checks import broadcast_shapes
from .attention import written
from .base import Arguments, Rule, Skip

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


def _addmm(c: Importer, a: Arguments) -> Value:
    if a["beta"] != 1 or a["alpha"] != 1:
        raise Skip
    return c.g.add(c.g.matmul(c.value(a["mat1"]), c.value(a["mat2"])), c.value(a["self"]))


def _matmul(c: Importer, a: Arguments) -> Value:
    attended = written(c)
    if attended is not None:
        return attended
    other = a["mat2"] if "mat2" in a else a["other"]
    return _product(c, c.value(a["self"]), c.value(other))


def _of_vector(c: Importer, a: Arguments) -> Value:
    """A matrix times a vector, or one vector times another, as a product of two matrices."""
    x, y = c.value(a["self"]), c.value(next(a[n] for n in ("vec", "tensor", "other") if n in a))
    rows = x if len(x.shape) == 2 else c.g.reshape(x, (1, *x.shape))
    made = c.g.matmul(rows, c.g.reshape(y, (*y.shape, 1)))
    return c.g.reshape(made, tuple(x.shape[:-1]))


RULES: dict[str, Rule] = {
    "linear": _linear,
    "addmm": _addmm,
    **dict.fromkeys(("mm", "bmm", "matmul"), _matmul),
    **dict.fromkeys(("mv", "dot", "vdot"), _of_vector),
}
