"""The store of plan records: its tiers, bounds, counters and single flight, with nothing broken."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plans_cache import (
    Check,
    Hit,
    LockTimeout,
    Miss,
    PlanRecord,
    PlanStore,
    RecordError,
    files,
    from_json,
)
from plans_cache.store import PACKAGED_SEEDS
from tests.workers.store_worker import blob, record

NOW = 1_700_000_000.0  # when the records of store_worker were created


def open_store(directory: Path | None, **options: object) -> PlanStore:
    defaults: dict[str, object] = {"seeds": None, "strict": True, "clock": lambda: NOW}
    return PlanStore(directory, **{**defaults, **options})  # type: ignore[arg-type]


def hit(found: Hit | Miss) -> Hit:
    assert isinstance(found, Hit), found
    return found


def miss(found: Hit | Miss) -> Miss:
    assert isinstance(found, Miss), found
    return found


def seeds_with(folder: Path, *records: PlanRecord) -> Path:
    folder.mkdir(parents=True)
    for made in records:
        (folder / f"{made.id}.json").write_text(made.to_json(), encoding="utf-8")
    return folder


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


# -- scan, prune, remove ---------------------------------------------------------------------------


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


def used(directory: Path, number: int, ago_s: float) -> None:
    """Set the time of the last use of an entry."""
    (path,) = directory.rglob(f"{record(number).id}.json")
    if "seeds" not in path.parts:
        os.utime(path, (NOW - ago_s, NOW - ago_s))


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


# -- check -----------------------------------------------------------------------------------------


def test_check_reads_an_entry_again_where_it_is_kept(tmp_path: Path) -> None:
    seeds = seeds_with(tmp_path / "seeds", record(1, 1), record(2, 2))
    store = open_store(tmp_path / "cache", seeds=seeds)
    store.put(record(1, 5), b"plan")
    store.put(record(3, 3))
    for id, tier, engine, held in (
        (record(1).id, "disk", 5, b"plan"),
        (record(2).id, "seed", 2, None),
        (record(3).id, "disk", 3, None),
    ):
        found = store.check(id)
        assert found.record is not None
        assert (found.tier, found.record.steps[0].engine, found.blob) == (tier, engine, held)
        assert (found.problem, found.blob_problem) == ("", "")
    assert store.check("0" * 64) == Check(None, None, None, f"no entry {'0' * 64}")
    alone = open_store(None)
    alone.put(record(1, 5), b"plan")
    found = alone.check(record(1).id)
    assert (found.tier, found.blob) == ("memory", b"plan")
    assert found.record == record(1, 5).with_blob(b"plan")
    with pytest.raises(ValueError, match="is no id"):
        store.check("../x")
    assert (store.stats().hits, store.stats().misses) == ({}, {})


def test_check_finds_a_damaged_record_and_leaves_it_where_it_is(tmp_path: Path) -> None:
    """Also when the memory still has it whole, and in a strict store."""
    store = open_store(tmp_path)
    store.put(record(1, 5), b"plan")
    (path,) = tmp_path.rglob("*.json")
    for text, said in (
        (path.read_text().replace('"engine": 5', '"engine": 6'), "record.checksum: does not match"),
        (record(2).to_json(), f"record: is that of entry {record(2).id}"),
        ("{", "record: not JSON"),
    ):
        path.write_text(text)
        found = store.check(record(1).id)
        assert (found.tier, found.record, found.blob) == ("disk", None, None)
        assert found.problem.startswith(said)
    assert path.read_text() == "{"
    assert store.stats().quarantined == 0


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(b"plaN"), "blob does not match the record's sha256"),
        (lambda path: path.write_bytes(b"pl"), "blob has 2 bytes, the record says 4"),
        (lambda path: path.unlink(), "blob is missing"),
        (lambda path: (path.unlink(), path.mkdir()), "blob cannot be read: {} is not a regular"),
        (
            lambda path: path.chmod(0o620),
            "blob: {} has mode 0620: others may write to it; chmod go-w it",
        ),
    ],
    ids=["changed", "cut", "gone", "folder", "mode"],
)
def test_check_finds_a_blob_that_is_not_the_records(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    store = open_store(tmp_path)
    store.put(record(1, 5), b"plan")
    (path,) = tmp_path.rglob("*.blob")
    damage(path)
    found = store.check(record(1).id)
    assert found.record == record(1, 5).with_blob(b"plan")
    assert (found.tier, found.problem) == ("disk", "")
    assert found.blob_problem.startswith(said.format(path))
    assert store.stats().blobs_rejected == 0


@pytest.mark.skipif(os.name != "posix", reason="modes and owners are of POSIX")
@pytest.mark.parametrize("part", ["", "v1", "folder", "record"])
def test_check_finds_what_others_may_write_to(tmp_path: Path, part: str) -> None:
    directory = tmp_path / "cache"
    store = open_store(directory)
    store.put(record(1))
    (path,) = directory.rglob("*.json")
    place = {"": directory, "v1": path.parent.parent, "folder": path.parent, "record": path}[part]
    mode = 0o662 if part == "record" else 0o772
    place.chmod(mode)
    found = store.check(record(1).id)
    assert (found.tier, found.record) == ("disk", None)
    assert found.problem == f"{place} has mode {mode:04o}: others may write to it; chmod go-w it"
    if os.geteuid() == 0:
        place.chmod(0o700)
        os.chown(place, 12345, -1)
        assert store.check(record(1).id).problem.startswith(f"{place} belongs to user 12345")


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
@pytest.mark.parametrize("part", ["v1", "folder", "blob"])
def test_device_code_that_others_may_write_is_not_read(tmp_path: Path, part: str) -> None:
    """The record is data and serves; its plan is replayed by engine and knobs."""
    directory = tmp_path / "cache"
    open_store(directory).put(record(1), b"plan")
    (path,) = directory.rglob("*.blob")
    place = {"v1": path.parent.parent, "folder": path.parent, "blob": path}[part]
    place.chmod(0o666 if part == "blob" else 0o777)
    found = open_store(directory).get(record(1).id)
    assert isinstance(found, Hit) and found.blob is None
    assert found.blob_problem.startswith(f"blob: {place} has mode 0")
    assert found.blob_problem.endswith("others may write to it; chmod go-w it")


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


# -- one builder at a time -------------------------------------------------------------------------


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
