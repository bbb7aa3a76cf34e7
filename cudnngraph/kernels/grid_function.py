"""Functions of a grid: blocks share out long reductions, or what is computed behind them.

What the loop does not change is computed before it, and what it reads is read some steps ahead.
Partial results of another function are put together by each block that needs them, in the same
order in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from ..device.rules import rules
from ..ir.spec import GraphSpec, TensorSpec, numel
from .ahead import each_step, most_ahead, registers_kept, steps_in_groups
from .gather import KINDS, Gather, team, whole
from .grid import Grid, Space, parts_in
from .index import Sum, Var, place, reshaped
from .rows import WARP, Rows, Schedule
from .tape import Index, Join, Pick, Read, Refused, Value
from .write import Code, Writer

UNROLLED = 8  # reads of partial results that are under way at once


@dataclass(frozen=True)
class Parts:
    """Partial results of chunks, in tensors of the workspace along a last dim, and what is computed
    of them: values that are held for later functions, and outputs."""

    space: Space
    grid: Grid
    gathers: tuple[Gather, ...]
    tensors: tuple[tuple[TensorSpec, ...], ...]
    held: tuple[tuple[Value, TensorSpec], ...]
    outputs: tuple[tuple[Value, TensorSpec], ...]


Function = tuple[list[str], int, int]  # lines, blocks, threads


@dataclass
class Apart:
    """Partial results, the function that puts them together, the launch that gathers them, and
    whether what is held and what goes to outputs is in memory."""

    parts: Parts
    function: Function
    launch: int  # the number of that which gathers them and does nothing else
    held: bool = False
    told: bool = False

    @property
    def names(self) -> set[str]:
        """What is held."""
        return {to.name for _, to in self.parts.held}


class GridFunction(Writer):
    """The lines of a function over a space, for a grid.

    What is held of ``parts`` is not read from memory: each block puts together what it needs.
    """

    def __init__(
        self,
        spec: GraphSpec,
        space: Space,
        grid: Grid,
        outputs: Sequence[tuple[Value, TensorSpec, Index]],
        parts: Sequence[Parts] = (),
    ) -> None:
        rows = Rows(space.row, space.inner, tuple(outputs), (), 4)
        super().__init__(spec, Schedule(space.lanes, grid.threads), rows, 0)
        self._once = None
        self._space, self._grid, self._parts_of = space, grid, parts
        self._loop = space.row if space.across else space.inner
        self._before: list[str] = []
        self._early: list[str] = []  # reads of that, which wait for nothing
        self._branch = False
        self._moves = True  # what the loop does not change goes before it
        self._counts: dict[Gather, str] = {}  # how many elements each lane of a thread has gathered
        self._found: dict[int, str] = {}  # C++ for what was reduced, behind the loop
        self._shared: dict[str, str] = {}  # the arrays of what is held, by the tensor's name

    def applied(self) -> list[str]:
        """The function that writes outputs of the space. It goes through a chunk from behind: what
        another one has read last is still in the cache."""
        together = self._put_together()
        self._written()
        return self._loops(together, backwards=True)

    def clustered(self) -> list[str]:
        """The function of a cluster of blocks, one for each chunk: it gathers what its parts are
        of, keeps what it has read, and writes the outputs when the cluster has met. Raises Refused.
        """
        (parts,) = self._parts_of
        names = [self._gathered(each) for each in parts.gathers]
        gather, before, self._lines, self._before = self._lines, self._before, [], []
        reduce = self._down_columns if self._space.across else self._along_row
        reduced = reduce(parts.gathers, names, parts.tensors)
        together = self._put_together()
        self._known = {
            (value, index): code
            for (value, index), code in self._known.items()
            if not any(self._loop in part.vars() for part in index)
        }
        self._written()
        head, step, where = self._places_of(False)
        steps = -(-self._grid.per // step)
        if steps * len(self._ahead) > rules().kernel_loads_ahead:
            raise Refused("more than the registers of a cluster hold")
        read, loads = self._begun(steps, step, where)
        return [
            *(*head, *read, *loads, *self._early, *before),
            *each_step(steps, step, where, gather),
            *(*reduced, "meet_cluster();", *together, *self._before),
            *each_step(steps, step, where, self._lines),
        ]

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
        together = self._put_together()
        names = [self._gathered(each) for each in gathers]
        self._write(beside)
        body = self._loops(together)
        if self._space.across:
            return body + self._down_columns(gathers, names, partial)
        return body + self._along_row(gathers, names, partial)

    # -- the loop -----------------------------------------------------------------------------

    def _loops(self, together: Sequence[str], backwards: bool = False) -> list[str]:
        """Where a thread is, what it computes once, and its loop, which reads some steps ahead."""
        head, step, where = self._places_of(backwards)
        steps = -(-self._grid.per // step)
        most = max(1, rules().kernel_loads_ahead // max(1, len(self._ahead)))
        if steps > most:  # registers for more threads
            kept = registers_kept(self._plan.lanes, self._lines, self._early + self._before)
            reads, writes = [each for each, _ in self._ahead], "store<" in " ".join(self._lines)
            fit = most_ahead(self._grid.threads, self._plan.lanes, kept, reads, writes)
            most = min(-(-most // 2), fit)
        ahead = -(-steps // -(-steps // most))
        read, loads = self._begun(ahead, step, where)
        body = each_step(ahead, step, where, self._lines)
        once = [*head, *read, *loads, *self._early, *together, *self._before]
        if ahead == steps:
            return [*once, *body]
        begin = [line for _, lines in self._ahead for line in lines]
        return [*once, *steps_in_groups(ahead, step, where, self._lines, begin)]

    def _begun(self, ahead: int, step: int, where: str) -> tuple[list[str], list[str]]:
        """The variables of what is read ahead, and its reads."""
        lines = [line for _, lines in self._ahead for line in lines]
        read = [f"{kind}[{ahead}];" for kind, _ in self._ahead]
        return read, each_step(ahead, step, where, lines)

    def _places_of(self, backwards: bool) -> tuple[list[str], int, str]:
        """Where a thread begins, its step, and where it is at ``at``."""
        space, grid, lanes = self._space, self._grid, self._plan.lanes
        head = [
            f"const u32 chunk = blockIdx.x % {grid.chunks}u, number = blockIdx.x / {grid.chunks}u;",
            f"const u32 begin = chunk * {grid.per}u;",
        ]
        at = "begin + count - 1 - at" if backwards else "begin + at"
        if space.across:
            idle = f" || y >= {grid.deep}u" if grid.threads > grid.wide * grid.deep else ""
            head += [
                f"const u32 x = threadIdx.x % {grid.wide}u, y = threadIdx.x / {grid.wide}u;",
                f"const u32 base = number * {grid.wide * lanes}u;",
                f"u32 k = base + x * {lanes}u, first = y;",
                f"const u32 size = lesser({grid.per}u, {space.row.extent}u - begin);",
                "u32 count = size;",
                f"if (k >= {space.inner.extent}u{idle}) k = base, count = 0;",
            ]
            step, where = grid.deep, f"const u32 r = {at};"
        else:
            vectors = space.inner.extent // lanes
            head += [
                "const u32 r = number;",
                "u32 first = threadIdx.x;",
                f"const u32 count = lesser({grid.per}u, {vectors}u - begin);",
            ]
            step, where = grid.wide, f"const u32 k = ({at}) * {lanes}u;"
        return head, step, where

    def _read(self, value: Read, index: Index) -> Code:
        """What the loop reads is read ahead; what is held of parts is in shared memory."""
        tensor = value.tensor
        at = place(index, tensor.stride)
        if tensor.name in self._shared:
            return self._of_shared(value, at)
        if not self._moves or self._loop not in at.vars():
            return self._read_once(value, index, at)
        return self._read_ahead(value, at)

    def _read_once(self, value: Read, index: Index, at: Sum) -> Code:
        lines, known = self._lines, at.vars() <= {self._space.row, self._space.inner}
        if lines is self._before and known and not self._branch:
            self._lines = self._early
        made = super()._read(value, index)
        self._lines = lines
        return made

    def _of_shared(self, value: Read, at: Sum) -> Code:
        if at != self._space.result:
            raise Refused("a result is asked for elsewhere than its block puts it together")
        made = self._declare(value.type, self._differs(at))
        where = "0"
        if self._space.across:
            column = "(k + j)" if made.by == 2 else self._names[self._space.inner]
            where = f"({column} - base) / {self._space.run}u"
        self._assign(made, f"{self._shared[value.tensor.name]}[{where}]")
        return made

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
        before = self._moves, self._branch
        self._moves, self._branch = False, True
        made = super()._joined(value, index)
        self._moves, self._branch = before
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
        for name in names:
            self._before.append(f"float {name}[{lanes}];")
            self._before.append(f"for (int j = 0; j < {lanes}; ++j) {name}[j] = {start};")
        if gather.peaks:
            most, total = names
            self._before.append(f"for (int j = 0; j < {lanes}; ++j) {most}[j] = {KINDS['max'][0]};")
            both = f"Peak both({most}[j], {total}[j]); both.add({code});"
            self._each_lane(f"{{ {both} {most}[j] = both.most; {total}[j] = both.sum; }}")
            return [f"{most}[j]", f"{total}[j]"]
        if not gather.moments:
            (name,) = names
            self._each_lane(f"{name}[j] = {gather.kind[2]}::of({name}[j], {code});")
            return [f"{name}[j]"]
        mean, squares = names
        share, apart, count = self._new(), self._new(), self._new()
        self._counts[gather] = count
        self._before.append(f"float {count} = 0.0f;")
        self._lines += [f"{count} += 1.0f;", f"const float {share} = one_over({count});"]
        self._each_lane(
            f"{{ const float {apart} = {code} - {mean}[j]; {mean}[j] += {apart} * {share}; "
            f"{squares}[j] += {apart} * ({code} - {mean}[j]); }}"
        )
        return [f"{mean}[j]", f"{squares}[j]"]

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
            each = whole(gather, self._counts.get(gather, ""), parts)
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
        """Reduce over the threads and columns of each result."""
        grid, lanes, run = self._grid, self._plan.lanes, self._space.run
        columns, wide = grid.wide * lanes, gcd(lanes, 4)  # vectors of shared memory
        size = columns * grid.deep // wide
        body = [f"__shared__ vec<float, {wide}> s{at}[{size}];" for at in range(parts_in(gathers))]
        first, over, results = [], [], []
        at = 0
        for gather, parts in zip(gathers, names, strict=True):
            buffers = [f"s{at + part}" for part in range(gather.parts)]
            at += gather.parts
            first += [
                f"{buffer}[(y * {grid.wide}u + x) * {lanes // wide}u + j / {wide}u]"
                f".at[j % {wide}u] = {part};"
                for buffer, part in zip(buffers, parts, strict=True)
            ]
            made = self._new()
            place = f"(e / {run}u * {columns}u + i * {run}u + e % {run}u)"
            count = f"(float)((size + {grid.deep - 1}u - e / {run}u) / {grid.deep}u)"
            each = [f"{buffer}[{place} / {wide}u].at[{place} % {wide}u]" for buffer in buffers]
            over += self._over_team(gather, made, run * grid.deep, count, each)
            results.append(made)
        names_of = {**self._names, self._space.inner: "column"}
        lines = self._finish(gathers, results, partial, names_of)
        idle = f"if (y < {grid.deep}u) " if grid.threads > grid.wide * grid.deep else ""
        return [
            *body,
            "#pragma unroll",
            f"for (u32 j = 0; j < {lanes}u; ++j) {idle}{{ {' '.join(first)} }}",
            "__syncthreads();",
            *self._each_result(run * grid.deep, over, lines),
        ]

    def _team(self, count: int) -> int:
        """The threads that reduce what is of one result, so many numbers."""
        share, results = 1, self._grid.results(self._space)
        while share < min(WARP, count) and 2 * share * results <= self._grid.threads:
            share *= 2
        return share

    def _over_team(
        self, gather: Gather, made: str, count: int, size: str, parts: Sequence[str]
    ) -> list[str]:
        """The reduction of numbers ``e`` of one result, each of ``size`` elements, by a team that
        reads some of them before it takes them together."""
        kind, start, combine = gather.kind
        share = self._team(count)
        steps = -(-count // share)
        some = -(-steps // -(-steps // UNROLLED))
        names = [f"{made}_{at}" for at in range(len(parts))]
        at, element = f"q + (from + n) * {share}u", whole(gather, size, [f"{x}[n]" for x in names])
        reads = [f"{name}[n] = {part};" for name, part in zip(names, parts, strict=True)]
        each = ["#pragma unroll", f"for (u32 n = 0; n < {some}u; ++n) {{"]
        return [
            f"{kind} {made} = {start};",
            f"for (u32 from = 0; from < {steps}u; from += {some}u) {{",
            *(f"  float {name}[{some}] = {{}};" for name in names),
            "  if (there) {",
            *("    " + line for line in each),
            f"      const u32 e = lesser({at}, {count - 1}u);",
            *("      " + line for line in reads),
            "    }",
            "  }",
            *("  " + line for line in each),
            f"    const u32 e = {at};",
            f"    if (e < {count}u) {made} = {combine}::of({made}, {element});",
            "  }",
            "}",
            f"{made} = {team(gather, share)}({made});" if share > 1 else "",
        ]

    def _each_result(self, count: int, over: Sequence[str], lines: Sequence[str]) -> list[str]:
        """Teams that go through the results of a block; one thread of each has the last lines."""
        results, share = self._grid.results(self._space), self._team(count)
        across = self._space.across
        column = [f"const u32 column = base + i * {self._space.run}u;"] if across else []
        there = f" && column < {self._space.inner.extent}u" if across else ""
        return [
            f"for (u32 some = 0; some < {results}u; some += {self._grid.threads // share}u) {{",
            f"  const u32 i = some + threadIdx.x / {share}u, q = threadIdx.x % {share}u;",
            *("  " + line for line in column),
            f"  const bool there = i < {results}u{there};",
            *("  " + line for line in over),
            "  if (there && q == 0) {",
            *("    " + line for line in lines),
            "  }",
            "}",
        ]

    def _put_together(self) -> list[str]:
        """What is held of partial results, put together by each block into shared memory.

        The blocks of the first chunk write what goes to outputs.
        """
        made = []
        for parts in self._parts_of:
            inner = GridFunction(self._spec, self._space, self._grid, ())
            arrays = [f"h{len(self._shared) + at}" for at in range(len(parts.held))]
            size = self._grid.results(self._space)
            made += [f"__shared__ float {name}[{size}];" for name in arrays]
            names = dict(zip([to.name for _, to in parts.held], arrays, strict=True))
            made += ["{", *("  " + line for line in inner._of_parts(parts, names)), "}"]
            self._shared |= names
        return [*made, "__syncthreads();"] if made else []

    def _of_parts(self, parts: Parts, arrays: Mapping[str, str]) -> list[str]:
        """The lines that put together what is held, into arrays, and write outputs."""
        over, results = [], []
        if self._space.across:
            self._names = {**self._names, self._space.inner: "column"}
        kept = self._space.result.code(self._names)
        for gather, tensors in zip(parts.gathers, parts.tensors, strict=True):
            made = self._new()
            pointers = [f"p{self._places[to.name]}" for to in tensors]
            each = [f"{pointer}[({kept}) * {parts.grid.chunks}u + e]" for pointer in pointers]
            count = parts.grid.counted(parts.space, "e")
            over += self._over_team(gather, made, parts.grid.chunks, count, each)
            results.append(made)
        self._begin(parts.gathers, results, self._names)
        held, outputs = (
            [(*each, indexed(self._space.kept, self._space.kept_shape, each[1])) for each in some]
            for some in (parts.held, parts.outputs)
        )
        for value, to, index in held:
            code = self._at(value, index).text
            self._lines.append(f"{arrays[to.name]}[i] = {code};")
        lines, self._lines = self._lines, []
        self._write(outputs)
        if self._lines:
            lines += ["if (chunk == 0) {", *("  " + line for line in self._lines), "}"]
        return self._each_result(parts.grid.chunks, over, lines)

    def _finish(
        self,
        gathers: Sequence[Gather],
        results: Sequence[str],
        partial: Sequence[Sequence[TensorSpec]],
        names: Mapping[Var, str],
    ) -> list[str]:
        """What is written of one result: the numbers of its chunk, or the outputs."""
        kept = self._space.result.code(names)
        if partial:
            return [
                f"p{self._places[to.name]}[({kept}) * {self._grid.chunks}u + chunk] = {part};"
                for gather, made, tensors in zip(gathers, results, partial, strict=True)
                for to, code in zip(tensors, gather.names, strict=True)
                for part in [code.format(made)]
            ]
        self._begin(gathers, results, names)
        self._written()
        return self._lines

    def _begin(
        self, gathers: Sequence[Gather], results: Sequence[str], names: Mapping[Var, str]
    ) -> None:
        """From here on lines are of one result each, with names for what was gathered."""
        for gather, made in zip(gathers, results, strict=True):
            codes = zip(gather.values, gather.results, strict=True)
            self._found |= {id(value): code.format(made) for value, code in codes}
        self._lines, self._known, self._moves = [], {}, False
        self._plan, self._names = Schedule(1, self._plan.team), dict(names)


def indexed(index: Index, shape: Sequence[int], to: TensorSpec) -> Index:
    """The index into a tensor of as many elements. Raises Refused if no plain index says it."""
    found = reshaped(index, shape, to.shape) if numel(shape) == to.numel else None
    if found is None:
        raise Refused("a view that no plain index says")
    return tuple(found)
