"""One builder of a key at a time, among threads and beside a holder that never lets go."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from plans_cache import Hit, LockTimeout, Miss, PlanRecord
from tests.stores import hit, open_store
from tests.workers.store_worker import record


def test_threads_that_want_the_same_key_at_once_build_it_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    start = threading.Barrier(8)
    builds: list[int] = []
    found: list[Hit] = []

    def work() -> None:
        start.wait()
        for number in range(20):

            def build(number: int = number) -> tuple[PlanRecord, bytes | None]:
                builds.append(number)
                return record(number, 3), None

            found.append(store.get_or_build(record(number).id, build))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(builds) == list(range(20))
    assert len(found) == 160
    assert all(answer.record.steps[0].engine == 3 for answer in found)
    assert len(store._building) == 0
    assert list(tmp_path.rglob("*.lock")) == []
    assert sum(store.stats().hits.values()) + sum(store.stats().misses.values()) == 160


def test_a_failed_build_raises_for_its_caller_and_the_next_in_line_builds(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    building, fail = threading.Event(), threading.Event()
    raised: list[str] = []
    found: list[Hit] = []

    def failing() -> tuple[PlanRecord, bytes | None]:
        building.set()
        fail.wait()
        raise RuntimeError("the GPU is gone")

    def first() -> None:
        try:
            store.get_or_build(record(1).id, failing)
        except RuntimeError as error:
            raised.append(str(error))

    def second() -> None:
        found.append(store.get_or_build(record(1).id, lambda: (record(1, 9), None)))

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    building.wait()
    threads[1].start()
    fail.set()
    for thread in threads:
        thread.join()
    assert raised == ["the GPU is gone"]
    assert [(answer.tier, answer.record.steps[0].engine) for answer in found] == [("built", 9)]


def test_a_build_of_another_key_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    store = open_store(tmp_path, strict=False)
    with pytest.raises(ValueError, match=f"asked to build entry {record(1).id}, built"):
        store.get_or_build(record(1).id, lambda: (record(2), None))
    assert isinstance(store.get(record(2).id), Miss)


def test_waiting_for_a_builder_ends_with_an_error_that_names_the_lock(tmp_path: Path) -> None:
    store = open_store(tmp_path, lock_timeout_s=0.05)
    other = open_store(tmp_path, lock_timeout_s=0.05)
    id = record(1).id
    with store.building(id):
        with pytest.raises(LockTimeout, match=f"{id}: held by another thread for over 0\\.05 s"):
            store.building(id).__enter__()
        with pytest.raises(LockTimeout, match=rf"{id}\.lock: held by another process for over"):
            other.building(id).__enter__()
        with other.building(record(2).id):  # another key is free
            pass
    with other.building(id):
        pass


def test_a_store_that_is_not_strict_builds_beside_a_holder_that_never_lets_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, lock_timeout_s=0.05, strict=False)
    with open_store(tmp_path).building(record(1).id):
        found = store.get_or_build(record(1).id, lambda: (record(1, 4), None))
        strict = open_store(None, lock_timeout_s=0.05)
        with strict.building(record(1).id), pytest.raises(LockTimeout):
            strict.get_or_build(record(1).id, lambda: (record(1), None))
    assert (found.tier, found.record.steps[0].engine) == ("built", 4)
    (line,) = caplog.messages
    assert line.startswith("a plan is built beside another builder: ")
    assert hit(open_store(tmp_path).get(record(1).id)).record.steps[0].engine == 4
