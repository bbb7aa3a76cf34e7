"""Rules that need no measurement: graphs that cuDNN is not asked for, or not as one plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..device.rules import rules
from ..ir.spec import GraphSpec, Node
from ..ops.base import QUANTIZED
from ..ops.table import OPS
from ..partition.analysis import compute_nodes, is_anchor
from ..partition.cuts import on_numbers
from .dropout_probe import has_seeded_dropout

INT32_MAX = 2**31 - 1
NO_FLOAT64 = "cuDNN graphs have no float64"


def why_not_cudnn(spec: GraphSpec) -> str | None:
    """Why a graph is not shown to cuDNN at all, or None.

    One that computes in float32, with ops in float64 between, is: it is cut around those.
    """
    tensors = spec.tensors.values()
    if any(tensor.numel == 0 for tensor in tensors):
        return "a tensor is empty"
    numbers = {node.results[0] for node in spec.nodes if node.op == "constant"}
    dtypes = {tensor.dtype for tensor in tensors if tensor.name not in numbers}
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    if spec.compute_dtype == torch.float64 or floating == {torch.float64}:
        return NO_FLOAT64
    large = [tensor for tensor in tensors if max(tensor.numel, tensor.extent) > INT32_MAX]
    if large:
        return f"'{large[0].name}' spans {large[0].extent} elements, over 2^31 - 1"
    return None


def why_split(spec: GraphSpec) -> str | None:
    """Why a graph should not be one plan although cuDNN may take it, or None.

    What was measured to be slow is in :class:`~cudnngraph.device.rules.DeviceRules`. A search
    measures that anew: it asks :func:`why_never_one` alone.
    """
    never = why_never_one(spec)
    if never is not None:
        return never
    measured = rules()
    nodes, anchors = compute_nodes(spec.nodes), _anchors(spec)
    if not anchors or len(nodes) == 1:
        return _why_scalars_apart(spec, nodes)
    (anchor,) = anchors
    data = spec.tensors[anchor.operands[0]].dtype
    if any(spec.tensors[name].dtype != data for name in spec.outputs):
        return None  # apart, the anchor would have to hand on float32, which few engines write
    if _depthwise(spec, anchor) and not measured.epilogue_behind_depthwise:
        return "an epilogue makes a depthwise convolution many times slower"
    if anchor.op == "conv_transpose" and not measured.epilogue_behind_overlapping_transpose:
        kernel = spec.tensors[anchor.operands[1]].shape[2:]
        if any(r > s > 1 for r, s in zip(kernel, anchor.attr("stride"), strict=True)):
            return "an epilogue slows a strided transposed convolution whose taps overlap"
    return None


def why_never_one(spec: GraphSpec) -> str | None:
    """Why a graph is no plan of cuDNN's whatever its sizes, or None."""
    if any(tensor.dtype == torch.float64 for tensor in spec.tensors.values()):
        return NO_FLOAT64
    nodes, anchors = compute_nodes(spec.nodes), _anchors(spec)
    if len(anchors) > 1:
        names = " and ".join(dict.fromkeys(node.op for node in anchors))
        return f"{len(anchors)} anchors ({names}) in one plan are refused, or slow"
    if not anchors or len(nodes) == 1:
        return None
    (anchor,) = anchors
    if OPS[anchor.op].has("attention"):
        computed = {name for node in nodes if node is not anchor for name in node.results}
        if computed & set(anchor.operands):
            return "attention reads tensors, not results of the same plan"
        if has_seeded_dropout(spec):
            return "what attention drops by a seed can be told of its own result alone"
    return None


def _anchors(spec: GraphSpec) -> list[Node]:
    """The anchors of a graph, but for a largest |x| that cuDNN takes along."""
    anchors = [node for node in compute_nodes(spec.nodes) if is_anchor(node, spec.tensors)]
    if anchors and spec.tensors[anchors[0].operands[0]].dtype in QUANTIZED:
        anchors = [node for node in anchors if not _is_total_amax(spec, node)] or anchors
    return anchors


def _why_scalars_apart(spec: GraphSpec, nodes: Sequence[Node]) -> str | None:
    """Why what pointwise ops compute of numbers and vectors should be a plan of its own."""
    count = len(on_numbers(spec, nodes))
    many = max(spec.tensors[node.results[0]].numel for node in nodes)
    measured = rules()
    if not measured.scalar_ops_apart <= count < len(nodes) or many < measured.scalar_elements_apart:
        return None
    return f"{count} ops on numbers would run for each of {many} elements"


def _is_total_amax(spec: GraphSpec, node: Node) -> bool:
    """The largest |x| of a whole tensor, which cuDNN takes along behind a product."""
    if node.op != "reduction" or node.attr("mode") != "amax":
        return False
    return spec.tensors[node.results[0]].numel == 1


def _depthwise(spec: GraphSpec, node: Node) -> bool:
    if not OPS[node.op].has("convolution"):
        return False
    groups = int(node.attr("groups"))
    return groups > 1 and groups == spec.tensors[node.operands[0]].shape[1]
