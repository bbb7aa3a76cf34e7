"""Transposed convolutions whose windows lie side by side, as they are imported for a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from cudnngraph.device import rules
from cudnngraph.ir.spec import Node
from tests.converted import ops
from tests.cpu.models.test_conv_forms import checked, imported
from tests.cpu.models.test_grouped_training import trains

Tensor = torch.Tensor
BF16, LAST = torch.bfloat16, {4: torch.channels_last, 5: torch.channels_last_3d}

pytestmark = pytest.mark.usefixtures("forgotten")


class Grown(nn.Module):
    """A transposed convolution behind an activation, joined with what it is of a larger image."""

    def __init__(self, conv: nn.Module, joins: bool) -> None:
        super().__init__()
        self.conv, self.joins = conv, joins

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x.sigmoid())
        return torch.cat([y, y.sigmoid()], 1) if self.joins else y.relu()


def grown(seed: int) -> tuple[Any, Tensor, bool]:
    """A model, its image, and whether its transposed convolution is a product."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rank = draw.choice((2, 2, 3))
    window = tuple(draw.choice((1, 2, 2, 3)) for _ in range(rank))
    options: dict[str, Any] = {"stride": window, "bias": draw.random() < 0.5}
    channels, results, groups = draw.choice((8, 16, 16, 6)), draw.choice((8, 8, 24, 4)), 1
    fits = channels % 8 == results % 8 == 0 and max(window) > 1
    other = draw.choice(("", "", "", "stride", "padding", "output_padding", "groups", "dilation"))
    if other == "groups":
        groups = 2
    elif other == "stride":
        options["stride"] = tuple(each + 1 for each in window)
    elif other == "output_padding":
        options["output_padding"] = tuple(min(each - 1, 1) for each in window)
    elif other:
        options[other] = {"padding": 1, "dilation": 2}[other]
    fits &= other in ("", "output_padding" if max(window) == 1 else "")
    if other == "padding":
        window = tuple(max(each, 2) for each in window)
        options["stride"] = window
    conv = (nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 2]
    model = Grown(conv(channels, results, window, groups=groups, **options), draw.random() < 0.5)
    image = torch.randn(2, channels, *(draw.randint(3, 5) for _ in range(rank))).to(BF16)
    return model.to(BF16), image.contiguous(memory_format=LAST[rank + 2]), fits


@pytest.mark.parametrize("seed", range(40))
def test_windows_side_by_side_are_products(seed: int) -> None:
    model, image, fits = grown(seed)
    found = checked(model.eval(), image, 64)
    assert found.spec is not None
    assert ("matmul" in ops(found.spec)) == fits
    assert ("conv_transpose" in ops(found.spec)) != fits


@pytest.mark.parametrize("seed", range(20))
def test_windows_side_by_side_train(seed: int, convolutions: list[Node]) -> None:
    model, image, fits = grown(seed)
    if image.dim() == 4:
        trains(model.to(memory_format=torch.channels_last), image, BF16)
        assert any(node.op == "conv_transpose" for node in convolutions) != fits


class Patches(nn.Module):
    """Images read by patches, of which the gradient is a transposed convolution side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x.sigmoid())
        return y.sigmoid()


@pytest.mark.parametrize("side", [8, 9])
def test_gradients_of_patches_are_products(side: int, convolutions: list[Node]) -> None:
    """Not of an image with a row that no patch covers."""
    torch.manual_seed(side)
    image = torch.randn(2, 8, side, side).to(BF16).contiguous(memory_format=torch.channels_last)
    model: Any = Patches().to(BF16).to(memory_format=torch.channels_last)
    trains(model, image.requires_grad_(), BF16)
    assert any(node.op == "conv_transpose" for node in convolutions) == (side == 9)


def test_without_the_rule_they_stay() -> None:
    model, image, _ = next(each for each in map(grown, range(40)) if each[2])
    with rules.changed(windows_as_products=False):
        found = imported(model.eval(), image)
    assert found.spec is not None and "conv_transpose" in ops(found.spec)
