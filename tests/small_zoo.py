"""Entries that stand in for the zoo's: each small, and most of them broken in one way.

``python -m cudnngraph bench zoo --registry tests.small_zoo:RIGHT`` runs those that are right.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.bench.zoo.entries import Build, Entry, Input, Size

IMAGES = (Input("images", (2, 3, 8, 8)),)


class Plain(nn.Module):
    """A convolution, a norm, and a weight that begins as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))
        return y


class Traced(Plain):
    """What happens only if the model is traced: its tensors are none of torch's own then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if type(x) is torch.Tensor else self.traced(y)

    def traced(self, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Wrong(Traced):
    """It has other results."""

    def traced(self, y: torch.Tensor) -> torch.Tensor:
        return y * 1.5


class Dies(Traced):
    """It ends its process."""

    def traced(self, y: torch.Tensor) -> torch.Tensor:
        os._exit(3)


class Vanishes(Plain):
    """Results that say nothing about the inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1e-9 + 1.0


class Draws(Plain):
    """Results that are others in a second call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(4)


def raises() -> nn.Module:
    raise ValueError("no configuration has\nthis name")


def hangs() -> nn.Module:
    time.sleep(600.0)
    return Plain()


def entry(name: str, build: Build, library: Any = "torch") -> Entry:
    size = Size(build, IMAGES)
    return Entry(name, library, torch.float16, 0.000276, size, size)


RIGHT = (entry("first", Plain), entry("second", Plain))
BROKEN = (
    RIGHT[0],
    entry("wrong", Wrong),
    entry("dies", Dies),
    entry("vanishes", Vanishes),
    entry("draws", Draws),
    entry("raises", raises),
    entry("missing", Plain, "no_such_library"),
    RIGHT[1],
)
HANGING = (entry("hangs", hangs), RIGHT[0])
UNBUILT = (*BROKEN[:2], *BROKEN[5:7])
TWICE = (RIGHT[0], RIGHT[0])
