"""Products of groups of rows on a GPU. Nothing here waits on the host for the ends of the groups:
shapes are those of the graph, whatever the groups, so that a call can be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ..ir.spec import ALIGNMENT_BYTES, GraphSpec, Node

Tensors = Sequence[torch.Tensor]
Run = Callable[[Tensors, Tensors], None]
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

#: GPUs (major compute capability) and the dtype for which torch's grouped_mm is one kernel; for
#: others it copies the ends to the host and calls a product for each group.
_KERNEL_MAJORS, _KERNEL_DTYPE = (9, 10), torch.bfloat16
_MOST_ROWS = 128  # of a block: rows enough for a product, and few to fill up


def run_grouped(spec: GraphSpec, node: Node, device: torch.device) -> Run | None:
    """A product of groups of rows, or the gradient of its matrices. None on a CPU, where the
    reference is as good."""
    if device.type != "cuda":
        return None
    operands = [spec.inputs.index(name) for name in node.operands]
    dtype = spec.tensors[node.operands[0]].dtype
    major, _ = torch.cuda.get_device_capability(device)
    kernel = dtype == _KERNEL_DTYPE and major in _KERNEL_MAJORS
    gradient = node.op == "grouped_matmul_wgrad"
    by_kernel, by_products = WAYS[gradient]
    product = by_kernel if kernel else by_products
    empty = any(spec.tensors[name].numel == 0 for name in (*node.operands, *node.results))

    def run(inputs: Tensors, outputs: Tensors) -> None:
        x, y, ends = (inputs[at] for at in operands)
        if empty:
            outputs[0].zero_()
        else:
            product(x, y, ends, outputs[0])

    return run


# -- by torch's kernel -----------------------------------------------------------------------------


def by_kernel(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
    """x (M, K), y (G, K, N) → (M, N). torch leaves rows behind the last end as they were."""
    ends = _within(ends, x)
    if not _takes(y):
        y = _padded(y)
    made = torch._grouped_mm(_rows(x, y.shape[1]), y, offs=ends)[:, : out.shape[1]]
    torch.where(_places(x)[:, None] < ends[-1], made, made.new_zeros(()), out=out)


def gradient_by_kernel(
    x: torch.Tensor, dy: torch.Tensor, ends: torch.Tensor, out: torch.Tensor
) -> None:
    """x (M, K), dy (M, N) → (G, K, N). Empty groups get zeros, whatever the kernel makes there."""
    ends = _within(ends, x)
    _, k, n = out.shape
    made = torch._grouped_mm(_rows(x, _even(k)).t(), _rows(dy, _even(n)), offs=ends)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    torch.where(counts[:, None, None] > 0, made[:, :k, :n], made.new_zeros(()), out=out)


def _even(size: int) -> int:
    """The next size that is a multiple of the kernel's alignment."""
    step = ALIGNMENT_BYTES // _KERNEL_DTYPE.itemsize
    return -(-size // step) * step


def _rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x in rows that begin where the kernel takes them, zeros behind its columns if they are more.

    A group begins at any row, so that rows have to be aligned, and not columns.
    """
    if x.shape[1] < columns:
        return F.pad(x, (0, columns - x.shape[1]))
    if x.stride(1) == 1 and _is_aligned(x, x.stride(0)) and x.stride(0) >= x.shape[1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _takes(y: torch.Tensor) -> bool:
    """Whether the kernel takes matrices as they lie in memory, in rows or in columns."""
    (_, k, n), (groups, row, column) = y.shape, y.stride()
    in_rows, in_columns = column == 1 and row >= n, row == 1 and column >= k
    even = (k, n) == (_even(k), _even(n))
    return (in_rows or in_columns) and even and _is_aligned(y, groups, max(row, column))


def _is_aligned(x: torch.Tensor, *strides: int) -> bool:
    return x.data_ptr() % ALIGNMENT_BYTES == 0 and all(step == _even(step) for step in strides)


def _padded(y: torch.Tensor) -> torch.Tensor:
    """A copy of matrices with zeros up to sizes that the kernel takes."""
    groups, k, n = y.shape
    made = y.new_zeros(groups, _even(k), _even(n))
    made[:, :k, :n] = y
    return made


# -- by products of one size -----------------------------------------------------------------------


def by_blocks(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
    """x (M, K), y (G, K, N) → (M, N), by products of blocks of rows, each with its group's matrix.

    The rows of a group are filled up to whole blocks. How many blocks there are at most follows
    from M and G. Matrices are copied for as many blocks at a time as there are groups, so that
    the copies are no larger than y.
    """
    (rows, columns), groups = x.shape, y.shape[0]
    size = 1
    while size < _MOST_ROWS and 2 * size * groups <= rows:
        size *= 2
    blocks = (rows + min(groups, rows) * (size - 1)) // size
    ends = _within(ends, x)
    group, inside = _group_of_rows(x, ends)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    last = torch.cumsum((ends - starts + size - 1) // size, 0, dtype=torch.int32)
    first = torch.cat([last.new_zeros(1), last[:-1]])
    place = first[group] * size + _places(x) - starts[group]
    place = torch.where(inside, place, blocks * size)  # a row behind all blocks
    laid = x.new_zeros(blocks * size + 1, columns).index_copy_(0, place.long(), x)
    laid = laid[:-1].view(blocks, size, columns)
    numbers = torch.arange(blocks, dtype=torch.int32, device=x.device)
    of_block = torch.searchsorted(last, numbers, right=True).clamp_(max=groups - 1)
    turned = y.stride(1) == 1  # matrices whose columns lie in rows are copied so
    source = y.transpose(1, 2) if turned else y
    made = x.new_zeros(blocks * size + 1, out.shape[1])
    for start in range(0, blocks, groups):
        part = slice(start, min(start + groups, blocks))
        matrices = source.index_select(0, of_block[part])
        matrices = matrices.transpose(1, 2) if turned else matrices
        into = made[part.start * size : part.stop * size].view(-1, size, out.shape[1])
        torch.bmm(laid[part], matrices, out=into)
    out.copy_(made.index_select(0, place.long()))


def gradient_by_masks(
    x: torch.Tensor, dy: torch.Tensor, ends: torch.Tensor, out: torch.Tensor
) -> None:
    """x (M, K), dy (M, N) → (G, K, N), by a product of all rows for each group, the other groups'
    rows zero: in a fixed order, and so many times the multiplications."""
    group, inside = _group_of_rows(x, _within(ends, x))
    for number in range(ends.shape[0]):
        own = ((group == number) & inside)[:, None]
        made = torch.where(own, x, 0.0).t() @ torch.where(own, dy, 0.0)
        out[number].copy_(made)


def _within(ends: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The ends, none of them outside of x: what reads by them reads no other memory."""
    return ends.clamp(0, x.shape[0])


def _places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], dtype=torch.int32, device=x.device)


def _group_of_rows(x: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The group of each row, and whether it has one; else the number is that of the last."""
    group = torch.searchsorted(ends, _places(x), right=True)
    return group.clamp(max=ends.shape[0] - 1), group < ends.shape[0]


#: By whether a node is the gradient: how torch's kernel does it, and how other products do.
WAYS: tuple[tuple[Product, Product], tuple[Product, Product]] = (
    (by_kernel, by_blocks),
    (gradient_by_kernel, gradient_by_masks),
)
