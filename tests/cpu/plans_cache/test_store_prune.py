"""Entries listed, pruned by age, size and last use, and removed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from plans_cache import Hit
from tests.stores import NOW, hit, miss, open_store, seeds_with, used
from tests.workers.store_worker import record


def test_scan_lists_every_tier_once_with_size_and_age(tmp_path: Path) -> None:
    seeds = seeds_with(tmp_path / "seeds", record(1, 1), record(3, 1))
    store = open_store(tmp_path / "cache", seeds=seeds, clock=lambda: NOW + 60)
    store.put(record(1, 7), b"plan")
    store.put(record(2, 7))
    by_id = {entry.id: entry for entry in store.scan()}
    one, two, three = (by_id[record(number).id] for number in (1, 2, 3))
    assert [one.tier, two.tier, three.tier] == ["disk", "disk", "seed"]
    assert one.record is not None
    assert one.record.steps[0].engine == 7
    assert one.path is not None
    assert one.record_bytes == Path(one.path).stat().st_size
    assert (one.blob_bytes, two.blob_bytes) == (4, 0)
    assert one.size_bytes == one.record_bytes + 4
    assert {entry.age_s for entry in by_id.values()} == {60.0}
    assert len(list(store.scan())) == 3
    assert store.stats().hits == {}  # looking through the store is no lookup


def test_scan_passes_by_what_is_no_entry(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(record(1))
    folder = next(tmp_path.rglob("*.json")).parent
    for name in ("notes.json", f"{record(1).id}.x.json", "ff" * 32 + ".json", ".hidden.json"):
        (folder / name).write_text("{")
    (tmp_path / "v1" / "stray").mkdir()
    (tmp_path / "v2" / "ab").mkdir(parents=True)
    assert [entry.id for entry in store.scan()] == [record(1).id]
    assert store.stats().quarantined == 0


def test_a_lookup_that_reads_the_disk_notes_the_use_once_a_day(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(record(1), b"plan")
    (path,) = tmp_path.rglob("*.json")
    for ago_s, noted in ((86_000, False), (87_000, True), (-5000, False)):
        used(tmp_path, 1, ago_s)
        assert [entry.unused_s for entry in store.scan()] == [max(0.0, ago_s)]
        assert store.check(record(1).id).problem == ""
        hit(store.get(record(1).id))  # from memory
        assert path.stat().st_mtime == NOW - ago_s
        store.clear_memory()
        assert hit(store.get(record(1).id)).blob == b"plan"
        assert path.stat().st_mtime == (NOW if noted else NOW - ago_s)


def test_a_use_that_cannot_be_noted_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    open_store(tmp_path).put(record(1))
    used(tmp_path, 1, 1e6)
    monkeypatch.setattr(os, "utime", refuse)
    assert hit(open_store(tmp_path).get(record(1).id)).tier == "disk"
    assert caplog.messages == []


def test_prune_takes_what_was_not_used_for_longest(tmp_path: Path) -> None:
    """The oldest entry is the one in use."""
    store = open_store(tmp_path)
    for number in range(4):
        store.put(replace(record(number), created=NOW - 1e6 * (4 - number)), b"x" * 5000)
        used(tmp_path, number, 1e5 * (number + 1))
    size = max(entry.size_bytes for entry in store.scan())
    removed = store.prune(max_total_bytes=3 * size)
    assert [entry.id for entry in removed] == [record(3).id]
    store.clear_memory()
    hit(store.get(record(2).id))
    removed = store.prune(unused_for_s=1.5e5)
    assert [entry.id for entry in removed] == [record(1).id]
    removed = store.prune(max_total_bytes=size)
    assert [entry.id for entry in removed] == [record(0).id]
    assert [entry.id for entry in store.scan()] == [record(2).id]


def test_prune_by_predicate_by_age_and_by_size(tmp_path: Path) -> None:
    seeds = seeds_with(tmp_path / "seeds", record(50))
    store = open_store(tmp_path / "cache", seeds=seeds)
    for number in range(6):
        store.put(replace(record(number), created=NOW - 100 * number), b"x" * 5000)
        used(tmp_path, number, 0)

    def left() -> list[int]:
        store.clear_memory()
        return [n for n in range(6) if isinstance(store.get(record(n).id), Hit)]

    removed = store.prune(lambda entry: entry.id == record(2).id)
    assert [entry.id for entry in removed] == [record(2).id]
    assert left() == [0, 1, 3, 4, 5]
    assert len(store.prune(older_than_s=400.0)) == 1
    assert left() == [0, 1, 3, 4]
    size = max(entry.size_bytes for entry in store.scan() if entry.tier == "disk")
    removed = store.prune(max_total_bytes=2 * size + 100)
    assert {entry.id for entry in removed} == {record(3).id, record(4).id}
    assert left() == [0, 1]
    assert store.prune() == []
    assert len(store.prune(lambda entry: True)) == 2
    assert isinstance(store.get(record(50).id), Hit)  # a seed stays
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_prune_removes_what_killed_writers_left_but_nothing_that_is_being_written(
    tmp_path: Path,
) -> None:
    open_store(tmp_path).put(record(1), b"plan")
    folder = next(tmp_path.rglob("*.json")).parent
    other = folder.name + "0" * 62
    left = [
        folder / f".{record(1).id}.json.17.abc.tmp",
        folder / f"{other}.blob",
        folder / f"{other}.{'0' * 16}.blob",
        folder / f"{record(1).id}.{'0' * 16}.blob",
        folder / f"{record(1).id}.blob",
    ]
    for path in left:
        path.write_bytes(b"half")
    written = left[0].stat().st_mtime
    open_store(tmp_path, clock=lambda: written + 60).prune()
    assert all(path.exists() for path in left)
    store = open_store(tmp_path, clock=lambda: written + 7200)
    store.prune()
    assert not any(path.exists() for path in left)
    assert hit(store.get(record(1).id)).blob == b"plan"


def test_prune_removes_the_files_of_locks_that_nobody_holds(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(record(1))
    left = next(tmp_path.rglob("*.json")).with_suffix(".lock")
    left.touch()
    with store.building(record(2).id):
        store.prune()
        (held,) = tmp_path.rglob("*.lock")
        assert held.stem == record(2).id
    assert list(tmp_path.rglob("*.lock")) == []


def test_remove_forgets_an_entry_everywhere(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(record(1), b"plan")
    assert store.remove(record(1).id) is True
    assert store.remove(record(1).id) is False
    assert miss(store.get(record(1).id)).reason == "absent"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
