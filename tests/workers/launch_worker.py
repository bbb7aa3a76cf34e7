"""Processes for the tests of first launches.

    python -m tests.workers.launch_worker COMMAND DIRECTORY

A plan is a stand-in on the CPU, everything above it is real. Each command prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import handles
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.plan import Choice, Verified
from cudnngraph.cache.state import STATE
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.runtime import first_launch, process, program
from cudnngraph.runtime.process import PROCESS
from cudnngraph.select import guard
from cudnngraph.select.workers import Answer
from plans_cache.launches import Launches
from plans_cache.workspace import WorkspacePool
from tests.fakes import FakePlan, World

STEP = "c0ffee" * 8
CHECKED = Verified(1e-4, "a GPU", 91900, "1.28.0", "2.13")
FAULT = "CUDA error: misaligned address\nCUDA kernel errors might be asynchronously reported"
FIRST, SECOND = Choice(4, (("TILE", 3),)), Choice(7, ())


class Engine(FakePlan):
    """A plan that does what is said of its engine, and then nothing."""

    native = None

    def __init__(self, choice: Choice, does: Callable[[Choice], None]) -> None:
        super().__init__(choice)
        self.verified = CHECKED
        self._does = does

    def pointers(self, tensors: Sequence[int]) -> Any:
        return tuple(tensors)

    def execute(self, pointers: Any, workspace: int, handle: Any) -> None:
        self._does(self.choice)

    def bound(self, pointers: Any, workspace: int, stream: int) -> None:
        """There is nothing shorter."""

    def launcher(self, places: Sequence[int]) -> Callable[..., None]:
        return lambda addresses, workspace, handle: self._does(self.choice)


class Engines(World):
    """A library with engines 4 and 7 for every step of one op, and a GPU that is a CPU."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.does: dict[int, Callable[[], None]] = {}
        self.launched: list[int] = []
        self.waits = 0
        self.lost = False
        self.capturing = False

    def launch(self, choice: Choice) -> None:
        self.launched.append(choice.engine)
        self.does.get(choice.engine, lambda: None)()

    def fault(self) -> None:
        """As of now the CUDA context is lost; a launch does not tell, whoever waits does."""
        self.lost = True

    def wait(self, device: torch.device) -> None:
        self.waits += 1
        if self.lost:
            raise RuntimeError(FAULT)

    def load(self, blob: bytes, choice: Choice, index: int) -> FakePlan:
        self.loaded.append(blob)
        return Engine(choice, self.launch)

    def replay(self, spec: GraphSpec, choice: Choice, index: int) -> FakePlan:
        self.replayed.append(choice)
        return Engine(choice, self.launch)

    def first(
        self, spec: GraphSpec, policy: cg.Policy, rejected: Any, gate: Any = None, ahead: Any = None
    ) -> Any:
        """As :meth:`cudnngraph.select.workers.Workers.first`: what of the ranking is not
        rejected."""
        if len(spec.nodes) > 1:
            return SimpleNamespace(result=lambda: Answer(refused=("too large",)))
        outcomes = []
        for number, choice in enumerate((FIRST, SECOND)):
            candidate = Candidate(number, choice, f"eng{choice.engine}")
            why = rejected.get(choice)
            outcomes.append(Outcome(candidate, why is None, why or ""))
            if why is None:
                self.built.append(f"{spec.nodes[0].op} {choice.engine}")
                break
        return SimpleNamespace(result=lambda: Answer(outcomes=tuple(outcomes), error=1e-4))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().install(monkeypatch)
        monkeypatch.setattr(STATE, "rejections", {})
        monkeypatch.setattr(STATE, "launches", {})
        monkeypatch.setattr(guard, "_in_process", "")
        monkeypatch.setattr(guard.workers, "on", lambda index: self)
        monkeypatch.setattr(guard, "replay", self.replay)
        monkeypatch.setattr(Verified, "here", classmethod(lambda cls, index, error: CHECKED))
        monkeypatch.setattr(first_launch, "wait", self.wait)
        monkeypatch.setattr(handles, "raw_stream", lambda index: 0)
        monkeypatch.setattr(handles, "handle", lambda index: None)
        monkeypatch.setattr(handles, "handle_on_current_stream", lambda index: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        entry = SimpleNamespace(stream=0, handle=SimpleNamespace(backend_handle=7))
        monkeypatch.setattr(handles, "thread_handle", lambda index: entry)
        for name in ("getDevice", "isCurrentStreamCapturing", "getCurrentRawStream"):
            monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda *index: 0, raising=False)
        monkeypatch.setattr(PROCESS, "workspace", WorkspacePool(_on_cpu))
        monkeypatch.setattr(process, "_allocate", _on_cpu)
        monkeypatch.setattr(PROCESS, "captured", {})
        monkeypatch.setattr(program, "replay", self.replay)  # for further threads

    def compiled(self, **options: Any) -> cg.Executable:
        """x · w, then ReLU: two steps."""
        g = cg.Graph("block")
        x, w = (g.input(name, (4, 4), torch.float16) for name in "xw")
        g.output("y", g.relu(g.matmul(x, w)))
        return g.compile("cuda:0", **{"verify": "isolated", "allow_tf32": False, **options})

    def again(self, **options: Any) -> cg.Executable:
        """As a new process compiles."""
        cg.cache_clear()
        for known in (STATE.stores, STATE.rejections, STATE.launches):
            known.clear()
        self.launched.clear()
        self.waits, self.lost = 0, False
        return self.compiled(**options)


def _on_cpu(device: int, stream: int, size_bytes: int) -> torch.Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8)


def run(exe: cg.Executable) -> None:
    """A direct run, of which the plans write nothing."""
    tensors = [torch.zeros(4, 4, dtype=torch.float16) for _ in range(3)]
    exe._program.run(tensors, [tensor.data_ptr() for tensor in tensors])


def bound(exe: cg.Executable) -> cg.BoundCall:
    """A call with tensors bound to it."""
    names = (*exe._program.spec.inputs, *exe._program.spec.outputs)
    tensors = {name: torch.zeros(4, 4, dtype=torch.float16) for name in names}
    return cg.BoundCall(exe._program, tensors)


# -- processes -------------------------------------------------------------------------------------


def _report(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def compile_and_run(directory: Path, ends: str) -> None:
    """Run a program of two steps; engine 4 ends the process where ``ends`` says so."""
    with pytest.MonkeyPatch.context() as patch:
        world = Engines(directory)
        world.install(patch)
        if ends:
            world.does[4] = os.abort if ends == "aborts" else lambda: os._exit(3)
        exe = world.compiled()
        run(exe)
        choices = [step.choice.engine for step in exe.steps if step.choice is not None]
        _report(tier=exe.tier, engines=choices, launched=world.launched)


def hold(directory: Path, _: str) -> None:
    """Mark a plan, say so, and live on."""
    mark = Launches(directory).begin()
    mark.set(STEP, (4, (("TILE", 3),)))
    _report(ready=True)
    time.sleep(60)


def fork(directory: Path, _: str) -> None:
    """Fork a child that tries to write its parent's mark, then one that outlives its parent."""
    launches = Launches(directory)
    mark = launches.begin()
    mark.set(STEP, (4, ()))
    child = os.fork()
    if child == 0:
        other = directory / "other"  # gets the number that the mark's file had
        file = os.open(other, os.O_RDWR | os.O_CREAT)
        mark.set(STEP, (9, ()))
        mark.close()
        if other.read_bytes() or os.fstat(file).st_nlink != 1:
            os._exit(2)
        found: list[Any] = []
        Launches(directory).look(lambda id, plan: found.append(plan))
        os._exit(0 if not found else 1)
    _, status = os.waitpid(child, 0)
    (text,) = (path.read_text() for path in (directory / "launching").iterdir())
    _report(child=os.waitstatus_to_exitcode(status), engine=json.loads(text)["engine"])
    begun, begins = os.pipe()
    sleeper = os.fork()
    if sleeper == 0:
        os.write(begins, b"!")  # it has let go of the lock, if it ever does
        os.close(1)
        os.close(2)
        time.sleep(30)  # outlives its parent, whose lock must not live on in it
        os._exit(0)
    os.read(begun, 1)
    _report(sleeper=sleeper)
    os.abort()


def main() -> None:
    """See the module's docstring."""
    name, where, *rest = sys.argv[1:]
    commands = {"run": compile_and_run, "hold": hold, "fork": fork}
    commands[name](Path(where), rest[0] if rest else "")


if __name__ == "__main__":
    main()
