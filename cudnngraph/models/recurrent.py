"""Recurrent layers while AOTAutograd traces."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_LSTMS: frozenset[Any] = frozenset((torch.lstm, torch._VF.lstm))


def traced_in_cells(module: torch.fx.GraphModule) -> AbstractContextManager[Any]:
    """Have LSTMs of a graph of dynamo's that trains traced as their cells.

    On a CPU torch has one op for a layer in float32. If the layer's input wants no gradient, what
    the op saves is a tensor when it is traced, and None when it runs: no graph can hold that.
    """
    parts = (part for part in module.modules() if isinstance(part, torch.fx.GraphModule))
    found = any(node.target in _LSTMS for part in parts for node in part.graph.nodes)
    if not found or not torch.is_grad_enabled():
        return nullcontext()
    return torch.backends.mkldnn.flags(enabled=False)
