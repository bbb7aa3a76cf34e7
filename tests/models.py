"""Models that the tests of several tiers use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg


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


class Windows(nn.Module):
    """Attention within windows of a sequence, some of whose tokens are hidden by a mask that each
    window has of its own, made on the way, as a Swin transformer does; ``mix`` changes it."""

    def __init__(self, mix: str = "", width: int = 32, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.heads = mix, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(heads, 5, 5))
        self.register_buffer("keep", torch.ones(5, 5).triu(-1).bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 10, width) → (B, 10, width): two windows of five."""
        width, h = x.shape[-1], self.heads
        x = F.pad(x, (0, 0, 0, -x.shape[1] % 5)).view(-1, 5, width)
        q, k, v = self.qkv(x).view(-1, 5, 3, h, width // h).permute(2, 0, 3, 1, 4)
        scores = (q * (width // h) ** -0.5) @ k.transpose(-2, -1)
        if self.mix != "hidden too":
            scores = scores + self.bias.unsqueeze(0)
        region = x.new_zeros(10)
        region[7:] = 1
        region = region.view(2, 5)
        apart = region.unsqueeze(1) - region.unsqueeze(2)
        mask = apart.masked_fill(apart != 0, -100.0)
        if self.mix == "of the input":
            mask = mask + 0.0 * x[:2, :, :1]
        mask = mask.view(1, 2, 1, 5, 5)
        images = scores.shape[0] // 2
        if self.mix == "images last":
            scores = scores.view(2, images, h, 5, 5) + mask.transpose(0, 1)
        elif self.mix == "no images":
            scores = scores.view(images, 2, h, 5, 5) + mask[0]
        elif self.mix == "twice":
            scores = scores.view(images, 2, h, 5, 5)
            scores = scores + mask * scores
        else:
            scores = mask + scores.view(images, 2, h, 5, 5)
        scores = scores.view(-1, h, 5, 5)
        if self.mix == "hidden too":
            scores = scores.masked_fill(~self.keep, -float("inf"))
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(-1, 10, width))


def turned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of copies that lie as torch's kernels want them, of operands that do not."""
    data = [t.transpose(2, 3).contiguous() for t in (q, k, v)]
    return F.scaled_dot_product_attention(*data)


def packed_training(tokens: int = 64, heads: int = 4, width: int = 64) -> cg.Graph:
    """Packed attention and its gradient on the thirds of one buffer that the graph makes."""
    g = cg.Graph("packed")
    x = g.input("x", (tokens, 3, heads, width), torch.float16)
    ends = g.input("ends", (5,), torch.int32)
    do = g.input("do", (tokens, heads, width), torch.float16)
    buffer = g.tanh(x)
    qkv = [g.reshape(g.slice(buffer, 1, at, at + 1), (tokens, heads, width)) for at in range(3)]
    o, lse = g.sdpa_varlen(*qkv, ends, ends, 32, 32, return_lse=True, finite_padding=True)
    g.output("o", o)
    gradients = g.sdpa_varlen_backward(do, *qkv, o, lse, ends, ends, 32, 32)
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        g.output(name, gradient)
    return g
