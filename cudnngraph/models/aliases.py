"""Tensors of a run that see one memory, and what a write over one of them makes of the others.

A graph has no memory: a write becomes an op with a new result. That result is put into the tensors
that the written one is a view of, each time by an op that gives the whole anew, up to the first
tensor of the memory. Views of it that are read later are taken of it again.

Some ops give a view or a copy, as the strides are, and those may be others on another device. Each
of the two tensors is then taken for the only one, and must not be read once the other was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ops import meta as forms

Tensor = torch.Tensor
Make = Callable[..., Any]  # records an op with its arguments, and returns its results
Put = Callable[[Make, Tensor, Tensor, Any], Tensor]
_aten: Any = torch.ops.aten


class Unclear(Exception):
    """What memory holds is not for certain."""


@dataclass(eq=False)
class Memory:
    """Tensors that for certain see the same memory: ``version`` counts the writes. ``beside`` are
    others that may see it too; ``lost`` if one of those was written. ``given`` was there before
    the run."""

    given: bool
    version: int = 0
    lost: bool = False
    beside: list[Memory] = field(default_factory=list)


@dataclass(eq=False)
class Seen:
    """A tensor of the run, and the node that is it as of a ``version`` of its memory. It is result
    ``place`` of a view ``op`` of ``source``, or the first of its memory."""

    tensor: Tensor
    node: torch.fx.Node
    memory: Memory
    version: int = 0
    source: Seen | None = None
    op: Any = None
    rest: tuple[Any, Any] = ((), {})  # the arguments of op behind its first, and those by name
    place: int | None = None


class Aliases:
    """The tensors of a run. ``make`` records an op and returns its results."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._seen: dict[int, Seen] = {}  # by the tensor's id: the run keeps all of them alive

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._seen

    def add(self, tensor: Tensor, node: torch.fx.Node) -> None:
        """Note the first tensor of a memory."""
        self._seen[id(tensor)] = Seen(tensor, node, Memory(node.op == "placeholder"))

    def made(
        self,
        tensor: Tensor,
        node: torch.fx.Node,
        op: Any,
        args: Any,
        kwargs: Any,
        place: int | None,
    ) -> None:
        """Note a result of an op."""
        operands = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        first = self._seen.get(id(args[0])) if args and isinstance(args[0], Tensor) else None
        if op in _VIEWS and first is not None:
            memory, rest = first.memory, (tuple(args[1:]), dict(kwargs))
            seen = Seen(tensor, node, memory, memory.version, first, op, rest, place)
            self._seen[id(tensor)] = seen
            return
        self.add(tensor, node)
        if op is _aten.lift_fresh.default:  # what the model has just made
            return
        memory = self._seen[id(tensor)].memory
        for each in operands:
            other = self._seen[id(each)].memory
            # The strides of what is given are known: what copies it now always does.
            if _shares(tensor, each) or (_may_copy(op, args, kwargs) and not other.given):
                memory.beside.append(other)
                other.beside.append(memory)

    def node(self, tensor: Tensor) -> torch.fx.Node:
        """The node that is a tensor now. Raises :class:`Unclear` if that cannot be told."""
        return self._current(self._seen[id(tensor)]).node

    def _current(self, seen: Seen) -> Seen:
        if seen.memory.lost:
            raise Unclear("it reads what was written over, or a copy of it")
        if seen.version != seen.memory.version:
            assert seen.source is not None
            placed, named = seen.rest
            made = self._make(seen.op, (self._current(seen.source).tensor, *placed), named)
            made = made if seen.place is None else made[seen.place]
            self._settle(seen, self._seen[id(made)].node, seen.memory.version)
        return seen

    def first(self, tensor: Tensor) -> Seen:
        """The first tensor of the memory that a tensor sees."""
        seen = self._seen[id(tensor)]
        while seen.source is not None:
            seen = seen.source
        return seen

    def may_become_view(self, tensor: Tensor, op: Any) -> bool:
        """Whether a tensor, which is no argument, may be what ``op`` makes of it: a view."""
        seen = self._seen[id(tensor)]
        return op in _VIEWS and not (seen.source is None and seen.memory.given)

    def become(self, tensor: Tensor, view: Tensor, before: Tensor) -> None:
        """Let ``tensor`` be from now on what ``view`` is, which was made of it and which nothing
        else has; ``before`` stands for what it was."""
        old, new = self._seen[id(tensor)], self._seen[id(view)]
        self._seen[id(before)], self._seen[id(tensor)] = old, new
        old.tensor, new.tensor = before, tensor
        for node in old.node.graph.nodes:  # it may have been several, one written over the other
            found = node.meta.get("val")
            if found is tensor:
                node.meta["val"] = before
            elif isinstance(found, tuple):
                node.meta["val"] = tuple(before if each is tensor else each for each in found)
        new.node.meta["val"] = tensor

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Note that ``tensor`` has the numbers of ``value`` from now on, a result that nothing else
        has. Raises :class:`Unclear` for a view that cannot be put back."""
        seen: Seen | None = self._seen[id(tensor)]
        memory = self._seen[id(tensor)].memory
        others = _reached(memory)
        if any(each.given for each in others):
            raise Unclear("it writes over what was given to the model, or a copy of it")
        made: list[tuple[Seen, torch.fx.Node]] = []
        while seen is not None:
            made.append((self._current(seen), self._seen[id(value)].node))
            if seen.source is not None:
                put = _VIEWS[seen.op]
                if put is None:
                    raise Unclear(f"it writes over what {seen.op} gives")
                given = forms.bind_arguments(seen.op, (None, *seen.rest[0]), seen.rest[1])
                value = put(self._make, seen.source.tensor, value, {**given, "place": seen.place})
            seen = seen.source
        memory.version += 1
        for each, node in made:
            self._settle(each, node, memory.version)
        for other in others[1:]:
            other.lost = True

    @staticmethod
    def _settle(seen: Seen, node: torch.fx.Node, version: int) -> None:
        seen.node, seen.version = node, version
        node.meta["val"] = seen.tensor


def _reached(memory: Memory) -> list[Memory]:
    """A memory, and all that may be the same."""
    found = [memory]
    for each in found:
        found += [other for other in dict.fromkeys(each.beside) if other not in found]
    return found


def _shares(a: Tensor, b: Tensor) -> bool:
    """Whether tensors see one memory, as the run has them."""
    a, b = getattr(a, "meta", a), getattr(b, "meta", b)
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _may_copy(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op gives a view or a copy, as the strides are, or did so in front of this copy."""
    if op is _aten.clone.default:
        return kwargs.get("memory_format") is not None  # as contiguous() asks
    if op is _aten._to_copy.default:
        return kwargs.get("dtype") in (None, args[0].dtype)
    return op in (_aten.reshape.default, _aten.flatten.using_ints)


# -- views: what is put into the tensor that each is a view of -------------------------------------


def _reshaped(make: Make, whole: Tensor, value: Tensor, a: Any) -> Tensor:
    made: Tensor = make(_aten.reshape.default, (value, list(whole.shape)), {})
    return made


def _same(make: Make, whole: Tensor, value: Tensor, a: Any) -> Tensor:
    return value


def _transposed(make: Make, whole: Tensor, value: Tensor, a: Any) -> Tensor:
    if whole.dim() < 2:
        return value
    made: Tensor = make(_aten.transpose.int, (value, a.get("dim0", 0), a.get("dim1", 1)), {})
    return made


def _permuted(make: Make, whole: Tensor, value: Tensor, a: Any) -> Tensor:
    dims = [dim % whole.dim() for dim in a["dims"]]
    made: Tensor = make(
        _aten.permute.default, (value, [dims.index(n) for n in range(len(dims))]), {}
    )
    return made


def _sliced(make: Make, whole: Tensor, value: Tensor, a: Any) -> Tensor:
    taken = range(*slice(a["start"], a["end"], a["step"]).indices(whole.shape[a["dim"]]))
    return _part(make, whole, value, a["dim"], taken)


def _part(make: Make, whole: Tensor, value: Tensor, dim: int, taken: range) -> Tensor:
    if not taken:
        return whole
    place = (dim % whole.dim(), taken.start, taken.stop, taken.step)
    made: Tensor = make(_aten.slice_scatter.default, (whole, value, *place), {})
    return made


def _selected(make: Make, whole: Tensor, value: Tensor, a: Any) -> Tensor:
    dim = a["dim"] % whole.dim()
    index = a.get("index", a["place"]) % whole.shape[dim]
    value = make(_aten.unsqueeze.default, (value, dim), {})
    return _part(make, whole, value, dim, range(index, index + 1))


def _split(make: Make, whole: Tensor, value: Tensor, a: Any) -> Tensor:
    """One part of several, of equal sizes but for the last, or of ``split_sizes``."""
    dim, place = a["dim"] % whole.dim(), a["place"]
    size, count = whole.shape[dim], value.shape[dim]
    if "split_sizes" in a:
        start = sum(a["split_sizes"][:place])
    elif "chunks" in a:
        start = place * -(-size // a["chunks"])
    else:
        start = place * a["split_size"]
    return _part(make, whole, value, dim, range(start, start + count))


def _diagonal(make: Make, whole: Tensor, value: Tensor, a: Any) -> Tensor:
    place = (a["offset"], a["dim1"], a["dim2"])
    made: Tensor = make(_aten.diagonal_scatter.default, (whole, value, *place), {})
    return made


#: Ops whose results are views for certain; None of those that nothing is put through.
_VIEWS: Mapping[Any, Put | None] = {
    **dict.fromkeys((_aten.alias.default, _aten.detach.default), _same),
    **dict.fromkeys(
        (
            *(_aten.view.default, _aten._unsafe_view.default, _aten.unsqueeze.default),
            *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
        ),
        _reshaped,
    ),
    **dict.fromkeys((_aten.transpose.int, _aten.t.default), _transposed),
    _aten.permute.default: _permuted,
    _aten.slice.Tensor: _sliced,
    _aten.select.int: _selected,
    _aten.unbind.int: _selected,
    **dict.fromkeys(
        (
            _aten.split.Tensor,
            _aten.split_with_sizes.default,
            _aten.chunk.default,
            _aten.unsafe_split.Tensor,
            _aten.unsafe_split_with_sizes.default,
            _aten.unsafe_chunk.default,
        ),
        _split,
    ),
    _aten.diagonal.default: _diagonal,
    **dict.fromkeys((_aten.expand.default, _aten.unfold.default), None),
}
