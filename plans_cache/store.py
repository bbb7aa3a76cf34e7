"""The store of plan records: memory, then the user's directory, then the seeds that ship.

A fault of the disk, or of what lies on it, is a miss or an entry that stays in memory, never an
exception, unless the store is strict. :mod:`plans_cache.directory` says what lies on the disk. The
directory has no bound of its own; :meth:`PlanStore.prune` gives it one.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .directory import (
    MAX_BLOB_BYTES,
    QUARANTINE_BYTES,
    QUARANTINE_KEPT,
    STALE_S,
    Directory,
    blob_path,
    record_of,
)
from .entries import (
    USED_S,
    Check,
    Entry,
    Hit,
    Miss,
    Reason,
    SchemaFolder,
    Stats,
    Tier,
    age_s,
)
from .journal import Journal
from .lock import LockTimeout, ThreadLocks
from .memory import Kept, Memory
from .record import (
    MAX_RECORD_BYTES,
    SCHEMA_VERSION,
    Components,
    PlanRecord,
    RecordError,
    checked_id,
    digest,
    from_json,
    is_id,
)

__all__ = [
    "MAX_BLOB_BYTES",
    "PACKAGED_SEEDS",
    "QUARANTINE_BYTES",
    "QUARANTINE_KEPT",
    "STALE_S",
    "USED_S",
    "Check",
    "Entry",
    "Hit",
    "Miss",
    "PlanStore",
    "Reason",
    "SchemaFolder",
    "Stats",
    "Tier",
]

SEED_FAMILIES = "families.json"  # beside seeds: their ids by family
SEED_STEPS = "steps-*.json"  # beside seeds: what was chosen for steps, of an environment each
MAX_FAMILY = 64  # entries of a family that are read

PACKAGED_SEEDS = Path(__file__).with_name("seeds")


@dataclass(frozen=True)
class SeedSteps:
    """What was chosen for steps in an environment, as JSON data by the id of the step."""

    env: Components
    choices: dict[str, Any]

    @classmethod
    def of(cls, text: bytes) -> SeedSteps:
        """Those of a file. Raises ValueError, TypeError or KeyError for one that is damaged."""
        data = json.loads(text)
        env, choices = data["environment"], data["steps"]
        if not isinstance(env, dict) or not isinstance(choices, dict):
            raise TypeError("the environment or the steps are no object")
        return cls(tuple((str(name), str(value)) for name, value in env.items()), choices)

    def to_json(self) -> str:
        """The file, a line for each step."""
        lines = (f"{json.dumps(id)}: {json.dumps(self.choices[id])}" for id in sorted(self.choices))
        head = f'{{"environment": {json.dumps(dict(self.env))},\n"steps": {{\n'
        return head + ",\n".join(lines) + "\n}}\n"

    @property
    def file(self) -> str:
        """The name of the file, by the environment."""
        return SEED_STEPS.replace("*", digest(self.env)[:12])


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
        self._seeds = seeds
        self._seed_paths: dict[str, Path] | None = None
        self._seed_families: dict[str, list[str]] | None = None
        self._seed_steps: tuple[SeedSteps, ...] | None = None
        self._clock = clock
        self._lock_timeout_s = lock_timeout_s
        self._journal = Journal(strict)
        self._memory = Memory(max_entries, max_bytes)
        self._disk = None if directory is None else Directory(directory, clock, self._journal)
        self._families: dict[str, set[str]] = {}  # of what this process has put
        self._building = ThreadLocks()
        self._load_s = self._build_s = 0.0
        _stores.add(self)

    def _after_fork(self) -> None:
        """Take new locks in a forked child: threads that it lacks may hold the old."""
        self._building = ThreadLocks()
        self._journal.after_fork()
        self._memory.after_fork()

    @property
    def strict(self) -> bool:
        """Whether a fault of the cache is raised."""
        return self._journal.strict

    # -- the interface -------------------------------------------------------------------------

    def get(self, id: str) -> Hit | Miss:
        """The entry ``id`` from the first tier that has it. ValueError where ``id`` is none."""
        return self._journal.count(id, self._look_up(id))

    def put(self, record: PlanRecord, blob: bytes | None = None) -> bool:
        """Keep ``record`` under its id, with ``blob`` beside it; whether it is on disk now."""
        try:
            if len(blob or b"") > MAX_BLOB_BYTES:
                blob = None  # it can be built again from the record
            record = record.with_blob(blob)
            text = record.to_json().encode()
        except RecordError as error:
            self._journal.add("write_failures")
            self._journal.fault(error)
            return False
        self._memory.put(record.id, Kept(text, blob))
        if record.family is not None:
            self._families.setdefault(record.family, set()).add(record.id)
        return self._disk is not None and self._disk.write(record, text, blob)

    def family(self, family: str) -> list[PlanRecord]:
        """The records that name a family, of all tiers, in order of their ids.

        Counts as no lookup. Reads no more than :data:`MAX_FAMILY`; the directory is not searched.
        """
        ids = set(self._families_of_seeds().get(checked_id(family), ()))
        ids |= set(() if self._disk is None else self._disk.family(family))
        ids |= set(self._families.get(family, ()))
        found = [self._record(id) for id in sorted(ids)[:MAX_FAMILY]]
        return [each for each in found if each is not None and each.family == family]

    def holds(self, id: str) -> bool:
        """Whether a tier has something under ``id``, which is not read. Counts as no lookup."""
        kept = self._memory.peek(checked_id(id)) is not None
        kept = kept or (self._disk is not None and self._disk.holds(id))
        return kept or id in self._seeds_by_id()

    def is_empty(self) -> bool:
        """Whether there is no entry but seeds. Counts as no lookup."""
        return not self._memory.sizes()[0] and (self._disk is None or self._disk.is_empty())

    def _record(self, id: str) -> PlanRecord | None:
        kept = self._memory.peek(id)
        if kept is not None:
            return from_json(kept.text)
        found: tuple[Hit, bytes] | Miss = Miss("absent", "")
        if self._disk is not None:
            found = self._disk.read(id, blob=False)
        if isinstance(found, Miss) and id in self._seeds_by_id():
            found = self._from_seed(id)
        return None if isinstance(found, Miss) else found[0].record

    @contextmanager
    def building(self, id: str) -> Iterator[None]:
        """Hold the right to build entry ``id``, alone among all threads and processes.

        Look again once it is held: who held it before may have built the entry. Not reentrant.
        :class:`LockTimeout` when it is not had in time. Where the directory cannot be used it
        holds among the threads of this process alone.
        """
        with self._building.hold(checked_id(id), self._lock_timeout_s):
            lock = None if self._disk is None else self._disk.lock(id, self._lock_timeout_s)
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
            self._journal.count(id, found)
            return found
        with ExitStack() as stack:
            try:
                stack.enter_context(self.building(id))
            except LockTimeout as error:  # its holder may be stopped: better built twice than never
                self._journal.fault(error, "a plan is built beside another builder")
            else:
                found = self._look_up(id)
            self._journal.count(id, found)
            if isinstance(found, Hit) and accepts(found.record):
                return found
            start = time.perf_counter()
            record, blob = build()
            self._build_s += time.perf_counter() - start
            self._journal.add("built")
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
        for entry in () if self._disk is None else self._disk.scan(look_only=look_only):
            if entry.record is not None:
                seen.add(entry.id)
            yield entry
        for id, kept in [item for item in self._memory.items() if item[0] not in seen]:
            seen.add(id)
            record = from_json(kept.text)
            made_s = age_s(record, self._clock())
            blob_bytes = len(kept.blob or b"")
            yield Entry(id, "memory", None, record, len(kept.text), blob_bytes, made_s)
        for id, path in self._seeds_by_id().items():
            if id in seen:
                continue
            found = self._from_seed(id)
            if isinstance(found, Miss):
                yield Entry(id, "seed", str(path), None, 0, 0, 0.0, found.detail)
            else:
                hit, text = found
                made_s = age_s(hit.record, self._clock())
                yield Entry(id, "seed", str(path), hit.record, len(text), 0, made_s)

    def check(self, id: str) -> Check:
        """Read entry ``id`` again where it is kept: on disk, else a seed, else in memory.

        Looks at all that :meth:`get` does, and that nobody else may write to its files and folders.
        Counts as no lookup, moves nothing, and raises for no fault, also in a strict store.
        """
        checked_id(id)
        found = None if self._disk is None else self._disk.check(id)
        if found is not None:
            return found
        if id in self._seeds_by_id():
            try:
                return Check("seed", self._read_seed(id)[0], None)
            except (OSError, RecordError) as error:
                return Check("seed", None, None, str(error))
        kept = self._memory.peek(id)
        if kept is None:
            return Check(None, None, None, f"no entry {id}")
        return Check("memory", from_json(kept.text), kept.blob)

    def check_directory(self) -> None:
        """Raise OSError where the directory is there and cannot be used, in a strict store or not.

        A folder of entries in it is not looked at; :meth:`scan` tells of one that cannot be used.
        """
        if self._disk is not None:
            self._disk.check_folders()

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
                named.add(blob_path(Path(entry.path), entry.record))
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
        if self._disk is not None:
            self._disk.remove_left_over(named)
        gone = [entry for entry in removed if self.remove(entry.id)]
        if self._disk is not None:
            self._disk.clear_families()
        return gone

    def remove(self, id: str) -> bool:
        """Forget entry ``id`` in memory and on disk; whether there was one."""
        found = self._memory.pop(checked_id(id))
        return (self._disk is not None and self._disk.remove(id)) or found

    def other_schemas(self) -> list[SchemaFolder]:
        """The folders of other schema versions in the directory, older ones first.

        A link to a folder is none.
        """
        return [] if self._disk is None else self._disk.other_schemas()

    def remove_schema(self, version: int) -> bool:
        """Remove the folder of another schema version with all that is in it; whether it is gone.

        Not if it, or something in it, is another user's; links are removed, never followed.
        ValueError for this program's own version.
        """
        if version == SCHEMA_VERSION:
            raise ValueError(f"schema {version} is the one in use: prune removes entries of it")
        return self._disk is not None and self._disk.remove_schema(version)

    def clear_memory(self) -> None:
        """Forget what is in memory; the disk keeps its entries."""
        self._memory.clear()

    def stats(self) -> Stats:
        """The counters as they stand."""
        counts = self._journal.counts()
        entries, size_bytes, evictions = self._memory.sizes()
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
            writes=counts["writes"],
            write_failures=counts["write_failures"],
            quarantined=counts["quarantined"],
            blobs_rejected=counts["blobs_rejected"],
            built=counts["built"],
            build_ms=self._build_s * 1e3,
            load_ms=self._load_s * 1e3,
        )

    @property
    def quarantine(self) -> Path | None:
        """The folder that damaged files are moved into."""
        return None if self._disk is None else self._disk.quarantine

    # -- lookup --------------------------------------------------------------------------------

    def _look_up(self, id: str) -> Hit | Miss:
        kept = self._memory.get(checked_id(id))
        if kept is not None:
            return Hit(from_json(kept.text), kept.blob, "memory")
        start = time.perf_counter()
        absent = Miss("absent", f"no entry {id}")
        found = absent if self._disk is None else self._disk.read(id)
        if isinstance(found, Miss) and id in self._seeds_by_id():
            seed = self._from_seed(id)
            found = seed if isinstance(seed, tuple) or found.reason == "absent" else found
        self._load_s += time.perf_counter() - start
        if isinstance(found, Miss):
            return found
        hit, text = found
        self._memory.put(id, Kept(text, hit.blob))
        return hit

    def _seeds_by_id(self) -> dict[str, Path]:
        if self._seed_paths is None:
            paths = [] if self._seeds is None else sorted(self._seeds.glob("*.json"))
            paths += [] if self._seeds is None else sorted(self._seeds.glob("*/*.json"))
            self._seed_paths = {path.stem: path for path in paths if is_id(path.stem)}
        return self._seed_paths

    def _families_of_seeds(self) -> dict[str, list[str]]:
        """The ids of seeds by family, as the files beside them say."""
        if self._seed_families is None:
            found: dict[str, list[str]] = {}
            paths = [] if self._seeds is None else sorted(self._seeds.glob(f"*/{SEED_FAMILIES}"))
            for path in paths:
                try:
                    listed = json.loads(path.read_bytes())
                    for family, ids in listed.items():
                        found.setdefault(family, []).extend(id for id in ids if is_id(id))
                except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
                    fault = RecordError(f"{path.name}: {error}")
                    self._journal.fault(fault, "seeds are not listed by family")
            self._seed_families = found
        return self._seed_families

    def seed_steps(self) -> tuple[SeedSteps, ...]:
        """What the files beside the seeds list."""
        if self._seed_steps is None:
            found = []
            paths = [] if self._seeds is None else sorted(self._seeds.glob(f"*/{SEED_STEPS}"))
            for path in paths:
                try:
                    found.append(SeedSteps.of(path.read_bytes()))
                except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
                    fault = RecordError(f"{path.name}: {error}")
                    self._journal.fault(fault, "seeds are not listed by step")
            self._seed_steps = tuple(found)
        return self._seed_steps

    def _from_seed(self, id: str) -> tuple[Hit, bytes] | Miss:
        try:
            record, text = self._read_seed(id)
            return Hit(record, None, "seed"), text
        except (OSError, RecordError) as error:
            self._journal.fault(error, "a seed is left out")
            return Miss("corrupt", f"seed {id}.json: {error}")

    def _read_seed(self, id: str) -> tuple[PlanRecord, bytes]:
        with open(self._seeds_by_id()[id], "rb") as stream:
            text = stream.read(MAX_RECORD_BYTES + 1)
        return record_of(id, text), text


_stores: weakref.WeakSet[PlanStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
