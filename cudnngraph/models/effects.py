"""Calls of a traced graph that do something and give nothing, in torch's order of effects.

torch.linalg's check that a matrix could be inverted is one: it raises an error. AOTAutograd threads
a token through such calls. :func:`take_out` makes results of what they read, behind all others, and
an :class:`Effect` is called when the graph has run, before anything is written.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .results import results_in


@dataclass(frozen=True)
class _Read:
    """The place of an argument among the results that effects read."""

    place: int


@dataclass(frozen=True)
class Effect:
    """A call of an op, whose tensors are results of the graph."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, results: Sequence[Any]) -> None:
        """Call the op on what it reads of ``results``."""
        args, kwargs = pytree.tree_map_only(
            _Read, lambda read: results[read.place], (self.args, self.kwargs)
        )
        self.op(*args, **kwargs)


@dataclass(frozen=True)
class Effects:
    """The effects of a graph in their order, and the number of results that they read."""

    calls: tuple[Effect, ...] = ()
    reads: int = 0

    def split(self, results: list[Any]) -> list[Any]:
        """Call all effects, and return the results that are not theirs alone."""
        if not self.calls:
            return results
        kept = len(results) - self.reads
        for call in self.calls:
            call(results[kept:])
        return results[:kept]


NO_EFFECTS = Effects()


def take_out(module: torch.fx.GraphModule) -> Effects:
    """Take calls that give nothing out of a graph, and make last results of what they read."""
    graph = module.graph
    found: list[Effect] = []
    reads: list[torch.fx.Node] = []

    def read(node: torch.fx.Node) -> Any:
        reads.append(node)
        return _Read(len(reads) - 1)

    for node in list(graph.nodes):
        if not _gives_nothing(node):
            continue
        token, op, *args = node.args
        given, named = torch.fx.map_arg((tuple(args), dict(node.kwargs)), read)
        found.append(Effect(op, given, named))
        for user in list(node.users):  # of the token behind it alone
            user.replace_all_uses_with(token)
            graph.erase_node(user)
        graph.erase_node(node)
    if not found:
        return NO_EFFECTS
    output = graph.output_node()
    output.args = ((*results_in(graph), *reads),)
    module.recompile()
    return Effects(tuple(found), len(reads))


def _gives_nothing(node: torch.fx.Node) -> bool:
    """Whether a node is a call with an effect and without a result, of which the token is read."""
    if node.op != "call_function" or str(node.target) != "with_effects":
        return False
    op: Any = node.args[1]
    nothing = isinstance(op, torch._ops.OpOverload) and not op._schema.returns
    tokens = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    return nothing and not op._schema.is_mutable and tokens
