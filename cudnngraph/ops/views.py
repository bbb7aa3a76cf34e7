"""Views: what shows memory of its operand, and where; slices of what is joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ir.spec import ALIGNMENT_BYTES, Node, TensorSpec, same_layout, view_strides
from .table import OPS


def view_place(node: Node, source: TensorSpec) -> tuple[tuple[int, ...], int] | None:
    """Strides and offset, in elements, at which a view op finds its result in its operand.

    None for an op that is no view, a reshape that has to copy, and an offset that cuDNN's engines
    do not take (they read 16 bytes at once).
    """
    stride, offset = list(source.stride), 0
    order = order_of(node, len(stride))
    if order is not None:
        stride = [stride[dim] for dim in order]
    elif node.op == "slice":
        dim = node.attr("dim")
        offset = node.attr("start") * stride[dim]
        stride[dim] *= node.attr("step")
    elif node.op == "reshape":
        found = view_strides(source.shape, source.stride, node.attr("shape"))
        if found is None:
            return None
        stride = list(found)
    else:
        return None
    return None if offset * source.dtype.itemsize % ALIGNMENT_BYTES else (tuple(stride), offset)


def order_of(node: Node, rank: int) -> list[int] | None:
    """The operand's dim for each dim of a view; None unless the view only reorders dims."""
    return order(node.op, dict(node.attrs), rank)


def order(op: str, attrs: Mapping[str, Any], rank: int) -> list[int] | None:
    """The same of a view op by its name, ours or torch's, and its attributes."""
    if op == "permute":
        return [dim % rank for dim in attrs["dims"]]
    if op != "transpose":
        return None
    dims = list(range(rank))
    a, b = attrs["dim0"], attrs["dim1"]
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def is_view(tensors: Mapping[str, TensorSpec], node: Node) -> bool:
    """Whether the result of a node, as declared, is its operand's memory."""
    if not OPS[node.op].view:
        return False
    source, result = tensors[node.operands[0]], tensors[node.results[0]]
    return source.numel > 0 and source.dtype == result.dtype and lies_there(tensors, node)


def lies_there(tensors: Mapping[str, TensorSpec], node: Node) -> bool:
    """Whether the strides of a view op's result are those of its operand's memory."""
    source, result = tensors[node.operands[0]], tensors[node.results[0]]
    place = view_place(node, source)
    return place is not None and same_layout(result.shape, result.stride, place[0])


def shape_of(view: Node, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of what a view that keeps every element shows of a tensor of ``shape``."""
    order = order_of(view, len(shape))
    return tuple(view.attr("shape") if order is None else (shape[dim] for dim in order))


def slots(tensors: Mapping[str, TensorSpec], node: Node) -> dict[str, int]:
    """The operands of a concatenation that lie as slices of its result would, and the offsets of
    those slices in elements; each operand once."""
    result, dim = tensors[node.results[0]], node.attr("dim")
    found: dict[str, int] = {}
    start = 0
    for name in node.operands:
        tensor = tensors[name]
        offset = start * result.stride[dim]
        start += tensor.shape[dim]
        if (
            name not in found
            and tensor.numel > 0
            and tensor.dtype == result.dtype
            and offset * tensor.dtype.itemsize % ALIGNMENT_BYTES == 0
            and same_layout(tensor.shape, tensor.stride, result.stride)
        ):
            found[name] = offset
    return found
