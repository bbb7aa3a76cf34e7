"""``cudnngraph plan-dump``: the plans that are kept, as a table, in full, or as a picture.

Reads records alone: it needs neither a GPU nor the cuDNN library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plans_cache import Candidate, PlanRecord, StepRecord

from ..cache.codec import IMPORTED
from ..device import files
from ..errors import NotSupported
from ..explain import draw
from ..explain.text import age_text, bytes_text, clean, ops_of, plan_text, time_text
from ..kernels import patterns
from ..kernels.source import own_part
from ..rewrite.annotate import INSTEAD
from . import records
from .records import COLUMNS, FIELDS, CacheError, Stored, UsageError, parse_filter
from .table import plain_table, print_table
from .verify import check_graph

JSON_SCHEMA = 1
"""Of the object that ``--json`` prints; raised when a field goes or changes its meaning."""

_STYLES = {"memory": "green", "disk": "green", "seed": "cyan", "torch": "yellow"}
# What a terminal that is too narrow does without, first come first gone.
_EXPENDABLE = ("layout", "age", "cudnn", "shapes", "dtype", "workspace", "gpu", "tier")
_BAR_WIDTH = 30


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``plan-dump`` and its arguments."""
    parser = subparsers.add_parser(
        "plan-dump",
        help="show the plans that are kept in the cache",
        description="Show the plans that are kept in the cache. Needs no GPU and no cuDNN.",
        epilog=records.EXIT_CODES + " An empty cache is no failure.",
    )
    parser.add_argument("id", nargs="?", metavar="ID", help="the entries whose id begins so")
    parser.add_argument(
        "--full",
        metavar="ID",
        help="one entry with its graph as code, every candidate, generated kernels, and its key",
    )
    parser.add_argument(
        "--graph",
        type=Path,
        metavar="FILE",
        help="draw the entry ID, its steps as boxes, into FILE.svg or FILE.dot",
    )
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="TEXT|FIELD=VALUE",
        help=f"entries that hold the text, or whose field does; repeatable; {', '.join(FIELDS)}, "
        "or a knob (TILE_SIZE=2)",
    )
    parser.add_argument(
        "--sort", choices=tuple(FIELDS), default="id", metavar="FIELD", help="default: id"
    )
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    records.add_seeds(parser, "an ID or a filter")
    records.add_directory(parser)


def run(args: argparse.Namespace) -> int:
    """Print what was asked for; see the parser's epilog for the exit code."""
    conditions = [parse_filter(text) for text in args.filter]
    if args.graph is not None and (args.id is None or args.graph.suffix not in draw.FORMATS):
        raise UsageError("--graph needs an ID, and a file that ends in .svg or .dot")
    if args.full is not None and (args.id is not None or args.graph is not None):
        raise UsageError("--full takes the ID itself, and no other")
    place = records.directory(args)
    asked = args.full is not None or args.id is not None or bool(args.filter)
    seeds = asked if args.seeds is None else args.seeds
    found, damaged = records.scan(records.open_store(place, seeds=seeds))
    records.print_damaged(damaged)
    code = 1 if damaged else 0
    if args.full is not None:
        _print_full(records.find(found, args.full.lower()), args.json)
        return code
    if args.graph is not None:
        _draw(records.find(found, args.id.lower()), args.graph)
        return code
    if args.id is not None:
        conditions.append(lambda entry: entry.id.startswith(args.id.lower()))
    shown = [entry for entry in found if all(holds(entry) for holds in conditions)]
    shown.sort(key=lambda entry: entry.id)
    shown.sort(key=FIELDS[args.sort].order, reverse=args.reverse)
    if args.json:
        body = {
            "schema": JSON_SCHEMA,
            "directory": str(place),
            "entries": [entry.to_dict() for entry in shown],
            "damaged": [{"id": e.id, "path": e.path, "problem": e.problem} for e in damaged],
        }
        print(json.dumps(body, indent=2))
    elif shown:
        _print_table(shown)
        print(_count(shown, len(found), place))
    else:
        what = "matches" if conditions and found else "is"
        more = "; --seeds lists those that ship with the package" if args.seeds is None else ""
        print(f"no plan {what} in {place}{'' if asked else more}")
    return 1 if conditions and not shown else code


# -- the table -------------------------------------------------------------------------------------


def _print_table(shown: Sequence[Stored]) -> None:
    rows = [[FIELDS[name].text(entry) for name in COLUMNS] for entry in shown]
    print_table(COLUMNS, rows, styles=_STYLES, expendable=_EXPENDABLE)


def _count(shown: Sequence[Stored], total: int, place: Path) -> str:
    size = sum(entry.entry.size_bytes for entry in shown)
    of = f" of {total}" if len(shown) < total else ""
    return f"{len(shown)}{of} plan{'s' * (total != 1)}, {bytes_text(size)}, in {place}"


# -- one entry -------------------------------------------------------------------------------------


def _print_full(entry: Stored, as_json: bool) -> None:
    record = entry.record
    if as_json:
        body: dict[str, Any] = {
            "schema": JSON_SCHEMA,
            "entry": entry.to_dict(),
            "record": json.loads(record.to_json()),
        }
        print(json.dumps(body, indent=2))
        return
    stored = entry.entry
    blob = f", blob {bytes_text(stored.blob_bytes)}" if stored.blob_bytes else ", no blob"
    print(f"{entry.id}")
    print(clean(record.summary))
    print(f"{entry.gpu}, cuDNN {entry.cudnn}, frontend {entry.frontend}")
    age = f"{age_text(stored.age_s)} old"
    if stored.tier == "disk":
        age += f", used {age_text(stored.unused_s)} ago"
    print(f"{stored.tier}, {age}, {bytes_text(stored.record_bytes)}{blob}")
    print(f"workspace {bytes_text(record.workspace_bytes)}, time {time_text(record.time_us)}")
    for name, what in ((INSTEAD, "rewritten"), (IMPORTED, "its model imported")):
        if record.extra.get(name):
            print(clean(f"{what} by what was measured: {json.dumps(record.extra[name])}"))
    print()
    print("\n".join(clean(line) for line in record.graph.split("\n")))
    sources = _sources(record)
    for number, step in enumerate(record.steps, 1):
        print(f"\nstep {number} of {len(record.steps)}: {' → '.join(ops_of(step))}")
        print(f"  {plan_text(step)}", end=", ")
        print(f"workspace {bytes_text(step.workspace_bytes)}, time {time_text(step.time_us)}")
        if step.candidates:
            text = plain_table(["", "time", "", "workspace", "candidate", "reason"], _rows(step))
            print("\n".join(f"  {line}".rstrip() for line in text.splitlines()))
        for line in sources.get(number, "").splitlines():
            print(f"  {line}")
    for title, pairs in (("key", record.key), ("environment", record.env)):
        print(f"\n{title} {(record.key_digest if title == 'key' else record.env_digest)[:16]}")
        for name, value in pairs:
            print(f"  {clean(name)}: {clean(value)}")
    print("\nversions " + ", ".join(f"{clean(n)} {clean(v)}" for n, v in record.versions.items()))


def _sources(record: PlanRecord) -> dict[int, str]:
    """The own parts of the generated kernels of a record, by the number of the step."""
    found: dict[int, str] = {}
    if any(step.kind == "kernel" for step in record.steps):
        for number, step in enumerate(check_graph(record)[1], 1):
            if step.kind == "kernel" and step.choice is not None:
                with contextlib.suppress(NotSupported):
                    found[number] = own_part(patterns.source(step.spec, step.choice).text)
    return found


def _rows(step: StepRecord) -> list[list[str]]:
    """Candidates that were measured, fastest first, then the others in their own order."""
    ordered = sorted(step.candidates, key=lambda c: (c.time_us is None, c.time_us or 0.0))
    slowest = max((c.time_us for c in step.candidates if c.time_us is not None), default=0.0)
    return [_row(candidate, slowest) for candidate in ordered]


def _row(candidate: Candidate, slowest_us: float) -> list[str]:
    subject = clean(candidate.subject)
    if candidate.engine is not None and str(candidate.engine) not in subject:
        subject += f" (engine {candidate.engine})"
    need = candidate.workspace_bytes
    return [
        "taken" if candidate.accepted else "",
        time_text(candidate.time_us),
        bar(candidate.time_us, slowest_us),
        "-" if need is None else bytes_text(need),
        subject,
        clean(candidate.reason),
    ]


def bar(time_us: float | None, slowest_us: float) -> str:
    """A bar as long as ``time_us`` is of ``slowest_us``: at least one character, empty for None."""
    if time_us is None or slowest_us <= 0:
        return ""
    return "█" * max(1, round(_BAR_WIDTH * time_us / slowest_us))


def _draw(entry: Stored, file: Path) -> None:
    text = draw.FORMATS[file.suffix](entry.record)
    try:
        files.write(file, text)
    except OSError as error:
        raise CacheError(f"{file} cannot be written: {error.strerror or error}") from None
    told = sys.stderr if files.is_standard_output(file) else sys.stdout
    print(f"{entry.short_id} drawn into {file}", file=told)
