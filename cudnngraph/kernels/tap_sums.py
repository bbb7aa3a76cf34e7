"""Regions that are the gradient of a depthwise convolution's taps, and their schedules.

:mod:`~cudnngraph.kernels.depthwise_gradient` writes the kernels.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import zip_longest
from math import gcd

import torch

from ..device.rules import rules
from ..ir.spec import GraphSpec, Node, TensorSpec
from .rows import MOST_THREADS, VECTOR_BYTES, WARP
from .tape import Refused

OP = "conv_wgrad"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHARED_BYTES = 48 << 10  # that a block has without asking
MOST_ELEMENTS = 1 << 31  # that an index of 32 bits may count
BITS = 32  # of a number that says which elements of a row there are
THREADS = 128  # of a block, about
SEGMENT_BYTES = 64  # of neighbouring channels, that a block reads together at best
REGISTERS = 64 << 10  # of a multiprocessor, of every GPU that cuDNN runs on
OTHERS = 36  # registers of a thread beside those for what it holds, about
HELD = 160  # registers of a thread for what it holds, at most
UNROLLED = 3584  # products of a tile, which are written out one by one
MEASURED, MOST = 3, 8  # tiles that are measured of each number of lanes, and of all

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
class Region:
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

    @property
    def count(self) -> int:
        """The number of taps of all channels."""
        return self.kernel[0] * self.kernel[1] * self.channels

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


@dataclass(frozen=True)
class Dealt:
    """How a schedule deals a region out.

    ``groups`` of threads have all rows of taps; a block has ``threads``, and ``deep`` tiles at a
    time. ``parts`` of blocks have all channels, ``chunks`` all tiles in so many ``steps``.
    """

    groups: int
    deep: int
    threads: int
    parts: int
    steps: int
    chunks: int


def deal(region: Region, schedule: TapSums) -> Dealt:
    """How a schedule deals a region out. Raises :class:`Refused`."""
    lanes, taps, vectors = schedule.lanes, schedule.taps, schedule.vectors
    if min(astuple(schedule)) < 1 or region.lanes % lanes:
        raise Refused(f"{lanes} lanes of channels")
    groups = region.groups(taps)
    deep = schedule.threads // (vectors * groups)
    if not deep or taps > region.kernel[0]:
        raise Refused(f"{taps} rows of taps, {vectors} vectors, too few threads")
    threads = deep * vectors * groups
    _, length, along = region.line(lanes, schedule.wide)
    if length // along > BITS:
        raise Refused("rows of more loads than a number has bits")
    if 4 * region.kernel[1] * lanes * threads > SHARED_BYTES:
        raise Refused("sums that shared memory does not hold")
    parts = -(-region.channels // (lanes * vectors))
    _, _, tiles = region.grid(schedule.wide, schedule.high)
    steps = -(-tiles // deep)
    chunks = max(1, min(steps, schedule.blocks // parts))
    if region.count * chunks >= MOST_ELEMENTS:
        raise Refused("sums that need an index of 64 bits")
    return Dealt(groups, deep, threads, parts, steps, chunks)


def has_gradient(spec: GraphSpec) -> bool:
    """Whether a region has the gradient of a convolution's taps."""
    return any(node.op == OP for node in spec.nodes)


def region_of(spec: GraphSpec) -> Region:
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
    return Region(node, dy, x, dw)


def schedules(spec: GraphSpec, processors: int) -> list[TapSums]:
    """Schedules that are worth measuring, the one by rule first. Raises :class:`Refused`.

    By rule a thread takes few instructions for a product, while what it holds stays in registers.
    """
    region = region_of(spec)
    _, _, height, width = region.dy.shape
    rows = region.kernel[0]
    found: dict[TapSums, float] = {}
    for lanes in sorted({max(1, region.lanes // part) for part in (1, 2, 4, 8)}):
        for taps in sorted({rows, -(-rows // 2), 1}):
            for wide in _sizes(width, (1, 2, 4, 7, 8)):
                for high in _sizes(height, (1, 2, 4, 7, 8)):
                    cost = _cost(region, (lanes, taps, wide, high), processors)
                    dealt = _dealt(region, (lanes, taps, wide, high), processors)
                    if cost is not None and _goes(region, dealt):
                        found[dealt] = cost
    if not found:
        raise Refused("more taps than a thread holds")
    ranked = sorted(found, key=lambda each: (found[each], -each.lanes, each.taps))
    of_lanes = (
        [each for each in ranked if each.lanes == lanes][:MEASURED]
        for lanes in dict.fromkeys(each.lanes for each in ranked)
    )
    first, *others = (each for some in zip_longest(*of_lanes) for each in some if each)
    varied = [each for each in _others_of(first) if _goes(region, each)]
    return [first, *varied, *others[: MOST - 1]]


def _goes(region: Region, schedule: TapSums) -> bool:
    """Whether there is a kernel by a schedule."""
    try:
        return bool(deal(region, schedule))
    except Refused:
        return False


def _others_of(first: TapSums) -> list[TapSums]:
    """Other numbers of threads and blocks to measure; of one block for all tiles there is one
    launch."""
    at_once = first.blocks // first.resident
    doubled = first.threads <= THREADS and first.resident % 2 == 0
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


def _sizes(extent: int, wanted: tuple[int, ...]) -> list[int]:
    """Sizes of tiles along an extent."""
    return sorted({min(each, extent) for each in wanted})


def _held(region: Region, tile: _Tile) -> int:
    """The registers of a thread for what it holds: sums, a tile as it is in memory, and a row of
    what was convolved."""
    lanes, taps, wide, high = tile
    _, length, _ = region.line(lanes, wide)
    held = lanes * high * wide * region.dy.dtype.itemsize // 4
    return lanes * (taps * region.kernel[1] + length) + held


def _resident(region: Region, tile: _Tile) -> int:
    """About how many blocks a multiprocessor has at a time."""
    return max(1, REGISTERS // (THREADS * (_held(region, tile) + OTHERS)))


def _cost(region: Region, tile: _Tile, processors: int) -> float | None:
    """About how many instructions a place takes for each channel, None for too long a text."""
    lanes, taps, wide, high = tile
    _, _, height, width = region.dy.shape
    columns, groups, places = region.kernel[1], region.groups(taps), wide * high
    held = _held(region, tile)
    if taps * columns * places * lanes > UNROLLED or held > HELD:
        return None
    _, length, along = region.line(lanes, wide)
    rows = len(region.met(taps, high))
    line = min(length, wide * columns)
    beside, below, tiles = region.grid(wide, high)
    loads = rows * length / along + places / region.along(region.dy, lanes, wide)
    read = _OF_A_NUMBER * (rows * line + places) + _OF_A_LOAD * loads / lanes
    units = tiles * groups * -(-region.channels // lanes)
    resident = _resident(region, tile)
    steps = units / (processors * THREADS * resident)
    summed = _OF_A_SUM * taps * columns / max(1.0, steps)
    cost = groups * (taps * columns + (read + summed) / places)
    cost *= beside * wide / width * below * high / height
    return cost * math.ceil(steps) / steps * (1 + rules().depthwise_sums_wait_blocks / resident)


def _dealt(region: Region, tile: _Tile, processors: int) -> TapSums:
    """The schedule of a tile by rule."""
    lanes, taps, wide, high = tile
    threads, resident = THREADS, _resident(region, tile)
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

    even, tried = rules().depthwise_sums_even / 100, range(1, rules().depthwise_sums_most_waves + 1)
    blocks = max(tried, key=lambda waves: (min(even, busy(waves)), -waves)) * at_once
    return TapSums(lanes, taps, wide, high, vectors, threads, resident, blocks)


def _vectors(count: int, size: int) -> int:
    """The vectors of channels of a block: few idle threads, and much read together."""

    def lost(each: int) -> tuple[float, int]:
        team = THREADS // each * each
        idle = -(-team // WARP) * WARP / team * (-(-count // each) * each / count)
        return idle / min(1.0, each * size / SEGMENT_BYTES), -each

    return min(range(1, min(WARP, count) + 1), key=lost)
