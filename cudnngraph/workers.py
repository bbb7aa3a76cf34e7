"""The processes that build and check plans for this one (:mod:`~cudnngraph.worker`).

They are programs of their own, started when first needed and ended when idle, not forks: a process
that has used CUDA cannot be forked, and one that is spawned would need the user's main module. One
that faults, hangs or is killed in the middle of an attempt rejects that plan; the task goes on in
another.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import wire
from .backend.plan import Candidate, Choice, Outcome
from .errors import BackendUnavailable
from .ir import GraphSpec
from .policy import Policy
from .worker import from_choice, to_choice

_log = logging.getLogger(__name__)

LIMIT_S = 120.0  # of one attempt
START_S = 60.0
IDLE_S = 20.0
MOST = 8  # processes on one GPU
LOST = "the process that tried it"


class Unusable(BackendUnavailable):
    """No worker can be had here; says why."""


@dataclass(frozen=True)
class Answer:
    """What became of a task: the outcomes of the candidates tried, the serialized plan of the one
    that passed (None where there is no such form), and the largest relative error of its results.

    ``refused`` says why there are no candidates. ``faults`` are choices that ended a process or
    hung, with how.
    """

    refused: tuple[str, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    blob: bytes | None = None
    error: float | None = None
    wrong: str | None = None
    faults: Mapping[Choice, str] = field(default_factory=dict)


class _Process:
    """One worker, as the thread that talks to it sees it."""

    def __init__(self, command: Sequence[str]) -> None:
        package = str(Path(__file__).resolve().parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        try:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the user's process
            )
        except OSError as error:
            raise Unusable(f"no process can be started: {error}") from None
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._rest = b""
        first = self.hear(START_S)
        if first is None or "ready" not in first:
            why = self.how_it_ended() if first is None else str(first.get("unusable"))
            self.end()
            raise Unusable(f"a worker does not start: {why}")

    def send(self, task: Mapping[str, Any]) -> bool:
        """Whether the task could be sent."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return False
        return True

    def hear(self, limit_s: float) -> dict[str, Any] | None:
        """The next message; None where the process has ended or says nothing in time."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                self.end(f"hangs, or takes more than {limit_s:g} s")
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    _ended = ""

    def how_it_ended(self) -> str:
        """For people."""
        if self._ended:
            return self._ended
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "closed its output"
        if code < 0:
            return f"died of {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def end(self, why: str = "") -> None:
        """Kill it, and wait until it is gone."""
        self._ended = self._ended or why
        self._process.kill()
        self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


Command = Callable[[int], Sequence[str]]


def program(device_index: int) -> list[str]:
    """What starts a worker."""
    return [sys.executable, "-m", "cudnngraph.worker", str(device_index)]


@dataclass
class _Task:
    message: dict[str, Any]
    future: Future[Answer]
    rejected: dict[Choice, str]


class Workers:
    """Worker processes of one GPU, at most ``most``; each is served by a thread of its own."""

    def __init__(self, device_index: int, most: int, command: Command = program) -> None:
        self._index = device_index
        self._most = most
        self._command = command
        self._waiting: queue.Queue[_Task] = queue.Queue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._number = 0

    def first(
        self, spec: GraphSpec, policy: Policy, rejected: Mapping[Choice, str]
    ) -> Future[Answer]:
        """The first plan that passes. Its result raises :class:`Unusable` where there are no
        workers."""
        return self._submit("first", spec, policy, rejected)

    def one(
        self, spec: GraphSpec, policy: Policy, choice: Choice, rejected: Mapping[Choice, str]
    ) -> Future[Answer]:
        """One candidate, built and checked."""
        return self._submit("one", spec, policy, rejected, choice=from_choice(choice))

    def check(self, spec: GraphSpec, policy: Policy, choice: Choice) -> Future[Answer]:
        """What is wrong with a choice that was made before: ``wrong`` and ``error``."""
        return self._submit("check", spec, policy, {}, choice=from_choice(choice))

    def _submit(
        self,
        task: str,
        spec: GraphSpec,
        policy: Policy,
        rejected: Mapping[Choice, str],
        **more: Any,
    ) -> Future[Answer]:
        future: Future[Answer] = Future()
        message = {
            "task": task,
            "spec": wire.from_spec(spec),
            "policy": wire.from_policy(policy),
            **more,
        }
        self._waiting.put(_Task(message, future, dict(rejected)))
        with self._lock:
            if self._idle < self._waiting.qsize() and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._serve, name="cudnngraph-worker", daemon=True).start()
        return future

    # -- a thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        process: _Process | None = None
        try:
            while (task := self._next()) is not None:
                if not task.future.set_running_or_notify_cancel():
                    continue
                try:
                    answer, process = self._done(task, process)
                    task.future.set_result(answer)
                except BaseException as error:
                    task.future.set_exception(error)
        finally:
            if process is not None:
                process.end()

    def _next(self) -> _Task | None:
        """The next task, or None when there was none for a while."""
        with self._lock:
            self._idle += 1
        try:
            while True:
                try:
                    return self._waiting.get(timeout=IDLE_S)
                except queue.Empty:
                    with self._lock:  # a task that came meanwhile has counted on this thread
                        if self._waiting.empty():
                            self._threads -= 1
                            return None
        finally:
            with self._lock:
                self._idle -= 1

    def _done(self, task: _Task, process: _Process | None) -> tuple[Answer, _Process | None]:
        faults: dict[Choice, str] = {}
        lost = 0
        while True:
            try:
                if process is None:
                    process = _Process(self._command(self._index))
                message, trying, died = self._talk(task, faults, process)
            except BaseException:
                if process is not None:
                    process.end()
                raise
            if message is not None:
                return _answer(message, faults), process
            how = died or process.how_it_ended()
            process.end()
            process = None
            if trying is None:
                lost += 1
                if lost > 2:
                    raise Unusable(f"three workers ended without a word: the last {how}")
                continue
            _log.warning("%s of '%s' is left out: %s", trying, task.message["spec"]["name"], how)
            faults[trying] = f"{LOST} {how}"
            if task.message["task"] != "first":
                return Answer(faults=faults, wrong=faults[trying]), None

    def _talk(
        self, task: _Task, faults: Mapping[Choice, str], process: _Process
    ) -> tuple[dict[str, Any] | None, Choice | None, str]:
        """Send a task and listen: the last message, what was tried when it ended without one, and
        how it ended where it said so."""
        with self._lock:
            self._number += 1
            number = self._number
        rejected = [[from_choice(c), why] for c, why in {**task.rejected, **faults}.items()]
        trying: Choice | None = None
        if not process.send({**task.message, "rejected": rejected, "id": number}):
            return None, None, ""
        while True:
            message = process.hear(LIMIT_S)
            if message is None:
                return None, trying, ""
            if "trying" in message:
                trying = to_choice(message["trying"])
            elif "died" in message:
                return None, trying, str(message["died"])
            elif message.get("id") == number:
                return message, trying, ""


def _answer(message: Mapping[str, Any], faults: Mapping[Choice, str]) -> Answer:
    if "failed" in message:
        raise RuntimeError(f"a worker failed: {message['failed']}")
    blob = message.get("blob")
    return Answer(
        refused=tuple(map(str, message.get("refused", ()))),
        outcomes=tuple(map(_outcome, message.get("outcomes", ()))),
        blob=None if blob is None else base64.b64decode(blob),
        error=message.get("error"),
        wrong=message.get("wrong"),
        faults=dict(faults),
    )


def _outcome(data: Mapping[str, Any]) -> Outcome:
    candidate = Candidate(data["index"], to_choice(data["choice"]), data["tag"])
    return Outcome(
        candidate, data["accepted"], data["reason"], data["workspace_bytes"], data["wrong"]
    )


# -- of this process -------------------------------------------------------------------------------

_pools: dict[int, Workers] = {}
_pools_lock = threading.Lock()


def on(device_index: int) -> Workers:
    """The workers of a GPU."""
    with _pools_lock:
        if device_index not in _pools:
            most = max(1, min(MOST, (os.cpu_count() or 2) - 1))
            _pools[device_index] = Workers(device_index, most)
        return _pools[device_index]


def _after_fork() -> None:
    """A child has none of its parent's threads; it starts workers of its own."""
    global _pools, _pools_lock
    _pools, _pools_lock = {}, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
