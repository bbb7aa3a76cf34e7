"""Where a graph of training is parted into forward and backward: what the forward keeps.

torch's partitioner keeps the fewest bytes, and has the backward compute again what is pointwise. It
knows this of the small ops that torch.compile makes of all others. Here it is told the same of ops
that stay whole: gradients of norms and activations read what is computed again within their
kernels, and what a batch norm gives is pointwise for who has its statistics.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from . import draws, kept, parts

Tensor = torch.Tensor
_aten: Any = torch.ops.aten


def fewest_bytes(*, kernels: bool) -> Any:
    """torch's partitioner of forward and backward; with ``kernels``, as this module says. What is
    random is drawn once."""
    partition = import_module("functorch.compile").min_cut_rematerialization_partition

    def plain(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        with _drawn_once():
            forward, backward = partition(joint, inputs, **options)
            if kept.copy_written(joint, backward):
                forward, backward = partition(joint, inputs, **options)
            return forward, backward

    def parted(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        parts.take_apart(joint)
        _apply_statistics(joint)
        with _told():
            forward, backward = plain(joint, inputs, **options)
        _as_one(forward)
        _as_one(backward)
        return forward, backward

    return parted if kernels else plain


@contextmanager
def _replaced(name: str, make: Callable[[Any, Any], Any]) -> Iterator[None]:
    """torch's partitioner with another function of a name, which ``make`` gives for torch's and its
    module; as it is, if it has none."""
    module: Any = import_module("torch._functorch.partitioners")
    theirs = getattr(module, name, None)
    if theirs is None:
        yield
        return
    setattr(module, name, make(theirs, module))
    try:
        yield
    finally:
        setattr(module, name, theirs)


def _drawn_once() -> AbstractContextManager[None]:
    """torch's partitioner, which keeps random numbers: within a budget of memory its backward would
    compute what is made of them by others, that it draws."""

    def make(theirs: Any, module: Any) -> Any:
        def ours(graph: torch.fx.Graph, info: Any, *rest: Any, **options: Any) -> list[Any]:
            saved = list(theirs(graph, info, *rest, **options))
            saved += filter(kept.is_copy, graph.nodes)
            for node in graph.nodes:
                if not draws.is_random(node) or node not in info.required_fw_nodes:
                    continue
                if not module.must_recompute(node):  # as a checkpoint's, whose state is kept
                    results = [user for user in node.users if user.target is operator.getitem]
                    saved += results or [node]
            return list(dict.fromkeys(saved))  # what no backward reads is left out later

        return ours

    return _replaced("choose_saved_values_set", make)


#: Ops that a kernel computes, or reads, in one pass with what is pointwise around them.
_POINTWISE = (
    "elu_backward",
    "hardsigmoid_backward",
    "hardswish",
    "hardswish_backward",
    "hardtanh_backward",
    "leaky_relu_backward",
    "log_sigmoid_backward",
    "mish_backward",
    "softplus_backward",
)
_VIEWS = ("detach", "transpose")
_NORMS = (
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_softmax",
    "_softmax_backward_data",
    "linalg_vector_norm",
    "native_batch_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
)


def _packets(names: tuple[str, ...]) -> set[Any]:
    return {getattr(_aten, name) for name in names if hasattr(_aten, name)}


def _told() -> AbstractContextManager[None]:
    """torch's partitioner with the ops of this module in its lists."""
    views = _packets(_VIEWS)
    again = _packets(_POINTWISE) | views | {normalized}
    inside = again | _packets(_NORMS)

    def make(theirs: Any, module: Any) -> Any:
        def ours() -> Any:
            found = theirs()
            return replace(
                found,
                fusible_ops=found.fusible_ops | inside,
                recomputable_ops=found.recomputable_ops | again,
                view_ops=found.view_ops | views,
            )

        return ours

    return _replaced("get_default_op_list", make)


def normalized(
    x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """What a batch norm makes of images x (N, C, ...) by the statistics (C,) that it has found:
    (x - mean) * inverse * weight + bias, in x's dtype, computed in float32 for 16 bits."""
    column = (-1, *(1 for _ in range(x.dim() - 2)))
    wide = parts.wide(x.dtype)
    y = (x.to(wide) - mean.view(column)) * inverse.view(column)
    if weight is not None:
        y = y * weight.to(wide).view(column)
    if bias is not None:
        y = y + bias.to(wide).view(column)
    return y.to(x.dtype)


_BATCH_NORM = _aten._native_batch_norm_legit_functional.default
_TRAINS = 5  # the place of that argument


def _apply_statistics(joint: torch.fx.GraphModule) -> None:
    """Have results of batch norms made of their statistics, by :func:`normalized`."""
    graph = joint.graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not _BATCH_NORM or node.args[_TRAINS] is not True:
            continue
        found = {user.args[1]: user for user in node.users}
        if not {0, 1, 2} <= found.keys() or any(
            user.target is not operator.getitem for user in node.users
        ):
            continue
        y, last = found[0], max((found[1], found[2]), key=order.__getitem__)
        x, weight, bias = node.args[:3]
        with graph.inserting_after(last):
            made = graph.call_function(normalized, (x, found[1], found[2], weight, bias))
        made.meta = dict(y.meta)
        y.replace_all_uses_with(made)
        graph.erase_node(y)
    joint.recompile()


def _as_one(module: torch.fx.GraphModule) -> None:
    """Leave each :func:`normalized` to the norm of its statistics, where that is in the same graph;
    else it becomes pointwise ops, anew for all that read it: each does so in a kernel of its own.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not normalized:
            continue
        norm = _norm_of(node)
        if norm is not None:
            with graph.inserting_before(node):
                made = graph.call_function(operator.getitem, (norm, 0))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
        else:
            for user in list(node.users):
                with graph.inserting_before(user):
                    user.replace_input_with(node, parts.normalized(graph, user, *node.args))
        graph.erase_node(node)
    module.recompile()


def _norm_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The norm in the same graph that has found the statistics of :func:`normalized`."""
    x, mean = node.args[:2]
    assert isinstance(mean, torch.fx.Node)
    if mean.target is not operator.getitem:
        return None
    norm: Any = mean.args[0]
    return norm if norm.target is _BATCH_NORM and norm.args[0] is x else None
