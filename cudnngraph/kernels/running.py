"""Running sums of long rows that lie across memory, with pointwise ops in front and behind.

A thread goes along some rows that are neighbours in memory, and keeps the sum of each so far, and
what its rounding has left: functions of long sums, as exp, make much of that. It reads some steps
ahead, since each store would hold up what is read behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..ir.spec import GraphSpec, TensorSpec, memory_order
from .index import Var, counter, digits
from .rows import WARP, Rows, Schedule, tape_of
from .scalars import MEMORY
from .source import Source
from .stages import reachable
from .tape import (
    Depthwise,
    Index,
    Join,
    Pick,
    Reduce,
    Refused,
    Running,
    Value,
    Window,
    operands_of,
)
from .write import Code, Narrower, Writer

OP = "aten.cumsum.default"
THREADS = (128, 64, 32)  # of a block
RESIDENT = 4  # blocks of a multiprocessor that the threads of one are to leave room for
LANES, AHEAD = (1, 2, 4), (16, 8, 4)  # that are measured, the first by rule
LEAST = 8  # neighbours in memory

#: A sum of floats and what rounding has put into it too much; none of what is not finite.
ADDED = r"""
D void add_to(float& sum, float& excess, float x) {
  const float y = x - excess, total = sum + y;
  excess = (total - sum) - y;
  if (!(excess - excess == 0.0f)) excess = 0.0f;
  sum = total;
}
"""


@dataclass(frozen=True)
class Scan:
    """A schedule: rows side by side of a thread, threads of a block, and steps read ahead."""

    lanes: int
    threads: int
    ahead: int


def has_running(spec: GraphSpec) -> bool:
    """Whether a region has running sums that are no sums of short rows. Raises
    :class:`Refused`."""
    there = (node.op == "aten" and node.attr("overload") == OP for node in spec.nodes)
    return any(there) and bool(_running(tape_of(spec)))


def _running(values: Sequence[Value]) -> list[Running]:
    return [each for each in reachable(values) if isinstance(each, Running)]


def schedules(spec: GraphSpec, processors: int) -> list[Scan]:
    """Schedules that are worth measuring, the one by rule first. Raises :class:`Refused`.

    Few rows are shared out in small blocks, as each multiprocessor is to have some.
    """
    tensors = [spec.tensors[name] for name in spec.outputs]
    counted = list(_countings(tape_of(spec), tensors))
    wide = (each for each in LANES if not any(rows.inner.extent % each for rows in counted))
    most = min(rows.inner.extent for rows in counted) // (RESIDENT * processors)
    threads = next((each for each in THREADS if each <= most), THREADS[-1])
    others = (each for each in THREADS if each != threads)
    return [
        *(Scan(lanes, threads, AHEAD[0]) for lanes in wide),
        *(Scan(1, threads, ahead) for ahead in AHEAD[1:]),
        *(Scan(1, each, AHEAD[0]) for each in others),
    ]


def write(spec: GraphSpec, schedule: Scan) -> Source:
    """The kernel of a region. Raises :class:`Refused`."""
    values = tape_of(spec)
    tensors = [spec.tensors[name] for name in spec.outputs]
    if min(schedule.lanes, schedule.threads, schedule.ahead) < 1 or schedule.threads % WARP:
        raise Refused(f"{schedule.lanes} lanes, {schedule.threads} threads")
    for each in reachable(values):
        if isinstance(each, (Reduce, Window, Depthwise)):
            raise Refused("running sums with reductions or windows")
    refused = Refused("no running sums")
    for rows in _countings(values, tensors):
        if rows.inner.extent % schedule.lanes:
            refused = Refused(f"{schedule.lanes} lanes of {rows.inner.extent} rows")
            continue
        try:
            return _Scanned(spec, schedule, rows).source()
        except Refused as reason:
            refused = reason
        except Narrower:
            refused = Refused("lanes that part")
    raise refused


def _countings(values: Sequence[Value], tensors: Sequence[TensorSpec]) -> Iterator[Rows]:
    """The ways to count the elements of a region, by the dim of its outputs along which sums run.
    Raises :class:`Refused`."""
    first = tensors[0]
    if any(tensor.shape != first.shape or tensor.dtype not in MEMORY for tensor in tensors):
        raise Refused("running sums with outputs of several shapes")
    sums = _running(values)
    if len({each.operand.shape[each.dim] for each in sums}) != 1:
        raise Refused("running sums of several lengths")
    long = sums[0].operand.shape[sums[0].dim]
    order = memory_order(first.shape, first.stride)
    across = False
    for dim, extent in enumerate(first.shape):
        others = [each for each in order if each != dim]
        side = [each for each in others if first.shape[each] > 1][-1:]
        if extent != long or not all(first.stride[each] == 1 for each in side):
            continue
        if not side or first.shape[side[0]] < LEAST:
            continue
        across = True
        row, inner = Var("r", long), Var("k", first.numel // long)
        found = digits(counter(inner), [first.shape[each] for each in others])
        index = dict(zip(others, found, strict=True)) | {dim: counter(row)}
        at = tuple(index[each] for each in range(len(first.shape)))
        outputs = tuple((value, to, at) for value, to in zip(values, tensors, strict=True))
        widest = max(tensor.dtype.itemsize for tensor in tensors)
        yield Rows(row, inner, outputs, (), widest)
    if not across:
        raise Refused("running sums of long rows that lie along memory")


def _place(step: int) -> str:
    """C++ for where a step is."""
    return f"(r + {step}u)" if step else "r"


class _Scanned(Writer):
    """The text of one kernel."""

    def __init__(self, spec: GraphSpec, schedule: Scan, rows: Rows) -> None:
        super().__init__(spec, Schedule(schedule.lanes, schedule.threads), rows, 0)
        self._scan = schedule
        self._running = {id(each): each for each in _running([x for x, *_ in rows.outputs])}
        self._sums: dict[int, str] = {}  # their names
        at: dict[int, set[Index]] = {}
        for id_, index in self._asked():
            if id_ in self._running:
                at.setdefault(id_, set()).add(index)
        for id_, (index, *others) in at.items():
            dim, row = self._running[id_].dim, rows.row
            beside = (*index[:dim], *index[dim + 1 :])
            if others or index[dim] != counter(row) or any(row in each.vars() for each in beside):
                raise Refused("running sums that are not read in their order")

    def _below(self, value: Value, index: Index) -> list[tuple[Value, Index]]:
        if isinstance(value, Running):
            return [(value.operand, index)]
        return super()._below(value, index)

    def source(self) -> Source:
        """Write it."""
        rows, plan, kind = self._rows, self._plan, self._count_type
        ahead = min(self._scan.ahead, rows.row.extent)
        whole = rows.row.extent // ahead * ahead
        for id_, each in self._running.items():
            name = self._sums[id_] = self._new()
            self._declared.append(f"{each.type} {name}[{plan.lanes}] = {{}};")
            if each.type == "float":
                self._declared.append(f"float {name}x[{plan.lanes}] = {{}};")
        loops = [
            f"for ({kind} r = 0u; r < {whole}u; r += {ahead}u) {{",
            *("  " + line for line in self._steps(ahead)),
            "}",
        ]
        if whole < rows.row.extent:
            loops += [
                f"for ({kind} r = {whole}u; r < {rows.row.extent}u; ++r) {{",
                *("  " + line for line in self._steps(1)),
                "}",
            ]
        threads = rows.inner.extent // plan.lanes
        begun = [
            f"const {kind} k = (({kind})blockIdx.x * {plan.team}u + threadIdx.x) * {plan.lanes}u;",
            f"if (k >= {rows.inner.extent}u) return;",
        ]
        blocks = -(-threads // plan.team)
        return self._kernel([*begun, *self._declared, *loops], blocks, plan.team, [ADDED])

    def _steps(self, count: int) -> list[str]:
        """The lines of some steps: what they read, and then each with its sums and results."""
        self._lines = []
        free = list(self._free())
        known: list[dict[tuple[int, Index], Code]] = []
        for step in range(count):
            self._names[self._rows.row] = _place(step)
            once = self._once or ()
            self._known = {key: code for key, code in self._known.items() if code.text in once}
            for value, index in free:
                self._at(value, index)
            known.append(self._known)
        for step in range(count):
            self._names[self._rows.row] = _place(step)
            self._known = known[step]
            self._written()
        return self._lines

    def _free(self) -> Iterator[tuple[Value, Index]]:
        """What is made of no running sums, and read for them or beside them."""
        stack = [(value, index) for value, _, index in self._rows.outputs]
        seen: set[tuple[int, Index]] = set()
        while stack:
            value, index = stack.pop()
            if (id(value), index) in seen:
                continue
            seen.add((id(value), index))
            if not _running([value]):
                yield value, index
                continue
            if isinstance(value, (Join, Pick)):
                raise Refused("running sums among what is joined or picked")
            assert operands_of(value)
            stack += reversed(self._below(value, index))

    def _at(self, value: Value, index: Index) -> Code:
        if not isinstance(value, Running):
            return super()._at(value, index)
        known = self._known.get((id(value), index))
        if known is not None:
            return known
        name, operand = self._sums[id(value)], self._at(value.operand, index)
        if value.type == "float":
            self._each_lane(f"add_to({name}[j], {name}x[j], {operand.text});")
        else:
            self._each_lane(f"{name}[j] += ({value.type}){operand.text};")
        alone = self._plan.lanes == 1
        made = self._declare(value.type, 1 if alone else 2)
        self._assign(made, f"{name}[{0 if alone else 'j'}]")
        self._known[id(value), index] = made
        return made
