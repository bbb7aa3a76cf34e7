"""plans_cache: stored plan choices and pooled workspaces, on the standard library alone."""

from .entries import Check, Entry, Hit, Miss, SchemaFolder, Stats
from .lock import LockTimeout
from .record import (
    SCHEMA_VERSION,
    BlobRef,
    Candidate,
    PlanRecord,
    RecordError,
    StepRecord,
    entry_id,
    from_json,
)
from .store import PlanStore

__all__ = [
    "SCHEMA_VERSION",
    "BlobRef",
    "Candidate",
    "PlanRecord",
    "RecordError",
    "StepRecord",
    "entry_id",
    "from_json",
    "Check",
    "Entry",
    "Hit",
    "Miss",
    "PlanStore",
    "SchemaFolder",
    "Stats",
    "LockTimeout",
]
