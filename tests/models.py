"""Models that the tests of several tiers use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attends(nn.Module):
    """torch's attention, whose projections add their bias behind a reshape."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, width) → (B, S, width)."""
        for _ in range(2):
            y = self.norm(x)
            x = self.attention(y, y, y, need_weights=False)[0] + x
        return x


def turned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of copies that lie as torch's kernels want them, of operands that do not."""
    data = [t.transpose(2, 3).contiguous() for t in (q, k, v)]
    return F.scaled_dot_product_attention(*data)
