"""Norms over the last dims as modules, with the addition in front of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .. import functional
from ..arguments import checked, explained
from ..models.export import is_exporting
from ..policy import Policy


def _by_torch(
    norm: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, residual: torch.Tensor | None
) -> Any:
    """The modules' results, by torch's norm."""
    if residual is None:
        return norm(x)
    total = x + residual
    return norm(total), total


class FusedLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` with a residual: constructor, parameters and state dict are torch's."""

    @checked
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        policy: Policy | None = None,
    ) -> None:
        place = {"device": device, "dtype": dtype}
        super().__init__(normalized_shape, eps, elementwise_affine, bias, **place)
        self.policy = policy

    @explained
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """y = layer_norm(x), or with a residual the pair (layer_norm(x + residual), the sum)."""
        if is_exporting():
            return _by_torch(super().forward, x, residual)
        return functional.layer_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            residual=residual,
            policy=self.policy,
        )

    @classmethod
    @checked
    def from_torch(cls, module: nn.LayerNorm, *, policy: Policy | None = None) -> FusedLayerNorm:
        """The module that stands for torch's; parameters are shared."""
        affine = module.elementwise_affine
        made = cls(module.normalized_shape, module.eps, affine, device="meta", policy=policy)
        made.weight, made.bias = module.weight, module.bias
        made.training = module.training
        return made


class FusedRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` with a residual: constructor, parameters and state dict are torch's."""

    @checked
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        policy: Policy | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.policy = policy

    @explained
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """y = rms_norm(x), or with a residual the pair (rms_norm(x + residual), the sum)."""
        if is_exporting():
            return _by_torch(super().forward, x, residual)
        return functional.rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            residual=residual,
            policy=self.policy,
        )

    @classmethod
    @checked
    def from_torch(cls, module: nn.RMSNorm, *, policy: Policy | None = None) -> FusedRMSNorm:
        """The module that stands for torch's; parameters are shared."""
        affine = module.elementwise_affine
        made = cls(module.normalized_shape, module.eps, affine, device="meta", policy=policy)
        made.weight = module.weight
        made.training = module.training
        return made
