"""The pool of workers on a GPU: tasks, who does them, and what became of them.

Workers (:mod:`~cudnngraph.select.worker`) build and check plans for this process. They are started
when first needed and ended when idle. One that faults, hangs or is killed in the middle of an
attempt rejects that plan; the task goes on in another.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..backend.candidates import Candidate, Outcome
from ..backend.plan import Choice
from ..ir import wire
from ..ir.spec import GraphSpec
from ..policy import Policy
from . import processes
from .processes import WITH_SERVER, Gone, Process, Server, Unusable, open_sockets
from .worker import from_choice, to_candidate, to_choice

_log = logging.getLogger(__name__)

IDLE_S = 20.0
MOST = 12  # processes on one GPU
WORKER_BYTES, MEMORY_SHARE = 0.6 * (1 << 30), 0.25  # of the GPU's memory: a worker's, and of all
EARLY = 2  # of them, if they are started before there are tasks
LOST = "the process that tried it"


@dataclass(frozen=True)
class Answer:
    """Result of a task: the candidates' outcomes, and plan and error of the one that passed.

    ``blob`` is the serialized plan; None if there is no such form. ``error`` is the largest
    relative error of its results.

    ``refused`` says why there are no candidates. ``faults`` are choices that ended a process or
    hung, with how. ``candidates`` are those that a worker was asked to rank.
    ``built_s`` and ``checked_s`` are the seconds that a worker took.
    """

    refused: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    blob: bytes | None = None
    error: float | None = None
    wrong: str | None = None
    faults: Mapping[Choice, str] = field(default_factory=dict)
    built_s: float = 0.0
    checked_s: float = 0.0


@dataclass
class _Task:
    """Something to do; a future for each of the answers that are to come."""

    message: dict[str, Any]
    futures: list[Future[Answer]]
    choices: Sequence[Choice] = ()

    @property
    def attempts(self) -> int:
        return max(1, len(self.choices))

    def left(self) -> list[int]:
        """The numbers of the choices that have no answer yet and are still wanted."""
        return [number for number, each in enumerate(self.futures) if not each.done()]


class Workers:
    """Worker processes of one GPU, at most ``most``; each is served by a thread of its own.

    Another one is started when the tasks that wait would take those that are there longer than it
    takes to start one; both times are those seen so far.
    """

    def __init__(self, device_index: int, most: int, server: Server | None = None) -> None:
        self._index = device_index
        self._most = most
        self._server = server or _server
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, _Task]] = []  # a heap: by urgency, then in order
        self._threads = self._idle = self._count = self._number = 0
        self._attempt_s, self._start_s = 0.05, 0.5  # until they have been seen

    def first(
        self,
        spec: GraphSpec,
        policy: Policy,
        rejected: Mapping[Choice, str],
        *,
        gate: Path | None = None,
        ahead: Choice | None = None,
    ) -> Future[Answer]:
        """The first plan that passes, ``ahead`` tried before all others. Its result raises
        :class:`Unusable` where there are no workers. While another process has ``gate`` to itself,
        no plan runs."""
        return self._submit("first", spec, policy, (), rejected, gate, ahead=ahead)[0]

    def rank(
        self, spec: GraphSpec, policy: Policy, rejected: Mapping[Choice, str]
    ) -> Future[Answer]:
        """cuDNN's candidates for the search, best first."""
        return self._submit("rank", spec, policy, (), rejected, None)[0]

    def these(
        self,
        spec: GraphSpec,
        policy: Policy,
        choices: Sequence[Choice],
        *,
        gate: Path | None = None,
        urgent: bool = True,
    ) -> list[Future[Answer]]:
        """Each of the choices, built and checked by one worker, in order."""
        return self._submit("these", spec, policy, choices, {}, gate, urgent=urgent)

    def check(
        self,
        spec: GraphSpec,
        policy: Policy,
        choice: Choice,
        *,
        gate: Path | None = None,
        urgent: bool = True,
    ) -> Future[Answer]:
        """Check a choice that was made before: the answer has ``wrong`` and ``error``."""
        return self._submit("check", spec, policy, [choice], {}, gate, urgent=urgent)[0]

    def start(self) -> None:
        """Have the first processes started for tasks that are still to come.

        There are two: the second one has what forks them import torch, so that all others come at
        once.
        """
        # The first task tells why none can be started.
        with self._changed, contextlib.suppress(RuntimeError):
            while self._threads < min(EARLY, self._most):
                self._start_thread(early=True)

    def _submit(
        self,
        task: str,
        spec: GraphSpec,
        policy: Policy,
        choices: Sequence[Choice],
        rejected: Mapping[Choice, str],
        gate: Path | None,
        *,
        urgent: bool = True,
        ahead: Choice | None = None,
    ) -> list[Future[Answer]]:
        futures: list[Future[Answer]] = [Future() for _ in choices or (None,)]
        message = {
            "task": task,
            "spec": wire.from_spec(spec),
            "policy": wire.from_policy(policy),
            "rejected": [[from_choice(choice), why] for choice, why in rejected.items()],
            "gate": None if gate is None else str(gate),
            "ahead": None if ahead is None else from_choice(ahead),
        }
        with self._changed:
            self._put(_Task(message, futures, choices), urgent=urgent)
        return futures

    def _put(self, task: _Task, *, urgent: bool) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (not urgent, self._count, task))
        self._changed.notify()
        self._grow()

    def _grow(self) -> None:
        """Start the threads that the waiting tasks are worth, with the lock held."""
        if len(self._waiting) <= self._idle:
            return
        left_s = self._attempt_s * sum(task.attempts for _, _, task in self._waiting)
        worth = max(1, math.ceil(left_s / self._start_s))
        busy = self._threads - self._idle
        wanted = min(self._most, worth, busy + len(self._waiting))
        while self._threads < wanted:
            try:
                self._start_thread()
            except RuntimeError as error:  # no right to one more, or the interpreter ends
                if self._threads == 0:
                    for _, _, task in self._waiting:
                        _failed(task, Unusable(f"no thread can be started: {error}"))
                    self._waiting.clear()
                return

    def _start_thread(self, *, early: bool = False) -> None:
        """Start a thread, with the lock held; ``early`` ones have a process before a task."""
        name = "cudnngraph-worker"
        threading.Thread(target=self._serve, args=[early], name=name, daemon=True).start()
        self._threads += 1

    # -- a thread ----------------------------------------------------------------------------------

    def _serve(self, early: bool) -> None:
        process: Process | None = None
        if early:
            with contextlib.suppress(Exception):  # the first task tells why
                process = Process(self._server, self._index)
        while (task := self._next()) is not None:
            given, process = process, None
            try:
                process = self._done(task, given)
            except Unusable as error:
                with self._changed:
                    others = self._threads > 1
                    if others:  # those that are there go on alone
                        self._most = self._threads = self._threads - 1
                        self._put(task, urgent=True)
                if others:
                    return
                _failed(task, error)
            except BaseException as error:
                _failed(task, error)
            with self._changed:
                self._grow()
        if process is not None:
            process.end()

    def _next(self) -> _Task | None:
        """The next task, or None when there was none for a while."""
        with self._changed:
            self._idle += 1
            try:
                if not self._changed.wait_for(lambda: bool(self._waiting), IDLE_S):
                    self._threads -= 1
                    return None
                return heapq.heappop(self._waiting)[2]
            finally:
                self._idle -= 1

    def _started(self) -> Process:
        start = time.monotonic()
        process = Process(self._server, self._index)
        self._start_s = time.monotonic() - start
        return process

    def _done(self, task: _Task, process: Process | None) -> Process | None:
        """Do a task, and have its futures hold the answers; the process for the next one."""
        for future in task.futures:
            if not future.done() and not future.running():
                future.set_running_or_notify_cancel()
        faults: dict[Choice, str] = {}
        lost = 0
        while task.left():
            if process is None:
                try:
                    process = self._started()
                except Gone:
                    lost += 1
                    if lost > 2:
                        raise
                    continue
            try:
                start, asked = time.monotonic(), len(task.left())
                over, trying, died = self._talk(task, faults, process)
                if over:
                    self._attempt_s += 0.2 * ((time.monotonic() - start) / asked - self._attempt_s)
            except BaseException:
                process.end()
                raise
            if over:
                break
            how = died or process.how_it_ended()
            process.end()
            process = None
            if trying is None or not how:
                lost += 1
                if lost > 2:
                    how = how or WITH_SERVER
                    raise Unusable(f"three workers ended without a word: the last {how}")
                continue
            _log.warning("%s of '%s' is left out: %s", trying, task.message["spec"]["name"], how)
            faults[trying] = f"{LOST} {how}"
            for choice, future in zip(task.choices, task.futures, strict=False):
                if choice == trying and not future.done():
                    future.set_result(Answer(faults={trying: faults[trying]}, wrong=faults[trying]))
        return process

    def _talk(
        self, task: _Task, faults: Mapping[Choice, str], process: Process
    ) -> tuple[bool, Choice | None, str]:
        """Send a task and listen: whether it is done; what was tried when it ended before that,
        and how it ended where it said so."""
        with self._changed:
            self._number += 1
            id = self._number
        left = task.left()
        rejected = [[from_choice(choice), why] for choice, why in faults.items()]
        sent = {
            **task.message,
            "id": id,
            "choices": [from_choice(task.choices[number]) for number in left if task.choices],
            "rejected": [*task.message["rejected"], *rejected],
        }
        trying: Choice | None = None
        if not process.send(sent):
            return False, None, ""
        while True:
            message = process.hear(processes.LIMIT_S)
            if message is None:
                return False, trying, ""
            if "trying" in message:
                trying = to_choice(message["trying"])
            elif "died" in message:
                return False, trying, str(message["died"])
            elif message.get("id") != id:
                continue
            elif "number" in message:
                task.futures[left[message["number"]]].set_result(_answer(message, {}))
                trying = None
            else:
                if "failed" in message or "refused" in message or not self._each(task):
                    answer = _answer(message, faults)
                    for number in task.left():
                        task.futures[number].set_result(answer)
                return True, None, ""

    @staticmethod
    def _each(task: _Task) -> bool:
        """Whether each choice has an answer of its own."""
        return bool(task.message["task"] == "these")


def _failed(task: _Task, error: BaseException) -> None:
    for number in task.left():
        task.futures[number].set_exception(error)


def _answer(message: Mapping[str, Any], faults: Mapping[Choice, str]) -> Answer:
    if "failed" in message:
        raise RuntimeError(f"a worker failed: {message['failed']}")
    blob = message.get("blob")
    return Answer(
        refused=tuple(map(str, message.get("refused", ()))),
        candidates=tuple(map(to_candidate, message.get("candidates", ()))),
        outcomes=tuple(map(_outcome, message.get("outcomes", ()))),
        blob=None if blob is None else base64.b64decode(blob),
        error=message.get("error"),
        wrong=message.get("wrong"),
        faults=dict(faults),
        built_s=float(message.get("built_s", 0.0)),
        checked_s=float(message.get("checked_s", 0.0)),
    )


def _outcome(data: Mapping[str, Any]) -> Outcome:
    return Outcome(
        to_candidate(data),
        data["accepted"],
        data["reason"],
        data["workspace_bytes"],
        data["wrong"],
    )


# -- of this process -------------------------------------------------------------------------------

_server = Server()
_pools: dict[int, Workers] = {}
_pools_lock = threading.Lock()
_beside = 1  # processes that tune at a time


def one_of(count: int) -> None:
    """Share the processors with others: ``count`` processes, this one among them, tune at a time.

    Call it before the first worker starts.
    """
    global _beside
    _beside = count


def on(device_index: int) -> Workers:
    """The workers of a GPU."""
    with _pools_lock:
        if device_index not in _pools:
            most = min(MOST, cores() // _beside - 1, _held(device_index))
            _pools[device_index] = Workers(device_index, max(1, most))
        return _pools[device_index]


def cores() -> int:
    """Processors that this process may run on: a batch system or a container may give it a few."""
    mine = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(mine(0)) if mine is not None else os.cpu_count() or 2


def _held(device_index: int) -> int:
    """How many workers the memory of a GPU holds beside the user's data."""
    if not torch.cuda.is_available():
        return MOST
    whole = torch.cuda.get_device_properties(device_index).total_memory
    return int(whole * MEMORY_SHARE / WORKER_BYTES)


def _after_fork() -> None:
    """A child has none of its parent's threads; it starts workers of its own, and holds no socket
    of its parent's open."""
    global _server, _pools, _pools_lock
    for each in list(open_sockets):
        with contextlib.suppress(OSError):
            each.close()
    _server, _pools, _pools_lock = Server(), {}, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
