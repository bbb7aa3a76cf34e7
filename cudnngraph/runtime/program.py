"""The steps of a graph on one device, as a program that all graphs of one key share.

Plans belong to a thread, so a program replays its choices for every further thread that runs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from ..backend import handles
from ..backend.plan import Choice, Plan
from ..executor import reference, streams, torch_steps
from ..executor.plans import replay
from ..ir.key import step_digest
from ..ir.spec import GraphSpec, TensorSpec
from ..kernels.pieces import apart
from ..ops.table import OPS
from ..partition.analysis import compute_nodes
from ..partition.memory import Layout, StepMemory
from ..policy import Policy
from ..select.decision import Selection, StepPlan
from . import fast_call
from .first_launch import FirstRun
from .process import PROCESS
from .stepwise import Stepwise

Launch = Callable[[Any], None]

# A step of a direct run: addresses and tensors by place, its scratch memory, the handle.
Runner = Callable[[Sequence[int], Sequence[Any], int, Any], None]


class Program:
    """The steps of one key on one device, in canonical names, and their plans by thread."""

    def __init__(
        self,
        spec: GraphSpec,
        device: torch.device,
        selection: Selection,
        policy: Policy,
        tier: str,
        first: FirstRun | None = None,
    ) -> None:
        self.tier = tier
        self._first = first  # until it has been
        self.tuned = policy.tune == "autotune"
        self.spec = spec
        self.device = device
        self.steps = selection.steps
        self.imported = selection.imported
        self.uses_cudnn = any(step.choice is not None for step in self.steps)
        self._allow_tf32 = bool(policy.allow_tf32)
        self._threads = threading.local()
        self._threads.plans = selection.built
        self.laid = laid = [
            StepMemory(step.spec, step.choice is not None, step.workspace_bytes)
            for step in self.steps
        ]
        self.until = streams.overlappable(laid) if device.type == "cuda" else {}
        self.sides = streams.streams(device) if self.until else []
        self._layout = Layout(laid, {*spec.inputs, *spec.outputs}, self.until)
        self.scratch_bytes = self._layout.size_bytes
        free = self._layout.free
        self.running = [number for number in range(len(laid)) if number not in free]
        self._offsets = [self._layout.scratch[number] for number in self.running]
        self.torch_runs = tuple(
            None if step.choice is not None or number in free else self._torch_run(step)
            for number, step in enumerate(self.steps)
        )
        self._number_places()

    def direct_steps(self, order: Sequence[int] | None) -> fast_call.Steps | None:
        """Return the steps for :func:`fast_call.build_call`, or None if one is torch's."""
        if any(run is not None for run in self.torch_runs):
            return None
        steps = zip(self.steps, self.plans(), self._layout.scratch, strict=True)
        planned = [(step.spec, plan, offset) for step, plan, offset in steps if plan is not None]
        return fast_call.Steps(self.places, self.behind, order, planned, self.scratch_bytes)

    @cached_property
    def stepwise(self) -> Stepwise:
        """Runs in memory that is allocated step by step."""
        return Stepwise(self)

    def _number_places(self) -> None:
        """Give every tensor a place for direct runs: inputs, outputs, and the layout's."""
        places = self.places = {
            name: at for at, name in enumerate((*self.spec.inputs, *self.spec.outputs))
        }
        behind: list[tuple[int, int]] = []  # (place or -1 for the scratch memory, bytes past it)
        shows: dict[int, tuple[int, int, TensorSpec]] = {}  # (the same, elements past it, form)
        for each in self._layout.order:
            root = -1 if each.root is None else places[each.root]
            shows[len(places)] = (root, each.past, each.form)
            places[each.form.name] = len(places)
            behind.append((root, each.past * each.form.dtype.itemsize))
        self.behind = tuple(behind)
        needed: set[int] = set()  # by torch steps, which take tensors; a plan takes addresses
        for number, run in enumerate(self.torch_runs):
            spec = self.steps[number].spec
            wanted = [places[name] for name in (*spec.inputs, *spec.outputs)] if run else []
            while wanted:
                at = wanted.pop()
                if at in shows and at not in needed:
                    needed.add(at)
                    wanted.append(shows[at][0])
        self._shown = tuple((at, *shows[at]) for at in sorted(needed))

    def may_write_over(self) -> frozenset[tuple[str, str]]:
        """Outputs and inputs that may be the same memory: pointwise ops read an element before they
        write it, so an output may replace what no later step reads.

        Not where another output that has to do with it has a shape of its own, for which the input
        may be broadcast; nor where the step reads the input for what has nothing to do with the
        output: a kernel computes that in other blocks, which nothing waits for.
        """
        spec = self.spec
        nodes = [node for step in self.steps for node in step.spec.nodes]
        if not all(OPS[node.op].pointwise for node in nodes):
            return frozenset()
        alike = _of_one_shape(spec.outputs, [step.spec for step in self.steps])
        last = {name: number for number, step in enumerate(self.steps) for name in step.spec.inputs}
        written = {
            name: number for number, step in enumerate(self.steps) for name in step.spec.outputs
        }
        beside = _read_beside([step.spec for step in self.steps])
        return frozenset(
            (output, source)
            for output in spec.outputs
            for source in spec.inputs
            if output in alike
            and last.get(source, -1) <= written[output]
            and source not in beside[output]
        )

    def _torch_run(self, step: StepPlan) -> Callable[[Any, Any], None]:
        if self.device.type == "cpu":
            return partial(reference.run_into, step.spec)
        return torch_steps.prepare(step.spec, allow_tf32=self._allow_tf32, device=self.device)

    @property
    def runs_here(self) -> bool:
        """Whether it has run on this thread."""
        return self._first is None and getattr(self._threads, "runners", None) is not None

    def plans(self) -> Sequence[Plan | None]:
        """The plans of the steps, for this thread."""
        plans: Sequence[Plan | None] | None = getattr(self._threads, "plans", None)
        if plans is None:
            index = self.device.index
            made: dict[tuple[str, Choice], Plan] = {}
            found: list[Plan | None] = []
            for step in self.steps:
                if step.choice is None:
                    found.append(None)
                    continue
                like = (step_digest(step.spec), step.choice)
                if like not in made:
                    made[like] = replay(step.spec, step.choice, index)
                found.append(made[like])
            plans = self._threads.plans = tuple(found)
        return plans

    def launches(self, tensors: Mapping[str, torch.Tensor], stream: int) -> list[Launch]:
        """The launches, in order, on ``tensors`` (inputs and outputs); each takes the handle."""
        block, plans = None, self.plans()
        if self.scratch_bytes or self.device.type == "cuda":
            block = PROCESS.scratch(self.device.index, stream, self.scratch_bytes, plans)
        values = self._layout.tensors(block, tensors)
        base = 0 if block is None else block.data_ptr()
        steps = zip(plans, self._layout.scratch, strict=True)
        return [
            self._launch(number, plan, values, base + offset, block)
            for number, (plan, offset) in enumerate(steps)
            if number not in self._layout.free
        ]

    def _launch(
        self,
        number: int,
        plan: Plan | None,
        values: Mapping[str, torch.Tensor],
        scratch: int,
        block: torch.Tensor | None,
    ) -> Launch:
        step, run = self.steps[number], self.torch_runs[number]
        inputs = [values[name] for name in step.spec.inputs]
        outputs = [values[name] for name in step.spec.outputs]
        if plan is None:
            assert run is not None
            kind = self.device.type
            return lambda handle: _shielded(kind, run, inputs, outputs)
        pointers = plan.pointers([tensor.data_ptr() for tensor in (*inputs, *outputs)])
        return fast_call.PlanLaunch(plan, pointers, scratch, block)

    def runners(self) -> Sequence[Runner]:
        """What runs the steps that run anything, for this thread."""
        runners: Sequence[Runner] | None = getattr(self._threads, "runners", None)
        if runners is None:
            steps = zip(self.steps, self.plans(), self.torch_runs, strict=True)
            runners = self._threads.runners = tuple(
                self._runner(step.spec, plan, run)
                for step, plan, run in steps
                if plan is not None or run is not None
            )
        return runners

    def runs(self) -> list[tuple[Plan | None, Callable[[Any, Any], None] | None]]:
        """The plan of each step that runs anything, for this thread, or what runs it by torch on
        lists of inputs and outputs."""
        kind = self.device.type
        steps = zip(self.plans(), self.torch_runs, strict=True)
        return [
            (plan, None if run is None else partial(_shielded, kind, run))
            for plan, run in steps
            if plan is not None or run is not None
        ]

    def ran_first(self, calls: Sequence[Callable[[], None]]) -> bool:
        """Call what runs the steps, those that run anything, if that is to be watched."""
        first = self._first
        if first is None:
            return False
        first.run(zip(self.running, calls, strict=True))
        self._first = None
        return True

    def _runner(
        self,
        spec: GraphSpec,
        plan: Plan | None,
        torch_run: Callable[[Any, Any], None] | None,
    ) -> Runner:
        inputs, outputs = (
            tuple(self.places[name] for name in names) for names in (spec.inputs, spec.outputs)
        )
        if plan is not None:
            start = plan.launcher(inputs + outputs)

            def launch(addresses: Any, values: Any, scratch: int, handle: Any) -> None:
                start(addresses, scratch, handle)

            return launch
        assert torch_run is not None
        kind = self.device.type

        def run(addresses: Any, values: Any, scratch: int, handle: Any) -> None:
            _shielded(
                kind, torch_run, [values[at] for at in inputs], [values[at] for at in outputs]
            )

        return run

    def run(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """Run once on ``tensors``, inputs and then outputs in the order of the program's graph, on
        the current stream of its device. ``addresses`` are theirs, where cuDNN is used."""
        if not self.uses_cudnn and not self.scratch_bytes:
            self._steps_on(tensors, addresses, None, None)
            return
        index = self.device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self._run_here(tensors, addresses)
        else:
            self._run_here(tensors, addresses)

    def _run_here(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        index = self.device.index
        block = PROCESS.scratch(index, handles.raw_stream(index), self.scratch_bytes, self.plans())
        handle = handles.handle_on_current_stream(index) if self.uses_cudnn else None
        self._steps_on(tensors, addresses, block, handle)

    def _steps_on(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: list[int],
        block: torch.Tensor | None,
        handle: Any,
    ) -> None:
        base = 0
        if self.uses_cudnn and block is not None:
            base = block.data_ptr()
        if addresses:
            for root, past in self.behind:
                addresses.append(past + (base if root < 0 else addresses[root]))
        values: Sequence[Any] = tensors
        if self._shown:
            values = [*tensors, *[None] * len(self.behind)]
            for at, root, offset, form in self._shown:
                if root < 0:
                    assert block is not None
                    source = block.view(form.dtype)
                else:
                    source = values[root]
                    offset += source.storage_offset()
                values[at] = source.as_strided(form.shape, form.stride, offset)
        runs = zip(self.runners(), self._offsets, strict=True)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing and self.until:
            self.play([partial(run, addresses, values, base + offset) for run, offset in runs])
            return
        if self._first is not None and not capturing:
            calls = [partial(run, addresses, values, base + at, handle) for run, at in runs]
            if self.ran_first(calls):
                return
            for call in calls:  # another thread was done before
                call()
            return
        for run, offset in runs:
            run(addresses, values, base + offset, handle)

    def play(self, calls: Sequence[Launch]) -> None:
        """Call what runs the steps, those that run anything, during a capture."""
        index = self.device.index
        if not self.until:
            handle = handles.handle_on_current_stream(index) if self.uses_cudnn else None
            for call in calls:
                call(handle)
            return
        by_number = dict(zip(self.running, calls, strict=True))
        streams.run(by_number, self.until, self.sides, index)


def _of_one_shape(outputs: Sequence[str], steps: Sequence[GraphSpec]) -> set[str]:
    """The outputs that steps write, but for those beside which one of another shape is made."""
    tensors = {name: tensor for spec in steps for name, tensor in spec.tensors.items()}
    found: set[str] = set()
    for group in apart([node for spec in steps for node in compute_nodes(spec.nodes)], tensors):
        made = {name for node in group for name in node.results}.intersection(outputs)
        if len({tensors[name].shape for name in made}) == 1:
            found |= made
    return found


def _read_beside(steps: Sequence[GraphSpec]) -> dict[str, frozenset[str]]:
    """For each result what its step reads for results that have nothing to do with it."""
    found: dict[str, frozenset[str]] = {}
    for spec in steps:
        groups = apart(compute_nodes(spec.nodes), spec.tensors)
        readers: dict[str, set[int]] = {}
        for number, group in enumerate(groups):
            for node in group:
                for name in node.operands:
                    readers.setdefault(name, set()).add(number)
        for number, group in enumerate(groups):
            others = frozenset(name for name, of in readers.items() if of - {number})
            found |= {name: others for node in group for name in node.results}
    return found


def _shielded(kind: str, run: Callable[[Any, Any], None], inputs: Any, outputs: Any) -> None:
    """Without autograd, and in the dtypes of the graph, whatever context the caller is in."""
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            _shielded(kind, run, inputs, outputs)
    elif torch.is_grad_enabled():
        with torch.no_grad():
            run(inputs, outputs)
    else:
        run(inputs, outputs)
