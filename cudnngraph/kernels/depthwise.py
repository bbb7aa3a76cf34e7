"""Kernels of depthwise convolutions with what stands behind them.

A thread computes a strip of neighbouring places in a few rows, for lanes of channels that lie side
by side. It reads each row of its window once. Taps are in shared memory, as float32. Where channels
lie apart in memory a thread has one channel, and reads the taps where they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd

from ..device.rules import rules
from ..ir.spec import GraphSpec, TensorSpec
from .index import Sum, Var, counter
from .rows import VECTOR_BYTES, Rows, Schedule, reachable, tape_of
from .scalars import FUNCTIONS, MEMORY, PRELUDE
from .source import ARGS, NAME, Source
from .tape import Depthwise, Index, Pick, Read, Refused, Value
from .write import Code, Narrower, Writer

SHARED_BYTES = 48 << 10  # that a block has without asking
THREADS = 256
WIDE_LOAD = 4  # lanes, from where on a wider load saves little
BLOCKS = 8  # of a multiprocessor, which share out all places
MEASURED = 4  # schedules of each number of lanes


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
class _Region:
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
    def steps(self) -> tuple[int, int]:
        """The stride at which windows follow each other: that of a gradient is 1."""
        return (1, 1) if self.conv.transposed else self.conv.stride


def region_of(spec: GraphSpec) -> _Region:
    """The region as such a kernel sees it. Raises :class:`Refused`."""
    if any(tensor.numel == 0 for tensor in spec.tensors.values()):
        raise Refused("a tensor is empty")
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
    return _Region(tuple(values), conv, x.tensor, taps.tensor, index, names[1])


def has_depthwise(spec: GraphSpec) -> bool:
    """Whether a region has a depthwise convolution. Raises :class:`Refused`."""
    return any(isinstance(value, Depthwise) for value in reachable(tape_of(spec)))


def strips(spec: GraphSpec, processors: int) -> list[Strips]:
    """Schedules that are worth measuring, the one by rule first. Raises :class:`Refused`.

    By rule a thread reads as little as it can for a place, while its sums and a row of what it
    reads stay in registers.
    """
    region = region_of(spec)
    _, channels, height, width = region.conv.shape
    rows, columns = region.taps.shape[2:]
    strided = region.conv.transposed and max(region.conv.stride) > 1
    step = region.conv.stride[1] if strided else 1
    found: dict[Strips, float] = {}
    for lanes in {region.lanes, max(1, region.lanes // 2), max(1, region.lanes // 4)}:
        vectors = _vectors(channels // lanes) if region.lanes > 1 else 0
        for wanted in (2, 4, 8):
            wide = _even(width, wanted, step, columns)
            for high in {1, 1 if strided else min(2, height), 1 if strided else min(4, height)}:
                held = lanes * (high * wide + (wide - 1) * region.steps[1] + columns)
                read = (rows + high - 1) / high * (wide + columns - 1) / wide
                cost = read * max(1, held / rules().strip_held) / min(WIDE_LOAD, lanes)
                found[Strips(lanes, wide, high, vectors, BLOCKS * processors)] = cost
    ranked = sorted(found, key=lambda each: (found[each], -each.lanes))
    tried = [
        each
        for lanes in dict.fromkeys(each.lanes for each in ranked)
        for each in [each for each in ranked if each.lanes == lanes][:MEASURED]
    ]
    return [*tried, *(replace(each, blocks=4 * each.blocks) for each in tried[:2])]


def _vectors(count: int) -> int:
    """The vectors of channels of a block: a part of all, 16 at most if there is one."""
    return max(each for each in range(1, min(16, count) + 1) if count % each == 0)


def _even(width: int, wanted: int, step: int, columns: int) -> int:
    """A width of strips near the wanted one: the one that reads least for a place of a row."""

    def read(each: int) -> float:
        return -(-width // each) * (each + columns - 1) / width

    tried = [each for each in range(step, 2 * wanted) if each % step == 0 and 2 * each >= wanted]
    return min(tried or [step], key=read)


def write(spec: GraphSpec, strips: Strips) -> Source:
    """The kernel of a region. Raises :class:`Refused`."""
    region = region_of(spec)
    channels, lanes = region.conv.shape[1], strips.lanes
    if min(lanes, strips.wide, strips.high, strips.blocks) < 1 or region.lanes % lanes:
        raise Refused(f"{lanes} lanes of channels")
    if strips.vectors and channels // lanes % strips.vectors:
        raise Refused(f"{strips.vectors} vectors of {channels // lanes}")
    try:
        return _Strips(spec, strips, region).source()
    except Narrower:
        raise Refused(f"a border of what is joined lies within {lanes} lanes") from None


class _Strips(Writer):
    """The text of one kernel."""

    def __init__(self, spec: GraphSpec, strips: Strips, region: _Region) -> None:
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
        self._written()
        count, channels, height, width = conv.shape
        beside, below = -(-width // strips.wide), -(-height // strips.high)
        places = count * beside * below
        if not strips.vectors:
            places *= channels
        blocks, begin = self._shared_out(places)
        body = [
            *begin,
            f"const u32 w0 = at % {beside}u * {strips.wide}u;",
            f"const u32 h0 = at / {beside}u % {below}u * {strips.high}u;",
            *self._image(beside * below),
            f"float sum[{strips.high}][{strips.wide}][{strips.lanes}] = {{}};",
            *(self._scattered() if conv.transposed and max(conv.stride) > 1 else self._window()),
            *self._behind(),
            "}",
        ]
        text = "\n".join(
            [
                PRELUDE,
                FUNCTIONS,
                f"{ARGS} {{ void* p[{len(self._places)}]; }};",
                f'extern "C" __global__ void __launch_bounds__({self._plan.team})',
                f"{NAME}(const __grid_constant__ Args a) {{",
                *self._pointers(),
                *("  " + line for line in (*self._taps(), *body)),
                "}",
                "",
            ]
        )
        return Source(text, blocks, self._plan.team)

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

    def _pointers(self) -> Iterable[str]:
        """The tensors, typed."""
        for name, at in self._places.items():
            kind = MEMORY[self._spec.tensors[name].dtype]
            const = "const " * (at < len(self._spec.inputs))
            yield f"  {const}{kind}* const p{at} = ({kind}*)a.p[{at}];"

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

    def _tap(self, row: str, column: str) -> str:
        """C++ for a tap of lane j."""
        taps, flip = self._region.taps, self._region.conv.transposed
        rows, columns = taps.shape[2:]
        if flip and max(self._region.conv.stride) == 1:
            row, column = f"({rows - 1} - ({row}))", f"({columns - 1} - ({column}))"
        if self._strips.vectors:
            return f"taps[({row}) * {columns} + ({column})][own + j]"
        c, _, r, s = taps.stride
        return f"get(p{self._places[taps.name]}[k * {c}u + ({row}) * {r}u + ({column}) * {s}u])"

    def _line(self, columns: int, start: str) -> list[str]:
        """Read a row ``y`` of what is convolved, so many columns from ``start`` on."""
        x, lanes = self._region.x, self._strips.lanes
        n, c, h, w = x.stride
        pointer = f"p{self._places[x.name]}"
        base = f"n * {n}u + k * {c}u + (u32)y * {h}u + (u32)x * {w}u"
        if lanes > 1:
            read = [
                f"  const auto in = load<{lanes}>({pointer} + ({base}));",
                "  #pragma unroll",
                f"  for (int j = 0; j < {lanes}; ++j) line[i][j] = get(in.at[j]);",
            ]
        else:
            read = [f"  line[i][0] = get({pointer}[{base}]);"]
        return [
            f"float line[{columns}][{lanes}];",
            "#pragma unroll",
            f"for (int i = 0; i < {columns}; ++i) {{",
            f"  const int x = {start} + i;",
            "  #pragma unroll",
            f"  for (int j = 0; j < {lanes}; ++j) line[i][j] = 0.0f;",
            f"  if (x >= 0 && x < {x.shape[3]}) {{",
            *("  " + each for each in read),
            "  }",
            "}",
        ]

    def _window(self) -> list[str]:
        """The sums of a strip, row by row of what its windows cover; of a gradient with stride 1
        the taps are the other way round."""
        conv, strips, taps = self._region.conv, self._strips, self._region.taps
        (down, right), (by_row, by_column) = self._region.steps, conv.dilation
        rows, columns = taps.shape[2:]
        above, left = conv.padding
        if conv.transposed:
            above, left = (rows - 1) * by_row - above, (columns - 1) * by_column - left
        covered = (strips.high - 1) * down + (rows - 1) * by_row + 1
        read = (strips.wide - 1) * right + (columns - 1) * by_column + 1
        return [
            "#pragma unroll 1",
            f"for (int row = 0; row < {covered}; ++row) {{",
            f"  const int y = (int)h0 * {down} - {above} + row;",
            f"  if (y < 0 || y >= {self._region.x.shape[2]}) continue;",
            *("  " + each for each in self._line(read, f"(int)w0 * {right} - {left}")),
            "  #pragma unroll",
            f"  for (int high = 0; high < {strips.high}; ++high) {{",
            f"    const int r = row - high * {down};",
            f"    if (r < 0 || r % {by_row} || r / {by_row} >= {rows}) continue;",
            "    #pragma unroll",
            f"    for (int s = 0; s < {columns}; ++s) {{",
            "      #pragma unroll",
            f"      for (int j = 0; j < {strips.lanes}; ++j) {{",
            f"        const float tap = {self._tap(f'r / {by_row}', 's')};",
            "        #pragma unroll",
            f"        for (int t = 0; t < {strips.wide}; ++t)",
            f"          sum[high][t][j] += line[t * {right} + s * {by_column}][j] * tap;",
            "      }",
            "    }",
            "  }",
            "}",
        ]

    def _scattered(self) -> list[str]:
        """The sums of a strip of a gradient with a stride: of each tap only some places."""
        conv, strips, taps = self._region.conv, self._strips, self._region.taps
        (down, right), (by_row, by_column) = conv.stride, conv.dilation
        rows, columns = taps.shape[2:]
        above, left = conv.padding
        low = (left - (columns - 1) * by_column) // right
        read = (strips.wide - 1 + left) // right - low + 1
        return [
            "#pragma unroll 1",
            f"for (int r = 0; r < {rows}; ++r) {{",
            f"  const int from = (int)h0 + {above} - r * {by_row};",
            f"  const int y = from / {down};",
            f"  if (from < 0 || from % {down} || y >= {self._region.x.shape[2]}) continue;",
            *("  " + each for each in self._line(read, f"(int)(w0 / {right}u) + ({low})")),
            "  #pragma unroll",
            f"  for (int s = 0; s < {columns}; ++s) {{",
            "    #pragma unroll",
            f"    for (int j = 0; j < {strips.lanes}; ++j) {{",
            f"      const float tap = {self._tap('r', 's')};",
            "      #pragma unroll",
            f"      for (int t = 0; t < {strips.wide}; ++t) {{",
            f"        const int x = t + {left} - s * {by_column} - ({low * right});",
            f"        if (x % {right} == 0) sum[0][t][j] += line[x / {right}][j] * tap;",
            "      }",
            "    }",
            "  }",
            "}",
        ]

    def _behind(self) -> list[str]:
        """What is computed of the sums, and written."""
        strips, (_, _, height, width) = self._strips, self._region.conv.shape
        return [
            "#pragma unroll",
            f"for (int high = 0; high < {strips.high}; ++high) {{",
            "  const u32 h = h0 + high;",
            f"  if (h >= {height}u) continue;" if height % strips.high else "",
            "  #pragma unroll",
            f"  for (int t = 0; t < {strips.wide}; ++t) {{",
            "    const u32 w = w0 + t;",
            f"    if (w >= {width}u) continue;" if width % strips.wide else "",
            f"    const float (&made)[{strips.lanes}] = sum[high][t];",
            *("    " + line for line in self._lines),
            "  }",
            "}",
        ]
