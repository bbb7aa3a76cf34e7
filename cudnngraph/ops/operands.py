"""Operands as the reference rules of several op families take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .base import Rule, Tensors


def need(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value


def exactly(rule: Callable[[Tensors, Mapping[str, Any]], torch.Tensor]) -> Rule:
    """A rule of products, on int8 operands too: sums in float64, which holds them all, as int32.

    Rounded, since an algorithm that transforms its data (FFT) is a hair off the whole number.
    """

    def run(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
        if need(inputs[0]).dtype != torch.int8:
            return rule(inputs, attrs)
        sums = rule([need(value).double() for value in inputs], attrs)
        return sums.round().to(torch.int32)

    return run


def channel(value: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor:
    """A per-channel operand at the rank of x."""
    vector, rank = need(value), need(x).dim()
    return vector.reshape(1, -1, *(1,) * (rank - 2)) if vector.dim() == 1 else vector


def all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
