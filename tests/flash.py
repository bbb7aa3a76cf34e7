"""torch's flash attention of packed sequences, by its meaning, for machines that do not have it."""

from __future__ import annotations

import math
from itertools import pairwise

import torch


def flash_attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
    """o (T, H, D), and lse (H, T), inf in rows that have no key or NaN. Diagonals end at the bottom
    right; a side of a window below 0, or of the longest k, is none, and is as long as the longest k
    where the other side is one. Tokens behind the last sequence are NaN."""
    assert dropout_p == 0.0 and not return_debug_mask
    assert cum_seq_q.is_contiguous() and cum_seq_k.is_contiguous()
    assert all(x.data_ptr() % 16 == 0 and x.stride(-1) == 1 for x in (q, k, v))
    assert cum_seq_q.diff().max() <= max_q and cum_seq_k.diff().max() <= max_k
    heads = q.shape[1]
    o = torch.full_like(q, math.nan)
    lse = torch.full((heads, len(q)), math.nan)
    left, right = window_size_left, 0 if is_causal else window_size_right
    left = -1 if left >= max_k else left
    right = -1 if right >= max_k else right
    left = max_k if left < 0 and right >= 0 else left
    right = max_k if left >= 0 and right < 0 else right
    ends = zip(cum_seq_q.tolist(), cum_seq_k.tolist(), strict=True)
    for (row, key), (row_end, key_end) in pairwise(ends):
        a, b, c = q[row:row_end], k[key:key_end], v[key:key_end]
        a, b, c = (x.double().transpose(0, 1) for x in (a, b, c))
        b, c = (x.repeat_interleave(heads // len(x), 0) for x in (b, c))
        distance = torch.arange(b.shape[1]) - torch.arange(a.shape[1])[:, None]
        distance = distance - (b.shape[1] - a.shape[1])
        keep = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            keep &= distance >= -left
        if right >= 0:
            keep &= distance <= right
        scores = torch.where(keep, a @ b.transpose(1, 2) * scale, -math.inf)
        total = scores.exp().sum(-1)
        weights = scores.exp() / torch.where(total == 0, 1.0, total)[..., None]
        o[row:row_end] = (weights @ c).transpose(0, 1).to(q.dtype)
        strange = (total == 0) | total.isnan()
        lse[:, row:row_end] = torch.where(strange, math.inf, total.log()).float()
    return o, lse, None, None, None
