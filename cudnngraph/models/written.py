"""Inputs that a traced graph writes: running statistics and counts of batch norms.

AOTAutograd leaves ``copy_`` of their new values at the graph's end. :func:`take_out` makes results
of these, and :func:`write` writes them, all in a launch for each dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .results import results_in

_COPY: Any = torch.ops.aten.copy_.default


def take_out(module: torch.fx.GraphModule) -> tuple[int, ...]:
    """Make what is copied into inputs the first results; return the places of these inputs."""
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = graph.output_node()
    new: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not _COPY or node.op != "call_function" or node.args[0] not in inputs:
            continue
        target, value = node.args[0], node.args[1]
        if not isinstance(value, torch.fx.Node):
            continue
        new[target] = value
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    if new:
        output.args = ((*new.values(), *results_in(graph)),)
        module.recompile()
    return tuple(inputs.index(node) for node in new)


def write(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy values into tensors."""
    if not targets:
        return
    pairs: dict[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    # torch.inference_mode(False) turns gradients on, with which no parameter may be written.
    with torch.inference_mode(any(target.is_inference() for target in targets)), torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            if target.is_conj() or target.is_neg():  # which no launch of several takes
                target.copy_(value)
                continue
            kind = target.device, target.dtype, value.dtype
            pairs.setdefault(kind, []).append((target, value))
        for several in pairs.values():
            torch._foreach_copy_([target for target, _ in several], [value for _, value in several])
