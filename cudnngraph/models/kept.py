"""Inputs that a forward writes and whose old values its backward reads: counters, averages.

What is saved for a backward is read after the forward has written its inputs. torch's partitioner
does not ask for that: it may save such an input, or a view of it, to compute again what was made of
its old value. :func:`copy_written` has it save a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

_aten: Any = torch.ops.aten
#: What writes an input at the end of a graph, and what assigns to its ``data``.
_WRITES: frozenset[Any] = frozenset({_aten.copy_.default, _aten.set_.source_Tensor})
_MARK = "copied before it is written"


def copy_written(joint: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> bool:
    """Copy the inputs of a joint graph that its forward writes and that a ``backward``, as it was
    parted from it, would be given; return whether there are any. Then it is to be parted anew."""
    graph = joint.graph
    nodes = {node.name: node for node in graph.nodes}
    given = [nodes.get(node.name) for node in backward.graph.nodes if node.op == "placeholder"]
    roots = {root(node) for node in given if node is not None}
    found = [node for node in _written(graph) if node in roots]
    if not found:
        return False
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in found:
        with graph.inserting_before(first):
            copied = graph.call_function(_aten.clone.default, (node,))
        copied.meta = {**node.meta, "recompute": CheckpointPolicy.MUST_SAVE, _MARK: True}
        with torch.no_grad():
            copied.meta["val"] = node.meta["val"].clone()
        for user in [each for each in node.users if each is not copied and not _ends(each)]:
            user.replace_input_with(node, copied)
    joint.recompile()
    return True


def is_copy(node: torch.fx.Node) -> bool:
    """Whether a node is such a copy: within a budget of memory torch may compute it again."""
    return _MARK in node.meta


def _ends(node: torch.fx.Node) -> bool:
    """Whether a node stands at the end of a graph: its results, and what it writes to inputs."""
    return node.op == "output" or node.target in _WRITES


def _written(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The inputs that the forward writes, or that torch writes when it has run."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    found = {
        node.args[0]
        for node in graph.nodes
        if node.target in _WRITES and node.meta.get("partitioner_tag") != "must_be_in_backward"
    }
    output = graph.output_node()
    written = {
        each.mutated_input
        for each in pytree.tree_leaves(output.meta.get("desc", ()))
        if hasattr(each, "mutated_input")
    }
    found.update(node for node in inputs if node.meta.get("desc") in written)
    return [node for node in inputs if node in found]


def root(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor whose memory a node shows."""
    while node.op == "call_function" and node.all_input_nodes:
        op = node.target
        if not isinstance(op, torch._ops.OpOverload) or all(
            made.alias_info is None for made in op._schema.returns
        ):
            break
        node = node.all_input_nodes[0]
    return node
