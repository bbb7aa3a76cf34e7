"""Loops that read some steps ahead: how many, by the registers that they take."""

from __future__ import annotations

import re
from collections.abc import Sequence

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


def each_step_and_next(
    ahead: int, step: int, where: str, lines: Sequence[str], begin: Sequence[str]
) -> list[str]:
    """The same, each of which begins the reads of the step so many ahead: as many are always
    under way."""
    now = _at(f"first + u * {step}u", where, lines)
    return _unrolled(ahead, [*now, *_at(f"first + (u + {ahead}u) * {step}u", where, begin)])


def _unrolled(ahead: int, lines: Sequence[str]) -> list[str]:
    loop = f"for (u32 u = 0; u < {ahead}u; ++u) {{"
    return ["#pragma unroll", loop, *("  " + line for line in lines), "}"]


def _at(at: str, where: str, lines: Sequence[str]) -> list[str]:
    inside = [
        f"const u32 at = {at};",
        "if (at < count) {",
        *("  " + x for x in (where, *lines)),
        "}",
    ]
    return ["{", *("  " + line for line in inside), "}"]
