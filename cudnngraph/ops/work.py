"""Count a graph's work: bytes that it must move, and operations of its products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ir.spec import GraphSpec, Node, TensorSpec, numel


def bytes_of(spec: GraphSpec) -> int:
    """Inputs read once and outputs written once, in bytes; what is expanded counts once."""
    return sum(bytes_of_tensor(spec.tensors[name]) for name in (*spec.inputs, *spec.outputs))


def bytes_of_tensor(tensor: TensorSpec) -> int:
    """The bytes of a tensor's elements; what is expanded counts once."""
    own = numel(n for n, s in zip(tensor.shape, tensor.stride, strict=True) if s)
    return own * tensor.dtype.itemsize


def flops_of(spec: GraphSpec) -> int:
    """Multiplications and additions of matrix products, convolutions and attention."""
    return sum(flops_of_node(spec, node) for node in spec.nodes)


def flops_of_node(spec: GraphSpec, node: Node) -> int:
    """Multiplications and additions of one op; 0 for one that multiplies no matrices."""
    shapes = [spec.tensors[name].shape for name in node.operands]
    result = spec.tensors[node.results[0]].shape
    if node.op == "matmul":
        return 2 * numel(result) * shapes[0][-1]
    if node.op == "grouped_matmul":
        return 2 * numel(result) * shapes[0][1]
    if node.op == "grouped_matmul_wgrad":
        return 2 * numel(shapes[0]) * shapes[1][1]
    if node.op == "conv":
        return 2 * numel(result) * numel(shapes[1][1:])
    if node.op == "conv_transpose":
        return 2 * numel(shapes[0]) * numel(shapes[1][1:])
    if node.op == "conv_wgrad":
        return 2 * numel(shapes[0]) * numel(result[1:])
    if node.op == "sdpa":
        q, k, v = shapes[:3]
        pairs = _pairs(q[2], k[2], dict(node.attrs))
        return 2 * numel(q[:2]) * pairs * (q[3] + v[3])
    return 0


def _pairs(rows: int, keys: int, attrs: Mapping[str, Any]) -> int:
    """The number of (row, key) pairs of an attention that meet; half of all if it is causal."""
    window = attrs.get("window")
    if window is None:
        return rows * keys
    left, right = window
    if (left, right) == (None, 0):
        return rows * keys // 2
    shift = keys - rows if attrs.get("diagonal_alignment") == "bottom_right" else 0
    return sum(
        max(
            0,
            (keys if right is None else min(keys, row + shift + right + 1))
            - (0 if left is None else max(0, row + shift - left)),
        )
        for row in range(rows)
    )
