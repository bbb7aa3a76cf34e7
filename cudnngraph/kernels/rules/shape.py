"""Views, expansion and concatenation in kernels: other indices, no copies."""

from __future__ import annotations

from ...ir.spec import Node, TensorSpec
from ...ops.views import order_of
from ..tape import Join, Map, Value, permute, reshape, sliced
from .pointwise import Operands


def view(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """reshape, permute, transpose and slice."""
    (x,) = operands
    assert x is not None
    order = order_of(node, len(x.shape))
    if order is not None:
        return (permute(x, order),)
    if node.op == "slice":
        return (sliced(x, node.attr("dim"), node.attr("start"), result.shape, node.attr("step")),)
    return (reshape(x, result.shape),)


def expand(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """The operand along dims of extent 1 as often as the result has them."""
    (x,) = operands
    assert x is not None
    sizes = dict(zip(node.attr("dims"), x.shape, strict=True))
    shaped = reshape(x, [sizes.get(dim, 1) for dim in range(len(result.shape))])
    return (Map(result.shape, (shaped,), lambda args: args[0], type=x.type),)


def concat(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """The operands one behind the other."""
    values = tuple(value for value in operands if value is not None)
    return (Join(result.shape, values, node.attr("dim"), type=values[0].type),)
