"""State of the cache in this process: open directories, counters, hooks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from plans_cache.launches import Launches
from plans_cache.measurements import Measurements
from plans_cache.rejections import Rejections
from plans_cache.store import PACKAGED_SEEDS, PlanStore

from .stats import Counters, MissInfo

_K = TypeVar("_K")
_T = TypeVar("_T")


class State:
    """Stores, rejections and launches by directory, the counters, the hooks for misses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.stores: dict[tuple[Path, bool], PlanStore] = {}
        self.rejections: dict[Path, Rejections] = {}
        self.launches: dict[Path, Launches] = {}
        self.measurements: dict[Path, Measurements] = {}
        self.counters = Counters()
        self.hooks: list[Callable[[MissInfo], None]] = []

    def store_of(self, directory: Path, seeds: bool) -> PlanStore:
        """The store of a directory, with the records that ship where ``seeds`` is true."""
        shipped = PACKAGED_SEEDS if seeds else None
        make = partial(PlanStore, directory, seeds=shipped)
        return self._opened(self.stores, (directory, seeds), make)

    def rejections_of(self, directory: Path) -> Rejections:
        """Return the rejected choices of a directory."""
        return self._opened(self.rejections, directory, partial(Rejections, directory))

    def launches_of(self, directory: Path) -> Launches:
        """Return the marks of first launches in a directory."""
        return self._opened(self.launches, directory, partial(Launches, directory))

    def measurements_of(self, directory: Path) -> Measurements:
        """Return the measurements of steps in a directory."""
        return self._opened(self.measurements, directory, partial(Measurements, directory))

    def _opened(self, opened: dict[_K, _T], key: _K, make: Callable[[], _T]) -> _T:
        with self._lock:
            if key not in opened:
                opened[key] = make()
            return opened[key]

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
