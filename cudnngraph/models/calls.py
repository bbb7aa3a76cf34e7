"""Calls of a model, taken apart: tensors, numbers, and what the form of a call is made of.

torch takes lists, tuples, dicts and registered classes apart. Here dataclasses, other mappings and
other sequences are too, and are put together again as what they were, for the model to see.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import threading
from collections import UserDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from itertools import count
from numbers import Integral, Number, Real
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ..arguments import LAZY, is_a, unreadable
from ..errors import BindError, CannotImport, PolicyError, Problem

_NO_CONTAINERS = (torch.Tensor, torch.Size, nn.Module, str, Enum, type)
#: Leaves that a trace takes as they are.
PLAIN = (
    *(torch.Tensor, type(None), bool, int, float, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
#: Those that hold no tensor, so that a form may have them as they are.
CONSTANTS = (*PLAIN, Number, Enum, bytes, range, slice, type)


# -- containers ------------------------------------------------------------------------------------


class Opened:
    """A container that torch does not take apart, as a node of a tree that it does.

    A tree with one has its items as leaves; put together, it has a container of the same kind.
    """

    __slots__ = ("container",)

    def __init__(self, container: Any) -> None:
        self.container = container


_classes: WeakKeyDictionary[type, int] = WeakKeyDictionary()
_numbers = count()


class _Like:
    """What a container is made again from, beside its items."""

    def __init__(self, container: Any, keys: tuple[Any, ...]) -> None:
        self.container, self.keys = container, keys

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Like):
            return NotImplemented
        return type(self.container) is type(other.container) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash((type(self.container), self.keys))

    def __repr__(self) -> str:
        kind = type(self.container)
        number = _classes.setdefault(kind, next(_numbers))  # names and addresses may come again
        return f"{kind.__qualname__}@{number}{self.keys!r}"


def opened(value: Any) -> Any:
    """``value`` with :class:`Opened` in the place of each container that torch knows not."""
    leaves, spec = pytree.tree_flatten(value)
    if not any(map(_is_container, leaves)):
        return value
    return pytree.tree_unflatten([Opened(x) if _is_container(x) else x for x in leaves], spec)


def flat(value: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree of containers of any kind, and the spec that puts them together."""
    leaves, spec = pytree.tree_flatten(value)
    if any(map(_is_container, leaves)):
        return pytree.tree_flatten(opened(value))
    return leaves, spec


def mapped(function: Any, value: Any) -> Any:
    """A tree of containers of any kind with the leaves that a function gives."""
    leaves, spec = flat(value)
    return pytree.tree_unflatten(list(map(function, leaves)), spec)


def _is_container(leaf: Any) -> bool:
    if isinstance(leaf, _NO_CONTAINERS):
        return False
    return isinstance(leaf, (Mapping, list, tuple)) or dataclasses.is_dataclass(leaf)


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size


def _keys(container: Any) -> tuple[Any, ...]:
    if dataclasses.is_dataclass(container):
        names = (field.name for field in dataclasses.fields(container))
        return tuple(name for name in names if hasattr(container, name))
    return tuple(container) if isinstance(container, Mapping) else tuple(range(len(container)))


def _taken_apart(node: Opened) -> tuple[list[Any], _Like]:
    container = node.container
    try:
        keys = _keys(container)
        if dataclasses.is_dataclass(container):
            items = [getattr(container, key) for key in keys]
        else:
            items = [container[key] for key in keys]
    except RecursionError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise PolicyError(f"an argument {is_a(container)}, which cannot be read ({kind})") from None
    return [opened(item) for item in items], _Like(container, keys)


def _with_keys(node: Opened) -> tuple[list[tuple[Any, Any]], _Like]:
    items, like = _taken_apart(node)
    key_of: Any = pytree.MappingKey
    if dataclasses.is_dataclass(node.container):
        key_of = pytree.GetAttrKey
    elif isinstance(node.container, (list, tuple)):
        key_of = pytree.SequenceKey
    return [(key_of(key), item) for key, item in zip(like.keys, items, strict=True)], like


def _put_together(items: Any, like: _Like) -> Any:
    """A container like another with other items. Raises :class:`PolicyError` if it cannot be."""
    container, values = like.container, list(items)
    pairs = dict(zip(like.keys, values, strict=True))
    try:
        made = _made(container, pairs)
        kept = _keys(made) == like.keys
    except Exception as error:
        raise PolicyError(f"{_cannot_be_made(container)} ({error})") from None
    if not kept:
        raise PolicyError(_cannot_be_made(container))
    return made


def _cannot_be_made(container: Any) -> str:
    kind = type(container).__name__
    return f"a {kind} cannot be made again of its items; expected a dict, a tuple or a dataclass"


def _made(container: Any, pairs: Mapping[Any, Any]) -> Any:
    kind: Any = type(container)
    made: Any
    if dataclasses.is_dataclass(container):
        if isinstance(container, Mapping):  # which has each item under two names
            return kind(**pairs)
        made = object.__new__(kind)
        for key, value in {**getattr(container, "__dict__", {}), **pairs}.items():
            object.__setattr__(made, key, value)
    elif _is_size(container):
        made = torch.Size(pairs.values())
    elif isinstance(container, tuple):
        made = tuple.__new__(kind, pairs.values())
        getattr(made, "__dict__", {}).update(getattr(container, "__dict__", {}))
    elif isinstance(container, list):
        made = copy.copy(container)
        made[:] = pairs.values()
    elif isinstance(container, (dict, UserDict)):  # whose copy has items of its own
        made = copy.copy(container)
        for key, value in pairs.items():
            made[key] = value
    else:
        made = kind(dict(pairs))
    return made


pytree.register_pytree_node(
    Opened,
    _taken_apart,
    _put_together,
    serialized_type_name="cudnngraph.models.calls.Opened",
    flatten_with_keys_fn=_with_keys,
)


# -- calls -----------------------------------------------------------------------------------------

#: The structure of a call, what its leaves are by place, its numbers, and what autocast is on.
Pattern = tuple[str, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


def _part_of_slice(each: Any) -> Any:
    if isinstance(each, torch.Tensor):
        raise PolicyError("an argument is a slice of tensors; expected whole numbers in it")
    return type(each), each


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a number of Python's or numpy's, and neither a bool nor an enumeration."""
    kind = type(leaf)
    if kind in (int, float):
        return True
    return kind.__module__ == "numpy" and isinstance(leaf, (Integral, Real))


class Call:
    """The arguments of a call, taken apart.

    ``leaves`` are tensors, numbers and other values by place. ``shapes`` and ``pads`` are of the
    tensors that may be padded, and ``axes`` are the (size, padded size) of their dims that may be.
    """

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        try:
            self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
            self.is_plain = not any(map(_is_container, self.leaves))
            if not self.is_plain:
                self.leaves, self.spec = pytree.tree_flatten(opened((args, kwargs)))
        except RecursionError:
            problem = Problem("arguments", "are nested too deeply, or hold themselves")
            raise BindError(name, [problem]) from None
        self.name = name
        self.structure = str(self.spec)
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.pads: dict[int, float] = {}
        self.axes: tuple[tuple[int, int], ...] = ()
        self.parts: list[Any] = []  # of the form, by place
        self.numbers: dict[int, Any] = {}  # by place

    def read(self, dtype: torch.dtype | None) -> None:
        """Find what the form of the call is made of; floating tensors are of ``dtype``."""
        check_untransformed(self.name, self.leaves)
        first: dict[int, int] = {}  # where a tensor stands: a model may ask which are the same
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                if isinstance(leaf, LAZY) or leaf.is_nested:
                    raise BindError(self.name, unreadable(f"tensor {place}", leaf))
                floats = leaf.is_floating_point()
                kept = dtype if dtype is not None and floats else leaf.dtype
                shape = self.shapes.get(place) or tuple(leaf.shape)
                same = first.setdefault(id(leaf), place)
                self.parts.append((shape, kept, leaf.device, leaf.layout, same))
            elif is_number(leaf):
                self.numbers[place] = leaf
                self.parts.append(type(leaf))
            elif isinstance(leaf, slice):  # which has a hash from Python 3.12 on
                self.parts.append((slice, *map(_part_of_slice, (leaf.start, leaf.stop, leaf.step))))
            elif type(leaf).__module__ == "numpy" and hasattr(leaf, "__array_interface__"):
                mend = "give a tensor, as torch.from_numpy makes one of it"
                raise PolicyError(f"an argument {is_a(leaf)}, which is no tensor; {mend}")
            elif not isinstance(leaf, Hashable):
                raise PolicyError(
                    f"an argument {is_a(leaf)}, which has no hash: forms are told apart by the "
                    "arguments"
                )
            else:
                self.parts.append((type(leaf), leaf))

    def key(self, inputs: frozenset[int]) -> Pattern:
        """The form of the call, if the numbers at the places ``inputs`` are no part of it."""
        fixed = ((at, repr(x)) for at, x in self.numbers.items() if at not in inputs)
        return self.structure, tuple(self.parts), tuple(fixed), _casts()

    @property
    def pattern(self) -> Pattern:
        """The form without its numbers."""
        return self.key(frozenset(self.numbers))

    @property
    def kind(self) -> Hashable:
        """The pattern without the sizes of tensors."""
        parts = (
            (len(part[0]), *part[1:4]) if isinstance(leaf, torch.Tensor) else part
            for leaf, part in zip(self.leaves, self.parts, strict=True)
        )
        return self.structure, tuple(parts), _casts()

    @property
    def is_padded(self) -> bool:
        """Whether a tensor is smaller than what the model is to be given."""
        return any(size < padded for size, padded in self.axes)

    @property
    def padding(self) -> Hashable:
        """Which axes are padded, and which are the same: what the cut of results depends on."""
        return tuple((self.axes.index(axis), axis[0] < axis[1]) for axis in self.axes)

    def padded_leaves(self) -> list[Any]:
        """The leaves, tensors as large as their padded shapes."""
        if not self.is_padded:
            return self.leaves
        made: dict[Hashable, torch.Tensor] = {}  # one for a tensor that has several places
        leaves = list(self.leaves)
        for place, shape in self.shapes.items():
            leaf, pad = leaves[place], self.pads[place]
            which = id(leaf), shape, pad
            if which not in made:
                made[which] = leaf.new_full(shape, pad)
                made[which][tuple(map(slice, leaf.shape))] = leaf.detach()
            leaves[place] = made[which]
        return leaves

    def arguments(self, leaves: Sequence[Any] | None = None) -> tuple[Any, Any]:
        """The positional and the named arguments, made anew of other leaves if some are given."""
        if leaves is None:
            return self._args, self._kwargs
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return args, kwargs

    def by_argument(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The tensors among leaves, for each argument a tuple of them, or the one that it is."""
        left = iter(leaves)

        def tensors_of(argument: Any) -> Any:
            own = flat(argument)[0]
            taken = [next(left) for _ in own]
            if len(own) == 1 and own[0] is argument:
                return taken[0] if isinstance(taken[0], torch.Tensor) else ()
            return tuple(leaf for leaf in taken if isinstance(leaf, torch.Tensor))

        args = tuple(map(tensors_of, self._args))
        return args, {name: tensors_of(each) for name, each in self._kwargs.items()}

    def names(self, model: nn.Module) -> dict[int, str]:
        """The names of the leaves, as "timestep" or "batch['ids']"."""
        given = [(parameter_at(model, at), each) for at, each in enumerate(self._args)]
        given += self._kwargs.items()
        found: list[str] = []
        for name, each in given:
            paths, _ = pytree.tree_flatten_with_path(opened(each))
            found += [name + pytree.keystr(path) for path, _ in paths]
        return dict(enumerate(found))


def check_untransformed(name: str, tensors: Iterable[Any]) -> None:
    """Raise :class:`BindError` for tensors that a function transform follows: a graph is run on
    memory, in which there is no mapped dim, no tangent and no gradient."""
    functorch: Any = torch._C._functorch
    unpacked: Any = forward_ad.unpack_dual
    dual = forward_ad._current_level >= 0
    if functorch.peek_interpreter_stack() is None and not dual:
        return
    for each in tensors:
        if not isinstance(each, torch.Tensor):
            continue
        if functorch.is_functorch_wrapped_tensor(each):
            what = "a tensor is followed by a transform of torch.func (vmap, grad, jvp)"
        elif dual and unpacked(each).tangent is not None:
            what = "a tensor has a tangent, for forward-mode gradients"
        else:
            continue
        mend = "transform the model itself, which is `unfused`"
        raise BindError(name, [Problem("arguments", what, "tensors of a plain call", mend)])


def _casts() -> tuple[Any, ...]:
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    )


def parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of a model's ``forward``; none if Python cannot tell."""
    try:
        return dict(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return {}


def in_order(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Named arguments in the order of the parameters of a model's ``forward``: those have the same
    meaning in any order. Others keep theirs, behind them: the model sees it."""
    if len(kwargs) < 2:
        return kwargs
    forward = getattr(model.forward, "__func__", model.forward)
    names = _parameter_names(forward) if isinstance(forward, Hashable) else ()
    if not any(name in names for name in kwargs):
        return kwargs
    first = {name: kwargs[name] for name in names if name in kwargs}
    return {**first, **kwargs}


@lru_cache(maxsize=256)
def _parameter_names(function: Any) -> tuple[str, ...]:
    """The parameters that may be given by name; none if Python cannot tell."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def parameter_at(model: nn.Module, index: int) -> str:
    """The name of the argument at a position, as "x" or "args[1]"."""
    own = parameters(model).values()
    placed = [p for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if index < len(placed):
        return placed[index].name
    more = [p.name for p in own if p.kind is p.VAR_POSITIONAL]
    return f"{more[0]}[{index - len(placed)}]" if more else f"argument {index}"


# -- a model called by its tensors -----------------------------------------------------------------


class _Run(threading.local):
    """The run of a model by its leaves in this thread.

    It is kept here since whatever a hook holds is looked through for state of the model.
    """

    given: list[Any] | None = None  # the leaves that the model was given
    out_spec: Any = None


_run = _Run()


class ByLeaves:
    """The arguments that a model takes within :func:`called_by_leaves`, and what its results are.

    ``out_spec`` puts results together if torch cannot, and is None if torch can.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    @property
    def out_spec(self) -> Any:
        """As of the last call."""
        return _run.out_spec


@contextmanager
def called_by_leaves(model: nn.Module, call: Call, leaves: Sequence[Any]) -> Iterator[ByLeaves]:
    """Let a model take the tensors among ``leaves`` alone, and give its results as leaves, as far
    as torch does not take apart the containers of a call or of the results."""
    changed = any(
        isinstance(leaf, torch.Tensor) != isinstance(given, torch.Tensor)
        for leaf, given in zip(leaves, call.leaves, strict=True)
    )
    restores = False
    if call.is_plain and not changed and all(isinstance(leaf, PLAIN) for leaf in leaves):
        arguments = call.arguments(leaves)
    else:
        arguments = call.by_argument(leaves)
        restores = True

    def restore(module: Any, args: Any, kwargs: Any) -> Any:
        tensors = iter(pytree.tree_leaves((args, kwargs)))
        _run.given = [next(tensors) if isinstance(x, torch.Tensor) else x for x in leaves]
        return call.arguments(_run.given)

    def open_results(module: Any, args: Any, kwargs: Any, result: Any) -> Any:
        given, _run.given = _run.given, None
        if given is not None and not _has_leaves(call, (args, kwargs), given):
            name = type(model).__name__
            raise CannotImport(f"{name} changes its arguments, which a graph does not")
        leaves = pytree.tree_leaves(result, is_leaf=_is_size)
        is_plain = not any(_is_container(x) or _is_size(x) for x in leaves)
        # Torch makes tuples of sizes.
        sized = pytree.tree_map(lambda x: Opened(x) if _is_size(x) else x, result, is_leaf=_is_size)
        made, spec = flat(sized)
        _run.out_spec = None if is_plain else spec
        return result if is_plain else made

    hooks = []
    try:
        hooks.append(model.register_forward_hook(open_results, with_kwargs=True))
        if restores:
            hook = model.register_forward_pre_hook(restore, prepend=True, with_kwargs=True)
            hooks.append(hook)
        yield ByLeaves(*arguments)
    finally:
        _run.given = _run.out_spec = None
        for hook in hooks:
            hook.remove()


def _has_leaves(call: Call, arguments: Any, leaves: Sequence[Any]) -> bool:
    """Whether the containers of a call have the items that they were given."""
    now, form = flat(arguments)
    return str(form) == call.structure and all(a is b for a, b in zip(now, leaves, strict=True))
