"""The first run of what was built here: marked, waited for, and what becomes of a plan that faults
or ends its process; by stand-ins for plans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.cache import lookup
from cudnngraph.runtime import first_launch
from cudnngraph.runtime.first_launch import FirstRun
from cudnngraph.select import guard
from plans_cache.launches import Launches
from plans_cache.record import from_json
from tests.fakes import FakePlan
from tests.workers.launch_worker import FIRST, SECOND, Engines, bound, run

ROOT = Path(__file__).parents[3]
RUNS: dict[str, Callable[[cg.Executable], None]] = {"direct": run, "bound": lambda e: bound(e)()}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines(tmp_path / "cache")
    made.install(monkeypatch)
    return made


def engines(exe: cg.Executable) -> list[int]:
    return [step.choice.engine for step in exe.steps if step.choice is not None]


def launching(world: Engines) -> list[str]:
    folder = world.directory / "launching"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def marked(world: Engines) -> list[Any]:
    """Return the content of the marks that are there now."""
    texts = (path.read_text() for path in (world.directory / "launching").glob("*.mark"))
    return [json.loads(text.splitlines()[0]) for text in texts]


def rejections(world: Engines) -> dict[int, str]:
    texts = (path.read_text() for path in (world.directory / "rejected").glob("*.json"))
    return {entry["engine"]: entry["reason"] for text in texts for entry in json.loads(text)}


# -- what is marked, and when ----------------------------------------------------------------------


@pytest.mark.parametrize("how", RUNS)
def test_each_plan_is_marked_before_its_first_launch_and_waited_for(
    world: Engines, how: str
) -> None:
    seen: list[tuple[str, list[Any], int]] = []
    world.does[4] = lambda: seen.append((mark_of(), marked(world), world.waits))

    def mark_of() -> str:
        (entry,) = marked(world)
        return str(entry["step"])

    exe = world.compiled()
    assert exe.tier == "built" and engines(exe) == [4, 4]
    RUNS[how](exe)
    kept = lookup.Rejected(0)
    assert [step for step, _, _ in seen] == [
        kept.id(step.spec, exe.policy) for step in exe._program.steps
    ]
    for _, (entry,), _ in seen:
        assert (entry["engine"], entry["knobs"]) == (4, [["TILE", 3]])
    assert [waits for _, _, waits in seen] == [1, 2], "one before the first, one after each"
    assert world.waits == 3 and launching(world) == []
    world.does.clear()
    for again in RUNS.values():
        again(exe)
    assert world.waits == 3 and world.launched == [4] * 6, "the first run alone"


def test_a_first_run_leads_to_the_short_way(world: Engines) -> None:
    exe = world.compiled()
    assert not exe._program.runs_here
    run(exe)
    assert exe._program.runs_here and exe._program._first is None


def test_equal_calls_of_a_bound_call_launch_as_often_as_before(world: Engines) -> None:
    call = bound(world.compiled())
    for count in (2, 4, 6):
        call()
        assert len(world.launched) == count


def test_what_comes_out_of_the_cache_is_not_watched(world: Engines) -> None:
    run(world.compiled())
    exe = world.again()
    assert exe.tier == "disk, serialized"
    run(exe)
    assert world.waits == 0 and world.launched == [4, 4] and launching(world) == []


def test_without_checks_nothing_is_watched(world: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_first(spec: Any, policy: cg.Policy, index: int, ahead: Any) -> Any:
        answer = world.first(spec, policy, {}).result()
        if answer.refused:
            raise cg.NotSupported("this graph", answer.refused)
        return world.replay(spec, FIRST, 0), answer.outcomes

    monkeypatch.setattr(guard, "build_first", build_first)
    exe = world.compiled(verify="off")
    assert exe.tier == "built"
    run(exe)
    assert world.waits == 0 and launching(world) == []


def test_a_capture_is_not_watched_and_the_run_after_it_is(world: Engines) -> None:
    exe = world.compiled()
    world.capturing = True
    run(exe)
    assert world.waits == 0 and len(world.launched) == 2
    world.capturing = False
    run(exe)
    assert world.waits == 3 and len(world.launched) == 4


def test_torch_steps_are_waited_for_and_not_marked(world: Engines) -> None:
    """A step of torch that faults is no fault of the plan behind it."""
    exe = world.compiled()
    first, second = exe._program.steps
    torch_step = type(first)(first.spec, None, 0, ())
    watched = FirstRun((torch_step, second), exe.policy, exe.device, lookup.Rejected(0))
    told: list[Any] = []
    calls = [lambda: told.append(marks()), lambda: told.append(marks())]

    def marks() -> list[str]:
        paths = (world.directory / "launching").glob("*.mark")
        return [path.read_text().splitlines()[:1] != [] for path in paths]  # type: ignore[misc]

    watched.run(enumerate(calls))
    assert told == [[False], [True]] and world.waits == 3
    calls[0] = world.fault
    with pytest.raises(RuntimeError, match="misaligned address") as raised:
        watched.run(enumerate(calls))
    assert not isinstance(raised.value, cg.PlanFault) and launching(world) == []


def test_threads_may_run_it_first_at_once(world: Engines) -> None:
    exe = world.compiled()
    together, failed = threading.Barrier(4, timeout=30), []
    world.does[4] = lambda: (together.wait() if len(world.launched) <= 4 else 0) and None

    def work() -> None:
        try:
            run(exe)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)
    assert len(world.launched) == 8 and launching(world) == []
    assert exe._program._first is None


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), torch.OutOfMemoryError("out of memory"), ValueError("no")]
)
def test_what_is_no_fault_goes_through_and_leaves_no_mark(
    world: Engines, error: BaseException, how: str
) -> None:
    def fail() -> None:
        raise error

    exe = world.compiled()
    world.does[4] = fail
    with pytest.raises(type(error)) as raised:
        RUNS[how](exe)
    assert raised.value is error and launching(world) == [] and rejections(world) == {}
    world.does.clear()
    world.waits = 0
    RUNS[how](exe)
    assert world.waits == 3, "it has yet to run for the first time"


def test_what_faulted_before_is_no_fault_of_a_plan(world: Engines) -> None:
    exe = world.compiled()
    world.lost = True
    with pytest.raises(RuntimeError, match="misaligned address") as raised:
        run(exe)
    assert not isinstance(raised.value, cg.PlanFault)
    assert world.launched == [] and launching(world) == [] and rejections(world) == {}


def test_a_directory_that_cannot_be_used_stops_no_run(world: Engines) -> None:
    exe = world.compiled()
    os.chmod(world.directory, 0o777)
    run(exe)
    assert world.waits == 3 and len(world.launched) == 2
    world.does[4] = world.fault
    exe = world.again()
    assert exe.tier == "built"
    with pytest.raises(cg.PlanFault):
        run(exe)


def test_waiting_where_another_thread_captures_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "CUDA error: operation not permitted when stream is capturing"

    class Stream:
        def synchronize(self) -> None:
            raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    first_launch.wait(torch.device("cuda", 0))
    assert not first_launch.is_lost(torch.device("cuda", 0))
    said = "CUDA error: an illegal memory access was encountered"
    assert first_launch.is_lost(torch.device("cuda", 0))


# -- a fault that the process survives -------------------------------------------------------------


@pytest.mark.parametrize("how", RUNS)
def test_a_fault_names_the_step_the_plan_and_what_to_do(world: Engines, how: str) -> None:
    exe = world.compiled()
    world.does[4] = lambda: world.fault() if len(world.launched) == 2 else None
    with pytest.raises(cg.PlanFault) as raised:
        RUNS[how](exe)
    assert str(raised.value) == (
        "step 2, relu: f16[4, 4] → f16[4, 4], faults on the GPU by its plan, cuDNN engine 4 "
        "(TILE=3): CUDA error: misaligned address\n"
        "This process has lost its CUDA context: nothing runs on the GPU in it any more. Start it "
        "again. The cache keeps that the plan is not to be taken again; where no cache can be "
        'written, compile with Policy(exclude_engines=("eng4",)).'
    )
    assert "plan: cuDNN engine 4 (TILE=3)" in exe.explain(), "as it is named there"
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert (raised.value.plan, raised.value.engine) == ("engine 4 (TILE=3)", 4)
    assert rejections(world) == {4: "its first launch faulted: CUDA error: misaligned address"}
    (lost,) = launching(world)
    assert lost.endswith(".lost")
    assert cg.Policy(exclude_engines=("eng4",)).exclude_engines == ("eng4",)


def test_a_launch_that_raises_and_loses_the_context_is_a_fault(world: Engines) -> None:
    def fail() -> None:
        world.lost = True
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    exe = world.compiled()
    world.does[4] = fail
    with pytest.raises(cg.PlanFault, match=r"step 1, matmul: .* CUDNN_STATUS_EXECUTION_FAILED"):
        run(exe)


def test_the_next_process_passes_a_plan_by_that_faulted(world: Engines) -> None:
    exe = world.compiled()
    world.does[4] = lambda: world.fault() if len(world.launched) == 2 else None
    with pytest.raises(cg.PlanFault):
        run(exe)
    exe = world.again()
    assert exe.tier == "built" and engines(exe) == [4, 7], "of the step that faulted"
    assert cg.cache_stats().misses["stale"] == 1
    world.does.clear()
    run(exe)
    assert world.again().tier == "disk, serialized", "what was built instead is kept"


def test_a_record_of_another_graph_with_the_plan_is_stale_too(world: Engines) -> None:
    def relu() -> cg.Graph:
        g = cg.Graph("relu")
        g.output("y", g.relu(g.input("x", (4, 4), torch.float16)))
        return g

    def two() -> cg.Graph:
        g = cg.Graph("two")
        g.output("y", g.relu(g.input("x", (4, 4), torch.float16)))
        w = g.input("w", (4, 4), torch.float16)
        g.output("z", g.matmul(w, w))
        return g

    options: dict[str, Any] = {"verify": "isolated", "allow_tf32": False}
    assert engines(two().compile("cuda:0", **options)) == [4, 4]
    exe = relu().compile("cuda:0", **options)
    world.does[4] = world.fault
    tensors = [torch.zeros(4, 4, dtype=torch.float16) for _ in range(2)]
    with pytest.raises(cg.PlanFault):
        exe._program.run(tensors, [tensor.data_ptr() for tensor in tensors])
    world.again()  # of another graph, which has other steps
    exe = two().compile("cuda:0", **options)
    assert exe.tier == "built"
    assert {step.spec.nodes[0].op: step.choice for step in exe.steps} == {
        "relu": SECOND,
        "matmul": FIRST,
    }


def test_where_no_plan_is_to_be_built_a_lost_one_is_said_to_be_stale(world: Engines) -> None:
    exe = world.compiled()
    world.does[4] = world.fault
    with pytest.raises(cg.PlanFault):
        run(exe)
    with pytest.raises(
        cg.PlanNotCached,
        match=r"stale: engine 4 \(TILE=3\): its first launch faulted: CUDA error: misaligned",
    ):
        world.again(tune="cached")


def test_a_search_in_this_process_passes_it_by(
    world: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one by workers does."""
    tried: list[int] = []

    class Proposals:
        candidates = tuple(
            Candidate(number, choice, f"eng{choice.engine}")
            for number, choice in enumerate((FIRST, SECOND))
        )

        def build(self, candidate: Any) -> Any:
            tried.append(candidate.choice.engine)
            return Outcome(candidate, True), FakePlan(candidate.choice)

    monkeypatch.setattr(guard.GpuBench, "__init__", lambda *args: None)
    monkeypatch.setattr(guard.GpuBench, "proposals", lambda self, spec: Proposals())
    exe = world.compiled()
    spec = exe._program.steps[1].spec
    lookup.Rejected(0).withdraw(spec, exe.policy, FIRST, lookup.DIED)
    policy = cg.Policy(verify="inprocess", allow_tf32=False)
    bench: Any = guard.GuardedBench(policy, exe.device, lookup.Rejected(0), None)
    bench._policy = policy
    proposals = bench.proposals(spec)
    outcomes = [proposals.build(candidate)[0] for candidate in proposals.candidates]
    assert [(each.accepted, each.reason) for each in outcomes] == [(False, lookup.DIED), (True, "")]
    assert tried == [7]


# -- one that it does not survive ------------------------------------------------------------------


def process(directory: Path, ends: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.workers.launch_worker", "run", str(directory)]
    return subprocess.run([*command, ends], capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.mark.parametrize(("ends", "code"), [("aborts", -signal.SIGABRT), ("exits", 3)])
def test_a_plan_that_ends_a_process_is_passed_by_in_the_next(
    tmp_path: Path, ends: str, code: int
) -> None:
    directory = tmp_path / "cache"
    died = process(directory, ends)
    assert died.returncode == code and died.stdout == "", died.stderr
    assert len(list((directory / "launching").glob("*.mark"))) == 1
    (record,) = (directory / "v1").rglob("*.json")
    before = from_json(record.read_text())
    assert [step.engine for step in before.steps] == [4, 4], "kept before it was launched"

    died = process(directory, ends)  # by the other step's plan, which is still engine 4
    assert died.returncode == code, died.stderr
    lived = process(directory, ends)
    assert lived.returncode == 0, lived.stderr
    told = json.loads(lived.stdout)
    assert told == {"tier": "built", "engines": [7, 7], "launched": [7, 7]}
    kept = [json.loads(path.read_text()) for path in (directory / "rejected").iterdir()]
    assert len(kept) == 2
    assert {entry["reason"] for entries in kept for entry in entries} == {
        "the process that launched it first did not come back from it"
    }
    assert not list((directory / "launching").glob("*.mark"))
    assert json.loads(process(directory).stdout)["tier"] == "disk, serialized"


def test_a_warm_cache_is_looked_at_once_more_and_no_more(
    world: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look for the folder; where marks of living processes are, one try at each lock."""
    run(world.compiled())
    looks: list[Any] = []
    look = Launches.look
    monkeypatch.setattr(
        Launches, "look", lambda self, reject: looks.append(0) or look(self, reject)
    )
    monkeypatch.setattr(
        lookup.Rejected, "id", lambda *args: pytest.fail("steps have keys where one was lost")
    )
    assert world.again().tier == "disk, serialized"
    assert len(looks) == 1
