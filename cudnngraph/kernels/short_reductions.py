"""Reductions over few elements that lie across memory, written out as pointwise ops.

The sum of the two halves of an image's channels, or a softmax over three images that are stacked,
takes its few elements from as many places of memory. As a pointwise op of slices it has lanes and
vectors along what lies side by side, and other ops and reductions read it as they read any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..device.rules import rules
from ..ir.spec import TensorSpec, numel
from .index import Sum, Var, counter, place
from .parts import counted, parts_of, run_of
from .stages import largest_reads, reachable, reductions_of, replaced_in
from .tape import (
    Depthwise,
    Index,
    Join,
    Map,
    Number,
    Pick,
    Place,
    Read,
    Reduce,
    Refused,
    Value,
    View,
    Window,
    broadcast,
    count_of,
    mapped,
    part_of,
    sliced,
)

MOST = 8  # elements of a reduction
MOST_VALUES = 512  # of which a loop computes an element
FEW = 4096  # elements of a tensor, which the cache holds

_CODES = {
    "sum": lambda a, b: f"({a} + {b})",
    "max": lambda a, b: f"larger({a}, {b})",
    "min": lambda a, b: f"smaller({a}, {b})",
}


def written_out(values: Sequence[Value]) -> list[Value]:
    """The values of outputs with short reductions as pointwise ops, where no more is read for that.

    It is not done where values of several sizes are left that share no loop any more.
    """
    found = list(values)
    if next(_short(found), None) is None:
        return found
    if any(isinstance(each, (Pick, Place, Window, Depthwise)) for each in reachable(found)):
        return found
    while (each := next(_short(found), None)) is not None:
        found = replaced_in(found, {id(each): _of_slices(each)})
    if not reductions_of(found) and len({numel(value.shape) for value in found}) > 1:
        return list(values)
    try:
        before, now = _reads_of(values, _by_dims), _reads_of(found, _counted)
    except Refused:
        return list(values)
    many = {tensor for tensor in before if tensor.numel > FEW}
    if any(now.get(tensor, 0) > before[tensor] for tensor in many):
        return list(values)
    return found


def _short(values: Iterable[Value]) -> Iterator[Reduce]:
    """The reductions over few elements, next to each of which lie elements of others."""
    for each in reductions_of(values):
        short = 1 < count_of(each.operand, each.dims) <= MOST
        if short and each.type == each.operand.type == "float" and _lies_across(each):
            yield each


def _lies_across(each: Reduce) -> bool:
    widest = max((to.dtype.itemsize for to in largest_reads([each.operand])), default=4)
    kept = [part for part in parts_of(each.operand) if part.dim not in each.dims]
    return run_of(kept) * widest >= rules().kernel_min_run_bytes


def _of_slices(each: Reduce) -> Value:
    """A reduction as ops of the slices that it takes together, in their order."""
    made: Value | None = None
    for places in itertools.product(*(range(each.operand.shape[dim]) for dim in each.dims)):
        part = each.operand
        for dim, at in zip(each.dims, places, strict=True):
            shape = (*part.shape[:dim], 1, *part.shape[dim + 1 :])
            part = sliced(part, dim, at, shape, 1)
        made = part if made is None else mapped(_CODES[each.kind], made, part)
    assert made is not None
    return made


def _reads_of(
    values: Sequence[Value], index_of: Callable[[Value, Sequence[int]], Index]
) -> dict[TensorSpec, int]:
    """How many elements are read of each tensor, by the loop that reads most of it. Raises
    Refused."""
    found: dict[TensorSpec, int] = {}
    every: list[tuple[Value, tuple[int, ...]]] = [(value, ()) for value in values]
    every += [(each.operand, each.dims) for each in reductions_of(values)]
    for root, dims in every:
        places: dict[TensorSpec, set[Sum]] = {}
        for tensor, at in _places(root, index_of(root, dims)):
            places.setdefault(tensor, set()).add(at)
        for tensor, several in places.items():
            found[tensor] = max(found.get(tensor, 0), len(several) * numel(root.shape))
    return found


def _by_dims(root: Value, dims: Sequence[int]) -> Index:
    """The index of a value of which each dim is counted apart: any view can say it."""
    return tuple(counter(Var(f"d{dim}", n)) for dim, n in enumerate(root.shape))


def _counted(root: Value, dims: Sequence[int]) -> Index:
    """The index of a value as a kernel counts its elements, those that are reduced apart."""
    index = dict.fromkeys(range(len(root.shape)), Sum())
    for name, down in (("k", False), ("r", True)):
        parts = [part for part in parts_of(root) if (part.dim in dims) == down]
        index |= counted(parts, Var(name, numel(part.extent for part in parts)))
    return tuple(index.values())


def _places(root: Value, index: Index) -> Iterator[tuple[TensorSpec, Sum]]:
    """The tensors that are read for an element of a value, and where, up to reductions. Raises
    Refused."""
    stack, seen = [(root, index)], set[tuple[int, Index]]()
    while stack:
        value, at = stack.pop()
        if (id(value), at) in seen:
            continue
        seen.add((id(value), at))
        if len(seen) > MOST_VALUES:
            raise Refused("more than is worth to be computed by one thread")
        if isinstance(value, Read):
            yield value.tensor, place(at, value.tensor.stride)
        elif isinstance(value, Map):
            stack += [(each, broadcast(at, each.shape)) for each in value.operands]
        elif isinstance(value, View):
            source = value.source(at)
            if source is None:
                raise Refused("a view of a view that no plain index says")
            stack.append((value.operand, source))
        elif isinstance(value, Join):
            only = part_of(value, at)
            stack += [(each, at) for each in value.operands] if only is None else [only]
        elif not isinstance(value, (Reduce, Number)):
            raise Refused("what is read at computed places")
