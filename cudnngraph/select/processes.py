"""The processes of workers: the program that forks them, and one of them as its thread sees it.

They are forks of a program of its own (:mod:`~cudnngraph.select.forkserver`), not of this process,
since one that has used CUDA cannot be forked, and one that is spawned would need the user's main
module.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailable

LIMIT_S = 60.0  # of one attempt
START_S = 180.0  # torch may come from a slow disk, and many processes start at once
WITH_SERVER = "ended with what forked it"


class Unusable(BackendUnavailable):
    """No worker can be had here; says why."""


class Gone(Unusable):
    """The process that forks workers ended while one started."""


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
    """Return the command that starts the fork server, for the other end of the socket ``file``.

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


open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, neither in the place of a closed standard stream, which others write
    to. Raises :class:`Unusable`."""
    low: list[socket.socket] = []
    try:
        while True:
            made = socket.socketpair(socket.AF_UNIX, kind)
            if min(each.fileno() for each in made) > 2:
                open_sockets.update(made)
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
        """A text on how a worker ended, killed first or not; "" if its parent ended too."""
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


class Process:
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
                raise Gone(f"a worker does not start: it {WITH_SERVER}")
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
