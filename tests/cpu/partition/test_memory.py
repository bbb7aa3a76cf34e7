"""Tensors between steps share memory where they never live together, and only there."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnngraph.partition.memory import SUBALLOCATION_BYTES, Lifetime, assign_offsets

STEPS = 8
NEEDS = st.lists(
    st.builds(
        lambda size, a, b: Lifetime(size, min(a, b), max(a, b)),
        st.one_of(st.integers(0, 2000), st.integers(0, 4).map(lambda n: n * SUBALLOCATION_BYTES)),
        st.integers(0, STEPS - 1),
        st.integers(0, STEPS - 1),
    ),
    max_size=12,
)


def aligned(size: int) -> int:
    return -(-size // SUBALLOCATION_BYTES) * SUBALLOCATION_BYTES


def together(a: Lifetime, b: Lifetime) -> bool:
    """Whether there is a step at which both live."""
    return bool({*range(a.first, a.last + 1)} & {*range(b.first, b.last + 1)})


@settings(deadline=None)
@given(needs=NEEDS)
def test_what_lives_together_never_overlaps(needs: list[Lifetime]) -> None:
    offsets, total = assign_offsets(needs)
    assert len(offsets) == len(needs)
    placed = list(zip(needs, offsets, strict=True))
    for (a, at), (b, bt) in combinations(placed, 2):
        if together(a, b) and a.size_bytes and b.size_bytes:
            assert at + a.size_bytes <= bt or bt + b.size_bytes <= at
    assert all(at >= 0 and at + need.size_bytes <= total for need, at in placed)
    assert total == max((at + need.size_bytes for need, at in placed if need.size_bytes), default=0)


@settings(deadline=None)
@given(needs=NEEDS)
def test_every_offset_is_aligned(needs: list[Lifetime]) -> None:
    assert all(offset % SUBALLOCATION_BYTES == 0 for offset in assign_offsets(needs)[0])


@settings(deadline=None)
@given(needs=NEEDS)
def test_the_total_lies_between_what_lives_at_once_and_the_sum(needs: list[Lifetime]) -> None:
    _, total = assign_offsets(needs)
    peak = max(
        sum(need.size_bytes for need in needs if need.first <= step <= need.last)
        for step in range(STEPS)
    )
    assert peak <= total <= sum(aligned(need.size_bytes) for need in needs)
    assert total >= max((need.size_bytes for need in needs), default=0)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 5000), max_size=STEPS))
def test_lifetimes_that_are_apart_share_all_memory(sizes: list[int]) -> None:
    needs = [Lifetime(size, step, step) for step, size in enumerate(sizes)]
    assert assign_offsets(needs) == ([0] * len(sizes), max(sizes, default=0))


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=STEPS))
def test_what_lives_all_along_takes_the_sum(sizes: list[int]) -> None:
    _, total = assign_offsets([Lifetime(size, 0, STEPS) for size in sizes])
    least = min(aligned(size) - size for size in sizes)
    most = sum(map(aligned, sizes))
    assert most - total >= least and most - total < SUBALLOCATION_BYTES


@settings(deadline=None)
@given(needs=NEEDS)
def test_the_same_needs_are_placed_alike(needs: list[Lifetime]) -> None:
    """Every thread and process lays a program out in the same way."""
    assert assign_offsets(needs) == assign_offsets(list(needs))


def test_a_chain_needs_two_tensors_at_a_time() -> None:
    size = 4 * SUBALLOCATION_BYTES
    needs = [Lifetime(size, step, step + 1) for step in range(6)]
    assert assign_offsets(needs) == ([0, size] * 3, 2 * size)


def test_a_small_need_goes_into_a_gap() -> None:
    """Below the second tensor there is room where the first has lived."""
    unit = SUBALLOCATION_BYTES
    needs = [
        Lifetime(4 * unit, 0, 1),
        Lifetime(3 * unit, 1, 2),
        Lifetime(2 * unit, 2, 2),
        Lifetime(unit, 2, 2),
    ]
    offsets, total = assign_offsets(needs)
    assert offsets == [0, 4 * unit, 0, 2 * unit]
    assert total == 7 * unit


@pytest.mark.parametrize(
    ("needs", "placed"),
    [([], ([], 0)), ([Lifetime(0, 0, 3)], ([0], 0)), ([Lifetime(1, 2, 2)], ([0], 1))],
    ids=["none", "empty", "one_byte"],
)
def test_little_to_place(needs: list[Lifetime], placed: tuple[list[int], int]) -> None:
    assert assign_offsets(needs) == placed
