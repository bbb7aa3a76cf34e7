"""Kernels of sums by row: numbers are added up in the row of a table that their index names.

That is the gradient of an embedding, and of what reads a table of positions; a table of the same
form may be added, as where a head shares its weight with an embedding. A block has some rows of the
table and some of their columns. It asks each index whether it names one of its rows, so that
a bit of a word stands for each index that does; then it adds up what belongs to those, and writes
its rows. Nothing is sorted, no memory is cleared first, and no two threads add to the same number:
the sums have the same bits each time. Blocks of large tables have many rows: :mod:`.row_lists`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from ..ir.spec import GraphSpec, Node, TensorSpec, is_contiguous
from ..ops.aten import decode
from ..ops.row_sums import OVERLOAD
from ..ops.table import OPS
from ..ops.views import is_view
from ..partition.analysis import compute_nodes
from .index import Var, counter, digits, place
from .source import NAME, Source, function, pointers, text_of
from .tape import Refused

WORD = 32  # indices that a thread asks at a time: the bits of a word
TOGETHER = 4  # indices whose numbers are read before the first is added
SECTOR_BYTES = 32  # that memory is read in
SHARED_BYTES = 36 << 10  # of a block, besides its words
MULTIPROCESSOR_BYTES = 96 << 10  # of shared memory, that each GPU of these has at least
MULTIPROCESSOR_THREADS = 1536
_MOST_ELEMENTS = 1 << 31
_VALUES = (torch.float32, torch.float16, torch.bfloat16)
_INDICES = (torch.int64, torch.int32)

# About how many cycles each takes, to rank schedules: an index that is asked, a word that is looked
# at, some numbers that are read and added, a row that is cleared or put together by a thread; and
# how long a block waits for its first indices and its last numbers.
OF_AN_INDEX, _OF_A_WORD, OF_A_READ, OF_A_ROW = 8.0, 4.0, 700.0, 12.0
_TO_BEGIN = 2000.0


@dataclass(frozen=True)
class Bins:
    """A schedule: rows of a block and their columns, powers of two, and its threads."""

    table_rows: int
    columns: int
    threads: int


@dataclass(frozen=True)
class Sum:
    """Such a sum: ``count`` rows of ``width`` numbers for a table of ``rows``, but for ``skip``.

    ``more`` is added to it.
    """

    values: TensorSpec
    index: TensorSpec
    table: TensorSpec
    count: int
    width: int
    rows: int
    skip: int
    more: TensorSpec | None = None


def sum_of(nodes: tuple[Node, ...]) -> Node | None:
    """The op of a region that is such a sum, beside views, an addition and a cast at most."""
    sums = [node for node in nodes if node.op == "aten" and node.attr("overload") == OVERLOAD]
    others = sorted(n.op for n in nodes if n not in sums and not OPS[n.op].view)
    return sums[0] if len(sums) == 1 and others in ([], ["add"], ["add", "cast"]) else None


def has_sum(spec: GraphSpec) -> bool:
    """Whether a region is such a sum."""
    return sum_of(compute_nodes(spec.nodes)) is not None


def _added(spec: GraphSpec, summed: Node) -> tuple[TensorSpec, TensorSpec | None]:
    """The table that a region makes, and what of memory is added to the sums. Raises
    :class:`Refused`."""
    nodes = [node for node in compute_nodes(spec.nodes) if node is not summed]
    made, by_op = spec.tensors[summed.results[0]], {node.op: node for node in nodes}
    if not nodes:
        return made, None
    if "add" not in by_op:
        raise Refused("a sum by row that is shown otherwise")
    if not all(is_view(spec.tensors, node) for node in nodes if OPS[node.op].view):
        raise Refused("a sum by row that is copied")
    producer, add = {node.results[0]: node for node in nodes}, by_op["add"]
    table = spec.tensors[add.results[0]]
    sides: list[str] = []
    for name in add.operands:
        while name in producer:  # views of one that end as that lies, and a cast
            name = producer[name].operands[0]
        sides.append(name)
    if made.name not in sides or len(set(sides)) != 2 or spec.outputs != (table.name,):
        raise Refused("a sum by row whose sums are read otherwise")
    cast = by_op.get("cast")
    if cast is not None and cast.operands[0] == made.name:
        raise Refused("a sum by row that is cast")
    (more,) = (spec.tensors[name] for name in sides if name != made.name)
    seen = (*(spec.tensors[name] for name in add.operands), more, made)
    if any(each.shape != table.shape for each in seen):
        raise Refused("a sum by row to which something of another form is added")
    if more.dtype not in _VALUES or not all(is_contiguous(e.shape, e.stride) for e in seen):
        raise Refused("a sum by row to which something is added that does not lie in rows")
    return table, more


def region_of(spec: GraphSpec) -> Sum:
    """The sum of a region. Raises :class:`Refused`."""
    node = sum_of(compute_nodes(spec.nodes))
    if node is None:
        raise Refused("no sum by row alone")
    given, cpu = [spec.tensors[name] for name in node.operands], torch.device("cpu")
    values, index, rows, skip = (decode(each, given, cpu) for each in node.attr("args"))
    table, more = _added(spec, node)
    dtypes = values.dtype in _VALUES and index.dtype in _INDICES and table.dtype in _VALUES
    if not dtypes or (more is None and table.dtype != values.dtype):
        raise Refused("a sum by row of other dtypes")
    if any(each.extent >= _MOST_ELEMENTS or not each.numel for each in (values, index, table)):
        raise Refused("a sum by row of no element, or of more than an index of 32 bits counts")
    if not is_contiguous(table.shape, table.stride):
        raise Refused("a sum by row that does not lie in rows")
    width = prod(values.shape[len(index.shape) :])
    return Sum(values, index, table, index.numel, width, rows, skip, more)


def bins(given: Sum) -> list[Bins]:
    """The schedules that there are for a table."""
    least = min(SECTOR_BYTES // given.values.dtype.itemsize, given.width)
    wide = [n for n in (4, 8, 16, 32, 64, 128, 256) if least <= n < 2 * given.width] or [4]
    return [
        Bins(rows, columns, threads)
        for threads in (512, 256)
        for columns in wide
        for rows in (1, 2, 4, 8, 16, 32)
        if rows * threads * 4 <= SHARED_BYTES and rows < 2 * given.rows and columns <= threads
    ]


def cycles(given: Sum, by: Bins, processors: int) -> float:
    """About how long it takes, if as many indices name each row."""
    blocks = -(-given.rows // by.table_rows) * -(-given.width // by.columns)
    shared = by.threads * (by.table_rows + 1) * 4
    resident = max(1, min(MULTIPROCESSOR_BYTES // shared, MULTIPROCESSOR_THREADS // by.threads))
    groups = by.threads // by.columns
    asked = -(-given.count // by.threads) * OF_AN_INDEX * by.threads / 128
    words = given.count / WORD / groups * _OF_A_WORD * by.threads / 128
    named = given.count * min(1.0, by.table_rows / given.rows)
    reads = named / groups / TOGETHER
    issued = asked + words + by.table_rows * OF_A_ROW
    waited = _TO_BEGIN + reads * OF_A_READ
    return blocks / processors * issued + max(1.0, blocks / processors / resident) * waited


class Names:
    """How a kernel calls what it reads and writes: numbers of index ``n`` and of a ``column``."""

    def __init__(self, spec: GraphSpec, given: Sum) -> None:
        tensors = (*spec.inputs, *spec.outputs)
        values, index, self.table = (
            f"p{tensors.index(each.name)}" for each in (given.values, given.index, given.table)
        )
        n, column = Var("n", given.count), Var("column", given.width)
        of_index = digits(counter(n), given.index.shape)
        of_column = digits(counter(column), given.values.shape[len(of_index) :])
        code = {n: n.name, column: column.name}
        #: The row that index ``n`` names, and the number of it in a ``column``.
        self.row = f"row_of({index}[{place(of_index, given.index.stride).code(code)}])"
        added = place((*of_index, *of_column), given.values.stride).code(code)
        self.value = f"get({values}[{added}])"
        #: What is added to the number of a table at a place; nothing where that is empty.
        self.more = ""
        if given.more is not None:
            self.more = f"get(p{tensors.index(given.more.name)}[{{}}])"
        #: Whether row ``r`` is summed up.
        self.counts = f"r < {given.rows}" + (f" && r != {given.skip}" if given.skip >= 0 else "")


def write(spec: GraphSpec, by: Bins) -> Source:
    """The kernel. Raises :class:`Refused`."""
    given = region_of(spec)
    rows, columns, threads = by.table_rows, by.columns, by.threads
    if threads % columns or threads > 1024 or threads % WORD or rows * threads * 4 > SHARED_BYTES:
        raise Refused(f"{rows} rows of {columns} columns by {threads} threads")
    across = -(-given.width // columns)
    lines = [
        f"const u32 me = threadIdx.x, group = me / {columns}u;",
        f"const int first = (int)(blockIdx.x / {across}u) * {rows};",
        f"const u32 left = blockIdx.x % {across}u * {columns}u;",
        f"const u32 column = left + me % {columns}u;",
        f"const bool there = column < {given.width}u;",
        *summed_up(given, Names(spec, given), rows, columns, threads),
    ]
    return kernel(spec, given, lines, -(-given.rows // rows) * across, threads)


def summed_up(given: Sum, names: Names, rows: int, columns: int, threads: int) -> list[str]:
    """The lines by which a block sums up ``rows`` rows from the ``first``, in some columns from
    the ``left`` on; thread ``me`` of a ``group`` that has them has one, which may be ``there``."""
    groups, tile = threads // columns, threads * WORD
    return [
        f"__shared__ u32 words[{threads}];",
        f"__shared__ float sums[{rows}][{threads}];",
        f"for (int r = 0; r < {rows}; ++r) sums[r][me] = 0.0f;",
        f"for (u32 base = 0; base < {given.count}u; base += {tile}u) {{",
        "  u32 word = 0u;",
        "  #pragma unroll 8",
        f"  for (u32 j = 0; j < {WORD}u; ++j) {{",
        f"    const u32 n = base + j * {threads}u + me;",
        f"    if (n >= {given.count}u) break;",
        f"    const i64 r = {names.row};",
        f"    if (r >= first && r < first + {rows} && {names.counts}) word |= 1u << j;",
        "  }",
        "  __syncthreads();",
        "  words[me] = word;",
        "  __syncthreads();",
        f"  for (u32 w = group; w < {threads}u; w += {groups}u) {{",
        f"    if (base + w >= {given.count}u) break;",
        "    const u32 named = words[w];",
        "    if (named == 0u || !there) continue;",
        f"    for (u32 j = 0; j < {WORD}u; j += {TOGETHER}u) {{",
        f"      if ((named >> j & {(1 << TOGETHER) - 1}u) == 0u) continue;",
        f"      float number[{TOGETHER}];",
        f"      int row[{TOGETHER}];",
        "      #pragma unroll",
        f"      for (u32 t = 0; t < {TOGETHER}u; ++t) {{",
        "        row[t] = -1;",
        "        if ((named >> (j + t) & 1u) == 0u) continue;",
        f"        const u32 n = base + (j + t) * {threads}u + w;",
        f"        row[t] = (int)({names.row} - first);",
        f"        number[t] = {names.value};",
        "      }",
        "      #pragma unroll",
        f"      for (u32 t = 0; t < {TOGETHER}u; ++t)",
        "        if (row[t] >= 0) sums[row[t]][me] += number[t];",
        "    }",
        "  }",
        "}",
        "__syncthreads();",
        f"for (u32 k = me; k < {rows * columns}u; k += {threads}u) {{",
        f"  const u32 r = k / {columns}u, c = k % {columns}u, to = left + c;",
        f"  if (first + (int)r >= {given.rows} || to >= {given.width}u) continue;",
        "  float sum = 0.0f;",
        f"  for (u32 g = 0; g < {groups}u; ++g) sum += sums[r][g * {columns}u + c];",
        f"  const u64 at = (u64)(first + (int)r) * {given.width}u + to;",
        *([f"  sum += {names.more.format('at')};"] if names.more else []),
        f"  put({names.table}[at], sum);",
        "}",
    ]


def kernel(spec: GraphSpec, given: Sum, lines: list[str], blocks: int, threads: int) -> Source:
    """The kernel that has these lines."""
    tensors = [spec.tensors[name] for name in (*spec.inputs, *spec.outputs)]
    body = [*pointers(tensors, len(spec.inputs)), *lines]
    wrapped = f"D i64 row_of(i64 r) {{ return r < 0 ? r + {given.rows} : r; }}"
    text = text_of(len(tensors), [function(NAME, threads, body)], [wrapped])
    return Source(text, blocks, threads)
