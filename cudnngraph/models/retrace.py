"""Graphs of torch.compile with the forms that they are called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ir.spec import is_dense, overlaps_itself
from ..ops.aten import OF_ANY_STRIDES
from . import whole
from .compiler import is_compiling

#: In a placeholder's meta: the strides of what is given, where they are not those of the trace.
LIES = "cudnngraph_lies"


def retraced(
    traced: torch.fx.GraphModule, args: Sequence[Any], *, any_order: bool = False
) -> torch.fx.GraphModule:
    """A graph of ATen ops as it runs on ``args``, with the form of each value: a copy.

    AOTAutograd has said these forms if its own examples had those of ``args``; for others the graph
    is traced again, which takes torch a millisecond and more for each op. With ``any_order`` images
    may lie otherwise than they were traced, dense: :data:`LIES` tells how.
    """
    if fits(traced, args, any_order=any_order):
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(traced.graph, {}))
        whole.as_torch(graph)
        for node, arg in zip(inputs_of(graph), args, strict=True):
            seen = node.meta.get("val")
            if node.users and isinstance(seen, torch.Tensor) and seen.stride() != arg.stride():
                node.meta[LIES] = tuple(arg.stride())
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


def inputs_of(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The placeholders."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def fits(traced: torch.fx.GraphModule, args: Sequence[Any], *, any_order: bool = False) -> bool:
    """Whether the forms in a graph are all known, and those of its inputs are those of ``args``;
    with ``any_order`` maybe but for how images lie."""
    inputs = inputs_of(traced.graph)
    if len(inputs) != len(args):
        return False
    for node, arg in zip(inputs, args, strict=True):
        seen = node.meta.get("val")
        if not isinstance(arg, torch.Tensor):
            if type(seen) is not type(arg) or seen != arg:
                return False
        elif node.users and (
            not isinstance(seen, torch.Tensor) or not _alike(seen, arg, any_order)
        ):
            return False
    return is_known(traced)


def is_known(traced: torch.fx.GraphModule) -> bool:
    """Whether the forms in a graph are all known."""
    return all(
        "val" in node.meta and _is_known(node.meta["val"])
        for node in traced.graph.nodes
        if node.op == "call_function" or (node.op == "placeholder" and node.users)
    )


def _alike(seen: torch.Tensor, arg: torch.Tensor, any_order: bool) -> bool:
    """Whether a tensor has the form that was traced, or is an image that lies otherwise."""
    if _form(seen) == _form(arg):
        return True
    alike = seen.shape == arg.shape and seen.dtype == arg.dtype and seen.device == arg.device
    return any_order and alike and arg.dim() > 3 and is_dense(tuple(arg.shape), arg.stride())


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


# -- inputs as they were traced --------------------------------------------------------------------


def lazy_places(traced: torch.fx.GraphModule) -> dict[int, tuple[bool, bool]]:
    """The places of inputs whose memory holds conjugates of their numbers, and negatives."""
    seen = [node.meta.get("val") for node in inputs_of(traced.graph)]
    return {
        place: (each.is_conj(), each.is_neg())
        for place, each in enumerate(seen)
        if isinstance(each, torch.Tensor) and (each.is_conj() or each.is_neg())
    }


def strides_of_images(traced: torch.fx.GraphModule) -> dict[int, tuple[int, ...]]:
    """The strides of what may lie otherwise than it was traced, by place."""
    seen = [node.meta.get("val") for node in inputs_of(traced.graph)]
    return {
        place: tuple(each.stride())
        for place, each in enumerate(seen)
        if isinstance(each, torch.Tensor) and each.dim() > 3
        if all(type(n) is int for n in (*each.shape, *each.stride()))
        if not overlaps_itself(tuple(each.shape), tuple(each.stride()))
    }


def lazily(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """The same numbers in a view that conjugates, or negates, what memory holds."""
    if conj and not tensor.is_conj():
        tensor = tensor.conj_physical().conj()
    if neg and not tensor.is_neg():
        tensor = torch._neg_view(tensor.neg())
    return tensor


def of_any_strides(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A traced graph for torch to run, whose reshapes take the strides that kernels of torch's
    give, which are not always those of the trace."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.target = OF_ANY_STRIDES.get(node.target, node.target)
    return torch.fx.GraphModule(module, graph)
