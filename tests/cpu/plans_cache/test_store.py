"""The store of plan records: its tiers, blobs, bounds and counters, with nothing broken."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

from plans_cache import Hit, Miss, RecordError, files, from_json
from plans_cache.store import PACKAGED_SEEDS, SEED_FAMILIES, SEED_STEPS
from tests.stores import NOW, hit, miss, open_store, seeds_with
from tests.workers.store_worker import blob, record

# -- tiers -----------------------------------------------------------------------------------------


def test_an_entry_is_served_from_memory_then_from_disk_by_another_store(tmp_path: Path) -> None:
    one = open_store(tmp_path / "cache")
    assert one.put(record(1, 5), blob(1, 5)) is True
    assert hit(one.get(record(1).id)).tier == "memory"
    other = open_store(tmp_path / "cache")
    first, second = (hit(other.get(record(1).id)) for _ in range(2))
    assert (first.tier, second.tier) == ("disk", "memory")
    for found in (first, second):
        assert found.record == record(1, 5).with_blob(blob(1, 5))
        assert found.blob == blob(1, 5)
        assert found.blob_problem == ""
    assert other.stats().hits == {"disk": 1, "memory": 1}


def test_an_entry_is_one_file_and_a_blob_for_the_user_alone(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "cache"
    store = open_store(directory)
    assert not directory.exists()
    assert miss(store.get(record(1).id)).reason == "absent"
    assert not directory.exists()  # a lookup leaves no trace
    store.put(record(1), b"plan")
    id = record(1).id
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    ends = (f".{hashlib.sha256(b'plan').hexdigest()[:16]}.blob", ".json")
    assert files == [directory / "v1" / id[:2] / f"{id}{end}" for end in ends]
    assert from_json(files[1].read_bytes()) == record(1).with_blob(b"plan")
    if os.name == "posix":
        folders = [directory, directory / "v1", directory / "v1" / id[:2]]
        assert [stat.S_IMODE(path.stat().st_mode) for path in folders] == [0o700] * 3
        assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * 2


def test_a_new_record_takes_the_place_of_the_old_and_of_its_blob(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(record(1, 5), b"old")
    store.put(record(1, 6))
    for looking in (store, open_store(tmp_path)):
        found = hit(looking.get(record(1).id))
        assert (found.record.steps[0].engine, found.blob, found.blob_problem) == (6, None, "")
    assert list(tmp_path.rglob("*.blob")) == []


def test_seeds_come_last_and_are_overridden_by_the_users_own(tmp_path: Path) -> None:
    seeds = seeds_with(tmp_path / "seeds" / "h200", record(1, 1), record(2, 1))
    store = open_store(tmp_path / "cache", seeds=tmp_path / "seeds")
    assert seeds.is_dir()
    assert hit(store.get(record(1).id)).tier == "seed"
    assert hit(store.get(record(1).id)).tier == "memory"
    store.put(record(2, 7))
    store.clear_memory()
    found = hit(store.get(record(2).id))
    assert (found.tier, found.record.steps[0].engine) == ("disk", 7)
    assert miss(store.get(record(3).id)).reason == "absent"
    assert store.remove(record(2).id) is True
    assert hit(store.get(record(2).id)).tier == "seed"


def test_a_seed_of_another_key_or_damaged_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seeds = seeds_with(tmp_path / "seeds", record(1))
    (seeds / f"{record(2).id}.json").write_text(record(1).to_json())
    (seeds / f"{record(3).id}.json").write_text("{")
    (seeds / "README.json").write_text("{")
    store = open_store(None, seeds=seeds, strict=False)
    assert isinstance(store.get(record(1).id), Hit)
    assert f"is that of entry {record(1).id}" in miss(store.get(record(2).id)).detail
    assert "not JSON" in miss(store.get(record(3).id)).detail
    assert store.stats().misses == {"corrupt": 2}
    assert len(list(seeds.iterdir())) == 4  # nothing of the package is moved
    assert sum("a seed is left out" in line for line in caplog.messages) == 1
    problems = [entry.problem for entry in store.scan() if entry.record is None]
    assert len(problems) == 2
    assert all(problems)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b" " * (5 << 20), None])
def test_a_damaged_seed_is_a_miss_with_a_line_and_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    """None is a seed that cannot be read: a folder in its place."""
    seeds = seeds_with(tmp_path / "seeds" / "nvidia-h200")
    path = seeds / f"{record(1).id}.json"
    path.mkdir() if content is None else path.write_bytes(content)
    store = open_store(tmp_path / "cache", seeds=tmp_path / "seeds", strict=False)
    assert miss(store.get(record(1).id)).reason == "corrupt"
    (line,) = caplog.messages
    assert line.startswith("a seed is left out: ")
    assert [entry.record for entry in store.scan()] == [None]
    assert store.check(record(1).id).tier == "seed"
    assert store.check(record(1).id).problem != ""
    assert store.prune(lambda entry: True, older_than_s=0.0, max_total_bytes=0) == []
    assert store.remove(record(1).id) is False
    assert store.get_or_build(record(1).id, lambda: (record(1, 4), None)).tier == "built"
    store.clear_memory()
    assert hit(store.get(record(1).id)).tier == "disk"
    assert store.stats().quarantined == 0
    assert not (tmp_path / "cache" / "quarantine").exists()
    assert list((tmp_path / "seeds").rglob("*.json")) == [path]
    assert path.is_dir() if content is None else path.read_bytes() == content


def test_a_seed_is_never_written_to(tmp_path: Path) -> None:
    seeds = seeds_with(tmp_path / "seeds" / "nvidia-h200", record(1, 1))
    (path,) = seeds.iterdir()
    before = path.read_bytes()
    store = open_store(tmp_path / "cache", seeds=tmp_path / "seeds")
    os.utime(path, (NOW - 1e6, NOW - 1e6))
    assert hit(store.get(record(1).id)).tier == "seed"
    assert store.remove(record(1).id) is True  # from memory
    assert store.prune(lambda entry: True) == []
    assert hit(store.get(record(1).id)).tier == "seed"
    assert (path.read_bytes(), path.stat().st_mtime) == (before, NOW - 1e6)
    assert not (tmp_path / "cache").exists()


def test_every_seed_that_ships_is_whole_and_stands_under_its_id() -> None:
    assert (PACKAGED_SEEDS / "__init__.py").is_file()
    for path in PACKAGED_SEEDS.rglob("*.json"):
        if path.name == SEED_FAMILIES or fnmatch(path.name, SEED_STEPS):
            continue
        made = from_json(path.read_bytes())
        assert path.stem == made.id
        assert made.blob is None


def test_without_a_directory_everything_is_in_memory() -> None:
    store = open_store(None)
    assert store.put(record(1), b"plan") is False
    assert hit(store.get(record(1).id)).blob == b"plan"
    with store.building(record(2).id):
        assert store.put(record(2)) is False
    assert [entry.tier for entry in store.scan()] == ["memory", "memory"]
    assert [entry.blob_bytes for entry in store.scan()] == [4, 0]
    assert store.quarantine is None
    store.clear_memory()
    assert miss(store.get(record(1).id)).reason == "absent"
    assert store.stats().bytes == 0


@pytest.mark.parametrize(
    "id", ["", "ab", "AB" * 32, "../../../../etc/passwd", "a" * 129, "ab/cd" * 4]
)
def test_what_is_no_id_is_refused(tmp_path: Path, id: str) -> None:
    store = open_store(tmp_path)
    for call in (store.get, store.remove, lambda text: store.building(text).__enter__()):
        with pytest.raises(ValueError, match="is no id: expected 16 to 128 hexadecimal digits"):
            call(id)


# -- blobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.write_bytes(b"plaN"), "blob does not match the record's sha256"),
        (lambda path: path.write_bytes(b"pl"), "blob has 2 bytes, the record says 4"),
        (lambda path: path.write_bytes(b""), "blob has 0 bytes, the record says 4"),
        (lambda path: path.unlink(), "blob is missing"),
    ],
    ids=["changed", "cut", "empty", "gone"],
)
def test_a_blob_that_is_not_the_records_is_left_out_and_the_record_served(
    tmp_path: Path, damage: object, problem: str
) -> None:
    open_store(tmp_path).put(record(1, 5), b"plan")
    (path,) = tmp_path.rglob("*.blob")
    damage(path)  # type: ignore[operator]
    store = open_store(tmp_path)
    found = hit(store.get(record(1).id))
    assert found.record.steps[0].engine == 5
    assert (found.tier, found.blob, found.blob_problem) == ("disk", None, problem)
    assert store.stats().blobs_rejected == 1
    store.put(record(1, 5), b"plan")
    assert hit(open_store(tmp_path).get(record(1).id)).blob == b"plan"


def test_a_killed_overwrite_leaves_the_old_record_with_its_own_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer dies when the new blob is written and the new record is not."""
    writer = open_store(tmp_path)
    writer.put(record(1, 5), b"old")
    write = files.write

    def die(path: Path, data: bytes) -> None:
        if path.suffix == ".json":
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(files, "write", die)
    with pytest.raises(KeyboardInterrupt):
        writer.put(record(1, 6), b"new")
    monkeypatch.undo()
    assert len(list(tmp_path.rglob("*.blob"))) == 2
    found = hit(open_store(tmp_path).get(record(1).id))
    assert (found.record.steps[0].engine, found.blob, found.blob_problem) == (5, b"old", "")
    (left,) = (path for path in tmp_path.rglob("*.blob") if path.read_bytes() == b"new")
    os.utime(left, (NOW - 100, NOW - 100))  # it may be that of a writer that is not done
    open_store(tmp_path).put(record(1, 7), b"newest")
    assert sorted(path.read_bytes() for path in tmp_path.rglob("*.blob")) == [b"new", b"newest"]
    os.utime(left, (NOW - 4000, NOW - 4000))
    open_store(tmp_path).put(record(1, 8), b"last")
    assert [path.read_bytes() for path in tmp_path.rglob("*.blob")] == [b"last"]


def test_another_record_with_the_same_blob_keeps_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(record(1, 5), b"plan")
    store.put(record(1, 6), b"plan")
    found = hit(open_store(tmp_path).get(record(1).id))
    assert (found.record.steps[0].engine, found.blob) == (6, b"plan")
    assert len(list(tmp_path.rglob("*.blob"))) == 1


@pytest.mark.parametrize("overwrites", [1, 2, 3])
def test_a_reader_that_an_overwrite_passes_reads_again_and_serves_without_the_blob_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrites: int
) -> None:
    """Each time between the reads of the record and of its blob there is an overwrite."""
    writer, store = open_store(tmp_path), open_store(tmp_path)
    writer.put(record(1, 0), b"blob 0")
    read, version = files.read, 0

    def overtaken(path: Path, limit_bytes: int) -> bytes:
        nonlocal version
        if path.suffix == ".blob" and version < overwrites:
            version += 1
            with monkeypatch.context() as undone:
                undone.setattr(files, "read", read)
                writer.put(record(1, version), b"blob %d" % version)
        return read(path, limit_bytes)

    monkeypatch.setattr(files, "read", overtaken)
    found = hit(store.get(record(1).id))
    if overwrites < 3:
        assert (found.record.steps[0].engine, found.blob) == (overwrites, b"blob %d" % overwrites)
        assert (found.blob_problem, store.stats().blobs_rejected) == ("", 0)
    else:
        assert (found.record.steps[0].engine, found.blob) == (2, None)
        assert (found.blob_problem, store.stats().blobs_rejected) == ("blob is missing", 1)
    assert store.stats().quarantined == 0


def test_an_entry_removed_between_record_and_blob_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, store = open_store(tmp_path), open_store(tmp_path)
    writer.put(record(1), b"plan")
    read = files.read

    def overtaken(path: Path, limit_bytes: int) -> bytes:
        if path.suffix == ".blob":
            writer.remove(record(1).id)
        return read(path, limit_bytes)

    monkeypatch.setattr(files, "read", overtaken)
    assert miss(store.get(record(1).id)).reason == "absent"


# -- bounds of the memory --------------------------------------------------------------------------


def test_memory_keeps_the_entries_used_last() -> None:
    store = open_store(None, max_entries=3)
    for number in (1, 2, 3):
        store.put(record(number))
    store.get(record(1).id)
    store.put(record(4))
    kept = [number for number in range(1, 5) if isinstance(store.get(record(number).id), Hit)]
    assert kept == [1, 3, 4]
    assert (store.stats().entries, store.stats().evictions) == (3, 1)


def test_memory_is_bounded_by_bytes_of_records_and_blobs() -> None:
    size = len(record(1).with_blob(b"x" * 1000).to_json().encode()) + 1000 + 512
    store = open_store(None, max_bytes=5 * size + 100)
    for number in range(10):
        store.put(record(number), b"x" * 1000)
        assert store.stats().bytes <= 5 * size + 100
    assert store.stats().entries == 5
    before = store.stats()
    store.put(record(99), b"x" * (6 * size))  # alone over the bound: not kept, the others stay
    assert store.stats() == before
    assert miss(store.get(record(99).id)).reason == "absent"


# -- counters and log ------------------------------------------------------------------------------


def test_counters_and_log_say_what_happened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "plans_cache")
    store = open_store(tmp_path)
    id = record(1).id
    store.get(id)
    built = store.get_or_build(id, lambda: (record(1), b"plan"))
    store.get(id)
    store.clear_memory()
    store.get_or_build(id, lambda: pytest.fail("it is there"))
    assert built.tier == "built"
    stats = store.stats()
    assert stats.hits == {"disk": 1, "memory": 1}
    assert stats.misses == {"absent": 2}
    assert (stats.writes, stats.write_failures, stats.built, stats.entries) == (1, 0, 1, 1)
    assert stats.load_ms > 0
    assert stats.bytes == len(record(1).with_blob(b"plan").to_json().encode()) + 4 + 512
    assert caplog.messages == [
        f"cache_miss {id} absent: no entry {id}",
        f"cache_miss {id} absent: no entry {id}",
        f"cache_hit {id} memory",
        f"persistent_cache_hit {id} disk",
    ]


# -- strict ----------------------------------------------------------------------------------------


def test_a_record_that_cannot_be_written_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = replace(record(1), created=float("nan"))
    store = open_store(tmp_path, strict=False)
    assert store.put(bad) is False
    assert store.stats().write_failures == 1
    assert "record cannot be written: Out of range float values" in caplog.text
    assert isinstance(store.get(bad.id), Miss)
    with pytest.raises(RecordError, match="record cannot be written"):
        open_store(tmp_path).put(bad)
