"""Depthwise convolutions by tensor cores, where channels lie side by side.

For each channel and row of taps, sixteen rows of an image by sixteen columns are multiplied with a
band: the taps of that row, one place further down for each of eight columns of results. A block
turns a part of the image, so that columns lie side by side in shared memory, and a warp has eight
channels of tiles of results, which each thread ends up with as vectors of channels.

A band holds zeros, which make NaN of infinities that no window covers. So what is NaN is computed
once more, of its own window alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..ir.spec import GraphSpec
from .depthwise import SHARED_BYTES, Region, Strips, StripWriter, region_of
from .rows import WARP
from .scalars import MEMORY
from .source import Source
from .tape import Refused
from .write import Code, Narrower

LANES = 8  # channels of a vector of 16-bit numbers
DOWN, RIGHT = 16, 8  # results of a tile
INNER = 16  # columns of an image that a tile multiplies: those of results, and what taps reach
BAND = 24  # numbers of a row of taps between zeros
HIGH, VECTORS, WARPS = (1, 2), (1, 2, 4), (4, 8)  # that are measured
WIDEST = 14  # tiles beside each other
MOST = 4  # schedules that are measured

#: What such kernels share: rows of an image that a warp multiplies, and the product.
PRODUCTS = r"""
D u32 lows(u32 a, u32 b) { return (a & 0xffffu) | b << 16; }
D u32 highs(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }
D void load_rows(u32 (&a)[4], const void* at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
    : "r"((u32)__cvta_generic_to_shared(at)) : "memory");
}
#define MULTIPLY(T, NAME) \
D void multiply(T, float& p, float& q, float& r, float& s, const u32 (&a)[4], u32 b0, u32 b1) { \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 " \
    "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
    : "+f"(p), "+f"(q), "+f"(r), "+f"(s) \
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); \
}
MULTIPLY(f16, "f16")
MULTIPLY(bf16, "bf16")
"""

_ALONE = r"""
static __device__ __noinline__ float alone(const {kind}* image, const {kind}* taps) {{
  float sum = 0.0f;
  for (int r = 0; r < {rows}; ++r)
    for (int s = 0; s < {columns}; ++s)
      sum += get(image[r * {pitch} + s]) * get(taps[r * {band} + s]);
  return sum;
}}
"""


@dataclass(frozen=True)
class Banded:
    """A schedule: tiles of results of a block beside and below each other, its vectors of
    channels, and its warps."""

    tiles_wide: int
    tiles_high: int
    vectors: int
    warps: int


def schedules(spec: GraphSpec) -> list[Banded]:
    """Schedules that are worth measuring, the one that is likely the fastest first: it computes and
    reads the least beside what is asked for. Raises :class:`Refused`."""
    region = region_of(spec)
    _check(region)
    _, channels, height, width = region.conv.shape
    across = -(-width // RIGHT)
    beside = -(-across // WIDEST)
    wide = -(-across // beside)
    found: dict[Banded, float] = {}
    for high in HIGH:
        if high > 1 and DOWN * (high - 1) >= height:
            continue
        below = -(-height // (DOWN * high))
        for vectors in VECTORS:
            if channels % (LANES * vectors):
                continue
            for warps in WARPS:
                each = Banded(wide, high, vectors, warps)
                if warps % vectors or _shared_bytes(region, each) > SHARED_BYTES:
                    continue
                rounds = -(-wide * high // (warps // vectors)) * warps // vectors
                computed = below * beside * rounds * DOWN * RIGHT
                read = below * beside * _rows(region, each) * _pitch(each)
                # Vectors of one channel group read half of what a segment of memory holds.
                found[each] = computed + read * (1.5 if vectors == 1 else 1.0)
    return sorted(found, key=lambda each: found[each])[:MOST]


def _check(region: Region) -> None:
    """Raise :class:`Refused` for what is no such product."""
    conv, (_, columns) = region.conv, region.taps_shape
    kinds = {region.x.dtype, region.taps.dtype}
    if kinds not in ({torch.float16}, {torch.bfloat16}):
        raise Refused("tensor cores multiply 16-bit numbers of one dtype")
    if (*conv.stride, *conv.dilation) != (1, 1, 1, 1):
        raise Refused("a band has every tap and every place")
    if region.lanes % LANES or columns > INNER - RIGHT + 1:
        raise Refused("a band of eight columns holds at most nine taps")


def _pitch(schedule: Banded) -> int:
    """Numbers between rows of a turned image: an odd number of vectors, so that eight rows lie in
    different banks of shared memory."""
    return (schedule.tiles_wide + 1 | 1) * LANES


def _rows(region: Region, schedule: Banded) -> int:
    return DOWN * schedule.tiles_high + region.taps_shape[0] - 1


def _shared_bytes(region: Region, schedule: Banded) -> int:
    numbers = _rows(region, schedule) * _pitch(schedule) + region.taps_shape[0] * 2 * BAND
    return 2 * LANES * schedule.vectors * numbers


def write(spec: GraphSpec, schedule: Banded) -> Source:
    """The kernel of a region. Raises :class:`Refused`."""
    region = region_of(spec)
    _check(region)
    many = LANES * schedule.vectors
    if min(schedule.tiles_wide, schedule.tiles_high, schedule.vectors, schedule.warps) < 1:
        raise Refused("a schedule without tiles")
    if region.conv.shape[1] % many or schedule.warps % schedule.vectors:
        raise Refused(f"{schedule.vectors} vectors of channels")
    if _shared_bytes(region, schedule) > SHARED_BYTES:
        raise Refused("an image that shared memory does not hold")
    try:
        return _Banded(spec, schedule, region).source()
    except Narrower:
        raise Refused("a border of what is joined lies within a vector") from None


class _Banded(StripWriter):
    """The text of one kernel."""

    def __init__(self, spec: GraphSpec, schedule: Banded, region: Region) -> None:
        super().__init__(spec, Strips(LANES, 1, 1, schedule.vectors, 1), region)
        self._banded = schedule
        self._kind = MEMORY[region.x.dtype]

    def source(self) -> Source:
        """Write it."""
        region, schedule = self._region, self._banded
        self._known[id(region.conv), region.index] = Code("made[j]", 2)
        before = self._of_channels()
        self._written()
        count, channels, height, width = region.conv.shape
        beside = -(-width // (RIGHT * schedule.tiles_wide))
        below = -(-height // (DOWN * schedule.tiles_high))
        many = LANES * schedule.vectors
        parts = channels // many
        body = [
            f"const u32 first = blockIdx.x % {parts}u * {many}u, at = blockIdx.x / {parts}u;",
            f"const u32 right = at % {beside}u, down = at / {beside}u % {below}u;",
            f"const u32 n = at / {beside * below}u;",
            *self._turned(),
            *self._bands(),
            "__syncthreads();",
            f"const u32 member = threadIdx.x % {WARP}u, warp = threadIdx.x / {WARP}u;",
            f"const u32 own = warp % {schedule.vectors}u * {LANES}u, k = first + own;",
            *before,
            *self._tiles(),
        ]
        rows, columns = region.taps_shape
        alone = _ALONE.format(
            kind=self._kind, rows=rows, columns=columns, pitch=_pitch(schedule), band=2 * BAND
        )
        threads = WARP * schedule.warps
        return self._kernel(body, count * beside * below * parts, threads, (PRODUCTS, alone))

    def _origin(self) -> tuple[int, int]:
        """How far the windows of the first result reach over the image: above and to the left."""
        conv, taps = self._region.conv, self._region.taps_shape
        if not conv.transposed:
            return conv.padding
        return taps[0] - 1 - conv.padding[0], taps[1] - 1 - conv.padding[1]

    def _turned(self) -> Iterator[str]:
        """The block's part of the image in shared memory, columns side by side."""
        region, schedule, x = self._region, self._banded, self._region.x
        rows, pitch, vectors = _rows(region, schedule), _pitch(schedule), schedule.vectors
        top, left = self._origin()
        n, _, h, w = x.stride
        pairs = pitch // 2
        yield f"__shared__ vec<{self._kind}, {LANES}> image[{LANES * vectors}][{rows}]"
        yield f"  [{pitch // LANES}];"
        yield f"const int y0 = (int)(down * {DOWN * schedule.tiles_high}u) - {top};"
        yield f"const int x0 = (int)(right * {RIGHT * schedule.tiles_wide}u) - {left};"
        yield f"const auto* const from = p{self._places[x.name]} + (n * {n}u + first);"
        yield f"for (u32 i = threadIdx.x; i < {rows * pairs * vectors}u;"
        yield f"     i += {WARP * schedule.warps}u) {{"
        yield f"  const u32 part = i % {vectors}u, pair = i / {vectors}u % {pairs}u;"
        yield f"  const u32 row = i / {vectors * pairs}u;"
        yield "  const int y = y0 + (int)row, x = x0 + 2 * (int)pair;"
        yield f"  const bool in = (u32)y < {x.shape[2]}u;"
        yield f"  const auto* const line = from + ((i64)y * {h} + (i64)x * {w} + part * {LANES}u);"
        within = f"< {x.shape[3]}u"
        yield f"  const auto one = load_if<{LANES}>(in && (u32)x {within}, line);"
        yield f"  const auto two = load_if<{LANES}>(in && (u32)(x + 1) {within}, line + {w});"
        yield "  #pragma unroll"
        yield f"  for (int j = 0; j < {LANES // 2}; ++j) {{"
        yield "    const u32 a = ((const u32*)&one)[j], b = ((const u32*)&two)[j];"
        yield f"    u32* const to = (u32*)&image[part * {LANES}u + 2 * j][row][0] + pair;"
        yield "    to[0] = lows(a, b);"
        yield f"    to[{rows * pairs}] = highs(a, b);"
        yield "  }"
        yield "}"

    def _bands(self) -> Iterator[str]:
        """The taps of the block's channels between zeros, and the same one place further: so each
        pair of neighbours stands at an even place of one of both."""
        taps, (rows, columns) = self._region.taps, self._region.taps_shape
        many = LANES * self._banded.vectors
        c, _, r, s = taps.stride
        row, column = "r", "tap"
        if self._region.conv.transposed:
            row, column = f"({rows - 1}u - r)", f"({columns - 1}u - tap)"
        yield f"__shared__ vec<{self._kind}, {LANES}> bands[{many}][{rows}][2][{BAND // LANES}];"
        yield f"for (u32 i = threadIdx.x; i < {many * rows * 2 * BAND}u;"
        yield f"     i += {WARP * self._banded.warps}u) {{"
        yield f"  const u32 tap = i % {BAND}u + i / {BAND}u % 2u - {LANES}u;"
        yield f"  const u32 r = i / {2 * BAND}u % {rows}u, c = i / {2 * BAND * rows}u;"
        yield f"  {self._kind} value = {{}};"
        where = f"(first + c) * {c}u + {row} * {r}u + {column} * {s}u"
        yield f"  if (tap < {columns}u) value = p{self._places[taps.name]}[{where}];"
        yield f"  (({self._kind}*)bands)[i] = value;"
        yield "}"

    def _tiles(self) -> Iterator[str]:
        """The tiles of a warp, one after the other."""
        schedule, kind = self._banded, self._kind
        rows, (_, _, height, width) = self._region.taps_shape[0], self._region.conv.shape
        tiles, step = schedule.tiles_wide * schedule.tiles_high, schedule.warps // schedule.vectors
        pitch = _pitch(schedule)
        yield "const u32 g = member / 4u, t = member % 4u;"
        yield "const u32 shift = (g + 2u * t) % 2u;"
        yield f"const u32 place = {LANES}u + 2u * t - g - shift;"
        yield f"for (u32 tile = warp / {schedule.vectors}u; tile < {-(-tiles // step) * step}u;"
        yield f"     tile += {step}u) {{"
        mine = (
            f"tile < {tiles}u ? tile : {tiles - 1}u" if tiles % step else "tile"
        )  # all warps go together
        yield f"  const u32 mine = {mine};"
        yield f"  const u32 tx = mine % {schedule.tiles_wide}u, ty = mine / {schedule.tiles_wide}u;"
        yield f"  float sum[4][{LANES}] = {{}};"
        yield "  #pragma unroll"
        yield f"  for (int c = 0; c < {LANES}; ++c) {{"
        yield f"    const auto* const rows = (const {kind}*)&image[own + c]"
        yield f"      [ty * {DOWN}u + member % {DOWN}u][tx + member / {DOWN}u];"
        yield "    const u32* const band = (const u32*)&bands[own + c][0][shift][0] + place / 2u;"
        yield "    #pragma unroll"
        yield f"    for (int r = 0; r < {rows}; ++r) {{"
        yield "      u32 a[4];"
        yield f"      load_rows(a, rows + r * {pitch});"
        yield f"      const u32 *const b = band + r * {BAND};"
        sums = ", ".join(f"sum[{e}][c]" for e in range(4))
        yield f"      multiply({kind}(), {sums}, a, b[0], b[4]);"
        yield "    }"
        yield "  }"
        yield "  #pragma unroll"
        yield "  for (int e = 0; e < 4; ++e) {"
        yield f"    const u32 y = ty * {DOWN}u + g + e / 2 * {DOWN // 2}u;"
        yield f"    const u32 x = tx * {RIGHT}u + 2u * t + e % 2;"
        yield f"    const u64 h = (u64)(down * {DOWN * schedule.tiles_high}u) + y;"
        yield f"    const u64 w = (u64)(right * {RIGHT * schedule.tiles_wide}u) + x;"
        tests = [f"h >= {height}u", f"w >= {width}u"]
        tests += [f"tile >= {tiles}u"] if tiles % step else []
        yield f"    if ({' || '.join(tests)}) continue;"
        yield "    #pragma unroll"
        yield f"    for (int c = 0; c < {LANES}; ++c)"
        yield "      if (sum[e][c] != sum[e][c])"
        yield f"        sum[e][c] = alone((const {kind}*)&image[own + c][y][0] + x,"
        yield f"          (const {kind}*)&bands[own + c][0][0][1]);"
        yield f"    const float (&made)[{LANES}] = sum[e];"
        yield from ("    " + line for line in self._lines)
        yield "  }"
        yield "}"
