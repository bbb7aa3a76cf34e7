"""Kernels of the gradient of a depthwise convolution's taps.

A thread has lanes of channels that lie side by side, and rows of taps, whose sums stay in its
registers. It goes through tiles of places: what comes back for a tile is read once, and each row of
what was convolved once. A block has neighbouring tiles and adds up its threads' sums. A second
launch adds up those of the blocks. Both have a fixed order, so results are the same at every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from math import gcd

import torch

from ..device.rules import rules
from ..ir.spec import GraphSpec, Node, TensorSpec
from .rows import MOST_THREADS, VECTOR_BYTES, WARP
from .scalars import FUNCTIONS, MEMORY, PRELUDE
from .source import ARGS, NAME, Launch, Source
from .tape import Refused

OP = "conv_wgrad"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHARED_BYTES = 48 << 10  # that a block has without asking
MOST_ELEMENTS = 1 << 31  # that an index of 32 bits may count
THREADS = 256
DEEP = 32  # threads that add up the blocks' sums of one tap
SEGMENT_BYTES = 64  # of neighbouring channels, that a block reads together at best
REGISTERS = 64 << 10  # of a multiprocessor, of every GPU that cuDNN runs on
OTHERS = 40  # registers of a thread beside the numbers that it holds, about
HELD = 128  # numbers of a thread: sums, a tile, and a row of what was convolved
UNROLLED = 2048  # products of a tile, which are written out one by one
MEASURED, MOST = 3, 8  # tiles that are measured of each number of lanes, and of all
EVEN = 0.9  # of all multiprocessors' places for blocks, which are enough
WAVES = 4  # of blocks, at most, by which all multiprocessors get as many

# About how many instructions it takes beside one for each product, to rank schedules.
_OF_A_NUMBER, _OF_A_LOAD, _OF_A_SUM = 1.5, 3.0, 4.0


@dataclass(frozen=True)
class TapSums:
    """A schedule: channels of a thread and its rows of taps, the width and height of its tiles.

    Then the vectors of channels of a block, about how many threads it has, how many blocks a
    multiprocessor has at a time, and about how many there are in all.
    """

    lanes: int
    taps: int
    wide: int
    high: int
    vectors: int
    threads: int
    resident: int
    blocks: int


@dataclass(frozen=True)
class _Region:
    """A region of one such gradient."""

    node: Node
    dy: TensorSpec
    x: TensorSpec
    dw: TensorSpec

    @cached_property
    def lanes(self) -> int:
        """The most channels that lie side by side in both operands."""
        if any(tensor.stride[1] != 1 for tensor in (self.dy, self.x)):
            return 1
        most = VECTOR_BYTES // max(2, self.x.dtype.itemsize)
        return gcd(most, self.channels, *_others(self.dy, 1), *_others(self.x, 1))

    @property
    def channels(self) -> int:
        """The number of channels."""
        return self.x.shape[1]

    @cached_property
    def kernel(self) -> tuple[int, int]:
        """The rows and columns of taps."""
        rows, columns = self.node.attr("kernel")
        return rows, columns

    @cached_property
    def stride(self) -> tuple[int, int]:
        """The stride, down and to the right."""
        down, right = self.node.attr("stride")
        return down, right

    @cached_property
    def dilation(self) -> tuple[int, int]:
        """The distance of taps, down and to the right."""
        by_row, by_column = self.node.attr("dilation")
        return by_row, by_column

    @cached_property
    def padding(self) -> tuple[int, int]:
        """The padding above and at the left."""
        (above, _), (left, _) = self.node.attr("padding")
        return above, left

    def groups(self, taps: int) -> int:
        """Into how many parts of so many rows the taps fall."""
        return -(-self.kernel[0] // taps)

    def grid(self, wide: int, high: int) -> tuple[int, int, int]:
        """The numbers of tiles beside each other, below each other, and of all images."""
        beside, below = -(-self.dy.shape[3] // wide), -(-self.dy.shape[2] // high)
        return beside, below, self.dy.shape[0] * beside * below

    def met(self, taps: int, high: int) -> dict[int, list[tuple[int, int]]]:
        """The rows of what was convolved that a tile meets: for each the rows of the tile, and
        those of taps."""
        found: dict[int, list[tuple[int, int]]] = {}
        for place in range(high):
            for tap in range(taps):
                at = place * self.stride[0] + tap * self.dilation[0]
                found.setdefault(at, []).append((place, tap))
        return dict(sorted(found.items()))

    def line(self, lanes: int, wide: int) -> tuple[int, int, int]:
        """A row of what was convolved, of a tile: where it begins beside the tile's first place,
        its length, and the elements of a load."""
        (_, right), left = self.stride, self.padding[1]
        along = self.along(self.x, lanes, wide * right)
        first = -left // along * along
        last = (wide - 1) * right + (self.kernel[1] - 1) * self.dilation[1] - left
        return first, -(-(last + 1 - first) // along) * along, along

    def along(self, tensor: TensorSpec, lanes: int, step: int) -> int:
        """How many neighbours of a row are read at once, of tiles a step apart."""
        if lanes > 1 or tensor.stride[3] != 1:
            return 1
        most = VECTOR_BYTES // tensor.dtype.itemsize
        return gcd(most, tensor.shape[3], step, *_others(tensor, 3))


def _others(tensor: TensorSpec, dim: int) -> list[int]:
    """The strides of the other dims, as far as one is taken."""
    dims = (at for at, extent in enumerate(tensor.shape) if extent > 1 and at != dim)
    return [tensor.stride[at] for at in dims]


def has_gradient(spec: GraphSpec) -> bool:
    """Whether a region has the gradient of a convolution's taps."""
    return any(node.op == OP for node in spec.nodes)


def region_of(spec: GraphSpec) -> _Region:
    """The region as such a kernel sees it. Raises :class:`Refused`."""
    if len(spec.nodes) != 1:
        raise Refused("a gradient of taps with other ops")
    (node,) = spec.nodes
    dy, x, dw = (spec.tensors[name] for name in (*node.operands, *node.results))
    if len(x.shape) != 4 or not x.shape[1] == node.attr("groups") == dy.shape[1]:
        raise Refused(f"no kernel is generated for {node.op} but for depthwise ones of images")
    if any(tensor.numel == 0 for tensor in (dy, x, dw)):
        raise Refused("a tensor is empty")
    if any(tensor.extent >= MOST_ELEMENTS for tensor in (dy, x, dw)):
        raise Refused("a tensor that needs an index of 64 bits")
    if any(tensor.dtype not in DTYPES for tensor in (dy, x, dw)):
        raise Refused("a gradient of taps of another dtype than float32, float16 and bfloat16")
    return _Region(node, dy, x, dw)


def schedules(spec: GraphSpec, processors: int) -> list[TapSums]:
    """Schedules that are worth measuring, the one by rule first. Raises :class:`Refused`.

    By rule a thread takes few instructions for a product, while what it holds stays in registers.
    """
    region = region_of(spec)
    _, _, height, width = region.dy.shape
    rows = region.kernel[0]
    found: dict[TapSums, float] = {}
    for lanes in {max(1, region.lanes // part) for part in (1, 2, 4, 8)}:
        for taps in {rows, -(-rows // 2), 1}:
            for wide in _sizes(width, (1, 2, 4, 7, 8)):
                for high in _sizes(height, (1, 2, 4)):
                    cost = _cost(region, (lanes, taps, wide, high), processors)
                    dealt = _dealt(region, (lanes, taps, wide, high), processors)
                    if cost is not None and _is_written(spec, region, dealt):
                        found[dealt] = cost
    if not found:
        raise Refused("more taps than a thread holds")
    ranked = sorted(found, key=lambda each: (found[each], -each.lanes, each.taps))
    of_lanes = (
        [each for each in ranked if each.lanes == lanes][:MEASURED]
        for lanes in dict.fromkeys(each.lanes for each in ranked)
    )
    first, *others = (each for some in zip_longest(*of_lanes) for each in some if each)
    varied = [each for each in _others_of(first) if _is_written(spec, region, each)]
    return [first, *varied, *others[: MOST - 1]]


def _is_written(spec: GraphSpec, region: _Region, schedule: TapSums) -> bool:
    """Whether there is a kernel by a schedule."""
    try:
        return bool(_Kernel(spec, region, schedule))
    except Refused:
        return False


def _others_of(first: TapSums) -> list[TapSums]:
    """Other numbers of threads and blocks to measure; of one block for all tiles there is one
    launch."""
    at_once = first.blocks // first.resident
    doubled = first.threads < THREADS and first.resident % 2 == 0
    threads, resident, blocks = (
        (2 * first.threads, first.resident // 2, first.blocks // 2)
        if doubled
        else (first.threads // 2, 2 * first.resident, 2 * first.blocks)
    )
    found = [
        replace(first, blocks=2 * first.blocks),
        replace(first, blocks=4 * first.blocks),
        replace(first, threads=threads, resident=resident, blocks=blocks),
        replace(first, blocks=1),
    ]
    if first.resident > 1:
        fewer = first.resident - 1
        found.append(replace(first, resident=fewer, blocks=at_once * fewer))
    return found


_Tile = tuple[int, int, int, int]  # lanes, rows of taps, width, height


def _sizes(extent: int, wanted: tuple[int, ...]) -> set[int]:
    """Sizes of tiles along an extent."""
    return {min(each, extent) for each in wanted}


def _held(region: _Region, tile: _Tile) -> int:
    """The numbers that a thread holds."""
    lanes, taps, wide, high = tile
    line = (wide - 1) * region.stride[1] + (region.kernel[1] - 1) * region.dilation[1] + 1
    return lanes * (taps * region.kernel[1] + high * wide + line)


def _cost(region: _Region, tile: _Tile, processors: int) -> float | None:
    """About how many instructions a place takes for each channel, None for too long a text."""
    lanes, taps, wide, high = tile
    _, _, height, width = region.dy.shape
    columns, groups, places = region.kernel[1], region.groups(taps), wide * high
    held = _held(region, tile)
    if taps * columns * places * lanes > UNROLLED or held > 2 * HELD:
        return None
    _, length, along = region.line(lanes, wide)
    rows = len(region.met(taps, high))
    line = min(length, wide * columns)
    beside, below, tiles = region.grid(wide, high)
    loads = rows * length / along + places / region.along(region.dy, lanes, wide)
    read = _OF_A_NUMBER * (rows * line + places) + _OF_A_LOAD * loads / lanes
    units = tiles * groups * -(-region.channels // lanes)
    threads = processors * THREADS * rules().kernel_blocks_per_sm
    summed = _OF_A_SUM * taps * columns / max(1.0, units / threads)
    cost = groups * (taps * columns + (read + summed) / places)
    cost *= beside * wide / width * below * high / height
    return cost * max(1.0, held / HELD) * max(1.0, threads / 2 / units)


def _dealt(region: _Region, tile: _Tile, processors: int) -> TapSums:
    """The schedule of a tile by rule."""
    lanes, taps, wide, high = tile
    threads = THREADS if 3 * _held(region, tile) <= 2 * HELD else THREADS // 2
    resident = max(1, REGISTERS // (threads * (_held(region, tile) + OTHERS)))
    resident = min(resident, MOST_THREADS // threads)
    groups, (_, _, tiles) = region.groups(taps), region.grid(wide, high)
    vectors = 1
    if region.x.stride[1] == 1:
        vectors = _vectors(region.channels // lanes, lanes * region.x.dtype.itemsize)
        vectors = min(vectors, max(1, threads // groups))
    else:  # channels lie apart: threads of one have neighbouring tiles, as many as there are
        while 2 * vectors <= region.channels and 2 * vectors * groups * tiles <= threads:
            vectors *= 2
    parts, at_once = -(-region.channels // (lanes * vectors)), resident * processors

    def busy(waves: int) -> float:
        made = max(1, waves * at_once // parts) * parts
        return made / (-(-made // at_once) * at_once)

    blocks = max(range(1, WAVES + 1), key=lambda waves: (min(EVEN, busy(waves)), -waves)) * at_once
    return TapSums(lanes, taps, wide, high, vectors, threads, resident, blocks)


def _vectors(count: int, size: int) -> int:
    """The vectors of channels of a block: few threads without any, and much read together."""

    def lost(each: int) -> tuple[float, int]:
        return -(-count // each) * each / count / min(1.0, each * size / SEGMENT_BYTES), -each

    return min(range(1, min(WARP, count) + 1), key=lost)


def write(spec: GraphSpec, schedule: TapSums) -> Source:
    """The kernel of a region. Raises :class:`Refused`."""
    return _Kernel(spec, region_of(spec), schedule).source()


class _Kernel:
    """The text of one kernel."""

    def __init__(self, spec: GraphSpec, region: _Region, schedule: TapSums) -> None:
        self._region, self._plan = region, schedule
        names = (*spec.inputs, *spec.outputs)
        self._places = {name: at for at, name in enumerate(names)}
        lanes, vectors = schedule.lanes, schedule.vectors
        self._groups = region.groups(schedule.taps)
        if min(schedule.__dict__.values()) < 1 or region.lanes % lanes:
            raise Refused(f"{lanes} lanes of channels")
        self._deep = schedule.threads // (vectors * self._groups)  # tiles of a block at a time
        if not self._deep or schedule.taps > region.kernel[0]:
            raise Refused(f"{schedule.taps} rows of taps, {vectors} vectors, too few threads")
        self._threads = self._deep * vectors * self._groups
        _, length, along = region.line(lanes, schedule.wide)
        if length // along > 32:
            raise Refused("rows of more loads than a number has bits")
        if 4 * region.kernel[1] * lanes * self._threads > SHARED_BYTES:
            raise Refused("sums that shared memory does not hold")
        self._parts = -(-region.channels // (lanes * vectors))
        _, _, tiles = region.grid(schedule.wide, schedule.high)
        self._steps = -(-tiles // self._deep)
        self._chunks = max(1, min(self._steps, schedule.blocks // self._parts))
        self._count = region.kernel[0] * region.kernel[1] * region.channels
        if self._count * self._chunks >= MOST_ELEMENTS:
            raise Refused("sums that need an index of 64 bits")

    def source(self) -> Source:
        """Write it."""
        places, blocks = len(self._places), self._parts * self._chunks
        args = f"{ARGS} {{ void* p[{places}]; }};"
        alone = self._chunks == 1
        names = [NAME] if alone else [f"{NAME}_{at}" for at in range(2)]
        body = [*self._begun(), *self._tiles(), *self._added_up(alone)]
        bounds = f"{self._threads}, {self._plan.resident}"
        texts = [self._function(names[0], body, bounds, alone)]
        launches = [Launch(names[0], blocks, self._threads)]
        if not alone:
            deep = min(DEEP, self._chunks)
            texts.append(self._function(names[1], self._last(deep), f"{WARP * deep}", alone))
            launches.append(Launch(names[1], -(-self._count // WARP), WARP * deep))
        text = "\n".join([PRELUDE, FUNCTIONS, args, *texts])
        several = () if alone else tuple(launches)
        held = 0 if alone else 4 * self._count * self._chunks
        return Source(text, blocks, self._threads, several, held)

    def _function(self, name: str, body: list[str], bounds: str, alone: bool) -> str:
        """A function, with the pointers that it needs."""
        text = "\n".join("  " + line for line in body if line)
        region = self._region
        pointers = [
            f"  {MEMORY[tensor.dtype]}* const {self._pointer(tensor)} = "
            f"({MEMORY[tensor.dtype]}*)a.p[{self._places[tensor.name]}];"
            for tensor in dict.fromkeys((region.dy, region.x, region.dw))
            if self._pointer(tensor) in text
        ]
        more = "" if alone else ", char* const w"
        return "\n".join(
            [
                f'extern "C" __global__ void __launch_bounds__({bounds})',
                f"{name}(const __grid_constant__ Args a{more}) {{",
                *pointers,
                "" if alone else "  float* const sums = (float*)w;",
                text,
                "}",
                "",
            ]
        )

    def _pointer(self, tensor: TensorSpec) -> str:
        return f"p{self._places[tensor.name]}"

    def _begun(self) -> Iterator[str]:
        """What a thread has: channels, rows of taps from ``r0`` on, and sums."""
        plan, region = self._plan, self._region
        vectors, groups = plan.vectors, self._groups
        yield f"const u32 k0 = blockIdx.x % {self._parts}u * {vectors * plan.lanes}u;"
        yield f"const u32 k = k0 + threadIdx.x % {vectors}u * {plan.lanes}u;"
        yield f"const u32 r0 = threadIdx.x / {vectors}u % {groups}u * {plan.taps}u;"
        yield f"const u32 chunk = blockIdx.x / {self._parts}u;"
        yield f"float sum[{plan.taps}][{region.kernel[1]}][{plan.lanes}] = {{}};"

    def _tiles(self) -> Iterator[str]:
        """The loop of a thread over its tiles."""
        plan, region = self._plan, self._region
        beside, below, tiles = region.grid(plan.wide, plan.high)
        (down, right), above = region.stride, region.padding[0]
        x, dy = region.x.stride, region.dy.stride
        own, more = divmod(self._steps, self._chunks)  # the first chunks have a step more
        spare = region.channels % (plan.vectors * plan.lanes)
        yield f"const u32 first = chunk * {own}u + lesser(chunk, {more}u);"
        yield f"const u32 steps = {own}u{f' + (chunk < {more}u)' if more else ''};"
        yield f"u32 end = lesser((first + steps) * {self._deep}u, {tiles}u);"
        if spare:
            yield f"if (k >= {region.channels}u) end = 0;"
        yield f"u32 at = first * {self._deep}u + threadIdx.x / {plan.vectors * self._groups}u;"
        yield "#pragma unroll 1"
        yield f"for (; at < end; at += {self._deep}u) {{"
        yield f"  const int w0 = at % {beside}u * {plan.wide}u;"
        yield f"  const int h0 = at / {beside}u % {below}u * {plan.high}u;"
        yield f"  const u32 n = at / {beside * below}u;"
        yield f"  const auto* const from = {self._pointer(region.x)} + (n * {x[0]}u + k * {x[1]}u);"
        yield f"  const auto* const back = {self._pointer(region.dy)} +"
        yield f"      (n * {dy[0]}u + k * {dy[1]}u + h0 * {dy[2]}u + w0 * {dy[3]}u);"
        yield f"  float tile[{plan.high}][{plan.wide}][{plan.lanes}];"
        yield from ("  " + line for line in self._tile())
        first, length, along = region.line(plan.lanes, plan.wide)
        yield f"  const int x0 = w0 * {right} + ({first});"
        if self._bordered():  # a bit for each load of a row: whether there is something
            yield "  u32 columns = 0u;"
            yield "  #pragma unroll"
            yield f"  for (int i = 0; i < {length // along}; ++i)"
            width = region.x.shape[3]
            yield f"    columns |= (u32)((u32)(x0 + i * {along}) < {width}u) << i;"
        yield f"  const int y0 = h0 * {down} + (int)r0 * {region.dilation[0]} - {above};"
        for row, meetings in region.met(plan.taps, plan.high).items():
            yield "  {"
            yield from ("    " + line for line in self._line(row))
            for place, tap in meetings:
                yield from ("    " + line for line in self._products(place, tap))
            yield "  }"
        yield "}"

    def _tile(self) -> Iterator[str]:
        """Read what comes back for a tile; what is behind the image's border stays open."""
        plan, dy = self._plan, self._region.dy
        along = self._region.along(dy, plan.lanes, plan.wide)
        yield "#pragma unroll"
        yield f"for (int h = 0; h < {plan.high}; ++h) {{"
        yield "  #pragma unroll"
        yield f"  for (int t = 0; t < {plan.wide}; t += {along}) {{"
        tests = [
            f"{first} + {name} < {extent}"
            for first, name, extent, size in (
                ("h0", "h", dy.shape[2], plan.high),
                ("w0", "t", dy.shape[3], plan.wide),
            )
            if extent % size
        ]
        where = f"back + h * {dy.stride[2]} + t * {dy.stride[3]}"
        yield from ("    " + line for line in self._read("tile[h]", "t", along, where, tests))
        yield "  }"
        yield "}"

    def _bordered(self) -> bool:
        """Whether rows of what was convolved reach over its left or right border."""
        plan, region = self._plan, self._region
        first, length, _ = region.line(plan.lanes, plan.wide)
        beside, _, _ = region.grid(plan.wide, plan.high)
        last = (beside - 1) * plan.wide * region.stride[1] + first + length
        return first < 0 or last > region.x.shape[3]

    def _line(self, row: int) -> Iterator[str]:
        """Read a row of what was convolved, zeros where there is none."""
        plan, region = self._plan, self._region
        _, length, along = region.line(plan.lanes, plan.wide)
        _, _, h, w = region.x.stride
        _, below, _ = region.grid(plan.wide, plan.high)
        rows = region.groups(plan.taps) * plan.taps - 1
        lowest = (below * plan.high - 1) * region.stride[0] + rows * region.dilation[0]
        tests = []
        if region.padding[0] or lowest >= region.x.shape[2]:
            tests.append(f"(u32)(y0 + {row}) < {region.x.shape[2]}u")
        if self._bordered():
            test = f"{tests[0]} ? columns : 0u" if tests else "columns"
            tests = [f"inside >> (i / {along}) & 1u"]
            yield f"const u32 inside = {test};"
        yield f"const auto* const row = from + (i64)(y0 + {row}) * {h} + (i64)x0 * {w};"
        yield f"float line[{length}][{plan.lanes}];"
        yield "#pragma unroll"
        yield f"for (int i = 0; i < {length}; i += {along}) {{"
        where = f"row + i * {w}"
        yield from ("  " + line for line in self._read("line", "i", along, where, tests))
        yield "}"

    def _read(self, to: str, at: str, along: int, where: str, tests: list[str]) -> Iterator[str]:
        """Read neighbours of a row, or lanes of channels, where tests say that there are some."""
        lanes = self._plan.lanes
        wide = along * lanes
        target = f"{to}[{at} + j / {lanes}][j % {lanes}]"
        if tests:
            yield "#pragma unroll"
            yield f"for (int j = 0; j < {wide}; ++j) {target} = 0.0f;"
            yield f"if ({' && '.join(tests)}) {{"
        yield f"const auto in = load<{wide}>({where});"
        yield "#pragma unroll"
        yield f"for (int j = 0; j < {wide}; ++j) {target} = get(in.at[j]);"
        if tests:
            yield "}"

    def _products(self, place: int, tap: int) -> Iterator[str]:
        """Add a row of a tile times that of what was convolved to the sums of a row of taps."""
        plan, region = self._plan, self._region
        (_, _, height, width), (rows, columns) = region.dy.shape, region.kernel
        first, *_ = region.line(plan.lanes, plan.wide)
        shift = -region.padding[1] - first
        tests = []
        if height % plan.high:
            tests.append(f"h0 + {place} < {height}")
        if rows % plan.taps:
            tests.append(f"r0 + {tap} < {rows}u")
        if tests:
            yield f"if ({' && '.join(tests)}) {{"
        yield "#pragma unroll"
        yield f"for (int t = 0; t < {plan.wide}; ++t) {{"
        if width % plan.wide:
            yield f"  if (w0 + t >= {width}) continue;"
        yield "  #pragma unroll"
        yield f"  for (int s = 0; s < {columns}; ++s)"
        yield "    #pragma unroll"
        yield f"    for (int j = 0; j < {plan.lanes}; ++j)"
        at = f"t * {region.stride[1]} + s * {region.dilation[1]} + {shift}"
        yield f"      sum[{tap}][s][j] += line[{at}][j] * tile[{place}][t][j];"
        yield "}" + "}" * bool(tests)

    def _added_up(self, alone: bool) -> Iterator[str]:
        """Add up the sums of a block, by rows of taps."""
        plan, region = self._plan, self._region
        (rows, columns), channels = region.kernel, region.channels
        lanes, vectors, groups = plan.lanes, plan.vectors, self._groups
        yield f"__shared__ float parts[{columns * lanes}][{self._threads}];"
        yield "#pragma unroll"
        yield f"for (int q = 0; q < {plan.taps}; ++q) {{"
        yield "  if (q) __syncthreads();"
        yield "  #pragma unroll"
        yield f"  for (int i = 0; i < {columns * lanes}; ++i)"
        yield f"    parts[i][threadIdx.x] = sum[q][i / {lanes}][i % {lanes}];"
        yield "  __syncthreads();"
        each = columns * lanes * vectors * groups
        yield f"  for (u32 i = threadIdx.x; i < {each}u; i += {self._threads}u) {{"
        yield f"    const u32 part = i % {vectors * groups}u, number = i / {vectors * groups}u;"
        yield "    float total = 0.0f;"
        yield f"    for (u32 p = 0; p < {self._deep}u; ++p)"
        yield f"      total += parts[number][p * {vectors * groups}u + part];"
        yield f"    const u32 r = part / {vectors}u * {plan.taps}u + q, s = number / {lanes}u;"
        yield f"    const u32 c = k0 + part % {vectors}u * {lanes}u + number % {lanes}u;"
        yield f"    if (r < {rows}u && c < {channels}u)"
        if alone:
            yield f"      {self._put('c', 'r', 's')}"
        else:
            at = f"(r * {columns}u + s) * {channels}u + c"
            yield f"      sums[chunk * {self._count}u + {at}] = total;"
        yield "  }"
        yield "}"

    def _put(self, c: str, r: str, s: str) -> str:
        dw = self._region.dw
        by, _, by_row, by_column = dw.stride
        at = f"{c} * {by}u + {r} * {by_row}u + {s} * {by_column}u"
        return f"put({self._pointer(dw)}[{at}], total);"

    def _last(self, deep: int) -> list[str]:
        """Add up the sums of all blocks, and write them."""
        count, channels, columns = self._count, self._region.channels, self._region.kernel[1]
        row, column = f"(tap / {columns}u)", f"(tap % {columns}u)"
        return [
            f"__shared__ float parts[{deep}][{WARP}];",
            f"const u32 own = threadIdx.x % {WARP}u, part = threadIdx.x / {WARP}u;",
            f"const u32 at = blockIdx.x * {WARP}u + own;",
            "float total = 0.0f;",
            f"if (at < {count}u) {{",
            "  #pragma unroll 4",
            f"  for (u32 i = part; i < {self._chunks}u; i += {deep}u)",
            f"    total += sums[i * {count}u + at];",
            "}",
            "parts[part][own] = total;",
            "__syncthreads();",
            f"if (part == 0 && at < {count}u) {{",
            "  total = 0.0f;",
            f"  for (u32 i = 0; i < {deep}u; ++i) total += parts[i][own];",
            f"  const u32 c = at % {channels}u, tap = at / {channels}u;",
            f"  {self._put('c', row, column)}",
            "}",
        ]
