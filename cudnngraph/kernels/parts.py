"""How values lie in memory: their dims in parts whose elements are evenly apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .index import Sum, Var, counter, digits, place
from .tape import Index, Join, Map, Pick, Read, Value, View, broadcast, part_of


@dataclass(frozen=True)
class Part:
    """The digit ``(i // div) % extent`` of the index along a dim; ``step`` is how far apart in
    memory its neighbours lie."""

    dim: int
    div: int
    extent: int
    step: int


def parts_of(value: Value) -> list[Part]:
    """The dims of a value in parts that lie evenly in the largest tensor that is read for it, those
    farthest apart first; of several by the one that most dims go through."""
    rank = len(value.shape)
    names = [Var(f"d{dim}", extent) for dim, extent in enumerate(value.shape)]
    index = tuple(counter(name) if name.extent > 1 else Sum() for name in names)
    most, best = (-1, 0), Sum()
    stack: list[tuple[Value, Index]] = [(value, index)]
    seen: set[tuple[int, Index]] = set()  # what many paths lead to is looked at once
    while stack:
        at, where = stack.pop()
        if (id(at), where) in seen:
            continue
        seen.add((id(at), where))
        if isinstance(at, Read):
            there = place(where, at.tensor.stride)
            size = at.tensor.numel, len(there.vars())
            most, best = (size, there) if size > most else (most, best)
        elif isinstance(at, Map):
            stack += [(each, broadcast(where, each.shape)) for each in at.operands]
        elif isinstance(at, View):
            source = at.source(where)
            stack += [] if source is None else [(at.operand, source)]
        elif isinstance(at, Join):
            only = part_of(at, where)
            stack += [(each, where) for each in at.operands] if only is None else [only]
        elif isinstance(at, Pick):  # what is picked lies anyhow
            stack.append((at.operands[1], broadcast(where, at.operands[1].shape)))
    found: list[Part] = []
    for dim, name in enumerate(names):
        terms = sorted((digit.div, digit.mod, by) for digit, by in best.terms if digit.var == name)
        parts = [Part(dim, div, mod, by) for div, mod, by in terms]
        ends = [1, *(part.div * part.extent for part in parts)]
        if name.extent > 1 and ends != [*(part.div for part in parts), name.extent]:
            plain = [Part(dim, 1, n, rank - dim) for dim, n in enumerate(value.shape) if n > 1]
            return plain  # it is not read once and whole: in row-major order
        found += parts
    return sorted(found, key=lambda part: -part.step)


def counted(parts: Sequence[Part], var: Var) -> dict[int, Sum]:
    """The index along each dim that parts are of, which a variable counts, the last one fastest."""
    found: dict[int, Sum] = {}
    for part, digit in zip(
        parts, digits(counter(var), [each.extent for each in parts]), strict=True
    ):
        found[part.dim] = found.get(part.dim, Sum()) + digit * part.div
    return found


def run_of(parts: Sequence[Part]) -> int:
    """How many elements lie side by side in memory, of parts in its order."""
    run = 1
    for part in reversed(parts):
        if part.step != run:
            break
        run *= part.extent
    return run
