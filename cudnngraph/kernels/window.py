"""The writing of windows: loops over places of an image, and reads of elements there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .index import Sum, Var, counter
from .tape import Index, Window

if TYPE_CHECKING:
    from .write import Writer

MOST_UNROLLED = 256  # elements, lanes counted, that unrolled loops read: more are much code


class Steps:
    """What the rule of a window writes with. Places are C++ names of unsigned numbers.

    ``at`` are the places of the window's own element along each spatial dim.
    """

    def __init__(self, writer: Writer, window: Window, index: Index, by: int) -> None:
        self._writer = writer
        self._window = window
        self._index = index
        self._by = by
        self.at = tuple(self.place(each.code(writer._names)) for each in index[2:])

    def line(self, text: str) -> None:
        """Add a line that is the same for all lanes."""
        self._writer._lines.append(text)

    def lanes(self, text: str) -> None:
        """Add a line for each lane."""
        if self._by == 2:
            self._writer._each_lane(text)
        else:
            self.line(text)

    def place(self, code: str) -> str:
        """The name of a number that is the same for all lanes."""
        name = self._writer._new()
        self.line(f"const u32 {name} = {code};")
        return name

    def number(self, type: str, code: str) -> str:
        """The name of a constant that is the same for all lanes."""
        name = self._writer._new()
        self.line(f"const {type} {name} = {code};")
        return name

    def local(self, type: str, start: str) -> str:
        """The name of a variable that each lane has."""
        name = self._writer._new()
        if self._by < 2:
            self.line(f"{type} {name} = {start};")
            return name
        self.line(f"{type} {name}[{self._writer._plan.lanes}];")
        self.lanes(f"{name}[j] = {start};")
        return f"{name}[j]"

    @contextmanager
    def loop(self, count: int, reads: int) -> Iterator[str]:
        """A loop that counts; what is computed within is not known behind it.

        The nest of loops that it is of reads so many elements.
        """
        name = self._writer._new()
        lanes = self._writer._plan.lanes if self._by == 2 else 1
        self.line(f"#pragma unroll{'' if reads * lanes <= MOST_UNROLLED else ' 1'}")
        self.line(f"for (u32 {name} = 0; {name} < {count}u; ++{name}) {{")
        known = dict(self._writer._known)
        yield name
        self._writer._known = known
        self.line("}")

    def read(self, operand: int, places: Sequence[str]) -> str:
        """C++ for an element of an operand at places that are inside of it."""
        value = self._window.operands[operand]
        index = list(self._index[:2])
        for name, extent in zip(places, value.shape[2:], strict=True):
            var = Var(name, extent)
            self._writer.name(var, name)
            index.append(counter(var))
        there = tuple(
            Sum() if extent == 1 else each for each, extent in zip(index, value.shape, strict=True)
        )
        return self._writer._at(value, there).text
