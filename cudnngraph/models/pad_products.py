"""Products of 16-bit data by weights of an odd number of rows, as of a vocabulary, get more rows.

A result whose rows begin at odd places leaves cuBLAS with kernels that are several times as slow.
The weight is padded once, and what is asked for is a slice of the result.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..device.rules import rules
from ..ops.base import LOW_PRECISION

Node = torch.fx.Node
_linear = torch.ops.aten.linear.default
ALIGNED_ROWS = 8


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
    given = [each for each in node.args[1:] if each is not None]
    fixed = [each.name for each in given if isinstance(each, Node) and each.name in constants]
    if len(fixed) < len(given):
        return False
    weight, seen = constants[fixed[0]], node.meta.get("val")
    if not isinstance(seen, torch.Tensor) or seen.dim() < 2 or weight.dim() != 2:
        return False
    if weight.dtype not in LOW_PRECISION or weight.shape[0] % ALIGNED_ROWS == 0:
        return False
    if weight.shape[1] % ALIGNED_ROWS or not all(isinstance(size, int) for size in seen.shape):
        return False  # what is read has odd rows too
    return seen.numel() * weight.shape[1] >= rules().padded_product_min


def _pad(graph: torch.fx.Graph, node: Node, constants: dict[str, torch.Tensor]) -> None:
    """Put a slice of a product of more rows in the place of a product."""
    seen = node.meta["val"]
    *front, rows = seen.shape
    more = -rows % ALIGNED_ROWS
    args = [node.args[0]]
    with graph.inserting_before(next(iter(graph.nodes))):
        for given in node.args[1:]:
            if not isinstance(given, Node):
                continue
            tensor = constants[given.name]
            wider = torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])
            constant = graph.placeholder(f"padded_{given.name}")
            constant.meta["val"] = wider.to("meta")
            constants[constant.name] = wider
            args.append(constant)
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
