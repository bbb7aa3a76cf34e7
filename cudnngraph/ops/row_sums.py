"""Sums by row, as an op of torch's library: what gradients of embeddings and of tables are.

A graph has it as a step by torch (:mod:`.aten`) that a generated kernel may run.
"""

from __future__ import annotations

import torch

NAME = "cudnngraph::sum_rows"
OVERLOAD = "cudnngraph.sum_rows.default"


def _sum_rows(values: torch.Tensor, index: torch.Tensor, rows: int, skip: int) -> torch.Tensor:
    """A table (rows, ...) in whose row index[i] all values[i] are added up.

    ``values`` (*index.shape, ...), ``index`` of whole numbers, of which negative ones count from
    the end. What names row ``skip`` is left out; -1 for no such row.
    """
    rest = values.shape[index.dim() :]
    if skip >= 0:
        kept = (index != skip).view(*index.shape, *(1 for _ in rest))
        values = torch.where(kept, values, 0.0)
    made = values.new_zeros((rows, *rest))
    return made.index_put_((index,), values, accumulate=True)


def _form(values: torch.Tensor, index: torch.Tensor, rows: int, skip: int) -> torch.Tensor:
    return values.new_empty((rows, *values.shape[index.dim() :]))


sum_rows = torch.library.custom_op(NAME, _sum_rows, mutates_args=())
sum_rows.register_fake(_form)
