"""Regions taken apart at their reductions, for kernels of several launches.

A stage computes the reductions that wait for no others, and what has one number for each result.
Values that a stage holds in memory take the place of what they were computed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..ir.spec import TensorSpec, numel
from .gather import Gather
from .tape import (
    Join,
    Map,
    Mean,
    Pick,
    Powers,
    Read,
    Reduce,
    Refused,
    Running,
    Squares,
    Value,
    View,
    add,
    count_of,
    mapped,
    mul,
    operands_of,
    reduced,
    reshape,
    sliced,
    sub,
    times,
)

Outputs = Sequence[tuple[Value, TensorSpec]]


def reachable(values: Iterable[Value], until: Iterable[int] = ()) -> list[Value]:
    """The values that others are made of, operands first; not what those in ``until`` are of."""
    found: dict[int, Value] = {}
    ends = set(until)
    stack = [(value, False) for value in values]
    while stack:
        value, done = stack.pop()
        if done:
            found.setdefault(id(value), value)
        elif id(value) not in found:
            stack.append((value, True))
            if id(value) not in ends:
                stack += [(operand, False) for operand in operands_of(value)]
    return list(found.values())


def reductions_of(values: Iterable[Value]) -> list[Reduce]:
    """The reductions among what values are made of."""
    return [value for value in reachable(values) if isinstance(value, Reduce)]


def rows_inside(value: Reduce) -> set[int]:
    """The reductions, by id, that give what another one reads, a number for each of their rows.

    Empty where they do not wait for each other: then one loop may gather several of them.
    """
    inner = reductions_of([value.operand])
    if value.operand.type != "float" or not any(reductions_of([each.operand]) for each in inner):
        return set()
    most = max(numel(each.operand.shape) for each in inner)
    return set(map(id, inner)) if numel(value.operand.shape) < most else set()


def largest_reads(values: Iterable[Value]) -> set[TensorSpec]:
    """The largest tensors that are read for values."""
    reads = {value.tensor for value in reachable(values) if isinstance(value, Read)}
    most = max((tensor.numel for tensor in reads), default=0)
    return {tensor for tensor in reads if tensor.numel == most}


def widest_read(values: Iterable[Value]) -> int:
    """The bytes of the widest element among the largest tensors that are read for values."""
    return max((tensor.dtype.itemsize for tensor in largest_reads(values)), default=4)


def groups_of(outputs: Outputs) -> list[Outputs]:
    """The outputs in groups that share no reductions."""
    groups: list[tuple[set[int], list[tuple[Value, TensorSpec]]]] = []
    for value, to in outputs:
        ids, together = set(map(id, reductions_of([value]))), [(value, to)]
        for other in [each for each in groups if each[0] & ids]:
            groups.remove(other)
            ids |= other[0]
            together = [*other[1], *together]
        groups.append((ids, together))
    return [each for _, each in groups]


def gathers_of(values: Sequence[Value]) -> list[list[Gather]]:
    """The reductions that wait for no others, together where one loop gathers them."""
    reach = reachable(values)
    clean: dict[int, bool] = {}  # whether it is of values of which nothing is reduced
    for value in reach:
        below = operands_of(value)
        clean[id(value)] = all(clean[id(x)] and not isinstance(x, Reduce) for x in below)
    users: dict[int, list[Value]] = {}
    for value in reach:
        for operand in operands_of(value):
            users.setdefault(id(operand), []).append(value)
    found: dict[int, Gather] = {}
    gone: set[int] = set()
    for value in reach:
        if isinstance(value, Squares) and clean[id(value.middle.sum)]:
            found[id(value)] = Gather((value.middle, value))
            if all(user is value.middle for user in users[id(value.middle.sum)]):
                gone.add(id(value.middle.sum))
        elif isinstance(value, Powers) and clean[id(value.of)]:
            found[id(value)] = Gather((value.most, value))
            gone.add(id(value.most))
        elif isinstance(value, Reduce) and clean[id(value)]:
            found[id(value)] = Gather((value,))
    together: dict[tuple[object, ...], list[Gather]] = {}
    for at, gather in found.items():
        if at not in gone:
            together.setdefault((gather.operand.shape, gather.dims), []).append(gather)
    if not together:
        raise Refused("reductions that wait for each other")
    return list(together.values())


def stage_of(gathers: Sequence[Gather], outputs: Outputs) -> list[tuple[Value, TensorSpec | None]]:
    """What a stage computes: values of one number for each result, with the output each goes to,
    None for one that other values are made of."""
    targets = {id(value): value for gather in gathers for value in gather.values}
    count = numel(gathers[0].values[-1].shape)
    reach = reachable([value for value, _ in outputs], targets)
    waits: dict[int, bool] = {}  # whether it is made of any reduction
    small: set[int] = set()
    for value in reach:
        below = operands_of(value)
        waits[id(value)] = (
            id(value) in targets
            or isinstance(value, Reduce)
            or any(waits.get(id(each), False) for each in below)
        )
        if id(value) in targets:
            small.add(id(value))
        elif isinstance(value, (Map, View)) and value.type == "float" and waits[id(value)]:
            ready = all(id(each) in small or not waits[id(each)] for each in below)
            if ready and numel(value.shape) == count:
                small.add(id(value))
    used = {
        id(each)
        for value in reach
        if id(value) not in small and id(value) not in targets
        for each in operands_of(value)
    }
    held: list[tuple[Value, TensorSpec | None]] = [
        (value, None) for value in reach if id(value) in small and id(value) in used
    ]
    return held + [(value, to) for value, to in outputs if id(value) in small]


def written_beside(outputs: Iterable[tuple[Value, TensorSpec]]) -> dict[int, Value]:
    """Outputs that a function writes while it reduces, as what later ones read of them: those of
    several tensors, which are more to read than the output is."""

    def bytes_of(tensors: Iterable[TensorSpec]) -> int:
        return sum(tensor.numel * tensor.dtype.itemsize for tensor in tensors)

    found: dict[int, Value] = {}
    for value, to in outputs:
        reads = {each.tensor for each in reachable([value]) if isinstance(each, Read)}
        if value.type == "float" and bytes_of(reads) > bytes_of([to]):
            found[id(value)] = Read(to.shape, to)
    return found


def replaced(outputs: Outputs, by: Mapping[int, Value]) -> Outputs:
    """The outputs with other values in place of some that they are made of."""
    made = replaced_in([value for value, _ in outputs], by)
    return [(value, to) for value, (_, to) in zip(made, outputs, strict=True)]


def replaced_in(values: Sequence[Value], by: Mapping[int, Value]) -> list[Value]:
    """The same of values, by their ids."""
    made = dict(by)
    for each in reachable(values, by):
        if id(each) in made:
            continue
        below = operands_of(each)
        fresh = tuple(made[id(operand)] for operand in below)
        if all(old is new for old, new in zip(below, fresh, strict=True)):
            made[id(each)] = each
        elif isinstance(each, Mean):
            total = fresh[0]
            made[id(each)] = (
                replace(each, operands=fresh, sum=total)
                if isinstance(total, Reduce)
                else Map(each.shape, fresh, each.code)
            )
        elif isinstance(each, (Map, Join)):
            made[id(each)] = replace(each, operands=fresh)
        elif isinstance(each, Pick):
            made[id(each)] = replace(each, operands=(fresh[0], fresh[1]))
        elif isinstance(each, Squares):
            middle = made[id(each.middle)]
            made[id(each)] = (
                replace(each, operand=fresh[0], of=made[id(each.of)], middle=middle)
                if isinstance(middle, Mean)
                else Reduce(each.shape, fresh[0], each.dims, each.kind)
            )
        elif isinstance(each, Powers):
            of, most = made.get(id(each.of)), made.get(id(each.most))
            made[id(each)] = (
                replace(each, operand=fresh[0], of=of, most=most)
                if isinstance(of, Value) and isinstance(most, Reduce)
                else Reduce(each.shape, fresh[0], each.dims, each.kind)
            )
        else:
            assert isinstance(each, (Reduce, Running, View))
            made[id(each)] = replace(each, operand=fresh[0])
    return [made[id(value)] for value in values]


def put_together(gather: Gather, counts: Value, parts: Sequence[Value]) -> dict[int, Value]:
    """The values of what was gathered from partial results, which stand along the last dim, of so
    many elements each."""
    last = gather.values[-1]
    assert isinstance(last, Reduce)
    shape, rank = last.shape, len(last.shape)
    if gather.peaks:
        mosts, sums = parts
        most = reduced("max", mosts, (rank,))
        scaled = mapped(lambda s, m, n: f"({s} * power({m} - powers_from({n})))", sums, mosts, most)
        summed = reduced("sum", scaled, (rank,))
        powers = mapped(lambda m, s: f"Peak({m}, {s}).total()", most, summed)
        both = (reshape(most, shape), reshape(powers, shape))
        return {id(value): each for value, each in zip(gather.values, both, strict=True)}
    if not gather.moments:
        return {id(last): reshape(reduced(last.kind, parts[0], (rank,)), shape)}
    means, squares = parts
    share = 1.0 / count_of(gather.operand, gather.dims)
    first = sliced(means, rank, 0, (*shape, 1), 1)
    apart = sub(means, first)
    middle = times(reduced("sum", mul(counts, apart), (rank,)), share)
    rest = sub(apart, middle)
    total = reduced("sum", add(squares, mul(counts, mul(rest, rest))), (rank,))
    made = (reshape(add(first, middle), shape), reshape(total, shape))
    return {id(value): each for value, each in zip(gather.values, made, strict=True)}
