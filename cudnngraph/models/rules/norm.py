"""Rules for norms: of batches, rows and groups of channels, and RMS norms written out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...device.import_rules import ANY
from ...device.rules import rules
from ...graph.value import Value
from ...ir.spec import (
    is_channels_last,
    is_contiguous,
)
from ...ops import meta as forms
from ...ops.base import LOW_PRECISION
from ..aten_ops import NORMS, OF_BATCHES
from ..norm_patterns import match_rms_norm
from .base import Arguments, Rule, Skip, gives_many, reads

if TYPE_CHECKING:
    from ..convert import Importer


@dataclass(frozen=True)
class Norm:
    """A batch norm with given statistics, in float64: y = (x - mean) * scale + offset along the
    channels, where (x - mean) * scale has the standard deviation ``gain``."""

    mean: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    gain: torch.Tensor

    @property
    def shift(self) -> torch.Tensor:
        """y = x * scale + shift."""
        return self.offset - self.mean * self.scale


def norm_of(packet: Any, a: Arguments) -> Norm | None:
    if packet not in NORMS or a.get("training", a.get("train", False)):
        return None
    mean, var = a["running_mean"], a["running_var"]
    given = [mean, var, a["weight"], a["bias"]]
    if (
        mean is None
        or var is None
        or any(each is not None and not isinstance(each, torch.Tensor) for each in given)
    ):
        return None
    inverse = torch.rsqrt(var.double() + float(a["eps"]))
    gain = torch.ones_like(inverse) if a["weight"] is None else a["weight"].double()
    offset = torch.zeros_like(inverse) if a["bias"] is None else a["bias"].double()
    return Norm(mean.double(), inverse * gain, offset, gain)


def _batch_norm(c: Importer, a: Arguments) -> Any:
    """One that no convolution took in: a scale and a bias."""
    norm = norm_of(c.node.target.overloadpacket, a)
    if norm is None:
        return _with_given_statistics(c, a)
    x = c.value(a["input"])
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = c.g.scale(x, c.constant(norm.scale.to(wide), "scale"))
    y = c.g.bias(y, c.constant(norm.shift.to(wide), "shift"))
    return (y, None, None) if gives_many(c.node) else y


def _with_given_statistics(c: Importer, a: Arguments) -> Any:
    """A batch norm by running statistics that are no constants, as in training with norms frozen.

    What it saves for its gradient has no elements on a CPU.
    """
    if a.get("training", False) or a["running_mean"] is None or a["running_var"] is None:
        raise Skip
    eps = float(a["epsilon" if "epsilon" in a else "eps"])
    x, mean, var = (c.value(a[name]) for name in ("input", "running_mean", "running_var"))
    weight, bias = (None if a[name] is None else c.value(a[name]) for name in ("weight", "bias"))
    if (weight is None) != (bias is None):
        raise Skip
    y = c.g.batch_norm(x, mean, var, weight, bias, eps=eps)
    if not gives_many(c.node):
        return y
    saved: list[Any] = [None, None]
    for place, number in enumerate((1, 2)):
        if not reads(c.node, number):
            continue
        seen = c.node.meta["val"][number]
        if seen.numel() == 0:
            given = [value.dtype for value in (x, mean, var)]
            dtype = forms.dtype_made(c.node.target, number, seen.dtype, given)
            saved[place] = torch.empty(0, dtype=dtype, device=c.device)
        else:
            saved[place] = c.g.identity(mean) if number == 1 else c.g.rsqrt(c.g.add(var, eps))
    return (y, *saved)


def written_norm(c: Importer) -> Value | None:
    """Fuse an RMS norm that the model writes out and that ends in this node; None for others.

    The node is a product, a quotient or a conversion.
    """
    found = match_rms_norm(c.node)
    if found is None:
        return None
    x, weight, seen = c.env[found.x], None, c.node.meta["val"]
    if found.weight is not None:
        weight = c.env[found.weight]
    if not isinstance(x, Value) or (x.shape, x.dtype) != (tuple(seen.shape), seen.dtype):
        return None
    if not x.shape:
        return None
    if weight is None:
        weight = torch.ones(x.shape[-1], dtype=x.dtype, device=c.device)
    if isinstance(weight, torch.Tensor) and weight.shape[-1:].numel() == weight.numel():
        weight = weight.flatten()
    if tuple(weight.shape) != x.shape[-1:] or weight.dtype not in (x.dtype, torch.float32):
        return None
    return c.g.rms_norm(x, c.value(weight), eps=found.eps)  # type: ignore[no-any-return]


def _layer_norm(c: Importer, a: Arguments) -> Any:
    x, weight = c.value(a["input"]), norm_weight(c, a)
    bias = None if a["bias"] is None else c.value(a["bias"])
    eps = float(a["eps"])
    if gives_many(c.node) and (reads(c.node, 1) or reads(c.node, 2)):
        return as_kept(c, a, c.g.layer_norm(x, weight, bias, eps=eps, return_stats=True))
    y = c.g.layer_norm(x, weight, bias, eps=eps)
    return (y, None, None) if gives_many(c.node) else y


def as_kept(c: Importer, a: Arguments, made: tuple[Value, ...]) -> tuple[Value, ...]:
    """A norm's results, with statistics in the dtypes that torch keeps them in. Where all operands
    have 16 bits, so have those of the batch on a CPU, and new running ones have not."""
    given = [each.dtype for each in a.values() if isinstance(each, (Value, torch.Tensor))]
    kept = [
        forms.dtype_made(c.node.target, number, seen.dtype, given)
        for number, seen in enumerate(c.node.meta["val"])
    ]
    if made[0].dtype != kept[0]:
        return made
    return tuple(
        value if value.dtype == dtype else c.g.cast(value, dtype)
        for value, dtype in zip(made, kept, strict=True)
    )


def widened(c: Importer, statistic: Any) -> Value:
    """What a norm has kept for its gradient, at least in float32."""
    value = c.value(statistic)
    return c.g.cast(value, torch.float32) if value.dtype in LOW_PRECISION else value


def takes_group_norm(c: Importer, x: Value) -> bool:
    """Whether a group norm of x is ours: for small images torch's own has less to launch than two
    steps have; where kernels are generated, it is one, unless a search has torch's measured."""
    contiguous = is_contiguous(x.shape, x.stride)
    least = 3 if c.kernels else 4
    if len(x.shape) < least or not (contiguous or is_channels_last(x.shape, x.stride)):
        return False
    fewest = rules().group_norm_min_elements_contiguous
    if not contiguous:
        fewest = rules().group_norm_min_elements_channels_last
    return (c.kernels and fewest < ANY) or math.prod(x.shape) >= fewest


def _group_norm(c: Importer, a: Arguments) -> Any:
    """A group norm by a shift and a factor for each channel, in the strides of its images.

    torch's copies images that lie channels last.
    """
    many = gives_many(c.node)
    x = c.value(a["input"])
    if len(x.shape) == 2 and not many:
        return _group_norm_of_rows(c, x, a)
    if not takes_group_norm(c, x):
        raise Skip
    weight, bias = None if a["weight"] is None else c.value(a["weight"]), a["bias"]
    groups = int(a["group" if many else "num_groups"])
    column = (*x.shape[:2], *(1,) * (len(x.shape) - 2))
    if many and (reads(c.node, 1) or reads(c.node, 2)):
        shift, inverse = c.g.group_affine(x, groups, eps=float(a["eps"]))
        factor = inverse
        if weight is not None:
            gain = c.g.reshape(c.g.expand(weight, x.shape[:2], (1,)), column)
            factor = c.g.mul(inverse, gain)
        statistics: list[Any] = [_of_groups(c, each, groups) for each in (c.g.neg(shift), inverse)]
    else:
        shift, factor = c.g.group_affine(x, groups, weight, eps=float(a["eps"]))
        statistics = [None, None]
    y = c.g.scale(c.g.bias(x, shift), factor)
    if isinstance(bias, torch.Tensor):
        y = c.g.bias(y, c.value(bias.repeat(x.shape[0]).view(column)))
    elif bias is not None:
        y = c.g.bias(y, c.g.reshape(c.g.expand(bias, x.shape[:2], (1,)), column))
    return (y, *statistics) if many else y


def _group_norm_of_rows(c: Importer, x: Value, a: Arguments) -> Value:
    """A group norm of rows (N, C), without an image: a layer norm of the groups of each row."""
    if not c.kernels:
        raise Skip
    size = x.shape[1] // int(a["num_groups"])
    ones = c.constant(torch.ones(size, dtype=x.dtype, device=c.device))
    y = c.g.layer_norm(c.g.reshape(x, (-1, size)), ones, eps=float(a["eps"]))
    y = c.g.reshape(y, x.shape)
    y = y if a["weight"] is None else c.g.mul(y, c.value(a["weight"]))
    return y if a["bias"] is None else c.g.add(y, c.value(a["bias"]))


def _group_affine(c: Importer, a: Arguments) -> tuple[Value, Value]:
    x = c.value(a["input"])
    if not takes_group_norm(c, x):
        raise Skip
    shift, factor = c.g.group_affine(x, int(a["group"]), eps=float(a["eps"]))
    return shift, factor


def _instance_norm(c: Importer, a: Arguments) -> Value:
    """An instance norm by its input's own statistics; one with running ones is torch's."""
    weight, bias = (None if a[name] is None else c.value(a[name]) for name in ("weight", "bias"))
    running = a["running_mean"] is not None  # which the norm writes, if it does not read them
    if running or not a["use_input_stats"] or (weight is None) != (bias is None):
        raise Skip
    x = c.value(a["input"])
    return c.g.instance_norm(x, weight, bias, eps=float(a["eps"]))  # type: ignore[no-any-return]


def _of_groups(c: Importer, statistic: Value, groups: int) -> Value:
    """(images, groups) of what all channels of a group have."""
    images, channels = statistic.shape[:2]
    flat = c.g.reshape(statistic, (images, groups, channels // groups))
    return c.g.reshape(c.g.slice(flat, 2, 0, 1), (images, groups))


def _rms_norm(c: Importer, a: Arguments) -> Value:
    x = c.value(a["input"])
    eps = forms.default_eps(x.dtype) if a["eps"] is None else float(a["eps"])
    weight = a["weight"]
    if isinstance(weight, torch.Tensor) and torch.promote_types(weight.dtype, x.dtype) == x.dtype:
        a = {**a, "weight": weight.to(x.dtype)}
    return c.g.rms_norm(x, norm_weight(c, a), eps=eps)  # type: ignore[no-any-return]


def norm_weight(c: Importer, a: Arguments) -> Value:
    """The weight of a norm, ones where it has none."""
    if a["weight"] is not None:
        return c.value(a["weight"])
    shape = list(a["normalized_shape"])
    return c.constant(torch.ones(shape, dtype=c.value(a["input"]).dtype, device=c.device))


RULES: dict[str, Rule] = {
    **dict.fromkeys(OF_BATCHES, _batch_norm),
    **dict.fromkeys(("group_norm", "native_group_norm"), _group_norm),
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
}

#: See :mod:`~cudnngraph.models.group_norms`.
FOREIGN: dict[str, Rule] = {
    "cudnngraph::group_norm": _group_norm,
    "cudnngraph::group_affine": _group_affine,
}
