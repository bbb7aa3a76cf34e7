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


class WritesAttention(nn.Module):
    """Causal attention written out, and torch's with the weights asked for and not taken."""

    def __init__(self, width: int = 64, heads: int = 2, length: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.register_buffer("lower", torch.ones(length, length).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, length, width) → (B, length, width)."""
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        weights = F.softmax(scores.masked_fill(self.lower == 0, float("-inf")), dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        y = self.second(x)
        return x + self.attention(y, y, y)[0]


def turned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of copies that lie as torch's kernels want them, of operands that do not."""
    data = [t.transpose(2, 3).contiguous() for t in (q, k, v)]
    return F.scaled_dot_product_attention(*data)
