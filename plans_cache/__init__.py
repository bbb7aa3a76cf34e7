"""plans_cache: stored plan choices and pooled workspaces, on the standard library alone."""

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

__all__ = [
    "SCHEMA_VERSION",
    "BlobRef",
    "Candidate",
    "PlanRecord",
    "RecordError",
    "StepRecord",
    "entry_id",
    "from_json",
]
