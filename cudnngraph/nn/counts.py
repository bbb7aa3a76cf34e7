"""The batches that torch's batch norms count, by a block that runs them in its own op."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..errors import CudnnGraphError
from ..runtime.specialize import check_in_place


def held(module: nn.Module, name: str) -> Any:
    """A parameter or buffer, the short way: in a tenth of the time of an attribute."""
    found = module._parameters if name in module._parameters else module._buffers
    return found[name] if name in found else getattr(module, name)


def counted(bn: Any, owner: object) -> tuple[float | torch.Tensor, torch.Tensor | None]:
    """The momentum of a norm's next batch, and its count of batches, None where it counts none.

    ``owner`` is the module that runs the norm. A cumulative average has its momentum on the device.
    """
    momentum, count = bn.momentum, None
    if bn.training and bn.track_running_stats:
        check_in_place(type(owner).__name__)
        count = held(bn, "num_batches_tracked")
        if count is not None and momentum is None:
            momentum = (count + 1).to(held(bn, "running_mean").dtype).reciprocal()
    return 0.0 if momentum is None else momentum, count


class Counting:
    """Counts a batch in front of an op, behind which a recomputation may stop; not one that is
    refused."""

    __slots__ = ("_counts",)

    def __init__(self, counts: Iterable[torch.Tensor | None]) -> None:
        self._counts = [count for count in counts if count is not None]

    def __enter__(self) -> None:
        for count in self._counts:
            count.add_(1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if isinstance(error, CudnnGraphError):
            for count in self._counts:
                count.sub_(1)
