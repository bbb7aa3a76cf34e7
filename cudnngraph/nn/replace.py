"""Swap convolution, batch norm and activation in a model for fused blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..arguments import checked
from ..policy import Policy
from .conv import ACTIVATION_OF, CONVS, TRANSPOSED, FusedConvBlock, FusedConvTransposeBlock, why_not


@dataclass(frozen=True)
class Swap:
    """One pattern: the modules' names in the model, their classes, and why it was left ("" if
    it was swapped)."""

    names: tuple[str, ...]
    classes: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        what = f"{', '.join(self.names)} ({' → '.join(self.classes)})"
        return f"left {what}: {self.reason}" if self.reason else f"swapped {what}"


@dataclass(frozen=True)
class Report:
    """The changes that :func:`replace` made."""

    swapped: tuple[Swap, ...]
    left: tuple[Swap, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.swapped, *self.left)))


@checked
def replace(model: nn.Module, *, policy: Policy | None = None) -> Report:
    """Swap every Conv (+ batch norm) (+ activation) of the Sequentials in ``model`` for a block.

    In place: the block stands where the convolution stood, ``nn.Identity`` where the others did.
    Parameters are shared, so an optimizer that has them goes on working, and the state dict keeps
    its keys. Only in an ``nn.Sequential`` is the order of the modules known; convolutions elsewhere
    are left, with the reason. For those use :meth:`FusedConvBlock.from_torch` in the model's code.
    """
    swapped: list[Swap] = []
    left: list[Swap] = []
    uses: dict[int, int] = {}
    for module in model.modules():
        for child in module._modules.values():
            uses[id(child)] = uses.get(id(child), 0) + 1
    for path, parent in list(model.named_modules()):
        if isinstance(parent, (FusedConvBlock, FusedConvTransposeBlock)):
            continue
        in_order = isinstance(parent, nn.Sequential) and (
            type(parent).forward is nn.Sequential.forward
        )
        if in_order:
            _swap_in(parent, path, uses, policy, swapped, left)
            continue
        for name, child in parent._modules.items():
            if isinstance(child, CONVS + TRANSPOSED):
                where = type(parent).__name__
                reason = f"it stands in {where}, whose forward decides what comes next"
                left.append(Swap((_join(path, name),), (type(child).__name__,), reason))
    return Report(tuple(swapped), tuple(left))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _swap_in(
    parent: Any,
    path: str,
    uses: Mapping[int, int],
    policy: Policy | None,
    swapped: list[Swap],
    left: list[Swap],
) -> None:
    names = list(parent._modules)
    place = 0
    while place < len(names):
        conv: Any = parent._modules[names[place]]
        if not isinstance(conv, CONVS + TRANSPOSED):
            place += 1
            continue
        run = [names[place]]
        bn: Any = None
        act: Any = None
        following = [parent._modules[name] for name in names[place + 1 : place + 3]]
        if following and isinstance(following[0], nn.modules.batchnorm._NormBase):
            bn = following.pop(0)
            run.append(names[place + len(run)])
        joins = bool(following) and type(following[0]) in ACTIVATION_OF
        if joins and not why_not(conv, bn, following[0]):
            act = following[0]
            run.append(names[place + len(run)])
        modules = [m for m in (conv, bn, act) if m is not None]
        reason = why_not(conv, bn, act)
        if not reason and any(uses[id(module)] > 1 for module in modules):
            reason = "a module of it is used in several places"
        full = tuple(_join(path, name) for name in run)
        swap = Swap(full, tuple(type(module).__name__ for module in modules), reason)
        (left if reason else swapped).append(swap)
        if not reason:
            kind = FusedConvTransposeBlock if isinstance(conv, TRANSPOSED) else FusedConvBlock
            parent._modules[run[0]] = kind.from_torch(conv, bn, act, policy=policy)
            for name in run[1:]:
                parent._modules[name] = nn.Identity()
            _keep_keys(parent, run)
        place += len(run)


# -- the state dict's keys -------------------------------------------------------------------------


def _keep_keys(parent: Any, run: list[str]) -> None:
    """Have the parent's state dict name a block's children by the places they came from."""
    if not hasattr(parent, "_fused_runs"):
        parent._fused_runs = {}
        parent._register_state_dict_hook(_to_old_keys)
        parent.register_load_state_dict_pre_hook(_to_new_keys)
    parent._fused_runs[run[0]] = tuple(run)


def _pairs(parent: Any, prefix: str) -> list[tuple[str, str]]:
    """(the place a child came from, its place in the block), as prefixes of keys."""
    return [
        (f"{prefix}{old}.", f"{prefix}{first}.{place}.")
        for first, run in parent._fused_runs.items()
        if isinstance(parent._modules.get(first), (FusedConvBlock, FusedConvTransposeBlock))
        for place, old in enumerate(run)
    ]


def _to_old_keys(
    parent: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: Any
) -> None:
    _rename(state, [(new, old) for old, new in _pairs(parent, prefix)])


def _to_new_keys(
    parent: nn.Module, state: dict[str, torch.Tensor], prefix: str, *further: Any
) -> None:
    _rename(state, _pairs(parent, prefix))


def _rename(state: dict[str, torch.Tensor], prefixes: list[tuple[str, str]]) -> None:
    """In place, the order of the keys kept."""
    items = list(state.items())
    state.clear()
    for key, value in items:
        for start, other in prefixes:
            if key.startswith(start):
                key = other + key[len(start) :]
                break
        state[key] = value
