"""Masks of attention that are a band of keys around the diagonal, as causal ones are."""

from __future__ import annotations

import torch

from ..ops.base import LOW_PRECISION
from .patterns import LEAST

Band = tuple[int | None, int | None]

LEAST_16 = torch.finfo(torch.float16).min
MOST_SCORES = 1 << 26  # of a mask that is looked at


def band_of(mask: torch.Tensor) -> Band | None:
    """The band that a constant mask (..., rows, keys) lets attend: how many keys to the left and to
    the right of the diagonal from the top left corner, None for no bound. None for a mask that is
    no band, that differs between images or heads, or that leaves a row no key.

    ``mask`` is boolean (True attends) or what is added to scores: 0, or a number so far below that
    the key has no weight beside another. In 16 bits -65,504 is such a number: torch adds it for
    cuDNN where a boolean mask does not attend, in bfloat16 too.
    """
    if mask.is_meta or mask.dim() < 2 or not 0 < mask.numel() <= MOST_SCORES:
        return None
    rows, keys = mask.shape[-2:]
    planes = mask.reshape(-1, rows, keys)
    plane = planes[0]
    if not bool((planes == plane).all()):
        return None
    keeps = plane
    if plane.dtype != torch.bool:
        if not plane.is_floating_point():
            return None
        keeps = plane == 0
        hides = plane <= (LEAST_16 if plane.dtype in LOW_PRECISION else LEAST)
        if not bool((keeps | hides).all()):
            return None
    if not bool(keeps.any(1).all()):
        return None
    row = torch.arange(rows, device=mask.device).unsqueeze(1)
    right_of = torch.arange(keys, device=mask.device) - row
    left, right = -int(right_of[keeps].min()), int(right_of[keeps].max())
    if (
        left < 0
        or right < 0
        or not bool((keeps == ((-left <= right_of) & (right_of <= right))).all())
    ):
        return None
    return None if left >= rows - 1 else left, None if right >= keys - 1 else right
