"""Write a kernel: CUDA C++ for a region of a graph, by a schedule.

One pattern serves all regions. A team of threads has a row, of which each thread has lanes that lie
side by side in memory, in chunks. Where nothing is reduced the whole region is one long row, and
blocks go through it in strides. Where something is, what one reduction needs is computed for all
chunks, then reduced over the team, then what the next one needs, and in the end what is written. A
row that fits into registers is read once; of a longer one each pass reads it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd

import torch

from ..ir.spec import GraphSpec, Node, TensorSpec, memory_order, numel
from .index import Sum, Var, counter, digits, place, reshaped
from .rules import RULES
from .scalars import FUNCTIONS, MEMORY, PRELUDE, REGISTER, number
from .tape import Index, Join, Map, Number, Read, Reduce, Value, View, Window, broadcast
from .window import Steps

NAME = "cudnngraph_kernel"
WARP = 32
VECTOR_BYTES = 16
SMALL = 4096  # elements, which may lie anyhow


class Refused(Exception):
    """A region that is no kernel, with the reason."""


class _Narrower(Exception):
    """The lanes of a schedule are too many: a border of what is joined lies between them."""


@dataclass(frozen=True)
class Schedule:
    """How the work is dealt out: elements that lie side by side for a thread, threads that share a
    row, rows of a block, and chunks of a row that a thread has (0: as many as there are, one after
    the other)."""

    lanes: int
    team: int
    rows: int = 1
    chunks: int = 1

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return self.team * self.rows


@dataclass(frozen=True)
class Source:
    """A kernel: its text, and the numbers of blocks and threads that it is launched with."""

    text: str
    blocks: int
    threads: int


@dataclass(frozen=True)
class Rows:
    """How the elements of a region are counted: rows, elements of a row, and the index of each
    output in these."""

    row: Var
    inner: Var
    outputs: tuple[tuple[Value, TensorSpec, Index], ...]
    reductions: tuple[tuple[Reduce, ...], ...]  # by the pass that computes them
    bytes: int  # of an element, the widest
    strided: bool = False  # the elements of a row do not lie side by side in memory

    @property
    def lanes(self) -> int:
        """The most lanes that a schedule may have: a row is a whole number of them."""
        most = VECTOR_BYTES // min(4, max(1, self.bytes))
        return gcd(self.inner.extent, most)


def tape_of(spec: GraphSpec) -> list[Value]:
    """The values of the outputs. Raises :class:`Refused`."""
    values: dict[str, Value] = {}
    for name in spec.inputs:
        tensor = spec.tensors[name]
        if tensor.dtype not in MEMORY:
            raise Refused(f"'{name}' is {str(tensor.dtype).removeprefix('torch.')}")
        values[name] = Read(tensor.shape, tensor, type=REGISTER[tensor.dtype])
    for node in spec.nodes:
        if node.op == "constant":
            values[node.results[0]] = Number((), number(float(node.attr("value"))))
            continue
        _add(values, node, spec)
    return [values[name] for name in spec.outputs]


def _add(values: dict[str, Value], node: Node, spec: GraphSpec) -> None:
    rule = RULES.get(node.op)
    if rule is None:
        raise Refused(f"no kernel is generated for {node.op}")
    operands = [None if name is None else values[name] for name in node.inputs]
    made = rule(node, operands, spec.tensors[node.results[0]])
    for name, value in zip(node.outputs, made, strict=False):
        if name is None:
            continue
        tensor = spec.tensors[name]
        if value.shape != tensor.shape:
            raise Refused(f"the rule of {node.op} makes {value.shape} of '{name}' {tensor.shape}")
        values[name] = value


def operands_of(value: Value) -> tuple[Value, ...]:
    """The values that a value is made of."""
    if isinstance(value, (Map, Join, Window)):
        return value.operands
    return (value.operand,) if isinstance(value, (Reduce, View)) else ()


def _reachable(values: Iterable[Value]) -> list[Value]:
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
    values = tape_of(spec)
    tensors = [spec.tensors[name] for name in spec.outputs]
    if any(tensor.dtype not in MEMORY for tensor in tensors):
        raise Refused("an output is of a dtype that kernels do not write")
    reachable = _reachable(values)
    reductions = [value for value in reachable if isinstance(value, Reduce)]
    if reductions and any(isinstance(value, Window) for value in reachable):
        raise Refused("windows and reductions")
    widest = max(tensor.dtype.itemsize for tensor in (*tensors, *map(_tensor, _reads(reachable))))
    if not reductions:
        count = max(tensor.numel for tensor in tensors)
        if any(tensor.numel != count for tensor in tensors):
            raise Refused("outputs of several sizes")
        inner = Var("k", count)
        main = _in_memory(tensors[0], counter(inner))
        outputs = tuple(
            (
                value,
                tensor,
                main if tensor.shape == tensors[0].shape else _in_memory(tensor, counter(inner)),
            )
            for value, tensor in zip(values, tensors, strict=True)
        )
        return Rows(Var("r", 1), inner, outputs, (), widest)
    return _with_reductions(values, tensors, reachable, reductions, widest)


def _tensor(read: Read) -> TensorSpec:
    return read.tensor


def _reads(values: Iterable[Value]) -> list[Read]:
    return [value for value in values if isinstance(value, Read)]


def _in_memory(tensor: TensorSpec, count: Sum) -> Index:
    """The index of the elements of a tensor in the order of its memory."""
    order = memory_order(tensor.shape, tensor.stride)
    found = digits(count, [tensor.shape[dim] for dim in order])
    return tuple(found[order.index(dim)] for dim in range(len(order)))


def _with_reductions(
    values: Sequence[Value],
    tensors: Sequence[TensorSpec],
    reachable: Sequence[Value],
    reductions: Sequence[Reduce],
    widest: int,
) -> Rows:
    main = max(reductions, key=lambda each: numel(each.operand.shape))
    shape = main.operand.shape
    count = numel(shape[dim] for dim in main.dims)
    row, inner = Var("r", numel(shape) // count), Var("k", count)
    speed = _speeds(main.operand)
    kept = sorted((d for d in range(len(shape)) if d not in main.dims), key=lambda d: -speed[d])
    cut = sorted(main.dims, key=lambda d: -speed[d])
    index = dict(zip(kept, digits(counter(row), [shape[d] for d in kept]), strict=True))
    index |= dict(zip(cut, digits(counter(inner), [shape[d] for d in cut]), strict=True))
    whole = tuple(index[dim] for dim in range(len(shape)))
    alone = tuple(Sum() if dim in main.dims else index[dim] for dim in range(len(shape)))
    outputs = []
    for value, tensor in zip(values, tensors, strict=True):
        if tensor.numel == numel(shape):
            found = reshaped(whole, shape, tensor.shape)
        elif tensor.numel == row.extent:
            found = reshaped(alone, main.shape, tensor.shape)
        else:
            raise Refused("an output is neither of the size of a row nor of one number of each")
        if found is None:
            raise Refused("an output's elements are in rows that are not those of the reduction")
        outputs.append((value, tensor, tuple(found)))
    level: dict[int, int] = {}
    for value in reachable:
        below = max((level[id(operand)] for operand in operands_of(value)), default=0)
        level[id(value)] = below + isinstance(value, Reduce)
    passes = tuple(
        tuple(each for each in reductions if level[id(each)] == number + 1)
        for number in range(max(level.values()))
    )
    beside = min((speed[dim] for dim in cut if shape[dim] > 1), default=1)
    strided = beside != 1 and numel(shape) > SMALL
    return Rows(row, inner, tuple(outputs), passes, widest, strided)


def _speeds(value: Value) -> list[int]:
    """For each dim how far apart its elements lie in the largest tensor that is read for it."""
    rank = len(value.shape)
    names = [Var(f"d{dim}", extent) for dim, extent in enumerate(value.shape)]
    index = tuple(counter(name) if name.extent > 1 else Sum() for name in names)
    best: tuple[int, Sum] = (-1, Sum())
    stack: list[tuple[Value, Index]] = [(value, index)]
    while stack:
        at, where = stack.pop()
        if isinstance(at, Read) and at.tensor.numel > best[0]:
            best = at.tensor.numel, place(where, at.tensor.stride)
        elif isinstance(at, Map):
            stack += [(each, broadcast(where, each.shape)) for each in at.operands]
        elif isinstance(at, View):
            source = at.source(where)
            stack += [] if source is None else [(at.operand, source)]
        elif isinstance(at, Join):
            stack += [(each, where) for each in at.operands]
    found = [rank - dim for dim in range(rank)]
    steps = {name: [by for digit, by in best[1].terms if digit.var == name] for name in names}
    if all(steps[name] for name in names if name.extent > 1):
        found = [min(steps[name], default=0) for name in names]
    return found


def schedule_for(rows: Rows, processors: int) -> Schedule:
    """The schedule by rule, for a GPU with so many processors."""
    lanes = rows.lanes
    if not rows.reductions:
        while lanes > 1 and rows.inner.extent // lanes < processors * 1024:
            lanes //= 2
        return Schedule(lanes, 256)
    parts = rows.inner.extent // lanes
    team = WARP
    while team < 1024 and parts > team * max(1, 8 // lanes) * 2:
        team *= 2
    chunks = -(-parts // team)
    if chunks * lanes > 32 and team < 1024:
        team = min(1024, team * 2)
        chunks = -(-parts // team)
    small = max(1, 128 // team)
    return Schedule(lanes, team, small, chunks if chunks * lanes <= 64 else 0)


def write(
    spec: GraphSpec, schedule: Schedule, rows: Rows | None = None, most_blocks: int = 0
) -> Source:
    """The kernel of a region. Raises :class:`Refused`.

    ``most_blocks`` bounds the blocks that go through one long row; 0 for none.
    """
    rows = rows or rows_of(spec)
    while True:
        try:
            return _Writer(spec, schedule, rows, most_blocks).source()
        except _Narrower:
            half = schedule.lanes // 2
            chunks = schedule.chunks * 2 if rows.reductions else 1
            schedule = Schedule(half, schedule.team, schedule.rows, chunks)


@dataclass(frozen=True)
class _Code:
    """C++ for a value, and what it differs by: 0 rows, 1 chunks of a row, 2 lanes (``j``)."""

    text: str
    by: int


class _Writer:
    """The text of one kernel, as far as it is written."""

    def __init__(self, spec: GraphSpec, schedule: Schedule, rows: Rows, most_blocks: int) -> None:
        self._spec = spec
        self._plan = schedule
        self._rows = rows
        self._names = {rows.row: "r", rows.inner: "k"}
        self._places = {name: at for at, name in enumerate((*spec.inputs, *spec.outputs))}
        self._known: dict[tuple[int, Index], _Code] = {}
        self._declared: list[str] = []  # for the whole row
        self._lines: list[str] = []
        self._count = 0
        self._many = bool(rows.reductions)
        self._resident = not self._many or schedule.chunks > 0
        length = schedule.team * schedule.lanes
        self._chunks = -(-rows.inner.extent // length)
        self._most_blocks = most_blocks

    # -- the whole ----------------------------------------------------------------------------

    def source(self) -> Source:
        """Write it."""
        plan, rows = self._plan, self._rows
        body: list[str] = []
        for reductions in rows.reductions:
            body += self._pass(lambda reductions=reductions: self._reduced(reductions))
        body += self._pass(self._written)
        pointers = [
            f"  {'const ' * (at < len(self._spec.inputs))}{kind}* const p{at} = ({kind}*)a.p[{at}];"
            for name, at in self._places.items()
            for kind in [MEMORY[self._spec.tensors[name].dtype]]
        ]
        head = [
            f"struct Args {{ void* p[{len(self._places)}]; }};",
            f'extern "C" __global__ void __launch_bounds__({plan.threads})',
            f"{NAME}(const __grid_constant__ Args a) {{",
            *pointers,
        ]
        if self._many:
            blocks = -(-rows.row.extent // plan.rows)
            head += [
                f"  const u32 t = threadIdx.x % {plan.team}u;",
                f"  u32 r = blockIdx.x * {plan.rows}u + threadIdx.x / {plan.team}u;",
            ]
            if rows.row.extent % plan.rows:
                head += [
                    f"  const bool mine = r < {rows.row.extent}u;",
                    f"  if (!mine) r = {rows.row.extent - 1}u;",
                ]
        else:
            blocks = self._chunks
            if self._most_blocks:
                blocks = min(blocks, self._most_blocks)
        text = "\n".join(
            [PRELUDE, FUNCTIONS, TEAM if self._many else "", *head]
            + ["  " + line for line in self._declared]
            + ["  " + line for line in body]
            + ["}", ""]
        )
        return Source(text, blocks, plan.threads)

    def _pass(self, fill: object) -> list[str]:
        """A loop over the chunks of a row, and what follows it."""
        assert callable(fill)
        self._lines = []
        if not self._resident:
            self._known = {key: code for key, code in self._known.items() if not code.by}
        before, after = fill() or ([], [])
        step = self._plan.team * self._plan.lanes
        if not self._many:
            first = f"(blockIdx.x * {self._plan.team}u + threadIdx.x) * {self._plan.lanes}u"
            until = f"k < {self._rows.inner.extent}u; k += gridDim.x * {step}u"
            loop = f"for (u32 k = {first}; {until}) {{"
            inside = self._lines
        else:
            loop = f"for (u32 c = 0; c < {self._chunks}u; ++c) {{"
            inside = [f"const u32 k = (c * {self._plan.team}u + t) * {self._plan.lanes}u;"]
            if self._rows.inner.extent % step:
                inside += [f"if (k < {self._rows.inner.extent}u) {{", *self._lines, "}"]
            else:
                inside += self._lines
        unroll = ["#pragma unroll"] if self._many and self._resident else []
        return [*before, *unroll, loop, *("  " + line for line in inside), "}", *after]

    def _reduced(self, reductions: Sequence[Reduce]) -> tuple[list[str], list[str]]:
        """The reductions of one pass: what each begins with, and over the team."""
        before, after = [], []
        for each in reductions:
            name = self._new()
            kept = self._index_of(each)
            value = self._at(each.operand, self._inside(each, kept))
            start = {"sum": "0.0f", "max": number(float("-inf")), "min": number(float("inf"))}
            before.append(f"float {name} = {start[each.kind]};")
            combine = {"sum": "Add", "max": "Larger", "min": "Smaller"}[each.kind]
            self._each_lane(f"{name} = {combine}::of({name}, {value.text});")
            after.append(f"{name} = team<{combine}, {self._plan.team}>({name});")
            self._known[id(each), kept] = _Code(name, 0)
        return before, after

    def _index_of(self, each: Reduce) -> Index:
        """The index at which the region asks for a reduction: one number of each row."""
        asked = {key[1] for key in self._asked() if key[0] == id(each)}
        if len(asked) != 1:
            raise Refused("a reduction is asked for at several places")
        (index,) = asked
        if any(self._rows.inner in part.vars() for part in index):
            raise Refused("a reduction's result is read along a row")
        return index

    def _asked(self) -> set[tuple[int, Index]]:
        """All values with the indices at which they are asked for, reductions included."""
        found: set[tuple[int, Index]] = set()
        stack = [(value, index) for value, _, index in self._rows.outputs]
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
            return list(zip(value.operands, self._parts(value, index), strict=True))
        if isinstance(value, Window):
            raise Refused("places that windows compute")
        return []

    def _inside(self, each: Reduce, kept: Index) -> Index:
        """The index of what a reduction reads: its row, and along it."""
        extents = [each.operand.shape[dim] for dim in each.dims]
        if numel(extents) != self._rows.inner.extent:
            raise Refused("reductions over rows of several lengths")
        speed = _speeds(each.operand)
        order = sorted(each.dims, key=lambda dim: -speed[dim])
        cut = digits(counter(self._rows.inner), [each.operand.shape[dim] for dim in order])
        inner = dict(zip(order, cut, strict=True))
        return tuple(inner.get(dim, index) for dim, index in enumerate(kept))

    def _source(self, view: View, index: Index) -> Index:
        found = view.source(index)
        if found is None:
            raise Refused("a view of a view that no plain index says")
        return found

    def _parts(self, join: Join, index: Index) -> list[Index]:
        """The index into each operand of a join; it is inside of one of them alone."""
        found, start = [], 0
        for operand in join.operands:
            moved = index[join.dim] + -start
            found.append((*index[: join.dim], moved, *index[join.dim + 1 :]))
            start += operand.shape[join.dim]
        return found

    def _written(self) -> None:
        """What is written in the last pass."""
        for (value, tensor, index), name in zip(
            self._rows.outputs, self._spec.outputs, strict=True
        ):
            code = self._at(value, index)
            self._store(tensor, f"p{self._places[name]}", place(index, tensor.stride), code.text)

    # -- values -------------------------------------------------------------------------------

    def _new(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _declare(self, type: str, by: int) -> _Code:
        """A new variable for a value; for all chunks where they are kept."""
        name, lanes = self._new(), f"[{self._plan.lanes}]" if by == 2 else ""
        kept = self._many and self._resident
        many = f"[{self._chunks}]" if kept and by else ""
        (self._declared if kept else self._lines).append(f"{type} {name}{many}{lanes};")
        return _Code(name + ("[c]" if many else "") + ("[j]" if lanes else ""), by)

    def _each_lane(self, line: str) -> None:
        if self._plan.lanes == 1:
            self._lines.append(line.replace("[j]", "[0]").replace("(k + j)", "k"))
            return
        self._lines += ["#pragma unroll", f"for (int j = 0; j < {self._plan.lanes}; ++j) {line}"]

    def _differs(self, at: Sum) -> int:
        """What a number differs by: see :class:`_Code`."""
        inner = self._rows.inner
        if at.slope(inner, self._plan.lanes) != 0:
            return 2
        return int(inner in at.vars())

    def _at(self, value: Value, index: Index) -> _Code:
        """C++ for the element of a value at an index."""
        known = self._known.get((id(value), index))
        if known is not None:
            return known
        if isinstance(value, Number):
            return _Code(value.code, 0)
        if isinstance(value, View):
            return self._at(value.operand, self._source(value, index))
        if isinstance(value, Read):
            made = self._read(value, index)
        elif isinstance(value, Join):
            made = self._joined(value, index)
        elif isinstance(value, Window):
            made = self._windowed(value, index)
        elif isinstance(value, Map):
            args = [self._at(each, broadcast(index, each.shape)) for each in value.operands]
            made = self._declare(value.type, max((each.by for each in args), default=0))
            self._assign(made, value.code([each.text for each in args]))
        else:
            raise Refused("a reduction of what another one of its pass gives")
        self._known[id(value), index] = made
        return made

    def _assign(self, made: _Code, code: str) -> None:
        line = f"{made.text} = {code};"
        if made.by == 2:
            self._each_lane(line)
        else:
            self._lines.append(line)

    def _read(self, value: Read, index: Index) -> _Code:
        tensor = value.tensor
        pointer, at = f"p{self._places[tensor.name]}", place(index, tensor.stride)
        made = self._declare(value.type, self._differs(at))
        wide = self._vector(tensor.dtype, at)
        if made.by < 2:
            self._assign(made, f"get({pointer}[{at.code(self._names)}])")
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
                    f"{made.text} = get({vector}.at[j - {start}]);",
                ]
        return made

    def _vector(self, dtype: torch.dtype, at: Sum) -> int:
        """How many elements of memory lie side by side, and may be read or written as one."""
        inner, lanes = self._rows.inner, self._plan.lanes
        if at.slope(inner, lanes) != 1:
            return 1
        wide = gcd(at.multiple(inner, lanes), lanes)
        return min(wide, VECTOR_BYTES // dtype.itemsize)

    def _by_lane(self, at: Sum) -> str:
        return at.code({**self._names, self._rows.inner: "(k + j)"})

    def _joined(self, value: Join, index: Index) -> _Code:
        inner, lanes = self._rows.inner, self._plan.lanes
        along = index[value.dim]
        slope = along.slope(inner, lanes)
        borders, border = [], 0
        for operand in value.operands[:-1]:
            border += operand.shape[value.dim]
            borders.append(border)
        if slope not in (0, 1):
            raise _Narrower
        if slope == 1 and gcd(along.multiple(inner, lanes), *borders, lanes) != lanes:
            raise _Narrower
        made = self._declare(value.type, max(map(self._differs, index)))
        for number_, (operand, part) in enumerate(
            zip(value.operands, self._parts(value, index), strict=True)
        ):
            last = number_ == len(borders)
            test = "" if last else f"if ({along.code(self._names)} < {borders[number_]}u) "
            self._lines.append(f"{'else ' if number_ else ''}{test}{{")
            with self._inner():
                self._assign(made, self._at(operand, part).text)
            self._lines.append("}")
        return made

    def _windowed(self, value: Window, index: Index) -> _Code:
        """What a rule writes itself. Its places are the same for all lanes, or there is one."""
        if self._plan.lanes > 1 and any(self._differs(each) == 2 for each in index[2:]):
            raise _Narrower
        by = max(map(self._differs, index))
        with self._inner():
            return _Code(value.write(Steps(self, value, index, by)), by)

    @contextmanager
    def _inner(self) -> Iterator[None]:
        """Within a branch: what is computed there is not known behind it."""
        known = dict(self._known)
        yield
        self._known = known

    def _store(self, tensor: TensorSpec, pointer: str, at: Sum, code: str) -> None:
        kind = MEMORY[tensor.dtype]
        convert = f"put({{}}, ({REGISTER[tensor.dtype]}){code});"
        tests = ["mine"] if self._many and self._rows.row.extent % self._plan.rows else []
        if self._many and self._rows.inner not in at.vars():
            tests.append("k == 0")  # one thread of the team
        guard = f"if ({' && '.join(tests)}) " if tests else ""
        if self._differs(at) < 2:
            self._lines.append(guard + convert.format(f"{pointer}[{at.code(self._names)}]"))
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


#: Reductions over the threads of a team, in the same order at every run.
TEAM = r"""
struct Add { static D_ float of(float a, float b) { return a + b; } };
struct Larger { static D_ float of(float a, float b) { return larger(a, b); } };
struct Smaller { static D_ float of(float a, float b) { return smaller(a, b); } };
template <class F, int T> static D_ float team(float x) {
#pragma unroll
  for (int at = (T < 32 ? T : 32) / 2; at; at /= 2) x = F::of(x, __shfl_xor_sync(~0u, x, at));
  if (T > 32) {
    __shared__ float parts[32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[threadIdx.x / T * (T / 32) + threadIdx.x % (T > 32 ? T / 32 : 1)];
#pragma unroll
    for (int at = T / 64; at; at /= 2) x = F::of(x, __shfl_xor_sync(~0u, x, at));
  }
  return x;
}
""".replace("D_", "__device__ __forceinline__")
