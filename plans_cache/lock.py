"""One holder at a time: a lock per name among threads, a lock file among processes.

A lock file is held by the operating system's lock on it, not by being there: the lock of a process
that dies is gone with it, and a file left behind means nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .files import open_own, read_open

_LONGEST_PAUSE_S = 0.05


class LockTimeout(TimeoutError):
    """Somebody else held the lock for longer than was waited."""


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


class ThreadLocks:
    """Locks by name; a name that nobody holds or waits for takes no memory."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._slots: dict[str, _Slot] = {}

    @contextmanager
    def hold(self, name: str, timeout_s: float) -> Iterator[None]:
        """Hold the lock ``name``; :class:`LockTimeout` when another thread does not let go."""
        with self._mutex:
            slot = self._slots.setdefault(name, _Slot())
            slot.users += 1
        try:
            if not slot.lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
                raise LockTimeout(f"{name}: held by another thread for over {timeout_s:g} s")
            try:
                yield
            finally:
                slot.lock.release()
        finally:
            with self._mutex:
                slot.users -= 1
                if not slot.users:
                    del self._slots[name]

    def __len__(self) -> int:
        return len(self._slots)


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: int) -> bool:
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def _unlock(file: int) -> None:
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)


_held: set[FileLock] = set()


class FileLock:
    """The lock on the file ``path``, held from construction to :meth:`release`.

    Raises :class:`LockTimeout`, or OSError where there can be no such file or no such lock.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self._process = os.getpid()
        deadline = time.monotonic() + timeout_s
        pause = 0.001
        while True:
            self._file = open_own(path, os.O_RDWR | os.O_CREAT)
            try:
                if _try_lock(self._file) and self._is_at_path():
                    _held.add(self)
                    return
            except BaseException:
                os.close(self._file)
                raise
            os.close(self._file)  # held by another process, or the file of a holder that let go
            if time.monotonic() >= deadline:
                raise LockTimeout(f"{path}: held by another process for over {timeout_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _is_at_path(self) -> bool:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._file), found)

    def read(self, limit_bytes: int) -> bytes:
        """The bytes of the file. Raises ``files.Refused`` as for any other file."""
        return read_open(self._file, self.path, limit_bytes)

    def write(self, data: bytes) -> None:
        """Write over the file's beginning, without a sync. A forked child writes nothing."""
        if self._process == os.getpid():
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, data)
            os.lseek(self._file, 0, os.SEEK_SET)  # where Windows has the lock

    def release(self) -> None:
        """Let go and remove the file. A forked child that comes here leaves its parent's lock."""
        if self._process != os.getpid():
            return
        _held.discard(self)
        with suppress(OSError):  # Windows does not remove an open file
            if self._is_at_path():
                os.unlink(self.path)
        with suppress(OSError):
            _unlock(self._file)
        os.close(self._file)


def _after_fork() -> None:
    """A child's copies of the files would keep the locks alive after its parent's death."""
    for lock in _held:
        with suppress(OSError):
            os.close(lock._file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
