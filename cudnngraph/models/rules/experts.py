"""Rules for mixtures of experts: products of groups of rows, one matrix a group."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value
from ...ops import meta as forms
from .base import Arguments, Rule, Skip, cast_to

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
    return cast_to(c, ends, torch.int32)


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


def _cumsum(c: Importer, a: Arguments) -> Any:
    """The ends of groups that are counted by a histogram of sorted numbers: how many of these are
    at most each number. One step in the place of a cast, the histogram, and the sums."""
    counted = _bins(c.node.args[0])
    made = c.node.meta["val"]
    if counted is None or made.dim() != 1 or made.dtype != torch.int32:
        raise Skip
    numbers, bins = counted
    each = torch.arange(bins, dtype=numbers.meta["val"].dtype, device=c.device)
    form = {"out_int32": True, "right": True}
    name = "aten.searchsorted.Tensor"
    return c.left_to_torch(name, [c.env[numbers], each], form, c.node, image=False)


def _bins(node: Any) -> tuple[torch.fx.Node, int] | None:
    """The sorted numbers that a histogram counts one by one, none of them below zero, and how many
    numbers it counts; None for another node."""
    if not isinstance(node, torch.fx.Node) or forms.op_name(node) != "histc":
        return None
    given = forms.bind_arguments(node.target, node.args, node.kwargs)
    bins = given["bins"]
    if bins < 2 or (given["min"], given["max"]) != (0, bins - 1):
        return None
    numbers = _source(given["self"], "_to_copy")
    if numbers.target is not operator.getitem or numbers.args[1] != 0:
        return None
    sort, made = numbers.args[0], numbers.meta["val"]
    if not isinstance(sort, torch.fx.Node) or forms.op_name(sort) != "sort":
        return None
    if made.dim() != 1 or made.is_floating_point():
        return None
    sorting = forms.bind_arguments(sort.target, sort.args, sort.kwargs)
    if sorting["descending"] or not _are_places(sorting["self"]):
        return None
    return numbers, bins


def _source(node: torch.fx.Node, *names: str) -> torch.fx.Node:
    """What a node is made of by ops of these names alone."""
    while forms.op_name(node) in names and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node


def _are_places(node: torch.fx.Node) -> bool:
    """Whether whole numbers are places of elements, which begin at zero."""
    node = _source(node, *forms.RESHAPES, *forms.IDENTITIES)
    of: Any = node.args[0] if node.args else None
    if forms.op_name(node) in ("cat", "stack"):
        return all(isinstance(each, torch.fx.Node) and _are_places(each) for each in of)
    if node.target is operator.getitem:
        second = node.args[1:] == (1,)
        return second and forms.op_name(of) in ("topk", "max", "min", "sort")
    return forms.op_name(node) in ("argmax", "argmin", "argsort")


RULES: dict[str, Rule] = {"_grouped_mm": _grouped_mm, "cumsum": _cumsum}

#: Ops of other libraries, by their full names.
FOREIGN: dict[str, Rule] = {
    "transformers::grouped_mm_fallback": _fallback,
    "transformers::grouped_mm_fallback_backward": _fallback_backward,
}
