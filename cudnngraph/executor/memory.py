"""Where the tensors between the steps of a program lie: one block of memory, used again and again.

What a view shows is memory of its operand; where the view is an output, its operand is memory of
that. What a concatenation joins is memory of its result, where the strides say so. In both cases
the step before writes it there, and there is nothing left to copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ..ir.spec import GraphSpec, Node, TensorSpec
from ..ops.views import is_view, shows_all, slots
from ..partition.memory import Need, place
from . import torch_steps


@dataclass(frozen=True)
class Laid:
    """A step as the layout sees it: its graph, whether a plan runs it, scratch memory of that."""

    spec: GraphSpec
    planned: bool
    workspace_bytes: int


@dataclass(frozen=True)
class Lain:
    """Where a tensor lies: ``past`` elements behind the first one of the tensor ``root``, or for
    None behind the start of the block."""

    form: TensorSpec
    root: str | None
    past: int


class Layout:
    """The places of all tensors of ``steps`` but those in ``bound``, which the caller has.

    ``order`` has them, each behind the one that it lies in. ``size_bytes`` is what the block has to
    hold, ``scratch`` the offset of each step's scratch memory in it; the steps numbered in ``free``
    have nothing to run. A step may be running ``until`` a later one, whose number stands there.
    """

    def __init__(
        self,
        steps: Sequence[Laid],
        bound: Collection[str],
        until: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        views: dict[int, Node] = {}
        made: dict[str, TensorSpec] = {}
        life: dict[str, tuple[int, int]] = {}
        parent: dict[str, str] = {}
        for number, step in enumerate(steps):
            last_one = until.get(number, number)
            for name in step.spec.inputs:
                assert name in life or name in bound, f"step {number} reads '{name}' too early"
                if name in life:
                    life[name] = (life[name][0], max(life[name][1], last_one))
            (*_, node) = step.spec.nodes
            free = not step.planned and not set(step.spec.outputs) & set(bound)
            if free and is_view(step.spec.tensors, node):
                views[number] = node
                parent[node.results[0]] = node.operands[0]
                life[node.results[0]] = (number, number)
                continue
            for name in step.spec.outputs:
                life[name] = (number, last_one)
                if name not in bound:
                    made[name] = step.spec.tensors[name]
        inside: dict[str, tuple[str, int]] = {}  # a slice: whose, and its offset in elements
        self.free = set(views)
        for number, step in enumerate(steps):
            (*_, node) = step.spec.nodes
            if step.planned or node.op != "concat":
                continue
            found = slots(step.spec.tensors, node)
            mine = {n: at for n, at in found.items() if n in made and n not in inside}
            for name, offset in mine.items():
                inside[name] = (node.results[0], offset)
                parent[name] = node.results[0]
            if set(mine) == set(node.operands) and len(mine) == len(node.operands):
                self.free.add(number)
        within: dict[str, str] = {}  # what an output is a view of, and the output
        for number, step in enumerate(steps):
            (*_, node) = step.spec.nodes
            if step.planned or number in views or not shows_all(step.spec, node):
                continue
            name = node.operands[0]
            while name in parent and name not in inside:
                name = parent[name]
            result = step.spec.tensors[node.results[0]]
            form = made.get(name)
            if (
                form is not None
                and result.name in bound
                and name not in inside
                and name not in within
                and (form.numel, form.dtype) == (result.numel, result.dtype)
            ):
                within[name] = result.name
                self.free.add(number)
        roots = {
            name: spec for name, spec in made.items() if name not in inside and name not in within
        }
        first = {name: life[name][0] for name in roots}
        last = {name: life[name][1] for name in roots}
        for name, (start, stop) in life.items():
            root = name
            while root in parent:
                root = parent[root]
            if root in roots:
                # A view of a root begins later than it; a slice may be written before.
                first[root] = min(first[root], start)
                last[root] = max(last[root], stop)
        needs = [
            Need(spec.extent * spec.dtype.itemsize, first[name], last[name])
            for name, spec in roots.items()
        ]
        needs += [
            Need(step.workspace_bytes, at, until.get(at, at)) for at, step in enumerate(steps)
        ]
        offsets, total = place(needs)
        self.size_bytes = -(-total // 16) * 16  # whole elements of every dtype
        self.scratch = offsets[len(roots) :]
        self.order: list[Lain] = [
            Lain(spec, None, offset // spec.dtype.itemsize)
            for spec, offset in zip(roots.values(), offsets, strict=False)
        ]
        self.order += [Lain(made[name], output, 0) for name, output in within.items()]
        there = {*bound, *roots, *within}
        left = list(inside)
        while left:  # a whole before its slices
            ready = [name for name in left if inside[name][0] in there]
            self.order += [Lain(made[name], *inside[name]) for name in ready]
            there.update(ready)
            left = [name for name in left if name not in there]
        for number, node in views.items():
            spec = steps[number].spec
            past = torch_steps.elements_past(node, spec)
            self.order.append(Lain(spec.tensors[node.results[0]], node.operands[0], past))

    def tensors(
        self, block: torch.Tensor | None, bound: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Every tensor by name, those between the steps in ``block``, of bytes."""
        values = dict(bound)
        for each in self.order:
            form = each.form
            if each.root is None:
                assert block is not None
                source = block.view(form.dtype)
            else:
                source = values[each.root]
            values[form.name] = source.as_strided(
                form.shape, form.stride, source.storage_offset() + each.past
            )
        return values
