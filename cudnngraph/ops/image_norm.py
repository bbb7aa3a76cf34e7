"""Norms over each image, as instance and group norm: rows, inference and reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..ir.spec import TensorSpec
from .base import REQUIRED, InferContext, Result, Tensors, dtype_name, register
from .checks import (
    channels,
    eps_attr,
    flag,
    float_operand,
    has_channels,
    like_order,
    same_dtype,
    same_shape,
    statistics_dtype,
)
from .operands import all_but_channels, channel, need


def _per_image(call: InferContext) -> bool:
    """The checks that instance norm and its gradient share."""
    x = call["x"]
    if len(x.shape) < 3:
        call.problem(f"x '{x.name}' has {len(x.shape)} dims {x.shape}", "at least 3: (N, C, ...)")
        return False
    ok = float_operand(call, "x")
    given = [port for port in ("weight", "bias") if call.inputs.get(port) is not None]
    if given and "bias" in call.inputs and len(given) == 1:
        call.problem(f"{given[0]} is given alone", "weight and bias, or neither")
        ok = False
    return all([channels(call, port) for port in given]) and ok


def _image_statistic(x: TensorSpec) -> Result:
    """One number for each channel of each image, at the rank of x."""
    shape = (*x.shape[:2], *(1,) * (len(x.shape) - 2))
    return Result(shape, statistics_dtype(x), like_order(x))


def _instance_norm(call: InferContext) -> list[Result | None] | None:
    ok = _per_image(call)
    before = len(call.problems)
    wanted = flag(call, "return_stats")
    if eps_attr(call) is None or not ok or len(call.problems) > before:
        return None
    x = call["x"]
    stat = _image_statistic(x) if wanted else None
    return [Result(x.shape, x.dtype, like_order(x)), stat, stat]


def _group_affine(call: InferContext) -> list[Result | None] | None:
    before = len(call.problems)
    if not has_channels(call):
        return None
    if call.inputs.get("weight") is not None:
        channels(call, "weight")
    x, groups = call["x"], call.attrs["num_groups"]
    c = x.shape[1]
    whole = isinstance(groups, int) and not isinstance(groups, bool)
    if not whole or groups < 1 or c % groups:
        call.problem(f"num_groups is {groups!r}", f"a divisor of the {c} channels of x")
    if eps_attr(call) is None or len(call.problems) > before:
        return None
    return [_image_statistic(x)] * 2


def _instance_norm_backward(call: InferContext) -> list[Result | None] | None:
    if not _per_image(call):
        return None
    ok = same_dtype(call, "x", "dy") and same_shape(call, "x", "dy")
    x, weight = call["x"], call.get("weight")
    stat = _image_statistic(x)
    for port in ("mean", "inv_std"):
        spec = call[port]
        if (spec.shape, spec.dtype) != (stat.shape, stat.dtype):
            call.problem(
                f"{port} '{spec.name}' is {dtype_name(spec.dtype)} {spec.shape}",
                f"{dtype_name(stat.dtype)} {stat.shape}",
            )
            ok = False
    if not ok:
        return None
    vector = None
    if weight is not None:
        vector = Result(weight.shape, weight.dtype, tuple(range(len(weight.shape))))
    return [Result(x.shape, x.dtype, like_order(x)), vector, vector]


def _run_instance_norm(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    x, dims = need(inputs[0]), list(range(2, need(inputs[0]).dim()))
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    inverse = torch.rsqrt(centred.square().mean(dims, keepdim=True) + attrs["eps"])
    y = centred * inverse
    if inputs[1] is not None:
        y = y * channel(inputs[1], x) + channel(inputs[2], x)
    return (y, mean, inverse) if attrs["return_stats"] else (y, None, None)


def _run_group_affine(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    x, weight, groups = need(inputs[0]), inputs[1], attrs["num_groups"]
    n, c, *pixels = x.shape
    rows = x.reshape(n, groups, c // groups * math.prod(pixels))
    mean = rows.mean(-1, keepdim=True)
    inverse = torch.rsqrt((rows - mean).square().mean(-1, keepdim=True) + attrs["eps"])
    shift, factor = (each.expand(n, groups, c // groups) for each in (-mean, inverse))
    factor = factor if weight is None else factor * weight.view(groups, -1)
    column = (n, c, *(1,) * len(pixels))
    return shift.reshape(column), factor.reshape(column)


def _run_instance_norm_backward(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    dy, x, mean, inverse = (need(value) for value in inputs[:4])
    weight, dims = inputs[4], list(range(2, x.dim()))
    normal = (x - mean) * inverse
    scaled = dy if weight is None else dy * channel(weight, x)
    pull = scaled.mean(dims, keepdim=True)
    pull = pull + normal * (scaled * normal).mean(dims, keepdim=True)
    dx = inverse * (scaled - pull)
    if weight is None:
        return dx, None, None
    over = all_but_channels(x)
    return dx, (dy * normal).sum(over).view(weight.shape), dy.sum(over).view(weight.shape)


register(
    "instance_norm",
    "x weight?:channels bias?:channels",
    _instance_norm,
    _run_instance_norm,
    outputs="y mean inv_std",
    eps=1e-5,
    return_stats=False,
    stats_flag="return_stats",
)
register(
    "instance_norm_backward",
    "dy x mean inv_std weight?",
    _instance_norm_backward,
    _run_instance_norm_backward,
    outputs="dx dweight dbias",
)
register(
    "group_affine",
    "x weight?",
    _group_affine,
    _run_group_affine,
    outputs="shift factor",
    torch_only=True,
    num_groups=REQUIRED,
    eps=1e-5,
    traits="own_data",
)
