"""A plan that cuDNN proposes first misbehaves in the process that checks it: the user gets another
one and keeps a GPU that works, the reason is kept, and no later process tries it.

What misbehaves is a plan of cuDNN's own with something put behind it (misbehaving.py), in the
workers alone: what a user's process had of it would be right, so each test asks what was chosen.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import settings
from cudnngraph.backend.plan import KERNEL, Choice
from cudnngraph.cache import lookup
from cudnngraph.ir.key import step_digest
from cudnngraph.select import guard, processes, workers
from cudnngraph.select.processes import Server
from cudnngraph.select.worker import from_choice
from tests.gpu import misbehaving
from tests.gpu.test_autotune import check, conv_bias_relu, inputs_of
from tests.gpu.test_guard import again

HANG_S = 8.0
GIB = 1 << 30
EFFORT = {"max_candidates": 4, "budget_s": 1.0}
ENDED = re.escape(workers.LOST)
REASONS = {
    "is wrong": r"wrong: '.+' is off by 0\.1",
    "writes outside": "writes outside of its output '",
    "writes past its workspace": r"writes outside of its workspace of \d+ bytes",
    "writes to an input": "writes over its inputs",
    "leaves elements": "wrong: '.+' is off by inf",
    "is misaligned": f"{ENDED} .*misaligned address",
    "accesses what is not there": f"{ENDED} .*illegal memory access",
    "hangs": f"{ENDED} hangs, or takes more than {HANG_S:g} s",
    "aborts": f"{ENDED} died of SIGABRT",
    "is killed": f"{ENDED} died of SIGKILL",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that tells the workers how to misbehave."""
    return tmp_path_factory.mktemp("misbehaving") / "told.json"


@pytest.fixture(scope="module")
def server(told: Path) -> Iterator[Server]:
    """The process that forks them: one for all cases, which has torch imported."""

    def command(file: int) -> Sequence[str]:
        return [sys.executable, "-c", misbehaving.PROGRAM, str(told), str(file)]

    made = Server(command)
    yield made
    if made._control is not None:
        made._stop()


@dataclass
class Injected:
    """A graph, and the plan of its first step with one, which misbehaves when workers have it."""

    graph: cg.Graph
    digest: str
    choice: Choice
    log: Path
    told: Path
    server: Server

    def begin(self, does: str) -> None:
        """Be a new process, with workers where the plan does that."""
        again()
        chosen = {"digest": self.digest, "choice": from_choice(self.choice)}
        self.told.write_text(json.dumps({**chosen, "does": does, "log": str(self.log)}))
        workers._pools[0] = workers.Workers(0, 2, self.server)

    def forget(self) -> None:
        """Remove what was chosen, but not what was rejected."""
        for entry in list(lookup.store().scan()):
            lookup.store().remove(entry.id)

    @property
    def attempts(self) -> int:
        return len(self.log.read_text().splitlines())

    def takes(self, exe: cg.Executable) -> bool:
        """Whether an executable has the plan."""
        return any((step_digest(s.spec), s.choice) == (self.digest, self.choice) for s in exe.steps)

    def rejected(self) -> list[str]:
        """The reasons that are kept for the plan, of which a later process hears."""
        folder = settings.current().cache_dir / "rejected"
        paths = folder.iterdir() if folder.exists() else ()
        mine = from_choice(self.choice)
        return [
            entry["reason"]
            for path in paths
            for entry in json.loads(path.read_text())
            if [entry["engine"], entry["knobs"]] == mine
        ]

    def is_right(self, exe: cg.Executable) -> None:
        """Its result, by another plan or a torch step; and torch goes on in this process."""
        assert not self.takes(exe)
        check(exe, inputs_of(exe))
        works()


def works() -> None:
    """Assert that this process has its GPU: a kernel of torch's runs, and memory is to be had."""
    x = torch.arange(1024, device="cuda")
    assert int((x * 2).sum()) == 1023 * 1024
    torch.cuda.synchronize()


@pytest.fixture
def injected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: Path,
    server: Server,
    request: pytest.FixtureRequest,
) -> Iterator[Injected]:
    """An empty cache but for a record that nobody has checked; its plan, or its generated kernel
    where the test says so, is the one."""
    monkeypatch.setenv("CUDNNGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDNNGRAPH_VERIFY", "isolated")
    monkeypatch.setenv("CUDNNGRAPH_KERNELS", str(int(hasattr(request, "param"))))
    monkeypatch.setattr(settings, "_from_environ", None)
    monkeypatch.setattr(workers, "_pools", {})
    monkeypatch.setattr(workers, "IDLE_S", 1.0)
    monkeypatch.setattr(guard, "_in_process", "")
    again()
    graph = getattr(request, "param", conv_bias_relu)()
    unchecked = graph.compile("cuda", tune="heuristic", verify="off")
    first = next(step for step in unchecked.steps if step.choice is not None)
    assert first.choice is not None and first.verified is None
    log = tmp_path / "log"
    log.touch()
    yield Injected(graph, step_digest(first.spec), first.choice, log, told, server)
    assert not guard._in_process, "there were workers all the time"
    cg.cache_clear()


@pytest.mark.parametrize("does", REASONS)
@pytest.mark.parametrize("tune", ["heuristic", "autotune"])
def test_another_plan_is_taken_and_this_one_is_not_tried_again(
    tune: Any, does: str, injected: Injected, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    if does == "hangs":
        monkeypatch.setattr(processes, "LIMIT_S", HANG_S)
    injected.begin(does)
    injected.forget()
    start = time.perf_counter()
    exe = injected.graph.compile("cuda", tune=tune, **EFFORT)
    record_property("summary", f"{tune}, {does}: {time.perf_counter() - start:.1f} s")
    assert exe.tier == "built"
    assert injected.attempts >= 1, "it was tried"
    (reason,) = injected.rejected()
    assert re.match(REASONS[does], reason), reason
    injected.is_right(exe)

    tried = injected.attempts
    injected.begin(does)
    injected.forget()
    injected.is_right(injected.graph.compile("cuda", tune=tune, **EFFORT))
    assert injected.attempts == tried, "not tried again"


def gate() -> cg.Graph:
    """A graph that is one generated kernel."""
    g = cg.Graph("gate")
    x = g.input("x", (512, 640), torch.float16)
    g.output("y", g.mul(g.slice(x, 1, 0, 320), g.gelu(g.slice(x, 1, 320, 640))))
    return g


@pytest.mark.parametrize("injected", [gate], indirect=True)
@pytest.mark.parametrize("does", ["is wrong", "writes outside", "is misaligned", "aborts"])
@pytest.mark.parametrize("tune", ["heuristic", "autotune"])
def test_a_generated_kernel_is_not_taken_either(
    tune: Any, does: str, injected: Injected, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert injected.choice.engine == KERNEL
    test_another_plan_is_taken_and_this_one_is_not_tried_again(
        tune, does, injected, monkeypatch, record_property
    )


@pytest.mark.parametrize("does", REASONS)
def test_a_record_that_nobody_has_checked_serves_nobody(
    does: str, injected: Injected, monkeypatch: pytest.MonkeyPatch
) -> None:
    if does == "hangs":
        monkeypatch.setattr(processes, "LIMIT_S", HANG_S)
    injected.begin(does)
    with pytest.raises(cg.PlanNotCached, match=REASONS[does]):
        injected.graph.compile("cuda", tune="cached")
    works()
    assert injected.attempts == 1, "it was tried"
    (reason,) = injected.rejected()
    assert re.match(REASONS[does], reason), reason

    injected.begin(does)
    with pytest.raises(cg.PlanNotCached, match=REASONS[does]):
        injected.graph.compile("cuda", tune="cached")
    rebuilt = injected.graph.compile("cuda", tune="heuristic")
    assert rebuilt.tier == "built"
    injected.is_right(rebuilt)
    assert injected.attempts == 1, "not tried again"


@pytest.mark.alone
@pytest.mark.parametrize("tune", ["heuristic", "autotune", "cached"])
def test_what_a_plan_leaks_is_free_when_its_worker_ends(tune: Any, injected: Injected) -> None:
    """It is right, so it may be taken: in the user's process the plan is cuDNN's own."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    assert free > 4 * GIB
    injected.begin("leaks")
    if tune != "cached":
        injected.forget()
    exe = injected.graph.compile("cuda", tune=tune, **EFFORT)
    assert injected.attempts >= 1 and not injected.rejected()
    check(exe, inputs_of(exe))
    works()
    deadline = time.monotonic() + 15.0
    while time.monotonic() < deadline and torch.cuda.mem_get_info()[0] < free - 2 * GIB:
        time.sleep(0.1)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free - 2 * GIB


def test_the_plan_is_taken_where_it_does_nothing_more(injected: Injected) -> None:
    """The tests above are about what it does, not about being put there."""
    injected.begin("leaks")
    injected.forget()
    exe = injected.graph.compile("cuda", tune="heuristic")
    assert injected.takes(exe) and injected.attempts == 1
    assert all(step.verified is not None for step in exe.steps if step.choice is not None)
