"""Transposed convolutions whose windows lie side by side, as products of pixels and weights.

Gradients of images that are read by patches are such, too. A row of the product is a window.
cuDNN (9.19) has no fast engine for them in 16 bits: four of a U-Net's step take 223 us on an H200,
where a copy of their bytes takes 45. What reads the result takes its pixels from where the product
has them, or a kernel puts them in order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ...device.rules import rules
from ...graph.value import Value, set_stride
from ...ir.spec import channels_last_strides
from .base import spread
from .conv_forms import EIGHT, has_rows_of_pixels

if TYPE_CHECKING:
    from ..convert import Importer

Options = dict[str, Any]


def transposed(
    c: Importer, x: Value, weight: Value | torch.Tensor, options: Options
) -> Value | None:
    """The transposed convolution of x (N, C, *spatial) by a weight (C, K, *window), constant or
    not, as a product; None where it is best as it is."""
    window = tuple(weight.shape[2:])
    if not _lie_side_by_side(c, x, weight, options):
        return None
    n, channels, *pixels = x.shape
    results, many = weight.shape[1], math.prod(window)
    last = (0, *range(2, len(x.shape)), 1)
    if isinstance(weight, torch.Tensor):
        held = c.constant(weight.permute(last).reshape(channels, -1), "weight")
    else:
        held = c.g.reshape(c.g.permute(weight, last), (channels, many * results))
    rows = c.g.reshape(c.g.permute(x, last), (n * math.prod(pixels), channels))
    made = c.g.reshape(c.g.matmul(rows, held), (n, *pixels, *window, results))
    rank = len(pixels)
    turned = [dim for at in range(1, rank + 1) for dim in (at, rank + at)]
    made = c.g.permute(made, (0, 2 * rank + 1, *turned))
    whole = tuple(side * step for side, step in zip(pixels, window, strict=True))
    made = c.g.reshape(made, (n, results, *whole))
    if made.spec is not None:
        set_stride(made, channels_last_strides(made.shape))
    return made


def _lie_side_by_side(
    c: Importer, x: Value, weight: Value | torch.Tensor, options: Options
) -> bool:
    """Whether no windows overlap, and nothing lies between or around them, of images whose pixels
    are rows of a product."""
    window = tuple(weight.shape[2:])
    rank = len(window)
    plain = options["groups"] == 1 and options["padding"] in (0, (0,) * rank)
    plain = plain and not any(spread(options.get("output_padding", 0), rank))
    plain = plain and all(step == 1 for step in spread(options["dilation"], rank))
    if not (plain and spread(options["stride"], rank) == window and math.prod(window) > 1):
        return False
    if not rules().windows_as_products or weight.shape[1] % EIGHT or c.packed(x):
        return False
    return has_rows_of_pixels(c, x, weight)
