"""Norms over trailing dims, as layer norm and RMS norm are: rows, inference and reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .base import InferContext, InferRule, Result, Tensors, dtype_name, register
from .checks import (
    eps_attr,
    flag,
    float_operand,
    like_order,
    param_dtype,
    same_dtype,
    same_shape,
    statistics_dtype,
)
from .operands import need


def _trailing_norm(*stats: str) -> InferRule:
    """``stats`` are the outputs behind y: float32, the shape of x with 1 for what is summed up."""

    def infer(call: InferContext) -> list[Result | None] | None:
        x, weight = call["x"], call["weight"]
        if not float_operand(call, "x"):
            return None
        ok, count = True, len(weight.shape)
        if count == 0 or x.shape[-count:] != weight.shape:
            call.problem(
                f"weight '{weight.name}' has shape {weight.shape}",
                f"the last dims of x '{x.name}' {x.shape}",
            )
            ok = False
        for port in ("weight", "bias"):
            if call.get(port) is not None:
                ok &= param_dtype(call, port)
        bias = call.get("bias")
        if bias is not None and bias.shape != weight.shape:
            call.problem(
                f"bias '{bias.name}' has shape {bias.shape}", f"{weight.shape}, that of the weight"
            )
            ok = False
        ok &= eps_attr(call) is not None
        before = len(call.problems)
        wanted = flag(call, "return_stats")
        if not ok or len(call.problems) > before:
            return None
        order = like_order(x)
        lead = len(x.shape) - count
        stat = Result((*x.shape[:lead], *(1,) * count), statistics_dtype(x), order)
        return [Result(x.shape, x.dtype, order), *(stat if wanted else None for _ in stats)]

    return infer


def _normalize(call: InferContext) -> list[Result] | None:
    x = call["x"]
    if not x.shape:
        call.problem(f"x '{x.name}' has no dims", "at least one: rows of numbers")
        return None
    if not float_operand(call, "x") or eps_attr(call) is None:
        return None
    return [Result(x.shape, x.dtype, like_order(x))]


def _trailing_norm_backward(*stats: str) -> InferRule:
    """``stats`` are the ports behind the weight: float32, x's shape with 1 for what is summed."""

    def infer(call: InferContext) -> list[Result | None] | None:
        x, weight = call["x"], call["weight"]
        ok = same_dtype(call, "x", "dy") and same_shape(call, "x", "dy")
        count = len(weight.shape)
        if count == 0 or x.shape[-count:] != weight.shape:
            call.problem(
                f"weight '{weight.name}' has shape {weight.shape}",
                f"the last dims of x '{x.name}' {x.shape}",
            )
            return None
        ok &= param_dtype(call, "weight")
        shape = (*x.shape[: len(x.shape) - count], *(1,) * count)
        for port in stats:
            stat = call[port]
            if stat.shape != shape or stat.dtype != statistics_dtype(x):
                call.problem(
                    f"{port} '{stat.name}' is {dtype_name(stat.dtype)} {stat.shape}",
                    f"{dtype_name(statistics_dtype(x))} {shape}",
                )
                ok = False
        before = len(call.problems)
        with_bias = flag(call, "bias_grad")
        if not ok or len(call.problems) > before:
            return None
        vector = Result(weight.shape, weight.dtype, like_order(weight))
        return [Result(x.shape, x.dtype, like_order(x)), vector, vector if with_bias else None]

    return infer


def _trailing(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, ...]:
    return tuple(range(x.dim() - weight.dim(), x.dim()))


def _run_layer_norm(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    x, weight = need(inputs[0]), need(inputs[1])
    dims = _trailing(x, weight)
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    inverse = torch.rsqrt(centred.square().mean(dims, keepdim=True) + attrs["eps"])
    y = centred * inverse * weight
    y = y if inputs[2] is None else y + inputs[2]
    return (y, mean, inverse) if attrs["return_stats"] else (y, None, None)


def _run_rms_norm(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    x, weight = need(inputs[0]), need(inputs[1])
    inverse = torch.rsqrt(x.square().mean(_trailing(x, weight), keepdim=True) + attrs["eps"])
    y = x * inverse * weight
    y = y if inputs[2] is None else y + inputs[2]
    return (y, inverse) if attrs["return_stats"] else (y, None)


def _run_normalize(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x = need(inputs[0])
    return x / x.square().sum(-1, keepdim=True).sqrt().clamp_min(attrs["eps"])


def _run_layer_norm_backward(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    dy, x, weight, mean, inverse = (need(value) for value in inputs)
    dims, lead = _trailing(x, weight), tuple(range(x.dim() - weight.dim()))
    normal, scaled = (x - mean) * inverse, dy * weight
    pull = scaled.mean(dims, keepdim=True)
    pull = pull + normal * (scaled * normal).mean(dims, keepdim=True)
    dweight, dbias = _sum(dy * normal, lead), _sum(dy, lead)
    return inverse * (scaled - pull), dweight, dbias if attrs["bias_grad"] else None


def _run_rms_norm_backward(
    inputs: Tensors, attrs: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    dy, x, weight, inverse = (need(value) for value in inputs)
    dims, lead = _trailing(x, weight), tuple(range(x.dim() - weight.dim()))
    normal, scaled = x * inverse, dy * weight
    pull = normal * (scaled * normal).mean(dims, keepdim=True)
    dweight, dbias = _sum(dy * normal, lead), _sum(dy, lead)
    return inverse * (scaled - pull), dweight, dbias if attrs["bias_grad"] else None


def _sum(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return x.sum(tuple(dims)) if dims else x  # torch's sum over no dim is one over all


register(
    "layer_norm",
    "x weight bias?",
    _trailing_norm("mean", "inv_std"),
    _run_layer_norm,
    outputs="y mean inv_std",
    eps=1e-5,
    return_stats=False,
    traits="row_norm",
    stats_flag="return_stats",
)
register(
    "rms_norm",
    "x weight bias?",
    _trailing_norm("inv_std"),
    _run_rms_norm,
    outputs="y inv_std",
    eps=1e-5,
    return_stats=False,
    traits="row_norm",
    stats_flag="return_stats",
)
register("normalize", "x", _normalize, _run_normalize, eps=1e-12, traits="row_norm")
register(
    "layer_norm_backward",
    "dy x weight mean inv_std",
    _trailing_norm_backward("mean", "inv_std"),
    _run_layer_norm_backward,
    outputs="dx dweight dbias",
    bias_grad=True,
)
register(
    "rms_norm_backward",
    "dy x weight inv_std",
    _trailing_norm_backward("inv_std"),
    _run_rms_norm_backward,
    outputs="dx dweight dbias",
    bias_grad=True,
)
