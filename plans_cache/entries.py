"""The answers of a store: hits, misses, entries, checks, folders of other schemas, counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .record import PlanRecord

USED_S = 86400.0  # the last use is noted once in this time

Tier = Literal["memory", "disk", "seed", "built"]
Reason = Literal["absent", "corrupt", "unreadable", "refused"]


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
    """An entry that :meth:`PlanStore.scan` finds; ``record`` is None where ``problem`` says why.

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
    """The findings of :meth:`PlanStore.check` on an entry where it is kept.

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
    """Counters of a store in this process, and the contents of its memory now."""

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


def age_s(record: PlanRecord, now: float) -> float:
    """Return the seconds since ``record`` was made; 0 where a clock has been set back."""
    return max(0.0, now - record.created)
