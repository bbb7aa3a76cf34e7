"""What a kernel computes, in few kinds of values: tensors read, maps, reductions, views, joins.

The ops of a region are written down in these by the rules of :mod:`~cudnngraph.kernels.rules`. A
value has a shape and no memory. An element of it is asked for by an index
(:class:`~cudnngraph.kernels.index.Sum` for each dim), and says by which indices it asks for those
that it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..ir.spec import TensorSpec
from ..ops.checks import broadcast_shapes
from .index import Sum, reshaped

Index = tuple[Sum, ...]
Kind = Literal["sum", "max", "min"]


class Refused(Exception):
    """A region that is no kernel, with the reason."""


class Cut(Refused):
    """A region that is better several kernels, whatever the pattern."""


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a kernel: its shape, and the C++ type of an element in a register."""

    shape: tuple[int, ...]
    type: str = field(default="float", kw_only=True)


@dataclass(frozen=True, eq=False)
class Read(Value):
    """An input of the region."""

    tensor: TensorSpec


@dataclass(frozen=True, eq=False)
class Number(Value):
    """C++ for a number."""

    code: str


@dataclass(frozen=True, eq=False)
class Map(Value):
    """``code`` of the elements of ``operands`` that are broadcast to the shape, as torch does.

    ``op`` names the pointwise op that it is of.
    """

    operands: tuple[Value, ...]
    code: Callable[[Sequence[str]], str]
    op: str = field(default="", kw_only=True)


@dataclass(frozen=True, eq=False)
class Reduce(Value):
    """The sum, or the largest or smallest element, over ``dims``, which stay with extent 1."""

    operand: Value
    dims: tuple[int, ...]
    kind: Kind


@dataclass(frozen=True, eq=False)
class Mean(Map):
    """The mean over ``sum.dims``: a map of the sum, known as what it is."""

    sum: Reduce


@dataclass(frozen=True, eq=False)
class Squares(Reduce):
    """The sum of the squared differences of ``of`` from its mean."""

    of: Value
    middle: Mean


@dataclass(frozen=True, eq=False)
class Powers(Reduce):
    """The sum of exp(of - most), where ``most`` is the largest element of the same rows."""

    of: Value
    most: Reduce


@dataclass(frozen=True, eq=False)
class View(Value):
    """The elements of another value in other places; ``source`` says of an index which one it is,
    None if that is no sum of digits."""

    operand: Value
    source: Callable[[Index], Index | None]


@dataclass(frozen=True, eq=False)
class Running(Value):
    """The running sums of ``operand`` along ``dim``: each is of the elements up to it."""

    operand: Value
    dim: int


@dataclass(frozen=True, eq=False)
class Join(Value):
    """Values one behind the other along a dim."""

    operands: tuple[Value, ...]
    dim: int


@dataclass(frozen=True, eq=False)
class Place(Value):
    """The index of an element along ``dim``; of extent 1 along the others."""

    dim: int


@dataclass(frozen=True, eq=False)
class Pick(Value):
    """Elements at computed places along ``dim``: one of each row, or more.

    ``operands`` are the rows, and the places, which are broadcast to the shape; one outside picks
    any element.
    """

    operands: tuple[Value, Value]
    dim: int


@dataclass(frozen=True, eq=False)
class Picked(Map):
    """Zero but at one element of each row along ``dim`` at most, where it is ``one``."""

    one: Value
    dim: int


@dataclass(frozen=True, eq=False)
class Depthwise(Value):
    """A convolution of each channel by taps of its own, or for ``transposed`` its gradient.

    ``operands`` are x (N, C, H, W) and the taps (C, 1, R, S); ``padding`` is that in front.
    """

    operands: tuple[Value, Value]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    transposed: bool


@dataclass(frozen=True, eq=False)
class Window(Value):
    """An image made of others' elements at places that a rule computes while the kernel runs.

    ``write`` writes C++ by :class:`~cudnngraph.kernels.window.Steps` and gives the result's name.
    It reads about ``reads`` elements of each operand. Batch and channel are the operands' own.
    """

    operands: tuple[Value, ...]
    write: Callable[[Any], str]
    reads: int


@dataclass(frozen=True, eq=False)
class MaxGradient(Window):
    """The gradient of a max pool: ``operands`` are that of its result, and its image; ``dims`` are
    the windows along each spatial dim."""

    dims: tuple[Any, ...]


def operands_of(value: Value) -> tuple[Value, ...]:
    """The values that a value is made of."""
    if isinstance(value, (Map, Join, Pick, Depthwise, Window)):
        return value.operands
    return (value.operand,) if isinstance(value, (Reduce, Running, View)) else ()


def parts_at(join: Join, index: Index) -> list[tuple[Value, Index]]:
    """The operands of a join, with the index into each; it is inside of one of them alone."""
    found, start = [], 0
    for operand in join.operands:
        moved = index[join.dim] + -start if operand.shape[join.dim] > 1 else Sum()
        found.append((operand, (*index[: join.dim], moved, *index[join.dim + 1 :])))
        start += operand.shape[join.dim]
    return found


def part_of(join: Join, index: Index) -> tuple[Value, Index] | None:
    """The operand of a join that an index lies in, whatever its variables are, and the index into
    it; None if it may lie in several."""
    start = 0
    for operand, moved in parts_at(join, index):
        if (index[join.dim] + -start).within(operand.shape[join.dim]):
            return operand, moved
        start += operand.shape[join.dim]
    return None


def broadcast(index: Index, shape: Sequence[int]) -> Index:
    """The index into an operand of ``shape`` that is broadcast to what ``index`` is of."""
    return tuple(
        Sum() if extent == 1 else each
        for each, extent in zip(index[len(index) - len(shape) :], shape, strict=True)
    )


def common(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that all are broadcast to."""
    return broadcast_shapes(shapes)


def mapped(code: Callable[..., str], *operands: Value, type: str = "float") -> Map:
    """A map of operands that are broadcast; ``code`` takes C++ for each."""
    shape = common(*(each.shape for each in operands))
    return Map(shape, operands, lambda args: code(*args), type=type)


def places(shape: Sequence[int], dim: int) -> Place:
    """The index along a dim of elements of a shape."""
    extents = tuple(extent if at == dim else 1 for at, extent in enumerate(shape))
    return Place(extents, dim, type="int")


def add(x: Value, y: Value) -> Map:
    """x + y."""
    return mapped(lambda a, b: f"({a} + {b})", x, y)


def sub(x: Value, y: Value) -> Map:
    """x - y."""
    return mapped(lambda a, b: f"({a} - {b})", x, y)


def mul(x: Value, y: Value) -> Map:
    """x * y."""
    return mapped(lambda a, b: f"({a} * {b})", x, y)


def div(x: Value, y: Value) -> Map:
    """x / y."""
    return mapped(lambda a, b: f"({a} / {b})", x, y)


def times(x: Value, factor: float) -> Map:
    """x times a number."""
    from .scalars import number

    return mapped(lambda a: f"({a} * {number(factor)})", x)


def reduced(kind: Kind, x: Value, dims: Sequence[int]) -> Reduce:
    """A reduction that keeps its dims with extent 1."""
    shape = tuple(1 if dim in dims else extent for dim, extent in enumerate(x.shape))
    return Reduce(shape, x, tuple(dims), kind)


def total(x: Value, dims: Sequence[int]) -> Value:
    """The sum over dims, which stay with extent 1."""
    plain = uncast(x)
    if isinstance(plain, Picked) and tuple(dims) == (plain.dim,):
        return plain.one
    return _of_powers(plain, dims) or reduced("sum", x, dims)


def uncast(x: Value) -> Value:
    """A number in a register, of which casts between floats make no other one."""
    while isinstance(x, Map) and x.op in ("cast", "identity") and x.operands[0].type == x.type:
        (x,) = x.operands
    return x


def _of_powers(x: Value, dims: Sequence[int]) -> Powers | None:
    """The sum of exp of a value less its largest element, as ops say it that are not a softmax."""
    shifted = uncast(x.operands[0]) if isinstance(x, Map) and x.op == "exp" else x
    if not isinstance(shifted, Map) or shifted.op != "sub":
        return None
    of, most = map(uncast, shifted.operands)
    if not isinstance(most, Reduce) or most.kind != "max" or most.dims != tuple(dims):
        return None
    if x is shifted or uncast(most.operand) is not of or most.operand.shape != x.shape:
        return None
    return Powers(most.shape, x, most.dims, "sum", most.operand, most)


def count_of(x: Value, dims: Sequence[int]) -> int:
    """How many elements a reduction over dims takes together."""
    return math.prod(x.shape[dim] for dim in dims)


def mean(x: Value, dims: Sequence[int]) -> Mean:
    """The mean over dims, which stay with extent 1."""
    summed = reduced("sum", x, dims)
    made = _over(summed, count_of(x, dims))
    return Mean(made.shape, made.operands, made.code, summed)


def variance(x: Value, middle: Mean) -> Map:
    """The mean of the squared differences of x from its mean."""
    centred = sub(x, middle)
    shape, dims = middle.shape, middle.sum.dims
    squares = Squares(shape, mul(centred, centred), dims, "sum", x, middle)
    return _over(squares, count_of(x, dims))


def powers(x: Value, dim: int) -> tuple[Map, Map, Powers]:
    """x less the largest of its row along a dim, exp of that, and the sum of these."""
    most = reduced("max", x, (dim,))
    shifted = sub(x, most)
    made = mapped(lambda a: f"power({a})", shifted)
    return shifted, made, Powers(most.shape, made, most.dims, "sum", x, most)


def _over(x: Value, count: int) -> Map:
    """x divided by a count: one rounding less than by the inverse."""
    from .scalars import number

    return mapped(lambda total: f"({total} / {number(count)})", x)


def reshape(x: Value, shape: Sequence[int]) -> Value:
    """The elements in row-major order in another shape."""
    to = tuple(shape)

    def source(index: Index) -> Index | None:
        found = reshaped(index, to, x.shape)
        return None if found is None else tuple(found)

    return x if to == x.shape else View(to, x, source, type=x.type)


def permute(x: Value, order: Sequence[int]) -> View:
    """Dim ``order[n]`` of x as dim n."""
    shape = tuple(x.shape[dim] for dim in order)
    back = [list(order).index(dim) for dim in range(len(order))]
    return View(shape, x, lambda index: tuple(index[dim] for dim in back), type=x.type)


def sliced(x: Value, dim: int, start: int, shape: Sequence[int], step: int) -> View:
    """Every ``step``-th element along a dim from ``start`` on."""

    def source(index: Index) -> Index:
        return (*index[:dim], index[dim] * step + start, *index[dim + 1 :])

    return View(tuple(shape), x, source, type=x.type)


def along(vector: Value, dim: int, rank: int) -> Value:
    """A vector as a tensor of ``rank`` dims that is 1 along all but ``dim``."""
    return reshape(vector, [vector.shape[0] if at == dim else 1 for at in range(rank)])
