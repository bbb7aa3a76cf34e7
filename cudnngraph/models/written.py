"""Inputs that a traced graph writes: running statistics and counts of batch norms.

AOTAutograd leaves ``copy_`` of their new values at the graph's end, and ``set_`` where a model has
assigned to ``tensor.data``. :func:`take_out` makes results of these, and :func:`write` writes them,
all copies in a launch for each dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch

from .kept import root
from .results import results_in

_COPY: Any = torch.ops.aten.copy_.default
_SET: Any = torch.ops.aten.set_.source_Tensor


def take_out(module: torch.fx.GraphModule) -> tuple[tuple[int, ...], frozenset[int]]:
    """Make what is written into inputs the first results.

    Return the places of these inputs, and those of them, by their number, that are given the memory
    of the new value in place of a copy.
    """
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = graph.output_node()
    writes = [node for node in graph.nodes if node.target in (_COPY, _SET)]
    often = Counter(node.args[0] for node in writes)
    new: dict[torch.fx.Node, torch.fx.Node] = {}
    exchanged: set[torch.fx.Node] = set()
    for node in writes:
        target, value = node.args[0], node.args[1]
        if target not in inputs or not isinstance(value, torch.fx.Node):
            continue
        if node.target is _SET:
            if often[target] > 1 or not _is_own(target, value):
                continue
            exchanged.add(target)
        new[target] = value
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    if new:
        output.args = ((*new.values(), *results_in(graph)),)
        module.recompile()
    places = tuple(inputs.index(node) for node in new)
    return places, frozenset(at for at, node in enumerate(new) if node in exchanged)


def _is_own(target: torch.fx.Node, value: torch.fx.Node) -> bool:
    """Whether a value has the form of what it is assigned to, and memory that no input has."""
    before, after = target.meta.get("val"), value.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    alike = before.shape == after.shape and before.dtype == after.dtype
    return alike and before.device == after.device and root(value).op == "call_function"


def write(
    targets: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    exchanged: Collection[int] = (),
) -> None:
    """Copy values into tensors; those of the numbers ``exchanged`` get the memory of theirs."""
    if not targets:
        return
    pairs: dict[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    # torch.inference_mode(False) turns gradients on, with which no parameter may be written.
    with torch.inference_mode(any(target.is_inference() for target in targets)), torch.no_grad():
        for at, (target, value) in enumerate(zip(targets, values, strict=True)):
            if at in exchanged:
                _SET(target, value)
                continue
            if target.is_conj() or target.is_neg():  # which no launch of several takes
                target.copy_(value)
                continue
            kind = target.device, target.dtype, value.dtype
            pairs.setdefault(kind, []).append((target, value))
        for several in pairs.values():
            torch._foreach_copy_([target for target, _ in several], [value for _, value in several])
