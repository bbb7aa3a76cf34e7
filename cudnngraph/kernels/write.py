"""Write a kernel: CUDA C++ for a region of a graph, by a schedule.

One pattern serves all regions. A team of threads has a row, of which each thread has lanes that lie
side by side in memory, in chunks. Where nothing is reduced the whole region is one long row, and
blocks go through it in strides, one chunk or some together. Where something is, what one reduction
needs is computed for all chunks, then reduced over the team, then what the next one needs, and in
the end what is written. A row that fits into registers is read once; of a longer one each pass
reads it again.

Long rows are read some chunks ahead. Threads keep them as memory has them if registers hold that,
and a row that starts anywhere is read as vectors, with its ends by single elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd

import torch

from ..device.rules import rules
from ..ir.spec import GraphSpec, TensorSpec, numel
from .ahead import Chunks
from .gather import KINDS, POWERS_OF_TEAM, shared_by
from .index import Sum, Var, counter, place
from .parts import counted, parts_of
from .rows import (
    VECTOR_BYTES,
    Rows,
    Schedule,
    Together,
    merged,
    singly,
)
from .scalars import MEMORY, REGISTER, TEAM
from .source import NAME, Source, function, pointers, text_of
from .tape import (
    Index,
    Join,
    Map,
    Number,
    Pick,
    Place,
    Read,
    Reduce,
    Refused,
    Value,
    View,
    Window,
    broadcast,
    part_of,
    parts_at,
)
from .window import Steps


class Narrower(Exception):
    """The lanes of a schedule are too many: a border of what is joined lies between them."""


def keeps_none(rows: Rows, schedule: Schedule) -> bool:
    """Whether threads keep no element of a row as a number in float32."""
    many = bool(rows.reductions)
    return many and (not schedule.chunks or rows.in_memory_form(schedule))


@dataclass(frozen=True)
class Code:
    """C++ for a value, and what it differs by: 0 rows, 1 chunks of a row, 2 lanes (``j``)."""

    text: str
    by: int


def _most_index(spec: GraphSpec, rows: Rows) -> int:
    """The number of elements that is counted, or of memory that one tensor reaches over."""
    reach = [spec.tensors[name].extent for name in (*spec.inputs, *spec.outputs)]
    return max(rows.row.extent * rows.inner.extent, *reach)


class _Reduced:
    """The reductions of a pass: what each begins with, its part of the loop, and over the team.

    Of a largest element and the sum of powers each thread keeps both, of what it has seen so far.
    """

    def __init__(self, writer: Writer, reductions: Sequence[Together]) -> None:
        self._writer, self._reductions = writer, reductions
        self._kept = [writer._index_of(each) for each, *_ in reductions]
        self.names = [[writer._new() for _ in each] for each in reductions]
        self.before: list[str] = []
        self.after: list[str] = []
        self.known: dict[tuple[int, Index], Code] = {}
        team = writer._plan.team
        for some, kept, names in zip(reductions, self._kept, self.names, strict=True):
            first, name = some[0], names[0]
            _, combine = KINDS[first.kind]
            for each, mine in zip(some, names, strict=True):
                self.before.append(f"float {mine} = {KINDS[each.kind][0]};")
                self.known[id(each), kept] = Code(mine, 0)
            if len(some) == 1:
                self.after.append(f"{name} = team<{combine}, {team}>({name});")
            else:
                self.after += POWERS_OF_TEAM.format(most=name, sum=names[1], team=team).splitlines()

    def gather(self) -> None:
        """The lines of the loop."""
        writer = self._writer
        for some, kept, names in zip(self._reductions, self._kept, self.names, strict=True):
            first, name = some[0], names[0]
            value = writer._at(first.operand, writer._inside(first, kept)).text
            _, combine = KINDS[first.kind]
            if len(some) == 1:
                writer._each_lane(f"{name} = {combine}::of({name}, {value});")
                continue
            most, total, level = writer._new(), names[1], writer._new()
            writer._lines.append(f"float {most} = {name};")
            writer._each_lane(f"{most} = Larger::of({most}, {value});")
            writer._lines += [
                f"const float {level} = powers_from({most});",
                f"{total} *= power({name} - {level});",
            ]
            writer._each_lane(f"{total} += power_below({value} - {level});")
            writer._lines.append(f"{name} = {most};")


class Writer:
    """The text of one kernel, as far as it is written."""

    def __init__(self, spec: GraphSpec, schedule: Schedule, rows: Rows, most_blocks: int) -> None:
        self._spec = spec
        self._plan = schedule
        self._rows = rows
        self._names = {rows.row: "r", rows.inner: "k"}
        self._places = {name: at for at, name in enumerate((*spec.inputs, *spec.outputs))}
        self._known: dict[tuple[int, Index], Code] = {}
        self._declared: list[str] = []  # for the whole row
        self._once: set[str] | None = set()  # what is computed before all rows; None for nothing
        self._lines: list[str] = []
        self._count = 0
        self._rows_of: dict[int, dict[int, Sum]] = {}  # how reductions go through their rows
        self._kept: dict[int, set[Index]] | None = None  # where reductions are asked for
        self._picks: dict[tuple[int, Index], Var] = {}  # places that are computed
        self._many = bool(rows.reductions)
        self._streams = keeps_none(rows, schedule)
        self._together = schedule.chunks if not self._many else 1  # chunks read at a time
        self._resident = not self._streams
        self._ends = self._streams and rows.has_ends(schedule.lanes)
        self._chunks = -(-rows.vectors(schedule.lanes) // schedule.team)
        self._ahead: list[tuple[str, list[str]]] = []  # what a loop reads: type and name, lines
        self._begun_at: dict[tuple[str, Sum], str] = {}  # the names of that, by where it is
        self._kept_vectors: list[str] = []  # the names of what is read once for several loops
        self._of_row: list[str] | None = None  # what is computed once before a loop, if that may be
        self._most_blocks = most_blocks
        self._count_type = "u64" if _most_index(spec, rows) >= 2**31 else "u32"

    # -- the whole ----------------------------------------------------------------------------

    def source(self) -> Source:
        """Write it."""
        return self.source_of(*self.lines())

    def source_of(self, lines: list[str], blocks: int) -> Source:
        """The kernel of lines that it has written."""
        shared = [TEAM, *shared_by("\n".join(lines))] if self._many else []
        return self._kernel(lines, blocks, self._plan.threads, shared)

    def _kernel(
        self, lines: Iterable[str], blocks: int, threads: int, shared: Iterable[str] = ()
    ) -> Source:
        """A kernel of one function, of the lines behind its pointers."""
        tensors = [self._spec.tensors[name] for name in self._places]
        typed = pointers(tensors, len(self._spec.inputs))
        text = text_of(len(tensors), [function(NAME, threads, [*typed, *lines])], shared)
        return Source(text, blocks, threads)

    def lines(self) -> tuple[list[str], int]:
        """The lines of the function behind its pointers, and the number of blocks."""
        plan, rows = self._plan, self._rows
        body = self._body()
        head: list[str] = []
        if self._many:
            kind = self._count_type
            blocks = -(-rows.row.extent // plan.rows)
            head += [
                f"const u32 t = threadIdx.x % {plan.team}u;",
                f"{kind} r = ({kind})blockIdx.x * {plan.rows}u + threadIdx.x / {plan.team}u;",
            ]
            head += self._mine()
            if self._ends and rows.start is not None:
                terms = {digit: by for digit, by in rows.start.terms if digit.var != rows.inner}
                start = self._code(Sum.of(terms, rows.start.number))
                head += self._row_chunks.where_ends(start)
        else:
            blocks = -(-self._chunks // self._together)
            if self._most_blocks:
                blocks = min(blocks, self._most_blocks)
        return [*head, *self._declared, *body], blocks

    def _mine(self) -> list[str]:
        """Lines that have threads without a row go with the last one, and write nothing."""
        extent = self._rows.row.extent
        if extent % self._plan.rows == 0:
            return []
        return [f"const bool mine = r < {extent}u;", f"if (!mine) r = {extent - 1}u;"]

    def _body(self) -> list[str]:
        """The passes over a row."""
        rows = self._rows
        body: list[str] = []
        passes = merged(rows.reductions) if self._streams else singly(rows.reductions)
        for number, reductions in enumerate(passes):
            made = _Reduced(self, reductions)
            body += self._pass(made.gather, number, made.before, made.after)
            self._known |= made.known
        return body + self._pass(self._written, len(passes))

    def _pass(
        self,
        fill: Callable[[], None],
        number: int,
        before: Sequence[str] = (),
        after: Sequence[str] = (),
    ) -> list[str]:
        """A loop over the chunks of a row, and what precedes and follows it."""
        self._lines = []
        if self._streams:
            return [*before, *self._streamed(fill, backwards=number % 2 == 1), *after]
        if self._together > 1:
            return self._read_together(fill)
        fill()
        step, kind = self._plan.team * self._plan.lanes, self._count_type
        if not self._many:
            first = f"(({kind})blockIdx.x * {self._plan.team}u + threadIdx.x) * {self._plan.lanes}u"
            until = f"k < {self._rows.inner.extent}u; k += ({kind})gridDim.x * {step}u"
            loop = f"for ({kind} k = {first}; {until}) {{"
            inside = self._lines
        else:
            loop = f"for (u32 c = 0; c < {self._chunks}u; ++c) {{"
            first = f"({kind})(c * {self._plan.team}u + t) * {self._plan.lanes}u"
            inside = [f"const {kind} k = {first};"]
            if self._rows.inner.extent % step:
                inside += [f"if (k < {self._rows.inner.extent}u) {{", *self._lines, "}"]
            else:
                inside += self._lines
        unroll = ["#pragma unroll"] if self._many else []
        return [*before, *unroll, loop, *("  " + line for line in inside), "}", *after]

    def _read_together(self, fill: Callable[[], None]) -> list[str]:
        """A loop over groups of chunks, of which all is read before anything is written."""
        row: list[str] = []
        self._of_row = row
        fill()
        self._of_row = None
        return [*row, *self._row_chunks.by_blocks(self._together, self._ahead, self._lines)]

    def _streamed(self, fill: Callable[[], None], *, backwards: bool) -> list[str]:
        """A loop that reads some chunks ahead; one that goes through a row ``backwards`` finds in
        the cache what another one has read last.

        Of a row that threads keep all chunks are read once, by the first loop that asks for them.
        """
        self._known = {key: code for key, code in self._known.items() if not code.by}
        keeps = self._plan.chunks > 0
        self._ahead, self._of_row = [], []
        if not keeps:
            self._begun_at = {}
        fill()
        made, reads, row = self._lines, self._ahead, self._of_row
        if not made:
            self._of_row = None
            return row
        ahead = self._chunks
        if not keeps:
            most = max(1, rules().kernel_loads_ahead // 2 // max(1, len(reads)))
            ahead = -(-ahead // -(-ahead // most))
        declared = [f"{kind}[{ahead}];" for kind, _ in reads]
        begin = [line for _, lines in reads for line in lines]
        chunks = self._row_chunks
        if keeps:
            self._declared += declared
            still = [f"still_as_read({name}[u]);" for name in self._kept_vectors]
            self._kept_vectors += [kind.split()[-1] for kind, _ in reads if kind.startswith("vec")]
            body = chunks.once(begin, still, made)
        else:
            body = [*declared, *chunks.in_groups(ahead, begin, made, backwards=backwards)]
        ends = self._at_ends(fill) if self._ends else []
        self._of_row = None
        return [*row, *body, *ends]

    @property
    def _row_chunks(self) -> Chunks:
        plan, extent = self._plan, self._rows.inner.extent
        return Chunks(extent, plan.team, plan.lanes, self._chunks, self._count_type, self._ends)

    def _at_ends(self, fill: Callable[[], None]) -> list[str]:
        """The same for the elements of a row before and behind its vectors, one for a thread."""
        plan, known, row = self._plan, self._known, self._of_row
        self._known = {key: code for key, code in known.items() if not code.by}
        self._plan, self._ends, self._lines, self._of_row = replace(plan, lanes=1), False, [], None
        fill()
        self._plan, self._ends, self._known, self._of_row = plan, True, known, row
        return self._row_chunks.at_ends(self._lines)

    def _index_of(self, each: Reduce) -> Index:
        """The index at which the region asks for a reduction: one number of each row."""
        if self._kept is None:
            self._kept = {}
            for id_, index in self._asked():
                self._kept.setdefault(id_, set()).add(index)
        asked = self._kept.get(id(each), set())
        if len(asked) != 1:
            raise Refused("a reduction is asked for at several places")
        (index,) = asked
        if any(part.vars() - {self._rows.row} for part in index):
            raise Refused("a reduction's result is read along a row")
        if not all(part.within(extent) for part, extent in zip(index, each.shape, strict=True)):
            raise Refused("a reduction's result is read in other rows, not all of which there are")
        return index

    def _asked(self) -> set[tuple[int, Index]]:
        """All values with the indices at which they are asked for, reductions included."""
        return self._asked_for((value, index) for value, _, index in self._rows.outputs)

    def _asked_for(self, asked: Iterable[tuple[Value, Index]]) -> set[tuple[int, Index]]:
        """The same of what is asked for at indices."""
        found: set[tuple[int, Index]] = set()
        stack = list(asked)
        while stack:
            value, index = stack.pop()
            if (id(value), index) in found:
                continue
            found.add((id(value), index))
            stack += self._below(value, index)
        return found

    def _below(self, value: Value, index: Index) -> list[tuple[Value, Index]]:
        if isinstance(value, Map):
            return [(each, broadcast(index, each.shape)) for each in value.operands]
        if isinstance(value, View):
            return [(value.operand, self._source(value, index))]
        if isinstance(value, Reduce):
            return [(value.operand, self._inside(value, index))]
        if isinstance(value, Join):
            only = part_of(value, index)
            return parts_at(value, index) if only is None else [only]
        if isinstance(value, Pick):
            x, at = value.operands
            return [(x, self._picked_of(value, index)), (at, broadcast(index, at.shape))]
        if isinstance(value, Window):
            raise Refused("places that windows compute")
        return []

    def _picked_of(self, value: Pick, index: Index) -> Index:
        """The index of the element that is picked, of which one place is computed."""
        x, _ = value.operands
        names = self._picks
        var = names.setdefault((id(value), index), Var(f"at{len(names)}", x.shape[value.dim]))
        return broadcast((*index[: value.dim], counter(var), *index[value.dim + 1 :]), x.shape)

    def _inside(self, each: Reduce, kept: Index) -> Index:
        """The index of what a reduction reads: its row, and along it."""
        inner = self._rows_of.get(id(each))
        if inner is None:
            extents = [each.operand.shape[dim] for dim in each.dims]
            if numel(extents) != self._rows.inner.extent:
                raise Refused("reductions over rows of several lengths")
            parts = [part for part in parts_of(each.operand) if part.dim in each.dims]
            inner = self._rows_of[id(each)] = counted(parts, self._rows.inner)
        return tuple(
            inner.get(dim, Sum()) if dim in each.dims else index for dim, index in enumerate(kept)
        )

    def _source(self, view: View, index: Index) -> Index:
        found = view.source(index)
        if found is None:
            raise Refused("a view of a view that no plain index says")
        return found

    def _written(self) -> None:
        """What is written in the last pass, behind all that is read for it: an output may lie over
        an input of which another one is made."""
        codes = [self._at(value, index) for value, _, index in self._rows.outputs]
        for code, (_, tensor, index) in zip(codes, self._rows.outputs, strict=True):
            at = place(index, tensor.stride)
            self._store(tensor, f"p{self._places[tensor.name]}", at, code.text)

    # -- values -------------------------------------------------------------------------------

    def _new(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def name(self, var: Var, code: str) -> None:
        """Call a variable by C++ for a number of 32 bits, which is widened where addresses are."""
        self._names[var] = f"(u64){code}" if self._count_type == "u64" else code

    def _declare(self, type: str, by: int) -> Code:
        """A new variable for a value; for all chunks where they are kept."""
        name, lanes = self._new(), f"[{self._plan.lanes}]" if by == 2 else ""
        kept = self._many and (self._resident or not by)  # what is one number serves all passes
        many = f"[{self._chunks}]" if kept and by else ""
        whole = kept or (self._many and not by)  # what is known of a row stays known
        (self._declared if whole else self._lines).append(f"{type} {name}{many}{lanes};")
        return Code(name + ("[c]" if many else "") + ("[j]" if lanes else ""), by)

    def _before_all(self, type: str, code: str) -> Code:
        """A number that is the same for all elements: the loop over them need not compute it."""
        name = self._new()
        self._declared.append(f"const {type} {name} = {code};")
        assert self._once is not None
        self._once.add(name)
        return Code(name, 0)

    def _each_lane(self, line: str) -> None:
        if self._plan.lanes == 1:
            self._lines.append(line.replace("[j]", "[0]").replace("(k + j)", "k"))
            return
        self._lines += ["#pragma unroll", f"for (int j = 0; j < {self._plan.lanes}; ++j) {line}"]

    def _differs(self, at: Sum) -> int:
        """What a number differs by: see :class:`Code`."""
        inner = self._rows.inner
        if self._slope(at) != 0:
            return 2
        return int(inner in at.vars())

    def _slope(self, at: Sum) -> int | None:
        """What a number grows by from lane to lane, None if it does not grow evenly."""
        inner = self._rows.inner
        if not self._ends:
            return at.slope(inner, self._plan.lanes)
        (whole,) = counter(inner).terms
        of_row = [term for term in at.terms if term[0].var == inner]
        if any(digit != whole[0] for digit, _ in of_row):
            return None
        return sum(by for _, by in of_row)

    def _at(self, value: Value, index: Index) -> Code:
        """C++ for the element of a value at an index."""
        if self._of_row is not None and not any(self._rows.inner in at.vars() for at in index):
            lines, self._lines, row = self._lines, self._of_row, self._of_row
            self._of_row = None
            made = self._at(value, index)
            self._lines, self._of_row = lines, row
            return made
        known = self._known.get((id(value), index))
        if known is not None:
            return known
        if isinstance(value, Number):
            return Code(value.code, 0)
        if isinstance(value, View):
            return self._at(value.operand, self._source(value, index))
        if isinstance(value, Join) and (only := part_of(value, index)) is not None:
            return self._at(*only)
        if isinstance(value, Read):
            made = self._read(value, index)
        elif isinstance(value, Join):
            made = self._joined(value, index)
        elif isinstance(value, Pick):
            made = self._picked(value, index)
        elif isinstance(value, Place):
            made = self._placed(value, index)
        elif isinstance(value, Window):
            made = self._windowed(value, index)
        elif isinstance(value, Map):
            args = [self._at(each, broadcast(index, each.shape)) for each in value.operands]
            codes = [each.text for each in args]
            given = zip(value.operands, codes, strict=True)
            if self._once and all(isinstance(of, Number) or c in self._once for of, c in given):
                made = self._before_all(value.type, value.code(codes))
            else:
                made = self._declare(value.type, max((each.by for each in args), default=0))
                self._assign(made, value.code(codes))
        else:
            raise Refused("a reduction of what another one of its pass gives")
        self._known[id(value), index] = made
        return made

    def _assign(self, made: Code, code: str) -> None:
        line = f"{made.text} = {code};"
        if made.by == 2:
            self._each_lane(line)
        else:
            self._lines.append(line)

    def _read(self, value: Read, index: Index) -> Code:
        tensor = value.tensor
        pointer, at = f"p{self._places[tensor.name]}", place(index, tensor.stride)
        if self._once is not None and not self._many and not at.vars():
            return self._before_all(value.type, f"get({pointer}[{self._code(at)}])")
        if self._of_row is not None and self._rows.inner in at.vars():
            return self._read_ahead(value, at)
        made = self._declare(value.type, self._differs(at))
        wide = self._vector(tensor.dtype, at)
        if made.by < 2:
            self._assign(made, f"get({pointer}[{self._code(at)}])")
        elif wide == 1:
            self._assign(made, f"get({pointer}[{self._by_lane(at)}])")
        else:
            for start in range(0, self._plan.lanes, wide):
                vector = self._new()
                where = (at + start).code(self._names)
                self._lines += [
                    f"const auto {vector} = load<{wide}>({pointer} + ({where}));",
                    "#pragma unroll",
                    f"for (int j = {start}; j < {start + wide}; ++j) "
                    f"{made.text} = lane({vector}, j - {start});",
                ]
        return made

    def _read_ahead(self, value: Read, at: Sum) -> Code:
        """An element that the loop has read some steps before."""
        tensor, lanes = value.tensor, self._plan.lanes
        kind, pointer = MEMORY[tensor.dtype], f"p{self._places[tensor.name]}"
        made, wide = self._declare(value.type, self._differs(at)), self._vector(tensor.dtype, at)
        known = self._begun_at.get((tensor.name, at))
        name = self._begun_at[tensor.name, at] = known or self._new()
        ahead: list[tuple[str, list[str]]] = []
        if made.by < 2:
            line = f"{name}[u] = {pointer}[{self._code(at)}];"
            ahead.append((f"{kind} {name}", [line]))
            self._assign(made, f"get({name}[u])")
        elif wide == 1:
            lane = f"{name}[u].at[j] = {pointer}[{self._by_lane(at)}];"
            line = f"for (int j = 0; j < {lanes}; ++j) {lane}"
            ahead.append((f"vec<{kind}, {lanes}> {name}", ["#pragma unroll", line]))
            self._each_lane(f"{made.text} = get({name}[u].at[j]);")
        for start in range(0, lanes, wide) if made.by == 2 and wide > 1 else ():
            vector = f"{name}_{start}"
            where = (at + start).code(self._names)
            line = f"{vector}[u] = load<{wide}>({pointer} + ({where}));"
            ahead.append((f"vec<{kind}, {wide}> {vector}", [line]))
            self._lines += [
                "#pragma unroll",
                f"for (int j = {start}; j < {start + wide}; ++j) "
                f"{made.text} = lane({vector}[u], j - {start});",
            ]
        self._ahead += [] if known else ahead
        return made

    def _vector(self, dtype: torch.dtype, at: Sum) -> int:
        """How many elements of memory lie side by side, and may be read or written as one."""
        inner, lanes = self._rows.inner, self._plan.lanes
        if self._slope(at) != 1:
            return 1
        wide = gcd(at.multiple(inner, lanes), lanes)
        if self._ends:
            assert self._rows.start is not None
            wide = gcd((at + self._rows.start * -1).multiple(inner, 1), lanes)
        return min(wide, VECTOR_BYTES // dtype.itemsize)

    def _code(self, at: Sum) -> str:
        return at.code(self._names)

    def _by_lane(self, at: Sum) -> str:
        return at.code({**self._names, self._rows.inner: "(k + j)"})

    def _joined(self, value: Join, index: Index) -> Code:
        inner, lanes = self._rows.inner, self._plan.lanes
        if self._ends:
            raise Refused("what is joined along rows with ends")
        along = index[value.dim]
        slope = self._slope(along)
        borders, border = [], 0
        for operand in value.operands[:-1]:
            border += operand.shape[value.dim]
            borders.append(border)
        if slope not in (0, 1):
            raise Narrower
        if slope == 1 and gcd(along.multiple(inner, lanes), *borders, lanes) != lanes:
            raise Narrower
        made = self._declare(value.type, max(map(self._differs, index)))
        for number_, (operand, part) in enumerate(parts_at(value, index)):
            last = number_ == len(borders)
            test = "" if last else f"if ({self._code(along)} < {borders[number_]}u) "
            self._lines.append(f"{'else ' if number_ else ''}{test}{{")
            first = borders[number_ - 1] if number_ else 0
            with self._inner(along, first, None if last else borders[number_]):
                self._assign(made, self._at(operand, part).text)
            self._lines.append("}")
        return made

    def _picked(self, value: Pick, index: Index) -> Code:
        """An element at a place that is computed; one outside is the first."""
        x, place = value.operands
        at = self._at(place, broadcast(index, place.shape))
        if at.by == 2 and self._plan.lanes > 1:
            raise Narrower
        there = self._picked_of(value, index)
        var = self._picks[id(value), index]
        name = f"at{self._new()}"  # the same place may be asked for again
        self.name(var, name)
        text = at.text.replace("[j]", "[0]")
        self._lines.append(f"const u32 {name} = (u64){text} < {var.extent}ull ? (u32){text} : 0u;")
        known = dict(self._known)
        found = self._at(x, there)
        self._known = known
        made = self._declare(value.type, max(at.by, found.by))
        self._assign(made, found.text)
        return made

    def _placed(self, value: Place, index: Index) -> Code:
        """The index itself."""
        at = index[value.dim]
        made = self._declare(value.type, self._differs(at))
        text = self._code(at)
        if made.by == 2:
            text = f"{text} + j" if self._slope(at) == 1 else self._by_lane(at)
        self._assign(made, f"({value.type})({text})")
        return made

    def _windowed(self, value: Window, index: Index) -> Code:
        """What a rule writes itself. Its places are the same for all lanes, or there is one."""
        if self._plan.lanes > 1 and any(self._differs(each) == 2 for each in index[2:]):
            raise Narrower
        by = max(map(self._differs, index))
        known = dict(self._known)
        made = Code(value.write(Steps(self, value, index, by)), by)
        self._known = known
        return made

    @contextmanager
    def _inner(self, along: Sum, first: int, until: int | None) -> Iterator[None]:
        """Within a branch, where ``along`` is in a range: what is computed there is not known
        behind it."""
        known, once, row = dict(self._known), self._once, self._of_row
        self._once = self._of_row = None  # what lies outside of its range is not read
        yield
        self._known, self._once, self._of_row = known, once, row

    def _store(self, tensor: TensorSpec, pointer: str, at: Sum, code: str) -> None:
        kind = MEMORY[tensor.dtype]
        convert = f"put({{}}, ({REGISTER[tensor.dtype]}){code});"
        tests = ["mine"] if self._many and self._rows.row.extent % self._plan.rows else []
        if self._streams and self._rows.inner not in at.vars():
            if self._of_row is not None:  # once a row, before the loop
                guard = " && ".join([*tests, "t == 0"])
                where = f"{pointer}[{self._code(at)}]"
                self._of_row.append(f"if ({guard}) {convert.format(where)}")
            return
        if self._many and self._rows.inner not in at.vars():
            tests.append("k == 0")  # one thread of the team
        guard = f"if ({' && '.join(tests)}) " if tests else ""
        if self._differs(at) < 2:
            self._lines.append(guard + convert.format(f"{pointer}[{self._code(at)}]"))
            return
        wide = self._vector(tensor.dtype, at)
        if wide == 1:
            self._each_lane(guard + convert.format(f"{pointer}[{self._by_lane(at)}]"))
            return
        for start in range(0, self._plan.lanes, wide):
            vector = self._new()
            self._lines += [
                f"vec<{kind}, {wide}> {vector};",
                "#pragma unroll",
                f"for (int j = {start}; j < {start + wide}; ++j) "
                + convert.format(f"{vector}.at[j - {start}]"),
                f"{guard}store<{wide}>({pointer} + ({(at + start).code(self._names)}), {vector});",
            ]
