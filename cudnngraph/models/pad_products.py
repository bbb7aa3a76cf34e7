"""Products of 16-bit data by weights of an odd number of rows, as of a vocabulary, get more rows.

A result whose rows begin at odd places leaves cuBLAS with kernels that are several times as slow.
The weight is padded once, and what is asked for is a slice of the result.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..device.rules import rules
from ..ir.spec import aligned
from ..ops.base import LOW_PRECISION
from .new_constants import add_constant
from .siblings import constants_of, is_fixed

Node = torch.fx.Node
_linear = torch.ops.aten.linear.default


def pad_products(
    graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Pad large products of a graph of ATen ops, in place; the constants with the new weights."""
    made = dict(constants)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is _linear and _gains(node, constants):
            _pad(graph, node, made)
    return made


def _gains(node: Node, constants: Mapping[str, torch.Tensor]) -> bool:
    if not is_fixed(node, constants):
        return False
    weight, seen = constants_of(node, constants)[0], node.meta.get("val")
    if not isinstance(seen, torch.Tensor) or seen.dim() < 2 or weight.dim() != 2:
        return False
    rows, columns = weight.shape
    if weight.dtype not in LOW_PRECISION or rows == aligned(rows) or columns != aligned(columns):
        return False
    if not all(isinstance(size, int) for size in seen.shape):
        return False
    return seen.numel() * columns >= rules().padded_product_min


def _pad(graph: torch.fx.Graph, node: Node, constants: dict[str, torch.Tensor]) -> None:
    """Put a slice of a product of more rows in the place of a product."""
    seen = node.meta["val"]
    *front, rows = seen.shape
    more = aligned(rows) - rows
    args = [node.args[0]]
    for given in node.args[1:]:
        if isinstance(given, Node):
            tensor = constants[given.name]
            wider = torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])
            args.append(add_constant(graph, constants, f"padded_{given.name}", wider))
    with graph.inserting_before(node):
        whole = graph.call_function(_linear, tuple(args))
        whole.meta = dict(node.meta)
        with FakeTensorMode():
            whole.meta["val"] = torch.empty(
                (*front, rows + more), dtype=seen.dtype, device=seen.device
            )
        part = (whole, seen.dim() - 1, 0, rows)
        own = graph.call_function(torch.ops.aten.slice.Tensor, part)
    own.meta = dict(node.meta)
    node.replace_all_uses_with(own)
    graph.erase_node(node)
