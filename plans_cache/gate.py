"""Many at a time, or one alone: a lock file that processes share, or that one of them has.

Who is to be alone comes first: those that share wait before a second file, the turn, until it is
through. Nobody waits for longer than ``timeout_s``: a process that is stopped must not stop others,
and what is guarded is a measurement, not data. Where there can be no such lock nobody waits at all.
A forked child has no part in what its parent holds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from .files import check_private, make_folder, open_own

_PAUSE_S = 0.0005
_held: set[int] = set()  # open files of this process

if sys.platform == "win32":

    def _try(file: int, *, alone: bool) -> bool:
        return True

    def _let_go(file: int) -> None:
        return
else:
    import fcntl

    def _try(file: int, *, alone: bool) -> bool:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _let_go(file: int) -> None:
        with suppress(OSError):  # as in _wait
            fcntl.flock(file, fcntl.LOCK_UN)


class Gate:
    """The gate at ``path``; None is one that is always open."""

    def __init__(self, path: Path | None, timeout_s: float = 5.0) -> None:
        self.path = path
        self._timeout_s = timeout_s

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Beside others that share it, and not while one is alone."""
        with ExitStack() as stack:
            files = self._opened(stack)
            if files is not None:
                turn, gate = files
                deadline = time.monotonic() + self._timeout_s
                _wait(turn, deadline, alone=False)
                _wait(gate, deadline, alone=False)
                _let_go(turn)
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody shares it."""
        with ExitStack() as stack:
            files = self._opened(stack)
            if files is not None:
                deadline = time.monotonic() + self._timeout_s
                for file in files:
                    _wait(file, deadline, alone=True)
            yield

    def _opened(self, stack: ExitStack) -> tuple[int, int] | None:
        if self.path is None:
            return None
        try:
            os.makedirs(self.path.parent.parent, mode=0o700, exist_ok=True)
            check_private(self.path.parent.parent)
            make_folder(self.path.parent)
            files = []
            for path in (self.path.with_suffix(".turn"), self.path):
                files.append(open_own(path, os.O_RDWR | os.O_CREAT))
                _held.add(files[-1])
                stack.callback(_close, files[-1])
        except OSError:
            return None
        return files[0], files[1]


def _wait(file: int, deadline: float, *, alone: bool) -> None:
    with suppress(OSError):  # no locks in this file system
        while not _try(file, alone=alone) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)


def _close(file: int) -> None:
    """Let go; closing alone would not where a forked child has a copy."""
    if file not in _held:  # of the parent's
        return
    _held.discard(file)
    _let_go(file)
    os.close(file)


def _after_fork() -> None:
    """A child's copies of the files would keep the locks alive after its parent's death."""
    for file in _held:
        with suppress(OSError):
            os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
