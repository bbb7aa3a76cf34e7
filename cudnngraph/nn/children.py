"""When a module that stands for others has to call them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import nn

from ..exported import is_exporting


def wants_calls(children: Iterable[nn.Module | None], kinds: Container[type]) -> bool:
    """Whether the children have to be called, for whose parameters a graph stands in.

    So it is where a hook on one of them waits for that (weight norm, pruning), where one has been
    replaced by a module that is none of ``kinds`` (an adapter), and where the model is exported for
    ``fuse``, which does more with their ops than with a call of ours.
    """
    for child in children:
        if child is None:
            continue
        held: Any = child
        if (
            held._forward_hooks
            or held._forward_pre_hooks
            or held._backward_hooks
            or held._backward_pre_hooks
        ):
            return True
        if type(held) not in kinds and not nn.utils.parametrize.is_parametrized(held):
            return True
    return is_exporting()
