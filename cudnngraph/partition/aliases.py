"""Tensors between steps that are memory of another one, and the steps that have nothing to run.

That is decided here alone. Cuts ask for each op as a step of its own, the plan of memory for the
steps that were chosen.

- A view is memory of its operand.
- What a concatenation joins is memory of its result, if the strides say so.
- The operand of a view that is an output is memory of that output.

In the last two cases the step before writes it there, and there is nothing left to copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..ir.spec import Node, TensorSpec
from ..ops.views import is_view, slots, view_place


@dataclass(frozen=True)
class Made:
    """The results of a step; ``node`` is its only op, if no plan runs it."""

    tensors: Mapping[str, TensorSpec]
    outputs: tuple[str, ...]
    node: Node | None


@dataclass(frozen=True)
class Location:
    """The place of a tensor: ``past`` elements behind the first one of the tensor ``root``.

    If ``root`` is None, they count from the start of the block.
    """

    form: TensorSpec
    root: str | None
    past: int


Located = dict[str, Location]


@dataclass(frozen=True)
class Aliases:
    """The tensors that are memory of another, each behind the one that it lies in.

    The steps numbered in ``free`` have nothing to run.
    """

    order: tuple[Location, ...]
    free: frozenset[int]


def aliases(steps: Sequence[Made], bound: Collection[str]) -> Aliases:
    """Find results of ``steps`` that lie in another tensor; the caller owns ``bound``."""
    nodes = {number: step.node for number, step in enumerate(steps) if step.node is not None}
    bound = frozenset(bound)
    views = {
        number: _view(steps[number].tensors, node)
        for number, node in nodes.items()
        if bound.isdisjoint(steps[number].outputs) and is_view(steps[number].tensors, node)
    }
    own = {
        name: step.tensors[name]
        for number, step in enumerate(steps)
        if number not in views
        for name in step.outputs
        if name not in bound
    }
    slices, joining = _slices(steps, nodes, own)
    shown = {each.form.name: str(each.root) for each in views.values()}
    written, writing = _written_as_outputs(steps, nodes, bound, shown, own, slices)
    order = (*written.values(), *_wholes_first(slices), *views.values())
    return Aliases(order, frozenset({*views, *joining, *writing}))


def _view(tensors: Mapping[str, TensorSpec], node: Node) -> Location:
    """Return where the result of a view lies."""
    place = view_place(node, tensors[node.operands[0]])
    assert place is not None
    return Location(tensors[node.results[0]], node.operands[0], place[1])


def _slices(
    steps: Sequence[Made], nodes: Mapping[int, Node], own: Mapping[str, TensorSpec]
) -> tuple[Located, list[int]]:
    """Place tensors in their slices of concatenations' results, each in the first of them.

    The numbers are those of the concatenations that have nothing left to join.
    """
    found: Located = {}
    free: list[int] = []
    for number, node in nodes.items():
        if node.op != "concat":
            continue
        mine = {
            name: Location(own[name], node.results[0], offset)
            for name, offset in slots(steps[number].tensors, node).items()
            if name in own and name not in found
        }
        found |= mine
        if set(mine) == set(node.operands) and len(mine) == len(node.operands):
            free.append(number)
    return found, free


def _written_as_outputs(
    steps: Sequence[Made],
    nodes: Mapping[int, Node],
    bound: Collection[str],
    shown: Mapping[str, str],
    own: Mapping[str, TensorSpec],
    slices: Located,
) -> tuple[Located, list[int]]:
    """Place tensors in outputs that are views of all of them; also the numbers of those views."""
    found: Located = {}
    free: list[int] = []
    for number, node in nodes.items():
        tensors = steps[number].tensors
        result = tensors[node.results[0]]
        if result.name not in bound or not is_view(tensors, node):
            continue
        name = node.operands[0]
        while name in shown:
            name = shown[name]
        form = own.get(name)
        if form is None or name in slices or name in found:
            continue
        if (form.numel, form.dtype) == (result.numel, result.dtype):
            found[name] = Location(form, result.name, 0)
            free.append(number)
    return found, free


def _wholes_first(slices: Located) -> list[Location]:
    """The slices, each behind what it is a slice of."""
    order: list[Location] = []
    left = dict(slices)
    while left:
        ready = [name for name, each in left.items() if each.root not in left]
        order += [left[name] for name in ready]
        left = {name: each for name, each in left.items() if name not in ready}
    return order
