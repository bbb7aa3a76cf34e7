"""Write tiles: a pattern for regions that change the layout, through shared memory.

Rows read or write one element at a time where a tensor lies along another dim than the others do. A
tile has two sides instead: ``along`` runs as some of the tensors do, ``across`` as the others do. A
block of threads

1. reads its part of the inputs of the other layout, in the order of their own memory, and writes it
   to shared memory;
2. computes the ops in the order of the first layout, and writes the results that have it;
3. writes the results of the other layout from shared memory, in the order of their own memory.

Which layout is the first is decided by :mod:`.tiling`: the one that leaves fewer bytes to shared
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd

from ..device.rules import rules
from ..ir.spec import GraphSpec, TensorSpec
from .banks import BANK_BYTES, Pitch, pitch_of
from .index import Digit, Sum, place
from .rows import VECTOR_BYTES, WARP, Rows, Schedule
from .scalars import MEMORY, REGISTER
from .source import Source
from .tape import Index, Read, Refused
from .tiling import (
    MOST_STEPS,
    SHARED_BYTES,
    Access,
    Part,
    Tiles,
    Tiling,
    is_other,
    tiles_of,
    tiling_for,
)
from .write import Code, Narrower, Writer

HELD_BYTES = 128  # of a thread, of operands that are read before the threads meet
UNROLLED = 16  # steps of a loop that are written out


def by_rule(spec: GraphSpec, rows: Rows, processors: int) -> Tiling | None:
    """The tiling of a region that should run in tiles, None for one that rows suit as well."""
    try:
        tiles = tiles_of(spec, rows)
        sides, known = (tiles.rows.inner.extent, tiles.across.extent), rules()
        # Of small matrices the rows that share a sector are read at the same time.
        if min(sides) < known.tile_min_side or sides[0] * sides[1] < known.tile_min_elements:
            return None
        if tiles.bytes > tiles.other * known.tile_max_bytes:
            return None
        tiling = tiling_for(tiles, processors)
        write(spec, tiling, tiles)
    except Refused:
        return None
    return tiling


def write(spec: GraphSpec, tiling: Tiling, tiles: Tiles | None = None) -> Source:
    """The kernel of a region in tiles. Raises :class:`Refused`."""
    tiles = tiles or tiles_of(spec)
    lanes, sides = tiling.lanes, (tiling.along, tiling.across)
    if min(lanes, *sides) < 1 or tiling.along % lanes or tiles.rows.inner.extent % lanes:
        raise Refused(f"{lanes} lanes of {tiling.along} elements")
    steps = -(-sides[0] * sides[1] // lanes // max(1, tiling.threads))
    if steps > 2 * MOST_STEPS or not WARP <= tiling.threads <= 1024:
        raise Refused(f"tiles of {sides[0]} by {sides[1]} for {tiling.threads} threads")
    while True:
        try:
            return _TileWriter(spec, replace(tiling, lanes=lanes), tiles).source()
        except Narrower:
            lanes //= 2


@dataclass(frozen=True)
class _Staged:
    """A tensor's part in shared memory."""

    name: str
    tensor: TensorSpec
    at: Sum
    wide: int  # elements of a vector of global memory
    pitch: Pitch
    parts: tuple[Part, ...]
    flat: bool  # whole rows, one behind the other: vectors go on from row to row

    @property
    def size(self) -> int:
        """The bytes of it, with those up to the next vector."""
        vectors = -(-self.pitch.elements * self.tensor.dtype.itemsize // VECTOR_BYTES)
        return vectors * VECTOR_BYTES


class _TileWriter(Writer):
    """The text of one kernel of tiles, as far as it is written.

    Names in it: block ``k0, m0, r`` (where its tile begins along, across and besides), step ``i``,
    item ``e`` (a thread's vector of the tile), ``q`` and ``n`` (the item's row and column, along
    and across or the other way round), ``k`` and ``m`` (the element along and across), lane ``j``.
    """

    def __init__(self, spec: GraphSpec, tiling: Tiling, tiles: Tiles) -> None:
        super().__init__(spec, Schedule(tiling.lanes, tiling.threads), tiles.rows, 0)
        self._once = None
        self._tiling = tiling
        self._tiles = tiles
        self._names[tiles.across] = "m"
        self._staged: dict[Access, _Staged] = {}
        self._early: list[str] = []  # within the loop that reads ahead
        self._arrays: list[str] = []  # what it reads into
        self._held = 0  # bytes of a thread
        self._within: tuple[Part, ...] = ()  # of joins, in which this is

    # -- the whole ----------------------------------------------------------------------------

    def source(self) -> Source:
        """Write it."""
        tiling, tiles = self._tiling, self._tiles
        along, across, rest = tiles.rows.inner, tiles.across, tiles.rows.row
        sides = -(-along.extent // tiling.along), -(-across.extent // tiling.across)
        self._written()
        body = self._lines
        count = len(self._spec.inputs)
        reads = [each for each in self._staged.values() if self._places[each.tensor.name] < count]
        writes = [each for each in self._staged.values() if each not in reads]
        if sum(each.size for each in self._staged.values()) > SHARED_BYTES:
            raise Refused("a tile of more bytes than shared memory holds")
        lines = [
            *map(self._shared, self._staged.values()),
            f"const u32 k0 = blockIdx.x % {sides[0]}u * {tiling.along}u;",
            f"const u32 m0 = blockIdx.x / {sides[0]}u % {sides[1]}u * {tiling.across}u;",
            f"const u32 r = blockIdx.x / {sides[0] * sides[1]}u;",
            *(line for each in reads for line in self._fetch(each)),
            *self._arrays,
            *(self._by_first(self._early) if self._early else []),
            *(line for each in reads for line in self._keep(each)),
            "__syncthreads();",
            *self._by_first(body),
            *(["__syncthreads();"] if writes else []),
            *(line for each in writes for line in self._send(each)),
        ]
        return self._kernel(lines, sides[0] * sides[1] * rest.extent, tiling.threads)

    def _shared(self, each: _Staged) -> str:
        kind = MEMORY[each.tensor.dtype]
        return f"alignas(16) __shared__ {kind} {each.name}[{each.pitch.elements}];"

    def _steps(self, items: int) -> int:
        """How often a thread goes through the items of a tile."""
        return -(-items // self._tiling.threads)

    def _loop(
        self, items: int, place: Sequence[str], tests: Sequence[str], body: list[str]
    ) -> list[str]:
        """A loop of a thread over its items ``e``, of which ``place`` says where they are."""
        threads = self._tiling.threads
        tests = [f"e < {items}u", *tests] if items % threads else list(tests)
        inside = [*place, *body]
        if tests:
            inside = [*place, f"if ({' && '.join(tests)}) {{", *("  " + line for line in body), "}"]
        steps = self._steps(items)
        return [
            "#pragma unroll" if steps <= UNROLLED or "[i]" in "".join(body) else "#pragma unroll 4",
            f"for (int i = 0; i < {steps}; ++i) {{",
            f"  const u32 e = threadIdx.x + i * {threads}u;",
            *("  " + line for line in inside),
            "}",
        ]

    def _bounds(self) -> list[str]:
        """The tests whether an element of a tile is one of the results."""
        found = []
        if self._tiles.rows.inner.extent % self._tiling.along:
            found.append(f"k < {self._tiles.rows.inner.extent}u")
        if self._tiles.across.extent % self._tiling.across:
            found.append(f"m < {self._tiles.across.extent}u")
        return found

    def _by_first(self, body: list[str]) -> list[str]:
        """A loop over the tile in the order of the first layout."""
        lanes, along = self._tiling.lanes, self._tiling.along // self._tiling.lanes
        where = [
            f"const u32 q = e % {along}u, n = e / {along}u;",
            f"const u32 k = k0 + q * {lanes}u, m = m0 + n;",
        ]
        return self._loop(along * self._tiling.across, where, self._bounds(), body)

    def _by_other(self, each: _Staged, body: list[str], *, tested: bool) -> list[str]:
        """A loop over the tile in the order of the other layout."""
        wide, across = each.wide, self._tiling.across // each.wide
        where, tests = [f"const u32 q = e / {across}u, n = e % {across}u * {wide}u;"], []
        if each.flat:
            where, row = [f"const u32 f = e * {wide}u;"], self._tiles.across.extent
            end = self._tiles.rows.inner.extent * row
            if tested and self._tiles.rows.inner.extent % self._tiling.along:
                tests.append(f"k0 * {row}u + f < {end}u")
        elif tested:
            where.append("const u32 k = k0 + q, m = m0 + n;")
            tests += [*self._bounds(), *(t for part in each.parts for t in part.tests(self._names))]
        return self._loop(self._tiling.along * self._tiling.across // wide, where, tests, body)

    # -- through shared memory ----------------------------------------------------------------

    def _stage(self, tensor: TensorSpec, at: Sum) -> _Staged:
        """Room in shared memory for a tensor's part of the tile."""
        access = Access(tensor, at, self._within)
        found = self._staged.get(access)
        if found is None:
            tiling, size = self._tiling, tensor.dtype.itemsize
            wide, run = self._wide(tensor, at), self._run(tensor, at)
            flat = run > wide
            wide = max(run, wide)
            pitch = pitch_of(size, tiling.along, tiling.across, tiling.lanes, wide, flat)
            name = f"s{len(self._staged)}"
            found = _Staged(name, tensor, at, wide, pitch, self._within, flat)
            self._staged[access] = found
        return found

    def _wide(self, tensor: TensorSpec, at: Sum) -> int:
        """How many elements of the other layout may be read or written as one."""
        across = self._tiles.across
        wide = VECTOR_BYTES // tensor.dtype.itemsize
        while wide > 1:
            whole = across.extent % wide == 0 and self._tiling.across % wide == 0
            whole = whole and all(part.whole(across, wide) for part in self._within)
            if whole and at.slope(across, wide) == 1 and at.multiple(across, wide) % wide == 0:
                return wide
            wide //= 2
        return 1

    def _run(self, tensor: TensorSpec, at: Sum) -> int:
        """The same of a tile's rows where they lie one behind the other, else 1."""
        along, across = self._tiles.rows.inner, self._tiles.across
        rows, row = self._tiling.along, across.extent
        terms = {digit: by for digit, by in at.terms if digit.var in (along, across)}
        whole = {Digit(along, 1, along.extent): row, Digit(across, 1, row): 1}
        if terms != whole or self._tiling.across != row or self._within:
            return 1
        rest = Sum.of({digit: by for digit, by in at.terms if digit not in terms}, at.number)
        found = gcd(rest.multiple(along, 1), rows * row, along.extent * row)
        return gcd(found, VECTOR_BYTES // tensor.dtype.itemsize)

    def _held_by(self, each: _Staged) -> bool:
        """Whether registers hold a thread's share of it, so that all of it is read at once."""
        steps = self._steps(self._tiling.along * self._tiling.across // each.wide)
        return steps * max(BANK_BYTES, each.wide * each.tensor.dtype.itemsize) <= HELD_BYTES

    def _fetch(self, each: _Staged) -> list[str]:
        """Read a tensor's part of the tile into registers."""
        if not self._held_by(each):
            return []
        kind, vector = MEMORY[each.tensor.dtype], f"x{each.name}"
        steps = self._steps(self._tiling.along * self._tiling.across // each.wide)
        array = f"vec<{kind}, {each.wide}> {vector}[{steps}];"
        return [array, *self._by_other(each, [self._load(each, f"{vector}[i]")], tested=True)]

    def _load(self, each: _Staged, vector: str) -> str:
        """Read one vector of the other layout."""
        at, pointer = self._address(each), f"p{self._places[each.tensor.name]}"
        if each.wide == 1:
            return f"{vector}.at[0] = {pointer}[{at}];"
        return f"{vector} = load<{each.wide}>({pointer} + ({at}));"

    def _keep(self, each: _Staged) -> list[str]:
        """Write it from there to shared memory; what registers do not hold is read here too."""
        if self._held_by(each):
            pieces = self._pieces(each, f"x{each.name}[i]", out=False)
            return self._by_other(each, pieces, tested=False)
        whole = f"vec<{MEMORY[each.tensor.dtype]}, {each.wide}> x;"
        body = [whole, self._load(each, "x"), *self._pieces(each, "x", out=False)]
        return self._by_other(each, body, tested=True)

    def _send(self, each: _Staged) -> list[str]:
        """Write a result's part of the tile from shared memory."""
        kind, at = MEMORY[each.tensor.dtype], self._address(each)
        pointer = f"p{self._places[each.tensor.name]}"
        write = f"store<{each.wide}>({pointer} + ({at}), x);"
        if each.wide == 1:
            write = f"{pointer}[{at}] = x.at[0];"
        body = [f"vec<{kind}, {each.wide}> x;", *self._pieces(each, "x", out=True), write]
        return self._by_other(each, body, tested=True)

    def _pieces(self, each: _Staged, vector: str, *, out: bool) -> list[str]:
        """A vector to shared memory, or from there, in as few pieces as its pitch allows."""
        lanes, pitch, wide = self._tiling.lanes, each.pitch, each.wide
        if each.flat and not pitch.padded:
            return _copy(each, vector, "f", wide, out=out)
        where = f"q / {lanes}u * {pitch.group}u + q % {lanes}u * {pitch.row}u + n"
        if lanes == 1:
            where = f"q * {pitch.group}u + n"
        if not each.flat:
            piece = gcd(wide, pitch.group, pitch.row)
            return [f"const u32 w = {where};", *_copy(each, vector, "w", piece, out=out)]
        row = self._tiles.across.extent
        to, of = f"{vector}.at[j]", f"{each.name}[{where}]"
        return [
            "#pragma unroll",
            f"for (int j = 0; j < {wide}; ++j) {{",
            f"  const u32 q = (f + j) / {row}u, n = (f + j) % {row}u;",
            f"  {to} = {of};" if out else f"  {of} = {to};",
            "}",
        ]

    def _address(self, each: _Staged) -> str:
        """Where a vector of the other layout begins, in global memory."""
        if not each.flat:
            return each.at.code(self._names)
        across = self._tiles.across
        terms = {digit: by for digit, by in each.at.terms if digit.var != across}
        names = {**self._names, self._tiles.rows.inner: "k0"}
        return f"{Sum.of(terms, each.at.number).code(names)} + f"

    def _slot(self, each: _Staged) -> str:
        """The element of a lane in shared memory."""
        lane = f" + j * {each.pitch.row}u" if self._tiling.lanes > 1 else ""
        return f"{each.name}[q * {each.pitch.group}u + n{lane}]"

    # -- values -------------------------------------------------------------------------------

    @contextmanager
    def _inner(self, along: Sum, first: int, until: int | None) -> Iterator[None]:
        parts = self._within
        self._within = (*parts, Part(along, first, until))
        with super()._inner(along, first, until):
            yield
        self._within = parts

    def _other(self, tensor: TensorSpec, at: Sum) -> bool:
        return is_other(Access(tensor, at), self._tiles.rows.inner, self._tiles.across)

    def _read(self, value: Read, index: Index) -> Code:
        tensor, at = value.tensor, place(index, value.tensor.stride)
        if self._other(tensor, at):
            made = self._declare(value.type, self._differs(at))
            self._each_lane(f"{made.text} = get({self._slot(self._stage(tensor, at))});")
            return made
        held = self._steps(self._tiling.along * self._tiling.across // self._tiling.lanes)
        wide = self._vector(tensor.dtype, at)
        held *= self._tiling.lanes // wide * max(BANK_BYTES, wide * tensor.dtype.itemsize)
        fits = self._held + held <= HELD_BYTES
        if self._within or not fits or not self._beside(at):
            return super()._read(value, index)
        self._held += held
        return self._read_ahead(value, at)

    def _beside(self, at: Sum) -> bool:
        """Whether elements lie side by side along the tile."""
        inner, lanes = self._rows.inner, self._tiling.lanes
        if lanes > 1:
            return at.slope(inner, lanes) == 1
        return any(digit.var == inner and digit.div == by == 1 for digit, by in at.terms)

    def _read_ahead(self, value: Read, at: Sum) -> Code:
        """Read what lies along the tile before the threads meet."""
        lanes, kind = self._tiling.lanes, MEMORY[value.tensor.dtype]
        wide = self._vector(value.tensor.dtype, at)
        steps = self._steps(self._tiling.along * self._tiling.across // lanes)
        made, array = self._declare(value.type, self._differs(at)), self._new()
        self._arrays.append(f"vec<{kind}, {wide}> {array}[{steps}][{lanes // wide}];")
        pointer = f"p{self._places[value.tensor.name]}"
        for start in range(0, lanes, wide):
            where = (at + start).code(self._names)
            to = f"{array}[i][{start // wide}]"
            read = f"{to} = load<{wide}>({pointer} + ({where}));"
            self._early.append(read if wide > 1 else f"{to}.at[0] = {pointer}[{where}];")
        lane = f"{array}[i][j / {wide}].at[j % {wide}]" if lanes > 1 else f"{array}[i][0].at[0]"
        self._each_lane(f"{made.text} = get({lane});")
        return made

    def _written(self) -> None:
        """What is written, behind all that is read: to memory along the tile, else to shared
        memory."""
        codes = [self._at(value, index) for value, _, index in self._rows.outputs]
        for code, (_, tensor, index), name in zip(
            codes, self._rows.outputs, self._spec.outputs, strict=True
        ):
            at = place(index, tensor.stride)
            if self._other(tensor, at):
                to = self._slot(self._stage(tensor, at))
                self._each_lane(f"put({to}, ({REGISTER[tensor.dtype]}){code.text});")
            else:
                self._store(tensor, f"p{self._places[name]}", at, code.text)


def _copy(each: _Staged, vector: str, at: str, piece: int, *, out: bool) -> list[str]:
    """A vector to shared memory, or from there, in pieces."""
    kind, lines = MEMORY[each.tensor.dtype], []
    for start in range(0, each.wide, piece):
        here = f"{at} + {start}" if start else at
        if piece == 1:
            to, of = f"{vector}.at[{start}]", f"{each.name}[{here}]"
            lines.append(f"{to} = {of};" if out else f"{of} = {to};")
        elif out:
            part = f"*(vec<{kind}, {piece}>*)&{vector}.at[{start}]"
            lines.append(f"{part} = load<{piece}>({each.name} + {here});")
        else:
            part = f"*(const vec<{kind}, {piece}>*)&{vector}.at[{start}]"
            lines.append(f"store<{piece}>({each.name} + {here}, {part});")
    return lines
