"""Compile a frozen graph, check tensors against it, run it.

An :class:`Executable` runs the steps that :mod:`~cudnngraph.select.heuristic` chose. What is the
same for two graphs of one key, the program, is kept in memory and shared. Plans belong to a thread,
so a program replays its choices for every further thread that runs it.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from plans_cache.workspace import WorkspacePool

from .. import settings
from ..arguments import NotPlain, checked, is_a, items, shown, unreadable, without_memory
from ..backend import env
from ..backend.plan import Choice, Plan, multiplies_float32, refuse_during_capture, replay
from ..cache import lookup, stats
from ..cache.stats import CacheStats
from ..device.allocation import lasting
from ..errors import BackendUnavailable, BindError, CaptureError, GraphError, PolicyError, Problem
from ..executor import reference, torch_steps
from ..executor.memory import Laid, Layout
from ..ir.key import Key, graph_key, step_digest
from ..ir.spec import GraphSpec, TensorSpec, print_spec, same_layout
from ..ops.attention.checks import ATTENTION
from ..ops.base import dtype_name
from ..ops.table import OPS, is_default
from ..policy import Policy
from ..select.autotune import autotune
from ..select.decision import Decision, Selection, StepPlan
from ..select.guard import Builder, GuardedBench, how
from ..select.heuristic import heuristic, reference_only
from ..select.progress import progress_bar
from ..select.rules import torch_only
from . import fast_call, streams
from .first_launch import FirstRun

ALIGNMENT_BYTES = 16  # cuDNN's engines read in vectors of up to 16 bytes
_PROGRAMS_KEPT = 1024


# -- policy ----------------------------------------------------------------------------------------


def _torch_allows_tf32(spec: GraphSpec) -> bool:
    """torch's own switches: cuDNN's for convolutions (on by default), matmul's for the rest (off).

    A graph with both may use TF32 where both allow it; one that multiplies no float32 has no use
    for it, and keys alike whatever the switches say.
    """
    ops = {node.op for node in spec.nodes} if multiplies_float32(spec) else set()
    newer: Any = torch.backends
    allowed = []
    if ops & {"conv", "conv_transpose"}:
        try:
            allowed.append(bool(torch.backends.cudnn.allow_tf32))
        except RuntimeError:  # the newer per-op switches are in use
            allowed.append(str(newer.cudnn.conv.fp32_precision) == "tf32")
    if ops & {"matmul", *ATTENTION}:
        try:
            allowed.append(bool(torch.backends.cuda.matmul.allow_tf32))
        except RuntimeError:
            allowed.append(str(newer.cuda.matmul.fp32_precision) == "tf32")
    return bool(allowed) and all(allowed)


def resolve_policy(policy: Policy | None, options: Mapping[str, Any], spec: GraphSpec) -> Policy:
    """The policy with keyword options applied; what it leaves open is read from the settings, and
    from torch's TF32 switches for ``spec``."""
    known = [field.name for field in fields(Policy)]
    if not (policy is None or isinstance(policy, Policy)):
        raise PolicyError(f"policy {is_a(policy)}; expected a cudnngraph.Policy or None")
    unknown = [name for name in options if name not in known]
    if unknown:
        raise PolicyError(f"unknown option {', '.join(unknown)}; a policy has {', '.join(known)}")
    policy = replace(policy or Policy(), **options)
    if policy.tune is None:
        policy = replace(policy, tune=settings.current().tune)
    if policy.verify is None:
        policy = replace(policy, verify=settings.current().verify)
    if policy.allow_tf32 is None:
        policy = replace(policy, allow_tf32=_torch_allows_tf32(spec))
    return policy


# -- programs --------------------------------------------------------------------------------------


def _allocate(device: int, stream: int, size_bytes: int) -> torch.Tensor:
    whole = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # so that it can show any dtype
    return torch.empty(whole, dtype=torch.uint8, device=torch.device("cuda", device))


def _allocate_to_keep(device: int, stream: int, size_bytes: int) -> torch.Tensor:
    on = torch.device("cuda", device)
    return lasting(on, partial(_allocate, device, stream, size_bytes))


WORKSPACE: WorkspacePool[torch.Tensor] = WorkspacePool(_allocate_to_keep)

Launch = Callable[[Any], None]

# A step of a direct run: addresses and tensors by place, the scratch memory, the handle.
_Runner = Callable[[Sequence[int], Sequence[Any], int, Any], None]

# What CUDA graphs that others make hold pointers into: plans, with their kernels and constants.
# Never let go, for nothing tells when a graph is.
_captured: dict[int, Any] = {}


class _Recording(threading.local):
    """The same for a graph that is made here, on this thread, now: it goes with the graph."""

    held: dict[int, Any] | None = None


_recording = _Recording()


def _scratch(device: int, stream: int, size_bytes: int, plans: Any) -> torch.Tensor | None:
    """Scratch memory for one run: the pool's, or while a CUDA graph is captured the graph's own.

    torch allocates what is asked for during a capture from memory that belongs to the graph, uses
    it again later in the same graph, and frees it with the graph. The plans are kept.
    """
    if torch.cuda.is_current_stream_capturing():
        held = _captured if _recording.held is None else _recording.held
        held[id(plans)] = plans
        return _allocate(device, stream, size_bytes) if size_bytes else None
    return WORKSPACE.get(device, stream, size_bytes) if size_bytes else None


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
        self.uses_cudnn = any(step.choice is not None for step in self.steps)
        self._allow_tf32 = bool(policy.allow_tf32)
        self._threads = threading.local()
        self._threads.plans = selection.built
        laid = [
            Laid(step.spec, step.choice is not None, step.workspace_bytes) for step in self.steps
        ]
        self._until = streams.beside(laid) if device.type == "cuda" else {}
        self._sides = streams.streams(device) if self._until else []
        self._layout = Layout(laid, {*spec.inputs, *spec.outputs}, self._until)
        self.scratch_bytes = self._layout.size_bytes
        free = self._layout.free
        self._torch_runs = tuple(
            None if step.choice is not None or number in free else self._torch_run(step)
            for number, step in enumerate(self.steps)
        )
        self._number_places()

    def direct_steps(self, order: Sequence[int] | None) -> fast_call.Steps | None:
        """What :func:`direct.call_of` takes, for this thread; None where a step is torch's."""
        if any(run is not None for run in self._torch_runs):
            return None
        steps = zip(self.steps, self._plans(), self._layout.scratch, strict=True)
        planned = [(step.spec, plan, offset) for step, plan, offset in steps if plan is not None]
        return fast_call.Steps(self._places, self._behind, order, planned, self.scratch_bytes)

    def _number_places(self) -> None:
        """Give every tensor a place for direct runs: inputs, outputs, and the layout's."""
        places = self._places = {
            name: at for at, name in enumerate((*self.spec.inputs, *self.spec.outputs))
        }
        behind: list[tuple[int, int]] = []  # (place or -1 for the scratch memory, bytes past it)
        shows: dict[int, tuple[int, int, TensorSpec]] = {}  # (the same, elements past it, form)
        for each in self._layout.order:
            root = -1 if each.root is None else places[each.root]
            shows[len(places)] = (root, each.past, each.form)
            places[each.form.name] = len(places)
            behind.append((root, each.past * each.form.dtype.itemsize))
        self._behind = tuple(behind)
        needed: set[int] = set()  # by torch steps, which take tensors; a plan takes addresses
        for number, run in enumerate(self._torch_runs):
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

        Not where another output has a shape of its own, for which the input may be broadcast.
        """
        spec = self.spec
        nodes = [node for step in self.steps for node in step.spec.nodes]
        shapes = {spec.tensors[name].shape for name in spec.outputs}
        if len(shapes) > 1 or not all(OPS[node.op].pointwise for node in nodes):
            return frozenset()
        last = {name: number for number, step in enumerate(self.steps) for name in step.spec.inputs}
        written = {
            name: number for number, step in enumerate(self.steps) for name in step.spec.outputs
        }
        return frozenset(
            (output, source)
            for output in spec.outputs
            for source in spec.inputs
            if output in written and last.get(source, -1) <= written[output]
        )

    def _torch_run(self, step: StepPlan) -> Callable[[Any, Any], None]:
        if self.device.type == "cpu":
            return partial(reference.run_into, step.spec)
        return torch_steps.prepare(step.spec, allow_tf32=self._allow_tf32, device=self.device)

    @property
    def runs_here(self) -> bool:
        """Whether it has run on this thread."""
        return getattr(self._threads, "runners", None) is not None

    def _plans(self) -> Sequence[Plan | None]:
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
        """What to call, in order, with the handle, to run on ``tensors`` (inputs and outputs)."""
        block, plans = None, self._plans()
        if self.scratch_bytes or self.device.type == "cuda":
            block = _scratch(self.device.index, stream, self.scratch_bytes, plans)
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
        step, run = self.steps[number], self._torch_runs[number]
        inputs = [values[name] for name in step.spec.inputs]
        outputs = [values[name] for name in step.spec.outputs]
        if plan is None:
            assert run is not None
            kind = self.device.type
            return lambda handle: _shielded(kind, run, inputs, outputs)
        pointers = plan.pointers([tensor.data_ptr() for tensor in (*inputs, *outputs)])
        return fast_call.PlanLaunch(plan, pointers, scratch, block)

    def _runners(self) -> Sequence[_Runner]:
        """The steps of a direct run, for this thread."""
        runners: Sequence[_Runner] | None = getattr(self._threads, "runners", None)
        if runners is None:
            steps = zip(
                self.steps, self._plans(), self._torch_runs, self._layout.scratch, strict=True
            )
            runners = tuple(
                self._runner(step.spec, plan, run, offset)
                for step, plan, run, offset in steps
                if plan is not None or run is not None
            )
            if self._first is None:
                self._threads.runners = runners
            elif not torch.cuda.is_current_stream_capturing():
                return (partial(self._run_first, runners),)
        return runners

    def _run_first(
        self, runners: Sequence[_Runner], addresses: Any, values: Any, base: int, handle: Any
    ) -> None:
        """All steps of a direct run, the first."""
        calls = [partial(run, addresses, values, base, handle) for run in runners]
        if not self.ran_first(calls):  # another thread was done before
            for call in calls:
                call()
        self._threads.runners = runners

    def ran_first(self, calls: Sequence[Callable[[], None]]) -> bool:
        """Call what runs the steps, those that run anything, if that is to be watched."""
        first = self._first
        if first is None:
            return False
        first.run(zip(self._running(), calls, strict=True))
        self._first = None
        return True

    def _running(self) -> list[int]:
        """The numbers of the steps that run anything."""
        return [number for number in range(len(self.steps)) if number not in self._layout.free]

    def _runner(
        self,
        spec: GraphSpec,
        plan: Plan | None,
        torch_run: Callable[[Any, Any], None] | None,
        offset: int,
    ) -> _Runner:
        inputs, outputs = (
            tuple(self._places[name] for name in names) for names in (spec.inputs, spec.outputs)
        )
        if plan is not None:
            start = plan.launcher(inputs + outputs)

            def launch(addresses: Any, values: Any, base: int, handle: Any) -> None:
                start(addresses, base + offset, handle)

            return launch
        assert torch_run is not None
        kind = self.device.type

        def run(addresses: Any, values: Any, base: int, handle: Any) -> None:
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
        block = _scratch(index, env.raw_stream(index), self.scratch_bytes, self._plans())
        handle = env.handle_on_current_stream(index) if self.uses_cudnn else None
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
            for root, past in self._behind:
                addresses.append(past + (base if root < 0 else addresses[root]))
        values: Sequence[Any] = tensors
        if self._shown:
            values = [*tensors, *[None] * len(self._behind)]
            for at, root, offset, form in self._shown:
                if root < 0:
                    assert block is not None
                    source = block.view(form.dtype)
                else:
                    source = values[root]
                    offset += source.storage_offset()
                values[at] = source.as_strided(form.shape, form.stride, offset)
        if self._until and torch.cuda.is_current_stream_capturing():
            self.play([partial(run, addresses, values, base) for run in self._runners()])
            return
        for run in self._runners():
            run(addresses, values, base, handle)

    def play(self, calls: Sequence[Launch]) -> None:
        """Call what runs the steps, those that run anything, during a capture."""
        index = self.device.index
        if not self._until:
            handle = env.handle_on_current_stream(index) if self.uses_cudnn else None
            for call in calls:
                call(handle)
            return
        by_number = dict(zip(self._running(), calls, strict=True))
        streams.run(by_number, self._until, self._sides, index)


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


_programs: OrderedDict[tuple[str, torch.device, bool], Program] = OrderedDict()
_programs_lock = threading.Lock()
_abandoned: list[Any] = []


def _after_fork() -> None:
    """A child drops the parent's plans and workspaces without destroying them."""
    global _programs, _programs_lock, WORKSPACE
    _abandoned.append((_programs, WORKSPACE))
    _programs, _programs_lock = OrderedDict(), threading.Lock()
    WORKSPACE = WorkspacePool(_allocate_to_keep)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _program(spec: GraphSpec, device: torch.device, policy: Policy, key: Key) -> Program:
    by_reference = settings.current().backend == "reference"
    place = (key.digest, device, by_reference)
    with _programs_lock:
        program = _programs.get(place)
        if program is not None and (program.tuned or policy.tune != "autotune"):
            _programs.move_to_end(place)
            stats.COUNTERS.served("memory")
            return program
    spec = canonical(spec)
    tier = "reference"
    if device.type == "cpu":
        selection = reference_only(spec, "the tensors are on the CPU")
    elif by_reference:
        selection = reference_only(spec, "CUDNNGRAPH_BACKEND=reference")
    else:
        index = device.index
        refuse_during_capture()
        kept = lookup.Rejected(index)

        def build() -> Selection:
            if policy.tune == "autotune" and torch_only(spec) is None:
                with progress_bar("tuning", after_s=2.0) as tell:
                    bench = GuardedBench(policy, device, kept, partial(lookup.alone_on, index))
                    return autotune(spec, policy, bench, tell)
            first = Builder(policy, index, kept)
            return heuristic(spec, policy, first, first.expect)

        with torch.cuda.device(device):
            if torch_only(spec) is None:
                selection, tier = lookup.selection_for(spec, policy, key, index, build)
            else:
                selection, tier = build(), "torch"
    if tier in ("reference", "torch"):
        stats.COUNTERS.served(tier)
    first: FirstRun | None = None
    if tier == "built" and how(policy) != "off":
        first = FirstRun(selection.steps, policy, device, lookup.Rejected(device.index))
    program = Program(spec, device, selection, policy, tier, first)
    with _programs_lock:
        _programs[place] = program
        while len(_programs) > _PROGRAMS_KEPT:
            _programs.popitem(last=False)
    return program


# -- checks at bind --------------------------------------------------------------------------------


def _wrong(spec: TensorSpec, tensor: Any, device: torch.device, aligned: bool) -> Iterator[Problem]:
    where = f"tensor '{spec.name}'"
    unfit = unreadable(where, tensor)
    if unfit:
        yield from unfit
        return
    if tensor.device != device:
        yield Problem(where, f"is on {tensor.device}", str(device), f"x.to('{device}')")
    if tensor.dtype != spec.dtype:
        yield Problem(where, f"is {dtype_name(tensor.dtype)}", dtype_name(spec.dtype), "convert it")
    if tensor.shape != spec.shape:
        yield Problem(
            where,
            f"has shape {tuple(tensor.shape)}",
            f"{spec.shape}",
            "compile a graph of that shape",
        )
    elif tensor.stride() != spec.stride and not same_layout(
        spec.shape, tensor.stride(), spec.stride
    ):
        layout = spec.layout()
        mend = (
            f"x.contiguous(memory_format=torch.{layout}), "
            f"or declare stride={tuple(tensor.stride())}"
            if layout == "channels_last" and len(spec.shape) in (4, 5)
            else f"make it so, or declare stride={tuple(tensor.stride())}"
        )
        yield Problem(
            where, f"has stride {tuple(tensor.stride())}", f"{spec.stride}, {layout}", mend
        )
    memory = without_memory(where, tensor)
    yield from memory
    if aligned and not memory and tensor.is_cuda and tensor.data_ptr() % ALIGNMENT_BYTES:
        past = tensor.data_ptr() % ALIGNMENT_BYTES
        yield Problem(
            where,
            f"starts {past} bytes past a multiple of {ALIGNMENT_BYTES}",
            f"a pointer aligned to {ALIGNMENT_BYTES} bytes",
            "clone() it",
        )


def _fit(tensors: Sequence[Any], forms: Sequence[fast_call.Form], device: torch.device) -> bool:
    """Whether tensors have these shapes, strides and dtypes and are on the device."""
    if len(tensors) != len(forms):
        return False
    try:
        for tensor, (shape, stride, dtype) in zip(tensors, forms, strict=True):
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.dtype is not dtype
                or tensor.shape != shape
                or tensor.stride() != stride
                or tensor.device != device
            ):
                return False
    except RuntimeError:  # it has no shape, or no strides
        return False
    return True


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return (0, 0)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return (start, start + (last + 1) * tensor.element_size())


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    (a0, a1), (b0, b1) = _range(a), _range(b)
    return a0 < b1 and b0 < a1 and not _side_by_side(a, b)


def _side_by_side(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are slices of one buffer that share no element.

    There is a pitch such that both step by multiples of it and fill intervals within it that do not
    meet: channels of a channels_last image, columns of a matrix.
    """
    origin = min(a.data_ptr(), b.data_ptr())
    both = [
        (
            tensor.data_ptr() - origin,
            tensor.element_size(),
            [
                (n, step * tensor.element_size())
                for n, step in zip(tensor.shape, tensor.stride(), strict=True)
                if n > 1
            ],
        )
        for tensor in (a, b)
    ]
    for pitch in {step for _, _, steps in both for _, step in steps if step > 0}:
        spans = []
        for start, size, steps in both:
            if any(step > pitch and step % pitch for _, step in steps):
                break
            inner = size + sum((n - 1) * step for n, step in steps if step < pitch)
            spans.append((start % pitch, start % pitch + inner))
        if len(spans) == 2 and max(stop for _, stop in spans) <= pitch:
            (a0, a1), (b0, b1) = spans
            if a1 <= b0 or b1 <= a0:
                return True
    return False


# -- executables -----------------------------------------------------------------------------------

Over = tuple[tuple[int, int], ...]


def transforming() -> bool:
    """Whether a function transform of torch is at work, or forward-mode differentiation."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class _Calls(threading.local):
    """The short ways to call an executable, of this thread; None where there is none."""

    def __init__(self) -> None:
        self.made: dict[tuple[bool, Over], fast_call.Call | None] = {}


class Executable:
    """A compiled graph: call it with tensors, let it write into yours, or bind them once.

    ``spec`` is the graph, ``device`` where it runs, ``key`` what its plans are cached by,
    ``policy`` what they were chosen by. May be used from several threads and on any stream.
    """

    def __init__(
        self, spec: GraphSpec, device: torch.device, policy: Policy, key: Key, program: Program
    ) -> None:
        self.spec = spec
        self.device = device
        self.policy = policy
        self.key = key
        self._program = program
        self._names = canonical_tensor_names(spec)
        self._result: Any = None
        if len(spec.outputs) > 1:  # making a class takes 0.3 ms
            made: Callable[[], Any] = partial(namedtuple, f"{spec.name}_result", spec.outputs)
            self._result = _once(spec, "result", made)
        forms = [spec.tensors[name] for name in (*spec.inputs, *spec.outputs)]
        self._forms = tuple((form.shape, form.stride, form.dtype) for form in forms)
        self._bytes = tuple(form.extent * form.dtype.itemsize for form in forms)
        self._input_forms = self._forms[: len(spec.inputs)]
        self._output_forms = self._forms[len(spec.inputs) :]
        mine = {self._names[name]: at for at, name in enumerate((*spec.inputs, *spec.outputs))}
        order = [mine[name] for name in (*program.spec.inputs, *program.spec.outputs)]
        self._order = None if order == sorted(order) else tuple(order)
        self._in_place = program.may_write_over()
        self._calls = _Calls()

    # -- running -------------------------------------------------------------------------------

    def __call__(self, /, *args: torch.Tensor, **tensors: torch.Tensor) -> Any:
        """Run on inputs given by name, or in the order of declaration; allocate the outputs.

        Returns the output, or a named tuple of them when there are several. Raises
        :class:`BindError` with every mistake.
        """
        if transforming():
            return self._transformed(args, tensors)
        if not tensors:
            result = self.again(args)
            if result is not None:
                return result
        ordered = self._ordered(args, tensors, self.spec.inputs)
        if ordered is None:
            return self.call(self._checked(args, tensors))
        return self.call(ordered, checked=False)

    def _transformed(self, args: Sequence[Any], tensors: Mapping[str, Any]) -> Any:
        from .transforms import Transformed

        made = Transformed(self.spec, self.device, self.policy, trains=False)
        results = made(self.fitting(args, tensors))
        return results[0] if len(results) == 1 else self._result(*results)

    def fitting(self, args: Sequence[Any], tensors: Mapping[str, Any]) -> list[torch.Tensor]:
        """The inputs in order, of any strides. Raises :class:`BindError` with every mistake."""
        problems: list[Problem] = []
        given = self._by_name(args, tensors, self.spec.inputs, problems)
        for name in self.spec.inputs:
            form, tensor = self.spec.tensors[name], given.get(name)
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                form = replace(form, stride=tensor.stride())
            if name in given:
                problems += _wrong(form, tensor, self.device, aligned=False)
        if problems:
            raise BindError(self.spec.name, problems)
        return [given[name] for name in self.spec.inputs]

    def call(
        self, tensors: Sequence[torch.Tensor], *, checked: bool = True, over: Over = ()
    ) -> Any:
        """Like a call, on inputs in order, that are known to fit where ``checked`` says so.

        With ``over``, of :meth:`outputs_for`, the first output alone is returned.
        """
        results = self.outputs_for(tensors, checked=checked, over=over)
        return results[0] if over or len(results) == 1 else self._result(*results)

    def _checked(self, args: Sequence[Any], tensors: Mapping[str, Any]) -> list[torch.Tensor]:
        problems: list[Problem] = []
        given = self._by_name(args, tensors, self.spec.inputs, problems)
        self._check(given, self.spec.inputs, problems, aligned=False)
        if problems:
            raise BindError(self.spec.name, problems)
        return [given[name] for name in self.spec.inputs]

    def fits(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors, in the order of the inputs, are exactly as declared: the quick check.

        One that is not may still be accepted, or is told what is wrong with it, by a call.
        """
        return _fit(tensors, self._input_forms, self.device)

    def outputs_for(
        self, tensors: Sequence[torch.Tensor], *, checked: bool = True, over: Over = ()
    ) -> list[torch.Tensor]:
        """The outputs in order, newly allocated, for inputs in order; see :meth:`call`.

        ``over`` has pairs of an output and an input of the same form: running statistics, which
        the output overwrites in place.
        """
        results = self._directly(tensors, checked, over)
        if results is not None:
            return results
        if not checked and not self.fits(tensors):
            tensors = self._checked(tensors, {})
        device, program = self.device, self._program
        values, starts = list(tensors), []
        if program.uses_cudnn:
            starts = [tensor.data_ptr() for tensor in values]
            for at, start in enumerate(starts):
                if start % ALIGNMENT_BYTES:
                    values[at] = strided_copy(values[at])
                    starts[at] = values[at].data_ptr()
        if over:
            places = dict(over)
            outputs = [
                values[places[at]]
                if at in places
                else torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for at, (shape, stride, dtype) in enumerate(self._output_forms)
            ]
        else:
            outputs = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for shape, stride, dtype in self._output_forms
            ]
        values += outputs
        if starts:
            starts += [tensor.data_ptr() for tensor in outputs]
        self._run_program(values, starts)
        for output, at in over:
            if outputs[output] is not tensors[at]:  # that was a copy at an aligned address
                tensors[at].copy_(outputs[output])
        return outputs

    def outputs_if_fit(self, tensors: Sequence[Any], over: Over = ()) -> list[torch.Tensor] | None:
        """:meth:`outputs_for` inputs in order; None if one is not exactly as declared."""
        results = self._directly(tensors, False, over)
        if results is None and self.fits(tensors):
            return self.outputs_for(tensors, over=over)
        return results

    def again(self, tensors: Sequence[Any], over: Over = ()) -> Any:
        """:meth:`call` for inputs in order; None if one is not exactly as declared."""
        results = self.outputs_if_fit(tensors, over)
        if results is None:
            return None
        return results[0] if over or len(results) == 1 else self._result(*results)

    def _directly(
        self, tensors: Sequence[Any], checked: bool, over: Over
    ) -> list[torch.Tensor] | None:
        """The outputs by the short way; None where the long one has to be taken."""
        made, key = self._calls.made, (checked, over)
        if key in made:
            call = made[key]
            return None if call is None else call(tensors)
        program = self._program
        if (
            program.uses_cudnn
            and program.runs_here
            and not torch.cuda.is_current_stream_capturing()
        ):
            steps = program.direct_steps(self._order)
            made[key] = None
            if steps is not None:
                forms, slots = (self._input_forms, self._output_forms), WORKSPACE.slots
                made[key] = fast_call.call_of(
                    steps, *forms, over, self.device, slots, checked=checked
                )
        elif not program.uses_cudnn:
            made[key] = None
        return None

    def run(self, /, *args: torch.Tensor, **tensors: torch.Tensor) -> None:
        """Run on inputs and into outputs, all given (by name, or inputs then outputs in order).

        Allocates no device memory once the workspace has grown to what the plans need; a torch step
        does allocate. Raises :class:`BindError` with every mistake.
        """
        names = (*self.spec.inputs, *self.spec.outputs)
        values = self._ordered(args, tensors, names)
        if values is None or not _fit(values, self._forms, self.device) or self._touch(values):
            given = self._all(args, tensors)
            values = [given[name] for name in names]
        uses_cudnn = self._program.uses_cudnn
        self._run_program(values, [tensor.data_ptr() for tensor in values] if uses_cudnn else [])

    def _run_program(self, values: Sequence[torch.Tensor], starts: list[int]) -> None:
        """Run on the tensors of the graph, in order, and their addresses."""
        order = self._order
        if order is not None:
            values = [values[at] for at in order]
            starts = [starts[at] for at in order] if starts else starts
        self._program.run(values, starts)

    def bind(self, /, *args: torch.Tensor, **tensors: torch.Tensor) -> BoundCall:
        """Check inputs and outputs once; the result is called with nothing, as often as wanted.

        The tensors' memory must stay where it is; the result keeps the tensors alive.
        """
        given = self._all(args, tensors)
        return BoundCall(
            self._program, {self._names[name]: tensor for name, tensor in given.items()}
        )

    def capture(self, /, *args: torch.Tensor, **tensors: torch.Tensor) -> CapturedCall:
        """:meth:`bind`, and the call recorded in a CUDA graph: the result replays it.

        It runs once for that, so the outputs are written. The graph has workspace of its own, and
        lets go of that and of its plans when the result is gone. On a CPU a replay is a call.

        Raises :class:`CaptureError` while another graph is being captured: what ``bind`` gives may
        be a part of that one.
        """
        return CapturedCall(self.bind(*args, **tensors), self.device)

    # -- checks --------------------------------------------------------------------------------

    def _ordered(
        self, args: tuple[Any, ...], tensors: Mapping[str, Any], names: tuple[str, ...]
    ) -> Sequence[Any] | None:
        """As many tensors as ``names``, in their order; None where that takes a closer look."""
        if not tensors:
            return args if len(args) == len(names) else None
        if args or len(tensors) != len(names):
            return None
        try:
            return [tensors[name] for name in names]
        except KeyError:
            return None

    def _touch(self, values: Sequence[torch.Tensor]) -> bool:
        """Whether an output may overlap anything, requires grad, or a pointer is not aligned."""
        starts = [tensor.data_ptr() for tensor in values]
        if self._program.uses_cudnn and any(start % ALIGNMENT_BYTES for start in starts):
            return True
        many = len(self.spec.inputs)
        spans = list(zip(starts, self._bytes, strict=True))
        for at, (start, size) in enumerate(spans[many:], many):
            if values[at].requires_grad:
                return True
            for other, more in spans[:at]:
                if start < other + more and other < start + size:
                    return True
        return False

    def _by_name(
        self,
        args: Sequence[Any],
        tensors: Mapping[str, Any],
        names: Sequence[str],
        problems: list[Problem],
    ) -> dict[str, Any]:
        given = dict(zip(names, args, strict=False))
        if len(args) > len(names):
            problems.append(
                Problem(
                    "call",
                    f"{len(args)} tensors by position",
                    f"at most {len(names)}: {', '.join(names)}",
                )
            )
        for name, tensor in tensors.items():
            if name not in names:
                problems.append(
                    Problem(
                        f"tensor '{name}'", "is not of this graph", f"one of {', '.join(names)}"
                    )
                )
            elif name in given:
                problems.append(
                    Problem(f"tensor '{name}'", "is given twice", "by position or by name")
                )
            else:
                given[name] = tensor
        for name in names:
            if name not in given:
                kind = "output" if name in self.spec.outputs else "input"
                problems.append(
                    Problem(f"{kind} '{name}'", "is missing", str(self.spec.tensors[name]))
                )
        return given

    def _check(
        self,
        given: Mapping[str, Any],
        names: Sequence[str],
        problems: list[Problem],
        *,
        aligned: bool,
    ) -> None:
        for name in names:
            if name in given:
                problems += _wrong(self.spec.tensors[name], given[name], self.device, aligned)

    def _all(self, args: Sequence[Any], tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        problems: list[Problem] = []
        names = (*self.spec.inputs, *self.spec.outputs)
        given = self._by_name(args, tensors, names, problems)
        self._check(given, names, problems, aligned=self._program.uses_cudnn)
        if not problems:
            problems += self._unsafe_outputs(given)
        if problems:
            raise BindError(self.spec.name, problems)
        return given

    def _unsafe_outputs(self, given: Mapping[str, torch.Tensor]) -> Iterator[Problem]:
        for position, name in enumerate(self.spec.outputs):
            output = given[name]
            if output.requires_grad:
                yield Problem(
                    f"output '{name}'", "requires grad", "a tensor that does not", "detach() it"
                )
            for other in self.spec.outputs[:position]:
                if _overlap(output, given[other]):
                    yield Problem(
                        f"output '{name}'", f"overlaps output '{other}'", "memory of its own"
                    )
            for source in self.spec.inputs:
                tensor = given[source]
                if not _overlap(output, tensor):
                    continue
                same = (output.data_ptr(), output.shape, output.stride(), output.dtype)
                pair = (self._names[name], self._names[source])
                if pair in self._in_place and same == (
                    tensor.data_ptr(),
                    tensor.shape,
                    tensor.stride(),
                    tensor.dtype,
                ):
                    continue
                steps = len(self._program.steps)
                later = f"; of this one's {steps} steps a later one reads it" if steps > 1 else ""
                yield Problem(
                    f"output '{name}'",
                    f"overlaps input '{source}'",
                    "memory of its own",
                    "only a graph of pointwise ops may write over an input, of the same stride, "
                    f"when it is read no more{later}",
                )

    # -- inspection ----------------------------------------------------------------------------

    @property
    def workspace_bytes(self) -> int:
        """Device memory that a run borrows: intermediates between steps and the plans' scratch."""
        return self._program.scratch_bytes

    @property
    def tier(self) -> str:
        """What served the plans: "built", "disk, serialized", "memory, replayed", "reference" …"""
        return self._program.tier

    @property
    def in_tf32(self) -> bool:
        """Whether products of float32 may run in TF32: allowed, and on a GPU."""
        return bool(self.policy.allow_tf32) and self.device.type == "cuda"

    @property
    def steps(self) -> tuple[StepPlan, ...]:
        """The steps in order, under this graph's own names."""
        back = {canonical: name for name, canonical in self._names.items()}
        return tuple(replace(step, spec=step.spec.rename(back)) for step in self._program.steps)

    def explain(self) -> str:
        """The graph, its steps with the plan of each, and why other candidates lost."""
        lines = [print_spec(self.spec, is_default), "", f"device {self.device}, key {self.key}"]
        if self.device.type == "cuda":
            lines[-1] += f", plans from: {self.tier}"
        for number, step in enumerate(self.steps, 1):
            plan = "torch" if step.choice is None else f"cuDNN {step.choice}"
            if self.device.type == "cpu":
                plan = "reference"
            lines.append(f"step {number}: {' → '.join(node.op for node in step.spec.nodes)}")
            lines.append(f"  plan: {plan}, workspace {step.workspace_bytes} bytes")
            if step.choice is not None:
                lines.append(f"  {_checked(step)}")
            lines += [f"  {line}" for line in _decided(step.decisions)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Executable {self.spec.name} on {self.device}, {len(self._program.steps)} step(s)>"


def _checked(step: StepPlan) -> str:
    """Whether a plan was run on random data before its first use, in a line."""
    if step.verified is None:
        return "not checked: verify='off'"
    by = f"{step.verified.gpu}, cuDNN {step.verified.cudnn}"
    if step.verified.error is None:
        return f"ran on random data on {by}; there was no memory to compare its results"
    return f"checked on {by}: off by {step.verified.error:.1e} from float64 on random data"


def _decided(decisions: Sequence[Decision]) -> Iterator[str]:
    """A line for each thing decided; what was left alone for one reason shares a line."""
    alone = Counter(d.reason for d in decisions if d.choice and d.reason.startswith("not tried"))
    for decision in decisions:
        if decision.choice is not None and decision.reason in alone:
            continue
        mark = "taken" if decision.accepted else "rejected"
        took = "" if decision.time_us is None else f" {decision.time_us:.1f} µs,"
        yield f"{mark}: {decision.subject}:{took} {decision.reason}"
    for reason, count in alone.items():
        yield f"{count} more plans {reason}"


def strided_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same strides in memory of its own; torch's clone closes gaps."""
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor.detach()) if 0 not in tensor.stride() else _expanded_copy(tensor)


def _expanded_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of an expanded tensor, expanded again: its repeated elements are stored once."""
    core = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            core = core.narrow(dim, 0, 1)
    return core.clone().as_strided(tensor.shape, tensor.stride())


class _ByStream(threading.local):
    """What one thread has prepared for each stream: the launches, and the block they point into."""

    def __init__(self) -> None:
        self.by_stream: dict[int, tuple[list[Launch], torch.Tensor | None]] = {}
        self.short: Callable[[], bool] | None = None  # for the stream seen last, of plans alone


class BoundCall:
    """An executable with its tensors bound: ``call()`` launches, nothing is checked or looked up.

    Runs on the current stream of the device; may be captured in a CUDA graph after one call on the
    same thread.
    """

    def __init__(self, program: Program, tensors: Mapping[str, torch.Tensor]) -> None:
        self._program = program
        self._tensors = dict(tensors)
        self._index = program.device.index
        cpu = program.device.type == "cpu"  # no streams, no handles: ready once and for all
        self._on_cpu = program.launches(self._tensors, 0) if cpu else None
        self._ready = _ByStream()

    def __call__(self) -> None:
        short = self._ready.short
        if short is not None and short():
            return
        if self._on_cpu is not None:
            for launch in self._on_cpu:
                launch(None)
            return
        index = self._index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self._launch(index)
        else:
            self._launch(index)

    def _launch(self, index: int) -> None:
        stream = env.raw_stream(index)
        ready = self._ready.by_stream.get(stream)
        if torch.cuda.is_current_stream_capturing():  # in the graph's memory, which goes with it
            self._program.play(self._program.launches(self._tensors, stream))
            return
        if ready is None:
            launches = self._program.launches(self._tensors, stream)
            # The block is kept with the pointers into it, so a pool that grows leaves it alive.
            block = WORKSPACE.get(index, stream, self._program.scratch_bytes)
            handle = env.handle_on_current_stream(index) if self._program.uses_cudnn else None
            watched = self._program.ran_first([partial(launch, handle) for launch in launches])
            ready = self._ready.by_stream[stream] = (launches, block)
            fixed = [launch for launch in launches if isinstance(launch, fast_call.PlanLaunch)]
            self._ready.short = None
            if len(fixed) == len(launches):
                self._ready.short = fast_call.launch_of(fixed, index, stream)
            if watched:
                return
        handle = env.handle_on_current_stream(index) if self._program.uses_cudnn else None
        for launch in ready[0]:
            launch(handle)


class CapturedCall:
    """``call`` recorded in a CUDA graph: ``captured()`` replays it on the current stream.

    ``graph`` is the ``torch.cuda.CUDAGraph``, None on a CPU, where a replay is a call. What the
    graph points into lives as long as this.
    """

    def __init__(self, call: Callable[[], object], device: torch.device) -> None:
        self.graph: Any = None
        self._call, self._held = call, dict[int, Any]()
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._record()

    def _record(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "a CUDA graph is being captured, and another would have to be captured in it; call "
                "what bind() gives"
            )
        self._call()  # plans are built and handles made before the capture
        torch.cuda.current_stream().synchronize()
        make: Any = torch.cuda.Stream
        graph, stream = torch.cuda.CUDAGraph(), make()
        _forget_workspaces()
        _recording.held = self._held
        collects = gc.isenabled()
        gc.disable()  # a CUDA graph that is garbage would take this one with it
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._call()
        finally:
            _recording.held = None
            _forget_workspaces()
            if collects:
                gc.enable()
        self.graph = graph

    def __del__(self) -> None:
        env.let_go(self.graph)

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self._call()


def _forget_workspaces() -> None:
    """Make cuBLAS ask for its workspaces anew, before a capture and after it.

    torch keeps one for each stream. A graph that recorded one from outside of its own memory would
    go on writing to it when torch has given it to others or back to the device, as whatever clears
    them makes it do: torch.compile does, around each of its own captures.
    """
    torch._C._cuda_clearCublasWorkspaces()


# -- compile ---------------------------------------------------------------------------------------


def canonical_tensor_names(spec: GraphSpec) -> dict[str, str]:
    """Tensor names of a graph → names that depend on its structure alone."""
    return {name: f"t{number[1:]}" for name, number in spec.canonical_names().items()}


def canonical(spec: GraphSpec) -> GraphSpec:
    """The graph under canonical names, inputs in canonical order: what programs are made of."""
    names = canonical_tensor_names(spec)
    renamed = spec.rename(names)
    return replace(
        renamed,
        name="_".join(dict.fromkeys(node.op for node in spec.nodes if node.op != "constant"))[:80],
        nodes=tuple(
            replace(node, name=f"{node.op}{position}")
            for position, node in enumerate(renamed.nodes)
        ),
        inputs=tuple(sorted(renamed.inputs, key=lambda name: int(name[1:]))),
    )


def _once(spec: GraphSpec, name: Hashable, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, made once for the graph."""
    if name not in spec.derived:
        spec.derived[name] = make()
    return spec.derived[name]


def default_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def device_of(device: torch.device | str | int | None) -> torch.device:
    """A device as torch understands one, None for the default. Raises :class:`PolicyError`."""
    if device is None:
        return default_device()
    try:
        return torch.device(device)
    except Exception:
        raise PolicyError(f"device={shown(device)}; expected a CPU or a CUDA device") from None


def compile(
    spec: GraphSpec,
    device: torch.device | str | int | None = None,
    *,
    policy: Policy | None = None,
    **options: Any,
) -> Executable:
    """An :class:`Executable` for ``spec``; see :meth:`cudnngraph.Graph.compile`."""
    place = device_of(device)
    if place.type not in ("cpu", "cuda"):
        raise PolicyError(f"device='{place}'; expected a CPU or a CUDA device")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(
            f"device='{place}' and torch sees no CUDA device; compile(device='cpu') runs on the "
            "reference executor, `cudnngraph doctor` says what is missing"
        )
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    resolved = resolve_policy(policy, options, spec)
    key = _once(spec, ("key", resolved), lambda: graph_key(spec, resolved))
    return Executable(spec, place, resolved, key, _program(spec, place, resolved, key))


# -- the cache as a whole --------------------------------------------------------------------------


def cache_stats() -> CacheStats:
    """How the cache has done in this process: see :class:`~cudnngraph.cache.stats.CacheStats`."""
    counters = stats.COUNTERS
    return CacheStats(
        dict(counters.lookups),
        dict(counters.misses),
        counters.build_ms,
        counters.load_ms,
        len(_programs),
        WORKSPACE.held_bytes,
        WORKSPACE.high_water_bytes,
        lookup.store().stats(),
    )


def cache_clear() -> None:
    """Forget the programs, records and workspaces in memory; the disk keeps its entries.

    Executables at hand go on working; plans and workspaces that a CUDA graph has captured stay.
    """
    with _programs_lock:
        _programs.clear()
    lookup.store().clear_memory()
    WORKSPACE.clear()


class Declared(Protocol):
    """A graph under construction: :class:`cudnngraph.Graph`."""

    def spec(self) -> GraphSpec:
        """The frozen graph."""


@checked
def warm_up(
    graphs: Iterable[Declared | GraphSpec],
    device: torch.device | str | int | None = None,
    *,
    policy: Policy | None = None,
    progress: bool | None = None,
    **options: Any,
) -> CacheStats:
    """Compile every graph ahead of its first use, so that no request has to wait for it.

    ``progress`` shows a bar; None shows it on a terminal. Returns the counters afterwards.
    """
    try:
        given = items(graphs)
    except NotPlain as reason:
        raise GraphError("warm_up", [Problem("graphs", str(reason), "several graphs")]) from None
    wrong = [
        Problem(f"graph {at}", is_a(graph), "a Graph or a GraphSpec")
        for at, graph in enumerate(given)
        if not isinstance(graph, GraphSpec) and not callable(getattr(type(graph), "spec", None))
    ]
    if wrong:
        raise GraphError("warm_up", wrong)
    specs = [graph if isinstance(graph, GraphSpec) else graph.spec() for graph in given]
    with progress_bar("compiling", show=progress) as tell:
        for done, spec in enumerate(specs):
            tell(done, len(specs))
            compile(spec, device, policy=policy, **options)
        tell(len(specs), len(specs))
    return cache_stats()
