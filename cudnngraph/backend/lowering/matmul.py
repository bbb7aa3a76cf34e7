"""Lowering of matrix products."""

from __future__ import annotations

from typing import Any

import torch

from ...ir.spec import Node
from .base import Refused
from .context import Context


def matmul(ctx: Context, node: Node) -> Any:
    for tensor in (ctx.spec.tensors[name] for name in node.operands):
        if 0 in [
            step for n, step in zip(tensor.shape[-2:], tensor.stride[-2:], strict=True) if n > 1
        ]:
            # Two of three such random graphs in 16 bits or TF32 were wrong on 9.19.
            raise Refused(
                f"'{tensor.name}' with strides {tensor.stride} repeats a row or a column of a "
                "matrix, which cuDNN's engines misread"
            )
    x, y = ctx.operands(node)
    if node.inputs[0] == node.inputs[1]:  # cuDNN gets a tensor times itself wrong
        y = ctx.alias(str(node.inputs[1]))
    if ctx.spec.tensors[str(node.inputs[0])].dtype == torch.int8:
        kind = ctx.dtype(torch.int32)
        return ctx.graph.matmul(A=x, B=y, compute_data_type=kind, name=node.name)
    return ctx.graph.matmul(A=x, B=y, name=node.name)
