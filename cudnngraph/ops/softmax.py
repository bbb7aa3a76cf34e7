"""Softmax and the losses behind it: rows, inference and reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .base import REQUIRED, InferContext, Result, Tensors, dtype_name, register
from .checks import (
    dim_attr,
    float_operand,
    is_int,
    like_order,
    same_dtype,
    same_shape,
    whole_tuple,
)
from .operands import need


def _softmax(call: InferContext) -> list[Result] | None:
    x = call["x"]
    ok = float_operand(call, "x")
    if dim_attr(call, "dim", len(x.shape)) is None or not ok:
        return None
    return [Result(x.shape, x.dtype, like_order(x))]


def _softmax_backward(call: InferContext) -> list[Result] | None:
    dy, y = call["dy"], call["y"]
    ok = same_dtype(call, "y", "dy") and same_shape(call, "y", "dy")
    if dim_attr(call, "dim", len(y.shape)) is None or not ok:
        return None
    return [Result(dy.shape, dy.dtype, like_order(y))]


REDUCTIONS_OF_LOSS = ("mean", "sum", "none")


def _loss_options(call: InferContext, classes: tuple[int, ...]) -> bool:
    """Checks what a loss over (N, C, ...) and its gradient share."""
    before = len(call.problems)
    target, reduction = call["target"], call.attrs["reduction"]
    if reduction not in REDUCTIONS_OF_LOSS:
        known = " or ".join(map(repr, REDUCTIONS_OF_LOSS))
        call.problem(f"reduction={reduction!r} is unknown", known)
    if not is_int(call.attrs["ignore_index"]):
        call.problem(f"ignore_index={call.attrs['ignore_index']!r}", "a whole number")
    if len(classes) < 2 or classes[1] < 1:
        call.problem(f"x has shape {classes}", "(N, C, ...) with at least one class")
    elif target.shape != (classes[0], *classes[2:]):
        call.problem(
            f"target '{target.name}' has shape {target.shape}",
            f"{(classes[0], *classes[2:])}, a class for each row of x {classes}",
        )
    if target.dtype != torch.int64:
        call.problem(f"target '{target.name}' is {dtype_name(target.dtype)}", "int64", "convert it")
    if len(call.problems) > before:
        return False
    call.attrs["ignore_index"] = int(call.attrs["ignore_index"])
    return True


def _loss_shape(call: InferContext) -> tuple[int, ...]:
    return call["target"].shape if call.attrs["reduction"] == "none" else ()


def _nll_loss(call: InferContext) -> list[Result] | None:
    x = call["x"]
    if not float_operand(call, "x") or not _loss_options(call, x.shape):
        return None
    shape = _loss_shape(call)
    return [Result(shape, x.dtype, tuple(range(len(shape))))]


def _nll_loss_backward(call: InferContext) -> list[Result] | None:
    dy, shape = call["dy"], whole_tuple(call, "shape")
    if shape is None or not float_operand(call, "dy") or not _loss_options(call, shape):
        return None
    call.attrs["shape"] = shape
    if dy.shape != _loss_shape(call):
        call.problem(f"dy '{dy.name}' has shape {dy.shape}", f"{_loss_shape(call)}, the loss's")
        return None
    return [Result(shape, dy.dtype, tuple(range(len(shape))))]


_LOSS: dict[str, Any] = {"reduction": "mean", "ignore_index": -100}


def _run_softmax_backward(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    dy, y = need(inputs[0]), need(inputs[1])
    return y * (dy - (dy * y).sum(attrs["dim"], keepdim=True))


def _run_log_softmax_backward(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    dy, y = need(inputs[0]), need(inputs[1])
    return dy - torch.exp(y) * dy.sum(attrs["dim"], keepdim=True)


def _counted(target: torch.Tensor, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask of the rows of a loss that count, and each row's class, 0 for the others."""
    counts = target != attrs["ignore_index"]
    return counts, torch.where(counts, target, torch.zeros_like(target)).unsqueeze(1)


def _run_nll_loss(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, target = need(inputs[0]), need(inputs[1])
    counts, place = _counted(target, attrs)
    each = -x.gather(1, place).squeeze(1)
    each = each.to(torch.promote_types(each.dtype, torch.float32))  # 16 bits hold no sum
    each = torch.where(counts, each, torch.zeros_like(each))
    if attrs["reduction"] == "none":
        return each
    return each.sum() / counts.sum() if attrs["reduction"] == "mean" else each.sum()


def _run_nll_loss_backward(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """-dy at each row's class; over the number of rows that count for a mean."""
    dy, target = need(inputs[0]), need(inputs[1])
    counts, place = _counted(target, attrs)
    each = -dy / counts.sum() if attrs["reduction"] == "mean" else -dy
    each = torch.where(counts, each, torch.zeros_like(each))
    return dy.new_zeros(attrs["shape"]).scatter_(1, place, each.unsqueeze(1))


register(
    "softmax",
    "x",
    _softmax,
    lambda inputs, attrs: torch.softmax(need(inputs[0]), attrs["dim"]),
    torch_only=True,
    dim=REQUIRED,
    traits="bounded_below makes_positive",
)
register(
    "softmax_backward",
    "dy y",
    _softmax_backward,
    _run_softmax_backward,
    outputs="dx",
    torch_only=True,
    dim=REQUIRED,
)
register(
    "log_softmax",
    "x",
    _softmax,
    lambda inputs, attrs: torch.log_softmax(need(inputs[0]), attrs["dim"]),
    torch_only=True,
    dim=REQUIRED,
)
register(
    "log_softmax_backward",
    "dy y",
    _softmax_backward,
    _run_log_softmax_backward,
    outputs="dx",
    torch_only=True,
    dim=REQUIRED,
)
register("nll_loss", "x target", _nll_loss, _run_nll_loss, torch_only=True, **_LOSS)
register(
    "nll_loss_backward",
    "dy target",
    _nll_loss_backward,
    _run_nll_loss_backward,
    outputs="dx",
    torch_only=True,
    shape=REQUIRED,
    **_LOSS,
)
