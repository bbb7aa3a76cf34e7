"""How much a graph has to do: bytes that it must move, and operations of its products."""

from __future__ import annotations

from ..ir.spec import GraphSpec, numel


def bytes_of(spec: GraphSpec) -> int:
    """Inputs read once and outputs written once, in bytes; what is expanded counts once."""
    tensors = (spec.tensors[name] for name in (*spec.inputs, *spec.outputs))
    return sum(
        numel(n for n, s in zip(t.shape, t.stride, strict=True) if s) * t.dtype.itemsize
        for t in tensors
    )


def flops_of(spec: GraphSpec) -> int:
    """Multiplications and additions of matrix products, convolutions and attention."""
    total = 0
    for node in spec.nodes:
        shapes = [spec.tensors[name].shape for name in node.operands]
        result = spec.tensors[node.results[0]].shape
        if node.op == "matmul":
            total += 2 * numel(result) * shapes[0][-1]
        elif node.op == "conv":
            total += 2 * numel(result) * numel(shapes[1][1:])
        elif node.op == "conv_transpose":
            total += 2 * numel(shapes[0]) * numel(shapes[1][1:])
        elif node.op == "conv_wgrad":
            total += 2 * numel(shapes[0]) * numel(result[1:])
        elif node.op == "sdpa":
            q, k, v = shapes[:3]
            total += 2 * numel(q[:3]) * k[2] * (q[3] + v[3]) // (2 if _causal(node.attrs) else 1)
    return total


def _causal(attrs: tuple[tuple[str, object], ...]) -> bool:
    return dict(attrs).get("window") == (None, 0)
