"""Convolutions that make a multiple of eight channels in place of an odd number, in training.

So do heads of segmentation, with a channel for a class. Those beside their own are zero, and not
read. Engines with tensor cores move eight 16-bit numbers at a time. Constant weights are padded
before (:mod:`~cudnngraph.models.pad_channels`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...device.rules import rules
from ...graph.value import Value, set_stride
from ...ir.spec import channels_last_strides
from .conv_forms import EIGHT, has_rows_of_pixels
from .shape import between, part

if TYPE_CHECKING:
    from ..convert import Importer

Options = dict[str, Any]


def by_more_results(
    c: Importer, x: Value, weight: Value, bias: Value | None, options: Options
) -> Value | None:
    """The convolution of x (N, C, *spatial) with its bias; None where it is best as it is."""
    more = _more(c, x, weight, tuple(c.node.meta["val"].shape), options)
    if not more:
        return None
    y = c.g.conv(x, between(c, weight, 0, 0, more, 0.0), **options)
    y = y if bias is None else c.g.bias(y, between(c, bias, 0, 0, more, 0.0))
    return part(c, y, 1, 0, weight.shape[0])


def with_more_results(
    c: Importer, dy: Value, x: Value, weight: Value, options: Options
) -> tuple[Value, Value]:
    """The gradient of a result and the weight, for the gradients of a convolution: with as many
    channels of results as :func:`by_more_results` makes."""
    more = _more(c, x, weight, dy.shape, options)
    if not more:
        return dy, weight
    wide = between(c, dy, 1, 0, more, 0.0)
    if wide.spec is not None:  # as engines want it: a loss leaves its gradient contiguous
        set_stride(wide, channels_last_strides(wide.shape))
    return wide, between(c, weight, 0, 0, more, 0.0)


def _more(c: Importer, x: Value, weight: Value, results: Sequence[int], options: Options) -> int:
    """How many channels the results of a convolution get beside their own."""
    if options["groups"] != 1 or not has_rows_of_pixels(c, x, weight):
        return 0
    pixels = math.prod((results[0], *results[2:]))
    return -weight.shape[0] % EIGHT if pixels >= rules().odd_results_min_pixels else 0
