"""Lowering of batch, instance, layer and RMS norms, and of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...device.rules import rules
from ...ir.spec import Node, TensorSpec, channels_last_strides, is_channels_last, is_contiguous
from ...ops.base import LOW_PRECISION
from ...ops.table import tensor_at
from .base import Refused
from .context import Context, Rule


def _check_float32(ctx: Context, node: Node, *ports: int) -> None:
    for port in ports:
        name = node.inputs[port]
        if name is not None and ctx.spec.tensors[name].dtype != torch.float32:
            raise Refused("cuDNN's batch norm takes parameters and statistics in float32")


def batch_norm_train(ctx: Context, node: Node) -> Sequence[Any]:
    x, weight, bias, mean, var = ctx.operands(node)
    _check_float32(ctx, node, 1, 2, 3, 4)
    given = mean is not None
    if not given:  # the binding does not go without
        shape = [1] * ctx.view.seen_rank
        shape[1] = ctx.spec.tensors[str(node.inputs[0])].shape[1]
        mean = ctx.constant(shape, 0.0, torch.float32)
        var = ctx.constant(shape, 1.0, torch.float32)
    y, *statistics = ctx.graph.batchnorm(
        input=x,
        scale=weight,
        bias=bias,
        in_running_mean=mean,
        in_running_var=var,
        epsilon=ctx.host_scalar(node.attr("eps")),
        momentum=ctx.host_scalar(node.attr("momentum")),
        name=node.name,
    )
    if not given:
        vector = _vector(ctx.spec.tensors[str(node.inputs[0])])
        for unused in statistics[2:]:
            ctx.discard(unused, vector)
        statistics = statistics[:2]
    return y, *statistics


def batch_norm_backward(ctx: Context, node: Node) -> Sequence[Any]:
    dy, x, weight, mean, inv_std = ctx.operands(node)
    _check_float32(ctx, node, 2, 3, 4)
    return ctx.graph.batchnorm_backward(  # type: ignore[no-any-return]
        grad=dy, input=x, scale=weight, mean=mean, inv_variance=inv_std, name=node.name
    )


def _vector(x: TensorSpec) -> TensorSpec:
    """One float32 per channel of x, at its rank."""
    shape = (1, x.shape[1], *(1,) * (len(x.shape) - 2))
    return TensorSpec("", shape, channels_last_strides(shape), torch.float32)


def batch_norm(ctx: Context, node: Node) -> Any:
    x, mean, var, weight, bias = ctx.operands(node)
    like = ctx.spec.tensors[str(node.inputs[0])]
    vector = _vector(like)
    inverse = ctx.temporary(ctx.graph.add(var, ctx.scalar(node.attr("eps"))), vector)
    inverse = ctx.temporary(ctx.graph.rsqrt(inverse), vector)
    y = ctx.temporary(ctx.graph.sub(x, mean), like)
    y = ctx.graph.mul(y, inverse)
    if weight is not None:
        y = ctx.graph.mul(ctx.temporary(y, like), weight)
    if bias is not None:
        y = ctx.graph.add(ctx.temporary(y, like), bias)
    return y


def batch_norm_apply(ctx: Context, node: Node) -> Any:
    x, mean, inv_std, weight, bias = ctx.operands(node)
    if any(each.op == "batch_norm_backward" for each in ctx.spec.nodes):
        # In front of the norm's backward, behind a relu's, cuDNN has just this form of it.
        return ctx.graph.batchnorm_inference(
            input=x, mean=mean, inv_variance=inv_std, scale=weight, bias=bias, name=node.name
        )
    like = ctx.spec.tensors[str(node.inputs[0])]
    y = ctx.temporary(ctx.graph.sub(x, mean), like)
    y = ctx.temporary(ctx.graph.mul(y, inv_std), like)
    return ctx.graph.add(ctx.temporary(ctx.graph.mul(y, weight), like), bias)


def _ones(ctx: Context, node: Node) -> Any:
    """A weight for an instance norm that has none: the frontend wants one."""
    vector = _vector(ctx.spec.tensors[str(tensor_at(node, "x"))])
    return ctx.constant(ctx.view.dims(vector.shape, vector.stride)[0], 1.0, torch.float32)


def _check_image_layout(ctx: Context, node: Node, *names: str | None) -> None:
    """Refuse an instance norm whose images lie with gaps, or in different orders."""
    shape = ctx.spec.tensors[str(names[0])].shape
    strides = [ctx.spec.tensors[name].stride for name in names if name is not None]
    if not any(
        all(lies(shape, stride) for stride in strides) for lies in (is_contiguous, is_channels_last)
    ):
        raise Refused(f"{node.op} takes images of one layout, without gaps")


def norm(method: str) -> Rule:
    """A norm; its statistics are made where somebody takes them."""

    def rule(ctx: Context, node: Node) -> Sequence[Any]:
        x, weight, bias = ctx.operands(node)
        if method == "instancenorm":
            _check_image_layout(ctx, node, node.inputs[0], node.outputs[0])
        if method == "instancenorm" and weight is None:
            weight = _ones(ctx, node)
            bias = ctx.constant(list(weight.get_dim()), 0.0, torch.float32)
        if bias is None and method == "layernorm":  # the frontend wants one
            spec = ctx.spec.tensors[str(node.inputs[1])]
            shape = ctx.view.dims(spec.shape, spec.stride)[0]
            bias = ctx.constant(shape, 0.0, spec.dtype)
        used = {name for each in ctx.spec.nodes for name in each.operands} | set(ctx.spec.outputs)
        phases = ctx.frontend.norm_forward_phase
        taken = [name in used for name in node.outputs[1:]]
        training = any(taken)
        if training and not all(taken):
            raise Refused(f"{node.op} hands out all of its statistics or none")
        results = getattr(ctx.graph, method)(
            norm_forward_phase=phases.TRAINING if training else phases.INFERENCE,
            input=x,
            scale=weight,
            bias=bias,
            epsilon=ctx.host_scalar(node.attr("eps")),
            name=node.name,
        )
        return list(results) if training else list(results[:1])

    return rule


def _rsqrt_of_sum_of_squares(
    ctx: Context, x: Any, like: TensorSpec, mean: bool, least: float
) -> Any:
    """x by the root of each row's sum of squares or of their mean: a product with ones has the sum
    in every column, so the rest of it stands behind that.

    Of float16 the squares are float32, which tensor cores round to TF32: as many bits as x has, and
    all of its range. Of bfloat16 they are bfloat16, and it is faster. Rounded alike they put a row
    off by half of what rounding its result may. ``mean``: ``least`` is added to it, else the
    sum is that at least.
    """
    longest = rules().rms_norm_by_matmul_max_row
    if like.dtype not in LOW_PRECISION or like.shape[-1] > longest:
        raise Refused(f"products sum up rows of at most {longest} numbers of 16 bits")
    width = like.shape[-1]
    kind = torch.float32 if like.dtype == torch.float16 else torch.bfloat16
    product = ctx.graph.matmul(
        A=ctx.virtual(ctx.graph.mul(x, x), replace(like, dtype=kind)),
        B=ctx.constant([1, width, width], 1.0, kind),
    )
    total, floor = ctx.temporary(product, like), ctx.scalar(least)
    if mean:
        total = ctx.temporary(ctx.graph.mul(total, ctx.scalar(1.0 / width)), like)
        total = ctx.temporary(ctx.graph.add(total, floor), like)
    else:  # total + relu(least - total): cuDNN's max of a number and NaN is the number
        less = ctx.temporary(ctx.graph.add(ctx.temporary(ctx.graph.neg(total), like), floor), like)
        total = ctx.temporary(ctx.graph.add(total, ctx.temporary(ctx.graph.relu(less), like)), like)
    return ctx.graph.mul(x, ctx.temporary(ctx.graph.rsqrt(total), like))


def normalize(ctx: Context, node: Node) -> Any:
    eps = node.attr("eps")
    least = max(eps * eps, torch.finfo(torch.float32).tiny) if eps else 0.0
    like = ctx.spec.tensors[str(node.inputs[0])]
    return _rsqrt_of_sum_of_squares(ctx, ctx.operands(node)[0], like, False, least)


def rms_norm(ctx: Context, node: Node) -> Any:
    if ctx.view.seen_rank > 3:  # [rows, columns, 1, 1]
        return norm("rmsnorm")(ctx, node)
    x, weight, bias = ctx.operands(node)
    like = ctx.spec.tensors[str(node.inputs[0])]
    y = ctx.temporary(_rsqrt_of_sum_of_squares(ctx, x, like, True, node.attr("eps")), like)
    y = ctx.graph.mul(y, weight)
    return y if bias is None else ctx.graph.add(ctx.temporary(y, like), bias)


def norm_backward(method: str) -> Rule:
    """The gradients of a norm."""

    def rule(ctx: Context, node: Node) -> Sequence[Any]:
        if len([each for each in ctx.spec.nodes if each.op != "constant"]) > 1:
            # cuDNN takes what follows and does not run it (seen on 9.19).
            raise Refused("the gradient of a norm shares a plan with nothing")
        given = ctx.by_port(node)
        options = {
            word: given[port]
            for word, port in (("mean", "mean"), ("inv_variance", "inv_std"))
            if port in given
        }
        with_bias = node.outputs[2] is not None
        if method == "rmsnorm_backward":
            options["has_dbias"] = with_bias
        dx, dweight, dbias = getattr(ctx.graph, method)(
            grad=given["dy"],
            input=given["x"],
            scale=given["weight"],
            name=node.name,
            **options,
        )
        if dbias is not None and not with_bias:
            ctx.discard(dbias, ctx.spec.tensors[str(node.inputs[2])])
        return dx, dweight, dbias if with_bias else None

    return rule
