"""When a module that stands for others has to call them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import nn

from ..models.export import is_exporting


def has_hooks(module: Any) -> bool:
    """Whether something waits for calls of a module, or of its gradient."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


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
        if has_hooks(child):
            return True
        kind = type(child)
        if kind in known:
            continue
        # Of the kind of a module with parametrizations torch has derived one for it alone.
        if not nn.utils.parametrize.is_parametrized(child) or kind.__bases__[0] not in known:
            return True
    return is_exporting()
