"""Rules for mixtures of experts: products of groups of rows, one matrix a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value
from .base import Arguments, Rule, Skip

if TYPE_CHECKING:
    from ..convert import Importer


def _turned(c: Importer, given: Any) -> Value:
    """A tensor with its last two dims exchanged; one that is constant is so by its strides."""
    if isinstance(given, torch.Tensor):
        return c.constant(given.transpose(-2, -1), "weight")
    value = c.value(given)
    return c.g.transpose(value, -2, -1)


def _ends(c: Importer, given: Any) -> Value:
    if isinstance(given, torch.Tensor):
        return c.constant(given.to(torch.int32), "ends")
    ends = c.value(given)
    if ends.dtype == torch.int32:
        return ends
    form = (("dtype", ("dtype", "int32")),)
    made: Value = c.g.aten([ends], "aten._to_copy.default", (("tensor", 0),), form)
    return made


def _grouped_mm(c: Importer, a: Arguments) -> Value:
    """torch's four forms: groups of rows, of columns, of the terms of a sum, and of whole matrices.

    It leaves rows behind the last end as they were; here these are zeros.
    """
    x, y = a["self"], a["mat2"]
    made = c.node.meta["val"].dtype
    if a.get("bias") is not None or a.get("out_dtype") not in (None, made):
        raise Skip
    if x.dtype != y.dtype or x.dtype != made:
        raise Skip
    ranks = len(x.shape), len(y.shape)
    if ranks == (3, 3):
        if a["offs"] is not None:
            raise Skip
        return c.g.matmul(c.value(x), c.value(y))
    ends = _ends(c, a["offs"])
    if ranks == (2, 3):
        return c.g.grouped_matmul(c.value(x), c.value(y), ends)
    if ranks == (3, 2):
        return c.g.transpose(c.g.grouped_matmul(_turned(c, y), _turned(c, x), ends), 0, 1)
    return c.g.grouped_matmul_wgrad(_turned(c, x), c.value(y), ends)


def _fallback(c: Importer, a: Arguments) -> Value:
    """What transformers calls in the place of torch's op, for other dtypes than bfloat16."""
    return c.g.grouped_matmul(c.value(a["input"]), c.value(a["weight"]), _ends(c, a["offs"]))


def _fallback_backward(c: Importer, a: Arguments) -> tuple[Value, Value]:
    ends, dy = _ends(c, a["offs"]), c.value(a["grad_output"])
    dx = c.g.grouped_matmul(dy, _turned(c, a["weight"]), ends)
    return dx, c.g.grouped_matmul_wgrad(c.value(a["input"]), dy, ends)


RULES: dict[str, Rule] = {"_grouped_mm": _grouped_mm}

#: Ops of other libraries, by their full names.
FOREIGN: dict[str, Rule] = {
    "transformers::grouped_mm_fallback": _fallback,
    "transformers::grouped_mm_fallback_backward": _fallback_backward,
}
