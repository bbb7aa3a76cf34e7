"""Depthwise convolutions by tensor cores, where channels lie side by side.

For each channel and row of an image, places of eight columns are multiplied with a band: a row of
taps, one place further down for each of the eight results. So a row of an image, read once, adds to
all rows of results whose windows it is in.

A block turns its part of an image, so that columns lie side by side in shared memory. A warp has
sixteen places of one channel after the other, and writes their sums where these were. Then a thread
has vectors of channels again, for what stands behind the convolution.

A band holds zeros, which make NaN of infinities that no window covers. So what is NaN is computed
once more, of its own window alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from operator import itemgetter

import torch

from ..device.rules import has_matrix_products, rules
from ..ir.spec import GraphSpec, TensorSpec
from .depthwise import Region, Strips, StripWriter, region_of
from .rows import WARP
from .scalars import MEMORY
from .source import DYNAMIC, Source
from .tape import Refused
from .write import Code, Narrower

LANES = 8  # channels of a vector of 16-bit numbers
ACROSS = 8  # results of a place, beside each other
PLACES = 16  # that are multiplied together
PAIRS = 8  # of neighbours in a row of taps, of which the first begins in front of it
BANKS = 32  # words of shared memory that are read at a time
TOGETHER = 4  # loads of a thread before it stores what they read
MOST = 6  # schedules that are measured
ROWS, IMAGES, VECTORS = (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 3, 4)  # that are measured
WARPS = (8, 6, 16, 12)  # the usual number first
SHARED_BYTES = 96 << 10  # of a block, that every GPU with these products has

#: What such kernels share: rows of an image that a warp multiplies, and the product.
PRODUCTS = r"""
D u32 lows(u32 a, u32 b) { return (a & 0xffffu) | b << 16; }
D u32 highs(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }
D void load_rows(u32 (&a)[4], const void* at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
    : "r"((u32)__cvta_generic_to_shared(at)));
}
#define MULTIPLY(T, NAME) \
D void multiply(T, float& p, float& q, float& r, float& s, const u32 (&a)[4], u32 b0, u32 b1) { \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 " \
    "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
    : "+f"(p), "+f"(q), "+f"(r), "+f"(s) \
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); \
}
MULTIPLY(f16, "f16")
MULTIPLY(bf16, "bf16")
"""


@dataclass(frozen=True)
class Banded:
    """A schedule: of a block the images, the places beside each other, the rows of results and the
    vectors of channels; the rows of results of a place; then the warps."""

    images: int
    wide: int
    high: int
    rows: int
    vectors: int
    warps: int


def schedules(spec: GraphSpec, processors: int) -> list[Banded]:
    """Schedules that are worth measuring, the one that is likely the fastest first. Raises
    :class:`Refused`."""
    region = region_of(spec)
    _check(region)
    count, channels, height, width = region.conv.shape
    across = -(-width // ACROSS)
    wide = -(-across // -(-across // PLACES))
    room = room_for(wide)
    found: list[tuple[float, Banded]] = []
    for rows, images, vectors in product(ROWS, IMAGES, VECTORS):
        if channels % (LANES * vectors) or images > count or images * room > PLACES:
            continue
        groups = min(-(-height // rows), PLACES // (images * room))
        if images > 1 and groups * rows < height:
            continue
        each = Banded(images, wide, groups * rows, rows, vectors, WARPS[0])
        found.append((_cost(region, each, processors), each))
    tried = (
        replace(each, warps=warps)
        for _, each in sorted(found, key=itemgetter(0))
        if _Layout.of(region, each).shared_bytes <= SHARED_BYTES
        for warps in WARPS
        if _shared_out(each.vectors, warps)
    )
    return list(islice(tried, MOST))


def check_products(*multiplied: TensorSpec) -> None:
    """Raise :class:`Refused` where tensor cores do not multiply such tensors."""
    if not has_matrix_products():
        raise Refused("a GPU without products of such matrices")
    if {tensor.dtype for tensor in multiplied} not in ({torch.float16}, {torch.bfloat16}):
        raise Refused("tensor cores multiply 16-bit numbers of one dtype")


def _shared_out(vectors: int, warps: int) -> bool:
    """Whether all warps have as many channels, and a thread one vector."""
    return LANES * vectors % warps == 0 and WARP * warps % vectors == 0


def room_for(wide: int) -> int:
    """Of how many places sixteen have room for a row of some."""
    return 1 << (wide - 1).bit_length()


def _check(region: Region) -> None:
    """Raise :class:`Refused` for what is no such product."""
    conv, (_, columns) = region.conv, region.taps_shape
    check_products(region.x, region.taps)
    if (*conv.stride, *conv.dilation) != (1, 1, 1, 1):
        raise Refused("a band has every tap and every place")
    if region.lanes % LANES or columns >= PAIRS:
        raise Refused("a band of eight columns holds at most seven taps")


@dataclass(frozen=True)
class _Layout:
    """How a block's part of an image lies in shared memory: the pieces of eight columns of a row,
    an image, a channel and a vector of channels; and of how many places a row has room."""

    row: int
    image: int
    channel: int
    vector: int
    room: int
    shared_bytes: int

    @classmethod
    def of(cls, region: Region, schedule: Banded) -> _Layout:
        """The layout of which sixteen places are read with the fewest conflicts."""
        taps = region.taps_shape[0]
        rows, room = schedule.high + taps - 1, room_for(schedule.wide)
        groups = schedule.high // schedule.rows

        def conflicts(row: int, image: int) -> int:
            found = 0
            for first in range(0, PLACES, ACROSS):
                banks: dict[int, set[int]] = {}
                for place in range(first, first + ACROSS):
                    left, x = divmod(place, room)
                    n, group = divmod(min(left, schedule.images * groups - 1), groups)
                    at = n * image + group * schedule.rows * row + min(x, schedule.wide - 1)
                    banks.setdefault(at % ACROSS, set()).add(at)
                found += max(map(len, banks.values()))
            return found

        least = schedule.wide + 1
        tried = [(row, rows * row + more) for row in range(least, least + 2) for more in (0, 1)]
        row, image = min(tried, key=lambda each: (conflicts(*each), each))
        results = 2 * schedule.wide * schedule.high  # float32 in place of what they are made of
        channel = schedule.images * max(image, results)
        vector = pieces_of_a_vector(channel, schedule.vectors)
        numbers = schedule.vectors * LANES * taps * PAIRS * 4
        return cls(row, image, channel, vector, room, 16 * schedule.vectors * vector + numbers)


def pieces_of_a_vector(channel: int, vectors: int) -> int:
    """The pieces from a vector of channels to the next, of which a channel takes so many: lanes of
    vectors side by side write to different banks."""
    return LANES * channel + (-(-BANKS // (4 * vectors)) if vectors > 1 else 0)


def pairs_in_turn(pairs: int, threads: int) -> list[str]:
    """Lines that deal pairs of columns to threads, all of which have some lines of an image or, if
    there are more, all lines; what follows is a block of their own."""
    if pairs >= threads:
        return [
            "const u32 begin = 0u;",
            f"for (u32 unit = threadIdx.x; unit < {pairs}u; unit += {threads}u) {{",
        ]
    return [
        f"const u32 unit = threadIdx.x % {pairs}u, begin = threadIdx.x / {pairs}u;",
        f"if (begin < {threads // pairs}u) {{",
    ]


def side_by_side(channel: int) -> list[str]:
    """Lines that write two pixels of eight channels, ``one[b]`` and ``two[b]``, to ``at``, where a
    channel has so many pieces."""
    return [
        "#pragma unroll",
        f"for (int j = 0; j < {LANES // 2}; ++j) {{",
        "  const u32 a = ((const u32*)&one[b])[j], c = ((const u32*)&two[b])[j];",
        f"  at[{8 * channel} * j] = lows(a, c);",
        f"  at[{8 * channel} * j + {4 * channel}] = highs(a, c);",
        "}",
    ]


def clocks(spec: GraphSpec, schedule: Banded, processors: int) -> float:
    """About how many clocks a schedule takes, as :func:`.depthwise.clocks` counts them."""
    return rules().depthwise_band_clocks / 100 * _cost(region_of(spec), schedule, processors)


def _cost(region: Region, schedule: Banded, processors: int) -> float:
    """About how many waves of shared memory a multiprocessor has."""
    count, channels, height, width = region.conv.shape
    taps, many = region.taps_shape[0], LANES * schedule.vectors
    blocks = -(-count // schedule.images) * -(-height // schedule.high) * channels // many
    blocks *= -(-width // (ACROSS * schedule.wide))
    read = 4 * (taps + schedule.rows - 1) + 2 * taps + 4 * schedule.rows
    results = schedule.images * schedule.high * schedule.wide * ACROSS
    written = schedule.images * (schedule.high + taps - 1) * (schedule.wide + 1) * ACROSS
    lost = max(1.0, 4 / schedule.vectors)  # runs that are read and written at a time, of 64 bytes
    waves = read + (results + 2 * written) * lost / WARP
    return max(1.0, blocks / processors) * many * waves


def write(spec: GraphSpec, schedule: Banded) -> Source:
    """The kernel of a region. Raises :class:`Refused`."""
    region = region_of(spec)
    _check(region)
    many = LANES * schedule.vectors
    if min(vars(schedule).values()) < 1 or schedule.high % schedule.rows:
        raise Refused("a schedule without places")
    if schedule.images * schedule.high // schedule.rows * room_for(schedule.wide) > PLACES:
        raise Refused("more than sixteen places")
    if region.conv.shape[1] % many or not _shared_out(schedule.vectors, schedule.warps):
        raise Refused(f"{schedule.vectors} vectors of channels")
    if _Layout.of(region, schedule).shared_bytes > SHARED_BYTES:
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
        self._layout = _Layout.of(region, schedule)
        self._kind = MEMORY[region.x.dtype]

    def source(self) -> Source:
        """Write it."""
        region, schedule = self._region, self._banded
        self._known[id(region.conv), region.index] = Code("made[j]", 2)
        before = self._of_channels()
        self._written()
        count, channels, height, width = region.conv.shape
        beside = -(-width // (ACROSS * schedule.wide))
        below = -(-height // schedule.high)
        many = LANES * schedule.vectors
        parts = channels // many
        blocks = -(-count // schedule.images) * beside * below * parts
        body = [
            f"const u32 first = blockIdx.x % {parts}u * {many}u, at = blockIdx.x / {parts}u;",
            f"const u32 right = at % {beside}u, down = at / {beside}u % {below}u;",
            f"const u32 n0 = at / {beside * below}u * {schedule.images}u;",
            "const u32 warp = threadIdx.x / 32u, member = threadIdx.x % 32u;",
            f"const u32 part = threadIdx.x % {schedule.vectors}u, k = first + part * {LANES}u;",
            *self._pairs(),
            *self._turned(),
            *before,
            "__syncthreads();",
            *self._multiplied(),
            "__syncthreads();",
            *self._behind(),
        ]
        made = self._kernel(body, blocks, WARP * schedule.warps, (PRODUCTS,))
        return replace(made, shared_bytes=self._layout.shared_bytes)

    def _origin(self) -> tuple[int, int]:
        """How far the windows of the first result reach over the image: above and to the left."""
        conv, taps = self._region.conv, self._region.taps_shape
        if not conv.transposed:
            return conv.padding
        return taps[0] - 1 - conv.padding[0], taps[1] - 1 - conv.padding[1]

    def _pairs(self) -> Iterator[str]:
        """Pairs of neighbouring taps of the block's channels, from the one that ends with the first
        tap: all that a band is made of beside zeros."""
        taps, (rows, columns) = self._region.taps, self._region.taps_shape
        many, threads = LANES * self._banded.vectors, WARP * self._banded.warps
        c, _, r, s = taps.stride
        row, column = "r", "tap"
        if self._region.conv.transposed:
            row, column = f"({rows - 1}u - r)", f"({columns - 1}u - tap)"
        at = self._banded.vectors * self._layout.vector
        yield DYNAMIC
        yield f"u32 (*const pairs)[{rows}][{PAIRS}] = (u32 (*)[{rows}][{PAIRS}])(shared + {at}u);"
        yield f"for (u32 i = threadIdx.x; i < {many * rows * PAIRS}u; i += {threads}u) {{"
        yield f"  const u32 c = i % {many}u, r = i / {many * PAIRS}u;"
        yield f"  const u32 d = i / {many}u % {PAIRS}u;"
        yield "  u32 pair = 0u;"
        yield "  #pragma unroll"
        yield "  for (u32 h = 0; h < 2; ++h) {"
        yield "    const u32 tap = d + h - 1u;"
        where = f"(first + c) * {c}u + {row} * {r}u + {column} * {s}u"
        yield f"    if (tap < {columns}u)"
        yield f"      pair |= (u32)*(const unsigned short*)&p{self._places[taps.name]}[{where}]"
        yield "        << 16u * h;"
        yield "  }"
        yield "  pairs[c][r][d] = pair;"
        yield "}"

    def _turned(self) -> Iterator[str]:
        """Read the block's part of an image, and lay its columns side by side.

        A thread has two columns of some lines.
        """
        region, schedule, x, layout = self._region, self._banded, self._region.x, self._layout
        rows, columns = region.taps_shape
        rows += schedule.high - 1
        lines, threads = schedule.images * rows, WARP * schedule.warps
        units = (schedule.wide + 1) * ACROSS // 2 * schedule.vectors
        needed = ACROSS * schedule.wide + columns - 1
        at_once = max(1, threads // units)
        own = -(-lines // at_once)
        together = -(-own // -(-own // TOGETHER))
        top, left = self._origin()
        n, _, h, w = x.stride
        count, _, height, width = x.shape
        yield f"const int y0 = (int)(down * {schedule.high}u) - {top};"
        yield f"const int x0 = (int)(right * {ACROSS * schedule.wide}u) - {left};"
        yield from pairs_in_turn(units, threads)
        yield f"  const u32 pair = unit / {schedule.vectors}u;"
        yield "  const int x = x0 + 2 * (int)pair;"
        also = f" && 2u * pair < {needed}u" if needed < ACROSS * (schedule.wide + 1) else ""
        yield f"  const bool first_in = (u32)x < {width}u{also};"
        yield f"  const bool second_in = (u32)(x + 1) < {width}u{also};"
        yield f"  const auto* const from = p{self._places[x.name]} + ((i64)n0 * {n} + (i64)y0 * {h}"
        yield f"    + (i64)x * {w} + first + part * {LANES}u);"
        yield f"  u32* const to = (u32*)(shared + part * {layout.vector}u) + pair;"
        yield f"  for (u32 line = begin; line < {lines}u; line += {together * at_once}u) {{"
        yield f"    vec<{self._kind}, {LANES}> one[{together}], two[{together}];"
        yield "    #pragma unroll"
        yield f"    for (u32 b = 0; b < {together}; ++b) {{"
        yield f"      const u32 l = line + b * {at_once}u;"
        in_image, ahead = "l", f"(i64)l * {h}"
        tests = [f"l < {lines}u"] if lines % (together * at_once) else []
        if schedule.images > 1:
            yield f"      const u32 n = l / {rows}u, y = l % {rows}u;"
            in_image, ahead = "y", f"(i64)n * {n} + (i64)y * {h}"
            tests += [f"n0 + n < {count}u"] if count % schedule.images else []
        tests.append(f"(u32)(y0 + (int){in_image}) < {height}u")
        yield f"      const bool in = {' && '.join(tests)};"
        yield f"      const auto* const p = from + ({ahead});"
        yield f"      one[b] = load_if<{LANES}>(in && first_in, p);"
        yield f"      two[b] = load_if<{LANES}>(in && second_in, p + {w});"
        yield "    }"
        yield "    #pragma unroll"
        yield f"    for (u32 b = 0; b < {together}; ++b) {{"
        yield f"      const u32 l = line + b * {at_once}u;"
        if lines % (together * at_once):
            yield f"      if (l >= {lines}u) continue;"
        where = f"l * {4 * layout.row}u"
        if schedule.images > 1:
            where = f"l / {rows}u * {4 * layout.image}u + l % {rows}u * {4 * layout.row}u"
        yield f"      u32* const at = to + ({where});"
        yield from ("      " + line for line in side_by_side(layout.channel))
        yield "    }"
        yield "  }"
        yield "}"

    def _places_of_a_thread(self) -> Iterator[str]:
        """The place that a thread reads, and the two that it has results of."""
        schedule, layout = self._banded, self._layout
        groups = schedule.high // schedule.rows
        lines = schedule.images * groups
        yield "const u32 g = member / 4u, t = member % 4u;"
        yield "const u32 ahead = 2u * t + 1u >= g ? 0xffffffffu : 0u;  // of the band's first half"
        yield "u32 read, tx[2], ty[2], tn[2];"
        yield "bool there[2];"
        yield "#pragma unroll"
        yield "for (int half = 0; half < 3; ++half) {  // of the results, and then what it reads"
        yield f"  const u32 place = half < 2 ? g + 8u * half : member % {PLACES}u;"
        yield f"  const u32 px = place % {layout.room}u, line = place / {layout.room}u;"
        yield f"  const u32 x = px < {schedule.wide}u ? px : {schedule.wide - 1}u;"
        yield f"  const u32 own = line < {lines}u ? line : {lines - 1}u;"
        yield f"  const u32 y = own % {groups}u * {schedule.rows}u, n = own / {groups}u;"
        yield "  if (half < 2) {"
        yield "    tx[half] = x, ty[half] = y, tn[half] = n;"
        yield f"    there[half] = px < {schedule.wide}u && line < {lines}u;"
        yield "  } else {"
        yield f"    read = n * {layout.image}u + y * {layout.row}u + x + member / {PLACES}u;"
        yield "  }"
        yield "}"

    def _multiplied(self) -> Iterator[str]:
        """Multiply the places of each channel of a warp, and lay results where these were."""
        schedule, layout, kind = self._banded, self._layout, self._kind
        taps, many = self._region.taps_shape[0], LANES * schedule.vectors
        rows, wide = schedule.rows, ACROSS * schedule.wide
        yield from self._places_of_a_thread()
        yield "#pragma unroll 2"
        yield f"for (u32 c = warp; c < {many}u; c += {schedule.warps}u) {{"
        where = f"c * {layout.channel}u"
        if extra := layout.vector - LANES * layout.channel:
            where += f" + c / {LANES}u * {extra}u"
        yield f"  vec<u32, 4>* const plane = shared + ({where});"
        yield f"  const u32* const band = &pairs[c][0][(2u * t + 9u - g) % {PAIRS}u];"
        yield f"  u32 taps[{taps}];"
        yield "  #pragma unroll"
        yield f"  for (int r = 0; r < {taps}; ++r) taps[r] = band[r * {PAIRS}];"
        yield f"  float sum[{rows}][4] = {{}};"
        yield "  #pragma unroll"
        yield f"  for (int i = 0; i < {taps + rows - 1}; ++i) {{"
        yield "    u32 a[4];"
        yield f"    load_rows(a, plane + (read + i * {layout.row}));"
        yield "    #pragma unroll"
        yield f"    for (int q = 0; q < {rows}; ++q)"
        yield f"      if (i >= q && i - q < {taps})"
        sums = ", ".join(f"sum[q][{e}]" for e in range(4))
        yield f"        multiply({kind}(), {sums}, a, taps[i - q] & ahead, taps[i - q] & ~ahead);"
        yield "  }"
        yield "  bool nan = false;"
        yield "  #pragma unroll"
        yield f"  for (int i = 0; i < {4 * rows}; ++i)"
        yield "    nan |= sum[i / 4][i % 4] != sum[i / 4][i % 4];"
        yield "  if (nan) {  // of windows alone, without zeros beside them"
        yield "    #pragma unroll"
        yield f"    for (int i = 0; i < {4 * rows}; ++i) sum[i / 4][i % 4] = 0.0f;"
        yield "    #pragma unroll 1"
        yield f"    for (u32 r = 0; r < {taps}u; ++r)"
        yield "      #pragma unroll 1"
        yield f"      for (u32 s = 0; s < {self._region.taps_shape[1]}u; ++s) {{"
        yield f"        const float tap = get(*(const {kind}*)&pairs[c][r][s + 1u]);"
        yield "        #pragma unroll"
        yield f"        for (int i = 0; i < {4 * rows}; ++i) {{"
        yield "          const u32 half = i / 2 % 2;"
        where = f"tn[half] * {layout.image}u + (ty[half] + i / 4 + r) * {layout.row}u"
        yield f"          sum[i / 4][i % 4] += tap * get(((const {kind}*)(plane + ({where})))"
        yield f"            [tx[half] * {ACROSS}u + 2u * t + i % 2 + s]);"
        yield "        }"
        yield "      }"
        yield "  }"
        yield "  __syncwarp();"
        yield "  #pragma unroll"
        yield f"  for (int i = 0; i < {2 * rows}; ++i) {{"
        yield "    const u32 half = i % 2, q = i / 2;"
        yield "    const vec<float, 2> two = {sum[q][2 * half], sum[q][2 * half + 1]};"
        line = f"(tn[half] * {schedule.high}u + ty[half] + q) * {wide}u"
        yield f"    float* const to = (float*)plane + ({line} + tx[half] * {ACROSS}u + 2u * t);"
        yield "    if (there[half]) *(vec<float, 2>*)to = two;"
        yield "  }"
        yield "}"

    def _behind(self) -> list[str]:
        """What is computed of the sums, and written."""
        schedule, layout = self._banded, self._layout
        count, _, height, width = self._region.conv.shape
        wide = ACROSS * schedule.wide
        own, threads = min(wide, width), WARP * schedule.warps
        total = schedule.images * schedule.high * own * schedule.vectors
        n = f"n0 + line / {schedule.high}u" if schedule.images > 1 else "n0"
        y = f"line % {schedule.high}u" if schedule.images > 1 else "line"
        tests = [f"h >= {height}u"] if height % schedule.high else []
        tests += [f"w >= {width}u"] if width % own else []
        tests += [f"n >= {count}u"] if count % schedule.images else []
        return [
            f"for (u32 i = threadIdx.x; i < {total}u; i += {threads}u) {{",
            f"  const u32 x = i / {schedule.vectors}u % {own}u;",
            f"  const u32 line = i / {schedule.vectors * own}u;",
            f"  const u32 n = {n}, h = down * {schedule.high}u + {y};",
            f"  const u32 w = right * {wide}u + x;",
            f"  if ({' || '.join(tests)}) continue;" if tests else "",
            f"  float made[{LANES}];",
            "  #pragma unroll",
            f"  for (int j = 0; j < {LANES}; ++j)",
            f"    made[j] = ((const float*)(shared + part * {layout.vector}u + j * "
            f"{layout.channel}))",
            f"      [line * {wide}u + x];",
            *("  " + line for line in self._lines),
            "}",
        ]
