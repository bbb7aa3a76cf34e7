"""The counters of a store, its log, and how it goes on after a fault."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from .entries import Hit, Miss

_logger = logging.getLogger("plans_cache")


class Journal:
    """Counts what happens in a store and logs it; a ``strict`` one raises faults. Thread-safe."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._counts: Counter[str] = Counter()
        self._warned = False
        self.lock = threading.Lock()

    def after_fork(self) -> None:
        """Take a new lock in a forked child: a thread that it lacks may hold the old."""
        self.lock = threading.Lock()

    def add(self, name: str) -> None:
        """Count one more of ``name``."""
        with self.lock:
            self._counts[name] += 1

    def counts(self) -> Counter[str]:
        """Return the counters as they stand."""
        with self.lock:
            return self._counts.copy()

    def count(self, id: str, found: Hit | Miss) -> Hit | Miss:
        """Count and log a lookup; return what it found."""
        if isinstance(found, Hit):
            self.add(f"hit.{found.tier}")
            word = "cache_hit" if found.tier == "memory" else "persistent_cache_hit"
            _logger.debug("%s %s %s", word, id, found.tier)
        else:
            self.add(f"miss.{found.reason}")
            _logger.debug("cache_miss %s %s: %s", id, found.reason, found.detail)
        return found

    def fault(self, error: Exception, result: str = "plans are kept in memory only") -> None:
        """Log a fault of the cache, or raise it if strict; warn of the first one only."""
        if self.strict:
            raise error
        with self.lock:
            first, self._warned = not self._warned, True
        _logger.log(logging.WARNING if first else logging.DEBUG, "%s: %s", result, error)
