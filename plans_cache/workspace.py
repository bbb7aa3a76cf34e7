"""Pooled scratch memory: for each thread, one growing block per (device, stream).

Work that one thread puts on one stream runs in order, so plans in it can share a block. Two threads
on one stream would each put their steps between the other's. The pool grows by retiring the old
block, never by resizing it: whoever still holds the block keeps it alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

Block = TypeVar("Block")


class WorkspaceLimitError(RuntimeError):
    """A request went over the pool's limit."""


@dataclass(frozen=True)
class Slot(Generic[Block]):
    """A block and its size."""

    block: Block
    size_bytes: int


class _Slots(dict[tuple[int, int], Slot[Block]]):
    """The blocks of one thread, by device and stream."""


class WorkspacePool(Generic[Block]):
    """Blocks by (device, stream), made by ``allocate(device, stream, size_bytes)``; every thread
    has its own, which go with it.

    ``limit_bytes`` bounds a single block; None for no limit. Safe to use from several threads.
    """

    def __init__(
        self, allocate: Callable[[int, int, int], Block], limit_bytes: int | None = None
    ) -> None:
        self._allocate = allocate
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._own = threading.local()
        self._all: WeakValueDictionary[int, _Slots[Block]] = WeakValueDictionary()
        self._high_water_bytes = 0

    @property
    def slots(self) -> dict[tuple[int, int], Slot[Block]]:
        """The current blocks of this thread; entries are replaced, never changed."""
        found: _Slots[Block] | None = getattr(self._own, "slots", None)
        if found is None:
            found = self._own.slots = _Slots()
            with self._lock:
                self._all[id(found)] = found
        return found

    def get(self, device: int, stream: int, size_bytes: int) -> Block:
        """A block of at least ``size_bytes``, of this thread.

        Raises :class:`WorkspaceLimitError` over the limit; what ``allocate`` raises goes through.
        """
        if self.limit_bytes is not None and size_bytes > self.limit_bytes:
            raise WorkspaceLimitError(
                f"{size_bytes} bytes of workspace asked for, the limit is {self.limit_bytes}"
            )
        slots = self.slots
        with self._lock:
            slot = slots.get((device, stream))
            if slot is None or slot.size_bytes < size_bytes:
                block = self._allocate(device, stream, size_bytes)
                slot = slots[device, stream] = Slot(block, size_bytes)
                self._high_water_bytes = max(self._high_water_bytes, self._held_bytes())
            return slot.block

    def size_bytes(self, device: int, stream: int) -> int:
        """Size of this thread's current block; 0 where there is none."""
        slot = self.slots.get((device, stream))
        return 0 if slot is None else slot.size_bytes

    def _held_bytes(self) -> int:
        return sum(slot.size_bytes for slots in self._all.values() for slot in slots.values())

    @property
    def held_bytes(self) -> int:
        """Bytes in current blocks, of all threads."""
        with self._lock:
            return self._held_bytes()

    @property
    def high_water_bytes(self) -> int:
        """The most that :attr:`held_bytes` has been."""
        return self._high_water_bytes

    def release(self, device: int, stream: int) -> None:
        """Let go of the blocks of a stream that is not used again, of all threads."""
        with self._lock:
            for slots in self._all.values():
                slots.pop((device, stream), None)

    def clear(self) -> None:
        """Let go of every block, of all threads."""
        with self._lock:
            for slots in self._all.values():
                slots.clear()
