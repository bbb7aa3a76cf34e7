"""Torch's ops that find one place in each row, or write at one, in kernels."""

from __future__ import annotations

from ...ir.spec import TensorSpec, numel
from ..tape import (
    Join,
    Map,
    Pick,
    Read,
    Reduce,
    Refused,
    Value,
    View,
    mapped,
    operands_of,
    places,
    reduced,
    reshape,
    sliced,
)
from .given import MOST_PLACES, Given, TorchRule, operand, whole

MOST_COUNTED = 1 << 24  # places that a float counts


def _found(kind: str, given: Given, result: TensorSpec) -> tuple[Reduce, Value]:
    """The largest or least elements along a dim, NaN above all, and the first place of each."""
    x, dim = given["self"], given.get("dim")
    if x.type != "float" or not _lies_in_memory(x):
        raise Refused("places among numbers that a kernel computes, and so rounds in its own way")
    if dim is None or not x.shape:
        x, dim = reshape(x, (numel(x.shape),)), 0
    dim %= len(x.shape)
    if x.shape[dim] >= MOST_COUNTED:
        raise Refused("more places than a float counts")
    most = reduced("max" if kind == "max" else "min", x, (dim,))
    here = places(x.shape, dim)
    none = f"{float(x.shape[dim])}f"

    def code(a: str, m: str, at: str) -> str:
        return f"({a} == {m} || {a} != {a} ? (float){at} : {none})"

    first = reduced("min", mapped(code, x, most, here), (dim,))
    return most, mapped(lambda at: f"(i64){at}", first, type="i64")


def _lies_in_memory(x: Value) -> bool:
    """Whether elements are read, or rounded no more than that, and nothing is computed."""
    stack, seen = [x], set[int]()
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Map) and each.op not in ("cast", "identity"):
            return False
        if not isinstance(each, (Read, View, Join, Pick, Map)):
            return False
        stack += operands_of(each)
    return True


def _place_of(kind: str) -> TorchRule:
    def rule(given: Given, result: TensorSpec) -> Value:
        return reshape(_found(kind, given, result)[1], result.shape)

    return rule


def _both(kind: str) -> TorchRule:
    """The elements and their places."""

    def rule(given: Given, result: TensorSpec) -> tuple[Value, ...]:
        return tuple(reshape(each, result.shape) for each in _found(kind, given, result))

    return rule


def _scatter(source: str, *, adds: bool = False) -> TorchRule:
    """x with one element of each row written, or added to, at a place. Places outside are none."""

    def rule(given: Given, result: TensorSpec) -> Value:
        x, index = given["self"], whole(given["index"])
        if not x.shape or len(index.shape) != len(x.shape):
            raise Refused("an index into a number")
        dim = given["dim"] % len(x.shape)
        row = tuple(1 if at == dim else n for at, n in enumerate(x.shape))
        if index.shape != row or x.shape[dim] >= MOST_PLACES:
            raise Refused("several places of a row, of which some may be one")
        y = operand(given[source], x.type)
        for at, n in enumerate(row if y.shape else ()):
            if y.shape[at] != n:
                y = sliced(y, at, 0, tuple(n if d == at else e for d, e in enumerate(y.shape)), 1)
        here = places(x.shape, dim)
        sign = "{0} + " if adds else ""
        code = f"({{2}} == {{3}} ? {sign}{{1}} : {{0}})"
        return mapped(code.format, x, y, index, here, type=x.type)

    return rule


RULES: dict[str, TorchRule] = {
    **{f"aten.arg{kind}.default": _place_of(kind) for kind in ("max", "min")},
    **{f"aten.{kind}.dim": _both(kind) for kind in ("max", "min")},
    "aten.scatter.src": _scatter("src"),
    "aten.scatter.value": _scatter("value"),
    "aten.scatter_add.default": _scatter("src", adds=True),
}
