"""Kernels whose lanes have branches of their own: computed one by one, written together.

Where a border of what is joined lies between the lanes of a thread, or each lane reads at a place
that is computed, lanes cannot go side by side through one branch. Here they are a loop that the
compiler unrolls. What the lanes share is computed in front of it, and an index is written as the
first lane's with the lane's number in its low bits, so that the compiler knows many branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd

from ..ir.spec import GraphSpec, TensorSpec
from .index import Digit, Sum, place
from .rows import VECTOR_BYTES, Rows, Schedule
from .scalars import MEMORY, REGISTER
from .tape import Index, Read, Window
from .write import Code, Narrower, Writer

MOST_LINES = 1024  # of a thread, unrolled: more take long to compile


class LaneByLane(Writer):
    """The text of a kernel of one long row. Raises :class:`Narrower` where it would gain nothing:
    the results of the lanes do not lie side by side, or there is too much to unroll."""

    def __init__(self, spec: GraphSpec, schedule: Schedule, rows: Rows, most_blocks: int) -> None:
        super().__init__(spec, replace(schedule, lanes=1, chunks=1), rows, most_blocks)
        self._wide = schedule.lanes
        self._chunks = -(-rows.vectors(schedule.lanes) // schedule.team)
        self._before: list[str] = []  # what lanes share
        self._vectors: list[str] = []  # what is read or written of all lanes together
        self._stores: list[str] = []
        self._of_lane: list[str] = []  # the digits of a lane
        self._digits: dict[Digit, str] = {}

    def _pass(
        self,
        fill: Callable[[], None],
        number: int,
        before: Sequence[str] = (),
        after: Sequence[str] = (),
    ) -> list[str]:
        self._lines = []
        fill()
        wide, kind = self._wide, self._count_type
        if wide & (wide - 1) or not self._stores or len(self._lines) * wide > MOST_LINES:
            raise Narrower
        inside = [
            *self._before,
            *self._vectors,
            "#pragma unroll",
            f"for (u32 j = 0; j < {wide}u; ++j) {{",
            f"  const {kind} k = first | j;",
            *("  " + line for line in (*self._of_lane, *self._lines)),
            "}",
            *self._stores,
        ]
        team, step = self._plan.team, self._plan.team * wide
        return [
            f"for ({kind} first = (({kind})blockIdx.x * {team}u + threadIdx.x) * {wide}u;",
            f"     first < {self._rows.inner.extent}u; first += ({kind})gridDim.x * {step}u) {{",
            *("  " + line for line in inside),
            "}",
        ]

    def _code(self, at: Sum) -> str:
        for digit, _ in at.terms:
            if digit.var == self._rows.inner:
                self._digit(digit)
        return at.code(self._names, self._digits)

    def _by_lane(self, at: Sum) -> str:
        return self._code(at)

    def _digit(self, digit: Digit) -> None:
        """Name a digit of the lane's element, computed once for all that ask for it."""
        if digit in self._digits or digit.code("k") == "k":
            return
        kind, name, wide = self._count_type, self._new(), self._wide
        shared = f"const {kind} {name} = {digit.code('first')};"
        self._digits[digit] = name
        if digit.div % wide == 0:
            self._before.append(shared)
        elif digit.div == 1 and digit.mod % wide == 0:
            self._before.append(shared)
            self._digits[digit] = f"({name} | j)"
        else:
            self._of_lane.append(f"const {kind} {name} = {digit.code('k')};")

    def _side_by_side(self, tensor: TensorSpec, at: Sum) -> bool:
        """Whether the elements of all lanes are a vector of memory."""
        inner, wide = self._rows.inner, self._wide
        fits = wide * tensor.dtype.itemsize <= VECTOR_BYTES and at.slope(inner, wide) == 1
        return fits and gcd(at.multiple(inner, wide), wide) == wide

    def _first(self, at: Sum) -> str:
        """Where the first lane's element lies."""
        return at.code({**self._names, self._rows.inner: "first"})

    def _read(self, value: Read, index: Index) -> Code:
        tensor, inner = value.tensor, self._rows.inner
        pointer, at = f"p{self._places[tensor.name]}", place(index, tensor.stride)
        inside = self._once is None  # of a branch: what no lane asks for is not read
        if inside or at.vars() != {inner}:
            return super()._read(value, index)
        if self._side_by_side(tensor, at):
            vector, made = self._new(), self._declare(value.type, 1)
            load = f"load<{self._wide}>({pointer} + ({self._first(at)}))"
            self._vectors.append(f"const auto {vector} = {load};")
            self._assign(made, f"lane({vector}, j)")
            return made
        if at.slope(inner, self._wide) == 0:
            name = self._new()
            self._before.append(f"const {value.type} {name} = get({pointer}[{self._first(at)}]);")
            return Code(name, 1)
        return super()._read(value, index)

    def _windowed(self, value: Window, index: Index) -> Code:
        raise Narrower

    def _store(self, tensor: TensorSpec, pointer: str, at: Sum, code: str) -> None:
        if not self._side_by_side(tensor, at):
            super()._store(tensor, pointer, at, code)
            return
        kind, vector = MEMORY[tensor.dtype], self._new()
        self._vectors.append(f"vec<{kind}, {self._wide}> {vector};")
        self._lines.append(f"put({vector}.at[j], ({REGISTER[tensor.dtype]}){code});")
        self._stores.append(f"store<{self._wide}>({pointer} + ({self._first(at)}), {vector});")
