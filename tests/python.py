"""Python programs that tests run, each in a process of its own, forked from one that has torch.

Importing torch takes 1.5 s, more than most of these programs take. Nothing else is imported before
the fork: a program sees the modules that ``import torch`` leaves, and imports this package anew.
What is said of a start without torch has to be tested by :mod:`subprocess` itself.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Done = subprocess.CompletedProcess[str]


def run(
    *words: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = False,
    timeout: float = 300.0,
) -> Done:
    """Run ``python`` with these words (``-c CODE``, ``-m MODULE`` or a script, and arguments).

    Output and errors are captured as text. Raises ``subprocess.TimeoutExpired``, and with ``check``
    ``subprocess.CalledProcessError``.
    """
    command = [str(word) for word in words]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _code(command, Path(cwd or Path.cwd()), dict(env or os.environ), out, err, timeout)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    done = subprocess.CompletedProcess([sys.executable, *command], code, *texts)
    if check:
        done.check_returncode()
    return done


def _code(
    command: list[str], cwd: Path, env: dict[str, str], out: Any, err: Any, timeout: float
) -> int:
    """The exit code of a program, negative for a signal."""
    server = _server()
    task = json.dumps({"command": command, "cwd": str(cwd), "env": env}).encode()
    mine, theirs = socket.socketpair()
    with mine, theirs:
        fds = array.array("i", [theirs.fileno(), out.fileno(), err.fileno()])
        server.sendmsg(
            [len(task).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
        )
        server.sendall(task)
        theirs.close()
        mine.settimeout(timeout)
        with mine.makefile("r") as lines:
            pid = int(lines.readline())
            try:
                return int(lines.readline())
            except TimeoutError:
                os.killpg(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(command, timeout) from None


@cache
def _server() -> socket.socket:
    """The process that forks, started when the first program is."""
    mine, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.python", str(theirs.fileno())],
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(mine.close)  # the server ends then
    return mine


def _serve(server: socket.socket) -> None:
    """Fork for each task that comes."""
    import torch  # noqa: F401

    gc.collect()
    gc.freeze()  # a program's end then looks at its own objects alone
    while True:
        head, fds, _, _ = socket.recv_fds(server, 8, 3)
        if not head:
            return
        size, text = int.from_bytes(head, "little"), b""
        while len(text) < size:
            text += server.recv(size - len(text))
        if os.fork() == 0:
            server.close()
            _watch(json.loads(text), socket.socket(fileno=fds[0]), fds[1], fds[2])
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _watch(task: dict[str, Any], tell: socket.socket, out: int, err: int) -> None:
    """Run a program in a child, and say how it ended."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        tell.close()
        os.dup2(out, 1)
        os.dup2(err, 2)
        _become(task["command"], task["cwd"], task["env"])
        sys.exit(0)
    tell.sendall(b"%d\n" % pid)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):  # whoever asked may be gone
        tell.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(command: list[str], cwd: str, env: dict[str, str]) -> None:
    """Be the program, as ``python`` itself would have started it. It ends with the interpreter."""
    import torch

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    encoding = env.get("PYTHONIOENCODING", "utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), encoding, write_through=fd == 2)
        for fd in (1, 2)
    )
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path if path != str(ROOT))]
    kind, rest = command[0], command[1:]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    if kind == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv, sys.path[:0] = rest, [cwd]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = command, [str(Path(kind).resolve().parent)]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
