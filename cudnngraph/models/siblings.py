"""Small products of one tensor by constant weights become one product.

Queries, keys and values of attention, the embedding of a time or a text that every block of a
diffusion model projects anew: such products wait for memory and for launches, not for arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..device.rules import rules
from ..ops import meta
from ..ops.base import LOW_PRECISION
from .new_constants import add_constant

Node = torch.fx.Node
_linear = torch.ops.aten.linear.default
_MOVES = frozenset({*meta.RESHAPES, "transpose", "permute", "t", "slice", "select", "expand"})


def join_siblings(
    graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Join small products of a graph of ATen ops, in place; the constants with the joined weights.

    A group has one input, constant weights, biases or none, and results that are first moved, not
    computed with, so that no product loses what its plan would do behind it.
    """
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is _linear and _is_small(node, constants):
            weight, bias = constants_of(node, constants)
            form = (node.args[0], weight.dtype, None if bias is None else bias.dtype)
            groups.setdefault(form, []).append(node)
    made = dict(constants)
    for group in groups.values():
        if len(group) > 1:
            _join(graph, group, made)
    return made


def is_fixed(node: Node, constants: Mapping[str, torch.Tensor]) -> bool:
    """Whether a product is one by a constant weight, with a constant bias or none."""
    given = [each for each in node.args[1:] if each is not None]
    return all(isinstance(each, Node) and each.name in constants for each in given)


def constants_of(
    node: Node, constants: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and the bias of a product."""
    weight, bias = node.args[1], node.args[2] if len(node.args) > 2 else None
    assert isinstance(weight, Node)
    return constants[weight.name], constants[bias.name] if isinstance(bias, Node) else None


def _is_small(node: Node, constants: Mapping[str, torch.Tensor]) -> bool:
    """Whether a product may be one of a group."""
    if not is_fixed(node, constants):
        return False
    seen = node.meta.get("val")
    weight, _ = constants_of(node, constants)
    if not isinstance(seen, torch.Tensor) or weight.dtype not in LOW_PRECISION:
        return False
    if not all(isinstance(size, int) for size in seen.shape):  # which is refused in its place
        return False
    multiplied = seen.numel() // max(1, seen.shape[-1]) * weight.numel()
    return (
        0 < multiplied <= rules().sibling_max_multiplications
        and weight.nbytes <= rules().sibling_max_weight_bytes
        and weight.shape[0] % 8 == 0  # results stay aligned
        and bool(node.users)
        and all(meta.op_name(user) in _MOVES for user in node.users)
    )


def _join(graph: torch.fx.Graph, group: Sequence[Node], constants: dict[str, torch.Tensor]) -> None:
    """Put one product in the place of several."""
    found = [constants_of(node, constants) for node in group]
    weight = torch.cat([weight for weight, _ in found])
    biases = [bias for _, bias in found if bias is not None]
    args: list[Any] = [group[0].args[0]]
    for tensor in (weight, torch.cat(biases)) if biases else (weight,):
        args.append(add_constant(graph, constants, f"joined_{group[0].name}_{len(args)}", tensor))
    with graph.inserting_before(group[0]):
        whole = graph.call_function(_linear, tuple(args))
        seen = group[0].meta["val"]
        whole.meta = dict(group[0].meta)
        shape = (*seen.shape[:-1], weight.shape[0])
        whole.meta["val"] = torch.empty(shape, dtype=seen.dtype, device="meta")
    start = 0
    for node, (part, _) in zip(group, found, strict=True):
        end = start + part.shape[0]
        with graph.inserting_before(node):
            given = (whole, node.meta["val"].dim() - 1, start, end)
            own = graph.call_function(torch.ops.aten.slice.Tensor, given)
        own.meta = dict(node.meta)
        node.replace_all_uses_with(own)
        graph.erase_node(node)
        start = end
