"""Turn 16-bit reductions into float32 reductions and a cast, as cuDNN has them."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..ir.spec import (
    GraphSpec,
    Node,
)
from ..ops.base import LOW_PRECISION


def float32_reductions(spec: GraphSpec) -> GraphSpec:
    """The graph with reductions that return float32, as cuDNN's do, and narrow outputs behind."""
    tensors, nodes = dict(spec.tensors), list(spec.nodes)
    for place, node in enumerate(spec.nodes):
        result = tensors[node.results[0]]
        if node.op != "reduction" or result.dtype not in LOW_PRECISION:
            continue
        if result.name not in spec.outputs:  # no tensor of the caller
            tensors[result.name] = replace(result, dtype=torch.float32)
            continue
        wide = replace(result, name=f"{result.name}_wide", dtype=torch.float32)
        tensors[wide.name] = wide
        nodes[place] = replace(node, outputs=(wide.name,))
        nodes.append(Node("identity", f"{result.name}_narrow", (wide.name,), (result.name,)))
    return spec if tensors == spec.tensors else replace(spec, tensors=tensors, nodes=tuple(nodes))
