"""How the elements of a region are counted for tiles, and dealt out: see :mod:`.tiles`.

One side of a tile counts along the memory of some tensors, the other side along that of the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from ..ir.spec import GraphSpec, TensorSpec, memory_order
from ..ops.table import OPS
from .index import Sum, Var, counter, place
from .rows import SMALL, VECTOR_BYTES, WARP, Rows, Schedule, lies_across, reachable, rows_of
from .tape import Index, Join, Pick, Read, Refused, Value, View, part_of
from .write import Writer

SHARED_BYTES = 48 << 10  # of a block, without asking the driver for more
MOST_ELEMENTS = 1 << 31  # that an index of 32 bits may count
THREADS = 256
MOST_PERMUTED = 4  # dims of an output that another one may be a transposed one of
MOST_STEPS = 32  # of a thread through a tile
MOST_ALONG = 1024  # elements of a tile along a side
#: Elements along each side of a tile, by the bytes of the widest element.
WANTED = {1: 128, 2: 64, 4: 64, 8: 32}


@dataclass(frozen=True)
class Tiling:
    """How a region is dealt out in tiles: elements that lie side by side for a thread, elements of
    a tile along the first layout and across it, threads of a block."""

    lanes: int
    along: int
    across: int
    threads: int = THREADS


@dataclass(frozen=True)
class Tiles:
    """How the elements of a region are counted for tiles.

    ``rows.inner`` counts along the layout in which the ops are computed, ``across`` along the
    other one, and ``rows.row`` what is left.
    """

    rows: Rows
    across: Var
    other: int  # bytes that lie in the other layout, and go through shared memory
    stray: int  # bytes that lie neither way
    bytes: int  # that are read and written in all
    width: int  # bytes of an element of all that goes through shared memory


@dataclass(frozen=True)
class Part:
    """Where a part of a join is: ``first <= at < until``, None for up to the end."""

    at: Sum
    first: int
    until: int | None

    def tests(self, names: Mapping[Var, str]) -> list[str]:
        """C++ for it."""
        code, found = self.at.code(names), []
        if self.first:
            found.append(f"{code} >= {self.first}u")
        if self.until is not None:
            found.append(f"{code} < {self.until}u")
        return found

    def whole(self, var: Var, lanes: int) -> bool:
        """Whether lanes along ``var`` are all within it or all outside."""
        slope = self.at.slope(var, lanes)
        borders = gcd(self.at.multiple(var, lanes), self.first, self.until or 0)
        return slope == 0 or (slope == 1 and borders % lanes == 0)


@dataclass(frozen=True)
class Access:
    """A tensor that is read or written, where, and in which parts of joins."""

    tensor: TensorSpec
    at: Sum
    parts: tuple[Part, ...] = ()

    @property
    def bytes(self) -> int:
        return self.tensor.numel * self.tensor.dtype.itemsize


def tiles_of(spec: GraphSpec, rows: Rows | None = None) -> Tiles:
    """How the elements of a region are best counted for tiles. Raises :class:`Refused`."""
    return min(ways(spec, rows), key=_slowness)


def ways(spec: GraphSpec, rows: Rows | None = None) -> list[Tiles]:
    """All ways to count the elements of a region for tiles. Raises :class:`Refused`."""
    rows = rows or rows_of(spec)
    if rows.reductions:
        raise Refused("tiles are for regions without reductions")
    if any(isinstance(each, Pick) for each in reachable(value for value, *_ in rows.outputs)):
        raise Refused("tiles of what is read at computed places")
    if max(tensor.extent for tensor in spec.tensors.values()) >= MOST_ELEMENTS:
        raise Refused("tiles of tensors that need an index of 64 bits")
    found: list[Tiles] = []
    if any(_side(access, rows.inner) for access in _accesses(spec, rows)):
        mains: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for at, (_, tensor, _) in enumerate(rows.outputs):
            mains.setdefault((tensor.shape, memory_order(tensor.shape, tensor.stride)), at)
        found = [tiles for main in mains.values() for tiles in _by_main(spec, rows, main)]
    if not found:
        raise Refused("nothing lies in another layout than the results")
    return found


def why_tiles_first(spec: GraphSpec, rows: Rows) -> str | None:
    """Why what a region with reductions copies should be a kernel in tiles, or None.

    Rows that lie in memory are written across it then, an element at a time: keys of attention that
    were multiplied transposed, their gradient in rows of tokens, and its sum for the bias.
    """
    if not rows.reductions or rows.strided:
        return None
    producer = {node.results[0]: node for node in spec.nodes if node.results}
    for (_, tensor, index), name in zip(rows.outputs, spec.outputs, strict=True):
        while (node := producer.get(name)) is not None and (
            OPS[node.op].view or node.op == "identity"
        ):
            name = node.operands[0]
        if name in spec.inputs and lies_across(rows, tensor, index):
            return "what is copied to another order beside a reduction is a kernel of its own"
    return None


def _slowness(tiles: Tiles) -> float:
    """Bytes that move, those through shared memory and those one by one more than once."""
    one_by_one = 4 * tiles.stray + tiles.bytes / (2 * tiles.rows.lanes)
    return tiles.bytes + tiles.other + one_by_one


def _by_main(spec: GraphSpec, rows: Rows, main: int) -> Iterator[Tiles]:
    """The tiles in which a given result is written in the order of its memory."""
    count = rows.inner.extent
    orders = _orders(spec, rows, main)
    whole = replace(rows, outputs=_indexed(rows, main, orders, counter(rows.inner)))
    accesses = _accesses(spec, whole)
    votes: dict[tuple[int, int], int] = {}
    for access in accesses:
        side = _side(access, rows.inner)
        if side is not None:
            votes[side] = votes.get(side, 0) + access.bytes
    if not votes:
        return
    div, mod = max(votes, key=lambda side: votes[side])
    if count % (div * mod):
        return
    fast, slow = Var("k", div), Var("m", mod)
    rest = Var("r", count // (div * mod))
    counted = counter(fast) + counter(slow) * div + counter(rest) * (div * mod)
    try:
        outputs = _indexed(rows, main, orders, counted)
        accesses = _accesses(spec, replace(rows, row=rest, inner=fast, outputs=outputs))
    except Refused:
        return
    total = sum(access.bytes for access in accesses)
    for along, across in ((fast, slow), (slow, fast)):
        other = [access for access in accesses if is_other(access, along, across)]
        if other:
            tiled = replace(rows, row=rest, inner=along, outputs=outputs)
            width = sum(access.tensor.dtype.itemsize for access in other)
            stray = sum(each.bytes for each in accesses if _strays(each, along, across))
            moved = sum(access.bytes for access in other)
            yield Tiles(tiled, across, moved, stray, total, width)


def _orders(spec: GraphSpec, rows: Rows, main: int) -> list[tuple[int, ...] | None]:
    """For each output which dims of the main one's its own are, None for no dims of it.

    An output that is a transposed one of the same values is written from what they are read for.
    """
    tensor, count = rows.outputs[main][1], counter(rows.inner)
    rank, index = len(tensor.shape), _in_memory(tensor, count)
    known = set(_accesses_of(spec, rows, main, index))
    found: list[tuple[int, ...] | None] = []
    for at, (value, form, _) in enumerate(rows.outputs):
        tried: list[tuple[int, ...] | None] = [None]
        if form.shape == tensor.shape:
            tried = [tuple(range(rank))]
        viewed = any(isinstance(each, View) for each in reachable([value]))
        if at != main and viewed and len(form.shape) == rank <= MOST_PERMUTED:
            orders = itertools.permutations(range(rank))
            tried += [o for o in orders if form.shape == tuple(tensor.shape[dim] for dim in o)]
        found.append(tried[0])
        least = None
        for order in tried if len(tried) > 1 else ():
            try:
                reads = _accesses_of(spec, rows, at, _ordered(form, index, order, count))
            except Refused:
                continue
            more = sum(read.bytes for read in reads if read not in known)
            if least is None or more < least:
                least, found[-1] = more, order
    return found


def _accesses_of(spec: GraphSpec, rows: Rows, at: int, index: Index) -> list[Access]:
    """What one output reads and writes. Raises :class:`Refused`."""
    value, tensor, _ = rows.outputs[at]
    return _accesses(spec, replace(rows, outputs=((value, tensor, index),)))


def _indexed(
    rows: Rows, main: int, orders: Sequence[tuple[int, ...] | None], count: Sum
) -> tuple[tuple[Value, TensorSpec, Index], ...]:
    """The outputs of a region with their indices; ``main`` is counted in the order of its
    memory."""
    index = _in_memory(rows.outputs[main][1], count)
    return tuple(
        (value, tensor, _ordered(tensor, index, order, count))
        for (value, tensor, _), order in zip(rows.outputs, orders, strict=True)
    )


def _ordered(tensor: TensorSpec, index: Index, order: tuple[int, ...] | None, count: Sum) -> Index:
    """The index of a tensor by dims of another one's, or in the order of its own memory."""
    return _in_memory(tensor, count) if order is None else tuple(index[dim] for dim in order)


def _in_memory(tensor: TensorSpec, count: Sum) -> Index:
    """The index of the elements of a tensor in the order of its memory."""
    order = memory_order(tensor.shape, tensor.stride)
    found: dict[int, Sum] = {}
    div = tensor.numel
    for dim in order:
        div //= tensor.shape[dim]
        cut = count.cut(div, tensor.shape[dim])
        if cut is None:
            raise Refused("a tile that cuts through a dim of a result")
        found[dim] = cut
    return tuple(found[dim] for dim in range(len(order)))


def _accesses(spec: GraphSpec, rows: Rows) -> list[Access]:
    """All reads and writes of a region, each place of a tensor once. Raises :class:`Refused`."""
    writer = Writer(spec, Schedule(1, 1), rows, 0)
    found: dict[Access, None] = {}
    stack: list[tuple[Value, Index, tuple[Part, ...]]] = []
    for value, tensor, index in rows.outputs:
        found[Access(tensor, place(index, tensor.stride))] = None
        stack.append((value, index, ()))
    seen = set()
    while stack:
        value, index, parts = stack.pop()
        if (id(value), index, parts) in seen:
            continue
        seen.add((id(value), index, parts))
        if isinstance(value, Read):
            found[Access(value.tensor, place(index, value.tensor.stride), parts)] = None
        below = writer._below(value, index)
        if isinstance(value, Join) and part_of(value, index) is None:
            start = 0
            for operand, inside in below:
                until = start + operand.shape[value.dim]
                last = until == value.shape[value.dim]
                part = Part(index[value.dim], start, None if last else until)
                stack.append((operand, inside, (*parts, part)))
                start = until
        else:
            stack += [(*each, parts) for each in below]
    return list(found)


def _side(access: Access, var: Var) -> tuple[int, int] | None:
    """The digit of the counter of results along which a tensor lies, None if it is the fastest."""
    if access.tensor.numel <= SMALL:
        return None
    terms = [(by, digit) for digit, by in access.at.terms if digit.var == var]
    if not terms:
        return None
    by, digit = min(terms, key=lambda term: (term[0], term[1]))
    slow = by * access.tensor.dtype.itemsize > VECTOR_BYTES
    below = any(each.div < digit.div for _, each in terms)
    return None if slow or not below else (digit.div, digit.mod)


def _strays(access: Access, along: Var, across: Var) -> bool:
    """Whether a tensor is read or written element by element."""
    if access.tensor.numel <= SMALL or is_other(access, along, across):
        return False
    terms = [(by, digit) for digit, by in access.at.terms]
    if not any(digit.var == along for _, digit in terms):
        return False
    by, digit = min(terms, key=lambda term: (term[0], term[1]))
    return digit.var != along or digit.div != 1 or by > 1


def is_other(access: Access, along: Var, across: Var) -> bool:
    """Whether a tensor lies in the other layout and goes through shared memory."""
    if access.tensor.numel <= SMALL:
        return False
    terms = [(by, digit) for digit, by in access.at.terms]
    if not terms or not any(digit.var == along for _, digit in terms):
        return False
    by, digit = min(terms, key=lambda term: (term[0], term[1]))
    return digit.var == across and digit.div == 1 and by * access.tensor.dtype.itemsize <= 16


def tiling_for(tiles: Tiles, processors: int) -> Tiling:
    """The tiling by rule, for a GPU with so many processors. Raises :class:`Refused`."""
    wanted = WANTED[min(8, tiles.rows.bytes)]
    while True:
        found = _near(tiles, wanted, wanted)
        enough = wanted <= 32 or _blocks(tiles, found) >= 2 * processors
        if _fits(tiles, found) and enough:
            return found
        if wanted <= 16:
            raise Refused("tiles of more tensors than shared memory holds")
        wanted //= 2


def tilings(tiles: Tiles, processors: int) -> list[Tiling]:
    """Tilings that are worth measuring, the one by rule first. Raises :class:`Refused`."""
    found = {tiling_for(tiles, processors): None}
    wanted = WANTED[min(8, tiles.rows.bytes)]
    for along, across in ((2, 1), (1, 2), (2, 2), (1, 1), (0.5, 1), (1, 0.5), (0.5, 0.5)):
        each = _near(tiles, int(along * wanted), int(across * wanted))
        for tried in (each, replace(each, threads=min(each.threads, 128))):
            if _fits(tiles, tried):
                found[tried] = None
    return list(found)


def _near(tiles: Tiles, wanted_along: int, wanted_across: int) -> Tiling:
    """A tiling of about so many elements along each side; if one is short, of more of the other."""
    along, across = tiles.rows.inner.extent, tiles.across.extent
    lanes, size = gcd(along, max(1, VECTOR_BYTES // tiles.rows.bytes)), min(8, tiles.rows.bytes)
    unit = max(1, 2 * VECTOR_BYTES // size)  # a sector of memory
    area = wanted_along * wanted_across
    if across % (unit // 8 or 1) and across <= 4 * wanted_across:
        back = across  # whole, so that vectors may go on from row to row
    else:
        back = _extent(across, wanted_across, unit)
    most = min(MOST_ALONG, max(wanted_along // 2, area // back))
    side = _extent(along, most, max(unit, lanes))
    if side < wanted_along and back < across:
        back = _extent(across, min(MOST_ALONG, area // side), unit)
    threads = -(-side * back // lanes // WARP) * WARP
    return Tiling(lanes, side, back, max(WARP, min(THREADS, threads)))


def _blocks(tiles: Tiles, tiling: Tiling) -> int:
    sides = -(-tiles.rows.inner.extent // tiling.along), -(-tiles.across.extent // tiling.across)
    return sides[0] * sides[1] * tiles.rows.row.extent


def _fits(tiles: Tiles, tiling: Tiling) -> bool:
    """Whether shared memory holds it, padding included, and registers what a thread reads."""
    if tiling.along * tiling.across > MOST_STEPS * tiling.threads * tiling.lanes:
        return False
    return tiling.along * tiling.across * tiles.width * 9 // 8 <= SHARED_BYTES


def _extent(extent: int, wanted: int, unit: int) -> int:
    """How many elements of a dim a tile has: all, or whole sectors with little left over."""
    if extent <= wanted * 3 // 2:
        return extent
    tried = range(unit, 2 * wanted + 1, unit)
    fit = [each for each in tried if 2 * each >= wanted]

    def cost(each: int) -> float:
        idle = -(-extent // each) * each / extent
        return idle + 0.3 * max(0.0, wanted / each - 1) + 0.03 * max(0.0, each / wanted - 1)

    return min(fit, key=cost) if fit else wanted
