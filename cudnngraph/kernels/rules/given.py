"""Arguments of torch's own ops in kernels: tensors, and numbers of Python's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...ir.spec import TensorSpec
from ..scalars import number
from ..tape import Number, Refused, Value, mapped

Given = Mapping[str, Any]
TorchRule = Callable[[Given, TensorSpec], "Value | tuple[Value, ...]"]

MOST_PLACES = 1 << 31  # that an int counts
INTS = ("int", "i64")
WIDTH = {"bool": 0, "int": 1, "i64": 2}  # of what is a whole number in a wider one


def whole(value: Any) -> Value:
    """A tensor of whole numbers. Raises Refused for anything else."""
    if not isinstance(value, Value) or value.type not in INTS:
        raise Refused("an index that is no whole number")
    return value


def operand(value: Any, like: str) -> Value:
    """An operand of a type, a tensor or a number of Python's; a bool or a whole number of fewer
    bits as one of them. Raises Refused for another."""
    if isinstance(value, Value):
        if value.type == like:
            return value
        if WIDTH.get(value.type, 2) >= WIDTH.get(like, 0):
            raise Refused("operands of several types")
        return mapped(lambda a: f"({like}){a}", value, type=like)
    if like == "float":
        return Number((), number(float(value)))
    if like == "bool" or isinstance(value, float) or not -(1 << 31) < value < 1 << 31:
        raise Refused("operands of several types")
    return Number((), f"({value})", type=like)
