"""Random weights by which a model computes something: nothing vanishes, nothing overflows.

A model as its library makes it says little about a kernel: gates that begin as zeros switch whole
blocks off, and without trained statistics values grow or shrink from layer to layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...errors import CudnnGraphError
from ...select.tolerance import relative_error

_LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
SPREAD = (0.25, 4.0)  # of the results of a layer, beyond which its weights are scaled
LEAST_CHANGE = 0.01  # relative change of the results if the inputs are other ones


class Untelling(CudnnGraphError):
    """Results of a model by which nothing can be checked."""


@torch.no_grad()
def prepared(model: nn.Module, inputs: Sequence[torch.Tensor], seed: int = 0) -> nn.Module:
    """Return the model in float32 with weights as a trained one has: no constants, and results of
    each linear layer and convolution that spread by about one for these inputs."""
    _without_constants(model, seed)
    shared = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    scaled: set[int] = set()
    hooks = [
        module.register_forward_hook(lambda layer, _, made: _scaled(layer, made, scaled))
        for module in model.modules()
        if any(type(module).forward is kind.forward for kind in _LAYERS)
        and shared[id(module._parameters.get("weight"))] == 1
    ]
    try:
        model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return model


def _without_constants(model: nn.Module, seed: int) -> nn.Module:
    """Return the model for inference, with numbers as a trained one has in place of constants: in
    norms, in biases, in weights that begin as zeros, in scales that begin next to zero."""
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: torch.Tensor, low: float, high: float) -> None:
        with torch.no_grad():
            tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))

    for module in model.modules():
        norm = "norm" in type(module).__name__.lower()
        tensors = {**module._parameters, **(module._buffers if norm else {})}
        for name, tensor in tensors.items():
            if tensor is None or not tensor.is_floating_point() or not tensor.numel():
                continue
            value = float(tensor.detach().flatten()[0])
            if not bool((tensor == value).all()):
                continue
            if norm:
                reach = 0.2 if name in ("bias", "running_mean") else 0.3
                fill(tensor, value - reach, value + reach)
            elif abs(value) >= 0.1:
                pass  # a scale that is none of a norm's
            elif name.endswith("bias") or (value == 0.0 and tensor.numel() > 1):
                fill(tensor, -0.05, 0.05)
            else:
                fill(tensor, 0.2, 0.6)
    return model.eval()


def _scaled(layer: Any, made: torch.Tensor, done: set[int]) -> torch.Tensor:
    """Scale a layer once, and its result with it."""
    spread = float(made.float().std()) if made.numel() > 1 else 1.0
    if id(layer) in done or SPREAD[0] <= spread <= SPREAD[1] or not 0 < spread < float("inf"):
        done.add(id(layer))
        return made
    done.add(id(layer))
    layer.weight.div_(spread)
    if layer.bias is not None:
        layer.bias.div_(spread)
    return made / spread


def check_telling(results: Any, others: Any) -> None:
    """Raise :class:`Untelling` for results that are not finite, are one number, or are hardly
    other for ``others``, which are those of other inputs."""
    pairs = zip(pytree.tree_leaves(results), pytree.tree_leaves(others), strict=True)
    for number, (one, other) in enumerate(pairs):
        if not (isinstance(one, torch.Tensor) and one.is_floating_point()):
            continue
        if not bool(one.isfinite().all()):
            bad = int((~one.isfinite()).sum())
            raise Untelling(f"result {number}: {bad} of {one.numel()} numbers are not finite")
        if not float(one.double().std()) > 0.0:
            raise Untelling(f"result {number} is one number, {float(one.flatten()[0]):g}")
        change = relative_error(other, one.double())
        if not change >= LEAST_CHANGE:
            raise Untelling(
                f"result {number} changes by {change:.1g} of its size with other inputs; "
                f"expected {LEAST_CHANGE:g} or more"
            )
