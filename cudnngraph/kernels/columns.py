"""Functions of rows that reduce columns too: what gradients of norms and of biases need at once.

A block goes through many rows. Its threads hold a row in registers, and beside it what each of
their columns comes to over the rows so far. At the end the block puts its threads together, and
writes one partial result for each column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..device.rules import rules
from ..ir.spec import GraphSpec, TensorSpec, contiguous_strides
from .gather import KINDS
from .index import Sum, counter, place, reshaped
from .rows import (
    MOST_REGISTERS,
    MOST_THREADS,
    WARP,
    Rows,
    Schedule,
    rows_of_values,
    schedule_for,
    why_slow,
)
from .stages import Outputs, reductions_of
from .tape import Index, Read, Reduce, Value, count_of, reduced, reshape
from .write import Writer

COLUMN_BYTES = 32 << 10  # of shared memory, in which the rows of a block are put together
BLOCKS_PER_SM = 4  # at most
MOST_PER_THREAD = 256  # registers, of which a thread of CUDA has 255
# Registers of a thread, as compiled: for an element of a row, for each column, and for the rest.
OF_ELEMENT, OF_COLUMN, SPARE = 3, 1, 24
OF_REGISTERS = 3 / 4  # of them, the most that a block takes; beyond, more threads share a row


@dataclass(frozen=True)
class Column:
    """A reduction over all rows, and the index of what it reads in a row."""

    value: Reduce
    index: Index


def columns_of(rows: Rows, outputs: Outputs) -> list[Column]:
    """The reductions over all rows that other outputs are made of, of values of whole rows."""
    size = rows.row.extent * rows.inner.extent
    whole = next(((to.shape, at) for _, to, at in rows.outputs if to.numel == size), None)
    if whole is None:
        return []
    mine = {id(each) for some in rows.reductions for each in some}
    found = []
    for each in reductions_of([value for value, _ in outputs]):
        of_rows = {id(inner) for inner in reductions_of([each.operand])} <= mine
        if type(each) is not Reduce or id(each) in mine or not of_rows:
            continue
        if count_of(each.operand, each.dims) == rows.row.extent:
            index = _index_of(each, whole[0], whole[1], rows)
            if index is not None:
                found.append(Column(each, index))
    return found


def _index_of(each: Reduce, shape: Sequence[int], whole: Index, rows: Rows) -> Index | None:
    """The index of what a reduction reads; None if it does not take whole columns, in order."""
    operand = each.operand.shape
    if count_of(each.operand, range(len(operand))) != rows.row.extent * rows.inner.extent:
        return None
    index = reshaped(whole, shape, operand)
    if index is None:
        return None
    kept = tuple(Sum() if dim in each.dims else at for dim, at in enumerate(index))
    if place(kept, contiguous_strides(each.shape)) != counter(rows.inner):
        return None
    return tuple(index)


def most_of_thread(threads: int) -> int:
    """The registers of a thread from which on more threads share a row, in blocks of so many."""
    return int(OF_REGISTERS * min(MOST_PER_THREAD, MOST_REGISTERS // threads))


def schedule_of(rows: Rows, schedule: Schedule, columns: int, threads: int) -> Schedule | None:
    """The schedule of rows with so many columns reduced beside, None if registers do not hold
    both. The more ``threads`` a block should have, the fewer registers has each."""
    most = most_of_thread(threads)
    if not schedule.chunks or rows.in_memory_form(schedule) or rows.strided:
        return None
    while registers_of(schedule, columns) > most and schedule.team < MOST_THREADS:
        team = 2 * schedule.team
        chunks = -(-rows.vectors(schedule.lanes) // team)
        schedule = replace(schedule, team=team, rows=max(1, schedule.rows // 2), chunks=chunks)
    while schedule.rows > 1 and 4 * schedule.rows * rows.inner.extent > COLUMN_BYTES:
        schedule = replace(schedule, rows=schedule.rows // 2)
    fits = schedule.threads * registers_of(schedule, columns) <= MOST_REGISTERS
    fits &= 4 * schedule.rows * rows.inner.extent <= COLUMN_BYTES
    return schedule if fits and schedule.threads % WARP == 0 else None


def registers_of(schedule: Schedule, columns: int) -> int:
    """About how many registers a thread needs."""
    kept = schedule.chunks * schedule.lanes
    return (OF_ELEMENT + OF_COLUMN * columns) * kept + SPARE


def resident(schedule: Schedule, columns: int) -> int:
    """The blocks that a multiprocessor should hold at a time."""
    of_block = schedule.threads * registers_of(schedule, columns)
    return max(1, min(BLOCKS_PER_SM, MOST_REGISTERS // of_block))


@dataclass(frozen=True)
class Planned:
    """A function of rows that reduces columns: its rows, its schedule, and as many blocks as the
    GPU holds at a time, of which ``resident`` are on a multiprocessor."""

    rows: Rows
    columns: Sequence[Column]
    schedule: Schedule
    blocks: int
    resident: int

    @property
    def bounds(self) -> str:
        """What the compiler has to make do with, so that all blocks run at a time."""
        return f"{self.schedule.threads}, {self.resident}"

    @property
    def partial(self) -> tuple[int, int]:
        """The shape of what blocks write of a reduction: a number of each column from each.

        A block's lie side by side: 4 bytes at a time take ten times as long.
        """
        return self.blocks, self.rows.inner.extent

    def written(self, spec: GraphSpec, partial: Sequence[TensorSpec]) -> tuple[list[str], int]:
        """The lines of the function behind its pointers, and the number of blocks."""
        return ColumnWriter(spec, self.schedule, self.rows, self.columns, partial).lines()

    def put_together(self, partial: Sequence[TensorSpec]) -> dict[int, Value]:
        """What takes the place of the reductions, by their ids."""
        return {
            id(value): reshape(reduced(value.kind, Read(to.shape, to), (0,)), value.shape)
            for value, to in zip((each.value for each in self.columns), partial, strict=True)
        }


def planned(same: Outputs, others: Outputs, processors: int, threads: int) -> Planned | None:
    """The function of the rows of some outputs that reduces the columns that others are made of;
    None where there should be none. Raises :class:`~cudnngraph.kernels.tape.Refused`.

    ``threads`` are those that a block should have.
    """
    if not rules().kernel_columns_with_rows:
        return None
    rows = rows_of_values([value for value, _ in same], [to for _, to in same])
    columns = columns_of(rows, others) if rows.reductions else []
    schedule = schedule_for(rows, processors)
    if not columns or why_slow(rows, schedule, processors):
        return None
    found = schedule_of(rows, schedule, len(columns), threads)
    if found is None:
        return None
    held = resident(found, len(columns))
    blocks = min(-(-rows.row.extent // found.rows), processors * held)
    return Planned(rows, columns, found, blocks, held)


class ColumnWriter(Writer):
    """The text of a function of rows that reduces columns; ``partial`` tensors have a number of
    each column from each block."""

    def __init__(
        self,
        spec: GraphSpec,
        schedule: Schedule,
        rows: Rows,
        columns: Sequence[Column],
        partial: Sequence[TensorSpec],
    ) -> None:
        super().__init__(spec, schedule, rows, 0)
        self._columns = columns
        self._partial = partial
        self._sums = [self._new() for _ in columns]

    def lines(self) -> tuple[list[str], int]:
        """The lines of the function behind its pointers, and the number of blocks."""
        plan, rows, kind = self._plan, self._rows, self._count_type
        blocks = self._partial[0].shape[0]
        body = self._body()
        step = blocks * plan.rows
        loop = f"for ({kind} some = ({kind})blockIdx.x * {plan.rows}u; some < {rows.row.extent}u; "
        inside = [f"{kind} r = some + y;", *self._mine()]
        sums = []
        for name, column in zip(self._sums, self._columns, strict=True):
            start = KINDS[column.value.kind][0]
            sums += [
                f"float {name}[{self._chunks}][{plan.lanes}];",
                "#pragma unroll",
                *self._each_chunk([f"{name}[c][j] = {start};"]),
            ]
        return [
            f"const u32 t = threadIdx.x % {plan.team}u, y = threadIdx.x / {plan.team}u;",
            *sums,
            loop + f"some += {step}u) {{",
            *("  " + line for line in (*inside, *self._declared, *body)),
            "}",
            *self._put_together(),
        ], blocks

    def _each_chunk(self, lines: Iterable[str]) -> list[str]:
        """Lines for each element that a thread has of a row, number j of chunk c."""
        return [
            f"for (u32 c = 0; c < {self._chunks}u; ++c) {{",
            f"  for (u32 j = 0; j < {self._plan.lanes}u; ++j) {{",
            *("    " + line for line in lines),
            "  }",
            "}",
        ]

    def _asked(self) -> set[tuple[int, Index]]:
        found = super()._asked()
        for column in self._columns:
            found |= self._asked_for([(column.value.operand, column.index)])
        return found

    def _written(self) -> None:
        codes = [self._at(column.value.operand, column.index).text for column in self._columns]
        super()._written()
        guard = "if (mine) " if self._mine() else ""
        for name, column, code in zip(self._sums, self._columns, codes, strict=True):
            combine = KINDS[column.value.kind][1]
            self._each_lane(f"{guard}{name}[c][j] = {combine}::of({name}[c][j], {code});")

    def _put_together(self) -> list[str]:
        """What each column comes to in this block, which one thread of it writes."""
        plan, extent, threads = self._plan, self._rows.inner.extent, self._plan.threads
        made = [f"__shared__ float shared[{plan.rows * extent}];"]
        column = f"const u32 k = (c * {plan.team}u + t) * {plan.lanes}u + j;"
        for name, each, partial in zip(self._sums, self._columns, self._partial, strict=True):
            combine, pointer = KINDS[each.value.kind][1], f"p{self._places[partial.name]}"
            held = f"shared[y * {extent}u + k] = {name}[c][j];"
            made += [
                "__syncthreads();",
                "#pragma unroll",
                *self._each_chunk([column, f"if (k < {extent}u) {held}"]),
                "__syncthreads();",
                f"for (u32 k = threadIdx.x; k < {extent}u; k += {threads}u) {{",
                "  float all = shared[k];",
                f"  for (u32 n = 1; n < {plan.rows}u; ++n) "
                f"all = {combine}::of(all, shared[n * {extent}u + k]);",
                f"  {pointer}[blockIdx.x * {extent}u + k] = all;",
                "}",
            ]
        return made
