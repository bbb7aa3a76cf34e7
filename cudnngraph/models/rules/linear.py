"""Rules for matrix multiplications; one that ends attention written out becomes attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value
from .attention import written
from .base import Arguments, Rule, Skip

if TYPE_CHECKING:
    from ..convert import Importer


def _transposed(c: Importer, weight: Any) -> Value:
    """A matrix with its dims exchanged; one that is constant is so by its strides."""
    if isinstance(weight, torch.Tensor):
        return c.constant(weight.t(), "weight")
    return c.g.transpose(c.value(weight), 0, 1)


def _linear(c: Importer, a: Arguments) -> Value:
    y = c.g.matmul(c.value(a["input"]), _transposed(c, a["weight"]))
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
    return c.g.matmul(c.value(a["self"]), c.value(other))


RULES: dict[str, Rule] = {
    "linear": _linear,
    "addmm": _addmm,
    **dict.fromkeys(("mm", "bmm", "matmul"), _matmul),
}
