"""The processes that build and check plans for this one (:mod:`~cudnngraph.select.worker`).

They are started when first needed and ended when idle: forks of a program of its own
(:mod:`~cudnngraph.select.forkserver`), not of this process, since one that has used CUDA cannot be
forked, and one that is spawned would need the user's main module. One that faults, hangs or is
killed in the middle of an attempt rejects that plan; the task goes on in another.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import json
import logging
import math
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..backend.plan import Candidate, Choice, Outcome
from ..errors import BackendUnavailable
from ..ir import wire
from ..ir.spec import GraphSpec
from ..policy import Policy
from .worker import from_choice, to_choice

_log = logging.getLogger(__name__)

LIMIT_S = 60.0  # of one attempt
START_S = 60.0
IDLE_S = 20.0
MOST = 8  # processes on one GPU
LOST = "the process that tried it"
_WITH_SERVER = "ended with what forked it"


class Unusable(BackendUnavailable):
    """No worker can be had here; says why."""


class _Gone(Unusable):
    """The process that forks workers ended while one started."""


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


# -- processes -------------------------------------------------------------------------------------

# Without the package's own module, which imports what a worker has no use for; and without
# collections of garbage, which take an eighth of the time of importing torch.
_PROGRAM = """
import sys
file, module, folder, *sys.path[:] = sys.argv[1:]
import gc, importlib, types
gc.disable()
sys.modules["cudnngraph"] = package = types.ModuleType("cudnngraph")
package.__path__ = [folder]
from cudnngraph.select import forkserver
forkserver.serve(int(file), lambda: importlib.import_module("cudnngraph." + module).load())
"""


def program(file: int, module: str = "select.worker") -> list[str]:
    """What starts the process that forks workers, for the other end of the socket ``file``.

    ``module.load()`` gives what they run. It imports from where this process does, but what comes
    with Python from there first, and nothing from the working directory: a ``queue.py`` there was
    no harm to a process that had imported its own before.
    """
    if not sys.executable:
        raise Unusable("no process can be started: sys.executable does not say where Python is")
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    own |= {os.path.join(str(path), "lib-dynload") for path in own}
    paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str) and path]
    paths.sort(key=lambda path: path not in own)
    folder = Path(__file__).resolve().parents[1]
    told = [str(file), module, str(folder), *paths, str(folder.parent)]
    return [sys.executable, "-c", _PROGRAM, *told]


_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, neither in the place of a closed standard stream, which others write
    to. Raises :class:`Unusable`."""
    low: list[socket.socket] = []
    try:
        while True:
            made = socket.socketpair(socket.AF_UNIX, kind)
            if min(each.fileno() for each in made) > 2:
                _open.update(made)
                return made
            low += made
    except OSError as error:
        raise Unusable(f"no worker can be talked to: {error}") from None
    finally:
        for each in low:
            each.close()


class Server:
    """The process that forks workers, started when first needed. Thread-safe."""

    def __init__(self, command: Any = program) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = ""  # how the last one did, for people

    def fork(self, data: Any) -> tuple[socket.socket, int]:
        """A worker: the socket to talk by, and its process. Raises :class:`Unusable`."""
        if not hasattr(os, "fork"):
            raise Unusable(f"{sys.platform} has no fork")
        with self._lock:
            for _ in range(2):  # one that had nothing to do for long has ended
                if self._control is None:
                    self._start()
                mine, its = _pair()
                answer = self._asked({"fork": data}, [its.fileno()])
                its.close()
                if answer is not None and "pid" in answer:
                    return mine, int(answer["pid"])
                mine.close()
                if answer is not None:
                    raise Unusable(f"a worker does not start: {answer['failed']}")
        raise Unusable(f"a worker does not start: what forks it {self._ended}")

    def how(self, pid: int, *, kill: bool) -> str:
        """How a worker ended, killed first or not; for people. "" where it went with what forked
        it."""
        with self._lock:
            answer = self._asked({"end" if kill else "wait": pid})
        return "" if answer is None else str(answer["how"])

    def _start(self) -> None:
        mine, its = _pair(socket.SOCK_SEQPACKET)
        # Asking torch for a GPU otherwise spoils it for a fork.
        env = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        try:
            self._process = subprocess.Popen(
                self._command(its.fileno()),
                env=env,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the user's process
            )
        except (OSError, RuntimeError) as error:  # the latter while the interpreter ends
            mine.close()
            raise Unusable(f"no process can be started: {error}") from None
        except Unusable:
            mine.close()
            raise
        finally:
            its.close()
        mine.settimeout(START_S)
        self._control = mine

    def _asked(self, question: Any, files: Sequence[int] = ()) -> dict[str, Any] | None:
        """Its answer; None where there is none, and then neither it nor a worker of its is left:
        what it said late would be taken for the next answer."""
        if self._control is None:
            return None
        try:
            socket.send_fds(self._control, [json.dumps(question).encode()], files)
            data = self._control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._stop()
            return None
        answer = json.loads(data)
        assert isinstance(answer, dict)
        return answer

    def _stop(self) -> None:
        """Note how it ended; it is killed where it did not."""
        assert self._control is not None and self._process is not None
        self._control.close()
        self._control = None
        try:
            self._ended = f"ended with exit code {self._process.wait(1.0)}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._ended = f"does not answer within {START_S:g} s"


class _Process:
    """One worker, as the thread that talks to it sees it."""

    def __init__(self, server: Server, data: Any) -> None:
        self._server = server
        self._ended = ""
        self._rest = b""
        self._socket, self._pid = server.fork(data)
        first = self.hear(START_S)
        if first is None or "ready" not in first:
            why = self.how_it_ended() if first is None else str(first.get("unusable"))
            self.end()
            if not why:
                raise _Gone(f"a worker does not start: it {_WITH_SERVER}")
            raise Unusable(f"a worker does not start: {why}")

    def send(self, task: Mapping[str, Any]) -> bool:
        """Whether the task could be sent."""
        try:
            self._socket.settimeout(LIMIT_S)
            self._socket.sendall(json.dumps(task).encode() + b"\n")
        except OSError:
            return False
        return True

    def hear(self, limit_s: float) -> dict[str, Any] | None:
        """The next message; None where the process has ended or says nothing in time."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError:
                self.end(f"hangs, or takes more than {limit_s:g} s")
                return None
            except OSError:
                return None
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def how_it_ended(self) -> str:
        """For people; "" where it went with what forked it, which is no fault of a plan."""
        if not self._ended:
            self.end(self._server.how(self._pid, kill=False))
        return self._ended

    def end(self, why: str = "") -> None:
        """Kill it, and wait until it is gone."""
        how = self._server.how(self._pid, kill=True) if self._pid else ""
        self._pid = 0
        self._ended = self._ended or why or how
        self._socket.close()


# -- the pool --------------------------------------------------------------------------------------


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
    ) -> Future[Answer]:
        """The first plan that passes. Its result raises :class:`Unusable` where there are no
        workers. While another process has ``gate`` to itself, no plan runs."""
        return self._submit("first", spec, policy, (), rejected, gate)[0]

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
        self, spec: GraphSpec, policy: Policy, choice: Choice, *, gate: Path | None = None
    ) -> Future[Answer]:
        """What is wrong with a choice that was made before: ``wrong`` and ``error``."""
        return self._submit("check", spec, policy, [choice], {}, gate)[0]

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
    ) -> list[Future[Answer]]:
        futures: list[Future[Answer]] = [Future() for _ in choices or (None,)]
        message = {
            "task": task,
            "spec": wire.from_spec(spec),
            "policy": wire.from_policy(policy),
            "rejected": [[from_choice(choice), why] for choice, why in rejected.items()],
            "gate": None if gate is None else str(gate),
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
            thread = threading.Thread(target=self._serve, name="cudnngraph-worker", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no right to one more, or the interpreter ends
                if self._threads == 0:
                    for _, _, task in self._waiting:
                        _failed(task, Unusable(f"no thread can be started: {error}"))
                    self._waiting.clear()
                return
            self._threads += 1

    # -- a thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        process: _Process | None = None
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

    def _started(self) -> _Process:
        start = time.monotonic()
        process = _Process(self._server, self._index)
        self._start_s = time.monotonic() - start
        return process

    def _done(self, task: _Task, process: _Process | None) -> _Process | None:
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
                except _Gone:
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
                    how = how or _WITH_SERVER
                    raise Unusable(f"three workers ended without a word: the last {how}")
                continue
            _log.warning("%s of '%s' is left out: %s", trying, task.message["spec"]["name"], how)
            faults[trying] = f"{LOST} {how}"
            for choice, future in zip(task.choices, task.futures, strict=False):
                if choice == trying and not future.done():
                    future.set_result(Answer(faults={trying: faults[trying]}, wrong=faults[trying]))
        return process

    def _talk(
        self, task: _Task, faults: Mapping[Choice, str], process: _Process
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
            message = process.hear(LIMIT_S)
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

_server = Server()
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
    """A child has none of its parent's threads; it starts workers of its own, and holds no socket
    of its parent's open."""
    global _server, _pools, _pools_lock
    for each in list(_open):
        with contextlib.suppress(OSError):
            each.close()
    _server, _pools, _pools_lock = Server(), {}, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
