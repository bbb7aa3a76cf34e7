"""What all rules of the lowering share: how one refuses, and how a tensor lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Shape = Sequence[int]
Place = tuple[Shape, Shape]  # shape and stride

LOW_PRECISION = (torch.float16, torch.bfloat16)


class Refused(Exception):
    """A rule knows that cuDNN cannot take this op; the reason is the message."""
