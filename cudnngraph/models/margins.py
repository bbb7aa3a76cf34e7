"""Margins of several labels a row, ``F.multilabel_margin_loss``, in other ops while AOTAutograd
traces.

AOTAutograd takes torch's op apart by a formula that counts a margin for each unused place of
``target`` too (torch 2.13): both the loss and the gradient are then not those of eager torch.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import _reduction

from .whole import call_in_place_of

Tensor = torch.Tensor


def write_out(module: torch.fx.GraphModule) -> None:
    """Let a graph of dynamo's, and the graphs in it, compute these losses by :func:`margins`."""
    torchs = F.multilabel_margin_loss
    call_in_place_of(module, {torchs: inspect.signature(torchs)}, margins, _is_loss)


def _is_loss(seen: Any) -> bool:
    return isinstance(seen, Tensor)


def margins(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    *,
    dtype: torch.dtype,
) -> Tensor:
    """``F.multilabel_margin_loss`` of scores (N, C) or (C), in ``dtype``.

    A row's labels are those in front of the first negative number of ``target``.
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    scores, labels = (x if x.dim() == 2 else x[None] for x in (input.to(dtype), target))
    is_label = (labels >= 0).long().cumprod(1) > 0
    labels = torch.where(is_label, labels, 0)
    classes = torch.arange(scores.shape[1], device=scores.device)
    wanted = (is_label[:, :, None] & (labels[:, :, None] == classes)).any(1)
    short = F.relu(1 - scores.gather(1, labels)[:, :, None] + scores[:, None])
    counted = is_label[:, :, None] & ~wanted[:, None]
    losses = torch.where(counted, short, 0).sum((1, 2)) / scores.shape[1]
    if reduction == "none":
        return losses if input.dim() == 2 else losses[0]
    return losses.mean() if reduction == "mean" else losses.sum()
