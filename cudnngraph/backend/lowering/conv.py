"""Lowering of convolutions, transposed ones and the gradient of a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ir.spec import Node, TensorSpec, dense_strides, is_channels_last
from ...ops.base import FP8, QUANTIZED
from .base import Refused
from .context import Context, Rule


def _sides(padding: Sequence[tuple[int, int]], spread: bool) -> tuple[list[int], list[int]]:
    pairs = [(0, 0), *padding] if spread else list(padding)
    return [before for before, _ in pairs], [after for _, after in pairs]


def _cropped(node: Node) -> list[tuple[int, int]]:
    """Padding of a transposed convolution, with output_padding taken out of the far side.

    The padding only crops the result, so the two cancel. cuDNN knows no output_padding; it finds it
    in the output's dims, but not where it reaches the stride.
    """
    return [
        (before, after - extra if stride <= extra <= after else after)
        for (before, after), extra, stride in zip(
            node.attr("padding"), node.attr("output_padding"), node.attr("stride"), strict=True
        )
    ]


def _spatial(values: Sequence[int], spread: bool) -> list[int]:
    return [1, *values] if spread else list(values)


def convolution(transposed: bool) -> Rule:
    def rule(ctx: Context, node: Node) -> Any:
        x, weight = ctx.operands(node)
        spread = ctx.view.spread
        pre, post = _sides(_cropped(node) if transposed else node.attr("padding"), spread)
        options = {
            "pre_padding": pre,
            "post_padding": post,
            "stride": _spatial(node.attr("stride"), spread),
            "dilation": _spatial(node.attr("dilation"), spread),
            "name": node.name,
        }
        kind = _check_narrow(ctx, node)
        _check_weight(ctx.spec.tensors[node.operands[1]])
        if kind == torch.int8:
            if transposed:
                raise Refused("cuDNN has no transposed convolution of int8")
            options["compute_data_type"] = ctx.dtype(torch.int32)
        if transposed:  # dx of the convolution whose filter is this weight
            return ctx.graph.conv_dgrad(loss=x, filter=weight, **options)
        y = ctx.graph.conv_fprop(image=x, weight=weight, **options)
        if kind == torch.int8 and node.results[0] in ctx.spec.outputs:
            # The engines of a convolution by itself get int32 wrong (known_bad.py); those that fuse
            # take it with an op behind.
            ctx.virtual(y, ctx.spec.tensors[node.results[0]])
            y = ctx.graph.identity(y, compute_data_type=ctx.dtype(torch.int32))
        return y

    return rule


def _check_narrow(ctx: Context, node: Node) -> torch.dtype:
    """Refuse layouts that cuDNN takes for no 8-bit convolution; the dtype of its data."""
    x, weight = (ctx.spec.tensors[name] for name in node.operands)
    if x.dtype not in QUANTIZED:
        return x.dtype
    names = [*node.operands[: 1 if node.op == "conv_transpose" else 2], *ctx.spec.outputs]
    for tensor in (ctx.spec.tensors[name] for name in names):
        if tensor.numel > 1 and not is_channels_last(tensor.shape, tensor.stride):
            raise Refused(
                f"'{tensor.name}' is not channels_last, as 8-bit convolutions want it; "
                "declare it with layout='channels_last'"
            )
    groups = node.attr("groups")
    if groups > 1 and x.shape[1] // groups % 4:
        raise Refused(
            f"{x.shape[1] // groups} channels in each of {groups} groups; 8-bit convolutions take "
            "a multiple of 4"
        )
    if x.dtype in FP8 and node.op == "conv_transpose":
        order = (*range(2, len(weight.shape)), 0)
        if weight.stride != dense_strides(weight.shape, (1, *order)):
            raise Refused(
                f"the weight '{weight.name}' of a transposed convolution in FP8 has its first dim "
                f"fastest in memory; declare stride={dense_strides(weight.shape, (1, *order))}"
            )
    return x.dtype


def _check_weight(weight: TensorSpec) -> None:
    """Refuse a weight whose dims lie neither in their order nor with the channels last, gaps or
    not: engines misread it (a quarter of such random graphs were wrong on 9.19)."""
    if weight.dtype in QUANTIZED:
        return
    rank = len(weight.shape)
    for order in (range(rank), (0, *range(2, rank), 1)):
        steps = [weight.stride[dim] for dim in order if weight.shape[dim] > 1]
        steps = [step for step in steps if step]
        if steps == sorted(steps, reverse=True):
            return
    raise Refused(
        f"the weight '{weight.name}' with strides {weight.stride} lies neither contiguous nor "
        "channels_last, which cuDNN's engines misread"
    )


def conv_wgrad(ctx: Context, node: Node) -> Any:
    _check_weight(ctx.spec.tensors[node.results[0]])
    dy, x = ctx.operands(node)
    spread = ctx.view.spread
    pre, post = _sides(node.attr("padding"), spread)
    return ctx.graph.conv_wgrad(
        image=x,
        loss=dy,
        pre_padding=pre,
        post_padding=post,
        stride=_spatial(node.attr("stride"), spread),
        dilation=_spatial(node.attr("dilation"), spread),
        name=node.name,
    )
