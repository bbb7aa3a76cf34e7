"""Questions of a model whether its numbers are finite, which a graph cannot ask.

Models of transformers ask it in float16, to clamp what has overflowed. A run is traced as if the
answer were that some numbers are not: what is finite is as it was behind a clamp. Whether it is so
is for a check to say.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..ops import meta as forms

_PASSED = ("_to_copy", "alias", "clone", "contiguous", "detach", "reshape", "view")
_AND = ("bitwise_and", "logical_and", "mul", "__and__")
_OR = ("bitwise_or", "logical_or", "__or__")


def answer(node: torch.fx.Node) -> bool | None:
    """What is to be answered to the question that a number of a graph is: that not all numbers of a
    tensor are finite. None if it is another question."""
    name, operands = _said(node)
    if name == "logical_not":
        inner = answer(operands[0]) if isinstance(operands[0], torch.fx.Node) else None
        return None if inner is None else not inner
    if len(operands) != 1:
        return None  # along some dims
    if name == "all" and _are_finite(operands[0]):
        return False
    return True if name == "any" and _are_not(operands[0]) else None


def _said(given: Any) -> tuple[str, tuple[Any, ...]]:
    """The name and the operands of an op, but for those that change no truth."""
    while isinstance(given, torch.fx.Node) and given.op == "call_function":
        name = forms.op_name(given) or ""
        if name not in _PASSED:
            return name, given.args
        given = given.args[0]
    return "", ()


def _are_finite(given: Any) -> bool:
    name, operands = _said(given)
    if name in _AND and len(operands) == 2:
        kinds = {_kind(each) for each in operands}
        return kinds == {"no nan", "no infinity"}
    return name == "isfinite"


def _are_not(given: Any) -> bool:
    name, operands = _said(given)
    if name in _OR and len(operands) == 2:
        return all(map(_are_not, operands))
    return name in ("isinf", "isnan") or _kind(given) in ("nan", "infinity")


def _kind(given: Any) -> str:
    """What torch takes apart into comparisons: x with itself, or of its size with infinity."""
    name, operands = _said(given)
    if name not in ("eq", "ne") or len(operands) != 2:
        return ""
    x, y = operands
    if x is y:
        return "no nan" if name == "eq" else "nan"
    if isinstance(y, float) and math.isinf(y) and _said(x)[0] == "abs":
        return "infinity" if name == "eq" else "no infinity"
    return ""
