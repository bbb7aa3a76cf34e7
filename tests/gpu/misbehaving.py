"""Workers whose plans misbehave: real ones, but for one choice of one step.

    python -c 'PROGRAM' TOLD FILE

forks them for the socket FILE. TOLD is a JSON file, read by each worker: {"digest", "choice",
"does", "log"}. The plan of that choice for the step with that digest does what :data:`BEHAVIOURS`
says, wherever it is built or replayed; each time it is had is a line in the log.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.plan import Choice, Plan
from cudnngraph.ir.key import step_digest
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select import forkserver, verification, worker
from tests.gpu.test_autotune import (
    Double,
    scales_its_output,
    writes_over_an_input,
    writes_past_its_output,
    writes_past_its_workspace,
)

LEAK_BYTES = 40 << 30
PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.gpu import misbehaving
misbehaving.serve(sys.argv[1], int(sys.argv[2]))
"""
KERNELS = """
extern "C" __global__ void misaligned(char* y) { *(volatile double*)(y + 1) = 1.0; }
extern "C" __global__ void illegal(char* y) { *(volatile char*)(y + (1ll << 40)) = 1; }
extern "C" __global__ void endless(char* y) { for (;;) *(volatile char*)y = 0; }
"""
Then = Callable[[Double], None]
_leaked: list[torch.Tensor] = []


def _launches(name: str) -> Callable[[], Then]:
    """A kernel behind the plan's own, on the same stream, compiled before the plan runs."""

    def made() -> Then:
        kernel = torch.cuda._compile_kernel(KERNELS, name)
        return lambda double: kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[double.tensor(-1)])

    return made


def _leaves_elements(double: Double) -> None:
    """The first 16 bytes are as they were before: a check fills what is to be written with FF."""
    double.bytes_at(double.places[-1], 16).fill_(0xFF)


def _aborts(double: Double) -> None:
    os.abort()


def _is_killed(double: Double) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leaks(double: Double) -> None:
    if not _leaked:
        free, _ = torch.cuda.mem_get_info()
        size = min(LEAK_BYTES, free // 2)
        _leaked.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


BEHAVIOURS: dict[str, Callable[[], Then]] = {
    "is wrong": lambda: scales_its_output,
    "writes outside": lambda: writes_past_its_output,
    "writes past its workspace": lambda: writes_past_its_workspace,
    "writes to an input": lambda: writes_over_an_input,
    "leaves elements": lambda: _leaves_elements,
    "is misaligned": _launches("misaligned"),
    "accesses what is not there": _launches("illegal"),
    "hangs": _launches("endless"),
    "aborts": lambda: _aborts,
    "is killed": lambda: _is_killed,
    "leaks": lambda: _leaks,
}


def misbehave(told: dict[str, Any]) -> None:
    """From now on the plan that was told of does in this process what it was told to do."""
    chosen = worker.to_choice(told["choice"])

    def put(spec: GraphSpec, choice: Choice, plan: Plan) -> Any:
        if choice != chosen or step_digest(spec) != told["digest"]:
            return plan
        with Path(told["log"]).open("a") as file:
            file.write(f"{told['does']} {os.getpid()}\n")
        return Double(plan, spec, BEHAVIOURS[told["does"]]())

    class Misbehaving(verification.Proposals):
        def build(
            self, candidate: Candidate, *, launch: bool = True
        ) -> tuple[Outcome, Plan | None]:
            outcome, plan = super().build(candidate, launch=launch)
            return outcome, plan and put(self.spec, candidate.choice, plan)

    real = verification.replay
    verification.Proposals = Misbehaving  # type: ignore[misc]
    verification.replay = lambda spec, choice, index: put(spec, choice, real(spec, choice, index))


def serve(told: str, file: int) -> None:
    """Fork workers that misbehave as the file ``told`` says when they start."""
    work = worker.load()

    def misbehaving(connection: socket.socket, device_index: int) -> None:
        misbehave(json.loads(Path(told).read_text()))
        work(connection, device_index)

    forkserver.serve(file, lambda: misbehaving)
