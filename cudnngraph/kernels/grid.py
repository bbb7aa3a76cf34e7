"""The elements of a value of which dims are reduced, and blocks and threads for them.

A thread has one variable and goes through the other one. Across memory, threads and their lanes lie
along columns, and each goes down its columns. Along memory, the threads of a block go through a
part of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from ..ir.spec import contiguous_strides, numel, round_up
from .gather import Gather
from .index import Sum, Var, place
from .parts import counted, parts_of, run_of
from .rows import VECTOR_BYTES, WARP
from .tape import Index, Value

LONG_RUN = 32  # vectors: from here on elements that are reduced side by side are a row of their own
LEAST_STEPS = 4  # of a thread's loop, where a row or column is shared out
MOSTLY = 0.85  # of the threads that could be busy: with these the widest block is taken
MOST_SHARED = 40 << 10  # bytes of a block, to leave some of the 48 KiB for sums over a team


@dataclass(frozen=True)
class Space:
    """The elements of a value of which dims are reduced, counted by a row and a place in it.

    ``run`` elements that lie side by side are reduced together; columns of a block are whole runs.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    row: Var
    inner: Var
    index: Index
    across: bool  # threads lie along columns, and the loop goes over rows
    run: int
    lanes: int

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """The shape of what the elements are reduced to."""
        return tuple(1 if dim in self.dims else n for dim, n in enumerate(self.shape))

    @property
    def kept(self) -> Index:
        """The index of the result that an element is reduced into."""
        return tuple(Sum() if dim in self.dims else each for dim, each in enumerate(self.index))

    @property
    def result(self) -> Sum:
        """The number of the result that an element is reduced into."""
        return place(self.kept, contiguous_strides(self.kept_shape))

    def alike(self, other: Space) -> bool:
        """Whether blocks of both, of the same columns or row, have the same results."""
        return (self.across, self.run, self.row, self.inner, self.result) == (
            (other.across, other.run, other.row, other.inner, other.result)
        )


def space_of(value: Value, dims: Sequence[int], most_lanes: int) -> Space:
    """How the elements of a value are counted of which dims are reduced."""
    shape, order = value.shape, parts_of(value)
    beside = list(order)
    while beside and beside[-1].dim in dims:
        beside.pop()
    run = numel(part.extent for part in order[len(beside) :])
    slow = [part for part in beside if part.dim in dims]
    across = bool(slow) and run < LONG_RUN * most_lanes
    down = slow if across else [part for part in beside if part.dim not in dims]
    along = [part for part in order if part not in down]
    row = Var("r", numel(part.extent for part in down))
    inner = Var("k", numel(part.extent for part in along))
    index = dict.fromkeys(range(len(shape)), Sum())
    for parts, var in ((down, row), (along, inner)):
        for dim, each in counted(parts, var).items():
            index[dim] = index[dim] + each
    lanes = gcd(run_of(along), most_lanes)
    return Space(shape, tuple(dims), row, inner, tuple(index.values()), across, run, lanes)


def lanes_of(widest: int) -> int:
    """The most lanes for elements of so many bytes."""
    return VECTOR_BYTES // min(4, max(1, widest))


@dataclass(frozen=True)
class Grid:
    """Blocks and threads for a space: ``wide`` threads side by side, ``deep`` lines of these; a
    chunk is ``per`` rows, or vectors of a row, and one block's."""

    wide: int
    deep: int
    chunks: int
    per: int
    blocks: int

    @property
    def threads(self) -> int:
        """The threads of a block: whole warps, the last of which may be partly idle."""
        return round_up(self.wide * self.deep, WARP)

    def results(self, space: Space) -> int:
        """The results of a block."""
        return self.wide * space.lanes // space.run if space.across else 1

    def read_again(self, space: Space, chunks: int) -> int:
        """How many partial results all blocks read that put together those of so many chunks."""
        return self.blocks * self.results(space) * chunks

    def counted(self, space: Space, chunk: str) -> str:
        """C++ for how many elements of each result a chunk has."""
        rows, each = space.row.extent, space.run
        if not space.across:
            rows, each = space.inner.extent // space.lanes, space.lanes
        return f"(float)(lesser({self.per}u, {rows}u - {chunk} * {self.per}u) * {each}u)"


def grid_of(
    space: Space, threads: int, blocks: int, columns: int, steps: int | None = None
) -> Grid:
    """The grid with about so many threads of a block, and blocks; a block across memory has about
    so many threads side by side. ``steps`` are the fewest of a loop that is shared out."""
    least = LEAST_STEPS if steps is None else steps
    vectors = -(-space.inner.extent // space.lanes)
    if not space.across:
        while threads > WARP and vectors <= threads // 2:
            threads //= 2
        per, chunks = _shared_out(vectors, threads, blocks // space.row.extent, least)
        return Grid(threads, 1, chunks, per, space.row.extent * chunks)
    unit = space.run // gcd(space.run, space.lanes)

    def use(wide: int) -> float:
        deep = min(max(1, threads // wide), space.row.extent)
        return vectors / round_up(vectors, wide) * wide * deep

    most = min(columns // unit, -(-vectors // unit))  # no threads that have no column
    widths = [unit * many for many in range(1, max(1, most) + 1)]
    enough = MOSTLY * max(map(use, widths))
    wide = max(each for each in widths if use(each) >= enough)
    deep = min(max(1, threads // wide), space.row.extent)
    beside = -(-vectors // wide)
    per, chunks = _shared_out(space.row.extent, deep, blocks // beside, least)
    return Grid(wide, deep, chunks, per, beside * chunks)


def _shared_out(count: int, step: int, chunks: int, least: int) -> tuple[int, int]:
    """The length and the number of chunks of whole steps, none of them empty or very short."""
    chunks = max(1, min(chunks, count // (step * least)))
    per = round_up(-(-count // chunks), step)
    return per, -(-count // per)


def parts_in(gathers: Sequence[Gather]) -> int:
    """The numbers of a partial result of all gathers."""
    return sum(gather.parts for gather in gathers)


def shared_bytes(space: Space, gathers: Sequence[Gather], threads: int) -> int:
    """The shared memory of a block down columns."""
    return 4 * parts_in(gathers) * space.lanes * threads if space.across else 0
