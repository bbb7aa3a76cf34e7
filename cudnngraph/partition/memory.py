"""Where the tensors between steps lie: those that never live together share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Need:
    """``size_bytes`` of memory from step ``first`` to step ``last``, both included."""

    size_bytes: int
    first: int
    last: int


def place(needs: Sequence[Need]) -> tuple[list[int], int]:
    """An offset for each need, and the bytes that they take together.

    The largest is placed first, each as low as those that live at the same time allow. Offsets are
    multiples of :data:`ALIGNMENT_BYTES`.
    """
    offsets = [0] * len(needs)
    placed: list[int] = []
    total = 0
    for index in sorted(range(len(needs)), key=lambda i: -needs[i].size_bytes):
        need = needs[index]
        if not need.size_bytes:
            continue
        beside = sorted(
            (offsets[other], offsets[other] + needs[other].size_bytes)
            for other in placed
            if needs[other].first <= need.last and need.first <= needs[other].last
        )
        offset = 0
        for start, stop in beside:
            if offset + need.size_bytes <= start:
                break
            offset = max(offset, _aligned(stop))
        offsets[index] = offset
        placed.append(index)
        total = max(total, offset + need.size_bytes)
    return offsets, total


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
