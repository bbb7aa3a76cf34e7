"""Memory between the steps of a program.

:class:`Layout` plans one block, used again and again: tensors that never live together share it.
:class:`Turns` plans memory of an allocator: each tensor is made before the step that writes it, and
let go behind the last that reads it. What is memory of another tensor (see
:mod:`~cudnngraph.partition.aliases`) takes none of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ..ir.spec import ALIGNMENT_BYTES, GraphSpec, TensorSpec, round_up
from .aliases import Location, Made, aliases
from .analysis import compute_nodes

Life = tuple[int, int]  # the first and the last step
SUBALLOCATION_BYTES = 256  # tensors in a block begin at multiples, as those of torch's allocator


@dataclass(frozen=True)
class Lifetime:
    """``size_bytes`` of memory from step ``first`` to step ``last``, both included."""

    size_bytes: int
    first: int
    last: int


def assign_offsets(needs: Sequence[Lifetime]) -> tuple[list[int], int]:
    """An offset for each need, and the bytes that they take together.

    The largest is placed first, each as low as those that live at the same time allow. Offsets are
    multiples of :data:`SUBALLOCATION_BYTES`.
    """
    offsets = [0] * len(needs)
    placed: list[tuple[int, int, int, int]] = []  # from step to step, from byte to byte
    total = 0
    for index in sorted(range(len(needs)), key=lambda i: -needs[i].size_bytes):
        size, first, last = needs[index].size_bytes, needs[index].first, needs[index].last
        if not size:
            continue
        offset = 0
        for start, stop in sorted([(a, b) for x, y, a, b in placed if x <= last and first <= y]):
            if offset + size <= start:
                break
            offset = max(offset, round_up(stop, SUBALLOCATION_BYTES))
        offsets[index] = offset
        placed.append((first, last, offset, offset + size))
        total = max(total, offset + size)
    return offsets, total


@dataclass(frozen=True)
class StepMemory:
    """A step as the layout sees it: its graph, whether a plan runs it, scratch memory of that."""

    spec: GraphSpec
    planned: bool
    workspace_bytes: int

    def made(self) -> Made:
        """The step as its aliases see it."""
        nodes = compute_nodes(self.spec.nodes)
        node = nodes[0] if len(nodes) == 1 and not self.planned else None
        return Made(self.spec.tensors, self.spec.outputs, node)


class Layout:
    """The places of all tensors of ``steps`` but those in ``bound``, which the caller has.

    ``order`` has them, each behind the one that it lies in. ``size_bytes`` is what the block has to
    hold, ``scratch`` the offset of each step's scratch memory in it; the steps numbered in ``free``
    have nothing to run. A step may be running ``until`` a later one, whose number stands there.
    """

    def __init__(
        self,
        steps: Sequence[StepMemory],
        bound: Collection[str],
        until: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        known = aliases([step.made() for step in steps], bound)
        self.free = known.free
        inside = {each.form.name: str(each.root) for each in known.order}
        roots = {
            name: step.spec.tensors[name]
            for step in steps
            for name in step.spec.outputs
            if name not in bound and name not in inside
        }
        lives = _lives(_read(steps, bound, until), inside)
        needs = [
            Lifetime(spec.extent * spec.dtype.itemsize, *lives[name])
            for name, spec in roots.items()
        ]
        needs += [
            Lifetime(step.workspace_bytes, at, until.get(at, at)) for at, step in enumerate(steps)
        ]
        offsets, total = assign_offsets(needs)
        self.size_bytes = round_up(total, ALIGNMENT_BYTES)  # whole elements of every dtype
        self.scratch = offsets[len(roots) :]
        self.order = [
            Location(spec, None, offset // spec.dtype.itemsize)
            for spec, offset in zip(roots.values(), offsets, strict=False)
        ]
        self.order += known.order

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


@dataclass(frozen=True)
class Turns:
    """Which tensors are made before each step, and which are let go: those read before it.

    Workspace of a step is a tensor of bytes by the step's number. Outputs are never let go. What is
    small is in one block of ``block_bytes``, for the whole run, at ``offsets``: an allocation takes
    the host as long as a launch.
    """

    makes: tuple[tuple[TensorSpec | int, ...], ...]
    drops: tuple[tuple[str | int, ...], ...]
    offsets: Mapping[str | int, int]
    block_bytes: int

    @classmethod
    def of(
        cls,
        steps: Sequence[StepMemory],
        inputs: Collection[str],
        outputs: Collection[str],
        until: Mapping[int, int] = MappingProxyType({}),
    ) -> Turns:
        """Those of ``steps``, which may be running ``until`` a later one."""
        known = aliases([step.made() for step in steps], {*inputs, *outputs})
        inside = {each.form.name: str(each.root) for each in known.order}
        lives = _lives(_read(steps, {*inputs, *outputs}, until, inputs), inside)
        forms = {name: step.spec.tensors[name] for step in steps for name in step.spec.outputs}
        made: dict[str | int, Lifetime] = {
            name: Lifetime(forms[name].extent * forms[name].dtype.itemsize, *life)
            for name, life in lives.items()
            if name not in inside and name not in inputs
        }
        for number, step in enumerate(steps):
            if step.workspace_bytes and number not in known.free:
                last = until.get(number, number)
                made[number] = Lifetime(step.workspace_bytes, number, last)
        offsets, block_bytes = _in_one_block(made, outputs)
        makes: list[list[TensorSpec | int]] = [[] for _ in steps]
        drops: list[list[str | int]] = [[] for _ in range(len(steps) + 1)]
        for name in inputs:
            drops[lives[name][1] + 1].append(name)
        for each, life in made.items():
            if each not in offsets:
                makes[life.first].append(each if isinstance(each, int) else forms[each])
                if each not in outputs:
                    drops[life.last + 1].append(each)
        return cls(tuple(map(tuple, makes)), tuple(map(tuple, drops)), offsets, block_bytes)


def within_peak(
    steps: Sequence[StepMemory],
    inputs: Collection[str],
    outputs: Collection[str],
    until: Mapping[int, int],
) -> dict[int, int]:
    """Those of ``until`` with which a run that lets go of what was read, as :class:`Turns` has it,
    takes at no time more memory than the most that it takes with none of them."""
    if not until:
        return {}
    known = aliases([step.made() for step in steps], {*inputs, *outputs})
    inside = {each.form.name: str(each.root) for each in known.order}
    lives = _lives(_read(steps, {*inputs, *outputs}, {}, inputs), inside)
    sizes: dict[str, int] = {}
    for step in steps:
        for name in (*step.spec.inputs, *step.spec.outputs):
            form = step.spec.tensors[name]
            sizes[name] = form.extent * form.dtype.itemsize
    lived = [step.workspace_bytes for step in steps]
    ends: dict[str, int] = {}
    for name in lives.keys() - inside.keys() & sizes.keys():
        first, last = lives[name]
        ends[name] = len(steps) - 1 if name in outputs else last
        for at in range(max(first, 0), ends[name] + 1):
            lived[at] += sizes[name]
    peak, found = max(lived, default=0), dict[int, int]()
    for number, last in until.items():
        spec, more = steps[number].spec, [0] * (last + 1)
        for at in range(number + 1, last + 1):
            more[at] += steps[number].workspace_bytes
        read = {_whole(name, inside) for name in (*spec.inputs, *spec.outputs)} & ends.keys()
        for name in read:
            for at in range(ends[name] + 1, last + 1):
                more[at] += sizes[name]
        if any(lived[at] + added > peak for at, added in enumerate(more) if added):
            continue
        found[number] = last
        ends |= {name: max(ends[name], last) for name in read}
        for at, added in enumerate(more):
            lived[at] += added
    return found


def _whole(name: str, inside: Mapping[str, str]) -> str:
    """What a tensor lies in."""
    while name in inside:
        name = inside[name]
    return name


SMALL_PART = 32  # what together is less than such a part of all tensors is small


def _in_one_block(
    made: Mapping[str | int, Lifetime], outputs: Collection[str]
) -> tuple[dict[str | int, int], int]:
    """The offsets of the smallest tensors that are no outputs in a block, and its bytes."""
    left = sum(life.size_bytes for life in made.values()) // SMALL_PART
    small: list[str | int] = []
    for each in sorted(made, key=lambda each: made[each].size_bytes):
        if each in outputs:
            continue
        left -= made[each].size_bytes
        if left < 0:
            break
        small.append(each)
    offsets, total = assign_offsets([made[each] for each in small])
    return dict(zip(small, offsets, strict=True)), round_up(total, ALIGNMENT_BYTES)


def _read(
    steps: Sequence[StepMemory],
    bound: Collection[str],
    until: Mapping[int, int],
    inputs: Collection[str] = (),
) -> dict[str, Life]:
    """From the step that makes each tensor to the last one that reads it; ``inputs`` are there
    before the first."""
    lives: dict[str, Life] = dict.fromkeys(inputs, (-1, -1))
    for number, step in enumerate(steps):
        stop = until.get(number, number)
        for name in step.spec.inputs:
            assert name in lives or name in bound, f"step {number} reads '{name}' too early"
            if name in lives:
                lives[name] = (lives[name][0], max(lives[name][1], stop))
        lives |= dict.fromkeys(step.spec.outputs, (number, stop))
    return lives


def _lives(read: Mapping[str, Life], inside: Mapping[str, str]) -> dict[str, Life]:
    """The same of each tensor with all that lies in it, which may be written before or read after
    the tensor itself."""
    lives = dict(read)
    for name, (start, stop) in read.items():
        while name in inside:
            name = inside[name]
            if name in lives:
                lives[name] = (min(lives[name][0], start), max(lives[name][1], stop))
    return lives
