"""Concatenate without copying: have each operand written into its slice of the result."""

from __future__ import annotations

from dataclasses import replace

from ..ir.spec import ALIGNMENT_BYTES, GraphSpec, Node, is_channels_last
from ..ops.table import OPS
from ..partition.analysis import CutGraph
from .annotate import BOUNDED


def concat_in_place(spec: GraphSpec) -> GraphSpec:
    """The graph with what is concatenated written into its slice of the result.

    That is so for what one convolution, or a pooling that takes any strides, may read besides, and
    where slices and their rows begin at multiples of 16 bytes.
    """
    joins = [node for node in spec.nodes if node.op == "concat"]
    if not joins:
        return spec
    graph, tensors = CutGraph(spec), dict(spec.tensors)
    for node in reversed(joins):  # the outermost first: what it joins may be joined itself
        result = tensors[node.results[0]]
        size = graph.crossing(result.name).dtype.itemsize
        pitches = (s for n, s in zip(result.shape, result.stride, strict=True) if n > 1 < s)
        if any(pitch * size % ALIGNMENT_BYTES for pitch in pitches):
            continue
        start = 0
        for name in node.operands:
            tensor, offset = tensors[name], start * result.stride[node.attr("dim")]
            start += tensor.shape[node.attr("dim")]
            others = [each for each in graph.readers[name] if each is not node]
            if (
                graph.may_join(name)
                and len(graph.readers[name]) == len(others) + 1
                and all(_reads_any_strides(graph, each, name) for each in others)
                and graph.crossing(name).dtype == graph.crossing(result.name).dtype
                and offset * size % ALIGNMENT_BYTES == 0
            ):
                tensors[name] = replace(tensor, stride=result.stride)
    return spec if tensors == dict(spec.tensors) else replace(spec, tensors=tensors)


def _reads_any_strides(graph: CutGraph, node: Node, name: str) -> bool:
    """Whether an op is no slower on a slice of a larger tensor."""
    if node.op == "max_pool":  # by cuDNN
        tensors = graph.spec.tensors
        x, y = tensors[name], tensors[node.results[0]]
        images = (is_channels_last(each.shape, each.stride) for each in (x, y))
        dense = not node.attr("ceil_mode") and all(step == 1 for step in node.attr("dilation"))
        return dense and dict(node.attrs).get(BOUNDED, False) and len(x.shape) > 3 and all(images)
    return OPS[node.op].has("convolution") and node.operands.count(name) == 1
