"""torch.cov and torch.corrcoef as ops that a run without memory can follow.

torch's own ask whether the weights of the observations are allowed, also where there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def _cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    floating = input.is_floating_point() or input.is_complex()
    if fweights is not None or aweights is not None or not floating or input.dim() > 2:
        raise TypeError
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    observed = rows.shape[1]
    if observed <= max(correction, 0) or correction < 0:
        raise TypeError
    rows = rows - rows.sum(1, keepdim=True) / observed
    return (rows @ rows.mH / (observed - correction)).squeeze()


def _corrcoef(input: torch.Tensor) -> torch.Tensor:
    if input.is_complex():
        raise TypeError
    covariance = _cov(input)
    if not covariance.dim():
        return covariance / covariance
    deviations = covariance.diagonal().sqrt()
    return (covariance / deviations[:, None] / deviations).clamp(-1, 1)


#: torch's functions, each with one that gives the same. Those raise TypeError for arguments that
#: are torch's own to judge.
COVARIANCES: Mapping[Any, Callable[..., torch.Tensor]] = {
    **dict.fromkeys((torch.cov, torch.Tensor.cov), _cov),
    **dict.fromkeys((torch.corrcoef, torch.Tensor.corrcoef), _corrcoef),
}
