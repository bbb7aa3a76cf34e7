"""Kernels of depthwise convolutions with what stands behind them.

A thread computes a strip of neighbouring places in a few rows, for lanes of channels that lie side
by side. It reads each row of its window once. Taps are in shared memory, as float32. Where channels
lie apart in memory a thread has one channel, and reads the taps where they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import gcd

from ..device.rules import rules
from ..ir.spec import GraphSpec, TensorSpec
from .index import Sum, Var, counter, place
from .rows import MOST_THREADS, VECTOR_BYTES, WARP, Rows, Schedule, reachable, tape_of
from .source import Source
from .tape import Depthwise, Index, Map, Pick, Read, Refused, Value, View
from .write import Code, Narrower, Writer

SHARED_BYTES = 48 << 10  # that a block has without asking
MOST_ELEMENTS = 1 << 31  # that an index of 32 bits may count
THREADS = 128  # of a block, about
SEGMENT_BYTES = 64  # of neighbouring channels, that a block reads together at best
REGISTERS = 64 << 10  # of a multiprocessor, of every GPU that cuDNN runs on
MOST_REGISTERS = 255  # of a thread
OTHERS = 10  # registers of a thread beside the numbers that it holds, about
UNROLLED = 3584  # products of a strip, which are written out one by one
MEASURED, MOST = 3, 9  # schedules that are measured of each number of lanes, and of all

# About how many instructions a strip takes beside its products, to rank schedules; counted in SASS.
_OF_A_STRIP, _OF_A_LOAD, _OF_A_STORE, _OF_A_RESULT, _OF_A_LONE = 90.0, 2.0, 2.0, 4.0, 1.0


@dataclass(frozen=True)
class Strips:
    """A schedule: channels of a thread, its places beside and below each other, the vectors of
    channels of a block (0: a thread has one channel, wherever it lies), and blocks for all
    places."""

    lanes: int
    wide: int
    high: int
    vectors: int
    blocks: int


@dataclass(frozen=True)
class Region:
    """A region with one depthwise convolution, and index of its elements."""

    values: tuple[Value, ...]
    conv: Depthwise
    x: TensorSpec
    taps: TensorSpec
    index: Index
    channel: Var

    @property
    def lanes(self) -> int:
        """The most channels that lie side by side in what is convolved."""
        if self.x.stride[1] != 1 or self.conv.shape[1] == 1:
            return 1
        most = VECTOR_BYTES // max(2, self.x.dtype.itemsize)
        others = [s for s, n in zip(self.x.stride, self.x.shape, strict=True) if n > 1 and s != 1]
        return gcd(most, self.x.shape[1], *others)

    @property
    def taps_shape(self) -> tuple[int, int]:
        """The rows and columns of taps."""
        _, _, rows, columns = self.taps.shape
        return rows, columns

    def met(self, dim: int, size: int) -> dict[int, list[tuple[int, int]]]:
        """The rows (dim 0) or columns (1) of what is convolved that a strip of a size meets.

        They are counted from the strip's origin. Each has pairs of the strip's own row and the
        taps' row that meet there.
        """
        conv = self.conv
        step, padding, by = conv.stride[dim], conv.padding[dim], conv.dilation[dim]
        found: dict[int, list[tuple[int, int]]] = {}
        for own in range(size):
            for tap in range(self.taps_shape[dim]):
                at, rest = own * step + tap * by - padding, 0
                if conv.transposed:
                    at, rest = divmod(own + padding - tap * by, step)
                if not rest:
                    found.setdefault(at, []).append((own, tap))
        return dict(sorted(found.items()))

    def moved(self, dim: int, size: int) -> int:
        """How far the origins of neighbouring strips are apart in what is convolved."""
        step = self.conv.stride[dim]
        return size // step if self.conv.transposed else size * step

    def inside(self, dim: int, size: int, at: int) -> bool:
        """Whether a row or column that strips meet lies in the image for all strips."""
        last = (-(-self.conv.shape[2 + dim] // size) - 1) * self.moved(dim, size)
        return at >= 0 and last + at < self.x.shape[2 + dim]


def region_of(spec: GraphSpec) -> Region:
    """The region as such a kernel sees it. Raises :class:`Refused`."""
    if any(tensor.numel == 0 for tensor in spec.tensors.values()):
        raise Refused("a tensor is empty")
    if any(spec.tensors[name].extent >= MOST_ELEMENTS for name in (*spec.inputs, *spec.outputs)):
        raise Refused("a tensor that needs an index of 64 bits")
    values = tape_of(spec)
    convs = [value for value in reachable(values) if isinstance(value, Depthwise)]
    if len(convs) != 1:
        raise Refused(f"{len(convs)} depthwise convolutions")
    if any(isinstance(value, Pick) for value in reachable(values)):
        raise Refused("a depthwise convolution, and places that are computed")
    (conv,) = convs
    x, taps = conv.operands
    if not isinstance(x, Read) or not isinstance(taps, Read):
        raise Refused("a depthwise convolution of what is computed in the region")
    if any(spec.tensors[name].shape != conv.shape for name in spec.outputs):
        raise Refused("an output of another shape than the convolution's")
    names = [Var(name, extent) for name, extent in zip("nkhw", conv.shape, strict=True)]
    index = tuple(counter(name) if name.extent > 1 else Sum() for name in names)
    return Region(tuple(values), conv, x.tensor, taps.tensor, index, names[1])


def has_depthwise(spec: GraphSpec) -> bool:
    """Whether a region has a depthwise convolution. Raises :class:`Refused`."""
    return any(isinstance(value, Depthwise) for value in reachable(tape_of(spec)))


def strips(spec: GraphSpec, processors: int) -> list[Strips]:
    """Schedules that are worth measuring, the one by rule first. Raises :class:`Refused`.

    By rule a thread takes few instructions for a place, and enough threads have room for what they
    hold in registers.
    """
    region = region_of(spec)
    _, channels, height, width = region.conv.shape
    down, right = region.conv.stride if region.conv.transposed else (1, 1)
    found: dict[Strips, float] = {}
    for lanes in sorted({max(1, region.lanes // part) for part in (1, 2, 4, 8)}):
        vectors = 0
        if region.lanes > 1:
            vectors = _vectors(channels // lanes, lanes * region.x.dtype.itemsize)
        for high in _sizes(height, down):
            for wide in _sizes(width, right):
                cost = _cost(region, (lanes, wide, high, vectors), processors)
                if cost is not None:
                    blocks = processors * _resident(region, (lanes, wide, high, vectors))
                    found[Strips(lanes, wide, high, vectors, blocks)] = cost
    ranked = sorted(found, key=lambda each: (found[each], -each.lanes))
    of_lanes = (
        [each for each in ranked if each.lanes == lanes][:MEASURED]
        for lanes in dict.fromkeys(each.lanes for each in ranked)
    )
    tried = [each for some in zip_longest(*of_lanes) for each in some if each][:MOST]
    return [*tried, *(replace(each, blocks=16 * each.blocks) for each in tried[:2])]


_Strip = tuple[int, int, int, int]  # lanes, width, height, vectors


def _vectors(count: int, size: int) -> int:
    """The vectors of channels of a block, a part of all: few idle threads, much read together."""

    def lost(each: int) -> tuple[float, int]:
        team = THREADS // each * each
        idle = -(-team // WARP) * WARP / team
        run = each * size
        read = run + SEGMENT_BYTES - math.gcd(run, SEGMENT_BYTES)  # in whole segments, on average
        return idle * read / run, -each

    return min((each for each in range(1, min(WARP, count) + 1) if count % each == 0), key=lost)


def _sizes(extent: int, step: int) -> list[int]:
    """Sizes of strips along an extent, multiples of a step: those that leave little over."""
    most = -(-extent // step) * step
    wanted = (min(-(-each // step) * step, most) for each in (1, 2, 4, 7, 8))
    return sorted({step, *(each for each in wanted if -(-extent // each) * each <= 1.2 * most)})


def _held(region: Region, strip: _Strip) -> int:
    """The numbers that a thread holds: sums, a row of what is convolved, taps that meet it."""
    lanes, wide, high, _ = strip
    rows, columns = region.taps_shape
    return lanes * (wide * high + len(region.met(1, wide)) + min(high, rows) * columns)


def _resident(region: Region, strip: _Strip) -> int:
    """About how many blocks a multiprocessor has at a time."""
    registers = min(MOST_REGISTERS, -(-(_held(region, strip) + OTHERS) // 8) * 8)
    return min(REGISTERS // (registers * THREADS), MOST_THREADS // THREADS * 2)


def _cost(region: Region, strip: _Strip, processors: int) -> float | None:
    """About how long it takes, None for too long a text.

    A multiprocessor has blocks in rounds. Its blocks of one round take turns: the fewer they are,
    the longer it waits for each one's loads.
    """
    lanes, wide, high, _ = strip
    count, channels, height, width = region.conv.shape
    rows, columns = region.met(0, high), region.met(1, wide)
    pairs = sum(map(len, rows.values())) * sum(map(len, columns.values()))
    if lanes * pairs > UNROLLED and (lanes, wide, high) != (1, *_smallest(region)):
        return None
    loads, places = len(rows) * len(columns), wide * high
    lone = _OF_A_LONE if lanes == 1 else 0.0
    taken = lanes * pairs + loads * (lanes * (1 + lone) + _OF_A_LOAD) + _OF_A_STRIP
    taken += places * (_OF_A_STORE + lanes * (_OF_A_RESULT + lone))
    held, most = _held(region, strip) + OTHERS, float(MOST_REGISTERS)
    units = count * -(-height // high) * -(-width // wide) * channels / lanes
    blocks, resident = math.ceil(units / THREADS / processors), _resident(region, strip)
    whole, rest = divmod(blocks, resident)
    waits = rules().depthwise_wait_blocks
    rounds = whole * (resident + waits) + (rest + waits if rest else 0.0)
    return taken * rounds * max(1.0, held / most) ** 2


def clocks(spec: GraphSpec, strips: Strips, processors: int) -> float:
    """About how many clocks a schedule takes. Raises :class:`Refused`."""
    strip = strips.lanes, strips.wide, strips.high, strips.vectors
    return _cost(region_of(spec), strip, processors) or math.inf


def _smallest(region: Region) -> tuple[int, int]:
    """The width and height of the smallest strip."""
    down, right = region.conv.stride if region.conv.transposed else (1, 1)
    return right, down


def write(spec: GraphSpec, strips: Strips) -> Source:
    """The kernel of a region. Raises :class:`Refused`."""
    region = region_of(spec)
    channels, lanes = region.conv.shape[1], strips.lanes
    if min(lanes, strips.wide, strips.high, strips.blocks) < 1 or region.lanes % lanes:
        raise Refused(f"{lanes} lanes of channels")
    if region.conv.transposed and (
        strips.high % region.conv.stride[0] or strips.wide % region.conv.stride[1]
    ):
        raise Refused("strips of a gradient that are no multiple of its stride")
    if strips.vectors and channels // lanes % strips.vectors:
        raise Refused(f"{strips.vectors} vectors of {channels // lanes}")
    try:
        return StripWriter(spec, strips, region).source()
    except Narrower:
        raise Refused(f"a border of what is joined lies within {lanes} lanes") from None


class StripWriter(Writer):
    """The text of one kernel."""

    def __init__(self, spec: GraphSpec, strips: Strips, region: Region) -> None:
        self._strips = strips
        self._region = region
        team = THREADS // max(1, strips.vectors) * max(1, strips.vectors)
        outputs = tuple(
            (value, spec.tensors[name], region.index)
            for value, name in zip(region.values, spec.outputs, strict=True)
        )
        rows = Rows(Var("r", 1), region.channel, outputs, (), 1)
        super().__init__(spec, Schedule(strips.lanes, team), rows, 0)
        self._once = None
        self._names = {var: var.name for part in region.index for var in part.vars()}
        self._names[region.channel] = "k"

    def source(self) -> Source:
        """Write it."""
        conv, strips, region = self._region.conv, self._strips, self._region
        made = Code("made[j]", 2) if strips.lanes > 1 else Code("made[0]", 1)
        self._known[id(conv), region.index] = made
        before = self._of_channels()
        self._written()
        count, channels, height, width = conv.shape
        beside, below = -(-width // strips.wide), -(-height // strips.high)
        places = count * beside * below
        if not strips.vectors:
            places *= channels
        blocks, begin = self._shared_out(places)
        body = [
            *(before if strips.vectors else ()),
            *begin,
            *self._image(beside * below),
            *(() if strips.vectors else before),
            f"const u32 right = at % {beside}u, down = at / {beside}u % {below}u;",
            f"float sum[{strips.high}][{strips.wide}][{strips.lanes}] = {{}};",
            *self._sums(),
            *self._behind(),
            "}",
        ]
        return self._kernel([*self._taps(), *body], blocks, self._plan.team)

    def _of_channels(self) -> list[str]:
        """Read what differs by channels alone, once for all places of a thread."""
        stack = [(value, index) for value, _, index in self._rows.outputs]
        while stack:
            value, index = stack.pop()
            if isinstance(value, Map | View):  # of what is joined, a part has its own places alone
                stack += self._below(value, index)
            elif isinstance(value, Read) and place(index, value.tensor.stride).vars() == {
                self._region.channel
            }:
                self._at(value, index)
        lines, self._lines = self._lines, []
        return lines

    def _shared_out(self, places: int) -> tuple[int, list[str]]:
        """The number of blocks, and the loop of a thread over its places."""
        strips, threads = self._strips, self._plan.team
        if not strips.vectors:
            blocks = min(-(-places // threads), 4 * strips.blocks)
            first = f"blockIdx.x * {threads}u + threadIdx.x"
            return blocks, [
                f"for (u32 at = {first}; at < {places}u; at += gridDim.x * {threads}u) {{"
            ]
        parts = self._region.conv.shape[1] // strips.lanes // strips.vectors
        side = threads // strips.vectors
        blocks = min(-(-places // side), max(1, strips.blocks // parts))
        first = f"blockIdx.x / {parts}u * {side}u + threadIdx.x / {strips.vectors}u"
        step = f"gridDim.x / {parts}u * {side}u"
        return blocks * parts, [
            f"for (u32 at = {first}; at < {places}u; at += {step}) {{",
        ]

    def _image(self, places: int) -> list[str]:
        """The image of a place, and its channel where that is not the thread's."""
        channels = self._region.conv.shape[1]
        if self._strips.vectors:
            return [f"const u32 n = at / {places}u;"]
        return [
            f"const u32 k = at / {places}u % {channels}u;",
            f"const u32 n = at / {places * channels}u;",
        ]

    def _taps(self) -> list[str]:
        """The taps of the block's channels in shared memory, and the first channel of a thread."""
        strips, taps = self._strips, self._region.taps
        if not strips.vectors:
            return []
        many, (rows, columns) = strips.vectors * strips.lanes, taps.shape[2:]
        if rows * columns * many * 4 > SHARED_BYTES:
            raise Refused("taps that shared memory does not hold")
        parts = self._region.conv.shape[1] // many
        c, _, r, s = taps.stride
        at = f"(first + c) * {c}u + tap / {columns}u * {r}u + tap % {columns}u * {s}u"
        return [
            f"__shared__ float taps[{rows * columns}][{many}];",
            f"const u32 first = blockIdx.x % {parts}u * {many}u;",
            f"for (u32 i = threadIdx.x; i < {rows * columns * many}u; i += {self._plan.team}u) {{",
            f"  const u32 c = i / {rows * columns}u, tap = i % {rows * columns}u;",
            f"  taps[tap][c] = get(p{self._places[taps.name]}[{at}]);",
            "}",
            "__syncthreads();",
            f"const u32 own = threadIdx.x % {strips.vectors}u * {strips.lanes}u;",
            "const u32 k = first + own;",
        ]

    def _tap(self, row: int) -> str:
        """C++ for the tap of a row, column s and lane j."""
        taps = self._region.taps
        if self._strips.vectors:
            return f"taps[{row * taps.shape[3]} + s][own + j]"
        c, _, r, s = taps.stride
        return f"get(p{self._places[taps.name]}[k * {c}u + {row * r}u + s * {s}u])"

    def _sums(self) -> Iterator[str]:
        """The sums of a strip, row by row of what its windows cover."""
        strips, region, x = self._strips, self._region, self._region.x
        rows, columns = region.met(0, strips.high), region.met(1, strips.wide)
        first, last = min(columns), max(columns)
        n, c, h, w = x.stride
        origin = f"n * {n}u + k * {c}u + y0 * {h}u + x0 * {w}u"
        yield f"const u32 y0 = down * {region.moved(0, strips.high)}u;"
        yield f"const u32 x0 = right * {region.moved(1, strips.wide)}u;"
        yield f"const auto* const from = p{self._places[x.name]} + ({origin});"
        within = [at - first for at in columns if region.inside(1, strips.wide, at)]
        bordered = len(within) < len(columns)
        if bordered:  # a bit for each column: whether there is something
            yield "u32 columns = 0u;"
            yield "#pragma unroll"
            yield f"for (int i = {first}; i <= {last}; ++i)"
            yield f"  columns |= (u32)(x0 + i < {x.shape[3]}u) << (i - {first});"
        for row, meetings in rows.items():
            yield "{"
            yield f"  float line[{last - first + 1}][{strips.lanes}];"
            inside = region.inside(0, strips.high, row)
            test = "" if inside else f"y0 + {row} < {x.shape[2]}u"
            if bordered and test:
                yield f"  const u32 inside = {test} ? columns : 0u;"
                test = "inside >> i & 1u"
            elif bordered:
                test = "columns >> i & 1u"
                if within:
                    test = f"(i >= {within[0]} && i <= {within[-1]}) || {test}"
            yield "  #pragma unroll"
            yield f"  for (int i = 0; i <= {last - first}; ++i) {{"
            where = f"from + ({row * h} + (i + {first}) * {w})"
            read = f"load_if<{strips.lanes}>({test}, " if test else f"load<{strips.lanes}>("
            yield f"    const auto in = {read}{where});"
            yield "    #pragma unroll"
            yield f"    for (int j = 0; j < {strips.lanes}; ++j) line[i][j] = get(in.at[j]);"
            yield "  }"
            for high, tap in meetings:
                yield from ("  " + line for line in self._products(high, tap, first))
            yield "}"

    def _products(self, high: int, row: int, first: int) -> Iterator[str]:
        """Add a row of taps times what its windows cover of a line."""
        strips, conv = self._strips, self._region.conv
        step, by, left = conv.stride[1], conv.dilation[1], conv.padding[1]
        yield "#pragma unroll"
        yield f"for (int s = 0; s < {self._region.taps.shape[3]}; ++s)"
        yield "  #pragma unroll"
        yield f"  for (int j = 0; j < {strips.lanes}; ++j) {{"
        yield f"    const float tap = {self._tap(row)};"
        yield "    #pragma unroll"
        yield f"    for (int t = 0; t < {strips.wide}; ++t) {{"
        if conv.transposed:
            yield f"      const int x = t + {left - first * step} - s * {by};"
            test, at = f"if (x % {step} == 0) " if step > 1 else "", f"x / {step}"
        else:
            test, at = "", f"t * {step} + s * {by} - {left + first}"
        yield f"      {test}sum[{high}][t][j] += line[{at}][j] * tap;"
        yield "    }"
        yield "  }"

    def _behind(self) -> list[str]:
        """What is computed of the sums, and written.

        Indices have 64 bits: so the compiler adds a place within the strip to an address.
        """
        strips, (_, _, height, width) = self._strips, self._region.conv.shape
        return [
            "#pragma unroll",
            f"for (int y = 0; y < {strips.high}; ++y) {{",
            f"  const u64 h = (u64)(down * {strips.high}u) + y;",
            f"  if (h >= {height}u) continue;" if height % strips.high else "",
            "  #pragma unroll",
            f"  for (int x = 0; x < {strips.wide}; ++x) {{",
            f"    const u64 w = (u64)(right * {strips.wide}u) + x;",
            f"    if (w >= {width}u) continue;" if width % strips.wide else "",
            f"    const float (&made)[{strips.lanes}] = sum[y][x];",
            *("    " + line for line in self._lines),
            "  }",
            "}",
        ]
