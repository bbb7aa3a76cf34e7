"""What autocast makes of the operands of an op that stays whole in a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_aten: Any = torch.ops.aten


class _First(Exception):
    """The first op that a call comes to."""

    def __init__(self, op: Any) -> None:
        super().__init__(str(op))
        self.op = op


class _ToFirst(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to be hidden from dynamo imports it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _First(func)


def enabled() -> bool:
    """Whether autocast is on."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@contextmanager
def none_kept() -> Iterator[None]:
    """Autocast without its cache, which would keep weights that it has cast for later runs."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def applied(
    op: Any, args: Any, kwargs: Any, in_float32: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Any, Any]:
    """The operands of an op in the dtype that autocast gives them.

    ``in_float32`` makes a tensor of the same form that no trace has. If the first that such
    operands come to is a cast, they are for autocast's own dtype; else for float32, if autocast has
    a rule for the op at all.
    """
    leaves, form = pytree.tree_flatten((args, kwargs))
    kind = next((each.device.type for each in leaves if _floats(each)), "")
    if not (kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind) and _has_rule(op, kind)):
        return args, kwargs
    probed, named = pytree.tree_unflatten(
        [in_float32(x) if _floats(x) else x for x in leaves], form
    )
    dtype = torch.float32
    try:
        with _ToFirst():  # type: ignore[no-untyped-call]
            op(*probed, **named)
    except _First as first:
        if first.op is _aten._to_copy.default:
            dtype = torch.get_autocast_dtype(kind)
    cast = [x.to(dtype) if _floats(x) and x.device.type == kind else x for x in leaves]
    made: tuple[Any, Any] = pytree.tree_unflatten(cast, form)
    return made


def _has_rule(op: Any, kind: str) -> bool:
    key = f"Autocast{kind.upper()}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def _floats(leaf: Any) -> bool:
    """Whether autocast casts such an operand."""
    return (
        isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64
    )
