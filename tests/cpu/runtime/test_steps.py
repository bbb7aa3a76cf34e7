"""A program of torch steps on the CPU: views between steps, and the memory that steps share."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import handles
from cudnngraph.executor import torch_steps
from cudnngraph.ir.canonical import canonical, canonical_tensor_names
from cudnngraph.ir.key import graph_key
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition.analysis import compute_nodes
from cudnngraph.runtime import fast_call
from cudnngraph.runtime.process import PROCESS
from cudnngraph.runtime.program import Program
from cudnngraph.select.decision import ALIAS
from cudnngraph.select.graph_trial import GraphTrial
from cudnngraph.select.heuristic import heuristic
from plans_cache.workspace import Slot, WorkspacePool
from tests import numerics
from tests.fakes import builder

F32 = torch.float32
CPU = torch.device("cpu")
POLICY = cg.Policy(allow_tf32=False)
VIEWS = ("reshape", "permute", "transpose", "slice")


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Scratch memory on the CPU, full of NaN at first; every block that was given out."""
    given: list[torch.Tensor] = []

    def allocate(device: int, stream: int, size_bytes: int) -> torch.Tensor:
        given.append(torch.full((size_bytes,), 0xFF, dtype=torch.uint8))
        return given[-1]

    monkeypatch.setattr(PROCESS, "workspace", WorkspacePool(allocate))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return given


def in_steps(spec: GraphSpec) -> Program:
    """The graph cut as far as it goes, every op a torch step or a view."""
    spec = canonical(spec)
    selection = heuristic(spec, POLICY, builder(lambda part: True))
    return Program(spec, CPU, selection, POLICY, "built")


def attention(g: cg.Graph, x: cg.Value, w: cg.Value) -> cg.Value:
    """Heads are cut out of one product: reshape, permute, slices, and back."""
    qkv = (x @ w).reshape((2, 6, 3, 4, 8)).permute((2, 0, 3, 1, 4))
    q, k, v = (qkv.slice(0, at, at + 1).reshape((2, 4, 6, 8)) for at in range(3))
    return g.relu(g.sdpa(q, k, v).transpose(1, 2).reshape((2, 6, 32)))


def torch_attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    qkv = (x @ w).reshape(2, 6, 3, 4, 8).permute(2, 0, 3, 1, 4)
    out = torch.nn.functional.scaled_dot_product_attention(*qkv)
    return out.transpose(1, 2).reshape(2, 6, 32).relu()


def of_an_input(g: cg.Graph, x: cg.Value) -> cg.Value:
    """Nothing is computed before the views, and there is an offset."""
    return g.exp(x.slice(0, 1).slice(2, step=2).transpose(0, 2)) + 1.0


def of_views(g: cg.Graph, x: cg.Value) -> cg.Value:
    """A view that is read twice, a view of it, and a reshape that has to copy."""
    part = g.tanh(x).slice(1, 1, 4)
    turned = part.transpose(1, 2)
    return g.neg(turned.reshape((20, 3))) * g.exp(part).transpose(1, 2).reshape((20, 3))


def an_output(g: cg.Graph, x: cg.Value) -> cg.Value:
    """The last op is a view: it writes into the caller's tensor."""
    return g.sigmoid(x).permute((2, 0, 1)).slice(0, 1)


GRAPHS: dict[str, tuple[Callable[..., cg.Value], Callable[..., torch.Tensor], Any, int]] = {
    "attention": (attention, torch_attention, {"x": (2, 6, 32), "w": (32, 96)}, 3),
    "of_an_input": (
        of_an_input,
        lambda x: x[1:, :, ::2].transpose(0, 2).exp() + 1.0,
        {"x": (3, 4, 6)},
        2,
    ),
    "of_views": (
        of_views,
        lambda x: (
            -(x.tanh()[:, 1:4].transpose(1, 2).reshape(20, 3))
            * x.tanh()[:, 1:4].exp().transpose(1, 2).reshape(20, 3)
        ),
        {"x": (4, 5, 5)},
        7,  # the slice too: it begins at no multiple of 16 bytes
    ),
    "an_output": (an_output, lambda x: x.sigmoid().permute(2, 0, 1)[1:], {"x": (3, 4, 6)}, 2),
}


def declared(name: str) -> tuple[GraphSpec, dict[str, torch.Tensor], torch.Tensor]:
    """The graph, inputs by name, and what torch makes of them in float64."""
    build, by_torch, shapes, _ = GRAPHS[name]
    gen = torch.Generator().manual_seed(3)
    inputs = {key: 0.25 * torch.randn(shape, generator=gen) for key, shape in shapes.items()}
    g = cg.Graph(name)
    g.output("y", build(g, **{key: g.input(key, like=value) for key, value in inputs.items()}))
    return g.spec(), inputs, by_torch(*(value.double() for value in inputs.values()))


@pytest.mark.parametrize("name", GRAPHS)
def test_steps_with_views_between_them_compute_what_torch_does(
    name: str, blocks: list[torch.Tensor]
) -> None:
    spec, inputs, want = declared(name)
    program = in_steps(spec)
    declared_y = spec.tensors["y"]
    y = torch.empty_strided(declared_y.shape, declared_y.stride).fill_(77.0)
    names = (*program.spec.inputs, *program.spec.outputs)
    tensors = dict(zip(names, (*inputs.values(), y), strict=True))
    launches = program.launches(tensors, 0)
    assert len(launches) == GRAPHS[name][3], "views are no launches"
    for _ in range(2):  # the second time on what the first one left in memory
        for launch in launches:
            launch(None)
        numerics.check(y, want, F32, what=name)
        y.fill_(77.0)
    assert len(blocks) <= 1
    free = [ALIAS in step.decisions for step in program.steps]
    assert free.count(False) == len(launches)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_trial_of_the_whole_runs_the_same_steps(name: str) -> None:
    """Selection times the very steps that are run."""
    spec, inputs, want = declared(name)
    program = in_steps(spec)
    chain = GraphTrial(program.spec, POLICY, CPU)
    for key, value in zip(program.spec.inputs, inputs.values(), strict=True):
        chain._inputs[key].copy_(value)
    written: list[torch.Tensor] = []
    step = chain._step

    def kept(part: GraphSpec, plan: Any, given: Any, outputs: Any, workspace: Any) -> Any:
        written.extend(outputs)
        return step(part, plan, given, outputs, workspace)

    chain._step = kept  # type: ignore[method-assign]
    chain.launch([(each.spec, None) for each in program.steps])()
    assert len(written) == GRAPHS[name][3]
    numerics.check(written[-1], want, F32, what=name)


@pytest.mark.parametrize("name", GRAPHS)
def test_chains_of_the_same_steps_share_their_memory(name: str) -> None:
    """They are timed in turn, and need no more memory than one of them."""
    spec, _, _ = declared(name)
    program = in_steps(spec)
    steps = [(each.spec, None) for each in program.steps]
    chain = GraphTrial(program.spec, POLICY, CPU)
    first, memory = chain.launch(steps), chain._memory
    second = chain.launch(steps)
    assert chain._memory is memory and memory is not None
    first()
    results = {key: value.clone() for key, value in chain._outputs.items()}
    second()
    for key, value in chain._outputs.items():
        assert torch.equal(value, results[key])

    class Needs:
        """A plan that is never run."""

        workspace_bytes = 4096

        def pointers(self, addresses: Any) -> None:
            return None

    large: Any = [
        (part, Needs() if number == 0 else None) for number, (part, _) in enumerate(steps)
    ]
    chain.launch(large)
    larger = chain._memory
    assert larger is not memory and larger is not None, "a plan runs another step than torch"
    Needs.workspace_bytes = 64
    chain.launch(large)
    assert chain._memory is larger
    Needs.workspace_bytes = 1 << 20
    chain.launch(large)
    assert chain._memory is not larger and chain._memory.block.numel() >= 1 << 20


# Graphs that end in views, what torch makes of x and w, and how many steps run.
ENDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "transpose": (lambda x, w: (x @ w).transpose(0, 1), lambda x, w: (x @ w).t(), 1),
    "two views": (
        lambda x, w: (x @ w).reshape((2, 3, 8)).permute((2, 0, 1)),
        lambda x, w: (x @ w).reshape(2, 3, 8).permute(2, 0, 1),
        1,
    ),
    "read besides": (
        lambda x, w: (lambda y: (y.transpose(0, 1), y.exp()))(x @ w),
        lambda x, w: ((x @ w).t(), (x @ w).exp()),
        2,
    ),
    "a part": (lambda x, w: (x @ w).slice(0, 2, 4), lambda x, w: (x @ w)[2:4], 2),
    "of an input": (lambda x, w: (x.transpose(0, 1), x @ w), lambda x, w: (x.t(), x @ w), 2),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_step_writes_itself_what_an_output_is_a_view_of(
    name: str, blocks: list[torch.Tensor]
) -> None:
    build, by_torch, count = ENDS[name]
    gen = torch.Generator().manual_seed(3)
    x, w = (0.25 * torch.randn(shape, generator=gen) for shape in ((6, 16), (16, 8)))
    g = cg.Graph("ends")
    made = build(g.input("x", like=x), g.input("w", like=w))
    for place, value in enumerate(made if isinstance(made, tuple) else (made,)):
        g.output(f"y{place}", value)
    spec = g.spec()
    program = in_steps(spec)
    outputs = [
        torch.empty_strided(spec.tensors[n].shape, spec.tensors[n].stride) for n in spec.outputs
    ]
    names = (*program.spec.inputs, *program.spec.outputs)
    tensors = dict(zip(names, (x, w, *outputs), strict=True))
    launches = program.launches(tensors, 0)
    free = [ALIAS in step.decisions for step in program.steps]
    assert free.count(False) == len(launches) == count
    right = by_torch(x.double(), w.double())
    for _ in range(2):
        for launch in launches:
            launch(None)
        for out, want in zip(outputs, right if isinstance(right, tuple) else (right,), strict=True):
            numerics.check(out, want, F32)
            out.fill_(77.0)


def test_a_value_shown_by_two_outputs_is_copied_to_one_of_them(blocks: list[torch.Tensor]) -> None:
    g = cg.Graph("twice")
    x = g.input("x", (4, 6), F32)
    y = g.tanh(x)
    g.output("a", y.transpose(0, 1))
    g.output("b", y.reshape((24,)))
    program = in_steps(g.spec())
    data = torch.linspace(-1, 1, 24).view(4, 6)
    a = torch.empty_strided((6, 4), g.spec().tensors["a"].stride)
    b = torch.empty(24)
    tensors = dict(zip((*program.spec.inputs, *program.spec.outputs), (data, a, b), strict=True))
    launches = program.launches(tensors, 0)
    assert len(launches) == 2 and len(program.steps) == 3
    for launch in launches:
        launch(None)
    assert torch.equal(a, data.tanh().t()) and torch.equal(b, data.tanh().reshape(24))


def test_a_view_keeps_the_memory_that_it_shows(blocks: list[torch.Tensor]) -> None:
    """The memory behind a view is not given to another step while the view is still read."""
    g = cg.Graph("late")
    x = g.input("x", (4, 64), F32)
    shown = g.exp(x).transpose(0, 1)
    y = x
    for _ in range(6):
        y = g.tanh(y)
    g.output("y", shown - y.transpose(0, 1))
    program = in_steps(g.spec())
    data = torch.linspace(-1, 1, 256).view(4, 64)
    want = data.double()
    for _ in range(6):
        want = want.tanh()
    want = data.double().exp().t() - want.t()
    out = torch.empty(64, 4)
    tensors = dict(zip((*program.spec.inputs, *program.spec.outputs), (data, out), strict=True))
    for launch in program.launches(tensors, 0):
        launch(None)
    numerics.check(out.contiguous(), want, F32)
    (block,) = blocks
    assert program.scratch_bytes <= block.numel()
    assert program.scratch_bytes == 3 * 1024, "two of the six and the one that is shown"


# -- what is joined --------------------------------------------------------------------------------


def two_levels(g: cg.Graph, x: cg.Value, w: cg.Value, v: cg.Value) -> cg.Value:
    """A slice that a convolution reads too, a join of a join, an input among what is joined."""
    a = g.relu(g.conv(x, w, padding=1))
    b = g.relu(g.conv(a, w, padding=1))
    inner = g.concat([a, b], 1)
    return g.conv(g.concat([g.tanh(x), inner, x], 1), v)


def torch_two_levels(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    a = torch.conv2d(x, w, padding=1).relu()
    b = torch.conv2d(a, w, padding=1).relu()
    return torch.conv2d(torch.cat([x.tanh(), a, b, x], 1), v)


def joined_images() -> tuple[GraphSpec, dict[str, torch.Tensor], torch.Tensor]:
    """A graph of images channels last, its inputs, and what torch makes of them in float64."""
    gen = torch.Generator().manual_seed(5)
    shapes = {"x": (2, 8, 6, 5), "w": (8, 8, 3, 3), "v": (4, 32, 1, 1)}
    inputs = {
        key: (0.25 * torch.randn(shape, generator=gen)).contiguous(
            memory_format=torch.channels_last
        )
        for key, shape in shapes.items()
    }
    g = cg.Graph("joined")
    g.output("y", two_levels(g, **{key: g.input(key, like=t) for key, t in inputs.items()}))
    return g.spec(), inputs, torch_two_levels(*(t.double() for t in inputs.values()))


def test_what_is_joined_is_written_into_its_slice(blocks: list[torch.Tensor]) -> None:
    spec, inputs, want = joined_images()
    program = in_steps(spec)
    y = torch.empty_strided(spec.tensors["y"].shape, spec.tensors["y"].stride)
    names = (*program.spec.inputs, *program.spec.outputs)
    bound = dict(zip(names, [inputs[n] for n in spec.inputs] + [y], strict=True))
    launches = program.launches(bound, 0)
    joins = [step for step in program.steps if step.spec.nodes[-1].op == "concat"]
    assert [ALIAS in step.decisions for step in joins] == [True, False]
    assert len(launches) == len(program.steps) - 1
    values = program._layout.tensors(blocks[-1], bound)
    whole = values[joins[1].spec.outputs[0]]
    start = 0
    for number, name in enumerate(joins[1].spec.nodes[-1].operands):
        part = whole.narrow(1, start, values[name].shape[1])
        assert (values[name].data_ptr() == part.data_ptr()) == (number < 2)
        start += values[name].shape[1]
    for name in joins[0].spec.inputs:
        assert values[name].stride() == whole.stride()
    for _ in range(2):
        for launch in launches:
            launch(None)
        numerics.check(y, want, F32)
        y.fill_(77.0)


def test_joining_on_a_gpu_copies_only_what_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = torch.zeros(2, 12, 3, 3).contiguous(memory_format=torch.channels_last)
    there, apart = whole[:, :8], torch.ones(2, 4, 3, 3)
    g = cg.Graph("g")
    values = [g.input(n, like=t) for n, t in (("a", there), ("b", apart))]
    g.output("y", g.concat(values, 1), layout="channels_last")
    there.fill_(3.0)
    run = torch_steps.launcher(g.spec(), [there, apart], [whole], allow_tf32=False)
    monkeypatch.setattr(torch, "cat", None)  # it would read what it writes
    run()
    assert torch.equal(whole[:, :8], torch.full((2, 8, 3, 3), 3.0))
    assert torch.equal(whole[:, 8:], apart)


# -- direct runs -----------------------------------------------------------------------------------


class Recording:
    """A plan that notes what it is executed on."""

    def __init__(self, plan: Any, seen: list[Any]) -> None:
        self.choice = plan.choice
        self.workspace_bytes = plan.workspace_bytes
        self._seen = seen

    def pointers(self, tensors: Any) -> tuple[int, ...]:
        return tuple(tensors)

    def launcher(self, places: Any) -> Any:
        return lambda addresses, workspace, handle: self.execute(
            tuple(addresses[at] for at in places), workspace, handle
        )

    def execute(self, pointers: tuple[int, ...], workspace: int, handle: Any) -> None:
        self._seen.append((self.choice, pointers, workspace if self.workspace_bytes else None))


@pytest.mark.parametrize(
    "refused",
    [{"none"}, {"sdpa", "matmul"}, {"tanh", "neg", "exp"}],
    ids=["nothing", "anchors", "pointwise ops"],
)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_direct_run_gives_plans_the_addresses_that_a_bound_call_gives(
    name: str, refused: set[str], blocks: list[torch.Tensor]
) -> None:
    """Plans, torch steps and views mixed; what a plan does not write is the torch steps'."""
    spec, inputs, _ = declared(name)
    spec = canonical(spec)
    build = builder(
        lambda part: (
            len(part.nodes) > 1 or any(n.op in refused or n.op in VIEWS for n in part.nodes)
        )
    )
    seen: list[Any] = []
    found = heuristic(spec, POLICY, build)
    plans = tuple(None if plan is None else Recording(plan, seen) for plan in found.built)
    program = Program(spec, CPU, replace(found, built=plans), POLICY, "built")  # type: ignore[arg-type]
    outputs = [
        torch.empty_strided(each.shape, each.stride, dtype=each.dtype)
        for each in (spec.tensors[key] for key in spec.outputs)
    ]
    tensors = [*inputs.values(), *outputs]
    for launch in program.launches(
        dict(zip((*spec.inputs, *spec.outputs), tensors, strict=True)), 0
    ):
        launch(None)
    bound, block = list(seen), PROCESS.workspace.get(None, 0, program.scratch_bytes)  # type: ignore[arg-type]
    seen.clear()
    program._steps_on(tensors, [tensor.data_ptr() for tensor in tensors], block, None)
    assert seen == bound
    assert bool(seen) == program.uses_cudnn


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The answers of torch and cuDNN on a GPU to a short call; a test may change them."""
    told = SimpleNamespace(device=None, stream=5, capturing=False, followed=[])
    entry = SimpleNamespace(stream=5, handle=SimpleNamespace(backend_handle=7))
    monkeypatch.setattr(handles, "thread_handle", lambda index: entry)
    monkeypatch.setattr(handles, "handle_on_current_stream", told.followed.append)
    stand_ins: dict[str, Any] = {
        "_cuda_getDevice": lambda: told.device,
        "_cuda_isCurrentStreamCapturing": lambda: told.capturing,
        "_cuda_getCurrentRawStream": lambda index: told.stream,
    }
    for name, call in stand_ins.items():
        monkeypatch.setattr(torch._C, name, call, raising=False)
    return told


def recording(plan: Any, seen: list[Any], constants: Sequence[tuple[int | None, int]]) -> Any:
    """The same plan as one that the binding launches by addresses."""

    def launch(address: int, count: int, workspace: int, handle: int, place: int) -> None:
        assert (handle, place) == (7, 3)
        pointers = tuple((ctypes.c_uint64 * count).from_address(address))
        seen.append((plan.choice, pointers, workspace if plan.workspace_bytes else None))

    return SimpleNamespace(
        choice=plan.choice,
        workspace_bytes=plan.workspace_bytes,
        native=(launch, 3),
        added=tuple(constants),
    )


def short_call(
    spec: GraphSpec,
    seen: list[Any],
    slots: dict[Any, Any],
    over: tuple[tuple[int, int], ...] = (),
    *,
    checked: bool = False,
    constants: Sequence[tuple[int | None, int]] = (),
) -> tuple[Program, Any]:
    """The program of a graph of plans, and its call by the short way."""
    found = heuristic(spec, POLICY, builder(lambda part: len(compute_nodes(part.nodes)) > 1))
    plans = tuple(None if p is None else recording(p, seen, constants) for p in found.built)
    program = Program(spec, CPU, replace(found, built=plans), POLICY, "built")
    forms = [spec.tensors[name] for name in (*spec.inputs, *spec.outputs)]
    made = [(form.shape, form.stride, form.dtype) for form in forms]
    many = len(spec.inputs)
    steps = program.direct_steps(None)
    assert steps is not None
    call = fast_call.build_call(steps, made[:many], made[many:], over, CPU, slots, checked=checked)
    return program, call


def memory_on(stream: int) -> dict[tuple[None, int], Slot[torch.Tensor]]:
    """More scratch memory than the graphs here need."""
    block = torch.zeros(1 << 16, dtype=torch.uint8)
    return {(None, stream): Slot(block, block.numel())}


def chain() -> GraphSpec:
    """Four pointwise ops, of which each is to be a plan."""
    g = cg.Graph("chain")
    x, z = (g.input(name, (4, 6), F32) for name in "xz")
    y = (x * z).exp()
    g.output("y", y)
    g.output("w", (y + x).sigmoid())
    return canonical(g.spec())


def test_a_short_call_launches_what_a_bound_one_does(
    gpu: SimpleNamespace, blocks: list[torch.Tensor]
) -> None:
    seen: list[Any] = []
    slots = memory_on(5)
    program, call = short_call(chain(), seen, slots)
    x, z = torch.randn(4, 6), torch.randn(4, 6)
    y, w = call([x, z])
    assert (y.shape, y.dtype, w.shape) == (x.shape, F32, x.shape)
    starts = [t.data_ptr() for t in (x, z, y, w)]
    assert len(seen) == 4 and not gpu.followed
    short = list(seen)
    seen.clear()
    for step, plan in zip(program.steps, program.plans(), strict=True):
        assert plan is not None
        seen.append((step.choice, step.spec))
    addresses, base = list(starts), slots[None, 5].block.data_ptr()
    for root, past in program.behind:
        addresses.append(past + (base if root < 0 else addresses[root]))
    for (choice, pointers, _), (other, spec) in zip(short, seen, strict=True):
        names = (*spec.inputs, *spec.outputs)
        assert choice == other
        assert pointers == tuple(addresses[program.places[name]] for name in names)


def test_a_short_call_hands_constants_and_shifted_addresses_on(
    gpu: SimpleNamespace, blocks: list[torch.Tensor]
) -> None:
    seen: list[Any] = []
    slots = memory_on(5)
    _, call = short_call(chain(), seen, slots, constants=[(None, 4096), (0, 64)])
    call([torch.randn(4, 6), torch.randn(4, 6)])
    for _, pointers, _ in seen:
        assert pointers[-2:] == (4096, pointers[0] + 64)


def test_a_short_call_follows_the_stream_and_writes_over_what_it_is_told(
    gpu: SimpleNamespace, blocks: list[torch.Tensor]
) -> None:
    seen: list[Any] = []
    slots = memory_on(9)
    _, call = short_call(chain(), seen, slots, ((1, 0),))
    gpu.stream = 9
    x, z = torch.randn(4, 6), torch.randn(4, 6)
    _, w = call([x, z])
    assert w is x and gpu.followed == [None]
    assert seen[-1][1][-1] == x.data_ptr()


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda x: x[:3],
    "strides": lambda x: x.t().contiguous().t(),
    "dtype": lambda x: x.half(),
    "device": lambda x: x.to("meta"),
    "no tensor": lambda x: 1.0,
    "nothing": lambda x: None,
    "address": lambda x: torch.zeros(25)[1:].view(4, 6),
    "sign": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("what", [*WRONG, "count", "capture", "current device", "memory"])
def test_a_short_call_leaves_to_the_long_one_what_it_does_not_know(
    what: str, gpu: SimpleNamespace, blocks: list[torch.Tensor]
) -> None:
    seen: list[Any] = []
    slots = memory_on(5)
    program, call = short_call(chain(), seen, slots, checked=what == "sign")
    x, z = torch.randn(4, 6), torch.randn(4, 6)
    given: list[Any] = [x, z, x] if what == "count" else [x, WRONG.get(what, lambda t: t)(z)]
    if what == "capture":
        gpu.capturing = True
    elif what == "current device":
        gpu.device = 1
    elif what == "memory":
        slots[None, 5] = Slot(slots[None, 5].block, program.scratch_bytes - 1)
    assert call(given) is None
    assert not seen and not gpu.followed
    if what == "memory":
        slots.clear()
        assert call(given) is None


def test_a_bound_call_launches_the_short_way_on_its_stream_alone(gpu: SimpleNamespace) -> None:
    seen: list[Any] = []

    def launch(address: int, count: int, workspace: int, handle: int, place: int) -> None:
        pointers = tuple((ctypes.c_uint64 * count).from_address(address))
        seen.append((pointers, workspace, handle, place))

    plan: Any = SimpleNamespace(native=(launch, 3), bound=lambda *given: None)
    launches = [
        fast_call.PlanLaunch(plan, array("Q", [16, 32]), 64),
        fast_call.PlanLaunch(plan, array("Q", [32, 48, 4096]), 128),
    ]
    gpu.device = 0
    call = fast_call.build_launch(launches, 0, 5, True)
    assert call is not None and call()
    assert seen == [((16, 32), 64, 7, 3), ((32, 48, 4096), 128, 7, 3)]
    assert not gpu.followed
    for name, value in (("stream", 6), ("device", 1), ("capturing", True)):
        before = getattr(gpu, name)
        setattr(gpu, name, value)
        assert not call()
        setattr(gpu, name, before)
    assert len(seen) == 2
    gpu.stream = 8  # the handle is still on another
    other = fast_call.build_launch(launches[:1], 0, 8, True)
    assert other is not None and other()
    assert gpu.followed == [0]
    plan.native = None
    assert fast_call.build_launch(launches, 0, 5, True) is None


def test_there_is_no_short_call_where_torch_has_a_step_or_the_binding_no_call(
    gpu: SimpleNamespace, blocks: list[torch.Tensor]
) -> None:
    assert in_steps(chain()).direct_steps(None) is None
    program, _ = short_call(chain(), [], {})
    steps = program.direct_steps(None)
    assert steps is not None
    steps.planned[0][1].native = None
    assert (
        fast_call.build_call(steps, [((4, 6), (6, 1), F32)] * 2, [], (), CPU, {}, checked=True)
        is None
    )


@pytest.mark.parametrize("name", GRAPHS)
def test_a_direct_run_of_torch_steps_computes_what_torch_does(
    name: str, blocks: list[torch.Tensor]
) -> None:
    spec, inputs, want = declared(name)
    program = in_steps(spec)
    y = torch.empty_strided(spec.tensors["y"].shape, spec.tensors["y"].stride).fill_(77.0)
    block = torch.full((-(-program.scratch_bytes // 16) * 16,), 0xFF, dtype=torch.uint8)
    for _ in range(2):
        program._steps_on([*inputs.values(), y], [], block, None)
        numerics.check(y, want, F32, what=name)
        y.fill_(77.0)


# -- in place --------------------------------------------------------------------------------------


def updates() -> GraphSpec:
    """Two outputs of one input, in this order, and one that both wait for."""
    g = cg.Graph("updates")
    x, z = (g.input(name, (4, 6), F32) for name in "xz")
    y = x * z
    g.output("y", y)
    g.output("w", (y + x).sigmoid())
    return g.spec()


def test_a_step_may_write_over_what_no_later_step_reads() -> None:
    spec = updates()
    names = canonical_tensor_names(spec)
    program = in_steps(spec)
    assert [step.spec.nodes[0].op for step in program.steps] == ["mul", "add", "sigmoid"]
    own = {canonical_name: name for name, canonical_name in names.items()}
    allowed = {(own[output], own[source]) for output, source in program.may_write_over()}
    assert allowed == {("y", "z"), ("w", "x"), ("w", "z")}, "the second step reads x once more"


def test_what_a_later_step_reads_may_not_be_written_over() -> None:
    spec = updates()
    exe = cg.Executable(spec, CPU, POLICY, graph_key(spec, POLICY), in_steps(spec))
    x, z, w = (torch.randn(4, 6) for _ in range(3))
    with pytest.raises(cg.BindError, match="output 'y': overlaps input 'x'") as error:
        exe.run(x=x, z=z, y=x, w=w)
    assert "when it is read no more; of this one's 3 steps a later one reads it" in str(error.value)


def test_the_steps_of_adamw_may_run_in_place() -> None:
    g = cg.Graph("adamw")
    given = [g.input(name, (40,), F32) for name in ("p", "grad", "m", "v")]
    numbers = [g.input(name, (1,), F32) for name in ("lr", "c1", "c2")]
    for name, value in zip(("p_", "m_", "v_"), g.adamw(*given, *numbers), strict=True):
        g.output(name, value)
    spec = g.spec()
    program, names = in_steps(spec), canonical_tensor_names(spec)
    assert len(program.steps) > 10
    over = {"p_": "p", "m_": "m", "v_": "v"}
    assert {(names[a], names[b]) for a, b in over.items()} <= program.may_write_over()
    values = {name: torch.rand(spec.tensors[name].shape) + 0.1 for name in spec.inputs}
    apart = {name: torch.empty(40) for name in spec.outputs}
    results = []
    for outputs in (apart, {name: values[source] for name, source in over.items()}):
        by_name = {names[name]: tensor for name, tensor in {**values, **outputs}.items()}
        block = torch.empty(program.scratch_bytes, dtype=torch.uint8)
        order = (*program.spec.inputs, *program.spec.outputs)
        program._steps_on([by_name[name] for name in order], [], block, None)
        results.append([outputs[name] for name in over])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
