"""Faults that the store must survive: killed writers, races, damaged files, a disk that fails."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cudnngraph.settings import Settings
from plans_cache import Miss, PlanStore, RecordError, files
from plans_cache.record import MAX_DEPTH, MAX_RECORD_BYTES
from plans_cache.store import QUARANTINE_BYTES, QUARANTINE_KEPT
from tests.cpu.plans_cache.test_record import signed
from tests.cpu.plans_cache.test_store import NOW, hit, miss, open_store
from tests.workers.store_worker import KEYS, record

ROOT = Path(__file__).resolve().parents[3]
posix = pytest.mark.skipif(os.name != "posix", reason="forks, owners and links are of POSIX")
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def worker(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.workers.store_worker", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def told(*arguments: object) -> Any:
    """What a worker prints, once it has ended well."""
    process = worker(*arguments)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out)


def entry_path(directory: Path, number: int = 1) -> Path:
    id = record(number).id
    return directory / "v1" / id[:2] / f"{id}.json"


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


# -- damaged files ---------------------------------------------------------------------------------


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place of a record whose type is fixed, and what stands there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in items:
        if name in ("policy", "checksum"):
            continue
        if item is not None:
            yield (*path, name), item
        if isinstance(item, (dict, list)):
            yield from _places(item, (*path, name))


WRONG_TYPES: dict[type, list[Any]] = {
    str: [5, [], {}, True, 0.5],
    bool: [0, "true", []],
    int: ["1", 1.5, [], {}, True, 2**70],
    float: ["1", [], {}, True, -1],
    list: ["x", {}, 3],
    dict: ["x", [], 3],
}


def _set(whole: Any, path: tuple[Any, ...], value: Any) -> None:
    for name in path[:-1]:
        whole = whole[name]
    whole[path[-1]] = value


def _flip(data: bytes, by: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(by.choice((1, 1, 2, 8))):
        changed[by.randrange(len(changed))] ^= 1 << by.randrange(8)
    return bytes(changed)


def _splice(data: bytes, by: random.Random) -> bytes:
    start, stop = sorted(by.randrange(len(data)) for _ in range(2))
    return data[:start] + by.choice((b"", data[start:stop] * 2, by.randbytes(40))) + data[stop:]


def _number(data: bytes, by: random.Random) -> bytes:
    place = by.choice(list(re.finditer(rb"(?<=[ ])\d+(\.\d+)?(?=[,\n])", data)))
    huge = by.choice((b"9" * 30, b"1e999", b"-1e400", b"9" * 9999, b"NaN", b"Infinity"))
    return data[: place.start()] + huge + data[place.end() :]


def _nest(data: bytes, by: random.Random) -> bytes:
    place = by.choice(list(re.finditer(rb"(?<=: )\d", data))).start()
    depth = by.choice((MAX_DEPTH, 2000, 50_000))
    opening, closing = by.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return data[:place] + opening * depth + b"1" + closing * depth + data[place + 1 :]


def _retype(data: bytes, by: random.Random) -> bytes:
    whole = json.loads(data)
    path, value = by.choice(list(_places(whole)))
    _set(whole, path, by.choice(WRONG_TYPES[type(value)]))
    return signed(whole).encode()


def _omit(data: bytes, by: random.Random) -> bytes:
    whole = json.loads(data)
    del whole[by.choice([name for name in whole if name != "checksum"])]
    return signed(whole).encode()


def _schema(data: bytes, by: random.Random) -> bytes:
    whole = json.loads(data)
    whole["schema"] = by.choice((0, 2, 99, -1, "1", None, True, [1]))
    return signed(whole).encode()


def _other_key(data: bytes, by: random.Random) -> bytes:
    whole = json.loads(record(by.randrange(2, 1000), by.randrange(50)).to_json())
    if by.random() < 0.5:  # with this key's name written over it
        whole["id"] = json.loads(data)["id"]
        return signed(whole).encode()
    return json.dumps(whole).encode()


def _choice_changed(data: bytes, by: random.Random) -> bytes:
    """A well-formed record that names another plan: only the checksum tells."""
    return data.replace(b'"engine": 7,', b'"engine": %d,' % by.randrange(8, 99), 1)


MUTATIONS: dict[str, tuple[int, Callable[[bytes, random.Random], bytes]]] = {
    "bit flips": (600, _flip),
    "truncation": (300, lambda data, by: data[: by.randrange(1, len(data) - 1)]),
    "empty": (10, lambda data, by: by.choice((b"", b"\0" * len(data), b" ", b"\n"))),
    "splices": (200, _splice),
    "huge numbers": (150, _number),
    "deep nesting": (150, _nest),
    "wrong types": (300, _retype),
    "missing fields": (90, _omit),
    "wrong schema": (50, _schema),
    "another key's content": (100, _other_key),
    "another choice": (50, _choice_changed),
}


@pytest.mark.parametrize("kind", MUTATIONS)
def test_damaged_files_are_misses_and_go_into_quarantine(tmp_path: Path, kind: str) -> None:
    """2,000 in all, over the kinds."""
    assert sum(count for count, _ in MUTATIONS.values()) == 2000
    count, mutate = MUTATIONS[kind]
    by = random.Random(kind)
    store = open_store(tmp_path, strict=False)
    store.put(record(1, 7), b"plan")
    path = entry_path(tmp_path)
    whole = path.read_bytes()
    for number in range(1, count + 1):
        damaged = mutate(whole, by)
        while damaged == whole:
            damaged = mutate(whole, by)
        path.write_bytes(damaged)
        store.clear_memory()
        found = miss(store.get(record(1).id))
        assert found.reason == "corrupt", found
        assert found.detail.startswith("record"), found
        assert not path.exists()
        assert store.stats().quarantined == number
    kept = sorted((tmp_path / "quarantine").iterdir())
    assert len(kept) == min(count, QUARANTINE_KEPT)
    assert kept[-1].read_bytes() == damaged
    assert store.stats().misses == {"corrupt": count}
    rebuilt = store.get_or_build(record(1).id, lambda: (record(1, 8), b"new"))
    assert rebuilt.tier == "built"
    again = hit(open_store(tmp_path).get(record(1).id))
    assert (again.record.steps[0].engine, again.blob) == (8, b"new")


def test_scan_reports_damaged_files_and_puts_them_into_quarantine(tmp_path: Path) -> None:
    store = open_store(tmp_path, strict=False)
    for number in (1, 2, 3):
        store.put(record(number))
    store.clear_memory()
    entry_path(tmp_path, 1).write_text("{")
    shutil.copy(entry_path(tmp_path, 3), entry_path(tmp_path, 2))
    problems = {entry.id: entry.problem for entry in store.scan()}
    assert problems.pop(record(3).id) == ""
    assert "not JSON" in problems.pop(record(1).id)
    assert f"is that of entry {record(3).id}" in problems.pop(record(2).id)
    assert problems == {}
    assert [entry.id for entry in store.scan()] == [record(3).id]
    assert store.stats().quarantined == 2


def test_the_quarantine_keeps_the_last_within_its_bytes(tmp_path: Path) -> None:
    store = open_store(tmp_path, strict=False)
    sizes = []
    for number in range(8):
        entry_path(tmp_path, number).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        entry_path(tmp_path, number).write_bytes(b"%d" % number * (MAX_RECORD_BYTES - 1))
        assert miss(store.get(record(number).id)).reason == "corrupt"
        kept = sorted((tmp_path / "quarantine").iterdir())
        sizes.append(sum(path.stat().st_size for path in kept))
        assert kept[-1].read_bytes()[:1] == b"%d" % number
    assert QUARANTINE_BYTES - MAX_RECORD_BYTES < sizes[-1] <= QUARANTINE_BYTES
    assert store.stats().quarantined == 8


def test_a_strict_store_raises_for_a_damaged_file_and_quarantines_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(record(1))
    store.clear_memory()
    entry_path(tmp_path).write_text("{}")
    with pytest.raises(RecordError, match="record: the field 'schema' is missing"):
        store.get(record(1).id)
    assert isinstance(store.get(record(1).id), Miss)
    assert store.stats().quarantined == 1


@pytest.mark.parametrize(
    "text",
    [
        b"[" * MAX_RECORD_BYTES,
        b'{"a":' * (MAX_RECORD_BYTES // 5),
        b"[],{}," * (MAX_RECORD_BYTES // 6),
        b"[" + b"[]," * (MAX_RECORD_BYTES // 3 - 1) + b"1]",
        b'{"schema": ' + b"9" * (MAX_RECORD_BYTES - 20) + b"}",
        b'"' + b'\\"' * (MAX_RECORD_BYTES // 2 - 1),
        b'""' * (MAX_RECORD_BYTES // 2),
        b'"xy' * (MAX_RECORD_BYTES // 3),
        '"\u0100'.encode() * (MAX_RECORD_BYTES // 3),
        b"[" + b"1," * (MAX_RECORD_BYTES // 2 - 2) + b"1]",
        b"[" + b"1e999," * (MAX_RECORD_BYTES // 6 - 1) + b"1]",
        b"\xe9" * MAX_RECORD_BYTES,
        b"x" * (64 << 20),
    ],
    ids=lambda text: f"{text[:12].decode('latin-1')} x {len(text)}",
)
def test_hostile_files_take_bounded_memory_and_time(tmp_path: Path, text: bytes) -> None:
    store = open_store(tmp_path, strict=False)
    store.put(record(1))
    store.clear_memory()
    entry_path(tmp_path).write_bytes(text)
    start = time.perf_counter()
    tracemalloc.start()
    try:
        found = miss(store.get(record(1).id))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.reason == "corrupt"
    assert peak_bytes < 200 << 20  # of lists in lists, at 4 MiB of text
    assert time.perf_counter() - start < 20
    assert store.stats().quarantined == 1


@pytest.mark.parametrize("over", [0, 1])
def test_a_record_is_read_up_to_its_limit_and_never_in_part(tmp_path: Path, over: int) -> None:
    store = open_store(tmp_path, strict=False)
    store.put(record(1))
    store.clear_memory()
    text = entry_path(tmp_path).read_bytes()
    entry_path(tmp_path).write_bytes(text.ljust(MAX_RECORD_BYTES + over))
    found = store.get(record(1).id)
    if not over:
        assert hit(found).record == record(1)
    else:
        assert miss(found).detail.endswith(f"is over {MAX_RECORD_BYTES} bytes long")
    assert store.stats().quarantined == over


def test_reading_a_file_takes_no_more_memory_than_it_is_long(tmp_path: Path) -> None:
    open_store(tmp_path).put(record(1), b"plan" * 1000)
    store = open_store(tmp_path)
    tracemalloc.start()
    try:
        assert hit(store.get(record(1).id)).blob == b"plan" * 1000
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20  # the limits are 4 and 256 MiB


def test_a_writer_that_is_faster_than_the_quarantine_keeps_its_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, strict=False, max_entries=0)
    store.put(record(1))
    entry_path(tmp_path).write_text("{")
    move = files.move_aside

    def late(path: Path, seen: files.Identity, target: Path) -> bool:
        open_store(tmp_path).put(record(1, 9))  # between the read and the move
        return move(path, seen, target)

    monkeypatch.setattr(files, "move_aside", late)
    assert miss(store.get(record(1).id)).reason == "corrupt"
    assert store.stats().quarantined == 0
    assert list((tmp_path / "quarantine").iterdir()) == []
    assert hit(store.get(record(1).id)).record.steps[0].engine == 9


# -- a disk that fails -----------------------------------------------------------------------------


def assert_memory_only(store: PlanStore, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """Every call works, from memory; the trouble is told once; nothing is written."""
    for number in (11, 12):
        assert store.put(record(number), b"plan") is False
        found = hit(store.get(record(number).id))
        assert (found.tier, found.blob) == ("memory", b"plan")
    built = store.get_or_build(record(13).id, lambda: (record(13), None))
    assert built.tier == "built"
    assert hit(store.get(record(13).id)).tier == "memory"
    assert store.stats().write_failures == 3
    assert store.stats().writes == 0
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert len(warnings) == 1, warnings
    assert warnings[0].startswith("plans are kept in memory only: ")
    assert why in warnings[0]


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


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


# -- a directory, or things in it, of somebody else ------------------------------------------------


@posix
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    directory = tmp_path / "cache"
    open_store(directory).put(record(1))
    directory.chmod(mode)
    store = open_store(directory, strict=False)
    assert miss(store.get(record(1).id)).reason == "refused"
    assert list(store.scan()) == []
    assert_memory_only(store, caplog, f"has mode {mode:04o}: others may write to it; chmod go-w it")
    directory.chmod(0o755)
    assert hit(open_store(directory).get(record(1).id)).tier == "disk"


@posix
def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cache"
    open_store(directory).put(record(1))
    me = os.geteuid()
    if IS_ROOT:
        os.chown(directory, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    owner, user = (12345, me) if IS_ROOT else (me, 12345)
    store = open_store(directory, strict=False)
    assert miss(store.get(record(1).id)).reason == "refused"
    assert list(store.scan()) == []
    assert_memory_only(store, caplog, f"belongs to user {owner}, this is user {user}")


@posix
@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
def test_a_link_that_another_user_set_in_place_of_the_directory_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    link = tmp_path / "cache"
    link.symlink_to(tmp_path / "mine")
    assert open_store(link).put(record(1)) is True  # a link of one's own is fine
    os.chown(link, 12345, -1, follow_symlinks=False)
    store = open_store(link, strict=False)
    assert miss(store.get(record(1).id)).reason == "refused"
    assert_memory_only(store, caplog, "belongs to user 12345, this is user 0")


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file outside the cache that must stay as it is."""
    path = tmp_path / "victim"
    path.write_text(record(1, 66).to_json())
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o644


@posix
def test_a_link_in_place_of_an_entry_is_not_followed(tmp_path: Path, victim: Path) -> None:
    store = open_store(tmp_path / "cache", strict=False, max_entries=0)
    store.put(record(1, 5), b"plan")
    path = entry_path(tmp_path / "cache")
    path.unlink()
    path.symlink_to(victim)
    found = miss(store.get(record(1).id))
    assert found.reason == "corrupt"
    assert found.detail.endswith("is a symbolic link")
    assert not path.is_symlink()
    path.symlink_to(victim)
    assert store.put(record(1, 6)) is True  # the link is replaced, not written through
    assert not path.is_symlink()
    assert hit(store.get(record(1).id)).record.steps[0].engine == 6


@posix
def test_a_link_in_place_of_a_blob_is_not_followed(tmp_path: Path, victim: Path) -> None:
    store = open_store(tmp_path / "cache", strict=False, max_entries=0)
    store.put(record(1), victim.read_bytes())
    (path,) = tmp_path.rglob("*.blob")
    path.unlink()
    path.symlink_to(victim)
    found = hit(store.get(record(1).id))
    assert found.blob is None
    assert "is a symbolic link" in found.blob_problem


@posix
def test_a_link_in_place_of_a_temporary_file_or_a_lock_is_not_followed(
    tmp_path: Path,
    victim: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store(tmp_path / "cache", strict=False)
    store.put(record(1))
    path = entry_path(tmp_path / "cache")
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "known")
    path.with_name(f".{path.name}.{os.getpid()}.known.tmp").symlink_to(victim)
    assert store.put(record(1, 6)) is False
    assert "File exists" in caplog.text
    lock = path.with_suffix(".lock")
    lock.symlink_to(victim)
    with store.building(record(1).id):  # among threads alone
        assert lock.is_symlink()
    with pytest.raises(files.Refused, match=r"\.lock is a symbolic link"):
        open_store(tmp_path / "cache").building(record(1).id).__enter__()
    assert os.readlink(lock) == str(victim)


@posix
@pytest.mark.parametrize("level", ["v1", "folder"])
def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path, level: str) -> None:
    directory = tmp_path / "cache"
    store = open_store(directory, strict=False, max_entries=0)
    store.put(record(1))
    folder = entry_path(directory).parent if level == "folder" else directory / "v1"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.joinpath("elsewhere").rglob("*"))
    assert miss(store.get(record(1).id)).reason == "refused"
    assert store.put(record(1, 6)) is False
    assert store.remove(record(1).id) is False
    assert sorted(tmp_path.joinpath("elsewhere").rglob("*")) == before


@posix
def test_a_folder_that_cannot_be_used_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PlanStore(tmp_path, seeds=None)
    assert all(store.put(record(number)) for number in range(4))
    stray = tmp_path / "v1" / "00"
    assert not stray.exists()
    stray.symlink_to(tmp_path)
    fresh = PlanStore(tmp_path, seeds=None)
    fresh.check_directory()
    found = {entry.id: entry.problem for entry in fresh.scan()}
    problem = f"{stray} is not a directory"
    assert found == {**{record(number).id: "" for number in range(4)}, "00": problem}
    assert [line.getMessage() for line in caplog.records if line.levelname == "WARNING"] == [
        f"entries are left out: {problem}"
    ]
    assert len(fresh.prune(lambda entry: True)) == 4
    with pytest.raises(OSError, match="is not a directory"):
        list(PlanStore(tmp_path, seeds=None, strict=True).scan())


def test_a_directory_is_checked_down_to_the_folder_of_the_schema(tmp_path: Path) -> None:
    PlanStore(None).check_directory()
    PlanStore(tmp_path / "none").check_directory()
    (tmp_path / "v1").touch()
    with pytest.raises(OSError, match="v1 is not a directory"):
        PlanStore(tmp_path).check_directory()


def test_what_is_no_file_in_place_of_an_entry_is_a_miss(tmp_path: Path) -> None:
    """A FIFO would hold a reader for good; a directory cannot be read."""
    store = open_store(tmp_path, strict=False, max_entries=0)
    for make in (os.mkfifo, os.mkdir):
        store.put(record(1))
        path = entry_path(tmp_path)
        path.unlink()
        make(path)
        found = miss(store.get(record(1).id))
        assert (found.reason, found.detail) == ("corrupt", f"{path} is not a regular file")
        assert not path.exists()


# -- folders of other schemas ----------------------------------------------------------------------


def schema_folder(directory: Path, name: str) -> Path:
    """A folder of another version of the program, with two files of 100 bytes together."""
    folder = directory / name / "ab"
    folder.mkdir(parents=True)
    (folder / "one.json").write_bytes(b"x" * 70)
    (folder.parent / "index").write_bytes(b"x" * 30)
    return folder.parent


def test_folders_of_other_schemas_are_listed_and_removed_one_by_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.other_schemas() == []
    store.put(record(1), b"plan")
    for name in ("v10", "v0", "v2"):
        schema_folder(tmp_path, name)
    for name in ("v01", "v", "v-1", "va", "w2", "v2.old", "quarantine", "V3"):
        schema_folder(tmp_path, name)
    (tmp_path / "v3").write_text("a file")
    found = store.other_schemas()
    assert [(each.version, each.files, each.size_bytes, each.problem) for each in found] == [
        (0, 2, 100, ""),
        (2, 2, 100, ""),
        (10, 2, 100, ""),
    ]
    assert found[0].path == str(tmp_path / "v0")
    assert store.remove_schema(2) is True
    assert store.remove_schema(2) is False
    assert store.remove_schema(3) is False
    assert [each.version for each in store.other_schemas()] == [0, 10]
    with pytest.raises(ValueError, match="schema 1 is the one in use"):
        store.remove_schema(1)
    assert len(list(tmp_path.iterdir())) == 12
    assert hit(open_store(tmp_path).get(record(1).id)).blob == b"plan"
    assert open_store(None).other_schemas() == []
    assert open_store(None).remove_schema(0) is False


@posix
def test_removing_a_schema_follows_no_link(tmp_path: Path, victim: Path) -> None:
    directory = tmp_path / "cache"
    store = open_store(directory)
    store.put(record(1))
    elsewhere = schema_folder(tmp_path, "elsewhere")
    (directory / "v0").symlink_to(elsewhere)
    folder = schema_folder(directory, "v2")
    (folder / "link").symlink_to(elsewhere)
    (folder / "ab" / "file").symlink_to(victim)
    assert [(each.version, each.files) for each in store.other_schemas()] == [(2, 4)]
    assert store.remove_schema(0) is False
    assert store.remove_schema(2) is True
    assert (directory / "v0").is_symlink()
    assert not folder.exists()
    assert sorted(path.name for path in elsewhere.rglob("*")) == ["ab", "index", "one.json"]


@posix
@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
@pytest.mark.parametrize("what", [".", "ab", "ab/one.json"])
def test_a_schema_of_which_something_is_another_users_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    store = open_store(tmp_path, strict=False)
    folder = schema_folder(tmp_path, "v0")
    tmp_path.chmod(0o700)
    os.chown(folder / what, 12345, -1)
    (found,) = store.other_schemas()
    why = f"{folder / what} belongs to user 12345"
    assert (found.files, found.size_bytes, found.problem) == (0, 0, why)
    assert store.remove_schema(0) is False
    assert len(list(folder.rglob("*"))) == 3
    assert caplog.messages == [f"a folder is not removed: {why}"]


@posix
def test_no_schema_is_removed_from_a_directory_that_is_not_the_users_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = schema_folder(tmp_path, "v0")
    tmp_path.chmod(0o777)
    store = open_store(tmp_path, strict=False)
    assert store.other_schemas() == []
    assert store.remove_schema(0) is False
    assert folder.is_dir()
    assert "others may write to it" in caplog.text


def test_a_schema_that_cannot_be_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    schema_folder(tmp_path, "v0")
    monkeypatch.setattr(shutil, "rmtree", failing(errno.EROFS))
    assert open_store(tmp_path, strict=False).remove_schema(0) is False
    assert caplog.messages == ["a folder is not removed: [Errno 30] Read-only file system"]
    with pytest.raises(OSError, match="Read-only file system"):
        open_store(tmp_path).remove_schema(0)


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
