"""Entries on disk: a record with its blob, the quarantine, other schemas, what killed writers left.

An entry is one JSON file, ``v1/<first two of id>/<id>.json``, and optionally a blob beside it that
is named by its content, ``<id>.<first 16 of its SHA-256>.blob``. So a writer that is killed leaves
the old record with the old blob, or the new with the new; a reader that comes while the blob is
removed serves the record without it.

The time stamp of a record's file is that of its last use, to within :data:`USED_S`: a lookup that
reads it sets it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from . import files
from .entries import USED_S, Check, Entry, Hit, Miss, SchemaFolder, age_s
from .journal import Journal
from .lock import FileLock, LockTimeout
from .record import MAX_RECORD_BYTES, SCHEMA_VERSION, PlanRecord, RecordError, from_json, is_id

MAX_BLOB_BYTES = 256 << 20
FAMILIES = "families"  # the folder of empty files, <family>/<id>, by which entries are listed
QUARANTINE_KEPT = 64
QUARANTINE_BYTES = 16 << 20
STALE_S = 3600.0  # no write takes so long: older temporary files are left over
_ATTEMPTS = 3  # at an entry whose blob goes while it is read, because a new one takes its place

_logger = logging.getLogger("plans_cache")


def record_of(id: str, text: bytes) -> PlanRecord:
    """Return the record in ``text``; RecordError if it is not that of entry ``id``."""
    record = from_json(text)
    if record.id != id:
        raise RecordError(f"record: is that of entry {record.id}, not {id}")
    return record


def blob_path(path: Path, record: PlanRecord) -> Path | None:
    """Return where the blob is that the record at ``path`` names."""
    blob = record.blob
    return None if blob is None else path.with_name(f"{path.stem}.{blob.sha256[:16]}.blob")


def _blobs_beside(path: Path) -> list[Path]:
    """Return every blob of the entry at ``path``, also those that no record names."""
    return [
        other
        for other in path.parent.iterdir()
        if other.suffix == ".blob" and other.name.startswith(f"{path.stem}.")
    ]


def _read_blob(path: Path, record: PlanRecord) -> tuple[bytes | None, str]:
    """Return the blob of the record at ``path``, or what is wrong with the blob.

    A blob holds device code: one that somebody else could have written is not read.
    """
    place, blob = blob_path(path, record), record.blob
    if place is None or blob is None:
        return None, ""
    try:
        data = files.read(place, MAX_BLOB_BYTES)
    except FileNotFoundError:
        return None, "blob is missing"
    except OSError as error:
        return None, f"blob cannot be read: {error}"
    try:
        for part in (path.parent.parent, path.parent, place):
            files.check_unwritable(part)
    except OSError as error:
        return None, f"blob: {error}"
    if len(data) != blob.size_bytes:
        return None, f"blob has {len(data)} bytes, the record says {blob.size_bytes}"
    if hashlib.sha256(data).hexdigest() != blob.sha256:
        return None, "blob does not match the record's sha256"
    return data, ""


def _is_unchanged(path: Path, seen: files.Identity) -> bool:
    try:
        return files.identity(path) == seen
    except OSError:
        return False


class Directory:
    """The entries under ``path``, for all threads of a process and all processes.

    Faults go to ``journal``, which raises them if it is strict. ``clock`` gives seconds since 1970.
    """

    def __init__(self, path: Path, clock: Callable[[], float], journal: Journal) -> None:
        self.path = path
        self._clock = clock
        self._journal = journal

    @property
    def quarantine(self) -> Path:
        """The folder that damaged files are moved into."""
        return self.path / "quarantine"

    # -- an entry ------------------------------------------------------------------------------

    def read(
        self, id: str, *, blob: bool = True, look_only: bool = False
    ) -> tuple[Hit, bytes] | Miss:
        """Return entry ``id`` and its record's text; a damaged file goes into quarantine.

        Without ``blob`` the blob is not read; with ``look_only`` nothing is moved.
        """
        absent = Miss("absent", f"no entry {id}")
        try:
            path = self._path(id)
        except FileNotFoundError:
            return absent
        except OSError as error:
            self._journal.fault(error)
            return Miss("refused", str(error))
        for _ in range(_ATTEMPTS):
            try:
                seen = files.identity(path)
                text = files.read(path, MAX_RECORD_BYTES)
                record = record_of(id, text)
            except FileNotFoundError:
                return absent
            except (files.Refused, RecordError) as error:
                if not look_only:
                    self._set_aside(path, seen, error)
                if self._journal.strict:
                    raise
                return Miss("corrupt", str(error))
            except OSError as error:
                self._journal.fault(error)
                return Miss("unreadable", str(error))
            if not blob:
                return Hit(record, None, "disk"), text
            data, problem = _read_blob(path, record)
            if not problem or _is_unchanged(path, seen):
                break
        if problem:
            self._journal.add("blobs_rejected")
            _logger.debug("blob_rejected %s: %s", id, problem)
        self._note_use(path, seen)
        return Hit(record, data, "disk", problem), text

    def write(self, record: PlanRecord, text: bytes, blob: bytes | None) -> bool:
        """Write ``record`` as ``text``, and ``blob`` beside it; return whether both are on disk."""
        try:
            path = self._path(record.id, make=True)
            own, replaced = blob_path(path, record), self._blob_named_by(path)
            if own is not None and blob is not None:
                files.write(own, blob)
            files.write(path, text)  # this makes it an entry
            self._note_family(record)
            self._remove_blobs(path, own, replaced)
        except OSError as error:
            self._journal.add("write_failures")
            self._journal.fault(error)
            return False
        self._journal.add("writes")
        return True

    def family(self, family: str) -> list[str]:
        """The ids of the entries that name a family, in order; some may be gone."""
        try:
            files.check_private(self.path)
            folder = self._root / FAMILIES / family
            for part in (self._root, folder.parent, folder):
                files.check_folder(part)
            return sorted(name for name in os.listdir(folder) if is_id(name))
        except FileNotFoundError:
            return []
        except OSError as error:
            self._journal.fault(error, "entries of a family are left out")
            return []

    def _note_family(self, record: PlanRecord) -> None:
        """List an entry under its family. An entry that is not listed serves all the same."""
        if record.family is None:
            return
        folder = self._root / FAMILIES / record.family
        with suppress(OSError):
            files.make_folder(folder.parent)
            files.make_folder(folder)
            os.close(files.open_own(folder / record.id, os.O_WRONLY | os.O_CREAT))

    def lock(self, id: str, timeout_s: float) -> FileLock | None:
        """Take the lock of entry ``id`` for a builder; None if the directory cannot be used.

        Raises :class:`LockTimeout` if another holds the lock for too long.
        """
        try:
            return FileLock(self._path(id, make=True).with_suffix(".lock"), timeout_s)
        except LockTimeout:
            raise
        except OSError as error:
            self._journal.fault(error)
            return None

    def check(self, id: str) -> Check | None:
        """Read entry ``id`` without moving or counting anything; None if there is none."""
        try:
            path = self._path(id)
            record = record_of(id, files.read(path, MAX_RECORD_BYTES))
            for part in (path.parent.parent, path.parent, path):
                files.check_unwritable(part)
            blob, problem = _read_blob(path, record)
            return Check("disk", record, blob, blob_problem=problem)
        except FileNotFoundError:
            return None
        except (OSError, RecordError) as error:
            return Check("disk", None, None, str(error))

    def remove(self, id: str) -> bool:
        """Remove entry ``id`` with its blobs; return whether there was one."""
        found = False
        try:
            path = self._path(id)
            with suppress(FileNotFoundError):
                os.unlink(path)
                found = True
            for blob in _blobs_beside(path):
                blob.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._journal.fault(error, "an entry is not removed")
        return found

    def _note_use(self, path: Path, seen: files.Identity) -> None:
        """Set the time stamp of a record's file if possible: a prune orders entries by it."""
        now = self._clock()
        if now - seen[1] / 1e9 > USED_S:
            follow = os.utime not in os.supports_follow_symlinks  # on Windows it cannot do without
            with suppress(OSError):
                os.utime(path, (now, now), follow_symlinks=follow)

    def _blob_named_by(self, path: Path) -> Path | None:
        """Return where the blob is of the entry that is at ``path`` now."""
        try:
            return blob_path(path, record_of(path.stem, files.read(path, MAX_RECORD_BYTES)))
        except (OSError, RecordError):
            return None

    def _remove_blobs(self, path: Path, own: Path | None, replaced: Path | None) -> None:
        """Remove the blob of a replaced entry, and blobs that killed writers left of this entry.

        A blob is younger if its record is still to be written.
        """
        with suppress(OSError):
            for blob in _blobs_beside(path):
                if blob != own and (blob == replaced or self._is_stale(blob)):
                    blob.unlink(missing_ok=True)

    def _is_stale(self, path: Path) -> bool:
        return self._clock() - os.lstat(path).st_mtime > STALE_S

    def _set_aside(self, path: Path, seen: files.Identity, problem: Exception) -> None:
        """Move a damaged file into quarantine.

        The quarantine keeps the last :data:`QUARANTINE_KEPT`, at most :data:`QUARANTINE_BYTES`.
        """
        folder = self.quarantine
        try:
            files.make_folder(folder)
            if not files.move_aside(path, seen, folder / f"{time.time_ns():020d}-{path.name}"):
                return
            self._journal.add("quarantined")
            _logger.info("quarantined %s: %s", path.name, problem)
            size_bytes = 0
            for number, kept in enumerate(sorted(folder.iterdir(), reverse=True)):
                size_bytes += os.lstat(kept).st_size
                if number >= QUARANTINE_KEPT or size_bytes > QUARANTINE_BYTES:
                    kept.unlink(missing_ok=True)
        except OSError as error:  # the damaged file stays where it is: a miss each time
            _logger.debug("quarantine of %s: %s", path, error)

    def holds(self, id: str) -> bool:
        """Whether there is a file of entry ``id``, damaged or not."""
        try:
            return self._path(id).exists()
        except OSError:
            return False

    # -- all entries ---------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether there is no file of an entry."""
        return next(self._files(".json"), None) is None

    def scan(self, *, look_only: bool = False) -> Iterator[Entry]:
        """Yield every entry, then the folders of entries that cannot be used, by their names."""
        unusable: list[tuple[Path, OSError]] = []
        for path in self._files(".json", unusable=unusable):
            found = self.read(path.stem, blob=False, look_only=look_only)
            if isinstance(found, Miss):
                if found.reason != "absent":  # removed while this was going on
                    yield Entry(path.stem, "disk", str(path), None, 0, 0, 0.0, found.detail)
                continue
            hit, text = found
            made_s, unused_s, blob_bytes = age_s(hit.record, self._clock()), 0.0, 0
            blob = blob_path(path, hit.record)
            with suppress(OSError):
                unused_s = max(0.0, self._clock() - os.lstat(path).st_mtime)
                blob_bytes = 0 if blob is None else os.lstat(blob).st_size
            sizes = len(text), blob_bytes
            yield Entry(path.stem, "disk", str(path), hit.record, *sizes, made_s, unused_s=unused_s)
        for folder, error in unusable:
            yield Entry(folder.name, "disk", str(folder), None, 0, 0, 0.0, str(error))

    def remove_left_over(self, named: Collection[Path | None]) -> None:
        """Remove the temporary files, blobs and locks that killed processes left.

        Blobs in ``named`` stay, since records name them, and locks that somebody holds.
        """
        for path in self._files(files.TEMPORARY, ".blob"):
            with suppress(OSError):
                if path not in named and self._is_stale(path):
                    os.unlink(path)
        for path in self._files(".lock"):
            with suppress(OSError):
                FileLock(path, 0.0).release()

    def clear_families(self) -> None:
        """Remove from families the entries that are gone, and families that have none."""
        with suppress(OSError):
            files.check_private(self.path)
            files.check_folder(self._root / FAMILIES)
            for folder in sorted((self._root / FAMILIES).iterdir()):
                for id in self.family(folder.name) if is_id(folder.name) else ():
                    if not (self._root / id[:2] / f"{id}.json").exists():
                        (folder / id).unlink(missing_ok=True)
                with suppress(OSError):
                    folder.rmdir()  # not if it has entries

    # -- the folders ---------------------------------------------------------------------------

    @property
    def _root(self) -> Path:
        """The folder of this schema: programs of other schemas neither read nor clear it."""
        return self.path / f"v{SCHEMA_VERSION}"

    def check_folders(self) -> None:
        """Raise OSError if the directory is there and cannot be used."""
        with suppress(FileNotFoundError):
            files.check_private(self.path)
            files.check_folder(self._root)

    def _path(self, id: str, *, make: bool = False) -> Path:
        """Return where entry ``id`` is kept, in checked folders; raise OSError if there is none."""
        folder = self._root / id[:2]
        if make:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
        files.check_private(self.path)
        for part in (self._root, folder):
            if make:
                files.make_folder(part)
            else:
                files.check_folder(part)
        return folder / f"{id}.json"

    def _files(
        self, *suffixes: str, unusable: list[tuple[Path, OSError]] | None = None
    ) -> Iterator[Path]:
        """Yield the files of entries in order of their ids, without folders that cannot be used.

        Those folders go into ``unusable`` if it is given.
        """
        try:
            files.check_private(self.path)
            folders = sorted(self._root.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            self._journal.fault(error, "entries are left out")
            return
        for folder in folders:
            if not re.fullmatch("[0-9a-f]{2}", folder.name):
                continue
            try:
                files.check_folder(folder)
                paths = sorted(folder.iterdir())
            except FileNotFoundError:
                continue
            except OSError as error:
                self._journal.fault(error, "entries are left out")
                if unusable is not None:
                    unusable.append((folder, error))
                continue
            for path in paths:
                id = path.name.lstrip(".").split(".")[0]
                ours = path.suffix in (files.TEMPORARY, ".blob") or path.stem == id
                if path.suffix in suffixes and ours and is_id(id) and id[:2] == folder.name:
                    yield path

    # -- other schemas -------------------------------------------------------------------------

    def other_schemas(self) -> list[SchemaFolder]:
        """Return the folders of other schema versions, older ones first; links are left out."""
        found = []
        for version, path in self._schema_folders():
            try:
                found.append(SchemaFolder(version, str(path), *files.measure_own(path)))
            except FileNotFoundError:  # removed while this was going on
                continue
            except OSError as error:
                found.append(SchemaFolder(version, str(path), 0, 0, str(error)))
        return found

    def remove_schema(self, version: int) -> bool:
        """Remove the folder of another schema version; return whether it is gone.

        It stays if anything in it is another user's. Links are removed, never followed.
        """
        for other, path in self._schema_folders():
            if other != version:
                continue
            try:
                files.remove_own(path)
            except FileNotFoundError:
                return True
            except OSError as error:
                self._journal.fault(error, "a folder is not removed")
                return False
            return True
        return False

    def _schema_folders(self) -> list[tuple[int, Path]]:
        """Return version and path of each folder of another schema, in order."""
        try:
            files.check_private(self.path)
            found = []
            for path in self.path.iterdir():
                number = re.fullmatch("v(0|[1-9][0-9]{0,8})", path.name)
                if number is None or path.is_symlink() or not path.is_dir():
                    continue
                if int(number[1]) != SCHEMA_VERSION:
                    found.append((int(number[1]), path))
            return sorted(found)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._journal.fault(error, "folders of other schemas are left out")
            return []
