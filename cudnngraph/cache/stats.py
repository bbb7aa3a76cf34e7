"""Counters of the cache, and what is told of a miss."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from plans_cache.store import Stats

from ..ir.key import Key


@dataclass(frozen=True)
class MissInfo:
    """The argument of a miss hook: the graph in one line, its key, and the reason of the miss."""

    graph: str
    key: Key
    reason: str


class Counters:
    """Lookups by the tier that served them, misses by reason, and time spent; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.lookups: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.build_ms = 0.0
        self.load_ms = 0.0

    def served(self, tier: str, *, build_ms: float = 0.0, load_ms: float = 0.0) -> None:
        """Count one lookup."""
        with self._lock:
            self.lookups[tier] += 1
            self.build_ms += build_ms
            self.load_ms += load_ms

    def missed(self, reason: str) -> None:
        """Count one miss."""
        with self._lock:
            self.misses[reason] += 1


@dataclass(frozen=True)
class CacheStats:
    """Counters of the cache in this process.

    ``lookups`` counts what served compiled graphs: "memory" (a program), "disk" and "seed" (the
    store), "built", "reference". ``misses`` counts the reasons why the store did not serve.
    ``build_ms`` and ``load_ms`` are milliseconds spent on building plans and on loading them.
    ``programs`` are the compiled graphs in memory. ``workspace_bytes`` is what the pool holds now,
    ``workspace_high_water_bytes`` the most that it held. ``store`` has the store's own counters.
    """

    lookups: dict[str, int]
    misses: dict[str, int]
    build_ms: float
    load_ms: float
    programs: int
    workspace_bytes: int
    workspace_high_water_bytes: int
    store: Stats
