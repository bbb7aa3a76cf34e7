"""Depthwise convolutions in kernels: they move bytes, and cuDNN fuses little into them."""

from __future__ import annotations

from ...ir.spec import Node, TensorSpec
from ..tape import Depthwise, Refused, Value
from .pointwise import Operands


def depthwise(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """conv and conv_transpose of as many groups as channels, of images."""
    x, weight = operands[0], operands[1]
    assert x is not None and weight is not None
    if len(x.shape) != 4 or not x.shape[1] == node.attr("groups") == result.shape[1]:
        raise Refused(f"no kernel is generated for {node.op} but for depthwise ones of images")
    padding = tuple(before for before, _ in node.attr("padding"))
    return (
        Depthwise(
            result.shape,
            (x, weight),
            node.attr("stride"),
            padding,
            node.attr("dilation"),
            node.op == "conv_transpose",
        ),
    )
