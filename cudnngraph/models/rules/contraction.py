"""Sums of products that are written out, ``(a[:, :, None] * b[:, None]).sum(-1)``, as a matmul."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...device.rules import rules
from ...graph.value import Value
from ...ops.base import FLOATS

if TYPE_CHECKING:
    from ..convert import Importer


def contracted(c: Importer, dims: Sequence[int], *, keepdim: bool) -> Value | None:
    """The matmul that a sum over ``dims`` is: a sum of a product of two tensors that nothing else
    reads, and that repeats each of them along dims of the other. None for another sum.

    No product of all dims is computed then, nor rounded to 16 bits.
    """
    product: Any = c.node.args[0]
    if not isinstance(product, torch.fx.Node) or product.target is not torch.ops.aten.mul.Tensor:
        return None
    given = [c.env.get(each) for each in product.args if isinstance(each, torch.fx.Node)]
    made = product.meta["val"]
    if len(product.users) != 1 or len(given) != 2 or c.node.meta["val"].dtype != made.dtype:
        return None
    if any(not isinstance(x, (Value, torch.Tensor)) or x.dtype != made.dtype for x in given):
        return None
    rank, whole = made.dim(), tuple(made.shape)
    if made.dtype not in FLOATS or not rank or 0 in whole:
        return None
    over = {dim % rank for dim in dims}
    values = [c.value(x) for x in given]
    values = [x if (narrow := c.expanded(x)) is None else narrow for x in values]
    a, b = (c.g.reshape(x, (1,) * (rank - len(x.shape)) + tuple(x.shape)) for x in values)
    terms = [dim for dim in over if whole[dim] > 1]
    rows, columns, batch = _sorted(a, b, over)
    if any(x.shape[dim] == 1 for dim in terms for x in (a, b)):
        return None
    sides = [math.prod(whole[dim] for dim in each) for each in (rows, columns, terms)]
    if min(sides) < rules().sum_as_matmul_min_side:
        return None
    many = math.prod(whole[dim] for dim in batch)
    rest = [dim for dim in over if dim not in terms]
    x = c.g.reshape(c.g.permute(a, (*batch, *rows, *terms, *columns, *rest)), (many, *sides[::2]))
    y = c.g.reshape(c.g.permute(b, (*batch, *terms, *columns, *rows, *rest)), (many, *sides[:0:-1]))
    kept = (*batch, *rows, *columns)
    z = c.g.reshape(c.g.matmul(x, y), tuple(whole[dim] for dim in kept))
    z = c.g.permute(z, tuple(kept.index(dim) for dim in sorted(kept)))
    shape = tuple(
        1 if dim in over else whole[dim] for dim in range(rank) if keepdim or dim not in over
    )
    return c.g.reshape(z, shape)


def _sorted(a: Value, b: Value, over: set[int]) -> tuple[list[int], list[int], list[int]]:
    """Dims that are not summed over: those of a alone, those of b alone, and all others."""
    rows: list[int] = []
    columns: list[int] = []
    batch: list[int] = []
    for dim, (one, two) in enumerate(zip(a.shape, b.shape, strict=True)):
        if dim in over:
            continue
        (rows if one > two else columns if two > one else batch).append(dim)
    return rows, columns, batch
