"""Tuning on a GPU: the result is right, it is kept, and a plan that does wrong is thrown out."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.backend import env, handles
from cudnngraph.backend.candidates import Candidate, Outcome, Proposals, build_first
from cudnngraph.backend.plan import Plan
from cudnngraph.device import timing
from cudnngraph.executor import reference, streams
from cudnngraph.executor.plans import replay
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.runtime import compile as compiling
from cudnngraph.select import bench
from cudnngraph.select.graph_trial import GraphTrial
from cudnngraph.select.trial import StepTrial
from plans_cache.record import PlanRecord, from_json
from tests import numerics
from tests.gpu.test_plans import tensors

F16 = torch.float16
EFFORT = {"tune": "autotune", "max_candidates": 4, "budget_s": 20.0}
Tensors = dict[str, torch.Tensor]


def convolution(layout: str = "channels_last", groups: int = 1) -> cg.Graph:
    """27 × 27 pixels: behind the output's last element the allocator leaves some bytes."""
    g = cg.Graph("block")
    x = g.input("x", (3, 64, 27, 27), F16, layout=layout)
    w = g.input("w", (64, 64 // groups, 3, 3), F16, layout=layout)
    b = g.input("b", (64,), F16)
    g.output("y", g.conv_bias_act(x, w, b, padding=1, groups=groups), layout=layout)
    return g


def conv_bias_relu() -> cg.Graph:
    return convolution()


def depthwise() -> cg.Graph:
    return convolution(groups=64)


def nchw() -> cg.Graph:
    return convolution("contiguous")


def masked() -> cg.Graph:
    g = cg.Graph("masked")
    q, k, v = (g.input(name, (2, 4, 128, 64), F16) for name in "qkv")
    g.output("y", g.sdpa(q, k, v, g.input("mask", (1, 1, 128, 128), torch.bool)))
    return g


GRAPHS: dict[str, Callable[[], cg.Graph]] = {
    build.__name__: build for build in (conv_bias_relu, depthwise, nchw, masked)
}


def inputs_of(exe: cg.Executable) -> Tensors:
    """Standard normal numbers; a mask that hides a quarter, and leaves every row something."""
    torch.manual_seed(3)
    spec = exe.spec.tensors.get("mask")
    if spec is None:
        return tensors(exe)
    given = {name: torch.randn(2, 4, 128, 64, device="cuda").half() for name in "qkv"}
    mask = torch.rand(spec.shape, device="cuda") > 0.25
    return {**given, "mask": mask | torch.eye(128, dtype=torch.bool, device="cuda")}


def check(exe: cg.Executable, given: Tensors) -> torch.Tensor:
    """Run, and compare with what torch computes of the same data in float64 and in float16."""

    def eager(t: Tensors) -> torch.Tensor:
        if "mask" in t:
            return F.scaled_dot_product_attention(t["q"], t["k"], t["v"], attn_mask=t["mask"])
        if "w" not in t:
            x, gate = t["x"].chunk(2, dim=1)
            return x * F.gelu(gate)
        groups = 64 // t["w"].shape[1]
        return F.conv2d(t["x"], t["w"], t["b"], padding=1, groups=groups).relu()

    wide = {
        name: tensor.double().cpu() if tensor.dtype == F16 else tensor.cpu()
        for name, tensor in given.items()
    }
    y: torch.Tensor = exe(**given)
    declared = exe.spec.tensors["y"]
    assert (y.shape, y.stride(), y.dtype) == (declared.shape, declared.stride, declared.dtype)
    numerics.check(y, eager(wide), F16, torch_out=eager(given))
    return y


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The graphs that were tuned, in order."""
    seen: list[str] = []
    real = compiling.by_measurement

    def counted(spec: GraphSpec, *args: Any, **options: Any) -> Any:
        seen.append(spec.name)
        return real(spec, *args, **options)

    monkeypatch.setattr(compiling, "by_measurement", counted)
    return seen


def records(folder: Path) -> list[Path]:
    """The records' files, without those of rejected plans."""
    return [path for path in folder.rglob("*.json") if path.parent.name != "rejected"]


def record(folder: Path) -> PlanRecord:
    (path,) = records(folder)
    return from_json(path.read_text())


def choices(exe: cg.Executable) -> list[str]:
    return [str(step.choice) for step in exe.steps]


# -- right, and kept -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_tuned_is_right_and_kept(name: str, folder: Path, searches: list[str]) -> None:
    first = GRAPHS[name]().compile("cuda", **EFFORT)
    assert first.tier == "built"
    given = inputs_of(first)
    check(first, given)
    kept = record(folder)
    assert kept.policy["tune"] == "autotune"
    assert [step.time_us for step in kept.steps] == [step.time_us for step in first.steps]
    for step in first.steps:
        assert step.choice is None or (step.time_us is not None and step.time_us > 0)
        assert step.decisions and all(decision.reason for decision in step.decisions)
        if step.choice is not None:
            accepted = [d.choice for d in step.decisions if d.accepted and d.choice is not None]
            assert accepted == [step.choice]

    assert GRAPHS[name]().compile("cuda", **EFFORT)._program is first._program
    cg.cache_clear()
    built = cg.cache_stats().lookups["built"]
    second = GRAPHS[name]().compile("cuda", **EFFORT)
    assert second.tier.startswith("disk")
    assert second.steps == first.steps
    check(second, given)
    assert cg.cache_stats().lookups["built"] == built
    assert len(searches) == 1


def test_a_whole_graph_is_timed_with_gradients_side_by_side(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = cg.Graph("gradients")
    x = g.input("x", (8, 64, 28, 28), F16, layout="channels_last")
    w = g.input("w", (64, 64, 3, 3), F16, layout="channels_last")
    dy = g.relu(g.input("dy", (8, 64, 28, 28), F16, layout="channels_last"))
    g.output("dw", g.conv_wgrad(dy, x, kernel=3, padding=1), layout="channels_last")
    g.output("dx", g.conv_transpose(dy, w, padding=1), layout="channels_last")
    program = g.compile("cuda", tune="heuristic")._program
    steps = [
        (step.spec, None if step.choice is None else replay(step.spec, step.choice, 0))
        for step in program.steps
    ]
    beside: list[dict[int, int]] = []
    real = streams.run

    def counted(calls: Any, until: Any, *rest: Any, **options: Any) -> None:
        beside.append(dict(until))
        real(calls, until, *rest, **options)

    monkeypatch.setattr(streams, "run", counted)
    device = torch.device("cuda", 0)
    trial = GraphTrial(program.spec, cg.Policy(), device)
    run = trial.launch(steps)
    run()
    in_turn = [each.clone() for each in trial._outputs.values()]
    assert not beside
    (us,) = timing.measure([run], torch.cuda.Stream(device))
    assert us > 0 and len(beside) >= 1 and all(beside), "captured, one beside the other"
    exact = reference.run(program.spec, list(trial._inputs.values()), torch.float64)
    made = trial._outputs.values()
    for out, wanted, other, terms in zip(made, exact, in_turn, (8 * 28 * 28, 9 * 64), strict=True):
        numerics.check(out, wanted, F16, torch_out=other, terms=terms)


@pytest.mark.parametrize("name", ["conv_bias_relu", "masked"])
def test_a_new_process_searches_nothing(name: str, folder: Path) -> None:
    exe = GRAPHS[name]().compile("cuda", **EFFORT)
    code = (
        "import json, sys, cudnngraph as cg\n"
        "from cudnngraph.runtime import compile as compiling\n"
        "from tests.gpu.test_autotune import EFFORT, GRAPHS, check, choices, inputs_of\n"
        "def refuse(*args, **options): raise AssertionError('a search was started')\n"
        "compiling.by_measurement = refuse\n"
        "exe = GRAPHS[sys.argv[1]]().compile('cuda', **EFFORT)\n"
        "check(exe, inputs_of(exe))\n"
        "print(json.dumps([exe.tier, cg.cache_stats().lookups, choices(exe)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        env={**os.environ, "CUDNNGRAPH_CACHE_DIR": str(folder)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    tier, lookups, found = json.loads(done.stdout)
    assert tier.startswith("disk") and lookups == {"disk": 1}
    assert found == choices(exe)


def test_an_untuned_record_is_tuned_and_replaced(folder: Path, searches: list[str]) -> None:
    conv_bias_relu().compile("cuda", tune="heuristic")
    assert (record(folder).policy["tune"], searches) == ("heuristic", [])
    cg.cache_clear()
    untuned = cg.cache_stats().misses.get("untuned", 0)
    tuned = conv_bias_relu().compile("cuda", **EFFORT)
    assert (tuned.tier, len(searches)) == ("built", 1)
    assert cg.cache_stats().misses["untuned"] == untuned + 1
    assert record(folder).policy["tune"] == "autotune"
    for tune in ("heuristic", "cached", "autotune"):
        cg.cache_clear()
        again = conv_bias_relu().compile("cuda", tune=tune)
        assert again.tier.startswith("disk") and again.steps == tuned.steps
    assert len(searches) == 1


def test_an_untuned_program_in_memory_is_not_taken_for_a_tuned_one(folder: Path) -> None:
    first = conv_bias_relu().compile("cuda", tune="heuristic")
    second = conv_bias_relu().compile("cuda", **EFFORT)
    assert second._program is not first._program
    assert conv_bias_relu().compile("cuda", tune="heuristic")._program is second._program


def test_deterministic_plans_repeat_bit_by_bit(folder: Path) -> None:
    exe = conv_bias_relu().compile("cuda", deterministic=True, **EFFORT)
    given = inputs_of(exe)
    first = check(exe, given)
    assert all(torch.equal(exe(**given), first) for _ in range(5))


def test_what_is_tuned_can_be_captured(folder: Path) -> None:
    exe = conv_bias_relu().compile("cuda", **EFFORT)
    given = inputs_of(exe)
    want = check(exe, given)
    out = torch.empty_like(want)
    call = exe.bind(**given, y=out)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            call()
        out.zero_()
        captured.replay()
        stream.synchronize()
    assert torch.equal(out, want)


def test_fallback_error_gives_one_plan(folder: Path) -> None:
    exe = conv_bias_relu().compile("cuda", fallback="error", **EFFORT)
    assert [step.choice is not None for step in exe.steps] == [True]
    check(exe, inputs_of(exe))


# -- other values of thresholds --------------------------------------------------------------------


def test_a_step_is_measured_as_another_threshold_has_it(folder: Path, searches: list[str]) -> None:
    """Workers lower it so too; what is taken is right, and comes back from its record."""
    g = cg.Graph("ff")
    x, w = g.input("x", (512, 256), F16), g.input("w", (256, 512), F16)
    g.output("y", g.gelu(g.matmul(x, w)))
    first = g.compile("cuda", kernels=False, **EFFORT)
    said = [d.subject for step in first.steps for d in step.decisions]
    assert any("gelu_by_tanh_behind_matmul=False" in subject for subject in said)
    given = {
        "x": torch.randn(512, 256).cuda().half(),
        "w": torch.randn(256, 512).cuda().half() / 16,
    }
    wide = F.gelu(given["x"].double() @ given["w"].double()).cpu()
    numerics.check(first(**given), wide, F16, torch_out=F.gelu(given["x"] @ given["w"]))
    cg.cache_clear()
    second = g.compile("cuda", kernels=False, **EFFORT)
    assert second.tier.startswith("disk") and len(searches) == 1
    assert [(s.spec, s.choice) for s in second.steps] == [(s.spec, s.choice) for s in first.steps]


def test_a_model_is_imported_as_was_measured(folder: Path, searches: list[str]) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 4, stride=4), torch.nn.GELU())
    model = model.cuda().half().eval()
    x = torch.randn(2, 3, 64, 64, device="cuda").half()
    first = cg.fuse(model, x, policy=cg.Policy(**EFFORT))
    assert first.report is not None and len(searches) > 1, "it was imported in other ways too"
    said = [from_json(path.read_text()).extra.get("imported") for path in records(folder)]
    assert dict(first.report.instead) in said
    done = len(searches)
    cg.cache_clear()
    second = cg.fuse(model, x, policy=cg.Policy(**EFFORT))
    assert second.report is not None and second.report.instead == first.report.instead
    assert len(searches) == done


# -- plans that do wrong ---------------------------------------------------------------------------


class _Memory:
    """Device memory at an address, for :func:`torch.as_tensor`."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Double:
    """A plan that does what another does, and then something to memory: ``then(self)``.

    ``places`` are the addresses of inputs and outputs, ``scratch`` that of the workspace, which is
    100 bytes larger than the plan needs, so that there always is one.
    """

    verified: Any = None
    blob: bytes | None = None

    def __init__(self, plan: Plan, spec: GraphSpec, then: Callable[[Double], None]) -> None:
        self.plan = plan
        self.spec = spec
        self.then = then
        self.choice = plan.choice
        self.workspace_bytes = plan.workspace_bytes + 100
        self.places: Sequence[int] = ()
        self.scratch = 0
        self._seen: dict[tuple[int, int], torch.Tensor] = {}

    def pointers(self, tensors: Sequence[int]) -> Any:
        return self.plan.pointers(tensors), tuple(tensors)

    def execute(self, pointers: Any, workspace: int, handle: Any) -> None:
        mine, self.places = pointers
        self.scratch = workspace
        self.plan.execute(mine, workspace, handle)
        self.then(self)

    def bytes_at(self, address: int, size_bytes: int) -> torch.Tensor:
        """Memory on the device. Made once: the first run is outside of any capture."""
        place = (address, size_bytes)
        if place not in self._seen:
            self._seen[place] = torch.as_tensor(_Memory(*place), device="cuda")
        return self._seen[place]

    def tensor(self, place: int) -> torch.Tensor:
        """An input or output, flat, by its place among both."""
        declared = self.spec.tensors[(*self.spec.inputs, *self.spec.outputs)[place]]
        size = declared.extent * declared.dtype.itemsize
        return self.bytes_at(self.places[place], size).view(declared.dtype)


def scales_its_output(double: Double) -> None:
    double.tensor(-1).mul_(1.1)


def writes_past_its_output(double: Double) -> None:
    declared = double.spec.tensors[double.spec.outputs[-1]]
    size = declared.extent * declared.dtype.itemsize
    double.bytes_at(double.places[-1] + size, declared.dtype.itemsize).fill_(1)


def writes_past_its_workspace(double: Double) -> None:
    double.bytes_at(double.scratch + double.workspace_bytes, 1).fill_(1)


def writes_over_an_input(double: Double) -> None:
    double.tensor(0)[:8].neg_()


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a double in the place of every plan, or of those that ``which`` says, while tuning."""

    def apply(
        make: Callable[[Plan, GraphSpec], Any],
        which: Callable[[Candidate], bool] = lambda candidate: True,
    ) -> None:
        class Doubled(Proposals):
            def build(self, candidate: Candidate) -> tuple[Outcome, Plan | None]:
                outcome, plan = super().build(candidate)
                if plan is not None and which(candidate):
                    plan = make(plan, self.spec)
                return outcome, plan

        monkeypatch.setattr(bench, "Proposals", Doubled)

    return apply


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (scales_its_output, "wrong: '"),
        (writes_past_its_output, "writes outside of its output '"),
        (writes_past_its_workspace, "writes outside of its workspace of "),
        (writes_over_an_input, "writes over its inputs"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_where_every_plan_does_wrong_none_is_taken(
    then: Callable[[Double], None], reason: str, folder: Path, doubled: Callable[..., None]
) -> None:
    doubled(lambda plan, spec: Double(plan, spec, then))
    exe = conv_bias_relu().compile("cuda", kernels=False, **EFFORT)
    assert [step.choice for step in exe.steps] == [None] * len(exe.steps)
    check(exe, inputs_of(exe))
    said = [d for step in exe.steps for d in step.decisions if d.reason.startswith(reason)]
    assert said and not any(decision.accepted for decision in said)
    kept = [c.reason for step in record(folder).steps for c in step.candidates]
    assert sorted(r for r in kept if r.startswith(reason)) == sorted(d.reason for d in said)


class Elsewhere:
    """A plan that runs on the default stream."""

    def __init__(self, plan: Plan) -> None:
        self.workspace_bytes, self.pointers, self._plan = plan.workspace_bytes, plan.pointers, plan

    def execute(self, pointers: Any, workspace: int, handle: Any) -> None:
        mine = handles.raw_stream(0)
        env.frontend().set_stream(handle=handle, stream=0)
        self._plan.execute(pointers, workspace, handle)
        env.frontend().set_stream(handle=handle, stream=mine)


def test_a_plan_that_leaves_its_stream_is_wrong() -> None:
    spec, policy = conv_bias_relu().spec(), cg.Policy()
    plan, _ = build_first(spec, policy, 0)
    trial = StepTrial(spec, policy, torch.device("cuda", 0))
    assert trial.why_wrong(plan) is None
    assert str(trial.why_wrong(Elsewhere(plan))).startswith("wrong: 'y' is off by ")


class Idle:
    """A plan that does nothing, which is the fastest of all."""

    verified: Any = None
    blob: bytes | None = None

    def __init__(self, plan: Plan) -> None:
        self.choice = plan.choice
        self.workspace_bytes = plan.workspace_bytes

    def pointers(self, tensors: Sequence[int]) -> None:
        return None

    def execute(self, pointers: Any, workspace: int, handle: Any) -> None:
        return


def test_the_fastest_plan_is_not_taken_where_it_does_nothing(
    folder: Path, doubled: Callable[..., None]
) -> None:
    """cuDNN's first plan of every step; another of the step's, or another way, is taken."""
    doubled(lambda plan, spec: Idle(plan), lambda candidate: candidate.index == 0)
    exe = conv_bias_relu().compile("cuda", **EFFORT)
    check(exe, inputs_of(exe))
    said = [d for step in exe.steps for d in step.decisions if d.reason.startswith("wrong: '")]
    assert said
    assert all("is off by inf" in d.reason and not d.accepted for d in said)
    assert any(c.reason.startswith("wrong: '") for s in record(folder).steps for c in s.candidates)


def test_fallback_error_raises_what_is_wrong_with_the_plans(
    folder: Path, doubled: Callable[..., None]
) -> None:
    doubled(lambda plan, spec: Double(plan, spec, writes_over_an_input))
    with pytest.raises(cg.NotSupported, match="writes over its inputs"):
        conv_bias_relu().compile("cuda", fallback="error", **EFFORT)
    assert not records(folder)


def test_the_doubles_are_right_where_they_do_nothing_more(
    folder: Path, doubled: Callable[..., None]
) -> None:
    """The tests above are about what the doubles do, not about being doubles."""
    doubled(lambda plan, spec: Double(plan, spec, lambda double: None))
    exe = conv_bias_relu().compile("cuda", **EFFORT)
    assert any(step.choice is not None for step in exe.steps)
    assert not [
        d for s in exe.steps for d in s.decisions if d.reason.startswith(("wrong: ", "writes "))
    ]
    check(exe, inputs_of(exe))


def test_barred_engines_are_not_taken(folder: Path) -> None:
    free = conv_bias_relu().compile("cuda", **EFFORT)
    engines = {f"eng{step.choice.engine}" for step in free.steps if step.choice is not None}
    assert engines
    policy = dataclasses.replace(cg.Policy(**EFFORT), exclude_engines=tuple(engines))
    exe = conv_bias_relu().compile("cuda", policy=policy)
    assert exe.key != free.key
    assert not engines & {f"eng{s.choice.engine}" for s in exe.steps if s.choice is not None}
    check(exe, inputs_of(exe))


def test_contenders_run_behind_what_the_current_stream_was_given_before() -> None:
    """It fills what they read, and before that was writing to memory that is now their workspace:
    a kernel whose counters were overwritten there waits for ever."""
    x, y = torch.zeros(1024, device="cuda"), torch.empty(1024, device="cuda")
    seen = []

    def launch() -> None:
        y.copy_(x)
        if not torch.cuda.is_current_stream_capturing():
            seen.append(y.min())

    stream: Any = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    x.fill_(1.0)
    timing.measure([launch], stream)
    assert seen and all(float(each) == 1.0 for each in seen)


@pytest.mark.alone
def test_a_launch_takes_as_long_in_every_place() -> None:
    x = torch.zeros(1 << 16, device="cuda")
    stream: Any = torch.cuda.Stream()
    times = timing.measure([lambda: x.add_(1.0)] * 4, stream, rounds=21, drop_over=math.inf)
    assert max(times) < 1.15 * min(times), times


def test_a_contender_that_raises_leaves_nothing_running() -> None:
    x, y = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")

    def lagging() -> None:
        torch.cuda._sleep(200_000_000)
        y.copy_(x)

    def raises() -> None:
        raise RuntimeError("no such plan")

    stream: Any = torch.cuda.Stream()
    with pytest.raises(RuntimeError, match="no such plan"):
        timing.measure([[lagging, raises]], stream)
    assert stream.query()
