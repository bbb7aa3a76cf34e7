"""Quantisation to 8 bits and back: rows, inference and reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .base import QUANTIZED, REQUIRED, InferContext, Result, Tensors, dtype_name, register
from .checks import dim_attr, float_operand, is_int, like_order
from .operands import need


def _quantization(call: InferContext) -> bool:
    """Checks the scale, a float32 number or vector along ``dim`` of x, and the zero point."""
    x, scale = call["x"], call.get("scale")
    before = len(call.problems)
    point = call.attrs["zero_point"]
    if not is_int(point) or point != 0:
        call.problem(
            f"zero_point={point!r}", "0: quantisation is symmetric here", "shift the data instead"
        )
    else:
        call.attrs["zero_point"] = 0
    if scale is None:
        call.attrs["dim"] = 1
        return len(call.problems) == before
    if scale.dtype != torch.float32:
        call.problem(
            f"scale '{scale.name}' is {dtype_name(scale.dtype)}", "float32", "convert scale"
        )
    if scale.shape in ((), (1,)):
        call.attrs["dim"] = 1  # says nothing
        return len(call.problems) == before
    dim = dim_attr(call, "dim", len(x.shape))
    if dim is not None and scale.shape != (x.shape[dim],):
        call.problem(
            f"scale '{scale.name}' has shape {scale.shape}",
            f"() or (1,) for all of x, or ({x.shape[dim]},) along dim {dim} of x {x.shape}",
        )
    return len(call.problems) == before


def _dequantize(call: InferContext) -> list[Result] | None:
    x = call["x"]
    ok = x.dtype in (*QUANTIZED, torch.int32, torch.float32)
    if not ok:
        call.problem(
            f"x '{x.name}' is {dtype_name(x.dtype)}",
            "int8, FP8, or the int32 or float32 that their products give",
            "multiply or scale it",
        )
    if not _quantization(call) or not ok:
        return None
    return [Result(x.shape, torch.float32, like_order(x))]


def _quantize(call: InferContext) -> list[Result] | None:
    x, given = call["x"], call.attrs["dtype"]
    ok = float_operand(call, "x")
    kinds = {dtype_name(dtype): dtype for dtype in QUANTIZED}
    name = dtype_name(given) if isinstance(given, torch.dtype) else given
    dtype = kinds.get(name) if isinstance(name, str) else None
    if dtype is None:
        call.problem(f"dtype={given!r} is no 8-bit dtype", " or ".join(f"torch.{k}" for k in kinds))
    if not _quantization(call) or not ok or dtype is None:
        return None
    call.attrs["dtype"] = name
    return [Result(x.shape, dtype, like_order(x))]


def _along(scale: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """A scale so that it broadcasts: one for all of x, or one for each index of ``dim``."""
    if scale.numel() == 1:
        return scale.reshape(())
    return scale.reshape([-1 if place == dim else 1 for place in range(x.dim())])


def _run_dequantize(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, scale = need(inputs[0]), need(inputs[1])
    return x.to(scale.dtype) * _along(scale, x, attrs["dim"])


def _run_quantize(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, scale = need(inputs[0]), inputs[1]
    if scale is not None:
        x = x / _along(scale, x, attrs["dim"])
    return saturated(x, getattr(torch, attrs["dtype"]))


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded to the nearest number of an 8-bit dtype, ties to even; its largest where x is
    beyond. In FP8 what is not finite is NaN."""
    if dtype == torch.int8:
        return x.round().clamp(-128, 127).to(dtype)
    limit = torch.finfo(dtype).max
    return (x.clamp(-limit, limit) + x * 0.0).to(dtype)


register(
    "dequantize",
    "x scale:scale",
    _dequantize,
    _run_dequantize,
    pointwise=True,
    dim=1,
    zero_point=0,
    traits="own_data",
)
register(
    "quantize",
    "x scale?:scale",
    _quantize,
    _run_quantize,
    pointwise=True,
    dtype=REQUIRED,
    dim=1,
    zero_point=0,
    traits="own_data",
)
