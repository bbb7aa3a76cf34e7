"""What a graph of ATen ops computes twice, or for nothing, is left out before it is imported."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ..ops import meta

Node = torch.fx.Node
_VIEWS = frozenset({*meta.RESHAPES, "expand", "permute"})
#: In a node's meta: the name of the one node that it is computed for.
FOR = "computed for"
_NEUTRAL = {"div": 1, "mul": 1, "sub": 0}  # x + 0 is not: of -0 it makes 0


def simplify(graph: torch.fx.Graph) -> None:
    """Leave out, in place, what is computed again from the same operands, ``x * 1``, and views of
    all of a tensor as it lies.

    What the model returns stays: its results are tensors of their own.
    """
    seen: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        if not is_pure(node) or any(user.op == "output" for user in node.users):
            continue
        same: Node | None = _unchanged(node)
        if same is None:
            try:
                same = seen.setdefault(_computation(node), node)
            except TypeError:  # an argument that is not hashable
                continue
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def is_pure(node: Node) -> bool:
    """Whether a node gives the same for the same operands, and does nothing else."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    aten = target.namespace == "aten"
    return aten and not (
        target._schema.is_mutable or meta.is_random(target, node.args, node.kwargs)
    )


def _computation(node: Node) -> Hashable:
    """What a node computes, of what; a reshape by its result, whatever it is called."""
    made = _value(node)
    if meta.op_name(node) in meta.RESHAPES and made is not None:
        return "reshape", node.args[0], tuple(made.shape), made.dtype
    return node.target, _key(node.args), _key(node.kwargs), node.meta.get(FOR)


def _key(given: Any) -> Hashable:
    """Arguments as something hashable; 1, 1.0 and True are apart."""
    if isinstance(given, (list, tuple)):
        return type(given).__name__, tuple(map(_key, given))
    if isinstance(given, dict):
        return tuple((name, _key(value)) for name, value in sorted(given.items()))
    hash(given)
    return type(given), repr(given) if isinstance(given, float) else given


def _unchanged(node: Node) -> Node | None:
    """The operand that a node gives as it is, None where it computes something."""
    name = meta.op_name(node)
    if node.target is torch.ops.aten.copy.default:
        return _copied(node)
    if name in _VIEWS:
        return _seen_whole(node)
    if name not in _NEUTRAL or len(node.args) != 2 or node.kwargs:
        return None
    x, number = node.args
    before, after = _value(x), _value(node)
    if before is None or after is None:
        return None
    if type(number) not in (int, float) or number != _NEUTRAL[name]:
        return None
    if not before.dtype.is_floating_point or before.dtype != after.dtype:
        return None
    return x if before.shape == after.shape else None  # type: ignore[return-value]


def _value(node: Any) -> torch.Tensor | None:
    """The tensor that a node gives; None if its sizes follow from numbers in tensors, which torch
    does not compare."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    sizes = (*value.shape, *value.stride())
    return value if all(isinstance(size, int) for size in sizes) else None


def _seen_whole(node: Node) -> Node | None:
    """What a view shows in its own form."""
    source, made = node.args[0], _value(node)
    seen = _value(source)
    if seen is None or made is None:
        return None
    alike = (seen.shape, seen.stride(), seen.dtype) == (made.shape, made.stride(), made.dtype)
    return source if alike else None  # type: ignore[return-value]


def _copied(node: Node) -> Node | None:
    """What is written over all of a tensor of its own form."""
    source, made = node.args[1], _value(node)
    seen = _value(source)
    if seen is None or made is None:
        return None
    alike = (seen.shape, seen.dtype, seen.device) == (made.shape, made.dtype, made.device)
    return source if alike and len(node.args) == 2 else None  # type: ignore[return-value]
