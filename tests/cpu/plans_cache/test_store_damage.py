"""Damaged files of the store: misses that go into quarantine, in bounded memory and time."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plans_cache import Miss, RecordError, files
from plans_cache.record import MAX_DEPTH, MAX_RECORD_BYTES
from plans_cache.store import QUARANTINE_BYTES, QUARANTINE_KEPT
from tests.cpu.plans_cache.test_record import signed
from tests.stores import entry_path, hit, miss, open_store
from tests.workers.store_worker import record


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
