"""Functions over two variables: blocks share out long reductions, or what is computed behind them.

A thread has one variable and goes through the other one. Across memory, threads and their lanes lie
along columns, and each goes down its columns. Along memory, the threads of a block go through a
part of one row. What the loop does not change is computed before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from ..ir.spec import GraphSpec, TensorSpec, contiguous_strides, numel, round_up
from .gather import PARTS, Gather, team, whole
from .index import Sum, Var, place
from .parts import counted, parts_of, run_of
from .rows import VECTOR_BYTES, WARP, Rows, Schedule
from .tape import Index, Join, Pick, Refused, Value
from .write import Code, Writer

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

    widths = [unit * many for many in range(1, max(1, columns // unit) + 1)]
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


class GridFunction(Writer):
    """The lines of a function over a space, for a grid."""

    def __init__(
        self,
        spec: GraphSpec,
        space: Space,
        grid: Grid,
        outputs: Sequence[tuple[Value, TensorSpec, Index]],
    ) -> None:
        rows = Rows(space.row, space.inner, tuple(outputs), (), 4)
        super().__init__(spec, Schedule(space.lanes, grid.threads), rows, 0)
        self._once = None
        self._space, self._grid = space, grid
        self._loop = space.row if space.across else space.inner
        self._before: list[str] = []
        self._moves = True  # what the loop does not change goes before it
        self._found: dict[int, str] = {}  # C++ for what was reduced, behind the loop

    def applied(self) -> list[str]:
        """The function that writes outputs of the space."""
        self._written()
        return self._loops()

    def _write(self, outputs: Sequence[tuple[Value, TensorSpec, Index]]) -> None:
        rows, self._rows = self._rows, replace(self._rows, outputs=tuple(outputs))
        self._written()
        self._rows = rows

    def reduced(
        self,
        gathers: Sequence[Gather],
        beside: Sequence[tuple[Value, TensorSpec, Index]] = (),
        partial: Sequence[Sequence[TensorSpec]] = (),
    ) -> list[str]:
        """The function that reduces, and writes what it reads for that ``beside``.

        Each chunk writes to the tensors of partial results; where there are none, the outputs are
        computed from the results.
        """
        names = [self._gathered(each) for each in gathers]
        self._write(beside)
        body = self._loops()
        if self._space.across:
            return body + self._down_columns(gathers, names, partial)
        return body + self._along_row(gathers, names, partial)

    # -- the loop -----------------------------------------------------------------------------

    def _loops(self) -> list[str]:
        """Where a thread is, what it computes once, and its loop."""
        space, grid, lanes = self._space, self._grid, self._plan.lanes
        head = [
            f"const u32 chunk = blockIdx.x % {grid.chunks}u, number = blockIdx.x / {grid.chunks}u;"
        ]
        if space.across:
            idle = f" || y >= {grid.deep}u" if grid.threads > grid.wide * grid.deep else ""
            head += [
                f"const u32 x = threadIdx.x % {grid.wide}u, y = threadIdx.x / {grid.wide}u;",
                f"const u32 base = number * {grid.wide * lanes}u;",
                f"u32 k = base + x * {lanes}u;",
                f"u32 end = (chunk + 1) * {grid.per}u;",
                f"if (end > {space.row.extent}u) end = {space.row.extent}u;",
                f"if (k >= {space.inner.extent}u{idle}) k = end = 0;",
            ]
            loop = f"for (u32 r = chunk * {grid.per}u + y; r < end; r += {grid.deep}u) {{"
        else:
            length = space.inner.extent
            head += [
                "const u32 r = number;",
                f"u32 end = (chunk + 1) * {grid.per * lanes}u;",
                f"if (end > {length}u) end = {length}u;",
            ]
            first = f"(chunk * {grid.per}u + threadIdx.x) * {lanes}u"
            loop = f"for (u32 k = {first}; k < end; k += {grid.wide * lanes}u) {{"
        inside = ["  " + line for line in self._lines]
        return [*head, *self._before, f"#pragma unroll {LEAST_STEPS}", loop, *inside, "}"]

    def _at(self, value: Value, index: Index) -> Code:
        if id(value) in self._found:
            if index != self._space.kept:
                raise Refused("the result of a reduction is asked for elsewhere than it is found")
            return Code(self._found[id(value)], 0)
        if not self._moves or any(self._loop in part.vars() for part in index):
            return super()._at(value, index)
        lines, self._lines, self._moves = self._lines, self._before, False
        made = super()._at(value, index)
        self._lines, self._moves = lines, True
        return made

    def _joined(self, value: Join, index: Index) -> Code:
        """Within a branch nothing is moved before the loop: only there it may be read."""
        moves, self._moves = self._moves, False
        made = super()._joined(value, index)
        self._moves = moves
        return made

    def _picked(self, value: Pick, index: Index) -> Code:
        """The same of what is read at a place that the loop computes."""
        moves, self._moves = self._moves, False
        made = super()._picked(value, index)
        self._moves = moves
        return made

    # -- reductions ---------------------------------------------------------------------------

    def _gathered(self, gather: Gather) -> list[str]:
        """Lines of the loop that gather; the names of what each lane of a thread gathers."""
        code = self._at(gather.operand, self._space.index).text
        start = gather.kind[1] if gather.parts == 1 else "0.0f"
        names = [self._new() for _ in range(gather.parts)]
        lanes = self._plan.lanes
        for name in names[-2:]:
            self._before.append(f"float {name}[{lanes}];")
            self._before.append(f"for (int j = 0; j < {lanes}; ++j) {name}[j] = {start};")
        if not gather.moments:
            (name,) = names
            self._each_lane(f"{name}[j] = {gather.kind[2]}::of({name}[j], {code});")
            return [f"{name}[j]"]
        count, mean, squares = names
        share, apart = self._new(), self._new()
        self._before.append(f"float {count} = 0.0f;")
        self._lines += [f"{count} += 1.0f;", f"const float {share} = 1.0f / {count};"]
        self._each_lane(
            f"{{ const float {apart} = {code} - {mean}[j]; {mean}[j] += {apart} * {share}; "
            f"{squares}[j] += {apart} * ({code} - {mean}[j]); }}"
        )
        return [count, f"{mean}[j]", f"{squares}[j]"]

    def _along_row(
        self,
        gathers: Sequence[Gather],
        names: Sequence[Sequence[str]],
        partial: Sequence[Sequence[TensorSpec]],
    ) -> list[str]:
        """Reduce over the block; one thread writes."""
        body, results = [], []
        for gather, parts in zip(gathers, names, strict=True):
            kind, start, combine = gather.kind
            made = self._new()
            each = whole(gather, parts)
            body += [
                f"{kind} {made} = {start};",
                "#pragma unroll",
                f"for (int j = 0; j < {self._plan.lanes}; ++j) "
                f"{made} = {combine}::of({made}, {each});",
                f"{made} = {team(gather, self._grid.threads)}({made});",
            ]
            results.append(made)
        lines = self._finish(gathers, results, partial, self._names)
        return [*body, "if (threadIdx.x == 0) {", *("  " + line for line in lines), "}"]

    def _down_columns(
        self,
        gathers: Sequence[Gather],
        names: Sequence[Sequence[str]],
        partial: Sequence[Sequence[TensorSpec]],
    ) -> list[str]:
        """Reduce over the threads that have the same columns, then over runs of columns."""
        grid, lanes, run = self._grid, self._plan.lanes, self._space.run
        columns, runs = grid.wide * lanes, grid.wide * lanes // run
        share = 1  # threads for a run
        while share < WARP and share * 4 < run:
            share *= 2
        shared = [
            f"__shared__ float s{at}[{columns * grid.deep}];" for at in range(_parts(gathers))
        ]
        first, down, over, results = [], [], [], []
        at = 0
        for gather, parts in zip(gathers, names, strict=True):
            kind, start, combine = gather.kind
            buffers = [f"s{at + part}" for part in range(gather.parts)]
            at += gather.parts
            element = whole(gather, [f"{buffer}[{{}}]" for buffer in buffers])
            first += [
                f"{buffer}[(y * {lanes}u + j) * {grid.wide}u + x] = {part};"
                for buffer, part in zip(buffers, parts, strict=True)
            ]
            made = self._new()
            step = element.format(
                *[f"(line * {lanes}u + lane) * {grid.wide}u + i % {grid.wide}u"] * 3
            )
            down += [
                f"{kind} {made} = {start};",
                f"for (u32 line = 0; line < {grid.deep}u; ++line)",
                f"  {made} = {combine}::of({made}, {step});",
                *(
                    f"{buffer}[i] = {part.format(made)};"
                    for buffer, part in zip(buffers, PARTS[gather.parts], strict=True)
                ),
            ]
            made = self._new()
            step = element.format(*[f"c % {lanes}u * {grid.wide}u + c / {lanes}u"] * 3)
            over += [
                f"{kind} {made} = {start};",
                f"if (there) for (u32 c = i * {run}u + q; c < i * {run}u + {run}u; c += {share}u)",
                f"  {made} = {combine}::of({made}, {step});",
                f"{made} = {team(gather, share)}({made});" if share > 1 else "",
            ]
            results.append(made)
        names_of = {**self._names, self._space.inner: "column"}
        lines = self._finish(gathers, results, partial, names_of)
        idle = f"if (y < {grid.deep}u) " if grid.threads > grid.wide * grid.deep else ""
        body = [
            *shared,
            "#pragma unroll",
            f"for (u32 j = 0; j < {lanes}u; ++j) {idle}{{ {' '.join(first)} }}",
            "__syncthreads();",
        ]
        if grid.deep > 1:
            body += [
                f"for (u32 i = threadIdx.x; i < {columns}u; i += {grid.threads}u) {{",
                f"  const u32 lane = i / {grid.wide}u;",
                *("  " + line for line in down),
                "}",
                "__syncthreads();",
            ]
        teams = grid.threads // share
        return [
            *body,
            f"for (u32 first = 0; first < {runs}u; first += {teams}u) {{",
            f"  const u32 i = first + threadIdx.x / {share}u, q = threadIdx.x % {share}u;",
            f"  const u32 column = base + i * {run}u;",
            f"  const bool there = i < {runs}u && column < {self._space.inner.extent}u;",
            *("  " + line for line in over),
            "  if (there && q == 0) {",
            *("    " + line for line in lines),
            "  }",
            "}",
        ]

    def _finish(
        self,
        gathers: Sequence[Gather],
        results: Sequence[str],
        partial: Sequence[Sequence[TensorSpec]],
        names: Mapping[Var, str],
    ) -> list[str]:
        """What is written of one result: the numbers of its chunk, or the outputs."""
        kept = place(self._space.kept, contiguous_strides(self._space.kept_shape)).code(names)
        if partial:
            return [
                f"p{self._places[to.name]}[({kept}) * {self._grid.chunks}u + chunk] = {part};"
                for gather, made, tensors in zip(gathers, results, partial, strict=True)
                for to, code in zip(tensors, PARTS[gather.parts], strict=True)
                for part in [code.format(made)]
            ]
        for gather, made in zip(gathers, results, strict=True):
            codes = [code.format(made) for code in PARTS[gather.parts]][-len(gather.values) :]
            self._found |= {id(v): code for v, code in zip(gather.values, codes, strict=True)}
        self._lines, self._known, self._moves = [], {}, False
        self._plan, self._names = Schedule(1, self._plan.team), dict(names)
        self._written()
        return self._lines


def _parts(gathers: Sequence[Gather]) -> int:
    return sum(gather.parts for gather in gathers)


def shared_bytes(space: Space, gathers: Sequence[Gather], threads: int) -> int:
    """The shared memory of a block down columns."""
    return 4 * _parts(gathers) * space.lanes * threads if space.across else 0
