"""Sums by row of a large table (:mod:`.row_sums`): a block lists the indices that name its rows.

A block has many consecutive rows. It asks every index once, so that indices are asked by few blocks
where rows are many; sorts the list of those that are its own by their rows; and writes each row
once, as the sum of what belongs to it or as zeros. Where more indices name its rows than the list
holds it adds up one row after the other, as a block of few rows does. The sums have the same bits
each time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..ir.spec import GraphSpec
from . import row_sums
from .row_sums import (
    MULTIPROCESSOR_BYTES,
    MULTIPROCESSOR_THREADS,
    OF_A_READ,
    OF_A_ROW,
    OF_AN_INDEX,
    TOGETHER,
    WORD,
    Bins,
    Names,
    Sum,
    bins,
    kernel,
    region_of,
    summed_up,
)
from .source import Source
from .tape import Refused

MEASURED = 6  # schedules
LISTED = 1024  # indices of a list
MOST_ROWS = 256  # of a block: a row of the list is a byte
MOST_NUMBERS = 4  # of a thread, in each of its rows

# Cycles, as in :mod:`.row_sums`: what a block waits for from its first index to its first row, an
# entry that a thread compares, and the bytes that a multiprocessor writes in one.
_TO_BEGIN, _OF_AN_ENTRY, _BYTES = 3000.0, 16.0, 16.0


@dataclass(frozen=True)
class Lists:
    """A schedule: rows of a block, threads beside each other along columns, the columns that each
    of them has, and threads in all."""

    listed_rows: int
    columns: int
    numbers: int
    threads: int


def schedules(spec: GraphSpec, processors: int) -> list[Bins | Lists]:
    """Schedules that are worth measuring, the one by rule first. Raises :class:`Refused`."""
    given = region_of(spec)
    found: dict[Bins | Lists, float] = {
        by: row_sums.cycles(given, by, processors) for by in bins(given)
    }
    found |= {by: cycles(given, by, processors) for by in lists(given)}
    return sorted(found, key=lambda by: found[by])[:MEASURED]


def lists(given: Sum) -> list[Lists]:
    """The schedules that there are for a table."""
    return [
        Lists(rows, columns, numbers, threads)
        for threads in (256, 128)
        for columns in (16, 32, 64, 128, 256)
        for numbers in {1, min(MOST_NUMBERS, -(-given.width // columns))}
        for rows in (4, 8, 16, 32, 64, 128, MOST_ROWS)
        if columns <= threads
        and columns * numbers < 2 * max(given.width, 16)
        and rows < 2 * given.rows
        and 4 * given.count * min(1.0, rows / given.rows) <= LISTED
    ]


def cycles(given: Sum, by: Lists, processors: int) -> float:
    """About how long it takes, if as many indices name each row."""
    bands = -(-given.rows // by.listed_rows)
    blocks = bands * -(-given.width // (by.columns * by.numbers))
    shared = 12 * LISTED + 20 * by.threads
    resident = max(1, min(MULTIPROCESSOR_BYTES // shared, MULTIPROCESSOR_THREADS // by.threads))
    warps, groups = by.threads / 128, by.threads // by.columns
    asked = -(-given.count // by.threads) * OF_AN_INDEX * warps
    named = given.count * min(1.0, by.listed_rows / given.rows)
    sorting = named * _OF_AN_ENTRY * -(-by.listed_rows // by.threads)
    writing = by.listed_rows / groups * OF_A_ROW * by.numbers * warps
    writing = max(writing, by.listed_rows * by.columns * by.numbers * 4 / _BYTES)
    full = by.listed_rows * (1 - math.exp(-given.count / given.rows))  # rows that have a sum
    reads = full / groups * math.ceil(given.count / given.rows / TOGETHER)
    waited = _TO_BEGIN + sorting + reads * OF_A_READ
    return (
        blocks / processors * (asked + writing) + max(1.0, blocks / processors / resident) * waited
    )


def write(spec: GraphSpec, by: Lists) -> Source:
    """The kernel. Raises :class:`Refused`."""
    given = region_of(spec)
    rows, columns, numbers, threads = by.listed_rows, by.columns, by.numbers, by.threads
    if (
        threads % columns
        or threads % WORD
        or threads > MULTIPROCESSOR_THREADS // 2
        or rows > MOST_ROWS
        or numbers > 2 * MOST_NUMBERS
    ):
        raise Refused(f"{rows} rows of {numbers} times {columns} columns by {threads} threads")
    names = Names(spec, given)
    groups, across = threads // columns, -(-given.width // (columns * numbers))
    tile = threads * WORD
    wide = [
        f"const u32 column = from + k * {columns}u;",
        f"const bool there = column < {given.width}u;",
    ]

    def read_ahead(row: str) -> list[str]:
        """The lines that read what is added to a row of the block, while another is summed up."""
        if not names.more:
            return []
        place = f"(u64)(band + (int)({row})) * {given.width}u + column"
        return [
            f"if ({row} < {rows}u && band + (int)({row}) < {given.rows}) {{",
            "  #pragma unroll",
            f"  for (u32 k = 0; k < {numbers}u; ++k) {{",
            *(f"    {line}" for line in wide),
            f"    if (there) next[k] = {names.more.format(place)};",
            "  }",
            "}",
        ]

    lines = [
        f"__shared__ u32 counts[2][{threads}];",
        f"__shared__ u32 named[{LISTED}], sorted[{LISTED}];",
        f"__shared__ u8 named_row[{LISTED}];",
        f"__shared__ u32 starts[{rows + 1}];",
        f"const u32 me = threadIdx.x, group = me / {columns}u;",
        f"const int band = (int)(blockIdx.x / {across}u) * {rows};",
        f"const u32 from = blockIdx.x % {across}u * {columns * numbers}u + me % {columns}u;",
        "u32 total = 0u;",
        f"for (u32 base = 0; base < {given.count}u; base += {tile}u) {{",
        "  u32 word = 0u, own = 0u;",
        "  #pragma unroll 8",
        f"  for (u32 j = 0; j < {WORD}u; ++j) {{",
        f"    const u32 n = base + j * {threads}u + me;",
        f"    if (n >= {given.count}u) break;",
        f"    const i64 r = {names.row};",
        f"    if (r >= band && r < band + {rows} && {names.counts}) word |= 1u << j, ++own;",
        "  }",
        "  __syncthreads();",
        "  counts[0][me] = own;",
        "  __syncthreads();",
        "  u32 now = 0u;",
        f"  for (u32 step = 1u; step < {threads}u; step *= 2u) {{",
        "    counts[now ^ 1u][me] = counts[now][me] + (me < step ? 0u : counts[now][me - step]);",
        "    now ^= 1u;",
        "    __syncthreads();",
        "  }",
        "  u32 at = total + counts[now][me] - own;",
        f"  total += counts[now][{threads - 1}];",
        f"  for (u32 j = 0; j < {WORD}u && word >> j; ++j) {{",
        f"    if ((word >> j & 1u) == 0u || at >= {LISTED}u) continue;",
        f"    const u32 n = base + j * {threads}u + me;",
        "    named[at] = n;",
        f"    named_row[at++] = (u8)({names.row} - band);",
        "  }",
        "}",
        "__syncthreads();",
        f"if (total > {LISTED}u) {{",
        f"  for (int r = 0; r < {rows}; ++r) {{",
        "    const int first = band + r;",
        f"    for (u32 k = 0; k < {numbers}u; ++k) {{",
        *(f"      {line}" for line in wide),
        f"      const u32 left = from - me % {columns}u + k * {columns}u;",
        *(f"      {line}" for line in summed_up(given, names, 1, columns, threads)),
        "      __syncthreads();",
        "    }",
        "  }",
        "  return;",
        "}",
        f"for (u32 r = me; r <= {rows}u; r += {threads}u) {{",
        "  u32 before = 0u;",
        "  for (u32 i = 0; i < total; ++i) before += named_row[i] < r;",
        "  starts[r] = before;",
        f"  for (u32 i = 0; r < {rows}u && i < total; ++i)",
        "    if (named_row[i] == r) sorted[before++] = named[i];",
        "}",
        "__syncthreads();",
        *([f"float next[{numbers}] = {{}};"] if names.more else []),
        *read_ahead("group"),
        f"for (u32 r = group; r < {rows}u; r += {groups}u) {{",
        f"  if (band + (int)r >= {given.rows}) break;",
        *(
            f"  {line}"
            for line in (
                f"float kept[{numbers}];",
                "#pragma unroll",
                f"for (u32 k = 0; k < {numbers}u; ++k) kept[k] = next[k];",
                *read_ahead(f"r + {groups}u"),
            )
            if names.more
        ),
        "  const u32 end = starts[r + 1u];",
        f"  float sum[{numbers}] = {{}};",
        f"  for (u32 i = starts[r]; i < end; i += {TOGETHER}u) {{",
        f"    float number[{TOGETHER}][{numbers}];",
        "    #pragma unroll",
        f"    for (u32 t = 0; t < {TOGETHER}u; ++t) {{",
        "      const u32 n = i + t < end ? sorted[i + t] : 0u;",
        "      #pragma unroll",
        f"      for (u32 k = 0; k < {numbers}u; ++k) {{",
        *(f"        {line}" for line in wide),
        f"        number[t][k] = there && i + t < end ? {names.value} : 0.0f;",
        "      }",
        "    }",
        "    #pragma unroll",
        f"    for (u32 t = 0; t < {TOGETHER}u; ++t)",
        "      #pragma unroll",
        f"      for (u32 k = 0; k < {numbers}u; ++k) sum[k] += number[t][k];",
        "  }",
        "  #pragma unroll",
        f"  for (u32 k = 0; k < {numbers}u; ++k) {{",
        *(f"    {line}" for line in wide),
        f"    const u64 to = (u64)(band + (int)r) * {given.width}u + column;",
        f"    if (there) put({names.table}[to], sum[k]{' + kept[k]' if names.more else ''});",
        "  }",
        "}",
    ]
    return kernel(spec, given, lines, -(-given.rows // rows) * across, threads)
