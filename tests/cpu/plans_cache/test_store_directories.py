"""Directories of somebody else, links in place of files, and folders of other schemas."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from plans_cache import PlanStore, files
from tests.stores import (
    IS_ROOT,
    assert_memory_only,
    entry_path,
    failing,
    hit,
    miss,
    open_store,
    posix,
)
from tests.workers.store_worker import record

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
