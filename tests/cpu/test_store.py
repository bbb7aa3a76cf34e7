"""The store of plan records: its tiers, bounds, counters and single flight, with nothing broken."""

from __future__ import annotations

import logging
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from plans_cache import Hit, LockTimeout, Miss, PlanRecord, PlanStore, RecordError, from_json
from plans_cache.store import PACKAGED_SEEDS
from tests.cpu.store_worker import blob, record

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
    assert files == [directory / "v1" / id[:2] / f"{id}{end}" for end in (".blob", ".json")]
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


def test_prune_by_predicate_by_age_and_by_size(tmp_path: Path) -> None:
    seeds = seeds_with(tmp_path / "seeds", record(50))
    store = open_store(tmp_path / "cache", seeds=seeds)
    for number in range(6):
        store.put(replace(record(number), created=NOW - 100 * number), b"x" * 5000)

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
    left = [folder / f".{record(1).id}.json.17.abc.tmp", folder / f"{other}.blob"]
    for path in left:
        path.write_bytes(b"half")
    written = left[0].stat().st_mtime
    open_store(tmp_path, clock=lambda: written + 60).prune()
    assert all(path.exists() for path in left)
    store = open_store(tmp_path, clock=lambda: written + 7200)
    store.prune()
    assert not any(path.exists() for path in left)
    assert hit(store.get(record(1).id)).blob == b"plan"


def test_remove_forgets_an_entry_everywhere(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(record(1), b"plan")
    assert store.remove(record(1).id) is True
    assert store.remove(record(1).id) is False
    assert miss(store.get(record(1).id)).reason == "absent"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


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
