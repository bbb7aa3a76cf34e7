"""The matrix product: row, inference and reference."""

from __future__ import annotations

import torch

from .base import InferContext, Result, register
from .checks import broadcast_shapes, factors, fits_int32
from .operands import exactly, need


def _matmul(call: InferContext) -> list[Result] | None:
    x, y = call["x"], call["y"]
    for port in ("x", "y"):
        if not 2 <= len(call[port].shape) <= 4:
            call.problem(
                f"{port} '{call[port].name}' has {len(call[port].shape)} dims {call[port].shape}",
                "2, 3 or 4: " + ("(..., M, K)" if port == "x" else "(..., K, N)"),
            )
            return None
    dtype = factors(call, "x", "y")
    ok = dtype is not None
    fits_int32(call, "x", x.shape[-1])
    if x.shape[-1] != y.shape[-2]:
        call.problem(
            f"y '{y.name}' {y.shape} has {y.shape[-2]} rows, x '{x.name}' {x.shape} has "
            f"{x.shape[-1]} columns",
            f"y (..., {x.shape[-1]}, N)",
            "transpose y" if x.shape[-1] == y.shape[-1] else "",
        )
        ok = False
    try:
        batch = broadcast_shapes([x.shape[:-2], y.shape[:-2]])
    except ValueError:
        call.problem(
            f"batch dims do not broadcast: x '{x.name}' {x.shape}, y '{y.name}' {y.shape}",
            "equal sizes, or 1, before the last two dims",
        )
        return None
    shape = (*batch, x.shape[-2], y.shape[-1])
    if dtype is None or not ok or call.problems:
        return None
    return [Result(shape, dtype, tuple(range(len(shape))))]


register(
    "matmul",
    "x y",
    _matmul,
    exactly(lambda inputs, attrs: torch.matmul(need(inputs[0]), need(inputs[1]))),
    traits="multiplies",
)
