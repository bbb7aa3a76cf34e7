"""Gradients of depthwise convolutions' taps by tensor cores, where channels lie side by side.

A place is eight columns of a row: those of what comes back, and the sixteen of the image that are
met from there. For a channel and a row of taps, both of sixteen places are multiplied as matrices:
what lies s columns off the diagonal adds up to tap s. So a row of the image, read once, adds to the
sums of all rows of taps, which stay in registers.

A block goes down its rows some at a time, and turns them, so that columns lie side by side in
shared memory. Beside the image, and below a block's rows, lie zeros, which make NaN of infinities.
So a sum that is NaN is computed once more, of its own products alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

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
    pieces_of_a_vector,
    room_for,
    side_by_side,
)
from .depthwise_gradient import put, summed_up
from .rows import WARP
from .scalars import MEMORY
from .source import DYNAMIC, NAME, Launch, Source
from .tap_sums import MOST_ELEMENTS, Region, region_of
from .tape import Refused

MOST = 6  # schedules that are measured
STAGES, VECTORS, CHANNELS, PARTS = (4, 8, 2), (2, 4, 1), (2, 1), (1, 2, 4)  # that are measured
WARPS = (4, 16)  # the fewest and the most of a block
MOST_COLUMNS = PLACES + 1 - ACROSS  # of taps

# About the bytes that a processor reads in a clock, the clocks of a product, those that a read
# waits, and the registers of a processor, to rank schedules.
_BYTES, _PRODUCT, _WAIT, _REGISTERS = 18, 2, 1500, 64 << 10

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
    """A schedule: of a block the rows of what comes back, how many of them are in shared memory at
    a time, the vectors of channels, and the warps."""

    high: int
    stage: int
    vectors: int
    warps: int


@dataclass(frozen=True)
class _Dealt:
    """How a schedule deals a region out: how many places a row has room for, the images of a block,
    the pieces of eight columns of their row, those of a channel and of a vector of channels in
    shared memory, the blocks of all channels, and those of all rows and images."""

    room: int
    images: int
    row: int
    channel: int
    vector: int
    parts: int
    below: int
    chunks: int
    shared_bytes: int


def _deal(region: Region, schedule: TapProducts) -> _Dealt:
    """How a schedule deals a region out. Raises :class:`Refused`."""
    count, channels, height, width = region.dy.shape
    many = LANES * schedule.vectors
    check_products(region.x, region.dy)
    if (*region.stride, *region.dilation) != (1, 1, 1, 1):
        raise Refused("a diagonal has every tap and every place")
    if region.lanes % LANES or region.kernel[1] > MOST_COLUMNS or width > ACROSS * PLACES:
        raise Refused("sixteen places of eight columns hold no such row, or no such taps")
    if channels % many or many % schedule.warps or min(vars(schedule).values()) < 1:
        raise Refused(f"{schedule.vectors} vectors of channels by {schedule.warps} warps")
    room = room_for(-(-width // ACROSS))
    images = PLACES // room
    row = images * (room + 1)
    channel = schedule.stage * (row + PLACES)
    vector = pieces_of_a_vector(channel, schedule.vectors)
    below, groups = -(-height // schedule.high), -(-count // images)
    sums = schedule.warps * region.kernel[0] * 4 * PLACES * ACROSS
    shared_bytes = max(16 * schedule.vectors * vector, sums)
    if shared_bytes > SHARED_BYTES:
        raise Refused("rows that shared memory does not hold")
    if region.count * below * groups >= MOST_ELEMENTS:
        raise Refused("sums that need an index of 64 bits")
    parts = channels // many
    return _Dealt(room, images, row, channel, vector, parts, below, below * groups, shared_bytes)


def schedules(spec: GraphSpec, processors: int) -> list[TapProducts]:
    """Schedules that are worth measuring, the one that is likely the fastest first. Raises
    :class:`Refused`."""
    region = region_of(spec)
    found: dict[TapProducts, float] = {}
    refused = Refused("no schedule")
    for stage, vectors, channels, part in product(STAGES, VECTORS, CHANNELS, PARTS):
        warps, high = LANES * vectors // channels, -(-region.dy.shape[2] // part)
        if not WARPS[0] <= warps <= WARPS[1]:
            continue
        each = TapProducts(high, stage, vectors, warps)
        try:
            found[each] = _cost(region, each, processors)
        except Refused as reason:
            refused = reason
    if not found:
        raise refused
    return sorted(found, key=found.__getitem__)[:MOST]


def _cost(region: Region, schedule: TapProducts, processors: int) -> float:
    """About how many clocks a schedule takes: those of blocks that follow one another on a
    processor, where some that run side by side wait for memory together."""
    dealt, (rows, _) = _deal(region, schedule), region.kernel
    many, pieces = LANES * schedule.vectors, 2 * dealt.images * dealt.room + dealt.images
    read = 2 * many * ACROSS * pieces * max(1.0, 2 / schedule.vectors) / _BYTES
    stage = schedule.stage * max(read, many * rows * _PRODUCT)
    stages = -(-(schedule.high + rows - 1) // schedule.stage)
    by_registers = _REGISTERS // (WARP * schedule.warps * (64 if many == schedule.warps else 128))
    resident = max(1, min(2 * SHARED_BYTES // dealt.shared_bytes, by_registers))
    blocks = -(-dealt.parts * dealt.chunks // processors)
    return stages * max(blocks * stage, -(-blocks // resident) * (stage + _WAIT))


def write(spec: GraphSpec, schedule: TapProducts) -> Source:
    """The kernel of a region. Raises :class:`Refused`."""
    return _Kernel(spec, region_of(spec), schedule).source()


class _Kernel:
    """The text of one kernel."""

    def __init__(self, spec: GraphSpec, region: Region, schedule: TapProducts) -> None:
        self._region, self._plan = region, schedule
        self._dealt = _deal(region, schedule)
        self._places = {name: at for at, name in enumerate((*spec.inputs, *spec.outputs))}
        self._kind = MEMORY[region.x.dtype]
        self._channels = LANES * schedule.vectors // schedule.warps  # of a warp

    def source(self) -> Source:
        """Write it."""
        dealt, threads = self._dealt, WARP * self._plan.warps
        body = [*self._begun(), *self._stages(), *self._added_up(dealt.chunks == 1)]
        first = Launch(NAME, dealt.parts * dealt.chunks, threads, dealt.shared_bytes)
        shared = (PRODUCTS, COLUMNS)
        return summed_up(
            self._region, self._places, body, f"{threads}", first, dealt.chunks, shared
        )

    def _pointer(self, tensor: TensorSpec) -> str:
        return f"p{self._places[tensor.name]}"

    def _begun(self) -> Iterator[str]:
        """What a block and a thread have."""
        plan, dealt, rows = self._plan, self._dealt, self._region.kernel[0]
        many = LANES * plan.vectors
        yield f"const u32 first = blockIdx.x % {dealt.parts}u * {many}u;"
        yield f"const u32 chunk = blockIdx.x / {dealt.parts}u;"
        yield f"const int i0 = chunk % {dealt.below}u * {plan.high}u;"
        yield f"const u32 n0 = chunk / {dealt.below}u * {dealt.images}u;"
        yield "const u32 warp = threadIdx.x / 32u, member = threadIdx.x % 32u;"
        yield f"const u32 part = threadIdx.x % {plan.vectors}u;"
        yield "const u32 place = member % 8u + member / 16u * 8u;"
        yield f"const u32 read = place / {dealt.room}u * {dealt.room + 1}u + place % {dealt.room}u"
        yield "  + member / 8u % 2u;"
        yield f"float sum[{self._channels}][{rows}][4] = {{}};"
        yield f"u32 back[{self._channels}][{rows}][2] = {{}};  // of the last rows that came back"
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
        yield "  #pragma unroll"
        yield f"  for (u32 c = 0; c < {self._channels}u; ++c) {{"
        yield f"    const u32 own = warp * {self._channels}u + c;"
        where = f"own * {dealt.channel}u"
        if extra := dealt.vector - LANES * dealt.channel:
            where += f" + own / {LANES}u * {extra}u"
        yield f"    const vec<u32, 4>* const plane = shared + ({where});"
        yield "    #pragma unroll"
        yield f"    for (int row = 0; row < {stage}; ++row) {{"
        yield "      u32 a[4];"
        yield f"      load_columns(a, plane + (row * {dealt.row} + read));"
        yield "      #pragma unroll"
        yield f"      for (int r = {rows - 1}; r > 0; --r)"
        yield "        back[c][r][0] = back[c][r - 1][0], back[c][r][1] = back[c][r - 1][1];"
        at = f"{stage * dealt.row} + row * {PLACES} + member % {PLACES}u"
        yield f"      load_columns(back[c][0], plane + ({at}));"
        yield "      #pragma unroll"
        yield f"      for (int r = 0; r < {rows}; ++r)"
        sums = ", ".join(f"sum[c][r][{e}]" for e in range(4))
        yield f"        multiply({self._kind}(), {sums}, a, back[c][r][0], back[c][r][1]);"
        yield "    }"
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
        images, threads = dealt.images, WARP * plan.warps
        lines, units = plan.stage * images, pieces * ACROSS // 2 * plan.vectors
        at_once = max(1, threads // units)
        own = -(-lines // at_once)
        together = -(-own // -(-own // TOGETHER))
        yield "  {"
        yield from ("  " + line for line in pairs_in_turn(units, threads))
        yield f"    const u32 pair = unit / {plan.vectors}u;"
        yield f"    const int x = 2 * (int)pair - {left};"
        yield f"    const bool first_in = (u32)x < {width}u, second_in = (u32)(x + 1) < {width}u;"
        yield f"    const auto* const from = {self._pointer(tensor)} + ((i64)n0 * {n}"
        yield f"      + (i64)({y0}) * {h} + (i64)x * {w} + first + part * {LANES}u);"
        yield f"    u32* const to = (u32*)(shared + (part * {dealt.vector}u + {base}u)) + pair;"
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
        """Add up the diagonals of a warp's channels."""
        region, (rows, columns) = self._region, self._region.kernel
        size = PLACES * ACROSS
        yield "__syncthreads();"
        yield f"float* const mine = (float*)shared + warp * {rows * size}u;"
        yield "const u32 corner = member / 4u * 8u + member % 4u * 2u;"
        yield "#pragma unroll"
        yield f"for (u32 c = 0; c < {self._channels}u; ++c) {{"
        yield "  __syncwarp();"
        yield "  #pragma unroll"
        yield f"  for (u32 r = 0; r < {rows}u; ++r)"
        yield "    #pragma unroll"
        yield "    for (u32 e = 0; e < 4u; ++e)"
        yield f"      mine[r * {size}u + corner + e / 2u * 64u + e % 2u] = sum[c][r][e];"
        yield "  __syncwarp();"
        yield f"  const u32 k = first + warp * {self._channels}u + c;"
        yield "  #pragma unroll 1"
        yield f"  for (u32 tap = member; tap < {rows * columns}u; tap += 32u) {{"
        yield f"    const u32 r = tap / {columns}u, s = tap % {columns}u;"
        yield "    float total = 0.0f;"
        yield "    #pragma unroll"
        yield f"    for (u32 n = 0; n < {ACROSS}u; ++n)"
        yield f"      total += mine[r * {size}u + (n + s) * {ACROSS}u + n];"
        yield "    if (total != total) {  // of what there is, without zeros beside it"
        yield from ("      " + line for line in self._exact())
        yield "    }"
        if alone:
            yield f"    {put(region, self._places, 'k', 'r', 's')}"
        else:
            at = f"tap * {region.channels}u + k"
            yield f"    sums[chunk * {region.count}u + {at}] = total;"
        yield "  }"
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
