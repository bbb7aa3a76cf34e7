"""Products of several dtypes, which torch refuses when it computes them, but not without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_aten: Any = torch.ops.aten
#: Ops whose operands have one dtype.
_OF_ONE = frozenset(
    getattr(_aten, name)
    for name in (
        *("linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "convolution"),
        *(f"conv{rank}d" for rank in (1, 2, 3)),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    )
)


class Mixed(Exception):
    """An op, at a ``line`` of a traceback, multiplies tensors of several dtypes."""

    def __init__(self, op: Any, dtypes: Sequence[torch.dtype], line: str) -> None:
        names = " and ".join(str(each).removeprefix("torch.") for each in dtypes)
        super().__init__(f"{op.overloadpacket} of {names}")
        self.line = line

    def said(self) -> str:
        """What is to be said of the model, but for the line."""
        return f"computes {self}, which torch does not"


def dtypes_of_product(op: Any, operands: Sequence[torch.Tensor]) -> tuple[torch.dtype, ...]:
    """The dtypes of the operands of an op that takes one alone; none where they have one."""
    if op.overloadpacket not in _OF_ONE:
        return ()
    found = dict.fromkeys(each.dtype for each in operands)
    return tuple(found) if len(found) > 1 else ()
