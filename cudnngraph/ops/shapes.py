"""Ops that change the shape alone, and concatenation: rows, inference and reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ir.spec import TensorSpec, numel, view_strides
from .base import MAX_RANK, REQUIRED, InferContext, Result, Tensors, dtype_name, register
from .checks import dim_attr, dims_attr, is_int, like_order, whole_tuple
from .operands import need


def _expand(call: InferContext) -> list[Result] | None:
    x, shape = call["x"], call.attrs["shape"]
    if not isinstance(shape, (tuple, list, torch.Size)) or any(
        not is_int(n) or n < 0 for n in shape
    ):
        call.problem(f"shape={shape!r} is not a shape", "whole numbers >= 0")
        return None
    shape = tuple(int(n) for n in shape)
    rank, given = len(shape), call.attrs["dims"]
    if given is None and len(x.shape) > rank:
        call.problem(f"x '{x.name}' has {len(x.shape)} dims {x.shape}", f"at most {rank}")
        return None
    last = tuple(range(rank - len(x.shape), rank))
    dims = last if given is None else dims_attr(call, "dims", given, rank)
    if dims is None:
        return None
    if len(dims) != len(x.shape) or list(dims) != sorted(dims):
        call.problem(f"dims={given!r} for x {x.shape}", "the place of each dim of x, ascending")
        return None
    if any(n not in (1, shape[dim]) for n, dim in zip(x.shape, dims, strict=True)):
        call.problem(
            f"x '{x.name}' has shape {x.shape}",
            f"1 or {tuple(shape[dim] for dim in dims)}, the sizes of dims {dims} of {shape}",
        )
        return None
    call.attrs["shape"], call.attrs["dims"] = shape, dims
    return [Result(shape, x.dtype, _expanded_order(x, shape, dims))]


def _expanded_order(x: TensorSpec, shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """The order of x, with each dim that is new or repeated before the one behind it: the halves of
    a stack of images that have channels last are before their channels. The first stays first."""
    kept = [dims[at] for at in like_order(x) if x.shape[at] == shape[dims[at]] != 1]
    order, rank = list(kept), len(shape)
    if order == sorted(order):
        return tuple(range(rank))
    for dim in reversed(range(rank)):
        if dim in kept:
            continue
        if dim == 0:
            order.insert(0, dim)
        elif dim + 1 in order:
            order.insert(order.index(dim + 1), dim)
        else:
            order.insert(1 + order.index(max(each for each in kept if each < dim)), dim)
    return tuple(order)


def _reshape(call: InferContext) -> list[Result] | None:
    x, shape = call["x"], whole_tuple(call, "shape")
    if shape is None:
        return None
    if len(shape) > MAX_RANK:
        call.problem(f"shape={shape} has {len(shape)} dims", f"at most {MAX_RANK}")
        return None
    if min(shape, default=0) < -1 or shape.count(-1) > 1:
        call.problem(f"shape={shape} has sizes below 0", "sizes >= 0, and -1 for one of them")
        return None
    rest = numel(n for n in shape if n != -1)
    fits = x.numel == rest if -1 not in shape else rest != 0 and x.numel % rest == 0
    if not fits:
        call.problem(
            f"shape={shape} does not hold the {x.numel} elements of x '{x.name}' {x.shape}",
            "as many elements",
        )
        return None
    shape = tuple(x.numel // rest if n == -1 else n for n in shape)
    call.attrs["shape"] = shape
    strides = view_strides(x.shape, x.stride, shape)
    if strides is None:  # a copy
        return [Result(shape, x.dtype, tuple(range(len(shape))))]
    return [Result(shape, x.dtype, like_order(TensorSpec("", shape, strides, x.dtype)))]


def _permuted(x: TensorSpec, dims: Sequence[int]) -> list[Result]:
    """``dims`` are those of x in their new order."""
    order = tuple(dims.index(dim) for dim in like_order(x))
    return [Result(tuple(x.shape[dim] for dim in dims), x.dtype, order)]


def _transpose(call: InferContext) -> list[Result] | None:
    x = call["x"]
    a, b = (dim_attr(call, attr, len(x.shape)) for attr in ("dim0", "dim1"))
    if a is None or b is None:
        return None
    call.attrs.update(dim0=min(a, b), dim1=max(a, b))
    dims = list(range(len(x.shape)))
    dims[a], dims[b] = b, a
    return _permuted(x, dims)


def _permute(call: InferContext) -> list[Result] | None:
    x, dims = call["x"], whole_tuple(call, "dims")
    if dims is None:
        return None
    rank = len(x.shape)
    counted = tuple(dim % rank if -rank <= dim < rank else dim for dim in dims)
    if sorted(counted) != list(range(rank)):
        call.problem(f"dims={dims} is no order of the dims of x '{x.name}' {x.shape}", "each once")
        return None
    call.attrs["dims"] = counted
    return _permuted(x, counted)


def _slice(call: InferContext) -> list[Result] | None:
    x = call["x"]
    dim = dim_attr(call, "dim", len(x.shape))
    bounds = [call.attrs[attr] for attr in ("start", "stop", "step")]
    for attr, value in zip(("start", "stop", "step"), bounds, strict=True):
        if not is_int(value) and not (attr == "stop" and value is None):
            call.problem(f"{attr}={value!r} is not a whole number", "an int")
            return None
    if bounds[2] < 1:
        call.problem(f"step={bounds[2]} is not positive", "step >= 1")
        return None
    if dim is None:
        return None
    taken = range(*slice(*bounds).indices(x.shape[dim]))
    start, stop = (taken[0], taken[-1] + 1) if taken else (0, 0)
    call.attrs.update(start=start, stop=stop, step=int(bounds[2]) if len(taken) > 1 else 1)
    shape = (*x.shape[:dim], len(taken), *x.shape[dim + 1 :])
    return [Result(shape, x.dtype, like_order(x))]


def _concat(call: InferContext) -> list[Result] | None:
    ports = list(call.inputs)
    first = call[ports[0]]
    dim = dim_attr(call, "dim", len(first.shape))
    if dim is None:
        return None
    ok = True
    for port in ports[1:]:
        spec = call[port]
        if spec.dtype != first.dtype:
            call.problem(
                f"{port} '{spec.name}' is {dtype_name(spec.dtype)}, "
                f"x0 '{first.name}' is {dtype_name(first.dtype)}",
                "one dtype",
                f"convert {port}",
            )
            ok = False
        if len(spec.shape) != len(first.shape) or any(
            n != m
            for place, (n, m) in enumerate(zip(spec.shape, first.shape, strict=True))
            if place != dim
        ):
            call.problem(
                f"{port} '{spec.name}' has shape {spec.shape}, x0 '{first.name}' {first.shape}",
                f"equal sizes but for dim {dim}",
            )
            ok = False
    if not ok:
        return None
    specs = [call[port] for port in ports]
    total = sum(spec.shape[dim] for spec in specs)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    return [Result(shape, first.dtype, _common_order(specs))]


def _common_order(specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """The memory order of the largest operand where all lie so, else the logical one."""
    order = like_order(max(specs, key=lambda spec: spec.numel))
    for spec in specs:
        own = [dim for dim in like_order(spec) if spec.shape[dim] > 1]
        if own != [dim for dim in order if spec.shape[dim] > 1]:
            return tuple(range(len(order)))
    return order


def _run_expand(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x = need(inputs[0])
    sizes = dict(zip(attrs["dims"], x.shape, strict=True))
    shape = attrs["shape"]
    return x.reshape([sizes.get(dim, 1) for dim in range(len(shape))]).expand(shape)


def _run_slice(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    taken = slice(attrs["start"], attrs["stop"], attrs["step"])
    return need(inputs[0])[(slice(None),) * attrs["dim"] + (taken,)]


register(
    "expand",
    "x:expanded",
    _expand,
    _run_expand,
    pointwise=True,
    shape=REQUIRED,
    dims=None,
    traits="fp16_safe keeps_positive",
)
register(
    "reshape",
    "x",
    _reshape,
    lambda inputs, attrs: need(inputs[0]).reshape(attrs["shape"]),
    view=True,
    shape=REQUIRED,
    traits="keeps_positive arranges",
)
register(
    "transpose",
    "x",
    _transpose,
    lambda inputs, attrs: need(inputs[0]).transpose(attrs["dim0"], attrs["dim1"]),
    view=True,
    dim0=REQUIRED,
    dim1=REQUIRED,
    traits="keeps_positive arranges",
)
register(
    "permute",
    "x",
    _permute,
    lambda inputs, attrs: need(inputs[0]).permute(attrs["dims"]),
    view=True,
    dims=REQUIRED,
    traits="keeps_positive arranges",
)
register(
    "slice",
    "x",
    _slice,
    _run_slice,
    view=True,
    dim=REQUIRED,
    start=0,
    stop=None,
    step=1,
    traits="keeps_positive holds_sizes",
)
register(
    "concat",
    "x*",
    _concat,
    lambda inputs, attrs: torch.cat([need(value) for value in inputs], attrs["dim"]),
    torch_only=True,
    dim=0,
    traits="keeps_positive",
)
