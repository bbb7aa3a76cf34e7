"""State that a model keeps between its calls: find it, compare it, put it back.

A graph gives the same results for the same inputs; a model may not, if it counts its calls or
remembers what it was given. So all that its modules hold is looked through before it is traced and
after: attributes, parameters, buffers, in containers and objects of any depth, the variables of
classes and of closures, default arguments. What has changed is put back. It may be something that
the model makes once and keeps (a table of positions): then a second call changes nothing, and the
results are those of a model that has kept nothing. This is tried (:func:`check_kept`).
"""

from __future__ import annotations

import collections
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import CannotImport
from ..select.tolerance import distance

_PLAIN = (
    *(int, float, complex, str, bytes, bool, type(None), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_KINDS = frozenset(_PLAIN)
#: Most of what a module holds: hooks, by kind.
_CAN_BE_EMPTY = frozenset({dict, list, set, collections.OrderedDict, collections.deque})
_MISSING = object()
#: Libraries whose objects are no state of a model, but for those that are containers.
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy"}) - {"__main__"}
_CONTAINERS = (collections.UserDict, collections.UserList, types.SimpleNamespace)


class Held:
    """All that a model holds at one time; with ``contents`` also the numbers in its tensors, but
    for those of parameters."""

    def __init__(self, model: nn.Module, *, contents: bool = False) -> None:
        self._contents = contents
        self._places: list[_Place] = []
        self._empty: list[tuple[_Place, Any, Any]] = []  # containers with nothing in them
        self._tensors: dict[int, tuple[str, torch.Tensor, Any]] = {}
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        self._own: dict[type, tuple[type, ...]] = {}  # by kind of value
        todo: collections.deque[tuple[str, Any]] = collections.deque([("", model)])
        while todo:
            todo.extend(self._look(*todo.popleft()))

    def _look(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Note a value; what it holds is to be looked at next."""
        if id(value) in self._seen or isinstance(value, _PLAIN):
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            self._tensors[id(value)] = path, value, self._numbers(value)
        elif isinstance(value, (tuple, frozenset)):
            yield from ((f"{path}[{place}]", each) for place, each in enumerate(value))
        for place in self._places_of(path, value):
            self._places.append(place)
            for key, each in place.then.items():
                kind = type(each)
                if kind in _KINDS or id(each) in self._seen:
                    continue
                if kind in _CAN_BE_EMPTY and not each:  # hooks, most of what there is
                    self._seen.add(id(each))
                    self._alive.append(each)
                    self._empty.append((place, key, each))
                else:
                    yield place.name(key), each

    def _places_of(self, path: str, value: Any) -> Iterator[_Place]:
        """Yield the places where a value keeps others, those of a class with the first of it."""
        yield from _places(path, value)
        kind = type(value)
        if isinstance(value, (type, types.ModuleType)):
            return
        own = self._own.get(kind)
        if own is None:
            own = tuple(each for each in kind.__mro__ if not _is_foreign(each))
            new = set(own).difference(*self._own.values())
            self._own[kind] = own
            yield from (_Place(each.__qualname__, *_of_class(each)) for each in own if each in new)
        if kind in own or isinstance(value, _CONTAINERS):
            yield from _of_object(path, value)

    def _numbers(self, tensor: torch.Tensor) -> Any:
        if not self._contents:
            return None
        if isinstance(tensor, nn.Parameter) and not tensor.is_inference():
            return tensor._version
        return tensor.detach().clone()

    def changes(self) -> list[str]:
        """The names of what is no longer what it was."""
        found = []
        for place in (*self._places, *self._filled()):
            now = place.read()
            for key in dict.fromkeys((*place.then, *now)):
                a, b = now.get(key, _MISSING), place.then.get(key, _MISSING)
                if not self._alike(a, b):
                    found.append(place.path if place.ordered else place.name(key))
        return list(dict.fromkeys([*found, *self._written()]))

    def _filled(self) -> Iterator[_Place]:
        """The containers that held nothing and now do."""
        for holder, key, value in self._empty:
            if value:
                for place in _places(holder.name(key), value):
                    place.then = {}
                    yield place

    def _written(self) -> Iterator[str]:
        """The names of the tensors that were written to."""
        for path, tensor, numbers in self._tensors.values():
            if isinstance(numbers, torch.Tensor):
                if not _equal(tensor, numbers):
                    yield path
            elif numbers is not None and tensor._version != numbers:
                yield path

    def _alike(self, now: Any, then: Any) -> bool:
        """Whether a value made anew is what was there."""
        if _same(now, then):
            return True
        if type(now) is not type(then):
            return False
        if isinstance(now, torch.Tensor):
            if not self._contents:
                return False
            _, _, numbers = self._tensors.get(id(then), ("", then, then))
            return _equal(now, numbers if isinstance(numbers, torch.Tensor) else then)
        if isinstance(now, weakref.ReferenceType):
            return self._alike(now(), then())
        if isinstance(now, (list, tuple, collections.deque)):
            return len(now) == len(then) and all(map(self._alike, now, then))
        if isinstance(now, dict):
            return now.keys() == then.keys() and all(self._alike(now[k], then[k]) for k in now)
        return isinstance(now, set) and bool(now == then)

    def name(self, tensor: torch.Tensor) -> str:
        """The model's name for a tensor."""
        path, _, _ = self._tensors.get(id(tensor), ("a tensor", None, None))
        return path

    def restore(self) -> None:
        """Put back what has changed."""
        for place in (*self._places, *self._filled()):
            if not _same_items(place.read(), place.then):
                place.write()
        for _, tensor, numbers in self._tensors.values():
            if isinstance(numbers, torch.Tensor) and not _equal(tensor, numbers):
                with torch.no_grad():
                    tensor.copy_(numbers)


class _Place:
    """A holder of values by name, read by :meth:`read`, and the values it held ``then``."""

    def __init__(
        self,
        path: str,
        read: Callable[[], dict[Any, Any]],
        put: Callable[[dict[Any, Any]], None],
        *,
        items: bool = False,
        ordered: bool = False,
    ) -> None:
        self.path, self.ordered = path, ordered
        self._put, self._items = put, items or ordered
        self.read = read
        self.then = read()

    def name(self, key: Any) -> str:
        """The model's name for a value, as "layers.0.kept" or "kept['x']"."""
        if self._items:
            return f"{self.path}[{key!r}]"
        return f"{self.path}.{key}" if self.path else str(key)

    def write(self) -> None:
        """Put back what was there then."""
        self._put(self.then)


def _places(path: str, value: Any) -> Iterator[_Place]:
    """Yield the places where a value keeps others by its kind, its attributes left out."""
    kind = type(value)
    if isinstance(value, dict):
        yield _Place(path, lambda: dict(value), lambda then: _refill(value, then), items=True)
    elif isinstance(value, (list, collections.deque)):
        yield _Place(
            path, lambda: dict(enumerate(value)), lambda then: _relist(value, then), ordered=True
        )
    elif isinstance(value, set):
        read = functools.partial(dict.fromkeys, value)
        yield _Place(path, read, lambda then: _reset(value, then), ordered=True)
    elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        yield _Place(
            path, lambda: {0: value.tobytes()}, lambda then: _rewrite(value, then), ordered=True
        )
    elif isinstance(value, types.MethodType):
        yield _Place(path, lambda: {"__self__": value.__self__}, _nothing)
        yield from _places(path, value.__func__)
    elif isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        yield _Place(path, lambda: parts, _nothing)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(path, value)
    elif isinstance(value, nn.Module):
        yield from _of_module(path, value)


def _is_foreign(kind: type) -> bool:
    """Whether a class is of a library whose objects are no state of a model."""
    return str(kind.__module__).partition(".")[0] in _FOREIGN


def _of_module(path: str, module: nn.Module) -> Iterator[_Place]:
    inner = ("_parameters", "_buffers", "_modules")
    held = vars(module)
    for name in inner:  # by the names that they have as attributes
        inside = held.get(name)
        if isinstance(inside, dict):
            yield _Place(path, inside.copy, functools.partial(_refill, inside))

    order = list(held)

    def read() -> dict[str, Any]:
        return {name: each for name, each in held.items() if name not in inner}

    def put(then: dict[str, Any]) -> None:
        _refill(held, {name: held[name] if name in inner else then[name] for name in order})

    yield _Place(path, read, put)


def _of_object(path: str, value: Any) -> Iterator[_Place]:
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict) and not isinstance(value, nn.Module):
        yield _Place(path, lambda: dict(held), lambda then: _refill(held, then))
    slots = [
        name
        for kind in type(value).__mro__
        for name in _names(kind.__dict__.get("__slots__", ()))
        if name[:2] != "__"
    ]
    if slots:

        def read() -> dict[str, Any]:
            return {name: getattr(value, name) for name in slots if hasattr(value, name)}

        yield _Place(path, read, lambda then: _reassign(value, read(), then))


def _names(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _of_class(kind: type) -> tuple[Callable[[], dict[str, Any]], Callable[[Any], None]]:
    """Return how to read the variables of a class, and how to put them back."""

    def read() -> dict[str, Any]:
        return {name: each for name, each in vars(kind).items() if name[:2] != "__"}

    return read, lambda then: _reassign(kind, read(), then)


def _of_function(path: str, function: types.FunctionType) -> Iterator[_Place]:
    names = function.__code__.co_freevars
    cells = dict(zip(names, function.__closure__ or (), strict=True))

    def read() -> dict[str, Any]:
        found = {}
        for name, cell in cells.items():
            try:
                found[name] = cell.cell_contents
            except ValueError:  # it is not set yet
                continue
        return found

    def put(then: dict[str, Any]) -> None:
        for name, each in then.items():
            cells[name].cell_contents = each

    where = path or function.__qualname__
    yield _Place(where, read, put)
    defaults = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
    yield _Place(where, lambda: defaults, _nothing)


def _nothing(then: Any) -> None:
    """Do nothing: the value cannot be changed."""


def _refill(held: dict[Any, Any], then: dict[Any, Any]) -> None:
    held.clear()
    held.update(then)


def _relist(held: Any, then: dict[Any, Any]) -> None:
    held.clear()
    held.extend(then.values())


def _reset(held: set[Any], then: dict[Any, Any]) -> None:
    held.clear()
    held.update(then)


def _rewrite(array: Any, then: dict[Any, Any]) -> None:
    array[...] = type(array)(array.shape, array.dtype, then[0])


def _reassign(owner: Any, now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    for name in now.keys() - then.keys():
        delattr(owner, name)
    for name, each in then.items():
        if now.get(name, _MISSING) is not each:
            setattr(owner, name, each)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, _PLAIN) and bool(a == b or (a != a and b != b))


def _same_items(now: Mapping[Any, Any], then: Mapping[Any, Any]) -> bool:
    return list(now) == list(then) and all(_same(now[key], then[key]) for key in then)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same, NaN among it."""
    if a is b:
        return True
    if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout):
        return False
    with torch.no_grad():
        return bool(((a == b) | ((a != a) & (b != b))).all())


# -- what is kept ----------------------------------------------------------------------------------


def check_kept(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], changed: Sequence[str]
) -> None:
    """Raise :class:`CannotImport` for a model that a call ``changed``, unless it has only kept what
    every other call finds there or makes again: it is run for it, then put back."""
    name, what = type(model).__name__, ", ".join(f"'{each}'" for each in changed)
    before = Held(model, contents=True)
    other = _others((tuple(args), dict(kwargs)))

    def results(arguments: Any) -> list[Any]:
        placed, named = pytree.tree_map_only(torch.Tensor, torch.clone, arguments)
        with torch.no_grad():
            return [
                each.clone() if isinstance(each, torch.Tensor) else each
                for each in pytree.tree_leaves(model(*placed, **named))
            ]

    try:
        results((tuple(args), dict(kwargs)))
        if not before.changes():
            return  # to be traced has changed it: recurrent layers list their weights once more
        kept = Held(model, contents=True)
        later = results(other)
        again = kept.changes()
        kept.restore()
        before.restore()
        fresh = results(other)
    except Exception as error:
        raise CannotImport(
            f"{name} changes {what}, and running it, to see whether that matters, failed: {error}"
        ) from error
    finally:
        before.restore()
    if again:
        what = ", ".join(f"'{each}'" for each in again)
        raise CannotImport(
            f"{name} changes {what} in every call, which a graph does not (a counter, a list that "
            "grows, what it remembers of its inputs?); return the new value, or keep it elsewhere"
        )
    if len(later) != len(fresh) or not all(map(agree, later, fresh)):
        raise CannotImport(
            f"{name} keeps {what} from one call to the next, and its results depend on it, which "
            "those of a graph do not"
        )


def _others(arguments: Any) -> Any:
    """Arguments of the same form with other numbers, of the same range."""
    generator = torch.Generator().manual_seed(0)

    def other(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.numel() or leaf.layout != torch.strided:
            return leaf
        rolled = leaf.detach().flatten().roll(1).view(leaf.shape)
        if not leaf.is_floating_point():
            return rolled
        factors = 0.5 + torch.rand(leaf.shape, generator=generator).to(leaf)
        return rolled * factors if bool(rolled.any()) else factors

    return pytree.tree_map_only(torch.Tensor, other, arguments)


def agree(a: Any, b: Any) -> bool:
    """Whether results are the same but for the order in which a GPU adds."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    if not a.is_floating_point() or a.shape != b.shape or a.dtype != b.dtype:
        return _equal(a, b)
    eps = max(2.0**-13, 8 * torch.finfo(a.dtype).eps)
    off, size = distance(a, b)
    return off <= eps * size
