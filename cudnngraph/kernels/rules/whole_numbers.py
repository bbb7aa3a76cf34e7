"""Whole numbers and bools in kernels: their arithmetic, comparisons and bounds, exactly.

A register holds a whole number as an int or an i64. What has 8 bits in memory wraps there: of such
numbers nothing is computed that may leave their range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...ir.spec import TensorSpec
from ..scalars import REGISTER
from ..tape import Read, Refused, Value, mapped, operands_of
from .given import INTS, WIDTH, Given, operand

Single = Callable[[Given, TensorSpec], Value]


def of_two(sign: str, *types: str, made: str = "", wraps: bool = True) -> Single:
    """An op of two operands of these types, which is of type ``made`` or that of the wider one.

    ``wraps`` says that 8 bits may not hold the result, or not the other operand, a number.
    """

    def rule(given: Given, result: TensorSpec) -> Value:
        x, y = given["self"], given["other"]
        if not isinstance(x, Value) or x.type not in types or given.get("alpha", 1) != 1:
            raise Refused("an op of torch's on other operands than whole numbers")
        if wraps and "int" in (x.type, REGISTER[result.dtype]) and _of_8_bits(x, y, result):
            raise Refused("whole numbers of 8 bits, which wrap")
        like = _wider(x, y) if isinstance(y, Value) else x.type
        operands = (operand(x, like), operand(y, like))
        return mapped(lambda a, b: f"({a} {sign} {b})", *operands, type=made or like)

    return rule


def _wider(x: Value, y: Value) -> str:
    """The type of two operands together."""
    if x.type == y.type:
        return x.type
    if {x.type, y.type} == {*INTS} and () in (x.shape, y.shape):
        raise Refused("a number without dims, which gives no type to whole numbers")
    return max(x.type, y.type, key=lambda each: WIDTH.get(each, 0))


def negative(given: Given, result: TensorSpec) -> Value:
    """-x of whole numbers."""
    return _of_one(given, result, lambda a: f"(-{a})")


def magnitude(given: Given, result: TensorSpec) -> Value:
    """|x| of whole numbers."""
    return _of_one(given, result, lambda a: f"({a} < 0 ? -{a} : {a})")


def _of_one(given: Given, result: TensorSpec, code: Callable[[str], str]) -> Value:
    x: Value = given["self"]
    if x.type not in INTS or _of_8_bits(x, result):
        raise Refused("other numbers than whole ones of 32 bits or more")
    return mapped(code, x, type=x.type)


def inverted(given: Given, result: TensorSpec) -> Value:
    """Not of bools, and of each bit of whole numbers."""
    if given["self"].type == "bool":
        return logical_not(given, result)
    return _of_one(given, result, lambda a: f"(~{a})")


def logical_not(given: Given, result: TensorSpec) -> Value:
    """Not of bools."""
    if given["self"].type != "bool":
        raise Refused("not of what is no bool")
    return mapped(lambda a: f"(!{a})", given["self"], type="bool")


def remainder(given: Given, result: TensorSpec) -> Value:
    """What is left of whole numbers by a positive one: of the sign of the divisor."""
    x, by = _divided(given, result)
    return mapped(lambda a: f"({a} % {by} + ({a} % {by} < 0 ? {by} : 0))", x, type=x.type)


def floor_divide(given: Given, result: TensorSpec) -> Value:
    """Whole numbers by a positive one: what is left of the division has their sign."""
    x, by = _divided(given, result)
    return mapped(lambda a: f"({a} / {by} - ({a} % {by} < 0))", x, type=x.type)


def _divided(given: Given, result: TensorSpec) -> tuple[Value, int]:
    x, by = given["self"], given["other"]
    if x.type not in INTS or REGISTER[result.dtype] != x.type or _of_8_bits(x, result):
        raise Refused("a division of other numbers than whole ones")
    if type(by) is not int or not 0 < by < 1 << 31:
        raise Refused("a division by another number than a positive whole one")
    return x, by


def clamp(given: Given, result: TensorSpec) -> Value:
    """Whole numbers within bounds."""
    x: Value = given["self"]
    if x.type not in INTS or _of_8_bits(x, result):
        raise Refused("bounds of other numbers than whole ones")
    for name, sign in (("min", "<"), ("max", ">")):
        if given.get(name) is not None:
            code = f"({{0}} {sign} {{1}} ? {{1}} : {{0}})"
            x = mapped(code.format, x, operand(given[name], x.type), type=x.type)
    return x


def _of_8_bits(*tensors: Any) -> bool:
    """Whether whole numbers among these, or what they are made of, have 8 bits."""
    stack, seen = [each for each in tensors if isinstance(each, (Value, TensorSpec))], set[int]()
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        tensor = each.tensor if isinstance(each, Read) else each
        if isinstance(tensor, TensorSpec) and tensor.dtype in (torch.int8, torch.uint8):
            return True
        stack += operands_of(each) if isinstance(each, Value) else ()
    return False
