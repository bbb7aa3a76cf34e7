"""Convolutions of images of few channels whose windows move several pixels: the pixels of a step,
say two by two, become channels, so that windows move one, over rows that are aligned.

cuDNN's engines with tensor cores move eight 16-bit numbers at a time. For float16 images of four
channels there are some of their own, which such images take instead; for bfloat16 there are none
(9.19, for an H100 or H200).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from ...device.rules import rules
from ...graph.value import Value, set_stride
from ...ir.spec import aligned, channels_last_strides, is_channels_last
from .shape import between, part

if TYPE_CHECKING:
    from ..convert import Importer

Options = dict[str, Any]

MOST_IN_BLOCK = 16  # channels: of images that have more for themselves cuDNN has faster engines


@dataclass(frozen=True)
class Blocks:
    """How a convolution reads blocks of pixels: the channels of an image and those that it gets
    (zero), the rows and columns of a block, how many blocks a window has, and how many pixels stand
    before and behind the image's (negative: are left out)."""

    channels: int
    whole: int
    size: tuple[int, int]
    window: tuple[int, int]
    around: tuple[tuple[int, int], tuple[int, int]]

    def image(self, c: Importer, x: Value) -> Value:
        """x (N, C, H, W) as (N, channels of a block, rows of blocks, columns of blocks)."""
        for dim, (before, behind) in enumerate(self.around, 2):
            x = between(c, x, dim, before, behind, 0.0)
        return self._folded(c, x)

    def weight(self, c: Importer, weight: Value) -> Value:
        """(K, C, R, S) as (K, channels of a block, blocks of a window)."""
        for dim, (blocks, size) in enumerate(zip(self.window, self.size, strict=True), 2):
            weight = between(c, weight, dim, 0, blocks * size - weight.shape[dim], 0.0)
        return self._folded(c, weight)

    def _folded(self, c: Importer, x: Value) -> Value:
        x = between(c, x, 1, 0, self.whole - self.channels, 0.0)
        first, channels, *sides = x.shape
        rows, columns = (side // size for side, size in zip(sides, self.size, strict=True))
        down, across = self.size
        x = c.g.reshape(x, (first, channels, rows, down, columns, across))
        x = c.g.permute(x, (0, 3, 5, 1, 2, 4))
        x = c.g.reshape(x, (first, down * across * channels, rows, columns))
        set_stride(x, channels_last_strides(x.shape))
        return x

    def fixed_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """:meth:`weight` of one that is constant."""
        results, channels, *sides = weight.shape
        (down, across), (rows, columns) = self.size, self.window
        made = weight.new_zeros(results, self.whole, rows * down, columns * across)
        made[:, :channels, : sides[0], : sides[1]] = weight
        made = made.reshape(results, self.whole, rows, down, columns, across)
        return made.permute(0, 3, 5, 1, 2, 4).reshape(results, -1, rows, columns)

    def weight_gradient(self, c: Importer, made: Value, window: tuple[int, ...]) -> Value:
        """Of the gradient of :meth:`weight` that of the weight itself."""
        (down, across), (rows, columns) = self.size, self.window
        made = c.g.reshape(made, (made.shape[0], down, across, self.whole, rows, columns))
        made = c.g.permute(made, (0, 3, 4, 1, 5, 2))
        made = c.g.reshape(made, (made.shape[0], self.whole, rows * down, columns * across))
        for dim, extent in enumerate((self.channels, *window), 1):
            made = part(c, made, dim, 0, extent)
        return made


def blocks_of(
    c: Importer, x: Value, weight: tuple[int, ...], dtype: torch.dtype, options: Options
) -> Blocks | None:
    """The blocks of a convolution of x by a weight of that shape; None where it stays as it is."""
    if not (c.on_gpu and c.kernels) or x.dtype != torch.bfloat16 or dtype != x.dtype:
        return None
    if x.spec is None or len(x.shape) != 4 or c.packed(x) is not None:
        return None
    if not is_channels_last(x.shape, x.spec.stride):
        return None
    if options["groups"] != 1 or tuple(options["dilation"]) != (1, 1):
        return None
    size, channels, least = tuple(options["stride"]), x.shape[1], weight[2:]
    pixels = math.prod(size)
    whole = next(n for n in count(channels) if n * pixels == aligned(n * pixels))
    if min(size) < 2 or whole * pixels > MOST_IN_BLOCK:
        return None
    if min(least) < rules().pixels_as_channels_min_window:
        return None
    if any(extent <= step for extent, step in zip(least, size, strict=True)):
        return None  # windows side by side
    window, around = [], []
    sides = zip(x.shape[2:], least, size, _pairs(options["padding"]), strict=True)
    for side, extent, step, (before, behind) in sides:
        results = (side + before + behind - extent) // step + 1
        blocks = -(-extent // step)
        window.append(blocks)
        around.append((before, (results + blocks - 1) * step - side - before))
    (rows, columns), (height, width) = window, around
    return Blocks(channels, whole, (size[0], size[1]), (rows, columns), (height, width))


def _pairs(padding: Any) -> tuple[tuple[int, int], ...]:
    """What is before and behind each dim of an image."""
    if isinstance(padding, str):  # "same" is for windows that move one pixel
        return ((0, 0), (0, 0))
    return tuple((each, each) if isinstance(each, int) else tuple(each) for each in padding)


def by_blocks(
    c: Importer, x: Value, weight: Value | torch.Tensor, options: Options
) -> Value | None:
    """The convolution of x by a weight, constant or not, over blocks of pixels; None where it is
    best as it is."""
    form = blocks_of(c, x, tuple(weight.shape), weight.dtype, options)
    if form is None:
        return None
    image = form.image(c, x)
    if isinstance(weight, torch.Tensor):
        held = c.image_weight(form.fixed_weight(weight), image)
    else:
        held = form.weight(c, weight)
    return c.g.conv(image, held, stride=1, padding=0)


def weight_gradient_by_blocks(
    c: Importer, dy: Value, x: Value, weight: Value, options: Options
) -> Value | None:
    """The gradient of the weight of a convolution that :func:`by_blocks` takes."""
    form = blocks_of(c, x, tuple(weight.shape), weight.dtype, options)
    if form is None:
        return None
    made = c.g.conv_wgrad(dy, form.image(c, x), kernel=form.window, stride=1, padding=0)
    return form.weight_gradient(c, made, tuple(weight.shape[2:]))
