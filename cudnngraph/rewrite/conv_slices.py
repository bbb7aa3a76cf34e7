"""Copy what convolutions read of a few channels of an image, once, to an image of its own.

Engines with tensor cores take dense images. cuDNN copies others in front of each of them, one
kernel for every convolution that reads the slice, and slowly. Reductions read the copy too, so that
the kernel that copies makes them on the way.
"""

from __future__ import annotations

from dataclasses import replace

from ..device.rules import rules
from ..ir.spec import GraphSpec, Node, channels_last_strides, free, is_dense, taken_names
from ..ops.base import LOW_PRECISION
from ..ops.table import OPS
from ..partition.analysis import CutGraph


def dense_slices(spec: GraphSpec) -> GraphSpec:
    """The graph with a dense copy of each slice of channels that 16-bit convolutions read."""
    slices = [node for node in spec.nodes if node.op == "slice" and _is_apart(spec, node)]
    if not slices:
        return spec
    graph, tensors, taken = CutGraph(spec), dict(spec.tensors), taken_names(spec)
    copied: dict[str, str] = {}  # of slices that convolutions read, their copies
    copies: dict[str, Node] = {}  # by the node of the slice
    for node in slices:
        (name,) = node.results
        if graph.crossing(name).dtype not in LOW_PRECISION:
            continue
        if not any(_reads(spec, reader, name) for reader in graph.readers[name]):
            continue
        if rules().convolution_slices_in_place:
            return spec
        made = free(f"{name}_dense", taken)
        tensors[made] = replace(
            tensors[name], name=made, stride=channels_last_strides(tensors[name].shape)
        )
        copies[node.name] = Node("identity", made, (name,), (made,))
        copied[name] = made
    if not copied:
        return spec
    nodes: list[Node] = []
    for node in spec.nodes:
        inputs = tuple(
            copied[name] if name in copied and _takes_copy(spec, node, name) else name
            for name in node.inputs
        )
        nodes.append(node if inputs == node.inputs else replace(node, inputs=inputs))
        if node.name in copies:
            nodes.append(copies[node.name])
    return replace(spec, tensors=tensors, nodes=tuple(nodes))


def _is_apart(spec: GraphSpec, node: Node) -> bool:
    """Whether a slice is of some channels of an image whose channels lie side by side."""
    made = spec.tensors[node.results[0]]
    if len(made.shape) < 3 or node.attr("dim") != 1 or is_dense(made.shape, made.stride):
        return False
    return made.shape[1] > 1 == made.stride[1]


def _reads(spec: GraphSpec, node: Node, name: str | None) -> bool:
    """Whether a node is a convolution by cuDNN that reads a tensor as an image."""
    row = OPS[node.op]
    if not (row.has("convolution") or row.has("convolution_gradient")):
        return False
    if node.attr("groups") > 1 and _is_depthwise(spec, node):
        return False  # by a generated kernel, which takes any strides
    images = node.operands if row.has("convolution_gradient") else node.operands[:1]
    return name in images


def _takes_copy(spec: GraphSpec, node: Node, name: str) -> bool:
    """Whether a node reads a slice's copy: a reduction then sums up while it is copied."""
    return node.op == "reduction" or _reads(spec, node, name)


def _is_depthwise(spec: GraphSpec, node: Node) -> bool:
    name = node.results[0] if OPS[node.op].has("convolution_gradient") else node.operands[1]
    return spec.tensors[name].shape[1] == 1
