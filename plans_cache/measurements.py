"""Measurements of steps, kept as soon as they are made: a search that is stopped goes on with them.

One file for each step in one environment, ``parts/<id>.jsonl`` beside the records: a JSON object a
line. A line that was cut off or damaged is left out. Nothing here raises for a fault of the disk;
what cannot be written stays in memory.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import files
from .record import checked_id, is_id

FOLDER = "parts"
MAX_BYTES = 1 << 20  # of one step: what is found after that is not kept
_IN_MEMORY = 4096  # steps

Row = dict[str, Any]

_logger = logging.getLogger("plans_cache")


class Measurements:
    """The measurements kept in ``directory``; None keeps them in memory alone. Thread-safe."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._own: OrderedDict[str, list[Row]] = OrderedDict()  # that are not on disk

    @property
    def empty(self) -> bool:
        """Whether there are surely none: a look for a folder, no more."""
        folder = None if self._directory is None else self._directory / FOLDER
        return not self._own and (folder is None or not folder.exists())

    def of(self, id: str) -> list[Row]:
        """The rows of the step ``id``, in the order in which they were made."""
        path = self._path(id)
        found = [] if path is None else _read(path)
        with self._lock:
            return [*found, *self._own.get(id, ())]

    def add(self, id: str, row: Row) -> bool:
        """One more row, on disk where it can be; whether it was."""
        path = self._path(id)
        if path is not None:
            try:
                return _append(path, row)
            except OSError as error:
                _logger.info("measurements are kept in memory alone: %s", error)
        with self._lock:
            self._own.setdefault(id, []).append(row)
            self._own.move_to_end(id)
            while len(self._own) > _IN_MEMORY:
                self._own.popitem(last=False)
        return False

    def prune(
        self,
        *,
        unused_for_s: float | None = None,
        max_total_bytes: int | None = None,
        now: float | None = None,
        dry_run: bool = False,
    ) -> tuple[int, int]:
        """Remove files that were not written for so long, then the oldest until the rest is small
        enough; return how many went, and the bytes that stay."""
        kept: list[tuple[float, int, Path]] = []
        gone = 0
        moment = time.time() if now is None else now
        for path in self._files():
            with suppress(OSError):
                found = os.lstat(path)
                if unused_for_s is not None and moment - found.st_mtime > unused_for_s:
                    gone += _removed(path, dry_run)
                else:
                    kept.append((found.st_mtime, found.st_size, path))
        kept.sort(key=lambda each: each[0])
        total = sum(size for _, size, _ in kept)
        while max_total_bytes is not None and kept and total > max_total_bytes:
            _, size, path = kept.pop(0)
            gone += _removed(path, dry_run)
            total -= size
        return gone, total

    def _files(self) -> list[Path]:
        if self._directory is None:
            return []
        try:
            files.check_private(self._directory)
            files.check_folder(self._directory / FOLDER)
            names = sorted(os.listdir(self._directory / FOLDER))
        except OSError:
            return []
        paths = [self._directory / FOLDER / name for name in names]
        return [path for path in paths if path.suffix == ".jsonl" and is_id(path.stem)]

    def _path(self, id: str) -> Path | None:
        checked_id(id)
        return None if self._directory is None else self._directory / FOLDER / f"{id}.jsonl"


def _removed(path: Path, dry_run: bool) -> int:
    if not dry_run:
        path.unlink(missing_ok=True)
    return 1


def _append(path: Path, row: Row) -> bool:
    """Write a line behind whatever is there, in one call: writers do not mix. False for a file
    that is full."""
    os.makedirs(path.parent.parent, mode=0o700, exist_ok=True)
    files.check_private(path.parent.parent)
    files.make_folder(path.parent)
    file = files.open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(file).st_size
        if size > MAX_BYTES:
            return False
        # A line whose writer was killed has no end: without one it would spoil the next too.
        cut = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, (b"\n" if cut else b"") + json.dumps(row).encode() + b"\n")
        return True
    finally:
        os.close(file)


def _read(path: Path) -> list[Row]:
    try:
        files.check_private(path.parent.parent)
        files.check_folder(path.parent)
        text = files.read(path, 2 * MAX_BYTES)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            _logger.info("measurements of %s are left out: %s", path.stem[:16], error)
        return []
    found: list[Row] = []
    for line in text.split(b"\n"):
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict):
                found.append(row)
    return found
