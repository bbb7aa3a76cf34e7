"""Records in a file, for a fleet: one JSON object on each line, nothing of which is executed.

The first line is :data:`HEAD`. Then comes each record, as ``plans_cache.record`` writes and checks
it; behind a record may stand its serialized plans, in base64. Those hold device code, so they are
left out, and dropped again on the way in, unless the user says that the source is trusted. The id
of an entry is computed from the record; no name in the file is used for anything.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from plans_cache import Hit, PlanRecord, PlanStore, RecordError, from_json
from plans_cache.record import MAX_RECORD_BYTES, Components
from plans_cache.store import MAX_BLOB_BYTES, SEED_FAMILIES, SeedSteps

from ..cache.fastest import listed_steps
from ..device import files
from ..explain.text import clean
from .records import CacheError, Stored
from .verify import legal_steps, policy_of

HEAD = b'{"cudnngraph_plans":1}'
MAX_FILE_BYTES = 4 << 30
_CLOCKS_DIFFER_S = 86400.0  # those of the machines of a fleet, at most
_BLOB = b'{"blob":"'
_BLOB_END = b'"}'
_MAX_BLOB_LINE_BYTES = len(_BLOB) + -(-MAX_BLOB_BYTES // 3) * 4 + len(_BLOB_END)


# -- out -------------------------------------------------------------------------------------------


def export(store: PlanStore, entries: Sequence[Stored], file: Path, with_blobs: bool) -> int:
    """Write ``entries`` into ``file``; how many went with a blob."""
    blobs = 0
    try:
        with files.writing(file) as stream:
            stream.write(HEAD + b"\n")
            for entry in entries:
                blob = store.check(entry.id).blob if with_blobs else None
                body = json.loads(entry.record.with_blob(blob).to_json())
                line = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
                stream.write(line.encode() + b"\n")
                if blob is not None:
                    stream.write(_BLOB + base64.b64encode(blob) + _BLOB_END + b"\n")
                    blobs += 1
    except OSError as error:
        raise CacheError(f"{file} cannot be written: {error.strerror or error}") from None
    return blobs


def export_seeds(entries: Sequence[Stored], folder: Path, *, steps_alone: bool = False) -> int:
    """Write records as the package ships them, ``<folder>/<gpu>/<id>.json``; how many.

    Without serialized plans, which are never taken from a seed, and without candidates that were
    neither measured nor taken. ``<folder>/<gpu>/families.json`` lists those that were measured by
    family, and ``<folder>/<gpu>/steps-<environment>.json`` what was chosen for each of their steps,
    with the ones that were there before. With ``steps_alone`` only that list is written.
    """
    families: dict[Path, dict[str, set[str]]] = {}
    steps: dict[Path, SeedSteps] = {}
    for entry in entries:
        place = folder / seed_folder(entry.gpu)
        try:
            place.mkdir(parents=True, exist_ok=True)
            if not steps_alone:
                record = _of_note(entry.record.with_blob(None))
                files.write(place / f"{entry.id}.json", record.to_json())
            if entry.record.family is None:
                continue
            if not steps_alone:
                file = place / SEED_FAMILIES
                listed = families.setdefault(file, _listed(file))
                listed.setdefault(entry.record.family, set()).add(entry.id)
            made = SeedSteps(entry.record.env, _steps_of(entry.record))
            file = place / made.file
            steps.setdefault(file, _of_file(file, made.env)).choices.update(made.choices)
        except OSError as error:
            raise CacheError(f"{place} cannot be written: {error.strerror or error}") from None
    texts = {
        file: json.dumps({f: sorted(listed[f]) for f in sorted(listed)}, indent=1) + "\n"
        for file, listed in families.items()
    }
    texts |= {file: made.to_json() for file, made in steps.items()}
    for file, text in texts.items():
        try:
            files.write(file, text)
        except OSError as error:
            raise CacheError(f"{file} cannot be written: {error.strerror or error}") from None
    return len(entries)


def _of_note(record: PlanRecord) -> PlanRecord:
    """A record with the candidates of each step that were measured or taken."""
    steps = tuple(
        replace(
            step,
            candidates=tuple(
                each for each in step.candidates if each.accepted or each.time_us is not None
            ),
        )
        for step in record.steps
    )
    return replace(record, steps=steps)


def _listed(file: Path) -> dict[str, set[str]]:
    """The ids by family that a file lists; none if there is no such file, or another's."""
    try:
        found = json.loads(file.read_text())
        return {family: set(ids) for family, ids in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _of_file(file: Path, env: Components) -> SeedSteps:
    """The steps that a file lists for an environment; none without such a file, or in another's."""
    try:
        found = SeedSteps.of(file.read_bytes())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return SeedSteps(env, {})
    return found if found.env == env else SeedSteps(env, {})


def _steps_of(record: PlanRecord) -> dict[str, Any]:
    """How a record's steps are settled; none if it does not fit its graph any more."""
    _, legal, steps = legal_steps(record)
    if legal is None or not steps:
        return {}
    return listed_steps(record, legal, steps, policy_of(record))


def seed_folder(gpu: str) -> str:
    """ "NVIDIA H200" → "nvidia-h200"; a name that is safe in a path, whatever the GPU's is."""
    return re.sub("[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unknown"


# -- in --------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Outcome for the records of a file, as lists of ids; ``problems`` says what was refused."""

    new: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # what is here is newer, or as old
    blobs: int = 0
    blobs_dropped: int = 0
    problems: list[str] = field(default_factory=list)


def import_(
    store: PlanStore, file: Path, *, trust_blobs: bool = False, replace: bool = False
) -> Report:
    """Put the records of ``file`` into ``store``. A record that is none is reported and left out.

    Entries of the store stay if they are as new or newer, unless ``replace``. A time in the future
    counts as none: such a record could block all later ones.
    """
    report = Report()
    try:
        with open(file, "rb") as stream:
            _import(store, stream, report, trust_blobs, replace)
    except OSError as error:
        raise CacheError(f"{file} cannot be read: {error.strerror or error}") from None
    return report


def _import(
    store: PlanStore, stream: BinaryIO, report: Report, trust_blobs: bool, replace: bool
) -> None:
    if stream.readline(len(HEAD) + 2).rstrip() != HEAD:
        raise CacheError("not a file of plans: its first line is not " + HEAD.decode())
    waiting: PlanRecord | None = None  # for the blob that may follow it
    for number, line, whole in _lines(stream, trust_blobs):
        if line.startswith(_BLOB):
            if waiting is None:
                report.problems.append(f"line {number}: a blob without a record before it")
                continue
            blob = None
            if not trust_blobs:
                report.blobs_dropped += 1
            else:
                blob, problem = _checked_blob(line if whole else b"", waiting)
                if problem:
                    report.problems.append(f"line {number}: {problem}; the record is kept")
            _put(store, waiting, blob, report, replace)
            waiting = None
            continue
        if waiting is not None:
            _put(store, waiting, None, report, replace)
            waiting = None
        if not whole:
            report.problems.append(f"line {number}: over {MAX_RECORD_BYTES} bytes long")
            continue
        try:
            waiting = from_json(line)
        except RecordError as error:
            report.problems.append(f"line {number}: {clean(str(error))}")
    if waiting is not None:
        _put(store, waiting, None, report, replace)


def _lines(stream: BinaryIO, blobs: bool) -> Iterator[tuple[int, bytes, bool]]:
    """Number, beginning, and whether that is all of it, of each line that is not empty.

    A line is held in memory up to the length of a record, or of a blob where those are wanted.
    """
    number, read = 1, len(HEAD)
    while line := stream.readline(MAX_RECORD_BYTES + 2):
        number += 1
        if blobs and line.startswith(_BLOB) and not line.endswith(b"\n"):
            line += stream.readline(_MAX_BLOB_LINE_BYTES + 1 - len(line))
        read += len(line)
        limit = _MAX_BLOB_LINE_BYTES if line.startswith(_BLOB) else MAX_RECORD_BYTES
        tail = line
        while tail and not tail.endswith(b"\n"):
            tail = stream.readline(1 << 20)
            read += len(tail)
            if read > MAX_FILE_BYTES:
                break
        if read > MAX_FILE_BYTES:
            raise CacheError(f"the file is over {MAX_FILE_BYTES >> 30} GiB long")
        line, ended = line.rstrip(b"\r\n"), line.endswith(b"\n") or not tail
        if line:
            yield number, line, ended and len(line) <= limit


def _checked_blob(line: bytes, record: PlanRecord) -> tuple[bytes | None, str]:
    """The blob of a line if it is the one that ``record`` describes, and what is wrong with it."""
    if not line.endswith(_BLOB_END):
        return None, "a blob that is cut short or too long"
    try:
        blob = base64.b64decode(line[len(_BLOB) : -len(_BLOB_END)], validate=True)
    except binascii.Error:
        return None, "a blob that is not in base64"
    if record.blob is None or record.with_blob(blob).blob != record.blob:
        return None, "a blob that is not the one its record describes"
    return blob, ""


def _put(
    store: PlanStore, record: PlanRecord, blob: bytes | None, report: Report, replace: bool
) -> None:
    record = record.with_blob(None)
    found = store.get(record.id)
    here = found.record.with_blob(None) if isinstance(found, Hit) else None
    has_blob = isinstance(found, Hit) and found.blob is not None
    if here is not None and here == record and (blob is None or has_blob):
        report.same.append(record.id)
        return
    if here is not None and here != record and _made(here) >= _made(record) and not replace:
        report.kept.append(record.id)
        return
    if not store.put(record, blob):
        report.problems.append(f"{record.id}: could not be written")
        return
    (report.new if here is None else report.replaced).append(record.id)
    report.blobs += blob is not None


def _made(record: PlanRecord) -> float:
    """The time a record was made; 0 if it lies in the future."""
    return record.created if record.created <= time.time() + _CLOCKS_DIFFER_S else 0.0
