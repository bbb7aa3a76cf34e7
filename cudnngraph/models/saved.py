"""What a forward saves for its backward that the backward can do without.

What depends on no input is computed in both.

torch keeps the places of the largest elements for the gradient of max pooling: 8 bytes for each
element of the result. The gradient of ours finds them again, and so does torch's behind
:func:`pool_again`. Then the forward need not make them, nor keep them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .aten_ops import OF_MEMORY, goes_by_layout
from .results import results_in
from .rules.table import rule_of

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
    output = module.graph.output_node()
    results: list[Any] = list(results_in(module.graph))
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


def in_any_order(module: torch.fx.GraphModule) -> frozenset[str]:
    """The names of the inputs of a backward that may lie in any order: no op reads them, maybe
    behind views, that goes by how memory lies."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return frozenset(node.name for node in inputs if not _is_read_as_it_lies(node))


def _is_read_as_it_lies(node: torch.fx.Node) -> bool:
    for user in node.users:
        op: Any = user.target
        if user.op == "output":
            continue
        if op is not operator.getitem:
            if not isinstance(op, torch._ops.OpOverload) or op.overloadpacket in OF_MEMORY:
                return True
            if goes_by_layout(op) and (rule_of(op) is None or "attention" in op._schema.name):
                return True
            if all(made.alias_info is None for made in op._schema.returns):
                continue
        if _is_read_as_it_lies(user):
            return True
    return False
