"""Rules for ops of training: batch norms with statistics, and gradients of ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...errors import FeatureMissing
from ...graph.value import Value
from ...ops.resampling import in_padding
from .base import Arguments, Rule, Skip, spread

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
    return c.g.batch_norm_train(x, *affine, *running, eps=eps, momentum=momentum)


def _batch_norm_backward(c: Importer, a: Arguments) -> tuple[Any, ...]:
    if not a["train"]:
        raise Skip
    dy, x, mean, deviation = (
        c.value(a[name]) for name in ("grad_out", "input", "save_mean", "save_invstd")
    )
    made = c.g.batch_norm_backward(dy, x, _affine(c, a, "weight", 1.0), mean, deviation)
    return tuple(
        value if wanted else None for value, wanted in zip(made, a["output_mask"], strict=True)
    )


def _convolution_backward(c: Importer, a: Arguments) -> tuple[Any, ...]:
    dy, x, weight = (c.value(a[name]) for name in ("grad_output", "input", "weight"))
    rank = len(x.shape) - 2
    if a["transposed"] or rank not in (1, 2, 3):
        raise Skip
    geometry: dict[str, Any] = {
        name: spread(a[name], rank) for name in ("stride", "padding", "dilation")
    }
    geometry["groups"] = a["groups"]
    kernel = weight.shape[2:]
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
    of_x, of_weight, of_bias = a["output_mask"]
    return (
        c.g.conv_transpose(dy, weight, output_padding=extra, **geometry) if of_x else None,
        c.g.conv_wgrad(dy, x, kernel=kernel, **geometry) if of_weight else None,
        c.g.reduction(dy, (0, *range(2, rank + 2))) if of_bias else None,
    )


def _threshold_backward(c: Importer, a: Arguments) -> Value:
    if a["threshold"] != 0:
        raise Skip
    return c.g.relu_backward(c.value(a["grad_output"]), c.value(a["self"]))


def _max_pool_backward(rank: int) -> Rule:
    """torch's own, where it does no harm."""

    def rule(c: Importer, a: Arguments) -> Any:
        x, dy = c.value(a["self"]), c.value(a["grad_output"])
        window, padding, dilation = (
            spread(a[name], rank) for name in ("kernel_size", "padding", "dilation")
        )
        stride = spread(a["stride"] or window, rank)
        many = zip(x.shape[-rank:], dy.shape[-rank:], stride, padding, dilation, strict=True)
        if any(in_padding(*each) for each in many):
            raise FeatureMissing(
                f"{c.name}: {c.node.target}: a window lies in the padding alone, and torch's "
                "gradient would write outside of its result: dilate less, or pad less"
            )
        raise Skip

    return rule


RULES: dict[str, Rule] = {
    "_native_batch_norm_legit_functional": _batch_norm_train,
    "native_batch_norm_backward": _batch_norm_backward,
    "convolution_backward": _convolution_backward,
    "threshold_backward": _threshold_backward,
    **{f"max_pool{rank}d_with_indices_backward": _max_pool_backward(rank) for rank in (2, 3)},
}
