"""Runs of a program in memory of torch's allocator, step by step.

A tensor is allocated before the step that writes it, and let go behind the last step that reads it;
so are the inputs, as far as nobody else holds them. A backward takes no more memory in this way
than autograd does, and shares what is free with everything else that torch runs. A call takes the
host longer than one in the pool's block: about 1 µs for each tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..backend import handles
from ..device.allocation import strided_copy
from ..executor import streams
from ..ir.spec import ALIGNMENT_BYTES, TensorSpec
from ..partition.memory import Turns, within_peak
from .fast_call import Allocated, Call, Turn, build_stepwise
from .process import PROCESS

if TYPE_CHECKING:
    from .program import Program


class Stepwise:
    """The steps of a program with the allocations between them."""

    def __init__(self, program: Program) -> None:
        spec = program.spec
        self._program = program
        self._threads = threading.local()
        bound = spec.inputs, spec.outputs
        self._until = within_peak(program.laid, *bound, program.until)
        turns = Turns.of(program.laid, *bound, self._until)
        places: dict[str | int, int] = {}
        places.update(program.places)
        for number, step in enumerate(program.laid):
            if step.workspace_bytes:
                places[number] = len(places)
        self._block = len(places)
        self._count, self._inputs = len(places) + 1, len(spec.inputs)
        self._outputs = slice(self._inputs, self._inputs + len(spec.outputs))
        lies = self._lies({places[each]: offset for each, offset in turns.offsets.items()})
        inside: dict[int, list[tuple[int, int]]] = {}
        for at, (root, past) in lies.items():
            inside.setdefault(root, []).append((at, past))

        def made(each: TensorSpec | int, workspace: int) -> Allocated:
            if isinstance(each, int):
                return Allocated(places[each], (workspace,), (1,), torch.uint8, ())
            place = places[each.name]
            lie = tuple(inside.get(place, ()))
            return Allocated(place, tuple(each.shape), tuple(each.stride), each.dtype, lie)

        self._steps: list[Turn] = []
        self._inside = [(at, tuple(inside[at])) for at in range(self._inputs) if at in inside]
        drops: list[int] = []
        pending: list[Allocated] = []
        if turns.block_bytes:
            lie = tuple(inside.get(self._block, ()))
            block = Allocated(self._block, (turns.block_bytes,), (1,), torch.uint8, lie)
            pending.append(block)
        running = set(program.running)
        for number, step in enumerate(program.laid):
            drops += [places[each] for each in turns.drops[number]]
            pending += [made(each, step.workspace_bytes) for each in turns.makes[number]]
            if number not in running:
                continue
            by_torch = program.torch_runs[number] is not None
            views = self._views(step.spec, lies) if by_torch else ()
            workspace = places.get(number)
            ports = [
                tuple(places[name] for name in names)
                for names in (step.spec.inputs, step.spec.outputs)
            ]
            self._steps.append(Turn(tuple(drops), tuple(pending), workspace, views, *ports))
            drops, pending = [], []
        self._last = tuple(pending)  # of steps that run nothing

    def _lies(self, offsets: dict[int, int]) -> dict[int, tuple[int, int]]:
        """The places of tensors that lie in another: its place, and the bytes past its start.
        Those at ``offsets`` lie in the block."""
        program = self._program
        bound = len(program.places) - len(program.behind)
        found = {at: (self._block, offset) for at, offset in offsets.items()}
        for at, (root, past) in enumerate(program.behind, bound):
            if root >= 0:
                whole, more = found.get(root, (root, 0))
                found[at] = whole, past + more
        return found

    def _views(
        self, spec: Any, lies: dict[int, tuple[int, int]]
    ) -> tuple[tuple[int, int, int, TensorSpec], ...]:
        """The tensors of a torch step that lie in others: place, that one's, elements, form."""
        found = []
        for name in dict.fromkeys((*spec.inputs, *spec.outputs)):
            at, form = self._program.places[name], spec.tensors[name]
            if at in lies:
                root, past = lies[at]
                found.append((at, root, past // form.dtype.itemsize, form))
        return tuple(found)

    def run(
        self, tensors: list[torch.Tensor], order: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """The outputs for inputs, in the order of the program's graph; empties ``tensors``. With
        ``order`` in that of another graph, in which its n-th tensor has the place ``order[n]``."""
        program, many = self._program, self._inputs
        short = self._short_call(order)
        results = None if short is None else short(tensors)
        if results is not None:
            return results
        values: list[Any] = [tensors[at] for at in order[:many]] if order else list(tensors)
        tensors.clear()
        if program.device.type == "cuda":
            with torch.cuda.device(program.device.index):
                made = self._run_here(values)
        else:
            made = self._run_here(values)
        if not order:
            return made
        by_place = dict(zip(order[many:], made, strict=True))
        return [by_place[at] for at in range(many, len(order))]

    def _short_call(self, order: Sequence[int] | None) -> Call | None:
        """The generated function for the graph that has this order, of this thread; None where
        there is none, or this is no time for it."""
        program = self._program
        if (
            not self._has_plans()
            or not program.runs_here
            or self._last
            or torch.cuda.is_current_stream_capturing()
        ):
            return None
        made: dict[tuple[int, ...] | None, Call | None] = getattr(self._threads, "made", {})
        self._threads.made = made
        key = None if order is None else tuple(order)
        if key not in made:
            places = list(range(self._outputs.stop))
            if order is not None:  # whose place is the program's, for each of the graph's
                places.sort(key=order.__getitem__)
            made[key] = build_stepwise(
                [(step, *run) for step, run in zip(self._steps, program.runs(), strict=True)],
                self._inside,
                places[: self._inputs],
                places[self._inputs :],
                self._block,
                program.device,
            )
        return made[key]

    def _has_plans(self) -> bool:
        return any(plan is not None for plan in self._program.plans())

    def _run_here(self, values: list[Any]) -> list[torch.Tensor]:
        program = self._program
        index, cuda = program.device.index, program.device.type == "cuda"
        addresses = [0] * self._count
        if program.uses_cudnn:
            for at, tensor in enumerate(values):
                addresses[at] = tensor.data_ptr()
                if addresses[at] % ALIGNMENT_BYTES or tensor.is_neg():
                    values[at] = strided_copy(tensor)
                    addresses[at] = values[at].data_ptr()
            del tensor  # or the last would be held
            for at, inside in self._inside:
                for place, past in inside:
                    addresses[place] = addresses[at] + past
        values += [None] * (self._count - len(values))
        runs = list(zip(self._steps, program.runners(), strict=True))
        if cuda and torch.cuda.is_current_stream_capturing():
            PROCESS.hold(program.plans())
            self._capture(runs, values, addresses)
        else:
            handle = handles.handle_on_current_stream(index) if self._has_plans() else None
            calls = [
                partial(self._whole, step, run, values, addresses, handle) for step, run in runs
            ]
            if not program.ran_first(calls):
                for call in calls:
                    call()
        for each in self._last:
            self._make(each, values, addresses)
        return values[self._outputs]

    def _capture(self, runs: Sequence[Any], values: list[Any], addresses: list[int]) -> None:
        """Run during a capture, steps side by side where they may be."""
        program = self._program
        numbered = dict(zip(program.running, runs, strict=True))

        def prepare(number: int) -> None:
            self._prepare(numbered[number][0], values, addresses)

        calls = {
            number: partial(self._start, step, run, values, addresses)
            for number, (step, run) in numbered.items()
        }
        streams.run(calls, self._until, program.sides, program.device.index, prepare)

    def _whole(
        self, step: Turn, run: Any, values: list[Any], addresses: list[int], handle: Any
    ) -> None:
        self._prepare(step, values, addresses)
        self._start(step, run, values, addresses, handle)

    def _prepare(self, step: Turn, values: list[Any], addresses: list[int]) -> None:
        """Let go of what was read, and allocate what is written."""
        for place in step.drops:
            values[place] = None
        for each in step.makes:
            self._make(each, values, addresses)

    def _make(self, each: Allocated, values: list[Any], addresses: list[int]) -> None:
        program = self._program
        made = torch.empty_strided(each.size, each.stride, dtype=each.dtype, device=program.device)
        values[each.place] = made
        if program.uses_cudnn:
            start = addresses[each.place] = made.data_ptr()
            for place, past in each.inside:
                addresses[place] = start + past

    def _start(
        self,
        step: Turn,
        run: Callable[..., None],
        values: list[Any],
        addresses: list[int],
        handle: Any,
    ) -> None:
        for at, root, past, form in step.views:
            source = values[root]
            if root == self._block:
                source = source.view(form.dtype)
            values[at] = source.as_strided(form.shape, form.stride, source.storage_offset() + past)
        scratch = 0 if step.workspace is None else addresses[step.workspace]
        run(addresses, values, scratch, handle)
        for view in step.views:
            values[view[0]] = None
