"""Plans that are checked in processes of their own before they compute anything: what is right is
taken, and what is wrong or faults harms nobody, twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import settings
from cudnngraph.backend.lowering import driver
from cudnngraph.bench import models
from cudnngraph.cache import lookup
from cudnngraph.cache.state import STATE
from cudnngraph.select import guard, workers
from cudnngraph.select.processes import Server
from tests import numerics

F16 = torch.float16
# A worker that lets through what cudnngraph refuses: engines 4 and 7 read it from a wrong address.
LETS_THROUGH = """
import sys
from cudnngraph.backend.lowering import driver
driver.check_beside_convolutions = lambda ctx: None
from cudnngraph.select import forkserver, worker
forkserver.serve(int(sys.argv[1]), worker.load)
"""
BUSY = """
import json, sys
from cudnngraph.select import forkserver
said = json.dumps({"unusable": "all devices are busy"}) + "\\n"
forkserver.serve(int(sys.argv[1]), lambda: lambda talk, gpu: talk.sendall(said.encode()))
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


def embedded(channels: int = 64) -> cg.Graph:
    """A convolution, and a number for each channel of each image added."""
    g = cg.Graph("embedded")
    x = g.input("x", (2, channels, 16, 16), F16, layout="channels_last")
    w = g.input("w", (channels, channels, 3, 3), F16, layout="channels_last")
    v = g.input("v", (2, channels, 1, 1), F16)
    g.output("y", g.relu(g.conv(x, w, padding=1) + v))
    return g


# cuDNN 9.19's heuristics have a segmentation fault for this product and what is behind it.
FORKED = """
import torch
import cudnngraph as cg

g = cg.Graph("forked")
a, b, s, m = (g.input(n, d, torch.float16) for n, d in zip("absm", {dims}))
z = g.matmul(a, b) * (s - s * s)
g.output("y", (z + z * 1.0) * g.sigmoid(m * 1.0))
exe = g.compile("cuda", tune={tune!r})
given = [torch.rand(d, device="cuda").half() for d in {dims}]
a, b, s, m = (each.double() for each in given)
z = a @ b * (s - s * s)
want = 2 * z * m.sigmoid()
assert ((exe(*given) - want).norm() / want.norm()).item() < 2e-3
print(len(exe.steps), exe.explain())
"""


@pytest.mark.parametrize("tune", ["heuristic", "autotune"])
def test_a_ranking_that_would_end_this_process_cuts_the_graph(tune: str) -> None:
    program = FORKED.format(dims=[(1, 3, 209), (1, 209, 3), (1, 3, 3), (1, 3, 3)], tune=tune)
    told = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
        for _ in range(2)
    ]
    assert [each.returncode for each in told] == [0, 0], told[0].stderr[-2000:]
    if torch.backends.cudnn.version() < 92000:
        said = "cuDNN's ranking of its engines: the process that tried it died of SIGSEGV"
        assert said in told[0].stdout


def inputs(g: cg.Graph) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    spec = g.spec()
    made = {}
    for name in spec.inputs:
        tensor = spec.tensors[name]
        blank = torch.empty_strided(tensor.shape, tensor.stride, dtype=tensor.dtype, device="cuda")
        made[name] = blank.copy_(torch.randn(tensor.shape, device="cuda") / 8)
    return made


def is_right(g: cg.Graph, exe: Any) -> None:
    given = inputs(g)
    wide = {name: value.double().cpu() for name, value in given.items()}
    conv = torch.nn.functional.conv2d(wide["x"], wide["w"], padding=1)
    numerics.check(exe(**given), (conv + wide["v"]).relu().cuda(), F16)


def again() -> None:
    """Forget what a new process does not have: plans in memory, and workers."""
    cg.cache_clear()
    STATE.stores.clear()
    STATE.rejections.clear()
    workers._pools.clear()


@pytest.mark.parametrize("tune", ["heuristic", "autotune"])
@pytest.mark.parametrize("verify", ["isolated", "inprocess"])
def test_a_plan_is_checked_before_its_first_use(
    tune: Any, verify: Any, record_property: Any
) -> None:
    g = embedded()
    start = time.perf_counter()
    exe = g.compile("cuda", tune=tune, verify=verify, budget_s=2.0)
    record_property("summary", f"{tune} {verify}: {time.perf_counter() - start:.1f} s")
    is_right(g, exe)
    for step in exe.steps:
        if step.choice is not None:
            assert step.verified is not None and step.verified.error is not None
            assert 0.0 < step.verified.error < 2e-3
            assert step.verified.gpu == torch.cuda.get_device_name()
    assert "checked on NVIDIA" in exe.explain()
    assert (0 in workers._pools) == (verify == "isolated")


@pytest.mark.parametrize("tune", ["heuristic", "autotune", "cached"])
def test_what_was_checked_once_is_not_checked_again(tune: Any) -> None:
    g = embedded()
    g.compile("cuda", tune="autotune", budget_s=1.0)
    again()
    exe = g.compile("cuda", tune=tune)
    assert exe.tier.startswith("disk") and not workers._pools
    is_right(g, exe)


def test_a_record_that_nobody_has_checked_is_checked_when_it_is_loaded() -> None:
    g = embedded()
    unchecked = g.compile("cuda", verify="off")
    assert all(step.verified is None for step in unchecked.steps)
    assert "not checked: verify='off'" in unchecked.explain()
    again()
    exe = g.compile("cuda", tune="cached")
    assert exe.tier.startswith("disk") and workers._pools
    assert all(step.verified is not None for step in exe.steps if step.choice is not None)
    again()
    g.compile("cuda", tune="cached")
    assert not workers._pools, "once"


@pytest.mark.parametrize("tune", ["heuristic", "autotune"])
def test_plans_that_fault_or_are_wrong_are_rejected_and_not_tried_again(
    tune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "check_beside_convolutions", lambda ctx: None)

    def lenient(file: int) -> Sequence[str]:
        return [sys.executable, "-c", LETS_THROUGH, str(file)]

    def pool() -> workers.Workers:
        workers._pools[0] = workers.Workers(0, 4, Server(lenient))
        return workers._pools[0]

    g = embedded(320)
    pool()
    exe = g.compile("cuda", tune=tune, budget_s=3.0)
    is_right(g, exe)  # and this process has its CUDA context
    assert len(exe.steps) > 1, "cut where every plan was wrong"
    kept = list((settings.current().cache_dir / "rejected").iterdir())
    texts = "\n".join(path.read_text() for path in kept)
    assert "misaligned address" in texts and "is off by" in texts
    asked: list[str] = []
    again()
    for entry in list(lookup.store().scan()):
        lookup.store().remove(entry.id)
    second = pool()
    talk = second._talk

    def listening(task: Any, faults: Any, process: Any) -> Any:
        over, trying, died = talk(task, faults, process)
        asked.append(died)
        return over, trying, died

    monkeypatch.setattr(second, "_talk", listening)
    is_right(g, g.compile("cuda", tune=tune, budget_s=3.0))
    assert asked and not any("misaligned" in died for died in asked), "not tried again"


def test_a_whole_model_is_checked(record_property: Any) -> None:
    torch.manual_seed(0)
    model = models.randomized(models.ResNet((1, 2, 1, 1), 32, 10)).cuda().half()
    x = torch.randn(4, 3, 96, 96, device="cuda", dtype=F16)
    start = time.perf_counter()
    fused = cg.fuse(model, x)
    record_property("summary", f"{time.perf_counter() - start:.1f} s, {os.cpu_count()} cores")
    assert fused.report is not None
    assert all(s.verified is not None for s in fused.report.steps if s.choice is not None)


def test_where_no_worker_can_have_the_gpu_plans_are_checked_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    busy = Server(lambda file: [sys.executable, "-c", BUSY, str(file)])
    workers._pools[0] = workers.Workers(0, 1, busy)
    g = embedded()
    exe = g.compile("cuda")
    is_right(g, exe)
    assert all(step.verified is not None for step in exe.steps if step.choice is not None)
    warned = [each.message for each in caplog.records if "in this process" in each.message]
    assert len(warned) == 1 and "all devices are busy" in warned[0]
