"""State of the cache in this process: open directories, counters, hooks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from plans_cache.launches import Launches
from plans_cache.measurements import Measurements
from plans_cache.rejections import Rejections
from plans_cache.store import PlanStore

from .stats import Counters, MissInfo

_T = TypeVar("_T")


class State:
    """Stores, rejections and launches by directory, the counters, the hooks for misses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.stores: dict[Path, PlanStore] = {}
        self.rejections: dict[Path, Rejections] = {}
        self.launches: dict[Path, Launches] = {}
        self.measurements: dict[Path, Measurements] = {}
        self.counters = Counters()
        self.hooks: list[Callable[[MissInfo], None]] = []

    def store_of(self, directory: Path) -> PlanStore:
        """The store of a directory."""
        return self._opened(self.stores, directory, PlanStore)

    def rejections_of(self, directory: Path) -> Rejections:
        """Return the rejected choices of a directory."""
        return self._opened(self.rejections, directory, Rejections)

    def launches_of(self, directory: Path) -> Launches:
        """Return the marks of first launches in a directory."""
        return self._opened(self.launches, directory, Launches)

    def measurements_of(self, directory: Path) -> Measurements:
        """Return the measurements of steps in a directory."""
        return self._opened(self.measurements, directory, Measurements)

    def _opened(self, opened: dict[Path, _T], directory: Path, make: Callable[[Path], _T]) -> _T:
        with self._lock:
            if directory not in opened:
                opened[directory] = make(directory)
            return opened[directory]

    def after_fork(self) -> None:
        """In a child: a thread of the parent may have held the locks; the stores see to theirs."""
        self._lock = threading.Lock()
        self.counters = Counters()


STATE = State()


def on_miss(hook: Callable[[MissInfo], None]) -> Callable[[], None]:
    """Call ``hook`` whenever no stored plan serves a graph; returns what takes it off again.

    Exceptions of a hook are logged and go no further.
    """
    hooks = STATE.hooks
    hooks.append(hook)

    def remove() -> None:
        if hook in hooks:
            hooks.remove(hook)

    return remove


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=STATE.after_fork)
