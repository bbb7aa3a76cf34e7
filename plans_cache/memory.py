"""The entries of a store that are kept in memory, within bounds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

_OVERHEAD_BYTES = 512  # of an entry in memory, besides its text and blob


@dataclass(frozen=True)
class Kept:
    """An entry in memory: as text, so that its size is known. A record of it is larger."""

    text: bytes
    blob: bytes | None

    @property
    def size_bytes(self) -> int:
        return len(self.text) + len(self.blob or b"") + _OVERHEAD_BYTES


class Memory:
    """The entries used last, as many as both bounds allow. Thread-safe."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Kept] = OrderedDict()
        self.bytes = 0
        self._evictions = 0
        self.lock = threading.Lock()

    def after_fork(self) -> None:
        """Take a new lock in a forked child, where a lost thread may hold the old; count anew."""
        self.lock = threading.Lock()
        self.bytes = sum(kept.size_bytes for kept in self._entries.values())

    def get(self, id: str) -> Kept | None:
        """Return an entry, and note its use."""
        with self.lock:
            kept = self._entries.get(id)
            if kept is not None:
                self._entries.move_to_end(id)
            return kept

    def peek(self, id: str) -> Kept | None:
        """Return an entry without noting its use."""
        with self.lock:
            return self._entries.get(id)

    def items(self) -> list[tuple[str, Kept]]:
        """Return the ids with their entries, the one used last at the end."""
        with self.lock:
            return list(self._entries.items())

    def put(self, id: str, kept: Kept) -> None:
        """Keep an entry, and evict those used longest ago.

        An entry that is too large by itself is not kept; an older one of its id goes too.
        """
        with self.lock:
            self._pop(id)
            if kept.size_bytes > self._max_bytes:
                return
            self._entries[id] = kept
            self.bytes += kept.size_bytes
            while len(self._entries) > self._max_entries or self.bytes > self._max_bytes:
                self._pop(next(iter(self._entries)))
                self._evictions += 1

    def pop(self, id: str) -> bool:
        """Forget an entry; return whether there was one."""
        with self.lock:
            return self._pop(id)

    def clear(self) -> None:
        """Forget every entry."""
        with self.lock:
            self._entries.clear()
            self.bytes = 0

    def sizes(self) -> tuple[int, int, int]:
        """Return the number of entries, their bytes, and how many were evicted so far."""
        with self.lock:
            return len(self._entries), self.bytes, self._evictions

    def _pop(self, id: str) -> bool:
        kept = self._entries.pop(id, None)
        if kept is not None:
            self.bytes -= kept.size_bytes
        return kept is not None
