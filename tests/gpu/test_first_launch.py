"""The first run of what was built in this process: right as ever, and where a plan faults on a real
GPU, or ends the process, the next process takes another one. `plans verify` checks plans again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import cli, settings
from cudnngraph.cache import lookup
from cudnngraph.select import guard, workers
from tests import numerics
from tests.gpu.test_guard import again, embedded, inputs, is_right

ROOT = Path(__file__).parents[2]

# Runs `embedded` of test_guard.py. The plan that is named, or every one, reads a float from an
# address that is no multiple of four behind its own work, or ends the process.
PROGRAM = r"""
import json, os, sys
import torch
import cudnngraph as cg
from cudnngraph.backend.plan import Plan
from tests.gpu.test_guard import embedded, inputs

named, does, how = sys.argv[1:]
misaligned = torch.cuda._compile_kernel(
    'extern "C" __global__ void misaligned(const char* from, float* to) {'
    '  *to = *(const volatile float*)(from + 1);'
    '}',
    "misaligned",
)
source, target = torch.zeros(64, device="cuda"), torch.zeros(1, device="cuda")
torch.cuda.synchronize()

def after(plan):
    if named in ("all", str(plan.choice)):
        if does == "abort":
            os.abort()
        misaligned(grid=(1, 1, 1), block=(1, 1, 1), args=[source, target])

def tell(**said):
    print(json.dumps(said), flush=True)

g = embedded()
exe = g.compile("cuda")
tell(tier=exe.tier, plans=[None if s.choice is None else str(s.choice) for s in exe.steps])
given = inputs(g)
launcher, execute = Plan.launcher, Plan.execute

def both(plan, places):
    launch = launcher(plan, places)

    def launched(*args):
        launch(*args)
        after(plan)

    return launched

def executed(plan, *args):
    execute(plan, *args)
    after(plan)

Plan.launcher, Plan.execute = both, executed
try:
    if how == "called":
        y = exe(**given)
    else:
        form = exe.spec.tensors["y"]
        y = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="cuda")
        exe.bind(**given, y=y)()
    wide = {name: value.double().cpu() for name, value in given.items()}
    conv = torch.nn.functional.conv2d(wide["x"], wide["w"], padding=1)
    wanted = (conv + wide["v"]).relu()
    tell(off=float((y.double().cpu() - wanted).abs().max() / wanted.abs().max()))
except cg.PlanFault as fault:
    try:
        torch.zeros(1, device="cuda").cpu()
        lost = False
    except RuntimeError:
        lost = True
    tell(fault=str(fault), plan=fault.plan, lost=lost)
sys.stdout.flush()
os._exit(0)  # what is torn down without a context only adds noise
"""


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, and workers that end soon."""
    monkeypatch.setenv("CUDNNGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDNNGRAPH_VERIFY", "isolated")
    monkeypatch.setattr(settings, "_from_environ", None)
    monkeypatch.setattr(workers, "_pools", {})
    monkeypatch.setattr(workers, "IDLE_S", 3.0)
    monkeypatch.setattr(guard, "_in_process", "")
    yield
    cg.cache_clear()


def process(named: str, does: str, how: str = "called") -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, what was told, and standard error of a process that runs the program."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, named, does, how],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=500,
        env={**os.environ, "PYTHONPATH": path},
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, told, done.stderr


def marks() -> list[Path]:
    return list((settings.current().cache_dir / "launching").glob("*.mark"))


def reasons() -> list[str]:
    paths = (settings.current().cache_dir / "rejected").glob("*.json")
    return [entry["reason"] for path in paths for entry in json.loads(path.read_text())]


def wanted(given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what `embedded` computes, in float64."""
    wide = {name: value.double().cpu() for name, value in given.items()}
    conv = torch.nn.functional.conv2d(wide["x"], wide["w"], padding=1)
    return (conv + wide["v"]).relu().cuda()


needs_kernels = pytest.mark.skipif(
    not hasattr(torch.cuda, "_compile_kernel"), reason="this torch compiles no kernels"
)


@needs_kernels
@pytest.mark.parametrize("how", ["called", "bound"])
def test_a_plan_that_faults_is_named_and_the_next_process_takes_another(how: str) -> None:
    code, told, stderr = process("all", "fault", how)
    assert code == 0, stderr
    first, fault = told
    assert first["tier"] == "built"
    assert fault["lost"] and fault["plan"] == next(filter(None, first["plans"]))
    assert fault["fault"].startswith("step 1, ") and "misaligned address" in fault["fault"]
    assert f"cuDNN {fault['plan']}: " in fault["fault"]
    assert 'Policy(exclude_engines=("eng' in fault["fault"]
    assert marks() == []
    assert [r for r in reasons() if r.startswith("its first launch faulted: CUDA error: misali")]

    code, told, stderr = process(fault["plan"], "fault", how)
    assert code == 0, stderr
    second, right = told
    assert second["tier"] == "built" and fault["plan"] not in second["plans"]
    assert right["off"] < numerics.bound(torch.float16)
    code, told, stderr = process(fault["plan"], "fault", how)
    assert code == 0 and told[0]["tier"].startswith("disk"), stderr


@needs_kernels
def test_a_plan_that_ends_the_process_is_passed_by_in_the_next() -> None:
    code, told, stderr = process("all", "abort")
    assert code == -signal.SIGABRT and len(told) == 1, stderr
    assert len(marks()) == 1
    ended = next(filter(None, told[0]["plans"]))
    code, told, stderr = process(ended, "abort")
    assert code == 0, stderr
    assert told[0]["tier"] == "built" and ended not in told[0]["plans"]
    assert told[1]["off"] < numerics.bound(torch.float16)
    assert marks() == [] and lookup.DIED in reasons()


def test_a_first_run_is_right_and_leaves_nothing_behind() -> None:
    g = embedded()
    exe = g.compile("cuda")
    assert exe.tier == "built" and exe._program._first is not None
    for _ in range(3):
        is_right(g, exe)
    assert exe._program._first is None and marks() == []
    again()
    exe = g.compile("cuda")
    assert exe.tier.startswith("disk") and exe._program._first is None
    is_right(g, exe)


def test_a_capture_runs_once_before_and_is_right() -> None:
    g = embedded()
    exe = g.compile("cuda")
    given = inputs(g)
    form = exe.spec.tensors["y"]
    y = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="cuda")
    captured = exe.capture(**given, y=y)
    assert exe._program._first is None and marks() == []
    y.zero_()
    captured()
    numerics.check(y, wanted(given), torch.float16)


def test_threads_and_streams_may_run_it_first_at_once() -> None:
    g = embedded()
    exe = g.compile("cuda")
    given = inputs(g)
    together, found, failed = threading.Barrier(4), [], []

    def work() -> None:
        try:
            stream: Any = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                together.wait(60)
                y = exe(**given)
                stream.synchronize()
                found.append(y)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed and len(found) == 4 and marks() == []
    for y in found:
        numerics.check(y, wanted(given), torch.float16)


def test_plans_verify_says_how_far_off_plans_are(capsys: pytest.CaptureFixture[str]) -> None:
    g = embedded()
    exe = g.compile("cuda", verify="off")
    assert any(step.choice is not None for step in exe.steps)
    assert cli.main(["plans", "verify"]) == 0
    out = capsys.readouterr().out
    assert "1 entries checked, 1 replayed, 0 problems" in out and "1 renewed" in out
    again()
    exe = g.compile("cuda")
    assert exe.tier.startswith("disk") and not workers._pools, "it was checked already"
    assert all(step.verified is not None for step in exe.steps if step.choice is not None)
    is_right(g, exe)


def test_plans_verify_removes_a_record_whose_plan_is_rejected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    g = embedded()
    exe = g.compile("cuda")
    step = next(step for step in exe._program.steps if step.choice is not None)
    assert step.choice is not None
    lookup.Rejected(0).add(step.spec, exe.policy, {step.choice: "wrong: off by 0.5"})
    assert cli.main(["plans", "verify"]) == 1
    out = capsys.readouterr().out
    assert f"{step.choice}: wrong: off by 0.5" in out and "1 removed" in out
    again()
    exe = g.compile("cuda")
    assert exe.tier == "built"
    assert step.choice not in [each.choice for each in exe._program.steps if each.spec == step.spec]
    is_right(g, exe)
