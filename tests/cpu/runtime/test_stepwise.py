"""Runs step by step: what is allocated when, and let go when."""

from __future__ import annotations

import copy
import ctypes
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import cudnngraph as cg
from cudnngraph.backend import handles
from cudnngraph.backend.plan import Choice
from cudnngraph.errors import NotSupported
from cudnngraph.executor import reference, streams
from cudnngraph.ir.canonical import canonical, canonical_tensor_names
from cudnngraph.ir.spec import ALIGNMENT_BYTES, GraphSpec, TensorSpec
from cudnngraph.models import dynamo
from cudnngraph.partition import memory
from cudnngraph.partition.aliases import aliases
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.partition.memory import StepMemory, Turns
from cudnngraph.rewrite.passes import prepared
from cudnngraph.runtime.program import Program
from cudnngraph.runtime.stepwise import Stepwise
from cudnngraph.select.heuristic import heuristic
from tests import numerics, simulated
from tests.chunks import each_case
from tests.gradients import differentiable, floating_inputs
from tests.samples import Case, enumerate_cases, make_inputs

CPU = torch.device("cpu")
CASES = enumerate_cases()
GRADIENTS = [case for case in CASES if differentiable(case)]


def one_by_one(spec: GraphSpec) -> list[StepMemory]:
    """Every op a step, with scratch memory; concatenations torch's, others plans."""
    graph = CutGraph(prepared(canonical(spec)))
    parts = [subgraph_of(graph, (node,)) for node in compute_nodes(graph.spec.nodes)]
    return [StepMemory(part, part.nodes[-1].op != "concat", 100) for part in parts]


@each_case(GRADIENTS)
def test_tensors_are_there_while_a_step_may_use_them(case: Case) -> None:
    """In a gradient cut op by op, with steps side by side."""
    spec = case.build().spec()
    backward = cg.differentiate(spec, floating_inputs(spec)).backward
    steps = one_by_one(backward)
    until = streams.overlappable(steps)
    graph = prepared(canonical(backward))
    bound = {*graph.inputs, *graph.outputs}
    known = aliases([step.made() for step in steps], bound)
    root = {each.form.name: str(each.root) for each in known.order}

    def whole(name: str) -> str:
        return whole(root[name]) if name in root else name

    turns = Turns.of(steps, graph.inputs, graph.outputs, until)
    there: set[str | int] = {*graph.inputs, *turns.offsets}
    used: dict[int, set[str | int]] = {}
    for number, step in enumerate(steps):
        there -= set(turns.drops[number])
        made = [each if isinstance(each, int) else each.name for each in turns.makes[number]]
        assert there.isdisjoint(made)
        there |= set(made)
        if number in known.free:
            continue
        used[number] = {whole(name) for name in (*step.spec.inputs, *step.spec.outputs)} | {number}
        for before, names in used.items():
            if before == number or number <= until.get(before, before):
                assert names <= there, (before, number)
    there -= {*turns.drops[-1], *turns.offsets}
    assert there == set(graph.outputs)


def most(steps: list[StepMemory], graph: GraphSpec, until: Mapping[int, int]) -> int:
    """The most bytes that a run in turns takes at a time, inputs with it."""
    with patch.object(memory, "SMALL_PART", 1 << 62):  # else what is small lives all the time
        turns = Turns.of(steps, graph.inputs, graph.outputs, until)
    forms = dict(graph.tensors) | {k: v for step in steps for k, v in step.spec.tensors.items()}

    def size(each: Any) -> int:
        if isinstance(each, int):
            return steps[each].workspace_bytes
        form = forms[each if isinstance(each, str) else each.name]
        return form.extent * form.dtype.itemsize

    now = found = sum(map(size, graph.inputs))
    for drops, makes in zip(turns.drops, (*turns.makes, ()), strict=True):
        now += sum(map(size, makes)) - sum(map(size, drops))
        found = max(found, now)
    assert now == sum(map(size, graph.outputs))
    return found


@each_case(GRADIENTS)
def test_steps_side_by_side_take_no_more_memory_at_the_peak(case: Case) -> None:
    spec = case.build().spec()
    backward = cg.differentiate(spec, floating_inputs(spec)).backward
    steps, graph = one_by_one(backward), prepared(canonical(backward))
    until = streams.overlappable(steps)
    kept = memory.within_peak(steps, graph.inputs, graph.outputs, until)
    assert kept.items() <= until.items()
    alone = most(steps, graph, {})
    assert most(steps, graph, kept) == alone
    for number in until.keys() - kept.keys():
        more = {n: last for n, last in kept.items() if n < number} | {number: until[number]}
        assert most(steps, graph, more) > alone


@pytest.mark.parametrize("scratch", [0, 1 << 20])
def test_steps_with_much_scratch_memory_run_alone_at_the_peak(scratch: int) -> None:
    """The gradients of a convolution, side by side where there is room for both."""
    g = cg.Graph("gradients")
    x, w = g.input("x", (1, 8, 16, 16), torch.float32), g.input("w", (8, 8, 3, 3), torch.float32)
    g.output("y", g.relu(g.conv(x, w, padding=1)))
    steps = one_by_one(cg.differentiate(g.spec(), ("x", "w")).backward)
    steps = [replace(step, workspace_bytes=scratch) for step in steps]
    graph = prepared(canonical(cg.differentiate(g.spec(), ("x", "w")).backward))
    until = streams.overlappable(steps)
    assert len(until) == 1
    kept = memory.within_peak(steps, graph.inputs, graph.outputs, until)
    assert bool(kept) == (not scratch)


class ByAddress:
    """A plan that the reference executor runs, in the memory at the addresses that it is given."""

    choice, workspace_bytes, verified, added = Choice(1, ()), 64, None, ()

    def __init__(self, spec: GraphSpec) -> None:
        self.spec, self.native = spec, (self.launch, 3)

    def launch(self, address: int, count: int, workspace: int, handle: int, place: int) -> None:
        assert (handle, place) == (7, 3) and workspace % ALIGNMENT_BYTES == 0 != workspace
        ctypes.memset(workspace, 0xFF, self.workspace_bytes)
        names = (*self.spec.inputs, *self.spec.outputs)
        pointers = (ctypes.c_uint64 * count).from_address(address)
        found = [
            at(start, self.spec.tensors[name]) for start, name in zip(pointers, names, strict=True)
        ]
        many = len(self.spec.inputs)
        reference.run_into(self.spec, found[:many], found[many:])

    def launcher(self, places: tuple[int, ...]) -> Any:
        def start(addresses: list[int], workspace: int, handle: Any) -> None:
            pointers = array("Q", [addresses[place] for place in places])
            self.launch(*pointers.buffer_info(), workspace, handle.backend_handle, 3)

        return start


def at(start: int, form: TensorSpec) -> torch.Tensor:
    """The tensor of a form at an address."""
    size = form.extent * form.dtype.itemsize
    if not size:
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype)
    flat = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=form.dtype)
    return flat.as_strided(form.shape, form.stride)


def by_address(spec: GraphSpec) -> Any:
    """A ``build`` that has a plan for two ops of three, and none for concatenations."""
    nodes = compute_nodes(spec.nodes)
    if len(nodes) > 1 or nodes[0].op == "concat" or crc32(nodes[0].name.encode()) % 3 == 0:
        raise NotSupported("this graph", ["one op at a time"])
    return ByAddress(spec), ()


def stand_ins(patch: pytest.MonkeyPatch) -> None:
    """torch's and cuDNN's answers on a GPU, whose current stream and handle are one."""
    handle = SimpleNamespace(backend_handle=7)
    entry = SimpleNamespace(stream=5, handle=handle)
    patch.setattr(handles, "thread_handle", lambda index: entry)
    patch.setattr(handles, "handle_on_current_stream", lambda index: handle)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name, told in (("_cuda_getDevice", None), ("_cuda_isCurrentStreamCapturing", False)):
        patch.setattr(torch._C, name, lambda told=told: told, raising=False)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)


@each_case(CASES)
def test_outputs_are_those_of_a_run_in_one_block(case: Case) -> None:
    """By the loop over the steps first, then by the generated function; bit for bit."""
    policy, given = cg.Policy(allow_tf32=False), make_inputs(case)
    declared = case.build().spec()
    spec, names = canonical(declared), canonical_tensor_names(declared)
    inputs = {names[name]: tensor for name, tensor in given.items()}
    held = {name: tensor.clone() for name, tensor in inputs.items()}
    program = Program(spec, CPU, heuristic(spec, policy, by_address), policy, "built")
    with pytest.MonkeyPatch.context() as patch, nan_at_first():
        stand_ins(patch)
        if crc32(case.id.encode()) % 2:  # all of them small, and in one block
            patch.setattr(memory, "SMALL_PART", 1)
        runs = [program.stepwise.run([inputs[name] for name in spec.inputs])]
        short = program.stepwise._short_call(None)
        assert program.uses_cudnn == (short is not None)
        runs += [program.stepwise.run([inputs[name] for name in spec.inputs])]
        expected = [spec.tensors[name].empty(CPU) for name in spec.outputs]
        tensors = [*(inputs[name] for name in spec.inputs), *expected]
        block = torch.full((program.scratch_bytes,), 0xFF, dtype=torch.uint8)
        starts = [tensor.data_ptr() for tensor in tensors] if program.uses_cudnn else []
        program._steps_on(tensors, starts, block, handles.handle_on_current_stream(0))
    for mine, one in zip(chain(*runs), (*expected, *expected), strict=True):
        assert mine.stride() == one.stride() and mine.dtype == one.dtype
        assert same(mine, one)
    assert all(same(inputs[name], tensor) for name, tensor in held.items())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.double().nan_to_num(7), b.double().nan_to_num(7))


@contextmanager
def nan_at_first() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_graph_with_its_names_in_another_order_gets_its_own_outputs() -> None:
    def build(*names: str) -> cg.Graph:
        g = cg.Graph("order")
        x = {name: g.input(name, (4, 8), torch.float32) for name in names}
        g.output("far", x["b"] * 3.0)
        g.output("near", x["a"] - x["b"])
        return g

    a, b = torch.randn(4, 8), torch.randn(4, 8)
    with pytest.MonkeyPatch.context() as patch:
        simulated.install(patch, None)
        for names in (("a", "b"), ("b", "a")):
            executable: Any = build(*names).compile(device="cpu")
            far, near = executable.stepwise([{"a": a, "b": b}[name] for name in names])
            assert torch.equal(far, b * 3.0) and torch.equal(near, a - b)


# -- memory of a backward --------------------------------------------------------------------------


class Live:
    """Of each run of a graph, the bytes of its inputs that are alive as each step starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[list[int]] = []
        refs: list[tuple[Any, int]] = []
        run, start = Stepwise.run, Stepwise._start

        def watched(made: Stepwise, tensors: list[Any], order: Any = None) -> list[Any]:
            refs[:] = [(StorageWeakRef(t.untyped_storage()), t.nbytes) for t in tensors]
            self.runs.append([])
            return run(made, tensors, order)

        def started(made: Stepwise, *args: Any) -> None:
            self.runs[-1].append(sum(size for ref, size in refs if not ref.expired()))
            start(made, *args)

        monkeypatch.setattr(Stepwise, "run", watched)
        monkeypatch.setattr(Stepwise, "_start", started)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    simulated.install(monkeypatch, None)
    torch._dynamo.reset()
    yield Live(monkeypatch)
    torch._dynamo.reset()


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), *layers)


def gradients(model: nn.Module, y: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    y.square().sum().backward(**options)
    found = [parameter.grad for parameter in model.parameters()]
    return [each.clone() for each in found if each is not None]


def near(model: nn.Module, found: list[torch.Tensor], x: torch.Tensor) -> None:
    wide = copy.deepcopy(model).double()
    own = gradients(model, model(x))
    for made, exact, eager in zip(found, gradients(wide, wide(x.double())), own, strict=True):
        numerics.check(made, exact, torch.float32, eager, terms=4096)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend=dynamo.backend, options={"check": False})


def test_a_backward_lets_go_of_what_it_has_read(live: Live) -> None:
    model, x = net(), torch.randn(2, 3, 32, 32)
    run = compiled(model)
    for _ in range(2):
        near(model, gradients(model, run(x)), x)
    for alive in live.runs[1::2]:
        assert alive == sorted(alive, reverse=True)
        assert alive[-1] * 4 < alive[0]


def test_a_graph_that_is_kept_gives_its_gradients_again(live: Live) -> None:
    model, x = net(), torch.randn(2, 3, 32, 32)
    y = compiled(model)(x)
    for keep in (True, True, False):
        near(model, gradients(model, y, retain_graph=keep), x)
    first, again, last = live.runs[1:]
    assert first == again and first[-1] * 2 > first[0]
    assert last[-1] * 4 < last[0]


def test_a_constant_that_is_saved_stays(live: Live) -> None:
    """A table that the graph holds, an argument and a result, which the backward reads."""
    torch.manual_seed(0)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.inner(x) * torch.arange(16).to(x.dtype).sin()) * x

    model, x = Scaled(), torch.randn(64, 16)
    run = compiled(model)
    for _ in range(3):
        near(model, gradients(model, run(x)), x)
