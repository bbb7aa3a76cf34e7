"""What Python's collector of garbage does while models are traced and graphs are made.

Tracing makes many new objects, by which collections come often, and some of the new objects are
garbage in cycles that hold tensors. Objects that were there before are mostly left alone: a process
that has imported a few libraries has a million, which take a third of a second to walk.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

NEVER = (1 << 31) - 1  # so many collections of younger objects do not come before one of older ones
SHARE = 20  # of the time that a collection of all has taken, until another may come


class _Thresholds:
    """The collector's thresholds while some threads have old objects left alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before = (0, 0, 0)
        self._inside = [0, 0]  # threads, and of these such as keep new objects apart

    @contextmanager
    def changed(self, *, apart: bool) -> Iterator[None]:
        self._step(1, apart)
        try:
            yield
        finally:
            self._step(-1, apart)

    def _step(self, by: int, apart: bool) -> None:
        with self._lock:
            if not self._inside[0]:
                self._before = gc.get_threshold()
            self._inside[0] += by
            self._inside[1] += by * apart
            young, middle, old = self._before
            if self._inside[0]:
                middle, old = NEVER if self._inside[1] else middle, NEVER
            gc.set_threshold(young, middle, old)


_thresholds = _Thresholds()


@contextmanager
def old_left_alone() -> Iterator[None]:
    """While any thread is in it, collections leave old objects out."""
    with _thresholds.changed(apart=False):
        yield


class _Whole:
    """Collections of all objects, which take a small part of the time at most."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def is_due(self) -> bool:
        return perf_counter() >= self._next_s

    def collect(self) -> None:
        start = perf_counter()
        gc.collect()
        end = perf_counter()
        self._next_s = end + SHARE * (end - start)


_whole = _Whole()


@contextmanager
def new_collected() -> Iterator[None]:
    """Collect in the end, at once, what was made within and is garbage, also in cycles.

    No new object comes to lie among the old ones within, so those need not be walked. They are from
    time to time: the graphs of a compiler that was reset are among them, with their tensors.
    """
    with _thresholds.changed(apart=True):
        yield
        if _whole.is_due():
            _whole.collect()
        else:
            gc.collect(1)
