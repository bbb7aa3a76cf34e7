"""Findings of a sweep of a machine: every result as it came, and engines not to be used.

Two files for each environment beside the records: ``known_bad/<id>.jsonl``, a JSON object a line,
and ``known_bad/<id>.json``, what follows from them. A line that was cut off or damaged is left out.
Reading raises nothing; writing raises OSError.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import files
from .record import checked_id

FOLDER = "known_bad"
MAX_BYTES = 1 << 26
_IN_MEMORY = 64  # files

_logger = logging.getLogger("plans_cache")
_lock = threading.Lock()
_read: dict[Path, tuple[files.Identity, Any]] = {}


class Findings:
    """The two files of the environment ``id`` in the cache directory ``directory``."""

    def __init__(self, directory: Path, id: str) -> None:
        checked_id(id)
        self._directory = directory
        self.path = directory / FOLDER / f"{id}.json"
        self.results_path = self.path.with_suffix(".jsonl")

    # -- what follows ------------------------------------------------------------------------------

    def known_bad(self) -> Any:
        """The JSON data of the first file, read again when it has changed; None without one."""
        try:
            seen = files.identity(self.path)
        except OSError:
            return None
        with _lock:
            kept = _read.get(self.path)
        if kept is not None and kept[0] == seen:
            return kept[1]
        data = None
        text = self._text(self.path)
        if text is not None:
            try:
                data = json.loads(text)
            except (ValueError, RecursionError) as error:
                _logger.info("%s is left out: %s", self.path.name, error)
        with _lock:
            if len(_read) >= _IN_MEMORY:
                _read.clear()
            _read[self.path] = (seen, data)
        return data

    def write_known_bad(self, data: Any) -> None:
        """Replace the first file."""
        self._make_folder()
        files.write(self.path, json.dumps(data, indent=1).encode())

    # -- results -----------------------------------------------------------------------------------

    def results(self) -> list[dict[str, Any]]:
        """The lines of the second file in their order."""
        found: list[dict[str, Any]] = []
        for line in (self._text(self.results_path) or b"").split(b"\n"):
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    found.append(row)
        return found

    def add(self, row: dict[str, Any]) -> None:
        """One more line, behind whatever is there."""
        self._make_folder()
        file = files.open_own(self.results_path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            size = os.fstat(file).st_size
            # A line whose writer was killed has no end: without one it would spoil the next too.
            cut = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            os.write(file, (b"\n" if cut else b"") + json.dumps(row).encode() + b"\n")
        finally:
            os.close(file)

    def clear(self) -> None:
        """Forget both files."""
        for path in (self.results_path, self.path):
            with suppress(FileNotFoundError):
                path.unlink()

    def _make_folder(self) -> None:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        files.check_private(self._directory)
        files.make_folder(self.path.parent)

    def _text(self, path: Path) -> bytes | None:
        try:
            files.check_private(self._directory)
            files.check_folder(path.parent)
            return files.read(path, MAX_BYTES)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                _logger.info("%s is left out: %s", path.name, error)
            return None


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
