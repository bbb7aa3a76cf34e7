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
    padded: bool  # the rows do not lie one behind the other


@lru_cache(maxsize=1024)
def pitch_of(
    size: int, along: int, across: int, lanes: int, wide: int, flat: bool = False
) -> Pitch:
    """The pitch of a tile of elements of ``size`` bytes that costs least.

    The tile is filled in vectors of ``wide`` elements, by threads that lie across it first; if it
    is ``flat`` they go on from row to row. It is read in single elements: each thread reads one of
    each row of a group, and threads lie along it first.
    """
    unit = max(1, BANK_BYTES // size)
    base = -(-across // unit) * unit
    found: list[tuple[float, int, int, int]] = []
    for row in sorted({across, *(base + unit * more for more in range(3))}):
        for more in range(0, 10 * unit, unit if lanes > 1 and row % unit == 0 else 1):
            group = lanes * row + more
            tile = _Tile(size, along, across, lanes, wide, flat, row, group)
            found.append((tile.cost(), -(-along // lanes) * group, row, group))
        if lanes == 1:
            break
    _, elements, row, group = min(found)
    return Pitch(row, group, elements, row != across or group != lanes * row)


@dataclass(frozen=True)
class _Tile:
    """A tile in shared memory, as its first warp fills and reads it."""

    size: int
    along: int
    across: int
    lanes: int
    wide: int
    flat: bool
    row: int
    group: int

    def cost(self) -> float:
        """The cycles that an element takes to be written and read."""
        groups = max(1, self.along // self.lanes)
        read = [thread % groups * self.group + thread // groups for thread in range(WARP)]
        found = _cycles(read, self.size, 1) / WARP
        if not self.flat:
            columns = max(1, self.across // self.wide)
            piece = gcd(self.wide, self.row, self.group)
            first = [self._at(t // columns, t % columns * self.wide) for t in range(WARP)]
            return found + _cycles(first, self.size, piece) / (WARP * piece)
        first = [thread * self.wide for thread in range(WARP)]
        if self.row == self.across and self.group == self.lanes * self.row:
            return found + _cycles(first, self.size, self.wide) / (WARP * self.wide)
        single = [self._at(at // self.across, at % self.across) for at in first]
        return found + _cycles(single, self.size, 1) / WARP + 2 / WARP  # its divisions

    def _at(self, row: int, column: int) -> int:
        return row // self.lanes * self.group + row % self.lanes * self.row + column


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
