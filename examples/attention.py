"""Attention as a module: causal, grouped heads, a window, lengths, gradients.

    python examples/attention.py [--device cpu]

Trains one layer of attention to copy the token that stands three places before, within a window,
in a batch of sequences of different lengths; then compares it with torch's own attention.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.cli.arguments import device as known_device

TOKENS, WIDTH, HEADS, SHARED, LENGTH, BACK = 8, 64, 4, 2, 24, 3


class Copier(nn.Module):
    """Tokens (B, S) → scores (B, S, TOKENS), by attention over the last few places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.attention = cg.FusedMultiheadAttention(
            WIDTH, HEADS, SHARED, causal=True, window=(2 * BACK, None)
        )
        self.scores = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.scores(self.attention(self.tokens(tokens) + places, seq_len=lengths))


def train(device: torch.device, steps: int = 150) -> tuple[Copier, float]:
    """The trained module and the share of tokens that it copies rightly."""
    torch.manual_seed(0)
    model = Copier().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    place = torch.arange(LENGTH, device=device)
    for _ in range(steps):
        tokens = torch.randint(TOKENS, (32, LENGTH), device=device)
        lengths = torch.randint(BACK + 1, LENGTH + 1, (32,), device=device, dtype=torch.int32)
        counted = (place >= BACK) & (place < lengths.unsqueeze(1))
        wanted = tokens.roll(BACK, 1)
        scores = model(tokens, lengths)
        loss = F.cross_entropy(scores[counted], wanted[counted])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = (scores[counted].argmax(-1) == wanted[counted]).float().mean()
    return model, float(right)


def farthest_from_torch(device: torch.device) -> float:
    """The largest relative distance of result and gradients from torch's, over options."""
    gen = torch.Generator().manual_seed(0)
    shapes = ((2, HEADS, 16, 32), (2, SHARED, 16, 32), (2, SHARED, 16, 32))
    q, k, v = (torch.randn(s, generator=gen).to(device).requires_grad_() for s in shapes)
    attend = cg.FusedSDPA(causal=True)
    farthest = 0.0
    pair = attend(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    ours, theirs = ((y, *torch.autograd.grad(y.square().sum(), (q, k, v))) for y in pair)
    for a, b in zip(ours, theirs, strict=True):
        farthest = max(farthest, float((a - b).detach().norm() / b.detach().norm()))
    return farthest


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=known_device, default=default)
    device = parser.parse_args(arguments).device
    model, right = train(device)
    print(model.attention.attend)
    print(f"tokens copied rightly: {right:.1%}")
    apart = farthest_from_torch(device)
    print(f"result and gradients, farthest from torch: {apart:.1e}")
    return int(right < 0.95 or apart > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
