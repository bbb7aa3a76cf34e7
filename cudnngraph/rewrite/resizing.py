"""Take gradients of resizing by much apart, dim by dim.

An element of the gradient is a sum over all that it was spread to: 17 x 17 elements for images of 8
times their size. Dim by dim it is a sum of 17 sums of 17.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch

from ..device.rules import rules
from ..ir.spec import GraphSpec, Node, TensorSpec, dense_strides, free, memory_order, taken_names
from ..ops.base import LOW_PRECISION


def resize_dim_by_dim(spec: GraphSpec) -> GraphSpec:
    """The graph with gradients of interpolation that go through one dim after the other, where an
    element is made of more than kernels of windows read for one. What lies between is float32."""
    tensors, taken = dict(spec.tensors), taken_names(spec)
    nodes: list[Node] = []
    for node in spec.nodes:
        if node.op == "interpolate_backward" and _is_large(node, spec):
            nodes += _dim_by_dim(node, tensors, taken)
        else:
            nodes.append(node)
    if len(nodes) == len(spec.nodes):
        return spec
    return replace(spec, tensors=tensors, nodes=tuple(nodes))


def _is_large(node: Node, spec: GraphSpec) -> bool:
    dy, dx = (spec.tensors[name].shape[2:] for name in (*node.operands, *node.results))
    changed = [(many, few) for many, few in zip(dy, dx, strict=True) if many != few]
    if node.attr("mode") == "bicubic" or len(changed) < 2:
        return False
    reads = prod(2 * -(-many // few) + 1 for many, few in changed)
    return bool(reads > rules().window_most_reads)


def _dim_by_dim(node: Node, tensors: dict[str, TensorSpec], taken: set[str]) -> Iterator[Node]:
    """The nodes in place of one; their results are added to the tensors, their names to those that
    are taken."""
    (given,), (result,) = node.operands, node.results
    at, end = tensors[given], tensors[result]
    dtype = torch.float32 if at.dtype in LOW_PRECISION else at.dtype
    order = memory_order(at.shape, at.stride)

    def new(part: str, shape: tuple[int, ...]) -> TensorSpec:
        label = free(f"{result}_{part}", taken)
        made = TensorSpec(label, shape, dense_strides(shape, order), dtype)
        tensors[made.name] = made
        return made

    if dtype != at.dtype:
        wide = new("wide", at.shape)
        yield Node("identity", wide.name, (at.name,), (wide.name,))
        at = wide
    dims = [dim for dim in reversed(range(2, len(at.shape))) if at.shape[dim] != end.shape[dim]]
    for dim in dims:
        shape = (*at.shape[:dim], end.shape[dim], *at.shape[dim + 1 :])
        to = end if dim == dims[-1] and dtype == end.dtype else new(f"dim{dim}", shape)
        yield replace(
            node,
            name=free(f"{node.name}_dim{dim}", taken),
            inputs=(at.name,),
            outputs=(to.name,),
            attrs=tuple((name, _attr(name, value, node, at, to)) for name, value in node.attrs),
        )
        at = to
    if at is not end:
        yield Node("identity", free(f"{node.name}_narrow", taken), (at.name,), (end.name,))


def _attr(name: str, value: object, node: Node, dy: TensorSpec, dx: TensorSpec) -> object:
    """An attribute of the gradient along the dim in which two tensors differ."""
    if name == "input_size":
        return dx.shape[2:]
    if name == "size" and value is not None:
        return dy.shape[2:]
    if name == "scale_factor" and value is not None:
        sizes = zip(dy.shape[2:], dx.shape[2:], node.attr(name), strict=True)
        return tuple(scale if many != few else 1.0 for many, few, scale in sizes)
    return value
