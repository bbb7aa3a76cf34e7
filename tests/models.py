"""Models that the tests of several tiers use."""

from __future__ import annotations

import torch
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
