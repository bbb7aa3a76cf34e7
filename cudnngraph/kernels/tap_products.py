"""Gradients of depthwise convolutions' taps by tensor cores, where channels lie side by side.

A place is eight columns of a row: those of what comes back, and the sixteen of the image that are
met from there. For a channel and a row of taps, both of sixteen places are multiplied as matrices:
what lies s columns off the diagonal adds up to tap s. So a row of the image, read once, adds to the
sums of all rows of taps, which stay in registers.

A warp has one of a block's eight channels. A block goes down its rows some at a time, and turns
them, so that columns lie side by side in shared memory. Beside the image, and below a block's rows,
lie zeros, which make NaN of infinities. So a sum that is NaN is computed once more, of its own
products alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..device.rules import rules
from ..ir.spec import GraphSpec, TensorSpec
from .banded import (
    ACROSS,
    LANES,
    PLACES,
    PRODUCTS,
    SHARED_BYTES,
    TOGETHER,
    check_products,
    pairs_in_turn,
    room_for,
    side_by_side,
)
from .depthwise_gradient import put, summed_up
from .rows import WARP
from .scalars import MEMORY
from .source import DYNAMIC, NAME, Launch, Source
from .tap_sums import MOST_ELEMENTS, Region, region_of
from .tape import Refused

STAGES, PARTS = (8, 4), (1, 2, 4)  # that are measured, of rows
THREADS = WARP * LANES
MOST_COLUMNS = PLACES + 1 - ACROSS  # of taps

#: What such kernels share: columns of places that a warp multiplies.
COLUMNS = r"""
D void load_columns(u32 (&a)[4], const void* at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
    : "r"((u32)__cvta_generic_to_shared(at)));
}
D void load_columns(u32 (&a)[2], const void* at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
    : "=r"(a[0]), "=r"(a[1]) : "r"((u32)__cvta_generic_to_shared(at)));
}
"""


@dataclass(frozen=True)
class TapProducts:
    """A schedule: of a block the rows of what comes back, and how many of them are in shared memory
    at a time."""

    high: int
    stage: int


@dataclass(frozen=True)
class _Dealt:
    """How a schedule deals a region out: how many places a row has room for, the images of a block,
    the pieces of eight columns of their row and those of a channel in shared memory, the blocks of
    all channels, those below each other, and those of all rows and images."""

    room: int
    images: int
    row: int
    channel: int
    parts: int
    below: int
    chunks: int
    shared_bytes: int


def _deal(region: Region, schedule: TapProducts) -> _Dealt:
    """How a schedule deals a region out. Raises :class:`Refused`."""
    count, channels, height, width = region.dy.shape
    if min(schedule.high, schedule.stage) < 1:
        raise Refused("no rows")
    room = room_for(-(-width // ACROSS))
    images = PLACES // room
    row = images * (room + 1)
    channel = schedule.stage * (row + PLACES)
    sums = region.kernel[0] * 4 * PLACES * ACROSS
    shared_bytes = LANES * max(16 * channel, sums)
    if shared_bytes > SHARED_BYTES:
        raise Refused("rows that shared memory does not hold")
    below, groups = -(-height // schedule.high), -(-count // images)
    if region.count * below * groups >= MOST_ELEMENTS:
        raise Refused("sums that need an index of 64 bits")
    parts = channels // LANES
    return _Dealt(room, images, row, channel, parts, below, below * groups, shared_bytes)


def products_of(spec: GraphSpec) -> Region:
    """The region as such a kernel sees it. Raises :class:`Refused`."""
    region = region_of(spec)
    check_products(region.x, region.dy)
    if (*region.stride, *region.dilation) != (1, 1, 1, 1):
        raise Refused("a diagonal has every tap and every place")
    columns, width = region.kernel[1], region.dy.shape[3]
    if region.lanes % LANES or columns > MOST_COLUMNS or width > ACROSS * PLACES:
        raise Refused("sixteen places of eight columns hold no such row, or no such taps")
    return region


def schedules(spec: GraphSpec, processors: int) -> list[TapProducts]:
    """Schedules that are worth measuring, the one that is likely the fastest first. Raises
    :class:`Refused`.

    Images are parted as far as all processors need for a block each, as rows at the parts' edges
    are read twice; then few rows are read in vain, and many at a time.
    """
    region = products_of(spec)
    found: dict[TapProducts, tuple[int, ...]] = {}
    refused = Refused("no schedule")
    for part in PARTS:
        high = -(-region.dy.shape[2] // part)
        for stage in STAGES:
            try:
                dealt = _deal(region, TapProducts(high, stage))
            except Refused as reason:
                refused = reason
                continue
            idle = max(0, processors - dealt.parts * dealt.chunks)
            read = -(-(high + region.kernel[0] - 1) // stage) * stage
            found.setdefault(TapProducts(high, stage), (idle, part, read, -stage))
    if not found:
        raise refused
    return sorted(found, key=found.__getitem__)


def comes_first(spec: GraphSpec, first: TapProducts, processors: int) -> bool:
    """Whether such kernels, by their first schedule, are likely faster than sums by threads: for
    many columns of taps, if there is a block for each processor."""
    region = region_of(spec)
    dealt = _deal(region, first)
    many = region.kernel[1] >= rules().depthwise_products_min_columns
    return many and dealt.parts * dealt.chunks >= processors


def write(spec: GraphSpec, schedule: TapProducts) -> Source:
    """The kernel of a region. Raises :class:`Refused`."""
    return _Kernel(spec, products_of(spec), schedule).source()


class _Kernel:
    """The text of one kernel."""

    def __init__(self, spec: GraphSpec, region: Region, schedule: TapProducts) -> None:
        self._region, self._plan = region, schedule
        self._dealt = _deal(region, schedule)
        self._places = {name: at for at, name in enumerate((*spec.inputs, *spec.outputs))}
        self._kind = MEMORY[region.x.dtype]

    def source(self) -> Source:
        """Write it."""
        dealt = self._dealt
        body = [*self._begun(), *self._stages(), *self._added_up(dealt.chunks == 1)]
        first = Launch(NAME, dealt.parts * dealt.chunks, THREADS, dealt.shared_bytes)
        shared = (PRODUCTS, COLUMNS)
        return summed_up(
            self._region, self._places, body, f"{THREADS}", first, dealt.chunks, shared
        )

    def _pointer(self, tensor: TensorSpec) -> str:
        return f"p{self._places[tensor.name]}"

    def _begun(self) -> Iterator[str]:
        """What a block and a thread have."""
        plan, dealt, rows = self._plan, self._dealt, self._region.kernel[0]
        yield f"const u32 first = blockIdx.x % {dealt.parts}u * {LANES}u;"
        yield f"const u32 chunk = blockIdx.x / {dealt.parts}u;"
        yield f"const int i0 = chunk % {dealt.below}u * {plan.high}u;"
        yield f"const u32 n0 = chunk / {dealt.below}u * {dealt.images}u;"
        yield "const u32 warp = threadIdx.x / 32u, member = threadIdx.x % 32u;"
        yield "const u32 place = member % 8u + member / 16u * 8u;"
        yield f"const u32 read = place / {dealt.room}u * {dealt.room + 1}u + place % {dealt.room}u"
        yield "  + member / 8u % 2u;"
        yield f"float sum[{rows}][4] = {{}};"
        yield f"u32 back[{rows}][2] = {{}};  // of the last rows that came back"
        yield DYNAMIC

    def _stages(self) -> Iterator[str]:
        """Go down the rows of a block."""
        plan, region, dealt = self._plan, self._region, self._dealt
        (above, _), rows, stage = region.padding, region.kernel[0], plan.stage
        image = region.x.shape[2]
        total = plan.high + rows - 1
        yield "#pragma unroll 1"
        yield f"for (int j = 0; j < {total}; j += {stage}) {{"
        yield "  if (j) __syncthreads();"
        within = f"(u32)(i0 - {above} + j + row) < {image}u"
        yield from self._turned(
            region.x, f"i0 - {above} + j", within, region.padding[1], dealt.room + 1, 0
        )
        own = f"j + row < {plan.high}"
        if region.dy.shape[2] % plan.high:
            own += f" && i0 + j + row < {region.dy.shape[2]}"
        yield from self._turned(region.dy, "i0 + j", own, 0, dealt.room, stage * dealt.row)
        yield "  __syncthreads();"
        yield f"  const vec<u32, 4>* const plane = shared + warp * {dealt.channel}u;"
        yield "  #pragma unroll"
        yield f"  for (int row = 0; row < {stage}; ++row) {{"
        yield "    u32 a[4];"
        yield f"    load_columns(a, plane + (row * {dealt.row} + read));"
        yield "    #pragma unroll"
        yield f"    for (int r = {rows - 1}; r > 0; --r)"
        yield "      back[r][0] = back[r - 1][0], back[r][1] = back[r - 1][1];"
        at = f"{stage * dealt.row} + row * {PLACES} + member % {PLACES}u"
        yield f"    load_columns(back[0], plane + ({at}));"
        yield "    #pragma unroll"
        yield f"    for (int r = 0; r < {rows}; ++r)"
        sums = ", ".join(f"sum[r][{e}]" for e in range(4))
        yield f"      multiply({self._kind}(), {sums}, a, back[r][0], back[r][1]);"
        yield "  }"
        yield "}"

    def _turned(
        self, tensor: TensorSpec, y0: str, within: str, left: int, pieces: int, base: int
    ) -> Iterator[str]:
        """Read some rows of the block's images, and lay their columns side by side.

        A thread has two columns of some lines. ``within`` says whether there is a ``row``; the
        first of its ``pieces`` begins ``left`` of the image.
        """
        plan, dealt = self._plan, self._dealt
        count, _, _, width = tensor.shape
        n, _, h, w = tensor.stride
        images = dealt.images
        lines, units = plan.stage * images, pieces * ACROSS // 2
        at_once = max(1, THREADS // units)
        own = -(-lines // at_once)
        together = -(-own // -(-own // TOGETHER))
        yield "  {"
        yield from ("  " + line for line in pairs_in_turn(units, THREADS))
        yield f"    const int x = 2 * (int)unit - {left};"
        yield f"    const bool first_in = (u32)x < {width}u, second_in = (u32)(x + 1) < {width}u;"
        yield f"    const auto* const from = {self._pointer(tensor)} + ((i64)n0 * {n}"
        yield f"      + (i64)({y0}) * {h} + (i64)x * {w} + first);"
        yield f"    u32* const to = (u32*)(shared + {base}) + unit;"
        yield "    #pragma unroll 1"
        yield f"    for (u32 line = begin; line < {lines}u; line += {together * at_once}u) {{"
        yield f"      vec<{self._kind}, {LANES}> one[{together}], two[{together}];"
        yield "      #pragma unroll"
        yield f"      for (u32 b = 0; b < {together}; ++b) {{"
        yield f"        const u32 l = line + b * {at_once}u;"
        yield f"        const int row = l / {images}u, n = l % {images}u;"
        tests = [f"l < {lines}u"] if lines % (together * at_once) else []
        tests += [f"n0 + n < {count}u"] if count % images else []
        yield f"        const bool in = {' && '.join([*tests, within])};"
        yield f"        const auto* const p = from + ((i64)n * {n} + (i64)row * {h});"
        yield f"        one[b] = load_if<{LANES}>(in && first_in, p);"
        yield f"        two[b] = load_if<{LANES}>(in && second_in, p + {w});"
        yield "      }"
        yield "      #pragma unroll"
        yield f"      for (u32 b = 0; b < {together}; ++b) {{"
        yield f"        const u32 l = line + b * {at_once}u;"
        if lines % (together * at_once):
            yield f"        if (l >= {lines}u) continue;"
        yield f"        u32* const at = to + l * {4 * pieces}u;"
        yield from ("        " + line for line in side_by_side(dealt.channel))
        yield "      }"
        yield "    }"
        yield "  }"
        yield "  }"

    def _added_up(self, alone: bool) -> Iterator[str]:
        """Add up the diagonals of a warp's channel."""
        region, (rows, columns) = self._region, self._region.kernel
        size = PLACES * ACROSS
        yield "__syncthreads();"
        yield f"float* const mine = (float*)shared + warp * {rows * size}u;"
        yield "const u32 corner = member / 4u * 8u + member % 4u * 2u;"
        yield "#pragma unroll"
        yield f"for (u32 r = 0; r < {rows}u; ++r)"
        yield "  #pragma unroll"
        yield "  for (u32 e = 0; e < 4u; ++e)"
        yield f"    mine[r * {size}u + corner + e / 2u * 64u + e % 2u] = sum[r][e];"
        yield "__syncwarp();"
        yield "const u32 k = first + warp;"
        yield "#pragma unroll 1"
        yield f"for (u32 tap = member; tap < {rows * columns}u; tap += 32u) {{"
        yield f"  const u32 r = tap / {columns}u, s = tap % {columns}u;"
        yield "  float total = 0.0f;"
        yield "  #pragma unroll"
        yield f"  for (u32 n = 0; n < {ACROSS}u; ++n)"
        yield f"    total += mine[r * {size}u + (n + s) * {ACROSS}u + n];"
        yield "  if (total != total) {  // of what there is, without zeros beside it"
        yield from ("    " + line for line in self._exact())
        yield "  }"
        if alone:
            yield f"  {put(region, self._places, 'k', 'r', 's')}"
        else:
            at = f"tap * {region.channels}u + k"
            yield f"  sums[chunk * {region.count}u + {at}] = total;"
        yield "}"

    def _exact(self) -> Iterator[str]:
        """One tap of the block's rows, product by product."""
        region, plan, dealt = self._region, self._plan, self._dealt
        count, _, height, width = region.dy.shape
        (above, left), (_, _, high, wide) = region.padding, region.x.shape
        x, dy = region.x.stride[3], region.dy.stride[3]
        yield "total = 0.0f;"
        yield "#pragma unroll 1"
        yield f"for (u32 n = n0; n < lesser(n0 + {dealt.images}u, {count}u); ++n)"
        yield "  #pragma unroll 1"
        yield f"  for (u32 i = i0; i < lesser(i0 + {plan.high}u, {height}u); ++i) {{"
        yield f"    const u32 y = i + r - {above}u;"
        yield f"    if (y >= {high}u) continue;"
        for name, tensor, row in (("a", region.x, "y"), ("b", region.dy, "i")):
            n, _, h, _ = tensor.stride
            yield f"    const auto* const {name} ="
            yield f"      {self._pointer(tensor)} + (n * {n}u + {row} * {h}u + k);"
        yield "    #pragma unroll 1"
        yield f"    for (u32 w = 0; w < {width}u; ++w)"
        yield f"      if (w + s - {left}u < {wide}u)"
        yield f"        total += get(a[(w + s - {left}u) * {x}u]) * get(b[w * {dy}u]);"
        yield "  }"
