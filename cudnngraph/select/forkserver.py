"""A process that forks workers for another one.

Importing torch takes seconds, so it is done once: workers are forked from a process that has it and
has not touched the GPU. That process is a program of its own, since its user may have a CUDA
context, no main module or no file. It listens on a socket; with the socket's other end it ends, and
so do its children.

The first worker is forked before anything is imported, so that it can have the GPU made ready
meanwhile; who needs one alone pays for no second import.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

IDLE_S = 120.0  # without a child, after which it ends
_WAIT_S = 5.0
_PR_SET_PDEATHSIG = 1

Work = Callable[[socket.socket, Any], None]


def serve(file: int, load: Callable[[], Work]) -> None:
    """Do what is asked on the socket ``file``, until it is closed.

    ``{"fork": data}`` with an open socket: a child that runs ``load()(socket, data)``; the answer
    is its ``{"pid"}``. ``{"end": pid}`` and ``{"wait": pid}``: how the child ended, as ``{"how"}``,
    killed first or not. What cannot be done is answered with ``{"failed": why}``: the other
    children go on.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it hands that on
    control = socket.socket(fileno=file)
    children: dict[int, str | None] = {}
    work: Work | None = None
    while True:
        ready, _, _ = select.select([control], [], [], IDLE_S)
        _reap(children)
        if not ready:
            if any(how is None for how in children.values()):
                continue
            break
        data, files, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not data:
            break
        asked = json.loads(data)
        answer: dict[str, Any]
        if "fork" in asked:
            try:
                if work is None and children:  # a second one: from now on they start with it
                    work = load()
                    gc.freeze()  # what is there now is shared with them
                pid = _forked(control, files[0], asked["fork"], work, load)
                children[pid] = None
                answer = {"pid": pid}
            except Exception as error:  # no right to fork, no file descriptor, no module
                answer = {"failed": f"{type(error).__name__}: {error}"}
                for each in files:
                    with contextlib.suppress(OSError):
                        os.close(each)
        else:
            answer = {"how": _ended(children, asked)}
        control.send(json.dumps(answer).encode())
    for pid, how in children.items():
        if how is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _forked(
    control: socket.socket, file: int, data: Any, work: Work | None, load: Callable[[], Work]
) -> int:
    pid = os.fork()
    if pid:
        os.close(file)
        return pid
    code = 1
    try:
        control.close()
        _end_with_parent()
        if work is None:
            threading.Thread(target=_ready_gpu, args=[data], daemon=True).start()
            work = load()
        gc.enable()
        work(socket.socket(fileno=file), data)
        code = 0
    finally:
        os._exit(code)  # no handlers of the parent's


def _ready_gpu(index: Any) -> None:
    """Have the driver make the context of a GPU, which takes part of a second."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # whoever needs it says so
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), int(index))


def _end_with_parent() -> None:
    """Have the system end this process when its parent dies, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap(children: dict[int, str | None]) -> None:
    for pid in [pid for pid, how in children.items() if how is None]:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            children[pid] = _told(status)


def _ended(children: dict[int, str | None], asked: Mapping[str, int]) -> str:
    """Kill a child if it still runs; return how it ended, "" if it is none of these children."""
    pid = asked["end"] if "end" in asked else asked["wait"]
    deadline = time.monotonic() + _WAIT_S
    while pid in children and children[pid] is None:
        if "end" in asked or time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            children[pid] = _told(os.waitpid(pid, 0)[1])
        else:
            time.sleep(0.002)
            _reap(children)
    return children.pop(pid, None) or ""


def _told(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
