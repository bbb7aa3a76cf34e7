"""What a forward saves for its backward that the backward can do without.

What depends on no input is computed in both.

torch keeps the places of the largest elements for the gradient of max pooling: 8 bytes for each
element of the result. The gradient of ours finds them again, and so does torch's behind
:func:`pool_again`. Then the forward need not make them, nor keep them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch

from ..ops.base import LOW_PRECISION

_aten: Any = torch.ops.aten

_POOLS: dict[Any, tuple[Any, int]] = {  # a gradient: the pool, and how many arguments it has
    _aten.max_pool2d_with_indices_backward.default: (_aten.max_pool2d_with_indices.default, 6),
    _aten.max_pool3d_with_indices_backward.default: (_aten.max_pool3d_with_indices.default, 6),
}


def backward_first() -> AbstractContextManager[Any]:
    """Let AOTAutograd hand over a backward with its forward, and not at the first gradient."""
    config: Any = torch._functorch.config
    name = "force_non_lazy_backward_lowering"
    return config.patch({name: True}) if hasattr(config, name) else nullcontext()


def within(budget: float | None) -> AbstractContextManager[Any]:
    """Let a forward keep a part of the bytes that its backward would read; None for torch's
    setting."""
    config: Any = torch._functorch.config
    return nullcontext() if budget is None else config.patch(activation_memory_budget=budget)


def fewest_bytes(*, kernels: bool) -> Any:
    """torch's partitioner of forward and backward that keeps the fewest bytes, and has pointwise
    ops computed again. With ``kernels``, logarithms of a softmax are such: a kernel computes them
    of scores and two numbers for each row."""
    partition = import_module("functorch.compile").min_cut_rematerialization_partition
    if not kernels:
        return partition

    def parted(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        log_softmax_in_parts(joint)
        return partition(joint, inputs, **options)

    return parted


def log_softmax_in_parts(module: torch.fx.GraphModule) -> None:
    """Have logarithms of a softmax, and their gradients, as pointwise ops and reductions; those of
    16 bits in float32, as torch computes them."""
    graph = module.graph
    changed = False
    for node in list(graph.nodes):
        if node.target in _LOSSES:
            _without_scores(graph, node)
            changed = True
        parts = _PARTS.get(node.target) if node.op == "call_function" else None
        made = node.meta.get("val")
        if parts is None or not isinstance(made, torch.Tensor) or made.dim() == 0:
            continue
        empty = any(type(size) is int and size == 0 for size in made.shape)  # have no maximum
        if empty:
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(parts(graph, made, *node.args))
        graph.erase_node(node)
        changed = True
    if changed:
        module.recompile()


def _log_softmax(
    graph: torch.fx.Graph, made: torch.Tensor, x: torch.fx.Node, dim: int, half: bool
) -> torch.fx.Node:
    x = _cast(graph, x, _wide(made.dtype))
    most = _called(graph, _aten.amax.default, x, [dim], True)
    shifted = _called(graph, _aten.sub.Tensor, x, most)
    powers = _called(graph, _aten.exp.default, shifted)
    total = _called(graph, _aten.sum.dim_IntList, powers, [dim], True)
    y = _called(graph, _aten.sub.Tensor, shifted, _called(graph, _aten.log.default, total))
    return _cast(graph, y, made.dtype)


def _log_softmax_backward(
    graph: torch.fx.Graph,
    made: torch.Tensor,
    dy: torch.fx.Node,
    y: torch.fx.Node,
    dim: int,
    dtype: torch.dtype,
) -> torch.fx.Node:
    while y.target is _aten.detach.default:  # which the partitioner would not compute again
        (y,) = y.all_input_nodes
    if (
        y.target is _aten._to_copy.default
    ):  # of ours: what is rounded would be saved, being as small
        (y,) = y.all_input_nodes
    dy, y = (_cast(graph, each, _wide(each.meta["val"].dtype)) for each in (dy, y))
    total = _called(graph, _aten.sum.dim_IntList, dy, [dim], True)
    powers = _called(graph, _aten.exp.default, y)
    dx = _called(graph, _aten.sub.Tensor, dy, _called(graph, _aten.mul.Tensor, powers, total))
    return _cast(graph, dx, made.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch computes a softmax."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def _cast(graph: torch.fx.Graph, x: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    if x.meta["val"].dtype == dtype:
        return x
    return _called(graph, _aten._to_copy.default, x, dtype=dtype)


def _without_scores(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Take the scores away from the gradient of a loss, which reads nothing but their shape."""
    given: Sequence[Any] = node.args
    like = given[1].meta["val"]
    with graph.inserting_before(node):
        zero = _called(graph, _aten.full.default, [], 0.0, dtype=like.dtype, device=like.device)
        sizes = [_size(graph, given[1], dim) for dim in range(like.dim())]
        shape = _called(graph, _aten.expand.default, zero, sizes)
    node.args = (given[0], shape, *given[2:])


def _size(graph: torch.fx.Graph, node: torch.fx.Node, dim: int) -> int | torch.fx.Node:
    """The extent of a dim, as a node if it is left open."""
    size = node.meta["val"].shape[dim]
    return size if type(size) is int else _called(graph, _aten.sym_size.int, node, dim)


_LOSSES = (_aten.nll_loss_backward.default, _aten.nll_loss2d_backward.default)
_PARTS: dict[Any, Callable[..., torch.fx.Node]] = {
    _aten._log_softmax.default: _log_softmax,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
}


def _called(graph: torch.fx.Graph, op: Any, *args: Any, **options: Any) -> torch.fx.Node:
    """A call of an op, with what it makes of the values that are known of its arguments."""
    node = graph.call_function(op, args, options)
    seen = torch.fx.map_arg(args, lambda each: each.meta["val"])
    with torch.no_grad():
        node.meta["val"] = op(*seen, **options)
    return node


def pool_again(module: torch.fx.GraphModule) -> None:
    """Let gradients of max pooling compute the indices that were saved for them."""
    graph = module.graph
    changed = False
    for node in list(graph.nodes):
        found = _POOLS.get(node.target) if node.op == "call_function" else None
        if found is None or node.kwargs or not isinstance(node.args[-1], torch.fx.Node):
            continue
        pool, count = found
        source, indices = node.args[1], node.args[-1]
        if indices.op != "placeholder" or not isinstance(source, torch.fx.Node):
            continue
        args = node.args[1 : 1 + count]
        with graph.inserting_before(node):
            pooled = graph.call_function(pool, args)
            again = graph.call_function(operator.getitem, (pooled, 1))
        with torch.no_grad():
            pooled.meta["val"] = pool(source.meta["val"], *args[1:])
        again.meta["val"] = pooled.meta["val"][1]
        node.args = (*node.args[:-1], again)
        changed = True
    if changed:
        module.recompile()


def without_running(module: torch.fx.GraphModule) -> None:
    """Take running statistics away from gradients of batch norms that do not read them: those of
    the batch's own statistics."""
    changed = False
    for node in module.graph.nodes:
        if node.target is not _aten.native_batch_norm_backward.default or not node.args[7]:
            continue
        node.args = (*node.args[:3], None, None, *node.args[5:])
        changed = True
    if changed:
        module.recompile()


def without_states(module: torch.fx.GraphModule) -> None:
    """Take states of random generators away from gradients of attention that drops nothing. Torch's
    kernels leave memory as it was there."""
    graph = module.graph
    changed = False
    for node in list(graph.nodes):
        names = _arguments(node)
        if not _STATES & set(names) or node.args[names.index("dropout_p")] != 0.0:
            continue
        for place in map(names.index, sorted(_STATES)):
            state = node.args[place]
            if not isinstance(state, torch.fx.Node) or state.op != "placeholder":
                continue
            seen = state.meta["val"]
            options = {"dtype": seen.dtype, "device": seen.device}
            with graph.inserting_before(node):
                zero = graph.call_function(_aten.zeros.default, (list(seen.shape),), options)
            zero.meta["val"] = torch.zeros_like(seen)
            node.update_arg(place, zero)
            changed = True
    if changed:
        module.recompile()


_STATES = frozenset({"philox_seed", "philox_offset"})


def _arguments(node: torch.fx.Node) -> list[str]:
    """The names of the arguments of a gradient of attention."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    schema = target._schema
    if "_scaled_dot_product" not in schema.name or not schema.name.endswith("_backward"):
        return []
    return [argument.name for argument in schema.arguments][: len(node.args)]


MOST_CONSTANT = 1 << 22  # elements of a tensor that both graphs keep


def compute_again(module: torch.fx.GraphModule, forward: torch.fx.GraphModule) -> None:
    """Let a backward compute what its forward would save and that depends on no input: indices and
    masks by positions. It is a constant of both graphs then."""
    graph, made = module.graph, dict[torch.fx.Node, torch.fx.Node]()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    sources = {node.name: node for node in forward.graph.nodes}
    fixed = _constant_nodes(forward.graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")

    def copied(node: torch.fx.Node) -> torch.fx.Node:
        if node not in made:
            for each in node.all_input_nodes:
                copied(each)
            with graph.inserting_before(first):
                made[node] = graph.node_copy(node, lambda each: made[each])
        return made[node]

    for node in inputs:
        source = sources.get(node.name)
        seen = None if source is None else source.meta.get("val")
        if source not in fixed or not isinstance(seen, torch.Tensor):
            continue
        sizes = tuple(seen.shape)
        if all(type(n) is int for n in sizes) and math.prod(sizes) <= MOST_CONSTANT:
            node.replace_all_uses_with(copied(source))
    if made:
        module.recompile()


def _constant_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The ops that depend on no input, and draw nothing."""
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        target: Any = node.target
        if node.op != "call_function" or not found.issuperset(node.all_input_nodes):
            continue
        if target is operator.getitem or (
            isinstance(target, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded not in target.tags
            and not target._schema.is_mutable
        ):
            found.add(node)
    return found


def allow_again() -> None:
    """Let the backward that is being compiled run with ``retain_graph=True``.

    AOTAutograd would refuse that for a backward that may write over what was saved. Ours does not.
    """
    context = torch._guards.TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    if getattr(metadata, "bw_donated_idxs", None):
        metadata.bw_donated_idxs = []


def unread(module: torch.fx.GraphModule) -> frozenset[str]:
    """The names of the inputs that nothing reads."""
    nodes = module.graph.nodes
    return frozenset(node.name for node in nodes if node.op == "placeholder" and not node.users)


def without(module: torch.fx.GraphModule, places: Sequence[int]) -> dict[int, torch.Tensor]:
    """Leave out results of a graph, None in their places, and return the forms of the tensors."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    results: list[Any] = list(output.args[0])
    forms: dict[int, torch.Tensor] = {}
    for place in places:
        node = results[place]
        seen = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if isinstance(seen, torch.Tensor):
            forms[place], results[place] = seen, None
    if forms:
        output.args = (tuple(results),)
        module.graph.eliminate_dead_code()
    return forms


def stand_in(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of a form for results that nothing reads: one element stands for all."""
    return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)
