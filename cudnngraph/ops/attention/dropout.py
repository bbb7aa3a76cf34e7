"""Dropout of attention weights: Philox, and the factor that dropout multiplies by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..base import Tensors
from ..operands import need

_ROUNDS = 10


_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)


_WEYL = (0x9E3779B9, 0xBB67AE85)


_LOW = 0xFFFFFFFF


def philox(counter: Tensors, key: Tensors) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011): four words of 32 bits, each in an int64.

    ``counter`` are four such words and ``key`` two, of shapes that broadcast.
    """
    words, (low, high) = [need(word) for word in counter], (need(word) for word in key)
    for number in range(_ROUNDS):
        if number:
            low, high = (low + _WEYL[0]) & _LOW, (high + _WEYL[1]) & _LOW
        # A product of two words wraps around in int64; its bits are right.
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            ((second >> 32) & _LOW) ^ words[1] ^ low,
            second & _LOW,
            ((first >> 32) & _LOW) ^ words[3] ^ high,
            first & _LOW,
        ]
    return tuple(words)


def dropout_keep(
    shape: Sequence[int], p: float, seed: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """Mask (bool) of the elements of ``shape`` that dropout of probability ``p`` keeps.

    Element i in row-major order is kept if the first word of Philox, of counter (i, offset) and
    key seed, is at least p * 2^32. cuDNN has another order of its own.
    """
    place = torch.arange(math.prod(shape), device=seed.device)
    seed, offset = seed.reshape(()), offset.reshape(())
    counter = (place & _LOW, place >> 32, offset & _LOW, (offset >> 32) & _LOW)
    first, *_ = philox(counter, (seed & _LOW, (seed >> 32) & _LOW))
    return (first >= round(p * 2.0**32)).view(tuple(shape))


def dropout_factor(
    weights: torch.Tensor, dropout: Tensors, attrs: Mapping[str, Any]
) -> torch.Tensor | None:
    """The factors of dropout for the attention weights: 0 or 1 / (1 - p); None if p is 0.

    ``dropout`` are seed, offset and mask.
    """
    p = attrs["dropout_p"]
    if p == 0.0:
        return None
    seed, offset, mask = dropout
    if mask is None:
        mask = dropout_keep(weights.shape, p, need(seed), need(offset))
    factor: torch.Tensor = mask.to(weights.dtype) / (1.0 - p)
    return factor
