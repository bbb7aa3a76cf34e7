"""Large products of 16-bit data by an odd number of rows, as of a vocabulary, get more rows.

A result or an operand whose rows begin at odd places leaves cuBLAS with kernels that are several
times as slow, and gaps behind the rows are not enough: it goes by their length too
(docs/results/h100-notes.md). A weight that is fixed is padded once; what else there is gets zeros
behind it in each call. What is asked for is a slice of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..device.rules import rules
from ..ir.spec import aligned
from ..ops.base import LOW_PRECISION
from .new_constants import add_constant
from .siblings import constants_of, is_fixed

Node = torch.fx.Node
_aten: Any = torch.ops.aten
_linear, _turn = _aten.linear.default, _aten.t.default
_PRODUCTS = {_aten.mm.default: 0, _aten.addmm.default: 1}  # and the place of their left operand


def pad_products(
    graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Pad large products of a graph of ATen ops, in place; the constants with the new weights."""
    made = dict(constants)
    padded: dict[tuple[Node, tuple[int, ...]], Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _linear and _gains(node, constants):
            _pad_weight(graph, node, made)
        elif node.target in _PRODUCTS:
            _pad_operands(graph, node, padded)
    return made


# -- by weights that are fixed ---------------------------------------------------------------------


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


def _pad_weight(graph: torch.fx.Graph, node: Node, constants: dict[str, torch.Tensor]) -> None:
    """Put a slice of a product of more rows in the place of a product."""
    *front, rows = node.meta["val"].shape
    more = aligned(rows) - rows
    args = [node.args[0]]
    for given in node.args[1:]:
        if isinstance(given, Node):
            tensor = constants[given.name]
            wider = torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])
            args.append(add_constant(graph, constants, f"padded_{given.name}", wider))
    _put_slice(graph, node, args, (*front, rows + more))


# -- by what changes -------------------------------------------------------------------------------


def _pad_operands(
    graph: torch.fx.Graph, node: Node, padded: dict[tuple[Node, tuple[int, ...]], Node]
) -> None:
    """Put a slice of a product of more rows, columns or terms in the place of a product."""
    place = _PRODUCTS[node.target]
    operands: list[Any] = list(node.args[place : place + 2])
    seen: list[Any] = [each.meta.get("val") for each in operands]
    if not all(map(_is_matrix, seen)) or len(node.args) > place + 2:
        return
    (rows, terms), columns = seen[0].shape, seen[1].shape[1]
    if rows * terms * columns < rules().padded_product_min or node.kwargs:
        return
    by_terms = (seen[0].stride(1) == 1, seen[1].stride(0) == 1)
    more_rows = rows if by_terms[0] else aligned(rows)
    more_terms = aligned(terms) if any(by_terms) else terms
    more_columns = aligned(columns)
    if (more_rows, more_terms, more_columns) == (rows, terms, columns):
        return
    with graph.inserting_before(node):
        args = [
            _padded(graph, operands[0], (more_rows, more_terms), padded),
            _padded(graph, operands[1], (more_terms, more_columns), padded),
        ]
        if node.target is _aten.addmm.default:
            bias: Any = node.args[0]
            shape = bias.meta["val"].shape
            front = () if len(shape) < 2 else (shape[0] if shape[0] == 1 else more_rows,)
            last = shape[-1] if shape[-1] == 1 else more_columns
            args.insert(0, _padded(graph, bias, (*front, last), padded))
    _put_slice(graph, node, args, (more_rows, more_columns))


def _is_matrix(seen: Any) -> bool:
    return (
        isinstance(seen, torch.Tensor)
        and seen.dim() == 2
        and seen.dtype in LOW_PRECISION
        and all(isinstance(each, int) for each in (*seen.shape, *seen.stride()))
        and 1 in seen.stride()
        and math.prod(seen.shape) > 0
    )


def _padded(
    graph: torch.fx.Graph,
    node: Node,
    shape: tuple[int, ...],
    padded: dict[tuple[Node, tuple[int, ...]], Node],
) -> Node:
    """A value with zeros behind it, up to ``shape``; of a transposed one, what is transposed."""
    seen = node.meta["val"]
    if tuple(seen.shape) == shape:
        return node
    if (node, shape) in padded:
        return padded[node, shape]
    turned = node.target is _turn
    if turned:
        source: Any = node.args[0]
        given: tuple[Any, ...] = (_padded(graph, source, shape[::-1], padded),)
        made: Node = graph.call_function(_turn, given)
    else:
        ends = [more - size for more, size in zip(shape, seen.shape, strict=True)]
        pads = [each for end in reversed(ends) for each in (0, end)]
        made = graph.call_function(_aten.constant_pad_nd.default, (node, pads, 0.0))
    with FakeTensorMode():
        whole = torch.empty(shape[::-1] if turned else shape, dtype=seen.dtype, device=seen.device)
        made.meta = {**node.meta, "val": whole.t() if turned else whole}
    padded[node, shape] = made
    return made


def _put_slice(graph: torch.fx.Graph, node: Node, args: list[Any], shape: tuple[int, ...]) -> None:
    """Put what the product had of one by ``args``, of ``shape``, in its place."""
    seen, called = node.meta["val"], cast(Callable[..., Any], node.target)
    with graph.inserting_before(node):
        own: Node = graph.call_function(called, tuple(args))
        own.meta = dict(node.meta)
        with FakeTensorMode():
            own.meta["val"] = torch.empty(shape, dtype=seen.dtype, device=seen.device)
        for dim, size in enumerate(seen.shape):
            if size != shape[dim]:
                whole = own.meta["val"]
                own = graph.call_function(_aten.slice.Tensor, (own, dim, 0, size))
                own.meta = {**node.meta, "val": whole.narrow(dim, 0, size)}
    node.replace_all_uses_with(own)
    graph.erase_node(node)
