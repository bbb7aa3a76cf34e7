"""Run convolutions in channels-last layout, with copies at the edges of the graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..ir.spec import (
    GraphSpec,
    Node,
    TensorSpec,
    channels_last_strides,
    free,
    is_channels_last,
    taken_names,
)
from ..ops.table import OPS
from ..partition.analysis import is_anchor


def with_dense_images(region: GraphSpec) -> GraphSpec:
    """A region of a graph that makes its images dense and copies them to where they belong.

    An image may belong into a slice of what is joined, for which engines can be much slower.
    """
    return channels_last(region, region.outputs)


def channels_last(spec: GraphSpec, images: Collection[str] | None = None) -> GraphSpec:
    """A graph of convolutions with every image channels last, copied at the graph's edges; or only
    those named in ``images``.

    Another graph, and one that lies so already, is given back as it is.
    """
    anchors = [node for node in spec.nodes if is_anchor(node, spec.tensors)]
    kinds = [OPS[node.op].traits & {"convolution", "convolution_gradient"} for node in anchors]
    if not kinds or not all(kinds):
        return spec
    rank = len(spec.tensors[anchors[0].operands[0]].shape)

    def last(tensor: TensorSpec) -> TensorSpec:
        return replace(tensor, stride=channels_last_strides(tensor.shape))

    tensors, nodes, taken = dict(spec.tensors), list(spec.nodes), taken_names(spec)
    renamed: dict[str, str] = {}
    copies: list[Node] = []
    for name, tensor in spec.tensors.items():
        if len(tensor.shape) != rank or is_channels_last(tensor.shape, tensor.stride):
            continue
        if images is not None and name not in images:
            continue
        if name not in spec.inputs and name not in spec.outputs:
            tensors[name] = last(tensor)
            continue
        other = free(f"{name}_last", taken)
        tensors[other] = replace(last(tensor), name=other)
        renamed[name] = other
        source, target = (name, other) if name in spec.inputs else (other, name)
        copies.append(Node("identity", free(f"{name}_copy", taken), (source,), (target,)))
    if not copies:
        return spec

    def new(name: str | None) -> str | None:
        return None if name is None else renamed.get(name, name)

    nodes = [
        replace(
            node,
            inputs=tuple(new(name) for name in node.inputs),
            outputs=tuple(new(name) for name in node.outputs),
        )
        for node in nodes
    ]
    return replace(spec, tensors=tensors, nodes=(*nodes, *copies))
