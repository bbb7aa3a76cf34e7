"""What gradients of a backward graph need not be given by its forward, being found again.

That is the number of rows that a loss of classes counts, and the places of the largest elements of
adaptive max pooling. See :mod:`cudnngraph.models.saved` for windows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

_aten: Any = torch.ops.aten


def _of_loss(node: torch.fx.Node) -> tuple[Any, ...]:
    return tuple(node.args[1:6])


def _of_pool(rank: int) -> Callable[[torch.fx.Node], tuple[Any, ...]]:
    def arguments(node: torch.fx.Node) -> tuple[Any, ...]:
        dy: Any = node.args[0]
        return node.args[1], list(dy.meta["val"].shape[-rank:])

    return arguments


#: A gradient: the op whose second result it reads last, and the arguments of that op.
_FORWARDS: dict[Any, tuple[Any, Callable[[torch.fx.Node], tuple[Any, ...]]]] = {
    _aten.nll_loss_backward.default: (_aten.nll_loss_forward.default, _of_loss),
    _aten.nll_loss2d_backward.default: (_aten.nll_loss2d_forward.default, _of_loss),
    _aten.adaptive_max_pool2d_backward.default: (_aten.adaptive_max_pool2d.default, _of_pool(2)),
    _aten.adaptive_max_pool3d_backward.default: (_aten.adaptive_max_pool3d.default, _of_pool(3)),
}


def find_again(module: torch.fx.GraphModule) -> None:
    """Let gradients compute what was saved for them. What no rule of ours reads is left out."""
    graph = module.graph
    changed = False
    for node in list(graph.nodes):
        found = _FORWARDS.get(node.target) if node.op == "call_function" else None
        if found is None or node.kwargs or not isinstance(node.args[-1], torch.fx.Node):
            continue
        forward, arguments = found
        args = arguments(node)
        if node.args[-1].op != "placeholder" or not _is_known(args) or _is_weighted(node):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(forward, args)
            again = graph.call_function(operator.getitem, (made, 1))
        with torch.no_grad():
            seen = torch.fx.node.map_arg(args, lambda each: each.meta["val"])
            made.meta["val"] = forward(*seen)
        again.meta["val"] = made.meta["val"][1]
        node.args = (*node.args[:-1], again)
        changed = True
    if changed:
        module.recompile()


def _is_known(args: tuple[Any, ...]) -> bool:
    """Whether no size among arguments is a symbol."""
    return all(type(n) is int for each in args if isinstance(each, list) for n in each)


def _is_weighted(node: torch.fx.Node) -> bool:
    """Whether classes of a loss have weights: torch's own counts those."""
    return _FORWARDS[node.target][1] is _of_loss and node.args[3] is not None
