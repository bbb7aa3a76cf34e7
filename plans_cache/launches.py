"""Plans that a process launches for the first time: one that ends the process is known to the next.

A process that launches new plans holds a file ``launching/<process>-<number>.mark`` by the system's
lock and writes into it, before each launch, which plan of which step comes next. The lock goes with
the process: where another can take it, its owner is dead, and did not come back from that plan.

``launching/<step>.lost`` says that a plan of the step was given up after records with it were kept.
Nothing here raises for a fault of the disk, or for what lies on it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import files
from .lock import FileLock
from .record import is_id
from .rejections import Plan, to_plan

FOLDER = "launching"
MAX_BYTES = 1 << 16  # of a mark
LOCK_S = 0.1  # for a new file that somebody looked into before it was locked

_logger = logging.getLogger("plans_cache")


class Mark:
    """Mark of the plan that this process launches next; without a file if none can be had."""

    def __init__(self, lock: FileLock | None) -> None:
        self._lock = lock
        _open.add(self)

    def set(self, id: str, plan: Plan) -> None:
        """The plan of the step ``id`` is launched now: one small write, which is not synced."""
        engine, knobs = plan
        text = json.dumps({"step": id, "engine": engine, "knobs": [list(each) for each in knobs]})
        self._write(text.encode() + b"\n")

    def clear(self) -> None:
        """It came back."""
        self._write(b"\n")  # what stands behind the first line counts for nothing

    def close(self) -> None:
        """Remove the file. A forked child that comes here leaves its parent's."""
        _open.discard(self)
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(OSError):
                lock.write(b"\n")  # for a system that does not remove an open file
            lock.release()

    def _write(self, data: bytes) -> None:
        if self._lock is not None:
            with suppress(OSError):
                self._lock.write(data)


_open: set[Mark] = set()


@atexit.register
def _close_all() -> None:
    """A process that ends in order, while a thread launches, has not died of that."""
    for mark in list(_open):
        mark.close()


class Launches:
    """The first launches under ``directory``; None keeps what is lost in memory. Thread-safe."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._noted: set[str] = set()

    def begin(self) -> Mark:
        """A mark of this process, which is to be closed."""
        if self._directory is None:
            return Mark(None)
        path = self._directory / FOLDER / f"{os.getpid()}-{secrets.token_hex(8)}.mark"
        try:
            self._make_folder(path.parent)
            return Mark(FileLock(path, LOCK_S))
        except OSError as error:
            _logger.info("first launches are not marked: %s", error)
            with suppress(OSError):  # made, and then not to be locked
                os.unlink(path)
            return Mark(None)

    def note(self, id: str) -> None:
        """A plan of the step ``id`` is given up: records that have it are not to be trusted."""
        self._noted.add(id)
        if self._directory is None:
            return
        path = self._directory / FOLDER / f"{id}.lost"
        try:
            self._make_folder(path.parent)
            os.close(files.open_own(path, os.O_WRONLY | os.O_CREAT))
        except OSError as error:
            _logger.info("a lost plan is noted in memory alone: %s", error)

    def look(self, reject: Callable[[str, Plan], None]) -> frozenset[str]:
        """The steps of which a plan was given up. ``reject(id, plan)`` is called before that for
        what processes that are dead now did not come back from; their marks are removed."""
        if self._directory is None:
            return frozenset(self._noted)
        folder = self._directory / FOLDER
        try:
            files.check_folder(folder)
            files.check_private(self._directory)
            names = os.listdir(folder)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                _logger.info("marks of first launches are left out: %s", error)
            return frozenset(self._noted)
        for name in names:
            stem, _, kind = name.rpartition(".")
            if kind == "lost" and is_id(stem):
                self._noted.add(stem)
            elif kind == "mark":
                self._settle(folder / name, reject)
        return frozenset(self._noted)

    def _settle(self, path: Path, reject: Callable[[str, Plan], None]) -> None:
        try:
            lock = FileLock(path, 0.0)
        except OSError:  # its owner lives, or it is not to be had
            return
        try:
            named = _named(lock.read(MAX_BYTES))
            if named is not None:
                reject(*named)
                self.note(named[0])
        except (OSError, ValueError, RecursionError) as error:
            _logger.info("a mark of a first launch is left out: %s", error)
        finally:
            lock.release()

    def _make_folder(self, folder: Path) -> None:
        os.makedirs(folder.parent, mode=0o700, exist_ok=True)
        files.check_private(folder.parent)
        files.make_folder(folder)


def _named(text: bytes) -> tuple[str, Plan] | None:
    """The step and the plan of a mark; None where it names none. ValueError for what is no mark."""
    line, end, _ = text.partition(b"\n")
    if not line or not end:
        return None
    data: Any = json.loads(line)
    plan = to_plan(data)
    id = data.get("step") if isinstance(data, dict) else None
    if plan is None or not isinstance(id, str) or not is_id(id):
        raise ValueError("it names no plan of a step")
    return id, plan
