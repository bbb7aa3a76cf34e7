"""One step of a model, with all that it leaves behind, to be compared with another model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

EXACT = 1e-9


def step(model: nn.Module, training: bool, *inputs: Any) -> dict[str, torch.Tensor]:
    """Results, gradients of inputs and parameters, and buffers, by name."""
    model.train(training)
    model.zero_grad()
    torch.manual_seed(1)
    leaves = pytree.tree_map_only(torch.Tensor, lambda x: x.clone().requires_grad_(), inputs)
    # What the caller holds: a forward may change it in place, and that would be seen.
    given = pytree.tree_map_only(torch.Tensor, lambda x: x * 1.0, leaves)
    results = [y for y in pytree.tree_leaves(model(*given)) if isinstance(y, torch.Tensor)]
    torch.manual_seed(2)
    loss = sum((y * torch.randn(y.shape, dtype=y.dtype)).sum() for y in results)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    found = {f"result {i}": y.detach() for i, y in enumerate(results)}
    for i, (leaf, held) in enumerate(
        zip(pytree.tree_leaves(leaves), pytree.tree_leaves(given), strict=True)
    ):
        if isinstance(leaf, torch.Tensor):
            found |= {f"grad of input {i}": leaf.grad, f"input {i}": held.detach()}
    named = model.named_parameters()
    found |= {f"grad of {name}": p.grad for name, p in named if p.grad is not None}
    found |= {f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()}
    return {name: value.clone() for name, value in found.items() if value is not None}


def differences(
    expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> dict[str, float | str]:
    """What of one step is not that of another: by how much."""
    if list(expected) != list(found):
        return {name: "only in one" for name in {*expected} ^ {*found}}
    wrong: dict[str, float | str] = {}
    for name, value in expected.items():
        other = found[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            wrong[name] = f"{other.shape}, {other.dtype}"
        elif (apart := float((value.double() - other.double()).abs().max())) > EXACT:
            wrong[name] = apart
    return wrong
