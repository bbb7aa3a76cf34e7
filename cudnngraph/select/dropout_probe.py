"""Dropout by a seed, of which a plan and the reference have a generator each.

A plan's result shows what it drops: with scores of zero and values that pick out one key at a time,
the weights that are left can be read off it (:func:`recover_mask`). With these as a mask the
reference drops the same (:func:`with_mask`), and the two can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..ir.spec import GraphSpec, Node, TensorSpec, contiguous_strides
from ..ops.attention.reference import alibi_slopes
from ..ops.table import OPS, by_port, tensor_at

Tensors = Sequence[torch.Tensor]
Run = Callable[[Tensors], Tensors]  # inputs of a graph → its outputs


def attention(spec: GraphSpec) -> Node | None:
    """The attention, or its gradient, of a graph with one that may drop; None for other graphs."""
    nodes = [node for node in spec.nodes if _may_drop(node)]
    return nodes[0] if len(nodes) == 1 else None


def has_seeded_dropout(spec: GraphSpec) -> bool:
    """Whether an attention of the graph, or its gradient, drops by a seed."""
    return any(
        _may_drop(node) and tensor_at(node, "dropout_seed") is not None for node in spec.nodes
    )


def _may_drop(node: Node) -> bool:
    """Whether a node is attention, or a gradient of one, that has a port for a seed."""
    return "dropout_seed" in OPS[node.op].ports


def with_mask(
    spec: GraphSpec, inputs: Tensors, keep: torch.Tensor | None
) -> tuple[GraphSpec, list[torch.Tensor]]:
    """A graph of one attention with ``keep`` (B, H, S_q, S_kv), bool, in place of its seed, and
    with ALiBi's slopes as a tensor; and the inputs of that graph."""
    node = attention(spec)
    assert node is not None
    ports = OPS[node.op].ports
    operands = by_port(node)
    given = dict(zip(spec.inputs, inputs, strict=True))
    tensors, attrs = dict(spec.tensors), dict(node.attrs)
    added: dict[str, torch.Tensor] = {}
    if keep is not None:
        for port in ("dropout_seed", "dropout_offset"):
            given.pop(str(operands[port]), None)
            operands[port] = None
        added["dropout_mask"] = keep
    if attrs["alibi"]:
        heads = spec.tensors[str(operands["q"])].shape[1]
        attrs["alibi"] = False
        added["alibi_slopes"] = torch.tensor(alibi_slopes(heads), device=inputs[0].device)
    for port, value in added.items():
        name = operands[port] = f"{port} of {node.name}"
        shape = tuple(value.shape)
        tensors[name] = TensorSpec(name, shape, contiguous_strides(shape), value.dtype)
        given[name] = value
    made = replace(
        node,
        inputs=tuple(operands[port] for port in ports),
        attrs=tuple(sorted(attrs.items())),
    )
    nodes = tuple(made if each is node else each for each in spec.nodes)
    whole = replace(spec, tensors=tensors, nodes=nodes, inputs=tuple(given))
    return whole, list(given.values())


def recover_mask(spec: GraphSpec, inputs: Tensors, run: Run) -> torch.Tensor:
    """Find the weights that ``run`` of a one-attention graph keeps: bool (B, H, S_q, S_kv).

    A weight that a mask or the distance makes zero counts as dropped. Works on the values, or for
    a gradient on the gradients of the result, as many keys or rows at a time as those have columns.
    """
    node = attention(spec)
    assert node is not None
    given = dict(zip(spec.inputs, inputs, strict=True))
    q, k, v = (spec.tensors[str(tensor_at(node, port))].shape for port in ("q", "k", "v"))
    keep = torch.zeros(q[0], q[1], q[2], k[2], dtype=torch.bool, device=inputs[0].device)
    backward = OPS[node.op].has("attention_gradient")
    flat = ("q", "attn_mask", "alibi_slopes", *(("lse", "o") if backward else ()))
    for name in {tensor_at(node, port) for port in flat} - {None}:
        given[str(name)] = torch.zeros_like(given[str(name)])
    probe = str(tensor_at(node, "do" if backward else "v"))
    columns, many = v[3], q[2] if backward else k[2]
    groups = q[1] // k[1]
    place = spec.outputs.index(str(node.outputs[2 if backward else 0]))
    for start in range(0, many, columns):
        taken = torch.arange(start, min(start + columns, many), device=keep.device)
        for member in range(groups) if backward else [slice(None)]:
            values = torch.zeros_like(given[probe])
            heads = slice(member, None, groups) if backward else member
            values[:, heads, taken, taken - start] = 1.0
            out = run([values if name == probe else given[name] for name in given])[place] > 0
            if backward:  # (B, H_kv, S_kv, columns) of one head in each group
                keep[:, heads, taken] = out[..., : len(taken)].transpose(2, 3)
            else:
                keep[..., taken] = out[..., : len(taken)]
    return keep
