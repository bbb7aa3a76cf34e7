"""Quantisation to 8 bits and back: inference and rows."""

from __future__ import annotations

import torch

from .base import QUANTIZED, REQUIRED, Call, Result, dtype_name, register
from .checks import dim_attr, float_operand, is_whole, like_order


def _quantization(call: Call) -> bool:
    """Checks the scale, a float32 number or vector along ``dim`` of x, and the zero point."""
    x, scale = call["x"], call.get("scale")
    before = len(call.problems)
    point = call.attrs["zero_point"]
    if not is_whole(point) or point != 0:
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


def _dequantize(call: Call) -> list[Result] | None:
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


def _quantize(call: Call) -> list[Result] | None:
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


register("dequantize", "x scale", _dequantize, pointwise=True, dim=1, zero_point=0)
register(
    "quantize",
    "x scale?",
    _quantize,
    pointwise=True,
    dtype=REQUIRED,
    dim=1,
    zero_point=0,
)
