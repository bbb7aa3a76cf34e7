"""Stacks that are only added up: each reader has its own, which its kernel reads as addresses.

Attention over branches stacks images, adds them up for their means, and adds them up by weights
that are made of these. One stack for both would be written to memory, and read from there.
"""

from __future__ import annotations

import torch

from ..kernels.short_reductions import MOST
from ..ops import meta

Node = torch.fx.Node
_STACKS = frozenset({torch.ops.aten.stack.default, torch.ops.aten.cat.default})
_REDUCES = frozenset({"sum", "mean", "amax", "amin"})
_POINTWISE = frozenset({"add", "sub", "mul", "div"})


def own_stacks(graph: torch.fx.Graph) -> None:
    """Give each reader of a stack one of its own, in place, where all readers reduce it along the
    dim that is stacked, as it is or by numbers that it is multiplied with."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _STACKS or len(node.users) < 2:
            continue
        made = _float(node)
        if made is None:
            continue
        dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % made.ndim
        if made.shape[dim] > MOST or not all(_adds_up(user, made, dim) for user in node.users):
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                own = graph.node_copy(node)
            own.meta = dict(node.meta)
            user.replace_input_with(node, own)


def _float(node: Node) -> torch.Tensor | None:
    """The tensor of floats that a node gives."""
    made = node.meta.get("val")
    return made if isinstance(made, torch.Tensor) and made.dtype.is_floating_point else None


def _adds_up(user: Node, stack: torch.Tensor, dim: int) -> bool:
    """Whether a reader of a stack reduces it along a dim, maybe behind a pointwise op."""
    if _reduces(user, stack.ndim, dim):
        return True
    made = _float(user)
    if made is None or meta.op_name(user) not in _POINTWISE or made.shape != stack.shape:
        return False
    return bool(user.users) and all(_reduces(each, stack.ndim, dim) for each in user.users)


def _reduces(user: Node, rank: int, dim: int) -> bool:
    if user.op != "call_function" or meta.op_name(user) not in _REDUCES:
        return False
    dims = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    return isinstance(dims, (list, tuple)) and dim in [each % rank for each in dims]
