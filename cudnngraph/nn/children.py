"""When a module that stands for others has to call them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import nn

from ..exported import is_exporting


def wants_calls(
    children: Iterable[nn.Module | None], kinds: Iterable[Container[type[nn.Module]]]
) -> bool:
    """Whether the children have to be called, for whose parameters a graph stands in.

    So it is where a hook on one of them waits for that (weight norm, pruning), where one has been
    replaced by a module that is not of the ``kinds`` for its place (an adapter), and where the
    model is exported for ``fuse``, which does more with their ops than with a call of ours.
    """
    for child, known in zip(children, kinds, strict=False):
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
        kind = type(held)
        if kind in known:
            continue
        # Of the kind of a module with parametrizations torch has derived one for it alone.
        if not nn.utils.parametrize.is_parametrized(held) or kind.__bases__[0] not in known:
            return True
    return is_exporting()
