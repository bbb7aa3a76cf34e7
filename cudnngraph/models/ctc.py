"""torch.nn.functional.ctc_loss as ops that a run without memory can follow.

torch's own writes the lengths, by which it divides for a mean, into the memory of a new tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The mean. Raise TypeError for other reductions, and for lengths in tensors."""
    if reduction != "mean" or not isinstance(target_lengths, (tuple, list)):
        raise TypeError
    labels = [max(length, 1) for length in target_lengths]
    lengths: dict[str, Any] = {"input_lengths": input_lengths, "target_lengths": target_lengths}
    losses = F.ctc_loss(
        log_probs, targets, **lengths, blank=blank, reduction="none", zero_infinity=zero_infinity
    )
    return (losses / torch.tensor(labels, dtype=losses.dtype, device=losses.device)).mean()


#: torch's function, with one that gives the same.
CTC: Mapping[Any, Callable[..., torch.Tensor]] = {F.ctc_loss: _ctc_loss}
