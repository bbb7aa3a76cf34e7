"""Lowering of pointwise ops, quantisation, reductions and broadcasts."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...device.rules import rules
from ...ir.spec import Node, numel
from ...ops.base import LOW_PRECISION
from .base import Refused
from .context import Context, Rule

# Added to a number below 2^22 and taken away again, this rounds it to the nearest whole one, ties
# to even: float32 has no fractions at 2^23.
_ROUND_TO_INT = 1.5 * 2.0**23


def dequantize(ctx: Context, node: Node) -> Any:
    return ctx.graph.mul(*ctx.operands(node), name=node.name)


def quantize(ctx: Context, node: Node) -> Any:
    """Saturates by arithmetic, and rounds to int8 so; conversions to FP8 round of themselves, but
    make NaN or infinity of what is beyond the largest number, and of some that round to it (9.19).
    cuDNN's minimum and maximum hide NaN, which a product with 0 brings back (a comparison and a
    selection would keep infinity apart too, and take 15 % longer at 28 x 28).
    """
    x, scale = ctx.operands(node)
    result, like = node.results[0], ctx.spec.tensors[str(node.inputs[0])]
    if any(result in each.operands for each in ctx.spec.nodes):
        raise Refused("what is quantised is rounded where it leaves a plan, not within")
    g = ctx.graph
    if scale is not None:
        x = ctx.temporary(g.div(x, scale), like)
    if node.attr("dtype") != "int8":
        most = torch.finfo(ctx.spec.tensors[result].dtype).max
        within = ctx.temporary(g.max(x, ctx.scalar(-most)), like)
        within = ctx.temporary(g.min(within, ctx.scalar(most)), like)
        lost = ctx.temporary(g.mul(x, ctx.scalar(0.0)), like)
        return g.add(within, lost, name=node.name)
    x = ctx.temporary(g.max(x, ctx.scalar(-128.0)), like)
    x = ctx.temporary(g.min(x, ctx.scalar(127.0)), like)
    x = ctx.temporary(g.add(x, ctx.scalar(_ROUND_TO_INT)), like)
    return g.sub(x, ctx.scalar(_ROUND_TO_INT), name=node.name)


def reduction(ctx: Context, node: Node) -> Any:
    (x,) = ctx.operands(node)
    if ctx.spec.tensors[node.results[0]].dtype != torch.float32:
        raise Refused("cuDNN reduces to float32 only")
    modes, mode = ctx.frontend.reduction_mode, node.attr("mode")
    if mode == "mean":  # cuDNN's own is refused (9.19)
        source = ctx.spec.tensors[str(node.inputs[0])]
        count = numel(source.shape[dim] for dim in node.attr("dims"))
        x = ctx.temporary(ctx.graph.mul(x, ctx.scalar(1.0 / count)), source)
    kind = {
        "sum": modes.ADD,
        "mean": modes.ADD,
        "max": modes.MAX,
        "min": modes.MIN,
        "amax": modes.AMAX,
    }[mode]
    return ctx.graph.reduction(input=x, mode=kind, name=node.name)


def expand(ctx: Context, node: Node) -> Any:
    """Operands broadcast by themselves, so nothing is done: x takes part as it is."""
    (x,) = ctx.operands(node)
    source, (result,) = ctx.spec.tensors[str(node.inputs[0])], node.results
    larger = source.numel != ctx.spec.tensors[result].numel
    if result in ctx.spec.outputs and not larger:
        return ctx.graph.identity(x, name=node.name)
    ctx.as_is.add(result)
    users = [user for user in ctx.spec.nodes if result in user.operands]
    full = [_full_beside(ctx, user) for user in users]
    if larger and (result in ctx.spec.outputs or not all(full)):
        raise Refused("a tensor is repeated, with nothing of the full shape beside it")
    return x


def _full_beside(ctx: Context, node: Node) -> bool:
    """Whether an operand has the shape of the result as it stands."""
    shape = ctx.spec.tensors[node.results[0]].shape
    operands = [name for name in node.operands if name not in ctx.as_is]
    return any(ctx.spec.tensors[name].shape == shape for name in operands)


def relu_backward(ctx: Context, node: Node) -> Any:
    dy, y = ctx.operands(node)
    slope = node.attr("negative_slope")
    return ctx.graph.relu_backward(loss=dy, input=y, negative_slope=slope or None, name=node.name)


def call(method: str) -> Rule:
    """An op that is one frontend op with the same operands."""

    def rule(ctx: Context, node: Node) -> Any:
        return getattr(ctx.graph, method)(*ctx.operands(node), name=node.name)

    return rule


def commutative(method: str) -> Rule:
    """An op whose operands may be exchanged; what is computed comes first: only so are the engines
    found that add a residual behind a convolution, of a tensor that is read."""

    def rule(ctx: Context, node: Node) -> Any:
        x, y = ctx.operands(node)
        read = [name in ctx.spec.inputs for name in node.operands]
        pair = (y, x) if read == [True, False] else (x, y)
        return getattr(ctx.graph, method)(*pair, name=node.name)

    return rule


COMMUTATIVE = {"add": "add", "mul": "mul", "minimum": "min", "maximum": "max"}


def gelu_tanh_backward(ctx: Context, node: Node) -> Any:
    if ctx.spec.tensors[node.results[0]].dtype == torch.float32 and all(
        ctx.spec.tensors[name].dtype == torch.float32 for name in ctx.spec.inputs
    ):
        raise Refused("cuDNN's gradient of gelu_tanh is off by 2e-6, too far for float32")
    return ctx.graph.gelu_approx_tanh_backward(*ctx.operands(node), name=node.name)


def logical(method: str) -> Rule:
    """Logic is computed in bool; in float32, the graph's default, cuDNN refuses it."""

    def rule(ctx: Context, node: Node) -> Any:
        kind = ctx.frontend.data_type.BOOLEAN
        operands = ctx.operands(node)
        return getattr(ctx.graph, method)(*operands, compute_data_type=kind, name=node.name)

    return rule


def elu(ctx: Context, node: Node) -> Any:
    (x,) = ctx.operands(node)
    alpha = node.attr("alpha")
    if alpha == 1.0:
        return ctx.graph.elu(x, name=node.name)
    # max(x, 0) + alpha * (exp(min(x, 0)) - 1)
    like, g = ctx.spec.tensors[str(node.inputs[0])], ctx.graph
    low = ctx.temporary(g.min(x, ctx.scalar(0.0)), like)
    low = ctx.temporary(g.sub(ctx.temporary(g.exp(low), like), ctx.scalar(1.0)), like)
    low = ctx.temporary(g.mul(low, ctx.scalar(alpha)), like)
    return g.add(ctx.temporary(g.relu(x), like), low)


def softplus(ctx: Context, node: Node) -> Any:
    (x,) = ctx.operands(node)
    beta = node.attr("beta")
    if beta == 1.0:
        return ctx.graph.softplus(x, name=node.name)
    like, g = ctx.spec.tensors[str(node.inputs[0])], ctx.graph
    y = ctx.temporary(g.mul(x, ctx.scalar(beta)), like)
    return g.mul(ctx.temporary(g.softplus(y), like), ctx.scalar(1.0 / beta))


def mish(ctx: Context, node: Node) -> Any:
    (x,) = ctx.operands(node)
    like, g = ctx.spec.tensors[str(node.inputs[0])], ctx.graph
    share = ctx.temporary(g.tanh(ctx.temporary(g.softplus(x), like)), like)
    return g.mul(x, share, name=node.name)


def clamp(ctx: Context, node: Node) -> Any:
    """A ReLU that is clipped, of which NaN is NaN, unlike the larger and the smaller of two. It
    has no lower clip that lets every number through: -inf becomes float32's smallest."""
    (x,) = ctx.operands(node)
    low, high = node.attr("min"), node.attr("max")
    if low is None:
        return ctx.graph.min(x, ctx.scalar(high))
    upper = {} if high is None else {"upper_clip": high}
    return ctx.graph.relu(x, lower_clip=low, **upper, name=node.name)


def where(ctx: Context, node: Node) -> Any:
    condition, x, y = ctx.operands(node)
    return ctx.graph.binary_select(x, y, condition, name=node.name)


# A quirk of cuDNN: behind these its erf takes longer than the op itself.
_PRODUCTS = frozenset({"conv", "conv_transpose", "matmul"})

#: gelu(x) is x Phi(x), and Phi(x) is (1 + tanh(x P(x^2))) / 2 with a smooth P: its coefficients,
#: such that a float16 result is off by at most 0.61 of its last place, and by 1.1e-5 before that,
#: but for what tanh itself is rounded by, which shows where results are next to nothing.
#: The last one is above 0, so that what is large stays so.
GELU_BY_TANH = (
    *(7.977496651417489e-1, 3.653034702793871e-2, -1.1874516818155519e-4, -3.905139694881279e-5),
    *(2.486155556973281e-6, -6.898024525715354e-8, 7.463564462897486e-10),
)


def gelu(ctx: Context, node: Node) -> Any:
    """By erf, but by tanh behind a matmul that is rounded to 16 bits or less
    (:attr:`DeviceRules.gelu_by_tanh_behind_matmul`)."""
    (x,) = ctx.operands(node)
    rounded = all(ctx.spec.tensors[name].dtype.itemsize < 4 for name in ctx.spec.outputs)
    by_tanh = rounded and rules().gelu_by_tanh_behind_matmul
    if not by_tanh or _PRODUCTS.isdisjoint(each.op for each in ctx.spec.nodes):
        return ctx.graph.gelu(x, name=node.name)
    like, g = ctx.spec.tensors[str(node.inputs[0])], ctx.graph
    square = ctx.temporary(g.mul(x, x), like)
    first, *rest = map(ctx.scalar, reversed(GELU_BY_TANH))
    inner = first
    for each in rest:
        inner = ctx.temporary(g.add(ctx.temporary(g.mul(square, inner), like), each), like)
    inner = ctx.temporary(g.mul(x, inner), like)
    half = ctx.scalar(0.5)
    share = ctx.temporary(g.mul(ctx.temporary(g.tanh(inner), like), half), like)
    return g.mul(x, ctx.temporary(g.add(share, half), like))


def gelu_tanh(ctx: Context, node: Node) -> Any:
    (x,) = ctx.operands(node)
    like = ctx.spec.tensors[str(node.inputs[0])]
    if any(ctx.spec.tensors[name].dtype in LOW_PRECISION for name in ctx.spec.inputs):
        return ctx.graph.gelu_approx_tanh(x, name=node.name)
    # cuDNN's own is off by 2e-6 in float32. With u = sqrt(2/pi) (x + 0.044715 x^3), what it
    # approximates is x (1 + tanh(u)) / 2 = x sigmoid(2u).
    g, slope = ctx.graph, 2.0 * math.sqrt(2.0 / math.pi)
    cube = ctx.temporary(g.mul(ctx.temporary(g.mul(x, x), like), x), like)
    inner = ctx.temporary(g.mul(cube, ctx.scalar(0.044715 * slope)), like)
    inner = ctx.temporary(g.add(ctx.temporary(g.mul(x, ctx.scalar(slope)), like), inner), like)
    return g.mul(x, ctx.temporary(g.sigmoid(inner), like))


def leaky_relu(ctx: Context, node: Node) -> Any:
    (x,) = ctx.operands(node)
    slope = node.attr("negative_slope")
    if slope <= 1.0:
        return ctx.graph.leaky_relu(x, slope, name=node.name)
    # cuDNN's engines take the larger of x and its multiple, which is the other one from 1 on.
    like = ctx.spec.tensors[str(node.inputs[0])]
    steep = ctx.temporary(ctx.graph.mul(x, ctx.scalar(slope)), like)
    return ctx.graph.min(x, steep, name=node.name)
