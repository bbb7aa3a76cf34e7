"""Banks of shared memory: where the rows of a tile begin so that few accesses meet in a bank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

BANKS = 32
BANK_BYTES = 4
WARP = 32


@dataclass(frozen=True)
class Pitch:
    """Where the rows of a tile begin, in elements: a row of each group of ``lanes`` rows, and each
    group."""

    row: int
    group: int
    elements: int  # of the whole tile


@lru_cache(maxsize=1024)
def pitch_of(size: int, along: int, across: int, lanes: int, wide: int) -> Pitch:
    """The pitch of a tile of elements of ``size`` bytes that costs least.

    The tile is filled in vectors of ``wide`` elements, by threads that lie across it first. It is
    read in single elements: each thread reads one of each row of a group, and threads lie along it
    first.
    """
    unit = max(1, BANK_BYTES // size)
    base = -(-across // unit) * unit
    tried = []
    for row in sorted({across, *(base + unit * more for more in range(3))}):
        for more in range(0, 10 * unit, unit if lanes > 1 else 1):
            group = lanes * row + more
            elements = -(-along // lanes) * group
            tried.append(
                (_cost(size, along, across, lanes, wide, row, group), elements, row, group)
            )
        if lanes == 1 and row > across:
            break
    _, elements, row, group = min(tried)
    return Pitch(row, group, elements)


def _cost(size: int, along: int, across: int, lanes: int, wide: int, row: int, group: int) -> float:
    """The cycles that an element takes to be written and read."""
    piece = gcd(wide, gcd(row, group))
    columns, groups = max(1, across // wide), max(1, along // lanes)
    filled, read = [], []
    for thread in range(WARP):
        q, n = thread // columns, thread % columns * wide
        filled.append(q // lanes * group + q % lanes * row + n)
        read.append(thread % groups * group + thread // groups)
    written = _cycles(filled, size, piece) * (wide // piece) / (WARP * wide)
    return written + _cycles(read, size, 1) / WARP


def _cycles(places: Sequence[int], size: int, piece: int) -> int:
    """The cycles of one access of a warp: what is wider than a bank goes in parts of a warp."""
    part = WARP * BANK_BYTES // max(BANK_BYTES, size * piece)
    found = 0
    for start in range(0, WARP, part):
        words: dict[int, set[int]] = {}
        for at in places[start : start + part]:
            first, last = at * size // BANK_BYTES, ((at + piece) * size - 1) // BANK_BYTES
            for word in range(first, last + 1):
                words.setdefault(word % BANKS, set()).add(word)
        found += max(len(each) for each in words.values())
    return found
