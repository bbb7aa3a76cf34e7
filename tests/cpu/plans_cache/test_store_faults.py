"""Faults that the store must survive: killed writers, races, a failing disk, a clock set back."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cudnngraph.settings import Settings
from plans_cache import Miss
from tests.stores import (
    IS_ROOT,
    NOW,
    assert_memory_only,
    entry_path,
    failing,
    hit,
    miss,
    open_store,
    posix,
    told,
    worker,
)
from tests.workers.store_worker import KEYS, record

# -- processes -------------------------------------------------------------------------------------


@posix
def test_writers_killed_at_200_moments_lose_nothing_and_leave_nothing_half(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    counts = told("kill", directory, 200, 1)
    assert counts["killed"] == 200
    assert counts["reads"] == 400 * KEYS
    assert counts["committed"] > 50
    faults = ("older than committed", "wrong records", "wrong blobs", "blobs left out")
    for fault in (*faults, "quarantined"):
        assert counts[fault] == 0, counts
    assert counts["blobs read"] >= 200 * KEYS
    assert "lost" not in counts
    left = list(directory.rglob("*.tmp"))
    assert len(left) > 10  # the kills did fall into writes
    store = open_store(directory, clock=lambda: time.time() + 7200)
    store.prune()
    assert list(directory.rglob("*.tmp")) == []
    assert len([entry for entry in store.scan() if entry.record is not None]) == KEYS
    assert len(list(directory.rglob("*.blob"))) == KEYS
    assert all(store.check(record(number).id).blob for number in range(KEYS))


@posix
def test_16_processes_that_want_50_keys_build_each_once_and_read_the_same(tmp_path: Path) -> None:
    result = told("race", tmp_path / "cache", 16, 50)
    assert result["exits"] == [0] * 16
    assert sorted(map(int, result["builds"])) == list(range(50))
    assert len(result["lines"]) == 16 * 50
    makers: dict[str, set[str]] = {}
    for number, maker, _ in result["lines"]:
        makers.setdefault(number, set()).add(maker)
    assert len(makers) == 50
    assert all(len(found) == 1 for found in makers.values())
    assert Counter(tier for _, _, tier in result["lines"]) == {"built": 50, "disk": 750}
    assert list((tmp_path / "cache").rglob("*.lock")) == []


@posix
def test_the_right_to_build_dies_with_its_holder(tmp_path: Path) -> None:
    holder = worker("hold", tmp_path)
    assert holder.stdout is not None
    try:
        assert json.loads(holder.stdout.readline()) == {"held": True}
        with pytest.raises(TimeoutError, match=r"held by another process for over 0\.05 s"):
            open_store(tmp_path, lock_timeout_s=0.05).building(record(0).id).__enter__()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    left = entry_path(tmp_path, 0).with_suffix(".lock")
    assert left.exists()
    with open_store(tmp_path, lock_timeout_s=5.0).building(record(0).id):
        pass
    assert not left.exists()


@posix
def test_a_forked_child_uses_the_store_while_its_parent_holds_the_locks(tmp_path: Path) -> None:
    result = told("fork", tmp_path)
    tier, built, parents = result["child"]
    assert (tier, built, result["status"], result["after"]) == ("memory", True, 0, "free")
    assert "held by another process" in parents


# -- a disk that fails -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("mkdir", errno.EROFS),
        ("mkdir", errno.EACCES),
        ("replace", errno.EROFS),
        ("replace", errno.ENOSPC),
        ("fsync", errno.ENOSPC),
        ("fsync", errno.EIO),
        ("fsync", errno.EDQUOT),
    ],
    ids=lambda value: value if isinstance(value, str) else errno.errorcode[value],
)
def test_without_a_disk_that_takes_writes_plans_stay_in_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    number: int,
) -> None:
    monkeypatch.setattr(os, call, failing(number))
    store = open_store(tmp_path / "cache", strict=False)
    assert_memory_only(store, caplog, os.strerror(number))
    monkeypatch.undo()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []  # no half file is left
    assert store.put(record(14)) is True  # it heals
    assert hit(open_store(tmp_path / "cache").get(record(14).id)).tier == "disk"


def test_a_read_only_directory_still_serves_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cache"
    open_store(directory).put(record(1), b"plan")
    opened = os.open

    def read_only(path: Any, flags: int, *more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    for call in ("mkdir", "replace", "unlink"):
        monkeypatch.setattr(os, call, failing(errno.EROFS))
    store = open_store(directory, strict=False)
    found = hit(store.get(record(1).id))
    assert (found.tier, found.blob) == ("disk", b"plan")
    assert len(list(store.scan())) == 1
    assert_memory_only(store, caplog, "Read-only file system")
    assert store.remove(record(1).id) is True  # from memory
    assert store.prune(lambda entry: entry.id == record(1).id) == []
    store.clear_memory()
    assert hit(store.get(record(1).id)).tier == "disk"


@posix
@pytest.mark.skipif(IS_ROOT, reason="modes do not bind root")
def test_a_directory_without_the_right_to_write_still_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cache"
    open_store(directory).put(record(1))
    folders = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o500)
    try:
        store = open_store(directory, strict=False)
        assert hit(store.get(record(1).id)).tier == "disk"
        assert_memory_only(store, caplog, "Permission denied")
    finally:
        for folder in folders:
            folder.chmod(0o700)


@posix
def test_a_disk_that_fills_while_an_entry_is_written_keeps_the_old_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on the size of files makes a real write stop in the middle."""
    import resource

    store = open_store(tmp_path, strict=False, max_entries=0)
    store.put(record(1, 5), b"plan")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        done = store.put(record(1, 6), b"plan")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done is False
    assert store.stats().write_failures == 1
    assert os.strerror(errno.EFBIG) in caplog.text
    found = hit(store.get(record(1).id))
    assert (found.record.steps[0].engine, found.blob) == (5, b"plan")
    assert list(tmp_path.rglob("*.tmp")) == []


def test_a_home_that_is_no_directory_means_memory_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    directory = Settings.from_environ({}).cache_dir
    assert directory == tmp_path / "home" / ".cache" / "cudnngraph"
    store = open_store(directory, strict=False)
    assert_memory_only(store, caplog, "Not a directory")


@posix
def test_without_a_home_the_directory_under_the_temporary_one_is_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    directory = Settings.from_environ({}).cache_dir
    assert open_store(directory).put(record(1)) is True
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)  # as another user may have made it before
    assert_memory_only(open_store(directory, strict=False), caplog, "others may write to it")


def test_a_strict_store_raises_what_the_disk_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left on device"):
        open_store(tmp_path).put(record(1))


def test_a_directory_removed_while_running_is_a_miss_and_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cache"
    store = open_store(directory, strict=False)
    store.put(record(1), b"plan")
    shutil.rmtree(directory)
    assert hit(store.get(record(1).id)).tier == "memory"
    store.clear_memory()
    assert miss(store.get(record(1).id)).reason == "absent"
    assert list(store.scan()) == []
    assert store.prune() == []
    assert store.remove(record(1).id) is False
    with store.building(record(1).id):
        shutil.rmtree(directory)
    assert store.put(record(2)) is True
    assert hit(open_store(directory).get(record(2).id)).tier == "disk"
    shutil.rmtree(directory)
    directory.write_text("a file in its place")
    store.clear_memory()
    assert miss(store.get(record(2).id)).reason == "refused"
    assert store.put(record(2)) is False
    assert [line for line in caplog.messages if "memory only" in line] != []
    assert len(caplog.messages) == 1


# -- clocks and bounds -----------------------------------------------------------------------------


def test_a_clock_set_back_gives_no_negative_age_and_prunes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path, clock=lambda: NOW - 1e6)
    store.put(record(1))
    (entry,) = store.scan()
    assert entry.age_s == 0.0
    assert store.prune(older_than_s=0.0) == []
    assert hit(store.get(record(1).id)).record == record(1)


def test_100_000_records_through_the_memory_stay_under_its_bytes() -> None:
    bound, count = 2 << 20, 100_000
    store = open_store(None, max_bytes=bound, max_entries=10**9)
    for number in range(1000):  # fill it, before anything is counted
        store.put(record(number, candidates=0))
    tracemalloc.start(1)
    try:
        for number in range(1000, 3000):
            store.put(record(number, candidates=0))
        gc.collect()  # in a process that holds much, cycles are left for long
        traced_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    highest = 0
    for number in range(3000, count):
        store.put(record(number, candidates=0))
        highest = max(highest, store._memory.bytes)
    stats = store.stats()
    assert 0.9 * bound < highest <= bound
    assert traced_bytes < bound  # the bound is one on memory, not only on what is counted
    assert stats.entries + stats.evictions == count
    assert 500 < stats.entries < 2000
    last, first = record(count - 1, candidates=0), record(0, candidates=0)
    assert hit(store.get(last.id)).record == last
    assert isinstance(store.get(first.id), Miss)
