"""Convolutions of images of few channels over blocks of pixels, as they are imported for a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from cudnngraph.device import rules
from cudnngraph.device.import_rules import ANY
from cudnngraph.ir.spec import Node
from tests.cpu.models.test_conv_forms import Convolved, checked, imported, nothing, relu
from tests.cpu.models.test_grouped_training import trains

Tensor = torch.Tensor
BF16, LAST = torch.bfloat16, torch.channels_last

pytestmark = pytest.mark.usefixtures("forgotten")


class Stem(nn.Module):
    """A convolution of an image, and an activation."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, **options)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.conv(x).sigmoid()
        return made


def windows(seed: int) -> tuple[int, dict[str, Any], Tensor, bool]:
    """The channels, the options and the image of a convolution, and whether blocks are for it."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    channels = draw.choice((1, 2, 3, 3, 4, 5))
    size = draw.choice((3, 5, 7, (7, 4), (5, 6)))
    step = draw.choice((1, 2, 2, 2, 3, (2, 3), (2, 1)))
    padding = draw.choice((0, 1, 3, (2, 1)))
    dilation = draw.choice((1, 1, 1, 1, 2))
    options: dict[str, Any] = {"kernel_size": size, "stride": step, "padding": padding}
    options |= {"dilation": dilation, "bias": draw.random() < 0.5}
    image = torch.randn(draw.choice((1, 2)), channels, draw.randint(15, 20), draw.randint(15, 20))
    extents, steps = (each if isinstance(each, tuple) else (each, each) for each in (size, step))
    fits = channels <= 4 and steps == (2, 2) and dilation == 1
    fits &= all(a > b for a, b in zip(extents, steps, strict=True))
    return channels, options, image.to(BF16).contiguous(memory_format=LAST), fits


@pytest.mark.parametrize("seed", range(60))
def test_windows_that_move_several_pixels_train(seed: int, convolutions: list[Node]) -> None:
    channels, options, image, fits = windows(seed)
    model: Any = Stem(channels, **options).to(BF16).to(memory_format=LAST)
    with rules.changed(pixels_as_channels_min_window=2):
        trains(model, image, BF16)
    of_values = [node for node in convolutions if node.op != "conv_transpose"]
    assert [node.op for node in of_values] == ["conv", "conv_wgrad"]
    for node in of_values:
        assert (node.attr("stride") == (1, 1)) == (fits or options["stride"] == 1)


@pytest.mark.parametrize("seed", range(30))
def test_windows_that_move_several_pixels_are_right(seed: int) -> None:
    channels, options, image, fits = windows(seed)
    size = options.pop("kernel_size")
    extents = size if isinstance(size, tuple) else (size, size)
    terms = channels * extents[0] * extents[1]
    weight = torch.randn(8, channels, *extents) / terms**0.5
    bias = torch.randn(8) if options.pop("bias") else None
    model = Convolved(weight, bias, relu, **options).to(BF16).eval()
    with rules.changed(pixels_as_channels_min_window=2):
        found = checked(model, image, terms + 2)
    assert found.spec is not None
    (node,) = (node for node in found.spec.nodes if node.op == "conv")
    assert (node.attr("stride") == (1, 1)) == (fits or options["stride"] == 1)


def test_what_has_other_engines_stays_as_it_is() -> None:
    """Float16, whose images get a fourth channel; images that are contiguous; small windows."""

    def strides(dtype: torch.dtype, size: int, x: Tensor, **given: Any) -> Any:
        weight = torch.randn(8, 3, size, size) / 10
        model = Convolved(weight, None, nothing, stride=2, padding=size // 2).to(dtype).eval()
        spec = imported(model, x.to(dtype), **given).spec
        assert spec is not None
        (node,) = (node for node in spec.nodes if node.op == "conv")
        return node.attr("stride"), spec.tensors[node.operands[0]].shape[1]

    x = torch.randn(2, 3, 16, 16).contiguous(memory_format=LAST)
    assert strides(BF16, 7, x) == ((1, 1), 16)
    assert strides(BF16, 3, x) == ((2, 2), 3)
    assert strides(torch.float16, 7, x) == ((2, 2), 4)
    assert strides(torch.float32, 7, x) == ((2, 2), 3)
    assert strides(BF16, 7, x.contiguous(), channels_last=False) == ((2, 2), 3)
    with rules.changed(pixels_as_channels_min_window=ANY):
        assert strides(BF16, 7, x) == ((2, 2), 3)
