"""Batch norm and the ops that take one number per channel: rows, inference and reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .base import InferContext, InferRule, Result, Tensors, register
from .checks import (
    channels,
    eps_attr,
    has_channels,
    like_order,
    number_attr,
    same_dtype,
    same_shape,
    statistics_dtype,
)
from .operands import all_but_channels, channel, need


def _per_channel(port: str) -> InferRule:
    def infer(call: InferContext) -> list[Result] | None:
        if not has_channels(call) or not channels(call, port, of_images=True):
            return None
        x = call["x"]
        return [Result(x.shape, x.dtype, like_order(x))]

    return infer


def _batch_norm(call: InferContext) -> list[Result] | None:
    if not has_channels(call):
        return None
    used = [port for port in ("running_mean", "running_var", "weight", "bias") if call.get(port)]
    ok = all([channels(call, port) for port in used])
    if eps_attr(call) is None or not ok:
        return None
    x = call["x"]
    return [Result(x.shape, x.dtype, like_order(x))]


def _batch_norm_apply(call: InferContext) -> list[Result] | None:
    if not has_channels(call):
        return None
    if not all([channels(call, port) for port in ("mean", "inv_std", "weight", "bias")]):
        return None
    x = call["x"]
    return [Result(x.shape, x.dtype, like_order(x))]


def _batch_norm_train(call: InferContext) -> list[Result | None] | None:
    if not has_channels(call):
        return None
    x = call["x"]
    running = [port for port in ("running_mean", "running_var") if call.get(port) is not None]
    ok = all([channels(call, port) for port in ("weight", "bias", *running)])
    if len(running) == 1:
        call.problem(f"{running[0]} is given alone", "running_mean and running_var, or neither")
        ok = False
    values = x.numel // x.shape[1] if x.shape[1] else 0
    if values < 2:
        call.problem(
            f"x '{x.name}' has {values} values per channel {x.shape}",
            "at least 2, to have a variance",
        )
        ok = False
    eps, momentum = eps_attr(call), number_attr(call, "momentum")
    if eps is None or momentum is None or not ok:
        return None
    statistics = Result((x.shape[1],), statistics_dtype(x), (0,))
    following: list[Result | None] = [None, None]
    if running:
        specs = [call[port] for port in running]
        following = [Result(s.shape, s.dtype, tuple(range(len(s.shape)))) for s in specs]
    return [Result(x.shape, x.dtype, like_order(x)), statistics, statistics, *following]


def _batch_norm_backward(call: InferContext) -> list[Result] | None:
    if not has_channels(call):
        return None
    ok = all([channels(call, port) for port in ("weight", "mean", "inv_std")])
    if not same_dtype(call, "x", "dy") or not same_shape(call, "x", "dy") or not ok:
        return None
    x, weight = call["x"], call["weight"]
    vector = Result(weight.shape, weight.dtype, tuple(range(len(weight.shape))))
    return [Result(x.shape, x.dtype, like_order(x)), vector, vector]


def _run_batch_norm(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x = need(inputs[0])
    mean, var = channel(inputs[1], x), channel(inputs[2], x)
    y = (x - mean) * torch.rsqrt(var + attrs["eps"])
    if inputs[3] is not None:
        y = y * channel(inputs[3], x)
    if inputs[4] is not None:
        y = y + channel(inputs[4], x)
    return y


def _run_batch_norm_apply(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x = need(inputs[0])
    mean, inv_std, weight, bias = (channel(each, x) for each in inputs[1:])
    return (x - mean) * inv_std * weight + bias


def _run_batch_norm_train(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    x, weight, bias = need(inputs[0]), channel(inputs[1], inputs[0]), inputs[2]
    dims = all_but_channels(x)
    mean, var = x.mean(dims), x.var(dims, unbiased=False)
    inv_std = torch.rsqrt(var + attrs["eps"])
    y = (x - channel(mean, x)) * channel(inv_std, x) * weight + channel(bias, x)
    if inputs[3] is None or inputs[4] is None:
        return y, mean, inv_std, None, None
    momentum, count = attrs["momentum"], x.numel() // x.shape[1]
    unbiased = var * (count / (count - 1))
    following = [
        (1 - momentum) * running + momentum * now.view(running.shape)
        for running, now in ((inputs[3], mean), (inputs[4], unbiased))
    ]
    return y, mean, inv_std, *following


def _run_batch_norm_backward(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dy, x, weight = need(inputs[0]), need(inputs[1]), need(inputs[2])
    mean, inv_std = channel(inputs[3], x), channel(inputs[4], x)
    dims, count = all_but_channels(x), x.numel() // max(x.shape[1], 1)
    normal = (x - mean) * inv_std
    dbias = dy.sum(dims)
    dweight = (dy * normal).sum(dims)
    pull = (channel(dbias, x) + normal * channel(dweight, x)) / count
    dx = channel(weight, x) * inv_std * (dy - pull)
    return dx, dweight.view(weight.shape), dbias.view(weight.shape)


register(
    "batch_norm_train",
    "x weight:channels bias:channels running_mean?:channels running_var?:channels",
    _batch_norm_train,
    _run_batch_norm_train,
    outputs="y mean:channels inv_std:channels next_running_mean:channels next_running_var:channels",
    eps=1e-5,
    momentum=0.1,
    traits="across_images adds_up",
)
register(
    "batch_norm_backward",
    "dy x weight:channels mean:channels inv_std:channels",
    _batch_norm_backward,
    _run_batch_norm_backward,
    outputs="dx dweight:channels dbias:channels",
    traits="across_images adds_up",
)
register(
    "batch_norm",
    "x running_mean:channels running_var:channels weight?:channels bias?:channels",
    _batch_norm,
    _run_batch_norm,
    pointwise=True,
    eps=1e-5,
    traits="fp16_safe",
    positive_port="running_var",
)
register(
    "batch_norm_apply",
    "x mean:channels inv_std:channels weight:channels bias:channels",
    _batch_norm_apply,
    _run_batch_norm_apply,
    pointwise=True,
    traits="fp16_safe",
)
register(
    "bias",
    "x bias:channels",
    _per_channel("bias"),
    lambda inputs, attrs: need(inputs[0]) + channel(inputs[1], need(inputs[0])),
    pointwise=True,
    traits="fp16_safe keeps_positive",
)
register(
    "scale",
    "x scale:channels",
    _per_channel("scale"),
    lambda inputs, attrs: need(inputs[0]) * channel(inputs[1], need(inputs[0])),
    pointwise=True,
    traits="fp16_safe keeps_positive",
)
