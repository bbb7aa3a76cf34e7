"""Elements that a mask picks, ``x[mask]``, where all that is done with them goes elementwise.

How many there are depends on numbers, so no graph has them. But ``y[mask] = f(x[mask])`` is
``where(mask, f(x), y)``. In place of what is picked stand tensors with a place for each element of
the mask, and beside each the ``whole`` of which the mask picks: ops that go elementwise are done
with that. Whatever else is asked of them, such as their size, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..ops import meta as forms
from .known_forms import mapped

Tensor = torch.Tensor
_aten: Any = torch.ops.aten
#: Ops beside those that torch says are pointwise.
_ALIKE = frozenset(
    getattr(_aten, name).default for name in ("clone", "detach", "alias", "_to_copy")
)
#: Ops of whole numbers that fail for some, which the mask may leave out.
_FAIL = frozenset((_aten.div, _aten.floor_divide, _aten.remainder, _aten.fmod, _aten.pow))
#: What tells how many elements there are.
SIZES: frozenset[Any] = frozenset(
    (
        *(torch.Tensor.shape.__get__, torch.Tensor.nbytes.__get__),  # type: ignore[attr-defined]
        *(torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__),
        *(torch.Tensor.stride, torch.numel),
    )
)
_NESTING = 8  # of ops that make a mask: how far two are compared


class Unpicked(Exception):
    """What a mask picks, at a ``line`` of a traceback, is used other than elementwise."""

    def __init__(self, what: str, line: str) -> None:
        super().__init__(what)
        self.line = line


@dataclass(frozen=True)
class Pick:
    """What a mask, the value of a node, picks of a tensor behind its first ``before`` dims."""

    whole: Tensor
    mask: torch.fx.Node
    before: int
    rank: int  # of the mask

    @property
    def behind(self) -> int:
        """The number of dims behind those of the mask."""
        return self.whole.dim() - self.before - self.rank


class Picks:
    """What masks pick in a run. ``make`` records an op, ``node`` names that of a tensor now, and
    ``empty`` makes a tensor without memory of a shape, like another; ``line`` says what runs."""

    def __init__(
        self,
        make: Callable[..., Any],
        node: Callable[[Tensor], torch.fx.Node],
        empty: Callable[[Tensor, tuple[int, ...]], Tensor],
        line: Callable[[], str],
    ) -> None:
        self._make, self._node, self._empty, self._line = make, node, empty, line
        self._last = ""  # line at which a mask has picked
        self._picks: dict[int, Pick] = {}  # by the tensor's id: the run keeps all of them alive

    def __contains__(self, tensor: Any) -> bool:
        return id(tensor) in self._picks

    def refused(self, what: str) -> Unpicked:
        """The error for what goes not elementwise."""
        return Unpicked(what, self._last)

    def op(self, op: Any, args: Any, kwargs: Any) -> Tensor | None:
        """The result of an op that picks, or has what was picked; None for any other. Raises
        :class:`Unpicked` for what goes not elementwise."""
        if op is _aten.index.Tensor and (place := _masked(args[1])) is not None:
            if args[0] in self:
                raise self.refused("a mask picks of what a mask has picked")
            return self._picked(args[0], args[1][place], place)
        found: list[Pick] = []

        def note(leaf: Any) -> Any:
            if leaf in self:
                found.append(self._picks[id(leaf)])
            return leaf

        mapped(note, (args, kwargs))
        if not found:
            return None
        if op is _aten.index_put.default:
            return self._put(*args, **kwargs)
        return self._elementwise(op, args, kwargs, found)

    def write(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Note that what was picked has other numbers from now on; return it."""
        pick = self._picks[id(value)]
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise self.refused("it has another form when it is written")
        self._picks[id(tensor)] = pick
        return tensor

    def _picked(self, x: Tensor, mask: Tensor, before: int) -> Tensor:
        self._last = self._line()
        whole = self._make(_aten.clone.default, (x,), {})  # of now: x may be written later
        return self._stand_in(Pick(whole, self._node(mask), before, mask.dim()))

    def _stand_in(self, pick: Pick) -> Tensor:
        shape, behind = tuple(pick.whole.shape), pick.before + pick.rank
        count = max(math.prod(shape[pick.before : behind]), 2)  # torch leaves dims of 1 out
        made = self._empty(pick.whole, (*shape[: pick.before], count, *shape[behind:]))
        self._picks[id(made)] = pick
        return made

    def _elementwise(self, op: Any, args: Any, kwargs: Any, found: list[Pick]) -> Tensor:
        if torch.Tag.pointwise not in op.tags and op not in _ALIKE:
            raise self.refused(f"{op} of what a mask picks")
        if forms.is_random(op, args, kwargs) or kwargs.get("memory_format") is not None:
            raise self.refused(f"{op} of what a mask picks")
        first = found[0]
        if not all(_same(each, first) for each in found):
            raise self.refused("different masks have picked")
        whole_numbers = True

        def whole(leaf: Any) -> Any:
            nonlocal whole_numbers
            if isinstance(leaf, float):
                whole_numbers = False
            if not isinstance(leaf, Tensor):
                return leaf
            whole_numbers &= not leaf.dtype.is_floating_point
            if leaf in self:
                return self._picks[id(leaf)].whole
            if leaf.dim() > first.behind:
                raise self.refused("an operand has a number for each element that is picked")
            return leaf

        placed, named = mapped(whole, (args, kwargs))
        if whole_numbers and op.overloadpacket in _FAIL:
            raise self.refused(f"{op} of whole numbers that a mask picks")
        made = self._make(op, placed, named)
        return self._stand_in(Pick(made, first.mask, first.before, first.rank))

    def _put(self, y: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
        place = _masked(indices)
        if accumulate or place is None or values not in self or y in self:
            raise self.refused("what a mask picks is put elsewhere")
        mask, pick = indices[place], self._picks[id(values)]
        there = Pick(y, self._node(mask), place, mask.dim())
        if not _same(there, pick) or tuple(pick.whole.shape) != tuple(y.shape):
            raise self.refused("what a mask picks is put where another says")
        if pick.whole.dtype != y.dtype:
            raise self.refused("what a mask picks has another dtype than where it is put")
        if pick.behind:
            mask = self._make(_aten.reshape.default, (mask, [*mask.shape, *(1,) * pick.behind]), {})
        made: Tensor = self._make(_aten.where.self, (mask, pick.whole, y), {})
        return made


def _masked(indices: Any) -> int | None:
    """The place of a mask that is the only index; None for other indices."""
    given = [at for at, each in enumerate(indices) if each is not None]
    if len(given) != 1 or indices[given[0]].dtype != torch.bool or not indices[given[0]].dim():
        return None
    return given[0]


def _same(a: Pick, b: Pick) -> bool:
    """Whether two masks pick the same places."""
    return (a.before, a.rank, a.behind) == (b.before, b.rank, b.behind) and _alike(a.mask, b.mask)


def _alike(a: Any, b: Any, depth: int = 0) -> bool:
    """Whether arguments of nodes have one value for certain."""
    if a is b:
        return True
    if type(a) is not type(b) or depth > _NESTING:
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_alike(*each, depth) for each in zip(a, b, strict=True))
    if not isinstance(a, torch.fx.Node):
        return bool(a == b)
    if a.op != "call_function" or a.target is not b.target or a.kwargs or b.kwargs:
        return False
    tags = getattr(a.target, "tags", ())
    return torch.Tag.pointwise in tags and _alike(a.args, b.args, depth + 1)
