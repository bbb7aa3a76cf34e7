"""Sizes in buckets: tensors are padded up to one of a few sizes, and results cut back.

A model has then one form for each bucket, whatever the length of its sequences. That is right if
nothing of a result depends on the padding. So the first call that is padded up to a bucket is
compared with the model on the tensors as they are, and so is a shorter one, of which more is
padding.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..arguments import NotPlain, is_a, plain, real, shown, unreadable, whole
from ..errors import BindError, PolicyError, Problem, WrongResult
from .calls import Call, parameter_at, parameters
from .form import Cuts

POWERS_OF_TWO = "pow2"
PAD = "pad"
_EXPECTED = "sizes as (128, 256, 512), or 'pow2'"


@dataclass(frozen=True)
class Sizes:
    """The buckets of one dim: given sizes in order, or none for powers of two."""

    sizes: tuple[int, ...]

    def bucket(self, size: int) -> int | None:
        """The smallest bucket for a size; None if there is none."""
        if not self.sizes:
            return 1 << max(size - 1, 0).bit_length()
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else None

    def shortest(self, bucket: int) -> int:
        """A size of which about as much is padding as there may be, but no more than half."""
        before = bucket // 2
        if self.sizes and bucket > self.sizes[0]:
            before = max(before, self.sizes[self.sizes.index(bucket) - 1])
        return min(before + 1, bucket)


@dataclass(frozen=True)
class _Padded:
    """How one argument is padded: buckets by dim, and the value."""

    dims: Mapping[int, Sizes]
    value: float


class Buckets:
    """Which arguments of a model are padded, by name; ``dynamic`` as of ``fuse``."""

    def __init__(self, model: nn.Module, dynamic: Any) -> None:
        self._model = type(model).__name__
        self._padded = {
            _named(model, key): _read(key, value) for key, value in _items("dynamic", dynamic)
        }
        self._places: dict[str, dict[int, tuple[str, _Padded]]] = {}  # by structure

    def pad(self, call: Call, model: nn.Module) -> None:
        """Note what is padded of a call. Raises :class:`BindError` for what has no bucket."""
        places = self._places.get(call.structure)
        if places is None:
            places = self._places[call.structure] = self._found(call, model)
        problems: list[Problem] = []
        for place, (name, padded) in places.items():
            tensor = call.leaves[place]
            if tensor is None:
                continue
            if not isinstance(tensor, torch.Tensor):
                expected, mend = "a tensor, as dynamic= pads it", "leave it out of dynamic="
                problems.append(Problem(f"argument '{name}'", is_a(tensor), expected, mend))
                continue
            found = unreadable(f"argument '{name}'", tensor)
            problems += found or _pad(call, place, name, padded)
        if problems:
            raise BindError(self._model, problems)

    def _found(self, call: Call, model: nn.Module) -> dict[int, tuple[str, _Padded]]:
        """The places of the arguments that are padded, in calls of this structure."""
        names = call.names(model)
        found = {
            at: (name, self._padded[name]) for at, name in names.items() if name in self._padded
        }
        problems = []
        for name in self._padded.keys() - {name for name, _ in found.values()}:
            inside = [each for each in names.values() if re.match(rf"{re.escape(name)}[.\[]", each)]
            if inside:
                expected = "a tensor, as dynamic= pads it"
                mend = f'name one of its items, as dynamic={{"{inside[0]}": …}}'
                problems.append(Problem(f"argument '{name}'", "has several items", expected, mend))
        if problems:
            raise BindError(self._model, problems)
        return found

    def shorter(self, call: Call) -> list[Any] | None:
        """The leaves of a call cut to sizes that are padded most; None if it is as short."""
        places = self._places[call.structure]
        leaves, axis, changed = list(call.leaves), 0, False
        for place in call.shapes:
            _, padded = places[place]
            for dim, sizes in padded.dims.items():
                size, bucket = call.axes[axis]
                axis += 1
                if (least := sizes.shortest(bucket)) < size:
                    leaves[place] = leaves[place].narrow(dim, 0, least)
                    changed = True
        return leaves if changed else None

    def said(self, call: Call) -> str:
        """ "'x' from 100 to 128 at dim 1": how a call is padded, for a message."""
        places, axes = self._places[call.structure], iter(call.axes)
        parts = []
        for place in call.shapes:
            name, padded = places[place]
            for dim in padded.dims:
                size, bucket = next(axes)
                if size < bucket:
                    parts.append(f"'{name}' from {size} to {bucket} at dim {dim}")
        return ", ".join(parts)


def _pad(call: Call, place: int, name: str, padded: _Padded) -> list[Problem]:
    """Note the padded shape of one tensor, and the axes of it."""
    tensor, where = call.leaves[place], f"argument '{name}'"
    problems: list[Problem] = []
    shape, axes = list(tensor.shape), list(call.axes)
    if not _holds(tensor.dtype, padded.value):
        dtype = str(tensor.dtype).removeprefix("torch.")
        what = f"is {dtype}, and padded with {padded.value}"
        problems.append(Problem(where, what, f"a 'pad' that {dtype} holds"))
    for dim, sizes in padded.dims.items():
        if not -len(shape) <= dim < len(shape):
            expected = f"at least {dim + 1 if dim >= 0 else -dim}, as dynamic= pads dim {dim}"
            problems.append(Problem(where, f"has {len(shape)} dims", expected))
            continue
        if dim < 0 and len(shape) + dim in padded.dims:
            what = f"has {len(shape)} dims, of which {dim} is {len(shape) + dim}"
            problems.append(Problem(where, what, "each dim once in dynamic="))
            continue
        bucket = sizes.bucket(shape[dim])
        if bucket is None:
            expected = f"at most {sizes.sizes[-1]}, the largest bucket"
            mend = "give dynamic= a larger one, or 'pow2'"
            problems.append(Problem(where, f"has size {shape[dim]} at dim {dim}", expected, mend))
            continue
        axes.append((shape[dim], bucket))
        shape[dim] = bucket
    call.shapes[place], call.axes = tuple(shape), tuple(axes)
    call.pads[place] = padded.value
    return problems


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Whether tensors of a dtype hold a number."""
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    if not math.isfinite(value) or value != int(value):
        return False
    if dtype == torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max


# -- what a user gives -----------------------------------------------------------------------------


def _items(name: str, value: Any) -> list[tuple[Any, Any]]:
    expected = "a mapping such as {'input_ids': {1: (128, 256)}}"
    if not isinstance(value, Mapping):
        raise PolicyError(f"{name}={shown(value)}; expected {expected}")
    try:
        return list(value.items())
    except Exception as error:
        kind = type(error).__name__
        raise PolicyError(f"{name} cannot be read ({kind}); expected {expected}") from None


def _named(model: nn.Module, key: Any) -> str:
    """The name of an argument that is given by name or position, as a call has it."""
    own = parameters(model)
    known = [name for name, each in own.items() if each.kind is not each.VAR_KEYWORD]
    where = f"{type(model).__name__}.forward takes {', '.join(known)}"
    if whole(key) and key >= 0:
        placed = any(each.kind is each.VAR_POSITIONAL for each in own.values())
        if not placed and known and key >= len(known):
            raise PolicyError(f"dynamic names position {shown(key)}; {where}")
        return parameter_at(model, key)
    if type(key) is not str:
        raise PolicyError(f"dynamic names {shown(key)}; expected an argument's name or position")
    if known and len(known) == len(own) and re.split(r"[.\[]", key)[0] not in known:
        raise PolicyError(f"dynamic names '{key}'; {where}")
    return key


def _read(name: Any, value: Any) -> _Padded:
    dims: dict[int, Sizes] = {}
    pad = 0.0
    for key, each in _items(f"dynamic[{shown(name)}]", value):
        if type(key) is str and key == PAD:
            pad = _pad_value(name, each)
        elif whole(key) and -64 <= key < 64:
            dims[key] = _sizes(name, key, each)
        else:
            raise PolicyError(
                f"dynamic[{shown(name)}] has the key {shown(key)}; expected a dim, or 'pad'"
            )
    if not dims:
        raise PolicyError(f"dynamic[{shown(name)}] has no dim; expected {{dim: {_EXPECTED}}}")
    return _Padded(dims, pad)


def _sizes(name: Any, dim: int, value: Any) -> Sizes:
    where = f"dynamic[{shown(name)}][{dim}]"
    try:
        made = plain(value)
    except NotPlain as reason:
        raise PolicyError(f"{where} {reason}; expected {_EXPECTED}") from None
    if type(made) is str and made == POWERS_OF_TWO:
        return Sizes(())
    if whole(made):
        made = (made,)
    good = isinstance(made, (tuple, list)) and made
    if not good or not all(whole(n) and 1 <= n < 1 << 31 for n in made):
        raise PolicyError(f"{where}={made!r}; expected {_EXPECTED}")
    return Sizes(tuple(sorted(set(made))))


def _pad_value(name: Any, value: Any) -> float:
    try:
        made = plain(value)
    except NotPlain as reason:
        raise PolicyError(f"dynamic[{shown(name)}]['pad'] {reason}; expected a number") from None
    if not (real(made) or type(made) is bool):
        raise PolicyError(f"dynamic[{shown(name)}]['pad']={made!r}; expected a number")
    return made  # type: ignore[no-any-return]


# -- results ---------------------------------------------------------------------------------------


def cuts_of(subject: str, call: Call, own: Sequence[Any], padded: Sequence[Any]) -> Cuts:
    """Which dims of results have the size of which axis: a size that is the axis' own in the
    results of a call, and its bucket in those of the padded call.

    Raises :class:`WrongResult` for a dim that has neither that nor one size in both.
    """
    if len(own) != len(padded):
        raise WrongResult(f"{subject}: {len(padded)} results, and {len(own)} without padding")
    found: dict[int, dict[int, int]] = {}
    for result, (theirs, mine) in enumerate(zip(own, padded, strict=True)):
        if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            continue
        pairs = list(zip(theirs.shape, mine.shape, strict=False))
        wrong = [pair for pair in pairs if pair[0] != pair[1] and pair not in call.axes]
        if wrong or mine.dim() != theirs.dim():
            raise WrongResult(
                f"{subject}: result {result} is {tuple(mine.shape)}, and {tuple(theirs.shape)} "
                "without padding: a size that follows an argument's and is not the same cannot be "
                "cut back"
            )
        dims = {dim: call.axes.index(pair) for dim, pair in enumerate(pairs) if pair[0] != pair[1]}
        if dims:
            found[result] = dims
    return found
