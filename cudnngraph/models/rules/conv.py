"""Rules for convolutions: batch norms beside one, with constant weights, are folded into it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value, set_stride
from ...ir.spec import channels_last_strides
from ..frames import Pairs, frame_of
from .affine import following_affine, following_norm
from .base import Arguments, Rule, Skip, spread
from .conv_forms import by_channels, by_dense_values, by_other_ops, laid_out
from .norm import Norm
from .odd_results import by_more_results
from .pixel_blocks import by_blocks
from .side_by_side import transposed as by_product

if TYPE_CHECKING:
    from ..convert import Importer

MAX_MEAN_IN_SIGMAS = 4.0  # standard deviations that means may be, for weights to take a norm in


def _convolved(c: Importer, a: Arguments, rank: int, *, transposed: bool, padding: Any) -> Value:
    x, weight, bias = c.value(a["input"]), a["weight"], a["bias"]
    if len(x.shape) != rank + 2:
        raise Skip
    frame = None if transposed else frame_of(c.node)
    padded = not isinstance(padding, str) and (any(padding) or frame is not None)
    if frame is not None:
        x, padding = c.value(c.env[frame[0]]), _around(frame[1], padding)
    options: dict[str, Any] = {
        "stride": spread(a["stride"], rank),
        "padding": padding,
        "dilation": spread(a["dilation"], rank),
        "groups": a["groups"],
    }
    if transposed:
        options["output_padding"] = spread(a["output_padding"], rank)
    before = norm = None
    fixed = isinstance(weight, torch.Tensor) and isinstance(bias, (torch.Tensor, NoneType))
    if fixed and c.folds:
        dtype = weight.dtype
        if a["groups"] == 1 == math.prod(weight.shape[2:]) and not (transposed or padded):
            before = c.preceding_norm()
        norm = following_norm(c) or following_affine(c, rank)
        if norm is not None:
            weight, bias = _fold_norm_after(norm[1], weight, bias, a["groups"], transposed)
        taken = None if before is None else _fold_norm_before(before[1], weight, bias, dtype)
        if before is not None and taken is not None:
            x, (weight, bias) = c.value(before[2]), taken
        else:
            before = None
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    if fixed and not transposed:
        x = laid_out(c, x, weight)
    y = _in_another_form(c, x, weight, bias, options, transposed=transposed)
    if y is None:
        if isinstance(weight, torch.Tensor):
            if packed := c.packed(x):
                weight = packed.weight(weight)
                if packed.columns > 1:  # one of its windows is one of x
                    options |= {"stride": (options["stride"][0], 1)}
            held = c.image_weight(weight, x)
        else:
            held = c.value(weight)
        y = (c.g.conv_transpose if transposed else c.g.conv)(x, held, **options)
        if fixed and not transposed and by_channels(c, x, weight) and y.spec is not None:
            set_stride(y, channels_last_strides(y.shape))
        y = _biased(c, y, bias)
    if y.spec is not None:
        if before is not None:
            c.folded[before[0]] = c.node
        if norm is not None:
            c.folded |= dict.fromkeys(norm[0], c.node)
    return y


def _in_another_form(
    c: Importer, x: Value, weight: Any, bias: Any, options: dict[str, Any], *, transposed: bool
) -> Value | None:
    """The convolution with its bias as other ops, or of other channels; None where it is best as
    it is."""
    constant = isinstance(weight, torch.Tensor)
    held = weight if constant else c.value(weight)
    if transposed:
        y = by_product(c, x, held, options)
    elif constant:
        y = None
        if isinstance(bias, (torch.Tensor, NoneType)):
            y = by_other_ops(c, x, weight, bias, options)
        if y is not None:
            return y
        y = by_blocks(c, x, held, options)
    else:
        y = by_dense_values(c, x, held, options)
        y = by_blocks(c, x, held, options) if y is None else y
        if y is None and not isinstance(bias, torch.Tensor):
            given = None if bias is None else c.value(bias)
            return by_more_results(c, x, held, given, options)
    return None if y is None else _biased(c, y, bias)


def _biased(c: Importer, y: Value, bias: Any) -> Value:
    if isinstance(bias, torch.Tensor):
        return c.biased_value(y, bias)
    return y if bias is None else c.g.bias(y, c.value(bias))


def _around(frame: Pairs, padding: Sequence[int]) -> Pairs:
    """The padding of a convolution with a frame of zeros around its image."""
    pairs = zip(frame, padding, strict=True)
    return tuple((before + n, behind + n) for (before, behind), n in pairs)


def _fold_norm_before(
    norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Weight in ``dtype`` and bias in float64 of a convolution of single pixels with a batch norm
    in front.

    W (x - mean) becomes W x - W mean with the W that is rounded, so what W is off by counts for
    x - mean alone. None where means are so much larger than deviations that rounding x and W mean
    would tell, or where the W that is rounded leaves the range of ``dtype``.
    """
    wide = weight.double().flatten(1)
    exact = wide * norm.scale
    scaled = exact.to(dtype)
    means = scaled.double() * norm.mean
    most = MAX_MEAN_IN_SIGMAS * (wide * norm.gain).norm(dim=1)
    fits = (means.norm(dim=1) <= most) & (means.sum(1).abs() <= most)
    fits &= (scaled.double() - exact).norm(dim=1) <= torch.finfo(dtype).eps * exact.norm(dim=1)
    if not bool(fits.all()):
        return None
    means = means.sum(1)
    shift = wide @ norm.offset - means
    return scaled.view(weight.shape), shift if bias is None else shift + bias.double()


def _fold_norm_after(
    norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None, groups: int, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias, in float64, of a convolution with a batch norm behind it."""
    if transposed:  # (C, K/groups, ...): output channels are numbered through the groups
        grouped = weight.double().view(groups, -1, *weight.shape[1:])
        scale = norm.scale.view(groups, 1, -1, *(1,) * (weight.dim() - 2))
        wide = (grouped * scale).view(weight.shape)
    else:
        wide = weight.double() * norm.scale.view(-1, *(1,) * (weight.dim() - 1))
    shift = norm.shift if bias is None else norm.shift + bias.double() * norm.scale
    return wide, shift


def _conv(rank: int) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        padding = a["padding"]
        padding = padding if isinstance(padding, str) else spread(padding, rank)
        return _convolved(c, a, rank, transposed=False, padding=padding)

    return rule


def _conv_transpose(rank: int) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        return _convolved(c, a, rank, transposed=True, padding=spread(a["padding"], rank))

    return rule


def _convolution(c: Importer, a: Arguments) -> Value:
    rank = len(c.value(a["input"]).shape) - 2
    padding = spread(a["padding"], rank)
    return _convolved(c, a, rank, transposed=a["transposed"], padding=padding)


RULES: dict[str, Rule] = {
    **{f"conv{rank}d": _conv(rank) for rank in (1, 2, 3)},
    **{f"conv_transpose{rank}d": _conv_transpose(rank) for rank in (1, 2, 3)},
    "convolution": _convolution,
}
