"""Results of the zoo as JSON data: rows, the runs that they are of, and what they come to."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...device import files
from ..measure import Row as Measured
from .ways import WAYS

SCHEMA = 1
"""Of the file; raised when a field goes or changes its meaning."""

STATUSES = ("missing", "begun", "failed", "done")  # the later one stands if runs are merged
SUITE = "zoo"

Row = dict[str, Any]


@dataclass
class Results:
    """Rows by the names of their models. ``runs`` say when, where and by which call they were
    measured; a row has the number of its run. All are of one device, ``tiny`` or real."""

    device: str
    tiny: bool
    runs: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON; runs that have no row are left out."""
        used = sorted({row["run"] for row in self.rows.values()})
        place = {run: at for at, run in enumerate(used)}
        return {
            "schema": SCHEMA,
            "device": self.device,
            "tiny": self.tiny,
            "runs": [self.runs[run] for run in used],
            "rows": [{**row, "run": place[row["run"]]} for row in self.rows.values()],
        }

    def save(self, path: Path) -> None:
        """Write everything to a file."""
        files.write(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def merge(self, other: Results) -> None:
        """Take rows of other runs. The row of a model that is further stands, of two that are done
        the one with more ways that were timed, else the other's.

        Raises ValueError for another device or size.
        """
        for name in ("device", "tiny"):
            one, two = getattr(self, name), getattr(other, name)
            if one != two:
                raise ValueError(f"the runs differ in {name}: {one} and {two}")
        first = len(self.runs)
        self.runs += other.runs
        for name, row in other.rows.items():
            if name not in self.rows or _rank(row) >= _rank(self.rows[name]):
                self.rows[name] = {**row, "run": row["run"] + first}

    def sort(self, order: Sequence[str]) -> None:
        """Put the rows into the order of the zoo; models that it has no more come last."""
        place = {name: at for at, name in enumerate(order)}
        self.rows = dict(sorted(self.rows.items(), key=lambda row: place.get(row[0], len(place))))


def _rank(row: Row) -> tuple[int, int]:
    timed = sum("us" in way or "errors" in way for way in row["ways"].values())
    return STATUSES.index(row["status"]), timed


def loaded(path: Path) -> Results:
    """The results in a file. Raises ValueError if it has none, or those of another version."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{path} has no results of the zoo of schema {SCHEMA}")
    try:
        rows = {str(row["name"]): dict(row) for row in data["rows"]}
        runs = [dict(run) for run in data["runs"]]
        for row in rows.values():
            if row["status"] not in STATUSES or not 0 <= row["run"] < len(runs):
                raise ValueError(row["name"])
            if not all(isinstance(way, dict) for way in row["ways"].values()):
                raise ValueError(row["name"])
        return Results(str(data["device"]), bool(data["tiny"]), runs, rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} has a row that is none: {error}") from None


# -- what rows come to -----------------------------------------------------------------------------


def timed(rows: Sequence[Row], ours: str) -> list[Measured]:
    """The rows that have a time of ours, the times of all ways under their titles."""
    made = []
    for row in rows:
        times = {
            WAYS[name].title: way["us"]
            for name, way in row["ways"].items()
            if name in WAYS and "us" in way
        }
        if WAYS[ours].title in times:
            title = WAYS[ours].title
            made.append(Measured(SUITE, row["name"], title, "wall", times, dtype=row["dtype"]))
    return made


def our_ways(rows: Sequence[Row]) -> list[str]:
    """Our ways that some row was timed with, the best one first."""
    names = [name for name, way in WAYS.items() if way.ours]
    found = [n for n in names if any("us" in row["ways"].get(n, {}) for row in rows)]
    return found[::-1]


def ratios(rows: Sequence[Row], ours: str, other: str, name: str) -> list[tuple[float, str]]:
    """What another way takes over what ours takes, by rows that have both: a number ``name``."""
    found = []
    for row in rows:
        one, two = (row["ways"].get(way, {}).get(name) for way in (ours, other))
        if one and two:
            found.append((two / one, row["name"]))
    return found


def summarized(ratios: Sequence[tuple[float, str]]) -> tuple[float, float, str]:
    """The geometric mean, the least, and the row of that."""
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios))
    return (mean, *min(ratios))


def warm_starts(rows: Sequence[Row], name: str) -> list[tuple[float, str]]:
    """Seconds until the first result of a process that found the caches filled, by rows."""
    found = ((warm_start(row["ways"].get(name, {})), row["name"]) for row in rows)
    return [(seconds, row) for seconds, row in found if seconds is not None]


def warm_start(way: Mapping[str, Any]) -> float | None:
    """Seconds until the first result with filled caches; None if it is not known. The way has to
    be the first of its family in the process: a later one finds the libraries loaded."""
    seconds: float | None = way.get("first_s")
    return seconds if way.get("filled") and way.get("loads") else None


def worst_error(way: Mapping[str, Any]) -> tuple[float, float | None] | None:
    """The largest relative error of a way's results, and eager's beside it."""
    errors = way.get("errors")
    return None if not errors else max(((e[0], e[1]) for e in errors), key=lambda pair: pair[0])
