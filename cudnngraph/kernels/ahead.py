"""Loops that read some steps ahead: how many, by the registers that they take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..device.rules import rules
from .rows import MOST_REGISTERS
from .scalars import MEMORY

OTHERS = 16  # registers of a thread for addresses and counters, about
_BYTES = {kind: dtype.itemsize for dtype, kind in MEMORY.items()}


def registers_kept(lanes: int, body: Sequence[str], before: Sequence[str]) -> int:
    """About how many registers hold what a loop reads of the lines before it."""
    read = set(re.findall(r"\bv\d+\b", " ".join(body)))
    made = re.findall(r"^\w+ (v\d+)\[\d+\];", "\n".join(before), re.MULTILINE)
    return lanes * len(read & set(made))


def most_ahead(threads: int, lanes: int, kept: int, reads: Sequence[str], writes: bool) -> int:
    """How many steps a thread may read ahead so that all blocks run at the same time.

    ``reads`` are the variables of what a step reads, each with its type. A step takes registers for
    these, and for about half of the lanes of what it computes, or all where it ``writes``.
    """
    budget = MOST_REGISTERS // (threads * rules().kernel_blocks_per_sm) - OTHERS - kept
    step = sum(map(_registers, reads)) + -(-lanes // (1 if writes else 2))
    return max(1, budget // step)


def _registers(declared: str) -> int:
    """The registers of a variable, declared with its type."""
    vector = re.match(r"vec<(\w+), (\d+)>", declared)
    bytes = _BYTES[vector[1]] * int(vector[2]) if vector else _BYTES[declared.split()[0]]
    return -(-bytes // 4)


def each_step(ahead: int, step: int, where: str, lines: Sequence[str]) -> list[str]:
    """Lines for each of the steps that are read ahead."""
    return _unrolled(ahead, _at(f"first + u * {step}u", where, lines)) if lines else []


def steps_in_groups(
    ahead: int, step: int, where: str, lines: Sequence[str], begin: Sequence[str]
) -> list[str]:
    """A loop over groups of steps, of which the reads of the first have begun. Whole groups are not
    tested step by step."""
    go_on = f"first += {ahead * step}u;"
    each = f"first + u * {step}u"
    whole = []
    if rules().kernel_steps_untested:
        parts = (_unrolled(ahead, _at(each, where, x, tested=False)) for x in (lines, begin))
        now, later = (["  " + line for line in part] for part in parts)
        until = f"first + {(2 * ahead - 1) * step}u < count"
        whole = [f"while ({until}) {{", *now, f"  {go_on}", *later, "}"]
    now, later = (
        ["  " + line for line in _unrolled(ahead, _at(each, where, x))] for x in (lines, begin)
    )
    end = [f"  {go_on}", "  if (first >= count) break;", *later, "}"]
    return [*whole, "for (;;) {", *now, *end]


@dataclass(frozen=True)
class Chunks:
    """The chunks of a row of ``extent`` elements, each of ``lanes`` for each thread of a team.

    ``kind`` is the type of what counts elements. A row with ``ends`` has elements that are in no
    chunk: before its ``head`` and from ``full`` on.
    """

    extent: int
    team: int
    lanes: int
    count: int
    kind: str
    ends: bool

    def once(self, *parts: Sequence[str]) -> list[str]:
        """Lines for each chunk, one part of them behind the other."""
        each = (self._of("u", lines, self._whole(self.count)) for lines in parts if lines)
        return [line for lines in each for line in _unrolled(self.count, lines)]

    def in_groups(
        self, ahead: int, begin: Sequence[str], made: Sequence[str], *, backwards: bool
    ) -> list[str]:
        """Reads of so many chunks and what is made of them, as often as there are."""
        at = f"{self.count - 1}u - (from + u)" if backwards else "from + u"
        whole = self._whole(ahead)
        parts = (self._of(at, lines, whole) for lines in (begin, made) if lines)
        inside = [f"  {line}" for part in parts for line in _unrolled(ahead, part)]
        loop = f"for (u32 from = 0; from < {self.count}u; from += {ahead}u) {{"
        return [loop, *inside, "}"]

    def by_blocks(
        self, ahead: int, reads: Sequence[tuple[str, list[str]]], made: Sequence[str]
    ) -> list[str]:
        """Blocks' loop over groups of so many chunks: reads of all, then what is made of each.

        ``reads`` are the types and names of what is read, each with its lines.
        """
        whole = self.extent % (self.team * self.lanes * ahead) == 0
        begin = [line for _, lines in reads for line in lines]
        parts = (self._of("from + u", lines, whole) for lines in (begin, made) if lines)
        declared = [f"{read}[{ahead}];" for read, _ in reads]
        inside = [*declared, *(line for part in parts for line in _unrolled(ahead, part))]
        until = f"from < {self.count}u; from += gridDim.x * {ahead}u"
        return [
            "const u32 t = threadIdx.x;",
            f"for (u32 from = blockIdx.x * {ahead}u; {until}) {{",
            *("  " + line for line in inside),
            "}",
        ]

    def at_ends(self, lines: Sequence[str]) -> list[str]:
        """Lines for a thread's element that is in no chunk."""
        head = ["if (end < size) {", f"  const {self.kind} k = end;"]
        return [*head, *("  " + line for line in lines), "}"]

    def where_ends(self, start: str) -> list[str]:
        """Where chunks begin and end in a row that begins at ``start``, and a thread's element that
        is in none."""
        return [
            f"const u32 size = {self.extent}u;",
            f"const u32 head = -(u32)({start}) & {self.lanes - 1}u;",
            f"const u32 full = head + (size - head) / {self.lanes}u * {self.lanes}u;",
            "const u32 end = t < head ? t : full - head + t;",
        ]

    def _whole(self, ahead: int) -> bool:
        """Whether one group of so many chunks is the row."""
        return self.extent == self.team * self.lanes * ahead

    def _of(self, chunk: str, lines: Sequence[str], whole: bool) -> list[str]:
        """Lines for a chunk; if groups are not ``whole``, for its elements that there are."""
        place = f"({self.kind})(({chunk}) * {self.team}u + t) * {self.lanes}u"
        there = "" if whole else f"k < {self.extent}u"
        if self.ends:
            place, there = f"head + {place}", "k < full"
        inside = ["  " + line for line in lines]
        if there:
            inside = [f"  if ({there}) {{", *("  " + line for line in inside), "  }"]
        return ["{", f"  const {self.kind} k = {place};", *inside, "}"]


def _unrolled(ahead: int, lines: Sequence[str]) -> list[str]:
    loop = f"for (u32 u = 0; u < {ahead}u; ++u) {{"
    return ["#pragma unroll", loop, *("  " + line for line in lines), "}"] if lines else []


def _at(at: str, where: str, lines: Sequence[str], *, tested: bool = True) -> list[str]:
    inside = [where, *lines]
    if tested:
        inside = ["if (at < count) {", *("  " + line for line in inside), "}"]
    return ["{", f"  const u32 at = {at};", *("  " + line for line in inside), "}"]
