"""The workspace pool: each thread's block per (device, stream), grown by retiring, not resizing."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from plans_cache.workspace import WorkspaceLimitError, WorkspacePool


class Block:
    """Stands for device memory; remembers what it was asked for."""

    def __init__(self, device: int, stream: int, size_bytes: int) -> None:
        self.asked = (device, stream, size_bytes)


def test_a_block_is_shared_by_all_that_fits_into_it() -> None:
    pool = WorkspacePool(Block)
    first = pool.get(0, 7, 1000)
    assert first.asked == (0, 7, 1000)
    assert pool.get(0, 7, 10) is first
    assert pool.get(0, 7, 1000) is first
    assert pool.size_bytes(0, 7) == 1000


def test_devices_and_streams_have_blocks_of_their_own() -> None:
    pool = WorkspacePool(Block)
    blocks = {pool.get(device, stream, 64) for device in (0, 1) for stream in (0, 1, 2)}
    assert {block.asked for block in blocks} == {(d, s, 64) for d in (0, 1) for s in (0, 1, 2)}
    assert pool.held_bytes == 6 * 64
    assert pool.size_bytes(1, 9) == 0


def test_growing_makes_a_new_block_and_leaves_the_old_one_to_its_holders() -> None:
    pool = WorkspacePool(Block)
    old = pool.get(0, 0, 100)
    held, free = weakref.ref(old), weakref.ref(pool.get(0, 1, 100))
    new = pool.get(0, 0, 200)
    pool.get(0, 1, 200)
    gc.collect()
    assert new is not old
    assert new.asked == (0, 0, 200)
    assert held() is old
    assert free() is None
    assert pool.held_bytes == 400


def test_clear_lets_go_of_every_block() -> None:
    pool = WorkspacePool(Block)
    block = weakref.ref(pool.get(0, 0, 100))
    pool.clear()
    gc.collect()
    assert block() is None
    assert pool.held_bytes == 0
    assert pool.get(0, 0, 1).asked == (0, 0, 1)


def test_a_stream_that_is_not_used_again_lets_go_of_its_blocks_alone() -> None:
    pool = WorkspacePool(Block)
    gone, kept = weakref.ref(pool.get(0, 7, 100)), pool.get(0, 8, 50)
    other = threading.Thread(target=pool.get, args=(0, 7, 64))
    other.start()
    other.join()
    pool.release(0, 7)
    pool.release(0, 9)
    gc.collect()
    assert gone() is None and pool.held_bytes == 50
    assert pool.get(0, 8, 50) is kept


def test_the_high_water_mark_counts_all_that_was_held_at_once_and_never_falls() -> None:
    pool = WorkspacePool(Block)
    pool.get(0, 0, 100)
    pool.get(0, 1, 50)
    assert pool.high_water_bytes == 150
    pool.clear()
    pool.get(0, 0, 20)
    assert pool.held_bytes == 20
    assert pool.high_water_bytes == 150


def test_a_request_over_the_limit_is_refused_and_nothing_is_allocated() -> None:
    made: list[int] = []

    def allocate(device: int, stream: int, size_bytes: int) -> bytes:
        made.append(size_bytes)
        return b""

    pool = WorkspacePool(allocate, limit_bytes=1000)
    pool.get(0, 0, 1000)
    with pytest.raises(WorkspaceLimitError, match="1001 bytes of workspace asked for, the limit"):
        pool.get(0, 0, 1001)
    assert made == [1000]
    assert pool.size_bytes(0, 0) == 1000


def test_a_failed_allocation_goes_through_and_leaves_the_pool_as_it_was() -> None:
    def allocate(device: int, stream: int, size_bytes: int) -> Block:
        if size_bytes > 100:
            raise MemoryError("no room")
        return Block(device, stream, size_bytes)

    pool = WorkspacePool(allocate)
    block = pool.get(0, 0, 100)
    with pytest.raises(MemoryError, match="no room"):
        pool.get(0, 0, 101)
    assert pool.get(0, 0, 100) is block
    assert pool.high_water_bytes == 100


def test_every_thread_has_blocks_of_its_own_which_go_with_it() -> None:
    """Steps of two threads on one stream would write over what the other's steps hand on."""
    pool = WorkspacePool(Block)
    mine = pool.get(0, 0, 64)
    asked, seen = (threading.Barrier(9, timeout=30.0) for _ in range(2))
    got: list[weakref.ref[Block]] = []
    steady: list[bool] = []

    def ask() -> None:
        block = pool.get(0, 0, 64)
        steady.append(all(pool.get(0, 0, 64) is block for _ in range(100)))
        steady.append(pool.size_bytes(0, 0) == 64 and pool.slots[0, 0].block is block)
        got.append(weakref.ref(block))
        asked.wait()
        seen.wait()

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    asked.wait()
    blocks = [each() for each in got]
    assert None not in blocks and mine not in blocks and len({id(each) for each in blocks}) == 8
    assert pool.held_bytes == 9 * 64
    del blocks
    seen.wait()
    for thread in threads:
        thread.join()
    del thread, threads
    gc.collect()
    assert steady == [True] * 16
    assert [each() for each in got] == [None] * 8
    assert pool.held_bytes == 64 and pool.high_water_bytes == 9 * 64


def test_clear_lets_go_of_the_blocks_of_other_threads() -> None:
    pool = WorkspacePool(Block)
    made, cleared = threading.Event(), threading.Event()
    sizes: list[int] = []

    def ask() -> None:
        pool.get(0, 0, 64)
        made.set()
        cleared.wait(30.0)
        sizes.append(pool.size_bytes(0, 0))

    thread = threading.Thread(target=ask)
    thread.start()
    assert made.wait(30.0)
    pool.clear()
    assert pool.held_bytes == 0
    cleared.set()
    thread.join()
    assert sizes == [0]
