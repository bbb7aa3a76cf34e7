"""Batch norm over several processes: the statistics are those of every rank's batch together.

Compiled graphs do the work on tensors: the convolution, each channel's mean and variance here, then
norm, residual and activation by the statistics of all ranks. Between the last two stands the
exchange: one all_gather forward, and backward one all_reduce of the statistics' gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..functional.call import run_graph
from ..functional.conv import act_options, run_conv_act
from ..functional.conv_bn import update_running
from ..graph.builder import Graph
from ..graph.value import Value
from ..ir.spec import numel
from ..policy import Policy
from ..runtime import custom_ops
from ..runtime.specialize import Static, intern_static

Tensor = torch.Tensor


@custom_ops.function()
def moments(g: Graph, y: Value) -> None:
    """Mean and biased variance of each channel of y (N, K, ...): (1, K, 1...) in float32, or
    float64 for such y; zeros where y is empty."""
    dims = [dim for dim in range(len(y.shape)) if dim != 1]
    mode = "mean" if numel(y.shape) else "sum"
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    mean = g.reduction(y, dims, mode, keepdim=True)
    apart = y - mean
    g.output("mean", mean, dtype=wide)
    g.output("var", g.reduction(apart * apart, dims, mode, keepdim=True), dtype=wide)


@custom_ops.function()
def spread(g: Graph, y: Value, minus_mean: Value, slope: Value, level: Value) -> Value:
    """(y - mean) * slope + level, y's gradient through the statistics; vectors (K,)."""
    return g.bias(g.scale(g.bias(y, minus_mean), slope), level)


@custom_ops.function()
def norm_act(
    g: Graph,
    y: Value,
    mean: Value,
    var: Value,
    weight: Value | None,
    bias: Value | None,
    residual: Value | None,
    *,
    eps: float,
    activation: str | None,
    attrs: tuple[tuple[str, Any], ...],
) -> Value:
    """act(batch_norm(y) + residual) by given statistics."""
    y = g.batch_norm(y, mean, var, weight, bias, eps=eps)
    y = y if residual is None else g.add(y, residual)
    return g.activation(y, activation, **dict(attrs))


def _norm_options(activation: str | None, attrs: Any, eps: float) -> dict[str, Any]:
    return {"eps": float(eps), "activation": activation, "attrs": attrs}


_NO_OPTIONS = Static({})


class _Statistics(torch.autograd.Function):
    """From y here to mean, variance and unbiased variance, (K,), of the y of all ranks.

    A rank whose y is empty takes part all the same.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any, policy: Policy | None) -> Any:
        found = run_graph(moments, policy, (y,), _NO_OPTIONS, 2)
        mean, var = (value.flatten() for value in found)
        many = len(mean)
        mine = torch.cat([mean, var, mean.new_full((1,), y.numel() // many)])
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        together = torch.stack(gathered)
        means, variances, counts = together[:, :many], together[:, many:-1], together[:, -1:]
        total = counts.sum()
        shares = counts / total
        whole = (shares * means).sum(0)
        whole_var = (shares * (variances + (means - whole).square())).sum(0)
        unbiased = whole_var * (total / (total - 1))
        ctx.save_for_backward(y, whole, total)
        ctx.group, ctx.policy = group, policy
        ctx.mark_non_differentiable(unbiased)
        return whole, whole_var, unbiased

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor, _: Tensor) -> Any:
        """mean = sum(y) / total and var = sum((y - mean)^2) / total, over all ranks."""
        y, mean, total = ctx.saved_tensors
        both = torch.cat([grad_mean, 2.0 * grad_var]) / total
        dist.all_reduce(both, group=ctx.group)
        level, slope = both.chunk(2)
        with torch.no_grad():
            tensors = (y, -mean, slope, level)
            grad = run_graph(spread, ctx.policy, tensors, _NO_OPTIONS)
        return grad, None, None


def several_ranks(group: Any) -> bool:
    """Whether there is anything to exchange: more than one rank in ``group``, None for all."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def run_synchronised(
    geometry: tuple[Any, ...],
    activation: str | None,
    attrs: tuple[tuple[str, Any], ...],
    tensors: tuple[Tensor | None, ...],
    momentum: float | Tensor,
    eps: float,
    group: Any,
    policy: Policy | None,
) -> Tensor:
    """As :func:`run_conv_norm_act` in training, over the ranks of ``group``.

    ``geometry`` as of :func:`act_options`. Every rank of the group has to call it, and
    to run its backward. Gradients of parameters are those of this rank's batch, as torch's are.
    """
    x, weight, bias, mean, var, bn_weight, bn_bias, residual = tensors
    assert x is not None and weight is not None
    bare = intern_static(act_options, geometry, None, ())
    y = run_conv_act(bare, x, weight, bias, None, policy)
    group = dist.group.WORLD if group is None else group
    whole, whole_var, unbiased = _Statistics.apply(y, group, policy)  # type: ignore[no-untyped-call]
    if mean is not None and var is not None:
        update_running(mean, var, whole, unbiased, momentum)
    given = (y, whole, whole_var, bn_weight, bn_bias, residual)
    result: Tensor = run_graph(
        norm_act, policy, given, intern_static(_norm_options, activation, attrs, eps)
    )
    return result
