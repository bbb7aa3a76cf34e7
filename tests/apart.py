"""Cases that may fault, hang or spoil memory, each in a process of its own.

A CUDA error such as "misaligned address" ends the process that met it, whatever is caught. So each
case runs in a child that is forked from a server which has imported all that a case needs and has
not touched the GPU. The server is a program of its own, since the caller may have a CUDA context.

A case is one argument of a function of a module: a generator that is given the case and the marks
that are to be left out, and says ``(mark, None)`` before it tries something and ``(mark, outcome)``
behind it. Where a child dies in between, the mark's outcome is how it died, and a new child goes on
with the others.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Case = Callable[[Any, Sequence[str]], Iterable[tuple[str, Any]]]

_PR_SET_PDEATHSIG = 1
ALL = "the whole case"  # the mark of a child that dies without having said what it tries


@dataclass
class _Child:
    """A child at work on a case: what it has said so far."""

    number: int
    case: Any
    gpu: int
    skip: list[str]
    pid: int = 0
    pipe: int = 0
    until: float = 0.0
    rest: bytes = b""
    tried: str | None = ALL
    said: list[str] = field(default_factory=list)


def run(
    function: str, cases: Sequence[Any], *, jobs: int, limit_s: float, gpus: int = 1
) -> Iterator[tuple[int, str, Any]]:
    """(number of the case, mark, outcome) of all cases, as they come.

    ``function`` is ``module:name``; ``limit_s`` is the time of one child.
    """
    command = [sys.executable, "-m", "tests.apart", function, str(jobs), str(limit_s), str(gpus)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for a GPU otherwise spoils it for a fork
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            for case in cases:
                server.stdin.write(json.dumps(case) + "\n")
            server.stdin.close()
            for line in server.stdout:
                yield tuple(json.loads(line))
        finally:
            server.terminate()
    if server.returncode not in (0, -signal.SIGTERM):
        raise RuntimeError(f"the server of {function} ended with {server.returncode}")


def _started(child: _Child, work: Case, limit_s: float) -> _Child:
    """Fork a child that runs its case and writes what it says into a pipe."""
    mine, its = os.pipe()
    child.pid = os.fork()
    if child.pid == 0:
        code = 1
        try:
            os.close(mine)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no child outlives it
            os.environ["CUDA_VISIBLE_DEVICES"] = str(child.gpu)
            os.dup2(2, 1)  # what a case prints is no message
            with os.fdopen(its, "w", buffering=1) as pipe:
                try:
                    for message in work(child.case, child.skip):
                        pipe.write(json.dumps(message) + "\n")
                    code = 0
                except BaseException as error:  # its text is the outcome
                    text = f"{type(error).__name__}: {error}".splitlines()[0]
                    pipe.write(json.dumps((None, text)) + "\n")
        finally:
            os._exit(code)  # no handlers of the server's
    os.close(its)
    child.pipe, child.until = mine, time.monotonic() + limit_s
    child.tried, child.rest = ALL, b""
    return child


def _heard(child: _Child) -> Iterator[tuple[str, Any]]:
    """Yield the outcomes of marks that a child has sent."""
    *lines, child.rest = child.rest.split(b"\n")
    for line in lines:
        mark, outcome = json.loads(line)
        if mark is None:
            mark = child.tried if child.tried is not None else ALL
            child.said.append(outcome)
            continue
        if outcome is None:
            child.tried = mark
        else:
            child.skip.append(mark)
            child.tried = None
            yield mark, outcome


def _serve(function: str, jobs: int, limit_s: float, gpus: int) -> None:
    module, _, name = function.partition(":")
    work: Case = getattr(importlib.import_module(module), name)
    waiting = [
        _Child(number, json.loads(line), number % gpus, []) for number, line in enumerate(sys.stdin)
    ][::-1]
    running: dict[int, _Child] = {}

    def tell(child: _Child, mark: str, outcome: Any) -> None:
        print(json.dumps((child.number, mark, outcome)), flush=True)

    while waiting or running:
        while waiting and len(running) < jobs:
            child = _started(waiting.pop(), work, limit_s)
            running[child.pipe] = child
        ready, _, _ = select.select(list(running), [], [], 0.5)
        for pipe in ready:
            child, data = running[pipe], os.read(pipe, 1 << 16)
            child.rest += data
            for mark, outcome in _heard(child):
                tell(child, mark, outcome)
            if data:
                continue
            del running[pipe]
            os.close(pipe)
            _, status = os.waitpid(child.pid, 0)
            code = os.waitstatus_to_exitcode(status)
            if code == 0 and child.tried in (None, ALL):
                continue
            why = "; ".join(child.said) or (
                signal.Signals(-code).name if code < 0 else f"exit code {code}"
            )
            if code == -signal.SIGKILL and time.monotonic() > child.until:
                why = f"hangs, or takes more than {limit_s:g} s"
            again = child.tried not in (None, ALL)
            tell(child, child.tried or ALL, {"died": why})
            if again:
                waiting.append(
                    _Child(child.number, child.case, child.gpu, [*child.skip, str(child.tried)])
                )
        for child in running.values():
            if time.monotonic() > child.until:
                os.kill(child.pid, signal.SIGKILL)


def died(outcomes: Iterable[tuple[int, str, Any]]) -> list[tuple[int, str, str]]:
    """Return the outcomes of :func:`run` whose child died, with how it died."""
    return [
        (number, mark, outcome["died"])
        for number, mark, outcome in outcomes
        if isinstance(outcome, dict) and "died" in outcome
    ]


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
