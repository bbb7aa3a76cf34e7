"""Where the tensors between the steps of a program lie: one block of memory, used again and again.

What a view shows is memory of its operand. What a concatenation joins is memory of its result,
where the strides say so: the step before writes it there, and there is nothing left to copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from . import eager
from .ir import GraphSpec, Node, TensorSpec
from .memory import Need, place
from .partition import is_view, slots


@dataclass(frozen=True)
class Laid:
    """A step as the layout sees it: its graph, whether a plan runs it, scratch memory of that."""

    spec: GraphSpec
    planned: bool
    workspace_bytes: int


class Layout:
    """The places of all tensors of ``steps`` but those in ``bound``, which the caller has.

    ``size_bytes`` is what the block has to hold, ``scratch`` the offset of each step's scratch
    memory in it; the steps numbered in ``free`` have nothing to run.
    """

    def __init__(self, steps: Sequence[Laid], bound: Collection[str]) -> None:
        self._steps = steps
        self._views: dict[int, Node] = {}
        made: dict[str, TensorSpec] = {}
        life: dict[str, tuple[int, int]] = {}
        parent: dict[str, str] = {}
        for number, step in enumerate(steps):
            for name in step.spec.inputs:
                if name in life:
                    life[name] = (life[name][0], number)
            (*_, node) = step.spec.nodes
            free = not step.planned and not set(step.spec.outputs) & set(bound)
            if free and is_view(step.spec.tensors, node):
                self._views[number] = node
                parent[node.results[0]] = node.operands[0]
                life[node.results[0]] = (number, number)
                continue
            for name in step.spec.outputs:
                life[name] = (number, number)
                if name not in bound:
                    made[name] = step.spec.tensors[name]
        self._inside: dict[str, tuple[str, int]] = {}  # a slice: whose, and its offset in elements
        self.free = set(self._views)
        for number, step in enumerate(steps):
            (*_, node) = step.spec.nodes
            if step.planned or node.op != "concat":
                continue
            found = slots(step.spec.tensors, node)
            mine = {n: at for n, at in found.items() if n in made and n not in self._inside}
            for name, offset in mine.items():
                self._inside[name] = (node.results[0], offset)
                parent[name] = node.results[0]
            if set(mine) == set(node.operands) and len(mine) == len(node.operands):
                self.free.add(number)
        roots = {name: spec for name, spec in made.items() if name not in self._inside}
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
        needs += [Need(step.workspace_bytes, at, at) for at, step in enumerate(steps)]
        offsets, self.size_bytes = place(needs)
        self._roots = {
            name: (spec, offset)
            for (name, spec), offset in zip(roots.items(), offsets, strict=False)
        }
        self._slices = {name: made[name] for name in self._inside}
        self.scratch = offsets[len(roots) :]

    def tensors(
        self, block: torch.Tensor, bound: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Every tensor by name, those between the steps in ``block``, of bytes."""
        values = dict(bound)
        for name, (spec, offset) in self._roots.items():
            flat = block[offset : offset + spec.extent * spec.dtype.itemsize]
            values[name] = flat.view(spec.dtype).as_strided(spec.shape, spec.stride)
        for name in self._slices:
            self._slice(name, values)
        for number, node in self._views.items():
            eager.view(node, self._steps[number].spec, values)
        return values

    def _slice(self, name: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
        if name not in values:
            whole, offset = self._inside[name]
            source, spec = self._slice(whole, values), self._slices[name]
            values[name] = source.as_strided(
                spec.shape, spec.stride, source.storage_offset() + offset
            )
        return values[name]
