"""Constants that a pass over a graph of ATen ops adds, beside the tensors that a model has."""

from __future__ import annotations

import torch

Node = torch.fx.Node


def add_constant(
    graph: torch.fx.Graph, constants: dict[str, torch.Tensor], label: str, tensor: torch.Tensor
) -> Node:
    """A placeholder in front of all nodes for a tensor, which ``constants`` gets by its name."""
    with graph.inserting_before(next(iter(graph.nodes))):
        made: Node = graph.placeholder(label)
    made.meta["val"] = tensor.to("meta")
    constants[made.name] = tensor
    return made
