"""``cudnngraph check``: is what cuDNN offers on this GPU right? For a new GPU, or new versions.

Every engine that the library offers for a spread of graphs is built and checked in processes of
their own. What is wrong is barred on this GPU from then on. Exit codes: 0 when nothing is wrong, 1
when something is, or there is no GPU, 2 for a call that makes no sense, 130 when it is interrupted;
the same call then goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..backend import found_bad
from ..explain.text import clean
from ..select.progress import progress_bar
from ..sweep import run as sweep
from .records import UsageError
from .table import print_table

JSON_SCHEMA = 1
"""Of the object that ``--json`` prints; raised when a field goes or changes its meaning."""

SHOWN = 50  # rows of the table
_COLUMNS = ["status", "engine", "graph", "what is wrong"]
_STYLES = {"wrong": "bold red", "fault": "bold red"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``check`` and its arguments."""
    parser = subparsers.add_parser(
        "check",
        help="look for plans that are wrong on this GPU, and bar them",
        description="Build and check every engine that cuDNN offers for a spread of graphs, in "
        "processes of their own, and bar what is wrong on this GPU with these versions. Results "
        "are kept as they come: a second call goes on where the first was stopped.",
        epilog="Exit code: 0 when nothing is wrong; 1 when something is, or there is no GPU; 2 for "
        "a call that makes no sense; 130 when it is interrupted.",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help="a small spread of graphs, in minutes (the default)"
    )
    size.add_argument("--full", action="store_true", help="every pattern and size, in hours")
    parser.add_argument(
        "--only", metavar="PATTERN", help="the patterns alone that have this in their name"
    )
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="stop after so long, to go on another time"
    )
    parser.add_argument("--again", action="store_true", help="forget the results that are there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Sweep, bar what is wrong, and print what was found."""
    if args.limit is not None and not 0 < args.limit < float("inf"):
        raise UsageError(f"--limit {args.limit:g}; expected seconds over 0")
    if not torch.cuda.is_available():
        print("error: torch sees no CUDA device, there is nothing to check", file=sys.stderr)
        return 1
    start = time.monotonic()
    todo = list(sweep.tasks(full=args.full, only=args.only))
    if not todo:
        mode = "" if args.full else " quick"
        raise UsageError(f"--only {args.only!r}: no{mode} pattern has that in its name")
    index = torch.cuda.current_device()
    environment = found_bad.environment(index)
    store = found_bad.findings(index)
    if args.again:
        store.clear()
    rows = store.results()
    if not rows:
        store.add({"environment": environment})
    results = sweep.Results.of(rows)
    found = Found(args, environment, str(store.path), todo, results, start)
    deadline = None if args.limit is None else start + args.limit
    try:
        with progress_bar("checking") as tell:
            sweep.run(todo, sweep.OnGpu(index), store, results, deadline=deadline, tell=tell)
    except KeyboardInterrupt:
        print(f"\ninterrupted: {found.how_to_go_on()}", file=sys.stderr)
        return 130  # 128 + SIGINT, as of a program that the signal ends
    finally:
        found.barred = sweep.write_known_bad(
            store, results, environment, mode=found.mode, only=args.only, complete=found.complete
        )
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        found.print()
    return 0 if found.right else 1


@dataclass
class Found:
    """The findings of a call, for the graphs that it was for."""

    args: argparse.Namespace
    environment: Mapping[str, str]
    path: str
    todo: Sequence[sweep.Task]
    results: sweep.Results
    start: float
    barred: tuple[int, int] = (0, 0)

    @property
    def mode(self) -> str:
        """The mode of the check by the graphs it covers: full or quick."""
        return "full" if self.args.full else "quick"

    @property
    def checked(self) -> list[sweep.Place]:
        """The steps that are at an end."""
        return [task.place for task in self.todo if task.place in self.results.done]

    @property
    def complete(self) -> bool:
        """Whether all of them are."""
        return len(self.checked) == len(self.todo)

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of plans of each status."""
        return self.results.counts(task.place for task in self.todo)

    @property
    def right(self) -> bool:
        """Whether nothing is wrong, as far as it was checked."""
        counts = self.counts
        return not any(counts[status] for status in (*sweep.BAD, "failed"))

    @property
    def bad(self) -> list[sweep.Row]:
        """The wrong plans."""
        return self.results.bad(task.place for task in self.todo)

    def how_to_go_on(self) -> str:
        """For people."""
        words = ["cudnngraph", "check", f"--{self.mode}"]
        words += ["--only", self.args.only] if self.args.only else []
        return (
            f"{len(self.checked)} of {len(self.todo)} graphs are checked; "
            f"`{shlex.join(words)}` goes on from there"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        places = [task.place for task in self.todo]
        refused = sum("refused" in self.results.done.get(place, {}) for place in places)
        steps, patterns = self.barred
        return {
            "schema": JSON_SCHEMA,
            "environment": dict(self.environment),
            "mode": self.mode,
            "only": self.args.only,
            "complete": self.complete,
            "right": self.right,
            "seconds": round(time.monotonic() - self.start, 1),
            "graphs": {"all": len(places), "checked": len(self.checked), "refused": refused},
            "counts": self.counts,
            "wrong": [_entry(row) for row in self.bad],
            "known_bad": {"file": self.path, "plans": steps, "patterns": patterns},
        }

    def print(self) -> None:
        """A table of what is wrong, and lines that say what was done."""
        bad = self.bad
        if bad:
            print_table(_COLUMNS, [_shown(row) for row in bad[:SHOWN]], styles=_STYLES)
        if len(bad) > SHOWN:
            print(f"and {len(bad) - SHOWN} more, which --json lists")
        counts = ", ".join(f"{n} {status}" for status, n in self.counts.items() if n)
        if not self.complete:
            print(f"stopped after {self.args.limit:g} s: {self.how_to_go_on()}")
        versions = ", ".join(f"{name} {value}" for name, value in self.environment.items())
        print(f"{len(self.checked)} graphs on {versions}")
        print(f"plans: {counts or 'none was offered'}")
        steps, patterns = self.barred
        if steps or patterns:
            engines = f", and {patterns} times an engine for a whole pattern" if patterns else ""
            print(f"barred on this GPU from now on: {steps} plans{engines} ({self.path})")


def _entry(row: sweep.Row) -> dict[str, Any]:
    """One wrong plan as JSON data."""
    return {
        "graph": row.get("graph"),
        "pattern": row.get("pattern"),
        "step": row["step"],
        "engine": row["engine"],
        "knobs": dict(row["knobs"]),
        "allow_tf32": row["tf32"],
        "status": row["status"],
        "reason": row.get("reason", ""),
        "error": row.get("error"),
        "bound": row.get("bound"),
    }


def _shown(row: sweep.Row) -> list[str]:
    knobs = " ".join(f"{name}={value}" for name, value in row["knobs"])
    engine = f"{row['engine']} ({knobs})" if knobs else str(row["engine"])
    return [row["status"], clean(engine), clean(str(row.get("graph"))), clean(row["reason"])]
