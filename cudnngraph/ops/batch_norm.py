"""Batch norm and the ops that take one number per channel: inference and rows."""

from __future__ import annotations

from .base import Call, InferRule, Result, register
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


def _per_channel(port: str) -> InferRule:
    def infer(call: Call) -> list[Result] | None:
        if not has_channels(call) or not channels(call, port, of_images=True):
            return None
        x = call["x"]
        return [Result(x.shape, x.dtype, like_order(x))]

    return infer


def _batch_norm(call: Call) -> list[Result] | None:
    if not has_channels(call):
        return None
    used = [port for port in ("running_mean", "running_var", "weight", "bias") if call.get(port)]
    ok = all([channels(call, port) for port in used])
    if eps_attr(call) is None or not ok:
        return None
    x = call["x"]
    return [Result(x.shape, x.dtype, like_order(x))]


def _batch_norm_apply(call: Call) -> list[Result] | None:
    if not has_channels(call):
        return None
    if not all([channels(call, port) for port in ("mean", "inv_std", "weight", "bias")]):
        return None
    x = call["x"]
    return [Result(x.shape, x.dtype, like_order(x))]


def _batch_norm_train(call: Call) -> list[Result | None] | None:
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


def _batch_norm_backward(call: Call) -> list[Result] | None:
    if not has_channels(call):
        return None
    ok = all([channels(call, port) for port in ("weight", "mean", "inv_std")])
    if not same_dtype(call, "x", "dy") or not same_shape(call, "x", "dy") or not ok:
        return None
    x, weight = call["x"], call["weight"]
    vector = Result(weight.shape, weight.dtype, tuple(range(len(weight.shape))))
    return [Result(x.shape, x.dtype, like_order(x)), vector, vector]


register(
    "batch_norm_train",
    "x weight bias running_mean? running_var?",
    _batch_norm_train,
    outputs="y mean inv_std next_running_mean next_running_var",
    eps=1e-5,
    momentum=0.1,
)
register(
    "batch_norm_backward",
    "dy x weight mean inv_std",
    _batch_norm_backward,
    outputs="dx dweight dbias",
)
register(
    "batch_norm",
    "x running_mean running_var weight? bias?",
    _batch_norm,
    pointwise=True,
    eps=1e-5,
)
register("batch_norm_apply", "x mean inv_std weight bias", _batch_norm_apply, pointwise=True)
register("bias", "x bias", _per_channel("bias"), pointwise=True)
register("scale", "x scale", _per_channel("scale"), pointwise=True)
