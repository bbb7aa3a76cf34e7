"""Convolutions in training with an odd number of results, as they are imported for a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from cudnngraph.device import rules
from cudnngraph.ir.spec import GraphSpec
from tests.cpu.models.test_grouped_training import trains

Tensor = torch.Tensor
BF16, LAST = torch.bfloat16, {4: torch.channels_last, 5: torch.channels_last_3d}

pytestmark = pytest.mark.usefixtures("forgotten")


class Head(nn.Module):
    """A convolution between two activations."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x.sigmoid()).sigmoid()
        return y


def heads(seed: int) -> tuple[Any, Tensor, int]:
    """A model, its image, and how many results its convolution makes."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rank = draw.choice((2, 2, 3))
    channels, results, groups = draw.choice((8, 16, 16, 6)), draw.choice((2, 3, 5, 8, 12)), 1
    window = draw.choice((1, 1, 2, 3))
    options: dict[str, Any] = {"bias": draw.random() < 0.5, "stride": draw.choice((1, 1, 2))}
    options["padding"] = draw.choice((0, window // 2))
    if draw.random() < 0.2 and channels % 2 == results % 2 == 0:
        groups = 2
    wide = results if channels % 8 or groups > 1 else -(-results // 8) * 8
    conv = (nn.Conv2d, nn.Conv3d)[rank - 2](channels, results, window, groups=groups, **options)
    image = torch.randn(2, channels, *(draw.randint(4, 6) for _ in range(rank))).to(BF16)
    last = LAST[rank + 2]
    model: Any = Head(conv).to(BF16).to(memory_format=last)
    return model, image.contiguous(memory_format=last), wide


def results_of(graphs: list[GraphSpec]) -> dict[str, int]:
    """How many channels of results each convolution makes, or reads the gradients of."""
    found: dict[str, int] = {}
    for spec in graphs:
        for node in spec.nodes:
            if node.op in ("conv", "conv_wgrad", "conv_transpose"):
                name = (node.operands if node.op == "conv_transpose" else node.results)[0]
                found[node.op] = spec.tensors[name].shape[node.op != "conv_wgrad"]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_odd_results_train(seed: int, graphs: list[GraphSpec]) -> None:
    model, image, wide = heads(seed)
    with rules.changed(odd_results_min_pixels=1, windows_as_products=False):
        trains(model, image, BF16)
    if model.conv.groups == 1:  # groups may become dense before
        assert set(results_of(graphs).values()) == {wide}


@pytest.mark.parametrize("kept", ["contiguous", "float32", "few pixels"])
def test_others_stay_as_they_are(kept: str, graphs: list[GraphSpec]) -> None:
    image = torch.randn(2, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    model: Any = Head(nn.Conv2d(8, 3, 1)).to(memory_format=torch.channels_last)
    dtype = torch.float32 if kept == "float32" else BF16
    if kept == "contiguous":
        image, model = image.contiguous(), model.to(memory_format=torch.contiguous_format)
    with rules.changed(odd_results_min_pixels=51 if kept == "few pixels" else 1):
        trains(model.to(dtype), image.to(dtype), dtype)
    assert set(results_of(graphs).values()) == {3}
