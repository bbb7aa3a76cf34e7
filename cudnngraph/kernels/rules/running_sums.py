"""Running sums in kernels.

Each of a short row is a sum of its own; those of long ones are
:class:`~cudnngraph.kernels.tape.Running`.

Reductions are of floats. Whole numbers are summed in parts of 16 bits, of which float32 holds the
sums exactly, and which wrap as torch's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from ...ir.spec import TensorSpec, numel
from ..scalars import REGISTER
from ..tape import (
    Refused,
    Running,
    Value,
    mapped,
    permute,
    places,
    reduced,
    reshape,
)
from .given import Given

MOST_TERMS = 1 << 8  # of 16 bits, the sum of which float32 has exactly
MOST_READS = 1 << 24  # of a running sum, each element of which reads the others of its row
_BITS = {"bool": 1, "int": 32, "i64": 64}


def _parts(x: Value) -> list[tuple[Value, int]]:
    """A whole number or bool as floats of 16 bits with the place of their first bit, the lowest
    first; the highest has the sign."""
    bits = _BITS[x.type]
    if bits == 1:
        return [(mapped(lambda a: f"({a} ? 1.0f : 0.0f)", x), 0)]

    def part(at: int) -> Value:
        mask = "" if at == bits - 16 else " & 0xffff"
        return mapped(lambda a: f"(float)(({a} >> {at}){mask})", x)

    return [(part(at), at) for at in range(0, bits, 16)]


def _rows(x: Value, dim: int) -> tuple[Value, list[int]]:
    """A tensor with one dim behind the others, and the order that puts it back."""
    rank = len(x.shape)
    order = [each for each in range(rank) if each != dim] + [dim]
    back = [order.index(each) for each in range(rank)]
    return (x, back) if dim == rank - 1 else (permute(x, order), back)


def _put_back(x: Value, back: Sequence[int]) -> Value:
    return x if list(back) == sorted(back) else permute(x, back)


def cumsum(given: Given, result: TensorSpec) -> Value:
    """Running sums: each is the sum of the elements up to it."""
    x: Value = given["self"]
    to = REGISTER[result.dtype]
    if not x.shape or (x.type == "float") != (to == "float"):
        raise Refused("running sums in another kind of numbers")
    dim = given["dim"] % len(x.shape)
    rows, back = _rows(x, dim)
    many = rows.shape[-1]
    if many > MOST_TERMS or numel(rows.shape) * many > MOST_READS:
        return Running(x.shape, x, dim, type=to)
    before = reshape(rows, (*rows.shape[:-1], 1, many))
    rank = len(before.shape)
    pairs = (*rows.shape, many)  # of an element, and of one that is added up to it
    here, there = places(pairs, rank - 2), places(pairs, rank - 1)

    def running(part: Value) -> Value:
        seen = mapped(lambda a, i, j: f"({j} <= {i} ? {a} : 0.0f)", part, here, there)
        return reshape(reduced("sum", seen, (rank - 1,)), rows.shape)

    if to == "float":
        return _put_back(running(before), back)
    sums = [_shifted(running(part), at) for part, at in _parts(before)]
    total = reduce(lambda a, b: mapped(lambda p, q: f"({p} + {q})", a, b, type="i64"), sums)
    made = total if to == "i64" else mapped(lambda a: f"(int){a}", total, type=to)
    return _put_back(made, back)


def _shifted(x: Value, by: int) -> Value:
    """A float that is a whole number, with so many zero bits behind."""
    return mapped(lambda a: f"(i64)((u64)(i64){a} << {by})", x, type="i64")


RULES = {"aten.cumsum.default": cumsum}
