"""The store of plan records: memory, then the user's directory, then the seeds that ship.

An entry is one JSON file, ``v1/<first two of id>/<id>.json``, and optionally a blob beside it that
is named by its content, ``<id>.<first 16 of its SHA-256>.blob``. So a writer that is killed leaves
the old record with the old blob, or the new with the new; a reader that comes while the blob is
removed serves the record without it. A fault of the disk, or of what lies on it, is a miss or an
entry that stays in memory, never an exception, unless the store is strict.

The time stamp of a record's file is that of its last use, to within :data:`USED_S`: a lookup that
reads it sets it. The directory has no bound of its own; :meth:`PlanStore.prune` gives it one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import files
from .lock import FileLock, LockTimeout, ThreadLocks
from .record import MAX_RECORD_BYTES, SCHEMA_VERSION, PlanRecord, RecordError, from_json

MAX_BLOB_BYTES = 256 << 20
QUARANTINE_KEPT = 64
QUARANTINE_BYTES = 16 << 20
STALE_S = 3600.0  # no write takes so long: older temporary files are left over
USED_S = 86400.0  # the last use is noted once in this time
PACKAGED_SEEDS = Path(__file__).with_name("seeds")
_OVERHEAD_BYTES = 512  # of an entry in memory, besides its text and blob
_ATTEMPTS = 3  # at an entry whose blob goes while it is read, because a new one takes its place

Tier = Literal["memory", "disk", "seed", "built"]
Reason = Literal["absent", "corrupt", "unreadable", "refused"]

_logger = logging.getLogger("plans_cache")


@dataclass(frozen=True)
class Hit:
    """A record and the tier that served it; ``blob_problem`` says why its blob is left out."""

    record: PlanRecord
    blob: bytes | None
    tier: Tier
    blob_problem: str = ""


@dataclass(frozen=True)
class Miss:
    """No record, and why.

    "absent": none is there. "corrupt": it was damaged, or another key's, and is in quarantine.
    "unreadable": the file could not be read. "refused": the directory cannot be used.
    """

    reason: Reason
    detail: str


@dataclass(frozen=True)
class Entry:
    """An entry that :meth:`PlanStore.scan` finds; if ``record`` is None, ``problem`` says why.

    ``age_s`` is the time since the record was made, ``unused_s`` since it was read from disk or
    written, to within :data:`USED_S`; 0 for what is not on disk.
    """

    id: str
    tier: Tier
    path: str | None
    record: PlanRecord | None
    record_bytes: int
    blob_bytes: int
    age_s: float
    problem: str = ""
    unused_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        return self.record_bytes + self.blob_bytes


@dataclass(frozen=True)
class Check:
    """Result of :meth:`PlanStore.check` for an entry where it is kept.

    ``tier`` is None where it is nowhere. ``problem`` is what is wrong with the record, or with the
    folders it is in, ``blob_problem`` with the blob that the record names; empty where it is right.
    """

    tier: Tier | None
    record: PlanRecord | None
    blob: bytes | None
    problem: str = ""
    blob_problem: str = ""


@dataclass(frozen=True)
class SchemaFolder:
    """The entries of another schema than this program's; ``problem`` says why they have to stay."""

    version: int
    path: str
    files: int
    size_bytes: int
    problem: str = ""


@dataclass(frozen=True)
class Stats:
    """Counts of a store's work in this process, and of the content of its memory."""

    hits: dict[str, int]
    misses: dict[str, int]
    entries: int
    bytes: int
    evictions: int
    writes: int
    write_failures: int
    quarantined: int
    blobs_rejected: int
    built: int
    build_ms: float
    load_ms: float


@dataclass(frozen=True)
class _Kept:
    """An entry in memory: as text, so that its size is known. A record of it is larger."""

    text: bytes
    blob: bytes | None

    @property
    def size_bytes(self) -> int:
        return len(self.text) + len(self.blob or b"") + _OVERHEAD_BYTES


class _Memory:
    """The entries used last, as many as both bounds allow. The caller holds a lock."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self.entries: OrderedDict[str, _Kept] = OrderedDict()
        self.bytes = 0
        self.evictions = 0

    def get(self, id: str) -> _Kept | None:
        kept = self.entries.get(id)
        if kept is not None:
            self.entries.move_to_end(id)
        return kept

    def put(self, id: str, kept: _Kept) -> None:
        self.pop(id)
        if kept.size_bytes > self._max_bytes:
            return
        self.entries[id] = kept
        self.bytes += kept.size_bytes
        while len(self.entries) > self._max_entries or self.bytes > self._max_bytes:
            self.pop(next(iter(self.entries)))
            self.evictions += 1

    def pop(self, id: str) -> bool:
        kept = self.entries.pop(id, None)
        if kept is not None:
            self.bytes -= kept.size_bytes
        return kept is not None


def _is_id(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{16,128}", text) is not None


def _checked(id: str) -> str:
    if not _is_id(id):
        raise ValueError(f"{id!r:.140} is no id: expected 16 to 128 hexadecimal digits")
    return id


def _blob_path(path: Path, record: PlanRecord) -> Path | None:
    """The path of the blob that the record at ``path`` names."""
    blob = record.blob
    return None if blob is None else path.with_name(f"{path.stem}.{blob.sha256[:16]}.blob")


def _blobs_beside(path: Path) -> list[Path]:
    """Every blob of the entry at ``path``, also those that no record names."""
    return [
        other
        for other in path.parent.iterdir()
        if other.suffix == ".blob" and other.name.startswith(f"{path.stem}.")
    ]


def _read_blob(path: Path, record: PlanRecord) -> tuple[bytes | None, str]:
    """The blob of the record at ``path``, or what is wrong with it.

    It holds device code: one that somebody else could have written is not read.
    """
    place, blob = _blob_path(path, record), record.blob
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


def _record_of(id: str, text: bytes) -> PlanRecord:
    record = from_json(text)
    if record.id != id:
        raise RecordError(f"record: is that of entry {record.id}, not {id}")
    return record


class PlanStore:
    """Records by id (:attr:`PlanRecord.id`), for all threads of a process and all processes.

    ``directory`` None keeps everything in memory. ``seeds`` is a folder of ``<id>.json``, in it or
    one level down; None for none. ``max_entries`` and ``max_bytes`` bound the memory. ``clock``
    gives seconds since 1970. A ``strict`` store raises where another goes on without the disk.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        seeds: Path | None = PACKAGED_SEEDS,
        max_entries: int = 4096,
        max_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.time,
        strict: bool = False,
        lock_timeout_s: float = 600.0,
    ) -> None:
        self.directory = directory
        self.strict = strict
        self._seeds = seeds
        self._seed_paths: dict[str, Path] | None = None
        self._clock = clock
        self._lock_timeout_s = lock_timeout_s
        self._memory = _Memory(max_entries, max_bytes)
        self._counts: Counter[str] = Counter()
        self._load_s = self._build_s = 0.0
        self._warned = False
        self._reset_locks()
        _stores.add(self)

    def _reset_locks(self) -> None:
        """New locks, as a forked child needs them: the old may be held by threads it lacks."""
        self._mutex = threading.Lock()
        self._building = ThreadLocks()
        self._memory.bytes = sum(kept.size_bytes for kept in self._memory.entries.values())

    # -- the interface -------------------------------------------------------------------------

    def get(self, id: str) -> Hit | Miss:
        """The entry ``id`` from the first tier that has it. ValueError where ``id`` is none."""
        return self._count(id, self._look_up(id))

    def put(self, record: PlanRecord, blob: bytes | None = None) -> bool:
        """Keep ``record`` under its id, with ``blob`` beside it; whether it is on disk now."""
        try:
            if len(blob or b"") > MAX_BLOB_BYTES:
                blob = None  # it can be built again from the record
            record = record.with_blob(blob)
            text = record.to_json().encode()
        except RecordError as error:
            self._add("write_failures")
            self._fault(error)
            return False
        self._keep(record.id, text, blob)
        if self.directory is None:
            return False
        try:
            path = self._path(record.id, make=True)
            own, replaced = _blob_path(path, record), self._blob_named_by(path)
            if own is not None and blob is not None:
                files.write(own, blob)
            files.write(path, text)  # this makes it an entry
            self._remove_blobs(path, own, replaced)
        except OSError as error:
            self._add("write_failures")
            self._fault(error)
            return False
        self._add("writes")
        return True

    @contextmanager
    def building(self, id: str) -> Iterator[None]:
        """Hold the right to build entry ``id``, alone among all threads and processes.

        Look again once it is held: who held it before may have built the entry. Not reentrant.
        :class:`LockTimeout` when it is not had in time. Where the directory cannot be used it
        holds among the threads of this process alone.
        """
        with self._building.hold(_checked(id), self._lock_timeout_s):
            lock = None
            if self.directory is not None:
                try:
                    path = self._path(id, make=True).with_suffix(".lock")
                    lock = FileLock(path, self._lock_timeout_s)
                except LockTimeout:
                    raise
                except OSError as error:
                    self._fault(error)
            try:
                yield
            finally:
                if lock is not None:
                    lock.release()

    def get_or_build(
        self,
        id: str,
        build: Callable[[], tuple[PlanRecord, bytes | None]],
        *,
        accepts: Callable[[PlanRecord], bool] = lambda record: True,
    ) -> Hit:
        """The entry ``id``, built and kept by ``build()`` where no tier has one that ``accepts``.

        One caller builds at a time; the others wait and take what it made. What ``build`` raises
        goes to its caller, and the next one in line builds. Counts as one lookup.
        """
        found = self._look_up(id)
        if isinstance(found, Hit) and accepts(found.record):
            self._count(id, found)
            return found
        with ExitStack() as stack:
            try:
                stack.enter_context(self.building(id))
            except LockTimeout as error:  # its holder may be stopped: better built twice than never
                self._fault(error, "a plan is built beside another builder")
            else:
                found = self._look_up(id)
            self._count(id, found)
            if isinstance(found, Hit) and accepts(found.record):
                return found
            start = time.perf_counter()
            record, blob = build()
            self._build_s += time.perf_counter() - start
            self._add("built")
            if record.id != id:
                raise ValueError(f"asked to build entry {id}, built {record.id}")
            self.put(record, blob)
            return Hit(record.with_blob(blob), blob, "built")

    def scan(self, *, look_only: bool = False) -> Iterator[Entry]:
        """Every entry of every tier, the one that :meth:`get` would serve where several have it.

        What is damaged goes into quarantine and comes as an entry with a ``problem``; a folder of
        entries that cannot be used stays, and comes so by its name. Blobs are not read. With
        ``look_only`` nothing is moved.
        """
        seen = set()
        unusable: list[tuple[Path, OSError]] = []
        for path in self._files(".json", unusable=unusable):
            found = self._from_disk(path.stem, blob=False, look_only=look_only)
            if isinstance(found, Miss):
                if found.reason != "absent":  # removed while this was going on
                    yield Entry(path.stem, "disk", str(path), None, 0, 0, 0.0, found.detail)
                continue
            hit, text = found
            seen.add(path.stem)
            age_s, unused_s, blob_bytes = self._age_s(hit.record), 0.0, 0
            blob = _blob_path(path, hit.record)
            with suppress(OSError):
                unused_s = max(0.0, self._clock() - os.lstat(path).st_mtime)
                blob_bytes = 0 if blob is None else os.lstat(blob).st_size
            sizes = len(text), blob_bytes
            yield Entry(path.stem, "disk", str(path), hit.record, *sizes, age_s, unused_s=unused_s)
        for folder, error in unusable:
            yield Entry(folder.name, "disk", str(folder), None, 0, 0, 0.0, str(error))
        with self._mutex:
            in_memory = [item for item in self._memory.entries.items() if item[0] not in seen]
        for id, kept in in_memory:
            seen.add(id)
            record = from_json(kept.text)
            age_s = self._age_s(record)
            blob_bytes = len(kept.blob or b"")
            yield Entry(id, "memory", None, record, len(kept.text), blob_bytes, age_s)
        for id, path in self._seeds_by_id().items():
            if id in seen:
                continue
            found = self._from_seed(id)
            if isinstance(found, Miss):
                yield Entry(id, "seed", str(path), None, 0, 0, 0.0, found.detail)
            else:
                hit, text = found
                age_s = self._age_s(hit.record)
                yield Entry(id, "seed", str(path), hit.record, len(text), 0, age_s)

    def check(self, id: str) -> Check:
        """Read entry ``id`` again where it is kept: on disk, else a seed, else in memory.

        Looks at all that :meth:`get` does, and that nobody else may write to its files and folders.
        Counts as no lookup, moves nothing, and raises for no fault, also in a strict store.
        """
        if self.directory is not None:
            problem = ""
            try:
                path = self._path(_checked(id))
                record = _record_of(id, files.read(path, MAX_RECORD_BYTES))
                for part in (path.parent.parent, path.parent, path):
                    files.check_unwritable(part)
                blob, problem = _read_blob(path, record)
                return Check("disk", record, blob, blob_problem=problem)
            except FileNotFoundError:
                pass
            except (OSError, RecordError) as error:
                return Check("disk", None, None, str(error))
        if _checked(id) in self._seeds_by_id():
            try:
                return Check("seed", self._read_seed(id)[0], None)
            except (OSError, RecordError) as error:
                return Check("seed", None, None, str(error))
        with self._mutex:
            kept = self._memory.entries.get(id)
        if kept is None:
            return Check(None, None, None, f"no entry {id}")
        return Check("memory", from_json(kept.text), kept.blob)

    def check_directory(self) -> None:
        """Raise OSError where the directory is there and cannot be used, in a strict store or not.

        A folder of entries in it is not looked at; :meth:`scan` tells of one that cannot be used.
        """
        if self.directory is None:
            return
        with suppress(FileNotFoundError):
            files.check_private(self.directory)
            files.check_folder(self._root)

    def prune(
        self,
        predicate: Callable[[Entry], bool] | None = None,
        *,
        older_than_s: float | None = None,
        unused_for_s: float | None = None,
        max_total_bytes: int | None = None,
    ) -> list[Entry]:
        """Remove entries that ``predicate`` holds for, that were made or last used too long ago,
        then those that were not used for longest until the rest is small enough; also what killed
        writers left. Returns what was removed.

        Seeds are not touched.
        """
        kept: list[Entry] = []
        removed: list[Entry] = []
        named: set[Path | None] = set()
        for entry in self.scan():
            if entry.tier == "seed" or entry.record is None:
                continue
            if entry.path is not None:
                named.add(_blob_path(Path(entry.path), entry.record))
            old = older_than_s is not None and entry.age_s > older_than_s
            unused = unused_for_s is not None and entry.unused_s > unused_for_s
            out = old or unused or (predicate is not None and predicate(entry))
            (removed if out else kept).append(entry)
        if max_total_bytes is not None:
            kept.sort(key=lambda entry: (entry.unused_s, entry.age_s, entry.id))
            total = sum(entry.size_bytes for entry in kept)
            while kept and total > max_total_bytes:
                total -= kept[-1].size_bytes
                removed.append(kept.pop())
        self._remove_left_over(named)
        return [entry for entry in removed if self.remove(entry.id)]

    def remove(self, id: str) -> bool:
        """Forget entry ``id`` in memory and on disk; whether there was one."""
        with self._mutex:
            found = self._memory.pop(_checked(id))
        if self.directory is None:
            return found
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
            self._fault(error, "an entry is not removed")
        return found

    def other_schemas(self) -> list[SchemaFolder]:
        """The folders of other schema versions in the directory, older ones first.

        A link to a folder is none.
        """
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
        """Remove the folder of another schema version with all that is in it; whether it is gone.

        Not if it, or something in it, is another user's; links are removed, never followed.
        ValueError for this program's own version.
        """
        if version == SCHEMA_VERSION:
            raise ValueError(f"schema {version} is the one in use: prune removes entries of it")
        for other, path in self._schema_folders():
            if other != version:
                continue
            try:
                files.remove_own(path)
            except FileNotFoundError:
                return True
            except OSError as error:
                self._fault(error, "a folder is not removed")
                return False
            return True
        return False

    def clear_memory(self) -> None:
        """Forget what is in memory; the disk keeps its entries."""
        with self._mutex:
            self._memory.entries.clear()
            self._memory.bytes = 0

    def stats(self) -> Stats:
        """The counters as they stand."""
        with self._mutex:
            counts = dict(self._counts)
            memory = self._memory
            entries, size_bytes, evictions = len(memory.entries), memory.bytes, memory.evictions
        by = {
            kind: {
                name.removeprefix(f"{kind}."): count
                for name, count in sorted(counts.items())
                if name.startswith(f"{kind}.")
            }
            for kind in ("hit", "miss")
        }
        return Stats(
            hits=by["hit"],
            misses=by["miss"],
            entries=entries,
            bytes=size_bytes,
            evictions=evictions,
            writes=counts.get("writes", 0),
            write_failures=counts.get("write_failures", 0),
            quarantined=counts.get("quarantined", 0),
            blobs_rejected=counts.get("blobs_rejected", 0),
            built=counts.get("built", 0),
            build_ms=self._build_s * 1e3,
            load_ms=self._load_s * 1e3,
        )

    @property
    def quarantine(self) -> Path | None:
        """The folder that damaged files are moved into."""
        return None if self.directory is None else self.directory / "quarantine"

    # -- lookup --------------------------------------------------------------------------------

    def _look_up(self, id: str) -> Hit | Miss:
        with self._mutex:
            kept = self._memory.get(_checked(id))
        if kept is not None:
            return Hit(from_json(kept.text), kept.blob, "memory")
        start = time.perf_counter()
        found = self._from_disk(id)
        if isinstance(found, Miss) and id in self._seeds_by_id():
            seed = self._from_seed(id)
            found = seed if isinstance(seed, tuple) or found.reason == "absent" else found
        self._load_s += time.perf_counter() - start
        if isinstance(found, Miss):
            return found
        hit, text = found
        self._keep(id, text, hit.blob)
        return hit

    def _from_disk(
        self, id: str, *, blob: bool = True, look_only: bool = False
    ) -> tuple[Hit, bytes] | Miss:
        absent = Miss("absent", f"no entry {id}")
        if self.directory is None:
            return absent
        try:
            path = self._path(id)
        except FileNotFoundError:
            return absent
        except OSError as error:
            self._fault(error)
            return Miss("refused", str(error))
        for _ in range(_ATTEMPTS):
            try:
                seen = files.identity(path)
                text = files.read(path, MAX_RECORD_BYTES)
                record = _record_of(id, text)
            except FileNotFoundError:
                return absent
            except (files.Refused, RecordError) as error:
                if not look_only:
                    self._set_aside(path, seen, error)
                if self.strict:
                    raise
                return Miss("corrupt", str(error))
            except OSError as error:
                self._fault(error)
                return Miss("unreadable", str(error))
            if not blob:
                return Hit(record, None, "disk"), text
            data, problem = _read_blob(path, record)
            if not problem or _is_unchanged(path, seen):
                break
        if problem:
            self._add("blobs_rejected")
            _logger.debug("blob_rejected %s: %s", id, problem)
        self._note_use(path, seen)
        return Hit(record, data, "disk", problem), text

    def _note_use(self, path: Path, seen: files.Identity) -> None:
        """Set the file's time stamp, on which the order of :meth:`prune` rests; or let it be."""
        now = self._clock()
        if now - seen[1] / 1e9 > USED_S:
            follow = os.utime not in os.supports_follow_symlinks  # on Windows it cannot do without
            with suppress(OSError):
                os.utime(path, (now, now), follow_symlinks=follow)

    def _blob_named_by(self, path: Path) -> Path | None:
        """The path of the blob of the entry that is at ``path`` now."""
        try:
            return _blob_path(path, _record_of(path.stem, files.read(path, MAX_RECORD_BYTES)))
        except (OSError, RecordError):
            return None

    def _remove_blobs(self, path: Path, own: Path | None, replaced: Path | None) -> None:
        """Remove the blob of a replaced entry, and what killed writers left of this one.

        A blob of which the record is still to be written is younger.
        """
        with suppress(OSError):
            for blob in _blobs_beside(path):
                if blob != own and (blob == replaced or self._is_stale(blob)):
                    blob.unlink(missing_ok=True)

    def _is_stale(self, path: Path) -> bool:
        return self._clock() - os.lstat(path).st_mtime > STALE_S

    def _seeds_by_id(self) -> dict[str, Path]:
        if self._seed_paths is None:
            paths = [] if self._seeds is None else sorted(self._seeds.glob("*.json"))
            paths += [] if self._seeds is None else sorted(self._seeds.glob("*/*.json"))
            self._seed_paths = {path.stem: path for path in paths if _is_id(path.stem)}
        return self._seed_paths

    def _from_seed(self, id: str) -> tuple[Hit, bytes] | Miss:
        try:
            record, text = self._read_seed(id)
            return Hit(record, None, "seed"), text
        except (OSError, RecordError) as error:
            self._fault(error, "a seed is left out")
            return Miss("corrupt", f"seed {id}.json: {error}")

    def _read_seed(self, id: str) -> tuple[PlanRecord, bytes]:
        with open(self._seeds_by_id()[id], "rb") as stream:
            text = stream.read(MAX_RECORD_BYTES + 1)
        return _record_of(id, text), text

    def _keep(self, id: str, text: bytes, blob: bytes | None) -> None:
        with self._mutex:
            self._memory.put(id, _Kept(text, blob))

    # -- the directory -------------------------------------------------------------------------

    @property
    def _root(self) -> Path:
        """The folder of this schema, which programs of other schemas neither read nor clear."""
        assert self.directory is not None
        return self.directory / f"v{SCHEMA_VERSION}"

    def _path(self, id: str, *, make: bool = False) -> Path:
        """The path of entry ``id``, in checked folders. Raises OSError if a folder is missing."""
        assert self.directory is not None
        folder = self._root / id[:2]
        if make:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
        files.check_private(self.directory)
        for part in (self._root, folder):
            if make:
                files.make_folder(part)
            else:
                files.check_folder(part)
        return folder / f"{id}.json"

    def _files(
        self, *suffixes: str, unusable: list[tuple[Path, OSError]] | None = None
    ) -> Iterator[Path]:
        """The files of entries, in order of their ids; folders that cannot be used are left out.

        They are put into ``unusable`` where that is given.
        """
        if self.directory is None:
            return
        try:
            files.check_private(self.directory)
            folders = sorted(self._root.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            self._fault(error, "entries are left out")
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
                self._fault(error, "entries are left out")
                if unusable is not None:
                    unusable.append((folder, error))
                continue
            for path in paths:
                id = path.name.lstrip(".").split(".")[0]
                ours = path.suffix in (files.TEMPORARY, ".blob") or path.stem == id
                if path.suffix in suffixes and ours and _is_id(id) and id[:2] == folder.name:
                    yield path

    def _schema_folders(self) -> list[tuple[int, Path]]:
        """Version and path of each folder of another schema, in order."""
        if self.directory is None:
            return []
        try:
            files.check_private(self.directory)
            found = []
            for path in self.directory.iterdir():
                number = re.fullmatch("v(0|[1-9][0-9]{0,8})", path.name)
                if number is None or path.is_symlink() or not path.is_dir():
                    continue
                if int(number[1]) != SCHEMA_VERSION:
                    found.append((int(number[1]), path))
            return sorted(found)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._fault(error, "folders of other schemas are left out")
            return []

    def _remove_left_over(self, named: Collection[Path | None]) -> None:
        """Remove what a killed process leaves: a temporary file, a blob that no record names, and
        the file of a lock that nobody holds.
        """
        for path in self._files(files.TEMPORARY, ".blob"):
            with suppress(OSError):
                if path not in named and self._is_stale(path):
                    os.unlink(path)
        for path in self._files(".lock"):
            with suppress(OSError):
                FileLock(path, 0.0).release()

    def _set_aside(self, path: Path, seen: files.Identity, problem: Exception) -> None:
        """Move a damaged file into quarantine, which keeps the last :data:`QUARANTINE_KEPT`, and
        no more than :data:`QUARANTINE_BYTES`.
        """
        folder = self.quarantine
        assert folder is not None
        try:
            files.make_folder(folder)
            if not files.move_aside(path, seen, folder / f"{time.time_ns():020d}-{path.name}"):
                return
            self._add("quarantined")
            _logger.info("quarantined %s: %s", path.name, problem)
            size_bytes = 0
            for number, kept in enumerate(sorted(folder.iterdir(), reverse=True)):
                size_bytes += os.lstat(kept).st_size
                if number >= QUARANTINE_KEPT or size_bytes > QUARANTINE_BYTES:
                    kept.unlink(missing_ok=True)
        except OSError as error:  # the damaged file stays where it is: a miss each time
            _logger.debug("quarantine of %s: %s", path, error)

    # -- counters, log, faults -----------------------------------------------------------------

    def _age_s(self, record: PlanRecord) -> float:
        return max(0.0, self._clock() - record.created)  # a clock may have been set back

    def _add(self, name: str) -> None:
        with self._mutex:
            self._counts[name] += 1

    def _count(self, id: str, found: Hit | Miss) -> Hit | Miss:
        if isinstance(found, Hit):
            self._add(f"hit.{found.tier}")
            word = "cache_hit" if found.tier == "memory" else "persistent_cache_hit"
            _logger.debug("%s %s %s", word, id, found.tier)
        else:
            self._add(f"miss.{found.reason}")
            _logger.debug("cache_miss %s %s: %s", id, found.reason, found.detail)
        return found

    def _fault(self, error: Exception, result: str = "plans are kept in memory only") -> None:
        """Go on after a fault of the cache: one warning, then the log's debug level."""
        if self.strict:
            raise error
        with self._mutex:
            first, self._warned = not self._warned, True
        _logger.log(logging.WARNING if first else logging.DEBUG, "%s: %s", result, error)


_stores: weakref.WeakSet[PlanStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._reset_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
