"""The loss of logarithms of probabilities in kernels, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...ir.spec import Node, TensorSpec
from ..scalars import number
from ..tape import Pick, Picked, Place, Refused, Value, common, div, mapped, reduced, reshape
from .pointwise import Operands

MOST_CLASSES = 1 << 31  # that an int counts


def nll_loss(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """-x at the class of each row; their sum, or their mean over the rows that count."""
    x, target = operands
    assert x is not None and target is not None
    at = _rows(target, x.shape)
    each = _counted(node, Pick(at.shape, (x, at), 1), at, x.shape)
    if node.attr("reduction") == "none":
        return (reshape(each, result.shape),)
    total: Value = reduced("sum", each, range(len(each.shape)))
    if node.attr("reduction") == "mean":
        total = div(total, _count(node, at))
    return (reshape(total, result.shape),)


def nll_loss_backward(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """-dy at the class of each row, for a mean over the number of rows that count; else 0."""
    dy, target = operands
    assert dy is not None and target is not None
    at = _rows(target, result.shape)
    if node.attr("reduction") == "none":
        dy = _rows(dy, result.shape)
    elif node.attr("reduction") == "mean":
        dy = div(dy, _count(node, at))
    one = _counted(node, dy, at, result.shape)
    extents = tuple(n if dim == 1 else 1 for dim, n in enumerate(result.shape))
    place, outside = Place(extents, 1, type="int"), _outside(result.shape)

    def code(args: Sequence[str]) -> str:
        value, t, here = args
        return f"({t} == {here} || {outside(t)} ? {value} : 0.0f)"

    given = (one, at, place)
    return (Picked(common(*(each.shape for each in given)), given, code, one, 1),)


def _rows(values: Value, shape: tuple[int, ...]) -> Value:
    """A number for each row, with extent 1 along the classes."""
    return reshape(values, (shape[0], 1, *shape[2:]))


def _counted(node: Node, value: Value, at: Value, shape: tuple[int, ...]) -> Value:
    """Minus a value of each row: 0 where its class is ignored, NaN where there is no such class."""
    ignored, outside, nan = _ignored(node), _outside(shape), number(math.nan)
    return mapped(lambda x, t: f"({ignored(t)} ? 0.0f : {outside(t)} ? {nan} : -{x})", value, at)


def _count(node: Node, at: Value) -> Value:
    """The number of rows whose class is not ignored."""
    ignored = _ignored(node)
    counts = mapped(lambda t: f"({ignored(t)} ? 0.0f : 1.0f)", at)
    return reduced("sum", counts, range(len(at.shape)))


def _ignored(node: Node) -> Callable[[str], str]:
    """C++ for whether the class of a row is the one that does not count."""
    index = f"(i64){node.attr('ignore_index') % 2**64:#x}ull"
    return lambda at: f"{at} == {index}"


def _outside(shape: tuple[int, ...]) -> Callable[[str], str]:
    """C++ for whether there is no class of a number."""
    if shape[1] >= MOST_CLASSES:
        raise Refused("more classes than 32 bits count")
    return lambda at: f"(u64){at} >= {shape[1]}ull"
