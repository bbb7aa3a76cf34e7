"""``cudnngraph plans …``: why a lookup misses, what differs, what is wrong, what can go.

``path``, ``diff``, ``explain-miss``, ``verify``, ``prune``, ``export``, ``import``. Only ``verify``
uses a GPU, where there is one.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plans_cache import PlanRecord
from plans_cache.measurements import Measurements

from .. import settings
from ..backend import env
from ..cache.codec import env_components
from ..device import files
from ..explain.text import age_text, bytes_text, clean, cudnn_text, plan_text, time_text
from ..graph.builder import Graph
from ..ir.key import Key, diff, graph_key
from ..ir.spec import GraphSpec
from ..runtime.compile import resolve_policy
from . import compare, explain, records, transfer, verify
from .records import CacheError, Stored, UsageError
from .table import print_table

_STYLES = {"ok": "green", "skipped": "yellow", "failed": "bold red"}
_SHOWN = 20  # problems and ids that are listed before they are counted


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``plans`` and its actions."""
    parser = subparsers.add_parser(
        "plans",
        help="look into the plan cache, check it, clear it up, ship it",
        description="Look into the plan cache, check it, clear it up, ship it.",
        epilog=records.EXIT_CODES,
    )
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", required=True, dest="plans_action"
    )

    def add(name: str, help: str, codes: str = records.EXIT_CODES) -> argparse.ArgumentParser:
        action = actions.add_parser(
            name, help=help, description=help[0].upper() + help[1:] + ".", epilog=codes
        )
        records.add_directory(action)
        return action

    add("path", "print the cache directory", "Exit code: 0.")

    action = add(
        "diff",
        "list the components in which two entries differ",
        "Exit code: 0 whether they differ or not; 1 when one is not there; 2 for a wrong call.",
    )
    action.add_argument("a", metavar="A", help="an entry by the beginning of its id")
    action.add_argument("b", metavar="B", help="the other one")

    action = add(
        "explain-miss",
        "say why no stored plan serves a graph: the nearest entry, and what differs",
        "Exit code: 0 when an entry serves every graph; 1 when none does for one of them, or no "
        "entry has such an id; 2 when the file cannot be run or holds no graph.",
    )
    action.add_argument(
        "graph",
        metavar="GRAPH_OR_KEY",
        help="FILE.py[:NAME], which is run as by `cudnngraph explain`, or the beginning of an "
        "entry's id or key, of which the nearest other entry is shown",
    )
    action.add_argument(
        "--tf32",
        action=argparse.BooleanOptionalAction,
        help="compile(allow_tf32=…); by default torch's switches, as compile",
    )
    action.add_argument("--deterministic", action="store_true", help="compile(deterministic=True)")
    action.add_argument("--workspace-limit", type=int, metavar="BYTES", help="compile(…=BYTES)")
    action.add_argument("--fallback", choices=("partition", "error"), default="partition")
    action.add_argument(
        "--kernels",
        action=argparse.BooleanOptionalAction,
        help="compile(kernels=…); by default the setting CUDNNGRAPH_KERNELS, as compile",
    )

    action = add(
        "verify",
        "check every entry: its record, its blob, its graph, and on a GPU what its plans compute",
        "Plans run in processes of their own. A record is told how far off its plans were found, "
        "and where; one with a plan that does not pass is removed, and the plan not taken again by "
        "what is checked. Exit code: 0 when nothing is wrong; 1 when something is; 2 for a wrong "
        "call. Without a GPU, and for entries of another environment, nothing is replayed; the "
        "table says so.",
    )
    action.add_argument("id", nargs="?", metavar="ID", default="", help="only ids that begin so")
    records.add_seeds(action, "an ID")

    action = add(
        "prune",
        "remove entries that are dead, old, or too much",
        "Exit code: 0 when all went well, also when nothing had to go; 1 when an entry could not "
        "be removed; 2 for a wrong call.",
    )
    action.add_argument(
        "--dead-environments",
        action="store_true",
        help="entries of another cuDNN or GPU than --cudnn, --gpu say, or than this machine has "
        "where none is given",
    )
    action.add_argument("--cudnn", type=_version, metavar="VERSION", help="9.19.0 or 91900")
    action.add_argument("--gpu", metavar="NAME", help="as in plan-dump: 'NVIDIA H200'")
    action.add_argument(
        "--older-than", type=_days, metavar="DAYS", help="entries that were made before that"
    )
    action.add_argument(
        "--unused-for",
        type=_days,
        metavar="DAYS",
        help="entries that no process has read from disk since; noted once a day",
    )
    action.add_argument(
        "--max-size",
        type=_size,
        metavar="BYTES",
        help="what was not used for longest, until the rest takes no more; 512K, 64M, 1G",
    )
    action.add_argument(
        "--other-schemas",
        action="store_true",
        help="the folders v0, v2, … of versions of the program that write records in another way; "
        "those versions serve from them",
    )
    action.add_argument("--dry-run", action="store_true", help="only say what would go")

    action = add("export", "write the records into one file, without serialized plans")
    action.add_argument(
        "file",
        type=partial(_file, stream="/dev/stdout"),
        metavar="FILE",
        nargs="?",
        help="the file; - for standard output, where nothing else is printed then",
    )
    action.add_argument(
        "--seeds",
        type=Path,
        metavar="FOLDER",
        help="in place of FILE: each record into FOLDER/<gpu>/<id>.json, as the package ships them",
    )
    action.add_argument(
        "--steps-only",
        action="store_true",
        help="with --seeds: what was chosen for their steps, for other graphs, and no record",
    )
    action.add_argument(
        "--with-blobs", action="store_true", help="with serialized plans, which hold device code"
    )

    action = add(
        "import",
        "take the records of an exported file, each checked field by field",
        "Exit code: 0 when every record was taken or is there already; 1 when one was refused or "
        "the file cannot be read; 2 for a wrong call.",
    )
    action.add_argument(
        "file",
        type=partial(_file, stream="/dev/stdin"),
        metavar="FILE",
        help="the file; - for standard input",
    )
    action.add_argument(
        "--trust-blobs",
        action="store_true",
        help="take serialized plans too; they are code that your GPU will run",
    )
    action.add_argument(
        "--replace", action="store_true", help="also over entries that are as new or newer"
    )


def run(args: argparse.Namespace) -> int:
    """Do one action; see its parser's epilog for the exit code."""
    return ACTIONS[args.plans_action](args)


def _days(text: str) -> float:
    """Days, as seconds."""
    try:
        value = float(text) * 86400
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected days, 0 or more, got '{text}'")
    return value


def _size(text: str) -> int:
    """Bytes, or with K, M, G at the end."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([KMG]?)(?:i?B)?", text, flags=re.IGNORECASE)
    value = math.inf
    if match is not None:
        value = float(match[1]) * 1024.0 ** " KMG".index(match[2].upper() or " ")
    if not value < math.inf:
        raise argparse.ArgumentTypeError(f"expected bytes, like 512K, 64M or 1G, got '{text}'")
    return int(value)


def _version(text: str) -> str:
    """A version of cuDNN as records are shown with."""
    version = cudnn_text(text)
    if not re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", version):
        raise argparse.ArgumentTypeError(
            f"expected a whole version, like 9.19.0 or 91900, got '{text}'"
        )
    return version


def _load(args: argparse.Namespace) -> list[Stored]:
    """The entries of the directory and the seeds; those that are damaged are named."""
    found, damaged = records.scan(records.open_store(records.directory(args), seeds=True))
    records.print_damaged(damaged)
    return found


# -- path, diff, explain-miss ----------------------------------------------------------------------


def _path(args: argparse.Namespace) -> int:
    print(records.directory(args))
    return 0


def _diff(args: argparse.Namespace) -> int:
    found = _load(args)
    a, b = (records.find(found, prefix.lower()) for prefix in (args.a, args.b))
    differences = diff(compare.whole_key(a.record), compare.whole_key(b.record))
    rows = [*compare.rows(differences), *_choices(a.record, b.record)]
    if rows:
        print_table(["component", a.short_id, b.short_id], rows)
    else:
        print(f"{a.short_id} and {b.short_id} do not differ")
    return 0


def _choices(a: PlanRecord, b: PlanRecord) -> list[compare.Row]:
    """Rows for the steps whose plans or times differ."""
    rows = []
    for place in range(max(len(a.steps), len(b.steps))):
        sides = [record.steps[place] if place < len(record.steps) else None for record in (a, b)]
        plans = ["-" if step is None else plan_text(step) for step in sides]
        times = ["-" if step is None else time_text(step.time_us) for step in sides]
        for what, (here, there) in (("plan", plans), ("time", times)):
            if here != there:
                rows.append((f"step {place + 1} {what}", here, there))
    return rows


def here() -> tuple[tuple[str, str], ...] | None:
    """The environment of this machine's current GPU, None without one."""
    if not torch.cuda.is_available():
        return None
    return env_components(env.env_key(torch.cuda.current_device()))


def _explain_miss(args: argparse.Namespace) -> int:
    # An id is hexadecimal, so it is no name of a Python file.
    if records.is_prefix(args.graph.lower()) and not os.path.exists(args.graph):
        return _explain_entry(args)
    graphs = explain.load(args.graph)
    found = _load(args)
    environment = here()
    served = [_explain_graph(graph, args, found, environment) for graph in graphs]
    return 0 if all(served) else 1


def _explain_entry(args: argparse.Namespace) -> int:
    found = _load(args)
    prefix = args.graph.lower()
    same = [entry for entry in found if entry.record.key_digest.startswith(prefix)]
    ids = [entry for entry in found if entry.id.startswith(prefix)]
    if not same and not ids:
        raise CacheError(
            f"no entry's id or key begins with '{prefix}'; to explain what is not there give the "
            "graph itself, as FILE.py:NAME"
        )
    entry = ids[0] if len(ids) == 1 else same[0] if not ids else records.find(found, prefix)
    print(f"{entry.short_id} is in the cache: {_named(entry)}")
    _print_nearest(
        compare.whole_key(entry.record), [other for other in found if other is not entry], True
    )
    return 0


def _explain_graph(
    graph: Graph | GraphSpec,
    args: argparse.Namespace,
    found: Sequence[Stored],
    environment: tuple[tuple[str, str], ...] | None,
) -> bool:
    """Print what serves a graph, or why nothing does; whether something does."""
    spec = graph.spec() if isinstance(graph, Graph) else graph
    options: dict[str, Any] = {
        "allow_tf32": args.tf32,
        "deterministic": args.deterministic,
        "workspace_limit": args.workspace_limit,
        "fallback": args.fallback,
        "kernels": args.kernels,
    }
    key = graph_key(spec, resolve_policy(None, options, spec))
    same = [entry for entry in found if entry.record.key == key.components]
    if environment is None:
        serving = same
    else:
        serving = [entry for entry in same if entry.record.env == environment]
    print(f"graph '{clean(spec.name)}', key {key}: {'hit' if serving else 'miss'}")
    for entry in serving:
        print(f"  {entry.short_id}: {_named(entry)}")
    if environment is None:
        print("  there is no GPU here: environments were not compared")
    if not serving:
        wanted = key if environment is None else compare.with_env(key, environment)
        _print_nearest(wanted, found, environment is not None)
    return bool(serving)


def _named(entry: Stored) -> str:
    return f"{entry.graph}, {entry.gpu}, cuDNN {entry.cudnn}, {entry.entry.tier}"


def _print_nearest(key: Key, others: Sequence[Stored], env: bool) -> None:
    close = compare.nearest(key, others, env=env)
    if close is None:
        print("there is no other entry")
        return
    entry, count = close
    other = compare.whole_key(entry.record) if env else Key(entry.record.key)
    differs = f"it differs in {count} component{'s' * (count != 1)}"
    print(f"the nearest entry is {entry.short_id} ({_named(entry)}); {differs}")
    rows = compare.rows(diff(key, other))
    if rows:
        print_table(["component", "wanted", "stored"], rows)


# -- verify ----------------------------------------------------------------------------------------


def _verify(args: argparse.Namespace) -> int:
    with settings.override(cache_dir=records.directory(args)):  # where plans are rejected
        return _verify_here(args)


def _verify_here(args: argparse.Namespace) -> int:
    seeds = bool(args.id) if args.seeds is None else args.seeds
    store = records.open_store(records.directory(args), seeds=seeds)
    found, damaged = records.scan(store)
    prefix = args.id.lower()
    found = [entry for entry in found if entry.id.startswith(prefix)]
    if args.id and not found:
        raise CacheError(f"no entry's id begins with '{clean(prefix)}'")
    no_gpu = verify.why_no_gpu()
    device = None if no_gpu else torch.cuda.current_device()
    rows, problems = [], [f"{clean(e.id)}: record: {clean(e.problem)}" for e in damaged]
    counts: Counter[str] = Counter()
    renewed = removed = 0
    for entry in found:
        now: PlanRecord | None = entry.record
        graph, steps = verify.check_graph(entry.record)
        if graph.status == "failed":
            plans = verify.Verdict("skipped", "its graph is not known")
        elif device is None:
            plans = verify.Verdict("skipped", no_gpu)
        elif not verify.is_here(entry.record, device):
            plans = verify.Verdict("skipped", "it is of another environment")
        else:
            check = verify.on_gpu(entry.record, device)
            plans, now = verify.check_plans(entry.record, steps, check)
        record, blob = verify.check_stored(store, entry)
        checks = {"record": record, "blob": blob, "graph": graph, "replay": plans}
        counts[plans.status] += 1
        if entry.entry.tier == "disk" and "failed" not in (record.status, blob.status):
            if now is None:
                removed += store.remove(entry.id)
            elif now != entry.record:
                renewed += store.put(now, store.check(entry.id).blob)
        rows.append(
            [
                *(entry.short_id, *(check.status for check in checks.values())),
                clean("; ".join(f"{n}: {c.detail}" for n, c in checks.items() if c.detail)),
            ]
        )
        problems += [
            f"{entry.short_id}: {name}: {clean(check.detail)}"
            for name, check in checks.items()
            if check.status == "failed"
        ]
    if rows:
        print_table(["id", "record", "blob", "graph", "replay", "detail"], rows, styles=_STYLES)
    for problem in problems:
        print(f"failed {problem}")
    total = len(found) + len(damaged)
    ending = "" if len(problems) == 1 else "s"
    print(f"{total} entries checked, {counts['ok']} replayed, {len(problems)} problem{ending}")
    if not total:
        print(f"no plan is in {records.directory(args)}")
    if renewed:
        print(f"{renewed} renewed: what they say of their plans was found now")
    if removed:
        print(f"{removed} removed: their plans are chosen anew when they are asked for")
    if no_gpu and found:
        print(f"nothing was replayed: {no_gpu}")
    return 1 if problems else 0


# -- prune -----------------------------------------------------------------------------------------


def _prune(args: argparse.Namespace) -> int:
    given = {"cudnn": args.cudnn, "gpu": args.gpu}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not args.dead_environments:
        raise UsageError(f"--{next(iter(given))} says what --dead-environments compares with")
    limits = (args.older_than, args.unused_for, args.max_size)
    if not args.dead_environments and not args.other_schemas and limits == (None, None, None):
        raise UsageError(
            "say what may go: --dead-environments, --older-than, --unused-for, --max-size, "
            "--other-schemas"
        )
    dead = _dead(given) if args.dead_environments else None
    store = records.open_store(records.directory(args))
    found, damaged = records.scan(store, look_only=args.dry_run)
    records.print_damaged(damaged)
    if args.gpu is not None:
        _check_gpu(args.gpu, found)
    going = to_prune(found, dead, *limits)
    folders = store.other_schemas() if args.other_schemas else []
    for entry, why in going:
        used = age_text(entry.entry.unused_s)
        age = f"{age_text(entry.entry.age_s)} old, used {used} ago"
        print(f"{entry.short_id}  {why}: {_named(entry)}, {age}")
    for folder in folders:
        several = "" if folder.files == 1 else "s"
        size = f"{folder.files} file{several}, {bytes_text(folder.size_bytes)}"
        print(f"v{folder.version}  another schema: {clean(folder.problem) or size}")
    count = f"{len(going)} of {len(found)} plans, {_total(e.entry.size_bytes for e, _ in going)}"
    if args.other_schemas:
        own = [folder for folder in folders if not folder.problem]
        several = "" if len(own) == 1 else "s"
        size = _total(folder.size_bytes for folder in own)
        count += f", and {len(own)} folder{several} of another schema, {size}"
    size_bytes = sum(entry.entry.size_bytes for entry in found)
    size_bytes -= sum(entry.entry.size_bytes for entry, _ in going)
    room = None if args.max_size is None else max(0, args.max_size - size_bytes)
    parts, _ = Measurements(records.directory(args)).prune(
        unused_for_s=args.unused_for, max_total_bytes=room, dry_run=args.dry_run
    )
    if parts:
        count += f", and measurements of {parts} step{'s' * (parts != 1)}"
    if args.dry_run:
        print(f"would remove {count}")
        return 0
    ids = {entry.id for entry, _ in going}
    removed = store.prune(lambda entry: entry.id in ids)
    stay = [f"v{folder.version}" for folder in folders if not store.remove_schema(folder.version)]
    left = ids - {entry.id for entry in removed}
    still = [id[: records.ID_SHOWN] for id in {entry.id for entry in records.scan(store)[0]} & left]
    if still or stay:
        shown = min(stay or still)
        raise CacheError(f"{len(still + stay)} could not be removed, {shown} among them")
    print(f"removed {count}")
    return 0


def _total(sizes: Iterable[int]) -> str:
    return bytes_text(sum(sizes))


def _check_gpu(name: str, found: Sequence[Stored]) -> None:
    """Refuse a part of a GPU's name: entries of that GPU would be called dead."""
    names = {entry.gpu for entry in found}
    like = [each for each in names if name.lower() in each.lower()]
    if like and name.lower() not in {each.lower() for each in names}:
        several = " or ".join(f"'{clean(each)}'" for each in sorted(like))
        raise UsageError(f"--gpu '{clean(name)}' is part of a name; expected the whole: {several}")


def _dead(given: Mapping[str, str]) -> Callable[[Stored], bool]:
    """Whether an entry's environment is not the given one, or none of this machine's."""
    if given:

        def differs(entry: Stored) -> bool:
            have = {"cudnn": entry.cudnn, "gpu": entry.gpu}
            return any(have[name].lower() != value.lower() for name, value in given.items())

        return differs
    if not torch.cuda.is_available():
        raise UsageError("there is no GPU here to compare environments with; give --gpu or --cudnn")
    alive = {env_components(env.env_key(index)) for index in range(torch.cuda.device_count())}
    return lambda entry: entry.record.env not in alive


def to_prune(
    found: Sequence[Stored],
    dead: Callable[[Stored], bool] | None,
    older_than_s: float | None,
    unused_for_s: float | None,
    max_bytes: int | None,
) -> list[tuple[Stored, str]]:
    """The entries that have to go, and why, in the order of the reasons."""
    going, kept = [], []
    for entry in found:
        if dead is not None and dead(entry):
            going.append((entry, "dead environment"))
        elif older_than_s is not None and entry.entry.age_s > older_than_s:
            going.append((entry, "too old"))
        elif unused_for_s is not None and entry.entry.unused_s > unused_for_s:
            going.append((entry, "unused"))
        else:
            kept.append(entry)
    if max_bytes is not None:
        kept.sort(key=lambda entry: (entry.entry.unused_s, entry.entry.age_s, entry.id))
        total = sum(entry.entry.size_bytes for entry in kept)
        while kept and total > max_bytes:
            entry = kept.pop()
            total -= entry.entry.size_bytes
            going.append((entry, "too much"))
    return going


# -- export, import --------------------------------------------------------------------------------


def _file(text: str, stream: str) -> Path:
    """The path that is called so; that of a stream of the process for "-"."""
    return Path(stream if text == "-" else text)


def _export(args: argparse.Namespace) -> int:
    if (args.file is None) == (args.seeds is None):
        raise UsageError("export takes a FILE or --seeds FOLDER, one of them")
    if args.seeds is None and args.steps_only:
        raise UsageError("--steps-only needs --seeds FOLDER")
    if args.seeds is not None and args.with_blobs:
        raise UsageError("seeds have no serialized plans: --with-blobs needs a FILE")
    if args.file is not None and os.path.isdir(args.file):
        raise UsageError(f"{args.file} is a folder; give the name of a file")
    store = records.open_store(records.directory(args))
    found, damaged = records.scan(store)
    records.print_damaged(damaged)
    if not found:
        raise CacheError(f"no plan is in {records.directory(args)}")
    if args.seeds is not None:
        count = transfer.export_seeds(found, args.seeds, steps_alone=args.steps_only)
        what = f"the steps of {count} records" if args.steps_only else f"{count} seeds"
        print(f"{what} written to {args.seeds}")
        return 1 if damaged else 0
    blobs = transfer.export(store, found, args.file, args.with_blobs)
    left_out = sum(entry.entry.blob_bytes > 0 for entry in found) - blobs
    tail = f", {left_out} blobs left out" if left_out else ""
    # If the file goes to standard output, nothing else may.
    told = sys.stderr if files.is_standard_output(args.file) else sys.stdout
    print(f"{len(found)} records and {blobs} blobs written to {args.file}{tail}", file=told)
    return 1 if damaged else 0


def _import(args: argparse.Namespace) -> int:
    store = records.open_store(records.directory(args))
    report = transfer.import_(store, args.file, trust_blobs=args.trust_blobs, replace=args.replace)
    if report.kept:
        ids = ", ".join(id[: records.ID_SHOWN] for id in report.kept[:_SHOWN])
        more = f" and {len(report.kept) - _SHOWN} more" if len(report.kept) > _SHOWN else ""
        print(f"kept, as new or newer here (--replace takes the file's): {ids}{more}")
    for problem in report.problems[:_SHOWN]:
        print(f"refused {problem}", file=sys.stderr)
    if len(report.problems) > _SHOWN:
        print(f"and {len(report.problems) - _SHOWN} more", file=sys.stderr)
    print(
        f"{len(report.new)} new, {len(report.replaced)} replaced, {len(report.same)} the same, "
        f"{len(report.kept)} kept, {len(report.problems)} refused"
    )
    if report.blobs_dropped:
        print(
            f"{report.blobs_dropped} blobs dropped: they hold device code; --trust-blobs takes them"
        )
    elif report.blobs:
        print(f"{report.blobs} blobs taken")
    return 1 if report.problems else 0


ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "path": _path,
    "diff": _diff,
    "explain-miss": _explain_miss,
    "verify": _verify,
    "prune": _prune,
    "export": _export,
    "import": _import,
}
