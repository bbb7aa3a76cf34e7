"""Checks of operands and attributes that the inference rules of several op families share."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from ..ir.spec import TensorSpec, is_channels_last, is_contiguous, memory_order
from .base import FLOATS, FP8, LOW_PRECISION, QUANTIZED, InferContext, dtype_name

#: A sum of so many products of two int8 numbers may be 2^31, which int32 does not hold.
INT32_TERMS = 1 << 17

_FLOAT32_MAX = torch.finfo(torch.float32).max


def is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def each_dim(value: Any, rank: int) -> tuple[Any, ...]:
    """Spread a value, or a tuple of one, over all spatial dims; one a dim stays as it is."""
    many = tuple(value) if isinstance(value, (tuple, list, torch.Size)) else (value,)
    return many * rank if len(many) == 1 else many


def int_tuple(call: InferContext, attr: str, rank: int, low: int) -> tuple[int, ...] | None:
    """Canonical form: one int a spatial dim."""
    value = call.attrs[attr]
    many = each_dim(value, rank)
    if not all(is_int(item) for item in many):
        call.problem(
            f"{attr}={value!r} is not made of whole numbers", "an int, or one per spatial dim"
        )
        return None
    if len(many) != rank:
        call.problem(
            f"{attr}={value!r} has {len(many)} numbers", f"1 or {rank}, one per spatial dim of x"
        )
        return None
    if any(item < low for item in many):
        sign = "negative" if low == 0 else "not positive"
        call.problem(f"{attr}={value!r} is {sign}", f"every {attr} >= {low}")
        return None
    if not fits_int(call, attr, many):
        return None
    many = tuple(int(item) for item in many)
    call.attrs[attr] = many
    return many


def fits_int(call: InferContext, attr: str, many: Sequence[int]) -> bool:
    """Torch and cuDNN hold the geometry of windows in 32 bits."""
    if all(item < 1 << 31 for item in many):
        return True
    call.problem(f"{attr}={call.attrs[attr]!r} does not fit 32 bits", f"every {attr} < {1 << 31}")
    return False


def number_attr(call: InferContext, attr: str) -> float | None:
    """Canonical form: a finite float."""
    value = call.attrs[attr]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        call.problem(f"{attr}={value!r} is not a number", "a finite number")
        return None
    if not math.isfinite(value):
        call.problem(f"{attr}={value!r} is not finite", "a finite number")
        return None
    given = [spec for spec in call.inputs.values() if spec is not None]
    if given and abs(float(value)) > _FLOAT32_MAX and all(x.dtype != torch.float64 for x in given):
        call.problem(f"{attr}={value!r} is no float32", f"at most {_FLOAT32_MAX:.7g} in size")
        return None
    call.attrs[attr] = float(value)
    return float(value)


def eps_attr(call: InferContext) -> float | None:
    """Canonical form: a float >= 0."""
    eps = number_attr(call, "eps")
    if eps is not None and eps < 0:
        call.problem(f"eps={eps!r} is negative", "eps >= 0")
        return None
    return eps


def flag(call: InferContext, attr: str) -> bool:
    value = call.attrs[attr]
    if not isinstance(value, bool):
        call.problem(f"{attr}={value!r} is not a bool", "True or False")
        return False
    return value


def float_operand(call: InferContext, port: str) -> bool:
    spec = call[port]
    if spec.dtype in FLOATS:
        return True
    call.problem(
        f"{port} '{spec.name}' is {dtype_name(spec.dtype)}",
        "float16, bfloat16, float32 or float64",
        "dequantize or convert it first"
        if spec.dtype in (*QUANTIZED, torch.int32)
        else "convert it first",
    )
    return False


def same_dtype(call: InferContext, first: str, *others: str) -> bool:
    ok = float_operand(call, first)
    for port in others:
        if call[port].dtype != call[first].dtype:
            call.problem(
                f"{port} '{call[port].name}' is {dtype_name(call[port].dtype)}, "
                f"{first} '{call[first].name}' is {dtype_name(call[first].dtype)}",
                "the same dtype for both",
                f"convert {port}",
            )
            ok = False
    return ok


def factors(call: InferContext, first: str, second: str) -> torch.dtype | None:
    """The dtype of what the products of two operands of one dtype are summed up to; None if wrong.

    Of int8 that is int32, of FP8 (either format, or one of each) float32.
    """
    a, b = call[first], call[second]
    if a.dtype == b.dtype == torch.int8:
        return torch.int32
    if a.dtype in FP8 and b.dtype in FP8:
        return torch.float32
    if a.dtype in QUANTIZED or b.dtype in QUANTIZED:
        call.problem(
            f"{second} '{b.name}' is {dtype_name(b.dtype)}, "
            f"{first} '{a.name}' is {dtype_name(a.dtype)}",
            "int8 for both, FP8 for both or one floating dtype for both",
            "quantize one, or dequantize the other",
        )
        return None
    return a.dtype if same_dtype(call, first, second) else None


def fits_int32(call: InferContext, operand: str, terms: int) -> None:
    """Report a sum of int8 products that int32 need not hold."""
    if call[operand].dtype == torch.int8 and terms >= INT32_TERMS:
        call.problem(
            f"sums up {terms} products of int8, which int32 need not hold",
            f"fewer than {INT32_TERMS}",
            "cut it and add the parts",
        )


def same_shape(call: InferContext, first: str, *others: str) -> bool:
    ok = True
    for port in others:
        if call[port].shape != call[first].shape:
            call.problem(
                f"{port} '{call[port].name}' has shape {call[port].shape}",
                f"{call[first].shape}, the shape of {first}",
            )
            ok = False
    return ok


def param_dtype(call: InferContext, port: str, data: str = "x") -> bool:
    """Parameters share the dtype of the data or are float32 beside 16-bit data."""
    param, x = call[port], call[data]
    if param.dtype == x.dtype and x.dtype in FLOATS:
        return True
    if param.dtype == torch.float32 and x.dtype in LOW_PRECISION:
        return True
    call.problem(
        f"{port} '{param.name}' is {dtype_name(param.dtype)}, "
        f"{data} '{x.name}' is {dtype_name(x.dtype)}",
        f"{dtype_name(x.dtype)}"
        + ("" if x.dtype in (torch.float32, torch.float64) else " or float32"),
        f"convert {port}",
    )
    return False


def like_order(spec: TensorSpec) -> tuple[int, ...]:
    """The memory order that a result shaped like ``spec`` takes: its own, where that is one."""
    if any(s == 0 and n > 1 for n, s in zip(spec.shape, spec.stride, strict=True)):
        return tuple(range(len(spec.shape)))
    return memory_order(spec.shape, spec.stride)


def _channels_last_order(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


def conv_order(x: TensorSpec, weight: TensorSpec) -> tuple[int, ...]:
    """channels_last when x or the weight is unmistakably so (torch's rule), else contiguous."""
    rank = len(x.shape)
    for spec in (x, weight):
        if is_channels_last(spec.shape, spec.stride) and not is_contiguous(spec.shape, spec.stride):
            return _channels_last_order(rank)
    return tuple(range(rank))


def channels(call: InferContext, port: str, *, of_images: bool = False) -> bool:
    """A per-channel operand is (C,), or has C at dim 1 and 1 elsewhere at the rank of x.

    With ``of_images`` it may have N at dim 0 too: other numbers for each image.
    """
    spec, x = call[port], call["x"]
    ok = param_dtype(call, port)
    n, c = x.shape[:2]
    ones = (1,) * (len(x.shape) - 2)
    if spec.shape not in ((c,), (1, c, *ones), *([(n, c, *ones)] if of_images else ())):
        call.problem(f"{port} '{spec.name}' has shape {spec.shape}", f"({c},), the channels of x")
        ok = False
    return ok


def has_channels(call: InferContext) -> bool:
    x = call["x"]
    if len(x.shape) < 2:
        call.problem(f"x '{x.name}' has {len(x.shape)} dims {x.shape}", "at least 2: (N, C, ...)")
        return False
    return float_operand(call, "x")


def statistics_dtype(x: TensorSpec) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def broadcast_shapes(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """torch's rule: from the last dim back, sizes are equal or 1."""
    rank = max(map(len, shapes))
    out = []
    for sizes in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        real = {size for size in sizes if size != 1}
        if len(real) > 1:
            raise ValueError(f"{sizes} do not broadcast")
        out.append(real.pop() if real else 1)
    return tuple(out)


def dims_attr(call: InferContext, attr: str, value: Any, rank: int) -> tuple[int, ...] | None:
    """Canonical form: dims counted from the front, each once."""
    many = (value,) if is_int(value) else value
    if not isinstance(many, (tuple, list)) or not all(is_int(dim) for dim in many):
        call.problem(f"{attr}={value!r} is not made of whole numbers", "a dim, or several")
        return None
    if any(not -rank <= dim < rank for dim in many):
        call.problem(f"{attr}={value!r} is out of range", f"dims of a tensor of {rank} dims")
        return None
    front = tuple(int(dim) % rank for dim in many)
    if len(set(front)) != len(front):
        call.problem(f"{attr}={value!r} names a dim twice", "each dim once")
        return None
    return front


def dim_attr(call: InferContext, attr: str, rank: int) -> int | None:
    """Canonical form: a dim counted from the first one."""
    value = call.attrs[attr]
    if not is_int(value):
        call.problem(f"{attr}={value!r} is not a whole number", f"a dim of x, {rank} in all")
        return None
    if not -rank <= value < rank:
        call.problem(f"{attr}={value!r} is no dim of x", f"{-rank} to {rank - 1}" if rank else "")
        return None
    call.attrs[attr] = int(value) % rank
    return int(value) % rank


def whole_tuple(call: InferContext, attr: str) -> tuple[int, ...] | None:
    value = call.attrs[attr]
    many = tuple(value) if isinstance(value, (tuple, list, torch.Size)) else None
    if many is None or not all(is_int(item) for item in many):
        call.problem(f"{attr}={value!r} is not made of whole numbers", "a tuple of ints")
        return None
    return tuple(int(item) for item in many)
