"""Kernels of the gradients of max pools over images, with pointwise ops behind them.

A thread has a patch of neighbouring places of the image, for lanes of channels that lie side by
side. It reads what the windows that meet its patch cover once, finds where the maximum of each
window is, and adds the window's gradient to that place. A number and where it stands are one key,
an integer: the largest key of a window is its maximum, as torch finds it. So the maximum of a
window's row serves all windows of that row, and windows share all that they read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from ..device.rules import rules
from ..ir.spec import GraphSpec, TensorSpec
from .index import Sum, Var, counter, place
from .keys import LARGER, NARROW, PLACES, WIDE
from .rows import MOST_THREADS, VECTOR_BYTES, Rows, Schedule, reachable, tape_of
from .rules.window import Strided
from .scalars import MEMORY
from .source import Source
from .tape import Depthwise, Index, MaxGradient, Pick, Read, Reduce, Refused, Value, Window
from .write import Code, Narrower, Writer

MOST_ELEMENTS = 1 << 31  # that an index of 32 bits may count
THREADS = 128  # of a block
REGISTERS = 64 << 10  # of a multiprocessor, of every GPU that cuDNN runs on
WANTED_REGISTERS = 168  # of a thread: with more of them too few threads wait for memory
OTHERS = 16  # registers of a thread beside the numbers that it holds, about
UNROLLED = 2048  # keys and comparisons of a patch, which are written out one by one
AHEAD = 2  # rows that are read before they are needed
MEASURED = 8  # schedules

# About how many instructions each takes, to rank schedules; counted in SASS. Of float32, which does
# not fit into a key of 32 bits with its place, keys have 64 bits.
_OF_A_PATCH, _OF_A_LOAD, _OF_A_STORE, _OF_A_RESULT = 80.0, 3.0, 6.0, 5.0
_OF_A_KEY, _OF_A_LARGER, _OF_A_PLACE, _OF_A_PAIR = (6.0, 8.0), (1.0, 4.0), 4.0, 2.5


@dataclass(frozen=True)
class Patches:
    """A schedule: channels of a thread, its places beside and below each other."""

    lanes: int
    patch_wide: int
    patch_high: int
    threads: int = THREADS


@dataclass(frozen=True)
class _Side:
    """The windows along a dim that meet a patch of a size, counted from the patch's first place and
    from the first window that begins there or before."""

    dim: Strided
    size: int

    @property
    def windows(self) -> range:
        """The windows that have an element in the patch."""
        dim, reach = self.dim, self.dim.dilation * (self.dim.kernel - 1)
        first = -(-(dim.padding - reach) // dim.stride)
        return range(first, (self.size - 1 + dim.padding) // dim.stride + 1)

    def tap(self, window: int, tap: int) -> int:
        """The place of a tap."""
        return window * self.dim.stride - self.dim.padding + tap * self.dim.dilation

    @property
    def places(self) -> list[int]:
        """The places that the windows cover."""
        taps = range(self.dim.kernel)
        return sorted({self.tap(window, tap) for window in self.windows for tap in taps})

    @property
    def span(self) -> range:
        """All places from the first one of these to the last one."""
        return range(self.places[0], self.places[-1] + 1)

    @property
    def pairs(self) -> int:
        """How many taps of the windows are places of the patch."""
        taps = range(self.dim.kernel)
        met = (self.tap(window, tap) for window in self.windows for tap in taps)
        return sum(0 <= each < self.size for each in met)

    @property
    def open(self) -> int:
        """The windows that cover a place, at most."""
        return self.dim.windows


@dataclass(frozen=True)
class _Region:
    """A region with the gradient of one max pool, and the index of its elements."""

    values: tuple[Value, ...]
    pool: MaxGradient
    x: TensorSpec
    index: Index
    channel: Var

    @property
    def lanes(self) -> int:
        """The most channels that lie side by side in the image."""
        if self.x.stride[1] != 1 or self.pool.shape[1] == 1:
            return 1
        most = VECTOR_BYTES // max(2, self.x.dtype.itemsize)
        others = [s for s, n in zip(self.x.stride, self.x.shape, strict=True) if n > 1 and s != 1]
        return gcd(most, self.x.shape[1], *others)

    @property
    def last(self) -> bool:
        """Whether neighbouring threads have neighbouring channels."""
        return self.x.stride[1] == 1 and self.pool.shape[1] > 1

    def side(self, dim: int, size: int) -> _Side:
        """The windows along a dim that meet a patch."""
        found = self.pool.dims[dim]
        assert isinstance(found, Strided)
        return _Side(found, size)


def has_gradient(spec: GraphSpec) -> bool:
    """Whether a region has the gradient of a max pool. Raises :class:`Refused`."""
    return any(isinstance(value, MaxGradient) for value in reachable(tape_of(spec)))


def region_of(spec: GraphSpec) -> _Region:
    """The region as such a kernel sees it. Raises :class:`Refused`."""
    if any(tensor.numel == 0 for tensor in spec.tensors.values()):
        raise Refused("a tensor is empty")
    if any(spec.tensors[name].extent >= MOST_ELEMENTS for name in (*spec.inputs, *spec.outputs)):
        raise Refused("a tensor that needs an index of 64 bits")
    values = tape_of(spec)
    found = reachable(values)
    pools = [value for value in found if isinstance(value, MaxGradient)]
    if len(pools) != 1 or any(isinstance(v, Window) for v in found if v is not pools[0]):
        raise Refused("several windows, or no gradient of a max pool")
    if any(isinstance(value, (Pick, Reduce, Depthwise)) for value in found):
        raise Refused("a gradient of a pool, and what is no pointwise op")
    (pool,) = pools
    _, x = pool.operands
    if not isinstance(x, Read) or x.type != "float":
        raise Refused("the maxima of a view")
    if len(pool.shape) != 4 or not all(isinstance(dim, Strided) for dim in pool.dims):
        raise Refused("windows that are not those of a pool of images")
    if any(spec.tensors[name].shape != pool.shape for name in spec.outputs):
        raise Refused("an output of another shape than the image's")
    names = [Var(name, extent) for name, extent in zip("nkhw", pool.shape, strict=True)]
    index = tuple(counter(name) if name.extent > 1 else Sum() for name in names)
    return _Region(tuple(values), pool, x.tensor, index, names[1])


def patches(spec: GraphSpec, processors: int) -> list[Patches]:
    """Schedules that are worth measuring, the one by rule first. Raises :class:`Refused`."""
    region = region_of(spec)
    found: dict[Patches, float] = {}
    for lanes in sorted({max(1, region.lanes // part) for part in (1, 2, 4)}):
        for high in _sizes(region, 0):
            for wide in _sizes(region, 1):
                each = Patches(lanes, wide, high)
                cost = _cost(region, each, processors)
                if cost is not None:
                    found[each] = cost
    if not found:
        raise Refused("windows of many elements")
    return sorted(found, key=lambda each: (found[each], -each.lanes))[:MEASURED]


def _sizes(region: _Region, dim: int) -> list[int]:
    """Sizes of patches along a dim, multiples of the stride."""
    extent = region.pool.shape[2 + dim]
    stride = region.side(dim, 1).dim.stride
    most = -(-extent // stride) * stride
    return sorted({stride, *(min(stride * many, most) for many in (2, 4, 8) if stride * many <= 8)})


def _cost(region: _Region, patches: Patches, processors: int) -> float | None:
    """About how long it takes, None for too long a text."""
    lanes, wide = patches.lanes, region.x.dtype.itemsize > 2
    down, right = region.side(0, patches.patch_high), region.side(1, patches.patch_wide)
    rows, columns, span = len(down.places), len(right.windows), len(right.span)
    windows = len(down.windows) * columns
    pairs = down.pairs * right.pairs
    if rows * span > PLACES or lanes * (rows * span + pairs) > UNROLLED:
        return None
    larger = (right.dim.kernel - 1) * rows * columns + (down.dim.kernel - 1) * windows
    places = patches.patch_wide * patches.patch_high
    taken = lanes * (
        _OF_A_KEY[wide] * rows * span
        + _OF_A_LARGER[wide] * larger
        + _OF_A_PLACE * windows
        + _OF_A_PAIR * pairs
        + _OF_A_RESULT * places
    )
    taken += _OF_A_PATCH + _OF_A_LOAD * (rows * span + windows) + _OF_A_STORE * places
    count, channels, height, width = region.pool.shape
    units = count * -(-height // patches.patch_high) * -(-width // patches.patch_wide)
    blocks = -(-units * channels // lanes // patches.threads)
    held = _held(region, patches)
    resident = max(1, REGISTERS // (held * patches.threads))
    whole, rest = divmod(-(-blocks // processors), resident)
    waits = rules().depthwise_wait_blocks
    rounds = whole * (resident + waits) + (rest + waits if rest else 0.0)
    long = max(1.0, taken / rules().patch_most_instructions)
    return taken * rounds * long * max(1.0, held / WANTED_REGISTERS) ** 2


def _held(region: _Region, patches: Patches) -> int:
    """The registers of a thread, about: sums, open windows, a row of keys, rows that are read."""
    down, right = region.side(0, patches.patch_high), region.side(1, patches.patch_wide)
    size = region.x.dtype.itemsize
    keys = 2 if size > 2 else 1
    held = down.dim.stride * patches.patch_wide + keys * (down.open + 1) * len(right.windows)
    held += keys * len(right.span)
    return patches.lanes * held + (AHEAD + 1) * len(right.span) * patches.lanes * size // 4 + OTHERS


def write(spec: GraphSpec, patches: Patches) -> Source:
    """The kernel of a region. Raises :class:`Refused`."""
    region = region_of(spec)
    lanes, threads = patches.lanes, patches.threads
    if min(lanes, patches.patch_wide, patches.patch_high) < 1 or region.lanes % lanes:
        raise Refused(f"{lanes} lanes of channels")
    if not 0 < threads <= MOST_THREADS:
        raise Refused(f"a block of {threads} threads")
    for dim, size in enumerate((patches.patch_high, patches.patch_wide)):
        if size % region.side(dim, size).dim.stride:
            raise Refused("patches that are no multiple of the stride")
    if _cost(region, patches, 1) is None:
        raise Refused("windows of many elements")
    try:
        return _Patches(spec, patches, region).source()
    except Narrower:
        raise Refused(f"a border of what is joined lies within {lanes} lanes") from None


class _Patches(Writer):
    """The text of one kernel.

    Names in it: a thread ``at``, its image ``n`` and first channel ``k``; its first place ``y0``
    and ``x0`` and first window ``oy0`` and ``ox0``; a row of keys ``key``, the largest keys of a
    row of windows ``best``, a window's column ``i``, lane ``j``.
    """

    def __init__(self, spec: GraphSpec, patches: Patches, region: _Region) -> None:
        self._patches, self._region = patches, region
        self._down = region.side(0, patches.patch_high)
        self._right = region.side(1, patches.patch_wide)
        outputs = tuple(
            (value, spec.tensors[name], region.index)
            for value, name in zip(region.values, spec.outputs, strict=True)
        )
        rows = Rows(Var("r", 1), region.channel, outputs, (), 1)
        super().__init__(spec, Schedule(patches.lanes, patches.threads), rows, 0)
        self._once = None
        self._names = {var: var.name for part in region.index for var in part.vars()}
        self._names[region.channel] = "k"

    def source(self) -> Source:
        """Write it."""
        pool, patches, region = self._region.pool, self._patches, self._region
        made = Code("made[j]", 2) if patches.lanes > 1 else Code("made[0]", 1)
        self._known = {(id(pool), region.index): made}
        self._lines = []
        self._written()
        behind, self._lines = self._lines, []
        count, channels, height, width = pool.shape
        beside, below = -(-width // patches.patch_wide), -(-height // patches.patch_high)
        vectors = channels // patches.lanes
        total = count * beside * below * vectors
        if total >= MOST_ELEMENTS:
            raise Refused("an index of 64 bits")
        parts = [("k", vectors), ("right", beside), ("down", below)]
        if not region.last:
            parts = [*parts[1:], parts[0]]
        where, step = [], 1
        for name, extent in parts:
            lanes = f" * {patches.lanes}u" if name == "k" and patches.lanes > 1 else ""
            where.append(f"const u32 {name} = at / {step}u % {extent}u{lanes};")
            step *= extent
        n, c, h, w = region.x.stride
        body = [
            f"const u32 at = blockIdx.x * {patches.threads}u + threadIdx.x;",
            f"if (at >= {total}u) return;" if total % patches.threads else "",
            *where,
            f"const u32 n = at / {step}u;",
            f"const u32 y0 = down * {patches.patch_high}u, x0 = right * {patches.patch_wide}u;",
            f"const u32 oy0 = down * {patches.patch_high // self._down.dim.stride}u;",
            f"const u32 ox0 = right * {patches.patch_wide // self._right.dim.stride}u;",
            f"const auto* const from = p{self._places[region.x.name]} + "
            f"(n * {n}u + k * {c}u + y0 * {h}u + x0 * {w}u);",
            *self._columns(),
            f"float sum[{patches.patch_high}][{patches.patch_wide}][{patches.lanes}] = {{}};",
            *self._marched(behind),
        ]
        keys = (NARROW if region.x.dtype.itemsize <= 2 else WIDE) + LARGER
        return self._kernel(body, -(-total // patches.threads), patches.threads, [keys])

    def _columns(self) -> Iterator[str]:
        """A bit for each column that windows cover: whether the image has it."""
        span, width = self._right.span, self._region.x.shape[3]
        if len(span) > 32:
            raise Refused("windows of many columns")
        yield "u32 columns = 0u;"
        yield "#pragma unroll"
        yield f"for (int i = 0; i < {len(span)}; ++i)"
        yield f"  columns |= (u32)(x0 + (i + {span[0]}) < {width}u) << i;"

    def _gradient(self, window: int) -> Iterator[str]:
        """Read the gradients of a row of windows; zero for those that the pool has not."""
        pool, lanes = self._region.pool, self._patches.lanes
        dy, _ = pool.operands
        names = [Var(name, extent) for name, extent in zip(("oy", "ox"), dy.shape[2:], strict=True)]
        self._names |= {each: each.name for each in names}
        index = (*self._region.index[:2], *(counter(v) if v.extent > 1 else Sum() for v in names))
        there = f"oy < {names[0].extent}u && ox < {names[1].extent}u"
        name, at = self._of("dy", window), Sum()
        if isinstance(dy, Read):
            at = place(index, dy.tensor.stride)
        if isinstance(dy, Read) and self._vector(dy.tensor.dtype, at) == lanes:
            read = f"load_if<{lanes}>({there}, p{self._places[dy.tensor.name]} + "
            lines = [f"const auto in = {read}({at.code(self._names)}));"]
            lines += ["#pragma unroll", f"for (int j = 0; j < {lanes}; ++j) {name}[i][j] = "]
            lines[-1] += "get(in.at[j]);"
        else:
            self._known, self._lines = {}, []
            found = self._at(dy, index).text
            lines = [f"if ({there}) {{", *("  " + line for line in self._lines)]
            lines += [f"  for (int j = 0; j < {lanes}; ++j) {name}[i][j] = {found};", "}"]
        yield f"float {name}[{len(self._right.windows)}][{lanes}] = {{}};"
        yield "{"
        yield f"  const u32 oy = oy0 + ({window});"
        yield "  #pragma unroll"
        yield f"  for (int i = 0; i < {len(self._right.windows)}; ++i) {{"
        yield f"    const u32 ox = ox0 + (i + ({self._right.windows[0]}));"
        yield from ("    " + line for line in lines)
        yield "  }"
        yield "}"

    def _of(self, name: str, window: int) -> str:
        """The name of what a row of windows has."""
        return f"{name}{window - self._down.windows[0]}"

    # -- the rows of a patch -------------------------------------------------------------------

    def _marched(self, behind: Sequence[str]) -> Iterator[str]:
        """Go down the rows that the windows cover. A row of windows ends at its last tap, a row of
        the patch at its last window."""
        down, lanes = self._down, self._patches.lanes
        rows, taps = down.places, range(down.dim.kernel)
        of = {window: [down.tap(window, tap) for tap in taps] for window in down.windows}
        ends = {
            y: max((met[-1] for met in of.values() if y in met), default=rows[0])
            for y in range(self._patches.patch_high)
        }
        for row in range(min(AHEAD, len(rows))):
            yield from self._fetched(row)
        for number, row in enumerate(rows):
            if number + AHEAD < len(rows):
                yield from self._fetched(number + AHEAD)
            for window, met in of.items():
                if row == met[0]:
                    yield from self._gradient(window)
                    yield f"Key {self._of('best', window)}[{len(self._right.windows)}][{lanes}];"
            yield from self._largest(number, {w: row == m[0] for w, m in of.items() if row in m})
            for window, met in of.items():
                if row == met[-1]:
                    yield from self._added(window)
            for y, end in ends.items():
                if row == end:
                    yield from self._behind(y, behind)

    def _fetched(self, number: int) -> Iterator[str]:
        """Read a row of the image."""
        x, span, lanes = self._region.x, self._right.span, self._patches.lanes
        row = self._down.places[number]
        yield f"vec<{MEMORY[x.dtype]}, {lanes}> in{number}[{len(span)}];"
        yield "#pragma unroll"
        yield f"for (int i = 0; i < {len(span)}; ++i)"
        where = f"from + ((i + ({span[0]})) * {x.stride[3]} + ({row * x.stride[2]}))"
        test = self._test(row)
        read = f"load_if<{lanes}>({test}, " if test else f"load<{lanes}>("
        yield f"  in{number}[i] = {read}{where});"

    def _test(self, row: int) -> str:
        """C++ for whether the image has column i of a row; "" if it always does."""
        span, (height, width) = self._right.span, self._region.x.shape[2:]
        within = [at - span[0] for at in span if self._always(at, self._patches.patch_wide, width)]
        tests = []
        if not self._always(row, self._patches.patch_high, height):
            tests.append(f"y0 + ({row}) < {height}u")
        if len(within) < len(span):
            own = "columns >> i & 1u"
            always = f"(i >= {within[0]} && i <= {within[-1]}) || " if within else ""
            tests.append(f"({always}{own})")
        return " && ".join(tests)

    def _always(self, at: int, size: int, extent: int) -> bool:
        """Whether a row or column that patches meet lies in the image for all of them."""
        return 0 <= at < extent - (-(-extent // size) - 1) * size

    def _largest(self, number: int, windows: Mapping[int, bool]) -> Iterator[str]:
        """The keys of a row, and the largest ones of it for each window; to start with, or with
        those of the rows above."""
        dim, span, lanes = self._right.dim, len(self._right.span), self._patches.lanes
        test = self._test(self._down.places[number])
        key = f"key_of(get(in{number}[i].at[j]), {number * span}u + i)"
        yield "{"
        yield f"  Key key[{span}][{lanes}];"
        yield "  #pragma unroll"
        yield f"  for (int i = 0; i < {span}; ++i)"
        yield "    #pragma unroll"
        yield f"    for (int j = 0; j < {lanes}; ++j)"
        yield f"      key[i][j] = {f'({test}) ? {key} : lowest()' if test else key};"
        yield "  #pragma unroll"
        yield f"  for (int i = 0; i < {len(self._right.windows)}; ++i)"
        yield "    #pragma unroll"
        yield f"    for (int j = 0; j < {lanes}; ++j) {{"
        yield f"      Key most = key[i * {dim.stride}][j];"
        yield "      #pragma unroll"
        yield f"      for (int t = 1; t < {dim.kernel}; ++t)"
        yield f"        most = larger_key(most, key[i * {dim.stride} + t * {dim.dilation}][j]);"
        for window, first in windows.items():
            best = f"{self._of('best', window)}[i][j]"
            yield f"      {best} = {'most' if first else f'larger_key({best}, most)'};"
        yield "    }"
        yield "}"

    def _added(self, window: int) -> Iterator[str]:
        """Add the gradients of a row of windows to the places of their maxima."""
        down, right, lanes = self._down, self._right, self._patches.lanes
        best, gradient, span = self._of("best", window), self._of("dy", window), len(right.span)
        yield "#pragma unroll"
        yield f"for (int i = 0; i < {len(right.windows)}; ++i)"
        yield "  #pragma unroll"
        yield f"  for (int j = 0; j < {lanes}; ++j) {{"
        yield f"    const u32 where = place_of({best}[i][j]);"
        yield "    #pragma unroll"
        yield f"    for (int t = 0; t < {right.dim.kernel}; ++t) {{"
        yield f"      const int in = i * {right.dim.stride} + t * {right.dim.dilation};"
        yield f"      const int x = in + ({right.span[0]});"
        yield f"      if (x < 0 || x >= {self._patches.patch_wide}) continue;"
        for tap in range(down.dim.kernel):
            y = down.tap(window, tap)
            if 0 <= y < self._patches.patch_high:
                at = f"{down.places.index(y) * span}u + in"
                given = f"where == {at} ? {gradient}[i][j] : 0.0f"
                yield f"      sum[{y}][x][j] += {given};"
        yield "    }"
        yield "  }"

    def _behind(self, y: int, lines: Sequence[str]) -> Iterator[str]:
        """What is computed of a row of sums, and written.

        Indices have 64 bits: so the compiler adds a place within the patch to an address.
        """
        wide, (height, width) = self._patches.patch_wide, self._region.pool.shape[2:]
        yield f"if (y0 + {y} < {height}u) {{" if height % self._patches.patch_high else "{"
        yield f"  const u64 h = (u64)y0 + {y};"
        yield "  #pragma unroll"
        yield f"  for (int x = 0; x < {wide}; ++x) {{"
        yield "    const u64 w = (u64)x0 + x;"
        yield f"    if (w >= {width}u) continue;" if width % wide else ""
        yield f"    const float (&made)[{self._patches.lanes}] = sum[{y}][x];"
        yield from ("    " + line for line in lines)
        yield "  }"
        yield "}"
