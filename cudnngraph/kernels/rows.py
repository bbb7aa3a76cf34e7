"""The elements of a region counted in rows, and the schedules of kernels of rows.

A region is written down as values (:mod:`~cudnngraph.kernels.tape`). What is reduced together is a
row; where nothing is reduced, all elements are one long row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import torch

from ..device.rules import rules
from ..ir.spec import GraphSpec, Node, TensorSpec, memory_order, numel, once
from ..ops.table import OPS
from .index import Sum, Var, counter, digits, place, reshaped
from .parts import counted, parts_of, run_of
from .rules import RULES
from .rules.torch_ops import converted
from .scalars import MEMORY, REGISTER, number
from .short_reductions import written_out
from .source import MOST_TENSORS
from .tape import (
    Cut,
    Depthwise,
    Index,
    Join,
    Map,
    Number,
    Pick,
    Powers,
    Read,
    Reduce,
    Refused,
    Running,
    Value,
    View,
    Window,
    broadcast,
    operands_of,
    part_of,
)

WARP = 32
VECTOR_BYTES = 16
MOST_LANES = VECTOR_BYTES // 2
MOST_THREADS = 1024  # of a block, by CUDA
MOST_KEPT = 64  # elements of a row that a thread keeps in registers
MOST_REGISTERS = 1 << 16  # of a block; half of them are for what is not kept
MOST_AS_READ = 28  # registers of a thread, of 64, that keep what it reads
SMALL = 4096  # elements, which may lie anyhow
SMALL_BLOCK = 128  # threads
#: Norms whose statistics may be those of single channels.
OF_CHANNELS = ("batch_norm_train", "instance_norm", "group_affine")


@dataclass(frozen=True)
class Schedule:
    """How the work is dealt out: elements that lie side by side for a thread, threads that share a
    row, rows of a block, and chunks of a row that a thread has (0: as many as there are, one after
    the other), or where nothing is reduced, that it reads before it computes."""

    lanes: int
    team: int
    rows: int = 1
    chunks: int = 1

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return self.team * self.rows


@dataclass(frozen=True)
class Rows:
    """How the elements of a region are counted: rows, elements of a row, and the index of each
    output in these."""

    row: Var
    inner: Var
    outputs: tuple[tuple[Value, TensorSpec, Index], ...]
    reductions: tuple[tuple[Reduce, ...], ...]  # by the pass that computes them
    bytes: int  # of an element, the widest
    strided: bool = False  # too few elements of a row lie side by side in memory
    beside: bool = False  # but rows do
    apart: bool = False  # not all of them do
    start: Sum | None = None  # where a row lies, if that may be at any element
    read_bytes: int = 0  # of an element, of all that is read along a row
    again: bool = False  # what was read of a row is needed again behind a reduction

    @property
    def most_lanes(self) -> int:
        """The lanes that are a vector of memory."""
        return VECTOR_BYTES // min(4, max(1, self.bytes))

    @property
    def lanes(self) -> int:
        """The most lanes that a schedule may have of rows that are a whole number of them."""
        return gcd(self.inner.extent, self.most_lanes)

    def vectors(self, lanes: int) -> int:
        """The vectors of a row; those with ends that are none have fewer elements."""
        extent = self.inner.extent
        return extent // lanes if self.has_ends(lanes) else -(-extent // lanes)

    def has_ends(self, lanes: int) -> bool:
        """Whether a row has elements before and behind its vectors."""
        return self.inner.extent % lanes != 0

    def in_memory_form(self, schedule: Schedule) -> bool:
        """Whether threads keep what they read of a row as memory has it: registers hold more
        elements of 16 bits so."""
        kept = schedule.chunks * schedule.lanes
        return kept > MOST_KEPT or 2 * schedule.team * kept > MOST_REGISTERS

    def across(self, schedule: Schedule) -> bool:
        """Whether threads that are neighbours would read what does not lie side by side."""
        return self.strided and not (self.beside and schedule.team == 1)


def check_count(spec: GraphSpec) -> None:
    """Raise :class:`Refused` for more tensors than a kernel takes."""
    count = len(spec.inputs) + len(spec.outputs)
    if count > MOST_TENSORS:
        raise Refused(f"{count} tensors, of which a kernel takes {MOST_TENSORS}")


def tape_of(spec: GraphSpec) -> list[Value]:
    """The values of the outputs. Raises :class:`Refused`."""
    return list(once(spec, ("tape", rules().kernel_min_run_bytes), _tape_of, spec))


def _tape_of(spec: GraphSpec) -> list[Value]:
    check_count(spec)
    values: dict[str, Value] = {}
    for name in spec.inputs:
        tensor = spec.tensors[name]
        if tensor.dtype not in MEMORY:
            raise Refused(f"an input is {str(tensor.dtype).removeprefix('torch.')}")
        values[name] = Read(tensor.shape, tensor, type=REGISTER[tensor.dtype])
    for node in spec.nodes:
        if node.op == "constant":
            values[node.results[0]] = Number((), number(float(node.attr("value"))))
            continue
        _add(values, node, spec)
    return written_out([values[name] for name in spec.outputs])


def _add(values: dict[str, Value], node: Node, spec: GraphSpec) -> None:
    rule = RULES.get(node.op)
    if rule is None:
        raise Refused(f"no kernel is generated for {node.op}")
    operands = [None if name is None else values[name] for name in node.inputs]
    if node.op in OF_CHANNELS and operands[0] is not None:
        operands[0] = converted(operands[0], _written_as(node.operands[0], spec))
    made = rule(node, operands, spec.tensors[node.results[0]])
    for name, value in zip(node.outputs, made, strict=False):
        if name is None:
            continue
        tensor = spec.tensors[name]
        if value.shape != tensor.shape:
            raise Refused(f"the rule of {node.op} makes {value.shape} of '{name}' {tensor.shape}")
        values[name] = value


def _written_as(name: str, spec: GraphSpec) -> torch.dtype | None:
    """The 16-bit dtype in which a region writes what it computes as a tensor or as a view of it.

    Statistics of a channel are of that, as torch's are. The gradient reads it beside them, and the
    sum of a channel's gradients cancels to 0 only if it has their mean.
    """
    producers = {result: node for node in spec.nodes for result in node.results}

    def base(name: str) -> str:
        while (node := producers.get(name)) is not None and (
            OPS[node.op].view or (node.op == "cast" and node.attr("dtype") == "float32")
        ):
            name = node.operands[0]
        return name

    whole, narrow = base(name), (torch.float16, torch.bfloat16)
    if whole in spec.inputs:
        return None
    written = (spec.tensors[each].dtype for each in spec.outputs if base(each) == whole)
    return next((dtype for dtype in written if dtype in narrow), None)


def reachable(values: Iterable[Value]) -> list[Value]:
    """The values that others are made of, operands first."""
    found: dict[int, Value] = {}
    stack = [(value, False) for value in values]
    while stack:
        value, done = stack.pop()
        if done:
            found.setdefault(id(value), value)
        elif id(value) not in found:
            stack.append((value, True))
            stack += [(operand, False) for operand in operands_of(value)]
    return list(found.values())


def rows_of(spec: GraphSpec) -> Rows:
    """How the elements of a region are counted. Raises :class:`Refused`."""
    if any(tensor.numel == 0 for tensor in spec.tensors.values()):
        raise Refused("a tensor is empty")
    return rows_of_values(tape_of(spec), [spec.tensors[name] for name in spec.outputs])


def rows_of_values(values: Sequence[Value], tensors: Sequence[TensorSpec]) -> Rows:
    """How the elements of values are counted that go to tensors. Raises :class:`Refused`."""
    if any(tensor.dtype not in MEMORY for tensor in tensors):
        raise Refused("an output is of a dtype that kernels do not write")
    found = reachable(values)
    if any(isinstance(value, Depthwise) for value in found):
        raise Refused("a depthwise convolution, which is no kernel of rows")
    if any(isinstance(value, Running) for value in found):
        raise Refused("running sums of long rows, which are no kernel of rows")
    reductions = [value for value in found if isinstance(value, Reduce)]
    if reductions and any(isinstance(value, Window) for value in found):
        raise Refused("windows and reductions")
    if {Pick, Window} <= {type(value) for value in found}:
        raise Refused("windows, and places that are computed")
    every = (*tensors, *map(_tensor, _reads(found)))
    widest = max(tensor.dtype.itemsize for tensor in every)
    if not reductions:
        count = max(tensor.numel for tensor in tensors)
        if any(tensor.numel != count for tensor in tensors):
            raise Refused("outputs of several sizes")
        inner = Var("k", count)
        main = in_memory(tensors[0], counter(inner))
        outputs = tuple(
            (
                value,
                tensor,
                main if tensor.shape == tensors[0].shape else in_memory(tensor, counter(inner)),
            )
            for value, tensor in zip(values, tensors, strict=True)
        )
        along = [
            tensor.dtype.itemsize
            for tensor, at in reads_at((value, index) for value, _, index in outputs)
            if at is None or at.slope(inner, MOST_LANES) != 0
        ]
        widest = max([*along, *(tensor.dtype.itemsize for tensor in tensors)])
        return Rows(Var("r", 1), inner, outputs, (), widest)
    return _with_reductions(values, tensors, found, reductions, widest)


def _tensor(read: Read) -> TensorSpec:
    return read.tensor


def _reads(values: Iterable[Value]) -> list[Read]:
    return [value for value in values if isinstance(value, Read)]


def in_memory(tensor: TensorSpec, count: Sum) -> Index:
    """The index of the elements of a tensor in the order of its memory."""
    order = memory_order(tensor.shape, tensor.stride)
    found = digits(count, [tensor.shape[dim] for dim in order])
    return tuple(found[order.index(dim)] for dim in range(len(order)))


def _with_reductions(
    values: Sequence[Value],
    tensors: Sequence[TensorSpec],
    found: Sequence[Value],
    reductions: Sequence[Reduce],
    widest: int,
) -> Rows:
    main = max(reductions, key=lambda each: numel(each.operand.shape))
    shape = main.operand.shape
    count = numel(shape[dim] for dim in main.dims)
    row, inner = Var("r", numel(shape) // count), Var("k", count)
    parts = parts_of(main.operand)
    cut = [part for part in parts if part.dim in main.dims]
    index = counted([part for part in parts if part.dim not in main.dims], row)
    index |= counted(cut, inner)
    whole = tuple(index.get(dim, Sum()) for dim in range(len(shape)))
    alone = tuple(Sum() if dim in main.dims else each for dim, each in enumerate(whole))
    outputs = []
    for value, tensor in zip(values, tensors, strict=True):
        if tensor.numel == numel(shape):
            placed = reshaped(whole, shape, tensor.shape)
        elif tensor.numel == row.extent:
            placed = reshaped(alone, main.shape, tensor.shape)
        else:
            raise Refused("an output is neither of the size of a row nor of one number of each")
        if placed is None:
            raise Refused("an output's elements are in rows that are not those of the reduction")
        outputs.append((value, tensor, tuple(placed)))
    level: dict[int, int] = {}
    for value in found:
        below = max((level[id(operand)] for operand in operands_of(value)), default=0)
        level[id(value)] = below + isinstance(value, Reduce)
    passes = tuple(
        tuple(each for each in reductions if level[id(each)] == number + 1)
        for number in range(max(level.values()))
    )
    run, least = run_of(cut), rules().kernel_min_run_bytes
    strided = run < inner.extent and run * widest < least and numel(shape) > SMALL
    beside = strided and widest * run_of([each for each in parts if each not in cut]) >= least
    apart, known = run < inner.extent, rules()
    along = {tensor for tensor in map(_tensor, _reads(found)) if tensor.numel >= inner.extent}
    many = [tensor for tensor in (*tensors, *along) if tensor.numel > row.extent]
    widest = max((tensor.dtype.itemsize for tensor in many), default=widest)
    start = None
    if known.kernel_rows_aligned and not apart and not any(isinstance(x, Join) for x in found):
        start = _place_of_rows(main.operand, whole, inner)
    return Rows(
        *(row, inner, tuple(outputs), passes, widest, strided, beside, apart, start),
        read_bytes=sum(tensor.dtype.itemsize for tensor in along),
        again=any(tensor.numel > row.extent for tensor in tensors) or len(merged(passes)) > 1,
    )


Together = tuple[
    Reduce, ...
]  # of which a loop has one number each: one, or two that belong together


def singly(passes: Sequence[Sequence[Reduce]]) -> list[list[Together]]:
    """The passes with each reduction by itself."""
    return [[(each,) for each in some] for some in passes]


def merged(passes: Sequence[Sequence[Reduce]]) -> list[list[Together]]:
    """The passes over a row that is read again for each: the largest element and the sum of powers
    are found in one."""
    found = singly(passes)
    for at, some in enumerate(passes[1:] if rules().kernel_rows_online else ()):
        for each in some:
            if isinstance(each, Powers) and (each.most,) in found[at]:
                found[at][found[at].index((each.most,))] = each.most, each
                found[at + 1].remove((each,))
    return [some for some in found if some]


def _place_of_rows(value: Value, index: Index, inner: Var) -> Sum | None:
    """Where the elements of the largest tensor lie that a value reads at an index, if those of a
    row lie side by side."""
    most, found = 0, Sum()
    for tensor, at in reads_at([(value, index)]):
        if at is not None and tensor.numel > most:
            most, found = tensor.numel, at
    along = [term for term in found.terms if term[0].var == inner]
    return found if along == list(counter(inner).terms) else None


def reads_at(asked: Iterable[tuple[Value, Index]]) -> Iterator[tuple[TensorSpec, Sum | None]]:
    """The tensors that are read for values at indices, and where; None for anywhere."""
    stack = list(asked)
    seen: set[tuple[int, Index]] = set()
    while stack:
        value, index = stack.pop()
        if (id(value), index) in seen:
            continue
        seen.add((id(value), index))
        if isinstance(value, Read):
            yield value.tensor, place(index, value.tensor.stride)
        elif isinstance(value, Map):
            stack += [(each, broadcast(index, each.shape)) for each in value.operands]
        elif isinstance(value, Join):
            only = part_of(value, index)
            stack += [(each, index) for each in value.operands] if only is None else [only]
        elif isinstance(value, View) and (source := value.source(index)) is not None:
            stack.append((value.operand, source))
        elif not isinstance(value, Number):
            yield from ((tensor, None) for tensor in map(_tensor, _reads(reachable([value]))))


def schedule_for(rows: Rows, processors: int) -> Schedule:
    """The schedule by rule, for a GPU with so many processors."""
    lanes = rows.lanes
    if not rows.reductions:
        while lanes > 1 and rows.inner.extent // lanes < processors * 1024:
            lanes //= 2
        return Schedule(lanes, 256)
    if rows.beside and rows.inner.extent <= MOST_KEPT:
        return Schedule(1, 1, SMALL_BLOCK, rows.inner.extent)
    parts = rows.vectors(lanes)
    team = WARP
    while team > 1 and lanes * -(-parts // (team // 2)) <= max(lanes, rules().kernel_row_elements):
        team //= 2
    # As few threads as hold a row, which then wait least for each other (h200-kernels.md).
    while team < MOST_THREADS and -(-parts // team) * lanes > MOST_KEPT // 2:
        team *= 2
    chunks = -(-parts // team)
    small = max(1, SMALL_BLOCK // team)
    kept = chunks * lanes
    if kept <= MOST_KEPT and 2 * team * kept <= MOST_REGISTERS:
        return Schedule(lanes, team, small, chunks)
    return _long(rows)


def _long(rows: Rows) -> Schedule:
    """The schedule for rows that registers do not hold as numbers in float32."""
    known = rules()
    team = known.kernel_again_threads if rows.again else known.kernel_once_threads
    lanes = rows.lanes if rows.start is None else rows.most_lanes
    chunks = -(-rows.vectors(lanes) // team)
    registers = -(-chunks * lanes * rows.read_bytes // 4)
    fits = known.kernel_rows_in_memory_form and rows.again and not rows.apart
    fits = fits and registers <= MOST_AS_READ
    return Schedule(lanes, team, 1, chunks if fits else 0)


def reads_plainly(rows: Rows) -> bool:
    """Whether what a region reads lies at places that no data and no window decide."""
    values = reachable(value for value, _, _ in rows.outputs)
    return not any(isinstance(value, Pick | Window) for value in values)


def narrower(rows: Rows, schedule: Schedule) -> Schedule:
    """The schedule with half the lanes."""
    chunks = schedule.chunks * 2 if rows.reductions else schedule.chunks
    return Schedule(schedule.lanes // 2, schedule.team, schedule.rows, chunks)


def why_slow(rows: Rows, schedule: Schedule, processors: int) -> str | None:
    """Why a region should not be one kernel of rows, or None."""
    if not rows.reductions:
        return None
    if not schedule.chunks and rows.apart:
        return "rows in pieces, which no registers hold: each pass would gather them again"
    long = not schedule.chunks or rows.inner.extent >= rules().kernel_long_row
    if long and rows.row.extent < processors:
        return "few long rows: one team of threads would read each alone"
    return "rows that lie across memory" if rows.across(schedule) else None


def lies_across(rows: Rows, tensor: TensorSpec, index: Index) -> bool:
    """Whether a large result lies across the rows that are reduced: threads that are neighbours
    would write one element each to places that are far apart."""
    along = [by for digit, by in place(index, tensor.stride).terms if digit.var == rows.inner]
    gap = min(along, default=0) * tensor.dtype.itemsize
    return tensor.numel > SMALL and gap > VECTOR_BYTES


def check_order(rows: Rows) -> None:
    """Raise :class:`Cut` for rows that lie in memory, where a large result across it is what is
    summed: a kernel of the sum alone reads it in order."""
    if rows.strided:
        return
    across = {id(value) for value, to, at in rows.outputs if lies_across(rows, to, at)}
    summed = (each.operand for some in rows.reductions for each in some)
    if across and not across.isdisjoint(map(id, reachable(summed))):
        raise Cut("a result across the rows of a sum, which reads it in order by itself")
