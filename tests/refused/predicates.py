"""Properties of graphs and nodes that cuDNN's refusals depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cudnngraph.ir.spec import GraphSpec, Node, TensorSpec, channels_last_strides, same_layout
from cudnngraph.ops.table import OPS


@dataclass(frozen=True)
class Known:
    """A refusal that is cuDNN's own, and which graphs it meets."""

    reason: str
    meets: Callable[[GraphSpec], bool]


def nodes_of(spec: GraphSpec, *ops: str) -> list[Node]:
    return [node for node in spec.nodes if node.op in ops]


def anchors_of(spec: GraphSpec) -> list[Node]:
    return [node for node in spec.nodes if not OPS[node.op].pointwise]


def is_pointwise(spec: GraphSpec) -> bool:
    return not anchors_of(spec)


def dtype_of(spec: GraphSpec, node: Node) -> torch.dtype:
    return spec.tensors[node.operands[0]].dtype


NORMS = ("layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward")


def any_attention(
    test: Callable[[GraphSpec, Node], bool], *ops: str
) -> Callable[[GraphSpec], bool]:
    pair = ("sdpa", "sdpa_backward")
    return lambda spec: any(test(spec, node) for node in nodes_of(spec, *(ops or pair)))


def operand_at(spec: GraphSpec, node: Node, port: str) -> TensorSpec | None:
    """The operand at ``port``."""
    name = node.inputs[OPS[node.op].ports.index(port)]
    return None if name is None else spec.tensors[name]


def masked_by(*dtypes: torch.dtype) -> Callable[[GraphSpec, Node], bool]:
    def test(spec: GraphSpec, node: Node) -> bool:
        mask = operand_at(spec, node, "attn_mask")
        return mask is not None and mask.dtype in dtypes

    return test


def lies_channels_last(tensor: TensorSpec) -> bool:
    return same_layout(tensor.shape, tensor.stride, channels_last_strides(tensor.shape))


def any_matmul(test: Callable[[GraphSpec, Node], bool]) -> Callable[[GraphSpec], bool]:
    return lambda spec: any(test(spec, node) for node in nodes_of(spec, "matmul"))
