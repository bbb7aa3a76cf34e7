"""Entries checked where they are kept: damaged records, foreign blobs, files open to others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from plans_cache import Check, Hit
from tests.stores import open_store, seeds_with
from tests.workers.store_worker import record


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
