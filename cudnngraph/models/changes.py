"""What has changed of a module since its graphs were made: parts, weights, hooks and settings."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_torch

from ..runtime.state import PLAIN, same
from .stand_in import StandIn

_log = logging.getLogger(__name__)
MANY_CHANGES = 8  # of a model, at which the log says what they cost
_HELD = ("_parameters", "_buffers", "_modules")
#: Hooks that change results; those of states do not.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
#: What every module has, which is no setting of its own: looked at apart, or of no result.
_NO_SETTINGS = frozenset(vars(nn.Module()))
_CONTAINERS = (list, tuple, set, frozenset)
_DEPTH = 4  # of records and containers within each other
_LENGTH = 256  # of a container


class Parts:
    """The parameters, buffers and modules within a module, to tell whether others stand in their
    places: a part that was replaced, or what :func:`torch.func.functional_call` puts there for a
    call; whether tensors were written, as far as torch counts that: not in those of inference mode,
    and not through ``.data``; whether tensors have other memory; whether hooks came or went; and
    whether attributes were set, or changed within containers and records of plain values."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = [*_within(module)]
        self._kinds = [*dict.fromkeys(map(type, self._modules))]
        held = [vars(each)[name] for each in self._modules for name in _HELD if name in vars(each)]
        self._places = [each.values() for each in held]
        self._hooks = [
            *(vars(each).get(name, {}).values() for each in self._modules for name in _HOOKS),
            *(getattr(of_torch, name).values() for name in _GLOBAL_HOOKS),
        ]
        self._then = self._now()
        self.settled()
        found = chain(self._then, self._values)
        tensors = {id(each): each for each in found if isinstance(each, torch.Tensor)}
        self._counted = [each for each in tensors.values() if not each.is_inference()]
        self._writes = self._counts()
        self._stored = [each for each in tensors.values() if _has_memory(each)]
        self._memory = self._addresses()
        self._called = self._calls()
        self._modes = self._in_training()

    def settled(self) -> None:
        """Take the settings as they are now: a run of the model may have changed them."""
        held = (vars(each) for each in self._modules if not isinstance(each, StandIn))
        settings = [_Settings(each, _NO_SETTINGS) for each in held]
        values = chain.from_iterable(each.then for each in settings)
        self._settings = [*settings, *_records(values, set(), _DEPTH)]
        self._held = [each.held for each in self._settings]
        self._takes = [each.take for each in self._settings]
        self._sizes = [*map(len, self._held)]
        self._values = [*chain.from_iterable(each.then for each in self._settings)]

    def changed(self) -> str:
        """What has changed since; "" if nothing has."""
        if not _all_are(self._now(), self._then) or self._addresses() != self._memory:
            return "parts were replaced"
        if self._counts() != self._writes:
            return "weights were written"
        if not _all_are(self._calls(), self._called):
            return "hooks or methods were replaced"
        if (modes := self._in_training()) and modes != self._modes:
            return "parts are in another mode"
        return self._set()

    def _set(self) -> str:
        """The setting that has another value now; "" if none has."""
        if [*map(len, self._held)] == self._sizes:
            taken = (take(held) for take, held in zip(self._takes, self._held, strict=True))
            try:
                now = [*chain.from_iterable(taken)]
            except LookupError:  # one has another name
                now = []
            if _all_are(now, self._values):
                return ""
        for each in self._settings:
            if name := each.changed():
                return f"{name} was set"
        self.settled()  # what is there anew is equal
        return ""

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(self._places)]

    def _counts(self) -> list[int]:
        return [each._version for each in self._counted]

    def _addresses(self) -> list[int]:
        return [*map(torch.Tensor.data_ptr, self._stored)]

    def _calls(self) -> list[Any]:
        """Hooks, classes, and how these run."""
        hooks = chain.from_iterable(self._hooks)
        return [*hooks, *map(type, self._modules), *map(_forward, self._kinds)]

    def _in_training(self) -> list[bool]:
        """What is in training mode within a model that is not: a model that is trained between
        calls is in evaluation mode for them."""
        return [] if self._modules[0].training else [*map(_mode, self._modules)]


class _Settings:
    """The attributes of a module, or the items of a container, and what they were."""

    def __init__(self, held: Any, apart: frozenset[str] = frozenset()) -> None:
        self.held = held
        self._names = [each for each in held if each not in apart] if _is_keyed(held) else []
        self.take = self._taking()
        self.then = self.take(held)
        self._length = len(held)

    def _taking(self) -> Callable[[Any], tuple[Any, ...]]:
        """What gives the values that are held."""
        names = self._names
        if len(names) > 1:
            return operator.itemgetter(*names)
        return (lambda held: tuple(held[each] for each in names)) if _is_keyed(self.held) else tuple

    def changed(self) -> str:
        """The name of what has another value now; "" if nothing has."""
        if not _is_keyed(self.held):
            now = self.take(self.held)
            return "" if same(now, self.then) else f"an item of a {type(self.held).__name__}"
        for name, old in zip(self._names, self.then, strict=True):
            if name not in self.held or not same(self.held[name], old):
                return f"'{name}'"
        return "" if len(self.held) == self._length else "an attribute that was not there"


def say(name: str, changed: str, count: int) -> None:
    """Log that a model has changed for the ``count``-th time, as a warning if that is often."""
    level = logging.WARNING if count == MANY_CHANGES else logging.INFO
    text = "%s: %s, so its graphs are compiled anew (change %d; for a model that changes often, "
    _log.log(level, f"{text}torch.compile(model, backend='cudnngraph'))", name, changed, count)


def _is_keyed(held: Any) -> bool:
    return isinstance(held, Mapping)


def _within(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a module, and those that others stand for."""
    seen: set[int] = set()
    left = [module]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left.extend(child for child in each._modules.values() if child is not None)
        if isinstance(each, StandIn):
            left.append(each.unfused)
            continue
        for value in vars(each).values():  # of plain lists, which torch does not look into
            items = value.values() if type(value) is dict else value
            if type(value) in (dict, *_CONTAINERS) and len(items) <= _LENGTH:
                left.extend(item for item in items if isinstance(item, nn.Module))


def _records(values: Iterable[Any], seen: set[int], depth: int) -> Iterator[_Settings]:
    """The containers, and the objects that hold plain values alone, among values and within."""
    for value in values:
        if isinstance(value, (*PLAIN, torch.Tensor, nn.Module)) or id(value) in seen:
            continue
        seen.add(id(value))
        if not _is_record(value, depth):
            continue
        within: Iterable[Any]
        if isinstance(value, _CONTAINERS):
            within = value
            if not isinstance(value, (tuple, frozenset)):
                yield _Settings(value)
        else:
            held = value if isinstance(value, dict) else vars(value)
            within = held.values()
            yield _Settings(held)
        yield from _records(within, seen, depth - 1)


def _is_record(value: Any, depth: int) -> bool:
    """Whether a value holds plain values, tensors and modules alone, and few of them."""
    if isinstance(value, (*PLAIN, torch.Tensor, nn.Module)):
        return True
    if depth == 0 or isinstance(value, type) or callable(value):
        return False
    if isinstance(value, _CONTAINERS):
        within: Any = value
    elif isinstance(value, dict):
        within = value.values()
    elif hasattr(value, "__dict__"):
        within = vars(value).values()
    else:
        return False
    return len(within) <= _LENGTH and all(_is_record(each, depth - 1) for each in within)


_mode = operator.attrgetter("training")


def _forward(kind: type) -> Any:
    return getattr(kind, "forward", None)


def _all_are(now: Any, then: Any) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return plain and tensor.layout == torch.strided
