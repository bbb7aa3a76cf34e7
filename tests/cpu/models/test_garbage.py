"""Garbage of models that are traced and graphs that are made is collected, and old objects are not
walked for it."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cudnngraph.models import dynamo, garbage

three_generations = pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python has two")


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@contextmanager
def collected() -> Iterator[list[int]]:
    """The generations that are collected; of the oldest, none but by a call."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        found.append(info["generation"])

    before = gc.get_threshold()
    gc.set_threshold(*before[:2], garbage.NEVER)
    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)


def many_objects() -> None:
    """So many that the second generation is collected, if it may be."""
    kept = [[] for _ in range(50 * gc.get_threshold()[0])]  # type: ignore[var-annotated]
    del kept


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds; no collection of all is due."""
    time = [100.0]
    monkeypatch.setattr(garbage, "perf_counter", lambda: time[0])
    monkeypatch.setattr(garbage._whole, "_next_s", 200.0)
    return time


@three_generations
def test_what_is_made_within_is_collected_at_the_end_and_nothing_old(now: list[float]) -> None:
    old = Cycle()
    gc.collect()
    there = weakref.ref(old)
    del old
    before = gc.get_threshold()
    with collected() as generations, garbage.new_collected():
        made = Cycle()
        gone = weakref.ref(made)
        many_objects()
        assert generations and set(generations) == {0}, "it would be among the old ones else"
        del made
        with garbage.old_left_alone():
            many_objects()
        assert gone() is not None
    assert gone() is None and there() is not None and max(generations) == 1
    assert gc.get_threshold() == before
    gc.collect()
    assert there() is None


def test_collections_of_all_take_a_small_part_of_the_time(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def collect(generation: int = 2) -> None:
        done.append(generation)
        now[0] += 0.5 if generation == 2 else 0.0

    monkeypatch.setattr(gc, "collect", collect)
    for now[0] in (199.0, 200.0, 201.0, 210.0, 210.6):
        with garbage.new_collected():
            pass
    assert done == [1, 2, 1, 1, 2]


@three_generations
def test_new_graphs_of_torch_compile_walk_no_old_objects(now: list[float]) -> None:
    """That took a third of a second for each graph, in a process of a few libraries."""
    torch._dynamo.reset()
    x, run = torch.randn(3, 4), torch.compile(lambda x: x.exp() + 1, backend=dynamo.backend)
    with collected() as generations:
        for size in (3, 2):
            torch.testing.assert_close(run(x[:size]), x[:size].exp() + 1)
    assert generations and max(generations) < 2
