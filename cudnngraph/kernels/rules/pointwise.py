"""Pointwise ops in kernels: single elements by :mod:`~cudnngraph.kernels.scalars`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...ir.spec import Node, TensorSpec
from ...ops.table import OPS, by_port
from ..scalars import REGISTER
from ..scalars import RULES as CODES
from ..tape import Map, Number, Value, along, common

Operands = Sequence[Value | None]


def pointwise(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """The result of a pointwise op; vectors of channels stand along dim 1 of it."""
    rank, attrs = len(result.shape), dict(node.attrs)
    roles = OPS[node.op].roles
    given: list[Value | None] = []
    for (port, _), value in zip(by_port(node).items(), operands, strict=True):
        if value is not None and len(value.shape) == 1 and roles.get(port) == "channels":
            value = along(value, 1, rank)
        elif value is not None and roles.get(port) == "scale":
            value = _scale(value, attrs["dim"], rank)
        given.append(value)
    there = tuple(value for value in given if value is not None)
    code = partial(_code, CODES[node.op], [value is not None for value in given], attrs)
    if isinstance(there[0], Number) and len(there) == 1:
        return (Number((), code([there[0].code]), type=REGISTER[result.dtype]),)
    shape = common(*(value.shape for value in there))
    return (Map(shape, there, code, type=REGISTER[result.dtype], op=node.op),)


def _scale(value: Value, dim: int, rank: int) -> Value:
    """A scale of 8-bit data: one for all elements, or one for each index of a dim."""
    return along(value, dim, rank) if value.shape not in ((), (1,)) else value


def _code(rule: Any, there: Sequence[bool], attrs: Mapping[str, Any], args: Sequence[str]) -> str:
    """C++ for the op, with "" at open ports."""
    rest = iter(args)
    code: str = rule([next(rest) if given else "" for given in there], attrs)
    return code
