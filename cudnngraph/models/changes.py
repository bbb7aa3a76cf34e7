"""What has changed of a module since its graphs were made: parts, weights and hooks."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_torch

from .stand_in import StandIn

_log = logging.getLogger(__name__)
MANY_CHANGES = 8  # of a model, at which the log says what they cost
_HELD = ("_parameters", "_buffers", "_modules")
#: Hooks that change results; those of states do not.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class Parts:
    """The parameters, buffers and modules within a module, to tell whether others stand in their
    places: a part that was replaced, or what :func:`torch.func.functional_call` puts there for a
    call; whether tensors were written, as far as torch counts that: not in those of inference mode,
    and not through ``.data``; whether tensors have other memory; and whether hooks came or went.

    It is asked at each call, so attributes are not looked at: those of 200 modules take as long as
    some models.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = [*_within(module)]
        held = [vars(each)[name] for each in modules for name in _HELD if name in vars(each)]
        self._places = [each.values() for each in held]
        self._hooks = [
            *(vars(each)[name].values() for each in modules for name in _HOOKS),
            *(getattr(of_torch, name).values() for name in _GLOBAL_HOOKS),
        ]
        self._then, self._hooked = self._now(), self._called()
        tensors = {id(each): each for each in self._then if isinstance(each, torch.Tensor)}
        self._counted = [each for each in tensors.values() if not each.is_inference()]
        self._writes = self._counts()
        self._stored = [each for each in tensors.values() if _has_memory(each)]
        self._memory = self._addresses()

    def changed(self) -> str:
        """What has changed since; "" if nothing has."""
        if not _all_are(self._now(), self._then) or self._addresses() != self._memory:
            return "parts were replaced"
        if self._counts() != self._writes:
            return "weights were written"
        return "" if _all_are(self._called(), self._hooked) else "hooks were added or removed"

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(self._places)]

    def _counts(self) -> list[int]:
        return [each._version for each in self._counted]

    def _addresses(self) -> list[int]:
        return [*map(torch.Tensor.data_ptr, self._stored)]

    def _called(self) -> list[Any]:
        return [*chain.from_iterable(self._hooks)]


def say(name: str, changed: str, count: int) -> None:
    """Log that a model has changed for the ``count``-th time, as a warning if that is often."""
    level = logging.WARNING if count == MANY_CHANGES else logging.INFO
    text = "%s: %s, so its graphs are compiled anew (change %d; for a model that changes often, "
    _log.log(level, f"{text}torch.compile(model, backend='cudnngraph'))", name, changed, count)


def _within(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a module; in the place of one that stands for another, that one."""
    for each in module.modules():
        yield each.unfused if isinstance(each, StandIn) else each


def _all_are(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return plain and tensor.layout == torch.strided
