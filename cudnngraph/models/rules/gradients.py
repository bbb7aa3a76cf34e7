"""Rules for ops of training: batch norms with statistics, softmax, and gradients of both."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value
from ...ops.base import FLOATS
from .base import Arguments, Rule, Skip, spread
from .conv_forms import gradients_by_dense_values
from .norm import as_kept, norm_weight, takes_group_norm, widened
from .odd_results import with_more_results
from .pixel_blocks import weight_gradient_by_blocks
from .shape import part
from .side_by_side import transposed

if TYPE_CHECKING:
    from ..convert import Importer


def _affine(c: Importer, a: Arguments, name: str, number: float) -> Value:
    """The weight or the bias of a batch norm; ``number`` for every channel where it has none."""
    if a[name] is not None:
        return c.value(a[name])
    channels, dtype = c.value(a["input"]).shape[1], c.value(a["input"]).dtype
    wide = torch.promote_types(dtype, torch.float32)
    return c.constant(torch.full((channels,), number, dtype=wide, device=c.device))


def _batch_norm_train(c: Importer, a: Arguments) -> tuple[Value, ...]:
    if not a["training"] or a["running_mean"] is None:
        raise Skip
    affine = _affine(c, a, "weight", 1.0), _affine(c, a, "bias", 0.0)
    running = c.value(a["running_mean"]), c.value(a["running_var"])
    eps, momentum = float(a["eps"]), float(a["momentum"])
    x = c.value(a["input"])
    made = c.g.batch_norm_train(x, *affine, *running, eps=eps, momentum=momentum)
    return as_kept(c, a, made)


def _batch_norm_backward(c: Importer, a: Arguments) -> tuple[Any, ...]:
    if not a["train"]:
        return _batch_norm_frozen_backward(c, a)
    dy, x = c.value(a["grad_out"]), c.value(a["input"])
    mean, deviation = widened(c, a["save_mean"]), widened(c, a["save_invstd"])
    made = c.g.batch_norm_backward(dy, x, _affine(c, a, "weight", 1.0), mean, deviation)
    return tuple(
        value if wanted else None for value, wanted in zip(made, a["output_mask"], strict=True)
    )


def _batch_norm_frozen_backward(c: Importer, a: Arguments) -> tuple[Any, ...]:
    """Of y = (x - mean) * inverse * weight + bias, with running statistics."""
    g = c.g
    dy, x, mean, var = (
        c.value(a[name]) for name in ("grad_out", "input", "running_mean", "running_var")
    )
    inverse = g.rsqrt(g.add(var, float(a["eps"])))
    of_x, of_weight, of_bias = a["output_mask"]
    over, column = (0, *range(2, len(x.shape))), (1, -1, *(1,) * (len(x.shape) - 2))
    dx = dweight = None
    if of_x:
        factor = inverse if a["weight"] is None else g.mul(inverse, c.value(a["weight"]))
        dx = g.scale(dy, factor)
    if of_weight or of_bias:
        dy = dy if dy.dtype == mean.dtype else g.cast(dy, mean.dtype)
    if of_weight:
        centred = g.sub(x, g.reshape(mean, column))
        dweight = g.mul(g.reduction(g.mul(dy, centred), over), inverse)
    return dx, dweight, g.reduction(dy, over) if of_bias else None


def _convolution_backward(c: Importer, a: Arguments) -> tuple[Any, ...]:
    dy, x, weight = (c.value(a[name]) for name in ("grad_output", "input", "weight"))
    rank = len(x.shape) - 2
    if rank not in (1, 2, 3):
        raise Skip
    geometry: dict[str, Any] = {
        name: spread(a[name], rank) for name in ("stride", "padding", "dilation")
    }
    geometry["groups"] = a["groups"]
    kernel, over = weight.shape[2:], (0, *range(2, rank + 2))
    of_x, of_weight, of_bias = a["output_mask"]
    of_biases = c.g.reduction(dy, over) if of_bias else None
    if a["transposed"]:  # a convolution's gradient of its input: x is a dy to it, and dy an x
        return (
            c.g.conv(dy, weight, **geometry) if of_x else None,
            c.g.conv_wgrad(x, dy, kernel=kernel, **geometry) if of_weight else None,
            of_biases,
        )
    reached = (
        (n - 1) * s - 2 * p + d * (r - 1) + 1
        for n, s, p, d, r in zip(
            dy.shape[2:],
            geometry["stride"],
            geometry["padding"],
            geometry["dilation"],
            kernel,
            strict=True,
        )
    )
    extra = tuple(n - m for n, m in zip(x.shape[2:], reached, strict=True))
    wanted = (bool(of_x), bool(of_weight))
    dense = gradients_by_dense_values(c, dy, x, weight, extra, geometry, wanted)
    if dense is not None:
        return (*dense, of_biases)
    results, (dy, weight) = weight.shape[0], with_more_results(c, dy, x, weight, geometry)
    of_weights = weight_gradient_by_blocks(c, dy, x, weight, geometry) if of_weight else None
    if of_weight and of_weights is None:
        of_weights = part(c, c.g.conv_wgrad(dy, x, kernel=kernel, **geometry), 0, 0, results)
    of_images = None
    if of_x:
        options = {"output_padding": extra, **geometry}
        of_images = transposed(c, dy, weight, options)
        of_images = c.g.conv_transpose(dy, weight, **options) if of_images is None else of_images
    return of_images, of_weights, of_biases


def _layer_norm_backward(c: Importer, a: Arguments) -> tuple[Any, ...]:
    dy, x = c.value(a["grad_out"]), c.value(a["input"])
    mean, deviation = widened(c, a["mean"]), widened(c, a["rstd"])
    of_x, of_weight, of_bias = a["output_mask"]
    weight = norm_weight(c, a)
    made = c.g.layer_norm_backward(dy, x, weight, mean, deviation, bias_grad=bool(of_bias))
    dx, dweight = made[:2]
    return dx if of_x else None, dweight if of_weight else None, made[2] if of_bias else None


def _group_norm_backward(c: Importer, a: Arguments) -> tuple[Any, ...]:
    """Written with sums over the pixels of each channel: nothing is copied whatever the layout.

    With n = (x - mean) / deviation, s the sum of dy * weight over a group of m elements, and p that
    of dy * weight * n: dx = (dy * weight - s / m - n * p / m) / deviation.
    """
    x, dy, mean, inverse = (c.value(a[name]) for name in ("input", "grad_out", "mean", "rstd"))
    if not takes_group_norm(c, x):
        raise Skip
    g, groups, (n, channels, *pixels) = c.g, int(a["group"]), x.shape
    made, weight = dy.dtype, None if a["weight"] is None else c.value(a["weight"])

    def cast(value: Value, dtype: torch.dtype = mean.dtype) -> Value:
        return value if value.dtype == dtype else g.cast(value, dtype)

    x, dy = cast(x), cast(dy)
    over, width = tuple(range(2, len(x.shape))), channels // groups
    column = (n, channels, *(1,) * len(pixels))

    def by_channel(statistic: Value) -> Value:
        wide = g.expand(g.reshape(statistic, (n, groups, 1)), (n, groups, width))
        return g.reshape(wide, column)

    def of_group(sums: Value) -> Value:
        """The mean over a group of what the sums of its channels are of, for each channel."""
        total = g.reduction(g.reshape(sums, (n, groups, width)), 2, "sum", True)
        return by_channel(g.mul(total, 1.0 / (width * math.prod(pixels))))

    inverse = by_channel(inverse)
    normal = g.mul(g.sub(x, by_channel(mean)), inverse)
    sums = g.reduction(dy, over, "sum", True)
    products = g.reduction(g.mul(dy, normal), over, "sum", True)
    of_x, of_weight, of_bias = a["output_mask"]
    dx = None
    if of_x:
        gain = None
        if weight is not None:
            gain = g.reshape(g.expand(cast(weight), (n, channels), (1,)), column)
        scaled, first, second = (
            each if gain is None else g.mul(each, gain) for each in (dy, sums, products)
        )
        pull = g.add(of_group(first), g.mul(normal, of_group(second)))
        dx = cast(g.mul(g.sub(scaled, pull), inverse), made)
    rows = (g.reshape(each, (n, channels)) for each in (products, sums))
    kind = made if weight is None else weight.dtype
    vectors = (
        cast(g.reduction(each, 0), kind) if wanted else None
        for each, wanted in zip(rows, (of_weight, of_bias), strict=True)
    )
    return (dx, *vectors)


def _softmax(c: Importer, a: Arguments) -> Value:
    return c.g.softmax(_of_softmax(c, a), a["dim"])


def _of_softmax(c: Importer, a: Arguments) -> Value:
    """The operand of a softmax, in the dtype that it is computed in."""
    x, dtype = c.value(a["self"]), a.get("dtype")
    if a.get("half_to_float"):
        dtype = torch.float32
    if dtype in (None, x.dtype):
        return x
    if not c.kernels or x.dtype not in FLOATS or dtype not in FLOATS:
        raise Skip
    return c.g.cast(x, dtype)


def _safe_softmax(c: Importer, a: Arguments) -> Value:
    """Zeros of a row that is -inf throughout."""
    x = c.value(a["self"])
    if x.dtype == torch.float64:
        raise Skip  # the least number is no attribute of a float32
    most = c.g.reduction(x, a["dim"], "max", True)
    least = torch.finfo(x.dtype).min
    return c.g.where(c.g.lt(most, least), 0.0, c.g.softmax(x, a["dim"]))


def _log_softmax(c: Importer, a: Arguments) -> Value:
    return c.g.log_softmax(_of_softmax(c, a), a["dim"])


def _softmax_backward(c: Importer, a: Arguments) -> Value:
    return c.g.softmax_backward(c.value(a["grad_output"]), c.value(a["output"]), a["dim"])


def _log_softmax_backward(c: Importer, a: Arguments) -> Value:
    return c.g.log_softmax_backward(c.value(a["grad_output"]), c.value(a["output"]), a["dim"])


RULES: dict[str, Rule] = {
    "_native_batch_norm_legit_functional": _batch_norm_train,
    "native_batch_norm_backward": _batch_norm_backward,
    "convolution_backward": _convolution_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    **dict.fromkeys(("_softmax", "softmax", "special_softmax"), _softmax),
    "_safe_softmax": _safe_softmax,
    **dict.fromkeys(("_log_softmax", "log_softmax", "special_log_softmax"), _log_softmax),
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
}

#: See :mod:`~cudnngraph.models.group_norms`.
FOREIGN: dict[str, Rule] = {"cudnngraph::group_norm_backward": _group_norm_backward}
