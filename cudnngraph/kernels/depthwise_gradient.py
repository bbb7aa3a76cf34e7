"""Kernels of the gradient of a depthwise convolution's taps.

A thread has lanes of channels that lie side by side, and rows of taps, whose sums stay in its
registers. It goes through tiles of places: what comes back for a tile is read once, and each row of
what was convolved once. A block has neighbouring tiles and adds up its threads' sums. A second
launch adds up those of the blocks. Both have a fixed order, so results are the same at every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..ir.spec import GraphSpec, TensorSpec
from .rows import WARP
from .source import NAME, Launch, Source, function, pointer, text_of
from .tap_sums import Region, TapSums, deal, region_of

DEEP = 32  # threads that add up the blocks' sums of one tap


def write(spec: GraphSpec, schedule: TapSums) -> Source:
    """The kernel of a region. Raises :class:`Refused`."""
    return _Kernel(spec, region_of(spec), schedule).source()


class _Kernel:
    """The text of one kernel."""

    def __init__(self, spec: GraphSpec, region: Region, schedule: TapSums) -> None:
        self._region, self._plan = region, schedule
        self._dealt = deal(region, schedule)
        names = (*spec.inputs, *spec.outputs)
        self._places = {name: at for at, name in enumerate(names)}

    def source(self) -> Source:
        """Write it."""
        dealt = self._dealt
        body = [*self._begun(), *self._tiles(), *self._added_up(dealt.chunks == 1)]
        bounds = f"{dealt.threads}, {self._plan.resident}"
        first = Launch(NAME, dealt.parts * dealt.chunks, dealt.threads)
        return summed_up(self._region, self._places, body, bounds, first, dealt.chunks)

    def _pointer(self, tensor: TensorSpec) -> str:
        return f"p{self._places[tensor.name]}"

    def _begun(self) -> Iterator[str]:
        """What a thread has: channels, rows of taps from ``r0`` on, and sums."""
        plan, region = self._plan, self._region
        vectors, groups = plan.vectors, self._dealt.groups
        yield f"const u32 k0 = blockIdx.x % {self._dealt.parts}u * {vectors * plan.lanes}u;"
        yield f"const u32 k = k0 + threadIdx.x % {vectors}u * {plan.lanes}u;"
        yield f"const u32 r0 = threadIdx.x / {vectors}u % {groups}u * {plan.taps}u;"
        yield f"const u32 chunk = blockIdx.x / {self._dealt.parts}u;"
        yield f"float sum[{plan.taps}][{region.kernel[1]}][{plan.lanes}] = {{}};"

    def _tiles(self) -> Iterator[str]:
        """The loop of a thread over its tiles."""
        plan, region = self._plan, self._region
        beside, below, tiles = region.grid(plan.wide, plan.high)
        (down, right), above = region.stride, region.padding[0]
        x, dy = region.x.stride, region.dy.stride
        dealt = self._dealt
        own, more = divmod(dealt.steps, dealt.chunks)  # the first chunks have a step more
        spare = region.channels % (plan.vectors * plan.lanes)
        yield f"const u32 first = chunk * {own}u + lesser(chunk, {more}u);"
        yield f"const u32 steps = {own}u + (chunk < {more}u);"
        yield f"u32 end = lesser((first + steps) * {dealt.deep}u, {tiles}u);"
        if spare:
            yield f"if (k >= {region.channels}u) end = 0;"
        threads_of_a_tile = plan.vectors * dealt.groups
        yield f"u32 at = first * {dealt.deep}u + threadIdx.x / {threads_of_a_tile}u;"
        yield "#pragma unroll 1"
        yield f"for (; at < end; at += {dealt.deep}u) {{"
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

    def _within(self) -> list[int]:
        """The loads of a row of what was convolved that reach over no border, for all tiles."""
        plan, region = self._plan, self._region
        first, length, along = region.line(plan.lanes, plan.wide)
        beside, _, _ = region.grid(plan.wide, plan.high)
        last = (beside - 1) * plan.wide * region.stride[1] + first
        width = region.x.shape[3]
        return [i for i in range(0, length, along) if first + i >= 0 and last + i + along <= width]

    def _bordered(self) -> bool:
        """Whether rows of what was convolved reach over its left or right border."""
        _, length, along = self._region.line(self._plan.lanes, self._plan.wide)
        return len(self._within()) < length // along

    def _tested(self, row: int) -> bool:
        """Whether a row of what was convolved may lie above or below it."""
        plan, region = self._plan, self._region
        _, below, _ = region.grid(plan.wide, plan.high)
        rows = (region.groups(plan.taps) - 1) * plan.taps * region.dilation[0]
        first = row - region.padding[0]
        last = (below - 1) * plan.high * region.stride[0] + rows + first
        return first < 0 or last >= region.x.shape[2]

    def _line(self, row: int) -> Iterator[str]:
        """Read a row of what was convolved, zeros where there is none."""
        plan, region = self._plan, self._region
        _, length, along = region.line(plan.lanes, plan.wide)
        _, _, h, w = region.x.stride
        tests = [f"(u32)(y0 + {row}) < {region.x.shape[2]}u"] if self._tested(row) else []
        within = self._within()
        if self._bordered() and tests:
            yield f"const u32 inside = {tests[0]} ? columns : 0u;"
            tests = [f"inside >> (i / {along}) & 1u"]
        elif self._bordered():
            test = f"columns >> (i / {along}) & 1u"
            if within:
                test = f"(i >= {within[0]} && i <= {within[-1]}) || {test}"
            tests = [test]
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
        test = f"_if<{wide}>({' && '.join(tests)}, " if tests else f"<{wide}>("
        yield f"const auto in = load{test}{where});"
        yield "#pragma unroll"
        yield f"for (int j = 0; j < {wide}; ++j)"
        yield f"  {to}[{at} + j / {lanes}][j % {lanes}] = get(in.at[j]);"

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
        lanes, vectors, groups = plan.lanes, plan.vectors, self._dealt.groups
        yield f"__shared__ float parts[{columns * lanes}][{self._dealt.threads}];"
        yield "#pragma unroll"
        yield f"for (int q = 0; q < {plan.taps}; ++q) {{"
        yield "  if (q) __syncthreads();"
        yield "  #pragma unroll"
        yield f"  for (int i = 0; i < {columns * lanes}; ++i)"
        yield f"    parts[i][threadIdx.x] = sum[q][i / {lanes}][i % {lanes}];"
        yield "  __syncthreads();"
        each = columns * lanes * vectors * groups
        yield "  #pragma unroll 1"
        yield f"  for (u32 i = threadIdx.x; i < {each}u; i += {self._dealt.threads}u) {{"
        yield f"    const u32 part = i % {vectors * groups}u, number = i / {vectors * groups}u;"
        yield "    float total = 0.0f;"
        yield "    #pragma unroll 4"
        yield f"    for (u32 p = 0; p < {self._dealt.deep}u; ++p)"
        yield f"      total += parts[number][p * {vectors * groups}u + part];"
        yield f"    const u32 r = part / {vectors}u * {plan.taps}u + q, s = number / {lanes}u;"
        yield f"    const u32 c = k0 + part % {vectors}u * {lanes}u + number % {lanes}u;"
        yield f"    if (r < {rows}u && c < {channels}u)"
        if alone:
            yield f"      {put(region, self._places, 'c', 'r', 's')}"
        else:
            at = f"(r * {columns}u + s) * {channels}u + c"
            yield f"      sums[chunk * {self._region.count}u + {at}] = total;"
        yield "  }"
        yield "}"


def summed_up(
    region: Region,
    places: Mapping[str, int],
    body: Sequence[str],
    bounds: str,
    first: Launch,
    chunks: int,
    shared: Sequence[str] = (),
) -> Source:
    """The kernel of which each chunk of blocks has its sums: if there is one, it writes the
    results, else the sums, and a second launch adds these up."""
    alone = chunks == 1

    def written(name: str, bounds: str, lines: Sequence[str]) -> str:
        text = "\n".join(lines)
        typed = [
            pointer(at, tensor, f"a.p[{at}]")
            for tensor in dict.fromkeys((region.dy, region.x, region.dw))
            for at in [places[tensor.name]]
            if f"p{at}" in text
        ]
        sums = "" if alone else "float* const sums = (float*)w;"
        return function(name, bounds, [*typed, sums, *lines], workspace=not alone)

    launches = [first if alone else replace(first, name=f"{NAME}_0")]
    texts = [written(launches[0].name, bounds, body)]
    if not alone:
        deep = min(DEEP, chunks)
        last = Launch(f"{NAME}_1", -(-region.count // WARP), WARP * deep)
        launches.append(last)
        lines = _sums_of_blocks(region, chunks, deep, places)
        texts.append(written(last.name, f"{last.threads}", lines))
    text = text_of(len(places), texts, shared)
    held = 0 if alone else 4 * region.count * chunks
    several = () if alone else tuple(launches)
    return Source(
        *(text, first.blocks, first.threads, several, held), shared_bytes=first.shared_bytes
    )


def put(region: Region, places: Mapping[str, int], c: str, r: str, s: str) -> str:
    """Write the ``total`` of a tap."""
    by, _, by_row, by_column = region.dw.stride
    at = f"{c} * {by}u + {r} * {by_row}u + {s} * {by_column}u"
    return f"put(p{places[region.dw.name]}[{at}], total);"


def _sums_of_blocks(region: Region, chunks: int, deep: int, places: Mapping[str, int]) -> list[str]:
    """Add up the ``sums`` of so many blocks, by so many threads a tap, and write them."""
    count, channels, columns = region.count, region.channels, region.kernel[1]
    row, column = f"(tap / {columns}u)", f"(tap % {columns}u)"
    return [
        f"__shared__ float parts[{deep}][{WARP}];",
        f"const u32 own = threadIdx.x % {WARP}u, part = threadIdx.x / {WARP}u;",
        f"const u32 at = blockIdx.x * {WARP}u + own;",
        "float total = 0.0f;",
        f"if (at < {count}u) {{",
        "  #pragma unroll 4",
        f"  for (u32 i = part; i < {chunks}u; i += {deep}u)",
        f"    total += sums[i * {count}u + at];",
        "}",
        "parts[part][own] = total;",
        "__syncthreads();",
        f"if (part == 0 && at < {count}u) {{",
        "  total = 0.0f;",
        f"  for (u32 i = 0; i < {deep}u; ++i) total += parts[i][own];",
        f"  const u32 c = at % {channels}u, tap = at / {channels}u;",
        f"  {put(region, places, 'c', row, column)}",
        "}",
    ]
