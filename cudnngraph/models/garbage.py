"""What Python's collector of garbage does while models are traced and graphs are made.

Tracing makes many new objects, by which collections come often, and some of the new objects are
garbage in cycles that hold tensors. Objects that were there before are left alone: a process that
has imported a few libraries has a million, which take a third of a second to walk.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = (1 << 31) - 1  # so many collections of younger objects do not come before one of older ones


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


@contextmanager
def new_collected() -> Iterator[None]:
    """Collect in the end, at once, what was made within and is garbage, also in cycles.

    No new object comes to lie among the old ones within, so those need not be walked.
    """
    with _thresholds.changed(apart=True):
        yield
        if sys.version_info >= (3, 14):  # what survives one collection is old there
            gc.collect()
        else:
            gc.collect(1)
