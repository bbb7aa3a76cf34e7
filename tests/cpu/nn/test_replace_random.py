"""Random forwards before and after ``replace``: results, gradients and running statistics.

``RANDOM_FORWARDS=2000 pytest`` runs so many; ``RANDOM_FIRST=123`` begins with that seed.
"""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from tests.cpu.nn.agreement import differences, step

CHANNELS = 4
FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_FORWARDS", "120"))
CHUNK = 20


class DropPath(nn.Module):
    """Drop whole samples, as timm's does."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.p == 0.0 or not self.training:
            return x
        return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(1 - self.p)


class NormAct(nn.BatchNorm2d):
    """A batch norm with its activation, as timm's."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.ndim == 4, "4 dims")
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        keeps = not self.training or self.track_running_stats
        x = F.batch_norm(
            x,
            self.running_mean if keeps else None,
            self.running_var if keeps else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            self.momentum or 0.0,
            self.eps,
        )
        y: torch.Tensor = self.act(self.drop(x))
        return y


def act(rng: random.Random) -> nn.Module:
    kinds = (nn.ReLU, nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.PReLU, nn.ReLU6, nn.Sigmoid)
    kind: Any = rng.choice(kinds)
    inplace = kind in (nn.ReLU, nn.SiLU, nn.Hardswish, nn.ReLU6) and rng.random() < 0.5
    made: nn.Module = kind(inplace=True) if inplace else kind()
    return made


def conv(rng: random.Random, inner: int = CHANNELS, out: int = CHANNELS) -> nn.Module:
    kernel = rng.choice((1, 3))
    kind: Any = nn.ConvTranspose2d if rng.random() < 0.1 else nn.Conv2d
    mode = "circular" if kind is nn.Conv2d and rng.random() < 0.05 else "zeros"
    return kind(
        inner,
        out,
        kernel,
        padding=kernel // 2,
        groups=rng.choice((1, 1, 2)),
        bias=rng.random() < 0.5,
        padding_mode=mode,
    )


def norm(rng: random.Random) -> nn.Module:
    roll = rng.random()
    if roll < 0.2:
        return NormAct(CHANNELS, rng.choice((nn.ReLU(inplace=True), nn.SiLU(), nn.Identity())))
    if roll < 0.3:
        return nn.GroupNorm(2, CHANNELS)
    momentum: Any = rng.choice((0.1, 0.3, None))
    return nn.BatchNorm2d(
        CHANNELS,
        momentum=momentum,
        affine=rng.random() < 0.8,
        track_running_stats=rng.random() < 0.9,
    )


# Ops on a list of values: (name, its choices). All values have one shape.
OPS = (
    *(*("conv",) * 8, "norm", "act", "function", "method", "add", "add", "iadd"),
    *("shared_act", "reused_conv", "drop_path", "dropout", "identity", "f_dropout", "block", "mul"),
    *("broadcast", "cat", "in_place", "sequence", "torch_add", "attribute", "nested"),
)
# What often follows an op, so that there are patterns to find.
NEXT = {
    "conv": ("norm", "norm", "norm", "act", "add", "iadd", "identity", "nested"),
    "reused_conv": ("norm", "act", "add"),
    "norm": ("shared_act", "function", "method", "add", "iadd", "torch_add", "drop_path"),
    "block": ("add", "iadd", "act", "shared_act", "drop_path", "in_place"),
    "drop_path": ("add", "add", "iadd"),
    "dropout": ("add", "iadd", "norm"),
    "identity": ("add", "norm", "act"),
    "add": ("shared_act", "method", "act", "function"),
    "iadd": ("shared_act", "method", "act", "function"),
    "torch_add": ("shared_act", "method", "act"),
    "nested": ("norm", "add", "act"),
    "sequence": ("add", "iadd", "act"),
}
FUNCTIONS = ("relu", "silu", "gelu", "leaky_relu", "relu6", "hardswish", "tanh", "sigmoid")


class Forward(nn.Module):
    """A forward of random steps; most continue from the last value."""

    def __init__(self, rng: random.Random, depth: int = 0) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=rng.random() < 0.5)
        self.conv = conv(rng)
        self.scale = 0.5
        self.layers = nn.ModuleDict()
        self.steps: list[tuple[Any, ...]] = []
        count = rng.randint(4, 12) if depth == 0 else rng.randint(1, 4)
        op = "conv"
        for i in range(count):
            follows = NEXT.get(op, ())
            op = rng.choice(follows if follows and rng.random() < 0.7 else OPS)
            if op == "nested" and depth > 1:
                op = "conv"
            operand = i if rng.random() < 0.85 else rng.randint(0, i)
            other = rng.randint(0, i)
            extra: Any = rng.choice(FUNCTIONS)
            layer = self._layer(op, rng, depth)
            if layer is not None:
                self.layers[str(i)] = layer
            self.steps.append((op, str(i), operand, other, extra, rng.random() < 0.5))
        tails = (*("last",) * 6, "sum", "tuple")
        self.tail = rng.choice(tails if depth == 0 else tails[:-1])

    def _layer(self, op: str, rng: random.Random, depth: int) -> nn.Module | None:
        made = {
            "conv": lambda: conv(rng),
            "norm": lambda: norm(rng),
            "act": lambda: act(rng),
            "drop_path": lambda: DropPath(rng.choice((0.0, 0.3))),
            "dropout": lambda: nn.Dropout(rng.choice((0.0, 0.3))),
            "identity": nn.Identity,
            "cat": lambda: conv(rng, 2 * CHANNELS),
            "block": lambda: nn.Sequential(conv(rng), norm(rng)),
            "sequence": lambda: nn.Sequential(*self._sequence(rng)),
            "nested": lambda: Forward(rng, depth + 1),
        }.get(op)
        return None if made is None else made()

    @staticmethod
    def _sequence(rng: random.Random) -> list[nn.Module]:
        makers = [conv, norm, act]
        return [rng.choice(makers)(rng) for _ in range(rng.randint(1, 4))]

    def forward(self, x: torch.Tensor) -> Any:
        values = [x]
        for op, name, i, j, extra, flag in self.steps:
            values.append(self._step(op, name, values[i], values[j], extra, flag))
        if self.tail == "tuple":
            return values[-1], values[-2]
        return sum(values[1:], values[0]) if self.tail == "sum" else values[-1]

    def _step(
        self, op: str, name: str, a: torch.Tensor, b: torch.Tensor, extra: str, flag: bool
    ) -> Any:
        if name in self.layers:
            layer = self.layers[name]
            return layer(torch.cat([a, b], 1)) if op == "cat" else layer(a)
        if op == "shared_act":
            return self.relu(a)
        if op == "reused_conv":
            return self.conv(a)
        if op == "function":
            return getattr(F, extra)(a)
        if op == "method":
            kind = ("relu", "sigmoid", "tanh")[len(extra) % 3]
            return getattr(a, f"{kind}_" if flag else kind)()
        if op == "add":
            return a + b
        if op == "torch_add":
            return torch.add(a, b) if flag else a.add(b)
        if op == "iadd":
            a += b
            return a
        if op == "in_place":
            return a.mul_(0.5) if flag else F.relu(a, inplace=True)
        if op == "f_dropout":
            return F.dropout(a, 0.3, training=self.training)
        if op == "broadcast":
            return a + b.mean((2, 3), keepdim=True)
        return a * self.scale if op == "attribute" else a * b


def one(seed: int) -> str:
    """What is wrong with a seed, "" if nothing, "-" if torch itself cannot run it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    theirs = Forward(rng).double()
    ours = copy.deepcopy(theirs)
    report = cg.nn.replace(ours)
    convs = [n for n, m in theirs.named_modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
    listed = [swap.names[0] for swap in (*report.swapped, *report.left)]
    if sorted(listed) != sorted(convs):
        return f"lists {listed} of {convs}"
    ran = False
    for training in (True, False, True):
        x = torch.randn(3, CHANNELS, 5, 5, dtype=torch.float64)
        try:
            expected = step(theirs, training, x)
        except RuntimeError:
            continue
        ran = True
        if wrong := differences(expected, step(ours, training, x)):
            return f"training={training}: {wrong}\n{report}\n{theirs.steps}"
    return "" if ran else "-"


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, CHUNK))
def test_a_random_forward_computes_the_same_after_it_was_replaced(first: int) -> None:
    told = {seed: one(seed) for seed in range(first, min(first + CHUNK, FIRST + COUNT))}
    assert {seed: what for seed, what in told.items() if what not in ("", "-")} == {}
    assert list(told.values()).count("-") < len(told) / 2
