"""Reductions over dims: row, inference and reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .base import InferContext, Result, Tensors, register
from .checks import dims_attr, float_operand, like_order
from .operands import need

MODES = ("sum", "mean", "max", "min", "amax")


def _reduction(call: InferContext) -> list[Result] | None:
    ok = float_operand(call, "x")
    x, mode = call["x"], call.attrs["mode"]
    rank = len(x.shape)
    if mode not in MODES:
        call.problem(f"mode={mode!r} is unknown", " or ".join(map(repr, MODES)))
        ok = False
    given, keep = call.attrs["dims"], call.attrs["keepdim"]
    dims = tuple(range(rank)) if given is None else dims_attr(call, "dims", given, rank)
    if dims is None:
        return None
    dims = tuple(sorted(dims))
    if not dims and rank:
        call.problem(f"dims={given!r} names no dim", "at least one, or None for all")
        ok = False
    kept = (
        (dims if keep else ()) if isinstance(keep, bool) else dims_attr(call, "keepdim", keep, rank)
    )
    if kept is None:
        return None
    if not set(kept) <= set(dims):
        call.problem(f"keepdim={keep!r} names dims that are not reduced", f"some of {dims}")
        ok = False
    if mode != "sum" and any(x.shape[dim] == 0 for dim in dims):
        call.problem(f"{mode} over no element of x '{x.name}' {x.shape}", "mode='sum'")
        ok = False
    if not ok:
        return None
    kept = tuple(sorted(kept))
    call.attrs["dims"] = dims
    # One canonical form: True for all and False for none, else the dims.
    call.attrs["keepdim"] = bool(dims) if kept == dims else kept or False
    stay = [dim for dim in range(rank) if dim not in dims or dim in kept]
    shape = tuple(1 if dim in dims else x.shape[dim] for dim in stay)
    order = tuple(stay.index(dim) for dim in like_order(x) if dim in stay)
    return [Result(shape, x.dtype, order)]


_REDUCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
    "amax": lambda x, dims, keepdim: torch.amax(x.abs(), dims, keepdim=keepdim),
}


def _run_reduction(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, dims, keep = need(inputs[0]), attrs["dims"], attrs["keepdim"]
    if not dims:  # a number
        return x.abs() if attrs["mode"] == "amax" else x
    result = _REDUCTIONS[attrs["mode"]](x, dims, keepdim=True)
    kept = dims if keep is True else keep or ()
    return result.squeeze([dim for dim in dims if dim not in kept])


register(
    "reduction",
    "x",
    _reduction,
    _run_reduction,
    outputs="y:reduced",
    dims=None,
    mode="sum",
    keepdim=False,
    traits="keeps_positive adds_up",
)
