"""PlanRecord ⇄ JSON: what was chosen for one graph in one environment, and why.

A record names its plans as (engine, knobs), never by index, and is data alone: nothing in it is
executed. :func:`from_json` takes a file apart field by field and trusts none of them; what it does
not know it keeps. A checksum over the content tells a damaged file from a whole one. It is no
signature: who may write the file may write any record.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from .fields import (
    Fields,
    Unexpected,
    list_of,
    load,
    named,
    number_up_to,
    optional,
    to_bool,
    to_digest,
    to_integer,
    to_mapping,
    to_natural,
    to_text,
    wrong,
)

SCHEMA_VERSION = 1
MAX_RECORD_BYTES = 4 << 20  # a graph of 50 steps with 40 candidates each takes 1 MiB
FAMILY = "family"  # a field of a record: the entries that are alike have one
MAX_DEPTH = 24  # records nest 6 deep; unknown fields may nest deeper
MAX_CREATED = 253402300799  # the year 9999 ends; seconds since 1970
MAX_TIME_US = 1e12  # 12 days; far enough from the largest float that sums and ratios are finite

Components = tuple[tuple[str, str], ...]


class RecordError(ValueError):
    """A text that is no record, or a record that cannot be written; says what and where."""


# -- the record ------------------------------------------------------------------------------------


def digest(components: Sequence[tuple[str, str]]) -> str:
    """SHA-256 over the named components of a key, in hexadecimal, as ``cudnngraph.ir.key``."""
    return hashlib.sha256(json.dumps(components).encode()).hexdigest()


def entry_id(key_digest: str, env_digest: str) -> str:
    """The id of an entry: SHA-256 over the digests of graph and environment."""
    return hashlib.sha256(json.dumps([key_digest, env_digest]).encode()).hexdigest()


def is_id(text: str) -> bool:
    """Whether ``text`` can be the id of an entry, and so the name of its file."""
    return re.fullmatch("[0-9a-f]{16,128}", text) is not None


def checked_id(text: str) -> str:
    """Return ``text``; raise ValueError if it cannot be an id."""
    if not is_id(text):
        raise ValueError(f"{text!r:.140} is no id: expected 16 to 128 hexadecimal digits")
    return text


StepKind = Literal["cudnn", "kernel", "torch"]


@dataclass(frozen=True)
class Candidate:
    """A way to run a step that was considered: its time, or the reason why it was not taken.

    ``subject`` is text for people. ``engine`` and ``knobs`` name a cuDNN plan; ``engine`` is None
    for anything else (a torch step, the graph as one plan). ``time_us`` is None where nothing was
    measured, ``workspace_bytes`` where it is not known.
    """

    subject: str
    accepted: bool
    reason: str
    engine: int | None = None
    knobs: tuple[tuple[str, int], ...] = ()
    time_us: float | None = None
    workspace_bytes: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRecord:
    """One step of the partition and what runs it.

    ``nodes`` are the names of its nodes in the canonical graph, ``ops`` their ops in the same
    order; ``inputs`` and ``outputs`` pair a tensor's canonical name with its type as short text
    (``f16[32, 64, 56, 56]``). ``engine`` is None for, and only for, a torch step.
    """

    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    kind: StepKind
    engine: int | None
    knobs: tuple[tuple[str, int], ...] = ()
    workspace_bytes: int = 0
    time_us: float | None = None
    candidates: tuple[Candidate, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BlobRef:
    """Size and digest of the serialized plans beside a record."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class PlanRecord:
    """The choice for one graph (``key``) in one environment (``env``).

    ``key`` and ``env`` are named components, each value in JSON. ``summary`` is the graph in one
    line, ``graph`` as code; both are for people. ``created`` is in seconds since 1970. ``blob``
    is set by the store. ``extra`` keeps fields that this version does not know.
    """

    key: Components
    env: Components
    summary: str
    graph: str
    steps: tuple[StepRecord, ...]
    policy: Mapping[str, Any]
    versions: Mapping[str, str]
    created: float
    blob: BlobRef | None = None
    schema: int = SCHEMA_VERSION
    extra: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def key_digest(self) -> str:
        return digest(self.key)

    @cached_property
    def env_digest(self) -> str:
        return digest(self.env)

    @cached_property
    def id(self) -> str:
        return entry_id(self.key_digest, self.env_digest)

    @property
    def family(self) -> str | None:
        """The id of the entries that the program calls alike, None if the record names none."""
        said = self.extra.get(FAMILY)
        return said if isinstance(said, str) and is_id(said) else None

    @property
    def workspace_bytes(self) -> int:
        """The most that one step needs."""
        return max((step.workspace_bytes for step in self.steps), default=0)

    @property
    def time_us(self) -> float | None:
        """The steps' times together, or None where one was not measured."""
        times = [step.time_us for step in self.steps if step.time_us is not None]
        return sum(times) if times and len(times) == len(self.steps) else None

    def to_json(self) -> str:
        """The record as text that :func:`from_json` takes; the same record, the same text.

        Raises :class:`RecordError` when a field holds what a record cannot.
        """
        try:
            body = _record_body(self)
            body["checksum"] = _checksum(body)
            text = json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(f"record cannot be written: {error}") from None
        from_json(text.encode())
        return text

    def with_blob(self, blob: bytes | None) -> PlanRecord:
        """The record as it stands beside ``blob``."""
        if blob is None:
            return self if self.blob is None else replace(self, blob=None)
        return replace(self, blob=BlobRef(len(blob), hashlib.sha256(blob).hexdigest()))


# -- writing ---------------------------------------------------------------------------------------


def _sorted(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in sorted(values)}


def _choice_body(of: Candidate | StepRecord) -> dict[str, Any]:
    return {
        "engine": of.engine,
        "knobs": dict(of.knobs),
        "time_us": of.time_us,
        "workspace_bytes": of.workspace_bytes,
    }


def _candidate_body(candidate: Candidate) -> dict[str, Any]:
    return {
        "subject": candidate.subject,
        "accepted": candidate.accepted,
        "reason": candidate.reason,
        **_choice_body(candidate),
        **_sorted(candidate.extra),
    }


def _step_body(step: StepRecord) -> dict[str, Any]:
    return {
        "kind": step.kind,
        "nodes": step.nodes,
        "ops": step.ops,
        "inputs": dict(step.inputs),
        "outputs": dict(step.outputs),
        **_choice_body(step),
        "candidates": [_candidate_body(candidate) for candidate in step.candidates],
        **_sorted(step.extra),
    }


def _record_body(record: PlanRecord) -> dict[str, Any]:
    blob = record.blob
    return {
        "schema": record.schema,
        "id": record.id,
        "summary": record.summary,
        "created": record.created,
        "graph": record.graph.split("\n"),
        "steps": [_step_body(step) for step in record.steps],
        "policy": _sorted(record.policy),
        "versions": _sorted(record.versions),
        "key_digest": record.key_digest,
        "key": record.key,
        "env_digest": record.env_digest,
        "env": record.env,
        "blob": None if blob is None else {"size_bytes": blob.size_bytes, "sha256": blob.sha256},
        **_sorted(record.extra),
    }


def _checksum(body: Mapping[str, Any]) -> str:
    """Over the content without the checksum itself; white space and escapes do not matter."""
    rest = {name: value for name, value in body.items() if name != "checksum"}
    text = json.dumps(rest, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


# -- reading ---------------------------------------------------------------------------------------


def _component(value: Any) -> tuple[str, str]:
    pair = _TEXTS(value)
    if len(pair) != 2:
        raise Unexpected(f"{len(pair)} texts, expected a name and a value")
    return pair[0], pair[1]


_TEXTS = list_of(to_text)
_NAMED_TEXTS = named(to_text)
_KNOBS = named(to_integer)
_NATURAL_OR_NONE = optional(to_natural)
_CREATED = number_up_to(MAX_CREATED)
_TIME = optional(number_up_to(MAX_TIME_US))


def _candidate(value: Any) -> Candidate:
    take = (fields := Fields(value)).take
    return Candidate(
        subject=take("subject", to_text),
        accepted=take("accepted", to_bool),
        reason=take("reason", to_text),
        engine=take("engine", _NATURAL_OR_NONE),
        knobs=take("knobs", _KNOBS),
        time_us=take("time_us", _TIME),
        workspace_bytes=take("workspace_bytes", _NATURAL_OR_NONE),
        extra=fields.rest,
    )


_CANDIDATES = list_of(_candidate)


def _kind(value: Any) -> StepKind:
    for kind in get_args(StepKind):
        if value == kind:
            found: StepKind = kind
            return found
    raise wrong(value, "'cudnn', 'kernel' or 'torch'")


def _step(value: Any) -> StepRecord:
    take = (fields := Fields(value)).take
    step = StepRecord(
        nodes=take("nodes", _TEXTS),
        ops=take("ops", _TEXTS),
        inputs=take("inputs", _NAMED_TEXTS),
        outputs=take("outputs", _NAMED_TEXTS),
        kind=take("kind", _kind),
        engine=take("engine", _NATURAL_OR_NONE),
        knobs=take("knobs", _KNOBS),
        workspace_bytes=take("workspace_bytes", to_natural),
        time_us=take("time_us", _TIME),
        candidates=take("candidates", _CANDIDATES),
        extra=fields.rest,
    )
    if (step.engine is None) != (step.kind == "torch"):
        raise Unexpected(f"kind '{step.kind}' with engine {step.engine}")
    if len(step.nodes) != len(step.ops):
        raise Unexpected(f"{len(step.nodes)} nodes, {len(step.ops)} ops")
    return step


def _blob(value: Any) -> BlobRef:
    fields = Fields(value)
    ref = BlobRef(fields.take("size_bytes", to_natural), fields.take("sha256", to_digest))
    if fields.rest:
        raise Unexpected(f"unknown field {next(iter(fields.rest))!r:.40}")
    return ref


_COMPONENTS = list_of(_component)
_STEPS = list_of(_step)
_BLOB_OR_NONE = optional(_blob)


def from_json(text: str | bytes) -> PlanRecord:
    """The record that ``text`` holds.

    Raises :class:`RecordError`, which says what is wrong and where, for anything else: a text that
    is too long or nested too deep, a number beyond 64 bits or not finite, a time over
    :data:`MAX_CREATED` or :data:`MAX_TIME_US`, a field that is missing, there twice or of a wrong
    type, another schema, a digest that is not that of its components, a checksum that does not
    match.
    """
    try:
        return _record(load(text, MAX_RECORD_BYTES, MAX_DEPTH))
    except Unexpected as error:
        raise RecordError(f"record{error.where}: {error.message}") from None


def _record(whole: Any) -> PlanRecord:
    fields = Fields(whole)
    schema = fields.take("schema", to_natural)
    if schema != SCHEMA_VERSION:
        raise Unexpected(f"{schema}, expected {SCHEMA_VERSION}").inside(".schema")
    checksum = fields.take("checksum", to_digest)
    try:
        found = _checksum(whole)
    except UnicodeEncodeError:
        raise Unexpected("half of a surrogate pair in a text") from None
    if found != checksum:
        raise Unexpected("does not match the content").inside(".checksum")
    stated = {name: fields.take(name, to_digest) for name in ("id", "key_digest", "env_digest")}
    record = PlanRecord(
        key=fields.take("key", _COMPONENTS),
        env=fields.take("env", _COMPONENTS),
        summary=fields.take("summary", to_text),
        graph="\n".join(fields.take("graph", _TEXTS)),
        steps=fields.take("steps", _STEPS),
        policy=fields.take("policy", to_mapping),
        versions=dict(fields.take("versions", _NAMED_TEXTS)),
        created=fields.take("created", _CREATED),
        blob=fields.take("blob", _BLOB_OR_NONE),
        schema=schema,
        extra=fields.rest,
    )
    for name, value in stated.items():
        if getattr(record, name) != value:
            raise Unexpected("is not that of the components").inside(f".{name}")
    return record
