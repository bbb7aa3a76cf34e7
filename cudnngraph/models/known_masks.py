"""Masks of attention that a graph of dynamo's makes of nothing but sizes, before it is traced.

transformers builds its masks so while it is compiled, of all keys or of those up to the diagonal. A
mask that is expanded over the keys sends torch to attention by products and a softmax, in float32
and with all scores kept for the gradient; without a mask, or with a flag in its place, one kernel
runs it.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from .bands import MOST_SCORES, band_of

Node = torch.fx.Node
#: What masks are made by: functions of torch and of ``operator``, and methods of tensors.
_FUNCTIONS = """
    arange ones zeros full ones_like zeros_like full_like tril triu where add sub mul neg getitem
    eq ne ge gt le lt and_ or_ invert logical_and logical_or logical_not bitwise_and bitwise_or
"""
_MAKERS = {getattr(of, each, None) for of in (torch, operator) for each in _FUNCTIONS.split()}
_OF_TENSORS = """
    expand expand_as view view_as reshape unsqueeze squeeze transpose permute contiguous clone to
    bool float type_as tril triu masked_fill logical_and logical_or logical_not
    new_ones new_zeros new_full
"""
_METHODS = frozenset(_OF_TENSORS.split())


def flag(module: torch.fx.GraphModule) -> None:
    """Let attention in a graph of dynamo's, and in the graphs in it, do without masks that let all
    keys attend, or those up to the diagonal; other masks end with keys beside one another."""
    for part in module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        calls = [node for node in part.graph.nodes if node.target is F.scaled_dot_product_attention]
        known = _known(part.graph) if calls else frozenset()
        if any(_writes_over(node, known) for node in part.graph.nodes):
            continue
        made: dict[Node, Any] = {}
        if any([_flagged(node, known, made) for node in calls]):
            part.recompile()


def _flagged(node: Node, known: frozenset[Node], made: dict[Node, Any]) -> bool:
    """Replace the mask of a call if it can be, and say so."""
    given = _arguments(node)
    mask = given.get("attn_mask")
    if not isinstance(mask, Node) or given.get("is_causal") not in (None, False):
        return False
    seen = mask.meta.get("example_value")
    if not isinstance(seen, torch.Tensor) or seen.requires_grad or not _is_plain(seen):
        return False
    value = _value_of(mask, made) if mask in known else None
    band = band_of(value) if isinstance(value, torch.Tensor) else None
    if band == (None, None):
        given["attn_mask"] = None
    elif band == (None, 0) and seen.shape[-2] == seen.shape[-1]:
        given["attn_mask"], given["is_causal"] = None, True
    elif seen.stride(-1) != 1:
        given["attn_mask"] = _in_rows(node, mask, seen)
    else:
        return False
    node.args, node.kwargs = (), given
    return True


_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _arguments(node: Node) -> dict[str, Any]:
    return dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)


def _is_plain(seen: torch.Tensor) -> bool:
    sizes = (*seen.shape, *seen.stride())
    return seen.dim() >= 2 and all(type(each) is int for each in sizes)


def _in_rows(node: Node, mask: Node, seen: torch.Tensor) -> Node:
    with node.graph.inserting_before(node):
        copy = node.graph.call_method("contiguous", (mask,))
    copy.meta["example_value"] = seen.contiguous()
    return copy


def _known(graph: torch.fx.Graph) -> frozenset[Node]:
    """The calls that depend on nothing that a graph is given."""
    known: set[Node] = set()
    for node in graph.nodes:
        makes = node.op == "call_function" and node.target in _MAKERS
        makes = makes or (node.op == "call_method" and node.target in _METHODS)
        seen = node.meta.get("example_value")
        small = not isinstance(seen, torch.Tensor) or _is_small(seen)
        if makes and small and known.issuperset(node.all_input_nodes):
            known.add(node)
    return frozenset(known)


def _value_of(node: Node, made: dict[Node, Any]) -> Any:
    """What a known call computes, on the CPU; None where a size is open, or torch refuses."""
    if node not in made:
        if any(_value_of(each, made) is None for each in node.all_input_nodes):
            made[node] = None
            return None
        called: Any = node.target
        if node.op == "call_method":
            called = partial(_method, called)
        args, kwargs = (_given(each, made) for each in (node.args, node.kwargs))
        try:
            made[node] = called(*args, **kwargs)
        except Exception:
            made[node] = None
    return made[node]


def _method(name: str, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(tensor, name)(*args, **kwargs)


def _is_small(seen: torch.Tensor) -> bool:
    return all(type(each) is int for each in seen.shape) and seen.numel() <= MOST_SCORES


def _given(arguments: Any, made: dict[Node, Any]) -> Any:
    """The arguments of a call, with values in the place of nodes."""
    values = torch.fx.node.map_arg(arguments, made.__getitem__)
    return torch.fx.node.map_aggregate(values, _to_cpu)


def _to_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


# -- writes ----------------------------------------------------------------------------------------

_WRITERS: frozenset[Any] = frozenset(
    (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.iand, operator.ior)
)
_SAME_MEMORY = """
    as_strided broadcast_to chunk detach diagonal expand flatten getitem movedim narrow permute
    reshape select split squeeze swapaxes t transpose unbind unflatten unsqueeze view
"""
_VIEWS = frozenset(_SAME_MEMORY.split())


def _writes_over(node: Node, known: frozenset[Node]) -> bool:
    """Whether a call writes over what is known, or over a view of it."""
    if not _writes(node) or not node.all_input_nodes:
        return False
    written: Any = node.kwargs.get("out", node.args[0] if node.args else None)
    while isinstance(written, Node):
        if written in known:
            return True
        if written.op not in ("call_method", "call_function") or _name(written) not in _VIEWS:
            return False
        written = written.args[0]
    return False


def _writes(node: Node) -> bool:
    if node.op not in ("call_method", "call_function"):
        return False
    name = _name(node)
    own = name.endswith("_") and not name.endswith("__")
    return own or node.target in _WRITERS or "out" in node.kwargs


def _name(node: Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
