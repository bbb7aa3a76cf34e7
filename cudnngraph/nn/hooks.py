"""Tell when a fused module must call its children."""

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
    """Whether a module must call its children instead of running their parameters as one graph.

    It must if a child has a hook (weight norm, pruning), if a child was replaced by a module of
    another kind than ``kinds`` (an adapter), or if the model is being exported for ``fuse``, which
    optimises the children's own ops better than our call.
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
