"""What a search by measurement spends its time on, told at INFO while it goes on and in the end."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)

EVERY_S = 1.0  # at most one line about parts in so long

#: What this process does or waits for, in the order in which it is told.
RANKING, BUILDING, GPU = "waiting for rankings", "waiting for builds", "waiting for the GPU"
MEASURING, COMPARING, IN_PLACE = "measuring", "comparing", "comparing in place"
KINDS = (RANKING, BUILDING, GPU, MEASURING, COMPARING, IN_PLACE)
BUILT, CHECKED = "building", "checking"  # in worker processes


class Effort:
    """Seconds of this process and of its workers, by kind, and counts of what was done.

    ``let_go`` is called before this process waits for a worker.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self.let_go: Callable[[], None] = lambda: None
        self._start = time.perf_counter()
        self._told = self._start

    @contextmanager
    def spent(self, kind: str) -> Iterator[None]:
        """Count the time within."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] += time.perf_counter() - start

    def tell(self, line: Callable[[], str]) -> None:
        """Log a line, unless one was logged a moment ago."""
        now = time.perf_counter()
        if now - self._told >= EVERY_S and _log.isEnabledFor(logging.INFO):
            self._told = now
            _log.info("search, %.0f s: %s", now - self._start, line())

    @property
    def total_s(self) -> float:
        """The time since the first search began."""
        return time.perf_counter() - self._start

    def __str__(self) -> str:
        total = self.total_s
        spent = [f"{kind} {self.seconds[kind]:.1f}" for kind in KINDS]
        other = total - sum(self.seconds[kind] for kind in KINDS)
        workers = [f"{kind} {self.seconds[kind]:.1f}" for kind in (BUILT, CHECKED)]
        counts = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        told = f"{total:.1f} s: {', '.join(spent)}, other {other:.1f}; workers: "
        return f"{told}{', '.join(workers)} s" + (f"; {counts}" if counts else "")
