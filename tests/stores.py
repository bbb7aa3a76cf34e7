"""Stores of plan records for tests, by the standard library alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plans_cache import Hit, Miss, PlanRecord, PlanStore
from tests.workers.store_worker import record

NOW = 1_700_000_000.0  # when the records of store_worker were created


def open_store(directory: Path | None, **options: object) -> PlanStore:
    defaults: dict[str, object] = {"seeds": None, "strict": True, "clock": lambda: NOW}
    return PlanStore(directory, **{**defaults, **options})  # type: ignore[arg-type]


def hit(found: Hit | Miss) -> Hit:
    assert isinstance(found, Hit), found
    return found


def miss(found: Hit | Miss) -> Miss:
    assert isinstance(found, Miss), found
    return found


def seeds_with(folder: Path, *records: PlanRecord) -> Path:
    folder.mkdir(parents=True)
    for made in records:
        (folder / f"{made.id}.json").write_text(made.to_json(), encoding="utf-8")
    return folder


def used(directory: Path, number: int, ago_s: float) -> None:
    """Set the time of the last use of an entry."""
    (path,) = directory.rglob(f"{record(number).id}.json")
    if "seeds" not in path.parts:
        os.utime(path, (NOW - ago_s, NOW - ago_s))


ROOT = Path(__file__).resolve().parents[1]


posix = pytest.mark.skipif(os.name != "posix", reason="forks, owners and links are of POSIX")


IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def worker(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.workers.store_worker", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def told(*arguments: object) -> Any:
    """Return what a worker prints, once it has ended well."""
    process = worker(*arguments)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out)


def entry_path(directory: Path, number: int = 1) -> Path:
    id = record(number).id
    return directory / "v1" / id[:2] / f"{id}.json"


def assert_memory_only(store: PlanStore, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """Every call works, from memory; the trouble is told once; nothing is written."""
    for number in (11, 12):
        assert store.put(record(number), b"plan") is False
        found = hit(store.get(record(number).id))
        assert (found.tier, found.blob) == ("memory", b"plan")
    built = store.get_or_build(record(13).id, lambda: (record(13), None))
    assert built.tier == "built"
    assert hit(store.get(record(13).id)).tier == "memory"
    assert store.stats().write_failures == 3
    assert store.stats().writes == 0
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert len(warnings) == 1, warnings
    assert warnings[0].startswith("plans are kept in memory only: ")
    assert why in warnings[0]


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail
