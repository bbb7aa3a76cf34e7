"""A one-stage detector in plain torch, with the layers of YOLOv8 and its sizes of the s model.

The backbone has split blocks and pooling of several reaches; features of three strides are merged
up and down; each has heads for boxes (as distributions over distances) and for classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

BINS = 16  # of the distribution of a distance
STRIDES = (8, 16, 32)


def _conv(c: int, k: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(c, k, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(k, eps=1e-3), nn.SiLU())


class Split(nn.Module):
    """Half of the channels through blocks of two convolutions, every stage of it concatenated."""

    def __init__(self, c: int, k: int, blocks: int, *, residual: bool) -> None:
        super().__init__()
        self.inner, self.residual = k // 2, residual
        self.enter, self.leave = _conv(c, k, 1), _conv((2 + blocks) * self.inner, k, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv(self.inner, self.inner), _conv(self.inner, self.inner))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → (N, K, H, W)."""
        parts = list(self.enter(x).chunk(2, 1))
        for block in self.blocks:
            y = block(parts[-1])
            parts.append(parts[-1] + y if self.residual else y)
        return cast(torch.Tensor, self.leave(torch.cat(parts, 1)))


class Pooled(nn.Module):
    """Max pooling of three reaches, concatenated with what it is of."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.enter, self.leave = _conv(c, c // 2, 1), _conv(2 * c, c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → the same."""
        parts = [self.enter(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return cast(torch.Tensor, self.leave(torch.cat(parts, 1)))


class Detector(nn.Module):
    """Images (N, 3, H, W) → boxes (N, 4, cells) and scores (N, classes, cells), H and W multiples
    of 32."""

    def __init__(
        self,
        widths: Sequence[int] = (32, 64, 128, 256, 512),
        blocks: Sequence[int] = (1, 2, 2, 1),
        classes: int = 80,
    ) -> None:
        super().__init__()
        stem, *stages = widths
        self.stem = _conv(3, stem, 3, 2)
        self.stages = nn.ModuleList()
        for c, k, count in zip(widths, stages, blocks, strict=False):
            parts = [_conv(c, k, 3, 2), Split(k, k, count, residual=True)]
            if k == widths[-1]:
                parts.append(Pooled(k))
            self.stages.append(nn.Sequential(*parts))
        small, middle, large = widths[2:]
        count = blocks[0]
        self.up_middle = Split(large + middle, middle, count, residual=False)
        self.up_small = Split(middle + small, small, count, residual=False)
        self.to_middle = _conv(small, small, 3, 2)
        self.down_middle = Split(small + middle, middle, count, residual=False)
        self.to_large = _conv(middle, middle, 3, 2)
        self.down_large = Split(middle + large, large, count, residual=False)
        box, score = max(16, small // 4, 4 * BINS), max(small, min(classes, 100))
        self.boxes = nn.ModuleList(
            nn.Sequential(_conv(c, box), _conv(box, box), nn.Conv2d(box, 4 * BINS, 1))
            for c in widths[2:]
        )
        self.scores = nn.ModuleList(
            nn.Sequential(_conv(c, score), _conv(score, score), nn.Conv2d(score, classes, 1))
            for c in widths[2:]
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Images → the distances of a box's edges from every cell, in pixels, and its scores."""
        x = self.stem(x)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        _, small, middle, large = found
        middle = self.up_middle(torch.cat([F.interpolate(large, scale_factor=2.0), middle], 1))
        small = self.up_small(torch.cat([F.interpolate(middle, scale_factor=2.0), small], 1))
        middle = self.down_middle(torch.cat([self.to_middle(small), middle], 1))
        large = self.down_large(torch.cat([self.to_large(middle), large], 1))
        levels = zip((small, middle, large), STRIDES, self.boxes, self.scores, strict=True)
        boxes, scores = zip(*(_decoded(*level) for level in levels), strict=True)
        return torch.cat(boxes, 2), torch.cat(scores, 2)


def _decoded(
    features: torch.Tensor, stride: int, boxes: nn.Module, scores: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, C, H, W) → (N, 4, H W), the means of distributions, and (N, classes, H W)."""
    n, _, high, wide = features.shape
    shares = boxes(features).view(n, 4, BINS, high * wide).softmax(2)
    bins = torch.arange(BINS, device=features.device, dtype=features.dtype).view(1, 1, BINS, 1)
    return (shares * bins).sum(2) * stride, scores(features).flatten(2).sigmoid()
