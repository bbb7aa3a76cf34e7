"""Graphs of torch.compile with the forms that they are called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import whole
from .compiler import is_compiling


def retraced(traced: torch.fx.GraphModule, args: Sequence[Any]) -> torch.fx.GraphModule:
    """A graph of ATen ops as it runs on ``args``, with the form of each value: a copy.

    AOTAutograd has said these forms if its own examples had those of ``args``; for others the graph
    is traced again, which takes torch a millisecond and more for each op.
    """
    if _fits(traced, args):
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(traced.graph, {}))
        whole.as_torch(graph)
        return torch.fx.GraphModule(traced, graph)
    from torch._dynamo.convert_frame import compile_lock
    from torch.fx.experimental.proxy_tensor import make_fx

    # A trace of torch.fx is one of the whole process: torch.compile in another thread is to wait,
    # and calls of what is compiled there are to know that no user's trace is going on.
    with compile_lock, is_compiling():
        made: torch.fx.GraphModule = make_fx(traced, tracing_mode="fake")(*args)
    whole.as_torch(made.graph)
    made.recompile()
    return made


def _fits(traced: torch.fx.GraphModule, args: Sequence[Any]) -> bool:
    """Whether the forms in a graph are all known, and those of its inputs are those of ``args``."""
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    if len(inputs) != len(args):
        return False
    for node, arg in zip(inputs, args, strict=True):
        seen = node.meta.get("val")
        if not isinstance(arg, torch.Tensor):
            if type(seen) is not type(arg) or seen != arg:
                return False
        elif node.users and (not isinstance(seen, torch.Tensor) or _form(seen) != _form(arg)):
            return False
    return all(
        "val" in node.meta and _is_known(node.meta["val"])
        for node in traced.graph.nodes
        if node.op == "call_function" or (node.op == "placeholder" and node.users)
    )


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = tensor.storage_offset()
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, place


def _is_known(values: Any) -> bool:
    """Whether no size in values of a trace is a symbol, be it one of a single value."""
    for each in pytree.tree_leaves(values):
        if isinstance(each, torch.Tensor):
            place = each.storage_offset()
            if any(type(n) is not int for n in (*each.shape, *each.stride(), place)):
                return False
        elif isinstance(each, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return False
    return True
