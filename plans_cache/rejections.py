"""Plans that were run once and are not to be tried again: wrong, or the end of a process.

One JSON file for each step in one environment, ``rejected/<id>.json`` beside the records: a list of
{"engine", "knobs", "reason"}. What cannot be read or written stays in memory; nothing raises.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import files
from .lock import FileLock
from .record import checked_id

MOST = 256  # of one step
MAX_BYTES = 1 << 20
LOCK_S = 1.0
_IN_MEMORY = 4096

Plan = tuple[int, tuple[tuple[str, int], ...]]

_logger = logging.getLogger("plans_cache")


class Rejections:
    """The rejections kept in ``directory``; None keeps them in memory alone. Thread-safe."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._known: OrderedDict[str, dict[Plan, str]] = OrderedDict()

    def of(self, id: str) -> Mapping[Plan, str]:
        """Engine and knobs of what is rejected for the step ``id`` → the reason."""
        path = self._path(id)
        found = {} if path is None else _read(path)
        with self._lock:
            return {**found, **self._known.get(id, {})}

    def add(self, id: str, rejected: Mapping[Plan, str]) -> None:
        """Keep the reasons, on disk where it can be."""
        if not rejected:
            return
        path = self._path(id)
        with self._alone(path):
            all_of = dict(list({**self.of(id), **rejected}.items())[-MOST:])
            with self._lock:
                self._known[id] = all_of
                self._known.move_to_end(id)
                while len(self._known) > _IN_MEMORY:
                    self._known.popitem(last=False)
            if path is None:
                return
            text = json.dumps(
                [
                    {"engine": engine, "knobs": [list(knob) for knob in knobs], "reason": reason}
                    for (engine, knobs), reason in all_of.items()
                ],
                indent=1,
            )
            try:
                self._make_folder(path.parent)
                files.write(path, text.encode())
            except OSError as error:
                _logger.info("rejected plans are kept in memory alone: %s", error)

    @contextmanager
    def _alone(self, path: Path | None) -> Iterator[None]:
        """While nobody else adds to a file, if the system can tell, and if that is soon."""
        lock: FileLock | None = None
        if path is not None:
            with suppress(OSError):  # said where it is written
                self._make_folder(path.parent)
                lock = FileLock(path.with_suffix(".lock"), LOCK_S)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _make_folder(self, folder: Path) -> None:
        os.makedirs(folder.parent, mode=0o700, exist_ok=True)
        files.check_private(folder.parent)
        files.make_folder(folder)

    def _path(self, id: str) -> Path | None:
        checked_id(id)
        return None if self._directory is None else self._directory / "rejected" / f"{id}.json"


def _read(path: Path) -> dict[Plan, str]:
    """The rejections in a file, by plan; malformed ones are left out."""
    try:
        files.check_private(path.parent.parent)
        files.check_folder(path.parent)
        data: Any = json.loads(files.read(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        if not isinstance(error, FileNotFoundError):
            _logger.info("rejected plans of %s are left out: %s", path.stem[:16], error)
        return {}
    found: dict[Plan, str] = {}
    for entry in data if isinstance(data, list) else ():
        plan = to_plan(entry)
        if plan is not None and isinstance(entry.get("reason"), str):
            found[plan] = entry["reason"][:1000]
    return found


def to_plan(entry: Any) -> Plan | None:
    """The plan that JSON data with "engine" and "knobs" names, None where it names none."""
    if not isinstance(entry, dict):
        return None
    engine, knobs = entry.get("engine"), entry.get("knobs")
    if type(engine) is not int or not isinstance(knobs, list):
        return None
    made = []
    for knob in knobs:
        if not (isinstance(knob, list) and len(knob) == 2):
            return None
        name, value = knob
        if not isinstance(name, str) or type(value) is not int:
            return None
        made.append((name, value))
    return engine, tuple(made)
