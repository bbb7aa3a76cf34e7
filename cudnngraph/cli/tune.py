"""``cudnngraph tune``: measure the plans of graphs ahead of time, so that the cache has them.

What is tuned: every graph that a script compiles while it runs (``tune SCRIPT ARGS``, ``tune -m
MODULE ARGS``), the graphs that a Python file declares (``tune --graphs FILE[:NAME]``), or those of
a manifest (``tune MANIFEST.json``): ``{"graphs": [{"file": "graphs.py:block", "policy":
{"allow_tf32": true}}]}``, files beside the manifest. Exit codes: 0 when all went well, 1 when
something could not be tuned or there is no GPU, 2 for a call that makes no sense; a script's own
code where a script is run.

``--target GPU`` tunes nothing: it lists what a search on that GPU would build, and keeps cuDNN's
rankings for it. That needs the cuDNN library and no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from plans_cache import PlanRecord

from .. import settings
from ..backend import env
from ..errors import CudnnGraphError
from ..explain.candidates import Candidates, candidates
from ..explain.text import clean
from ..graph.builder import Graph
from ..ir.spec import GraphSpec
from ..policy import Policy, check_options
from ..runtime.compile import compile as compile_spec
from ..select import workers
from .explain import Unusable, check_target, load
from .records import UsageError, open_store
from .table import print_table

JSON_SCHEMA = 1
"""Of the object that ``--json`` prints; raised when a field goes or changes its meaning."""

_WITH_VALUE = ("--budget", "--graphs", "--jobs", "--share", "--target")
_COLUMNS = ["graph", "steps", "time", "plans tried"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``tune`` and its arguments."""
    parser = subparsers.add_parser(
        "tune",
        usage="%(prog)s [-h] [--jobs N] [--budget S] [--target GPU [--json]] (SCRIPT [ARGS] | "
        "-m MODULE [ARGS] | --graphs FILE[:NAME] | MANIFEST.json)",
        help="measure plans ahead of time and keep them in the cache",
        description="Tune every graph that a script compiles, that a Python file declares, or that "
        "a manifest lists, on the GPU, and keep the plans in the cache.",
        epilog="Exit code: 0 when all went well; 1 when something could not be tuned or there is "
        "no GPU; 2 for a call that makes no sense; a script's own code where a script is run.",
    )
    parser.add_argument(
        "--graphs",
        action="append",
        default=[],
        metavar="FILE[:NAME]",
        help="tune the graphs that FILE declares, as `cudnngraph explain` finds them",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="build plans in N processes; they take turns at the GPU to measure (--graphs and "
        "manifests)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="begin no further graph after so long; the same call goes on where it was (--graphs "
        "and manifests)",
    )
    parser.add_argument(
        "--target",
        dest="gpu",
        metavar="GPU",
        help="measure nothing: list what a search on GPU, which is not here, would build, and keep "
        "cuDNN's rankings for it (--graphs and manifests)",
    )
    parser.add_argument("--json", action="store_true", help="of --target: print one JSON object")
    parser.add_argument(
        "-m",
        dest="module",
        metavar="MODULE",
        help="run a module as a script; what comes behind it are its arguments",
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="SCRIPT|MANIFEST.json",
        help="what to run, or a manifest; what comes behind a script are its arguments",
    )
    parser.add_argument("--share", help=argparse.SUPPRESS)  # of a process of --jobs: "0/4"
    parser.set_defaults(arguments=[])


def divide(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words of a call up to ``-m MODULE`` or SCRIPT, and the script's own arguments.

    Divided as python divides its call. argparse would take an option behind them for one of ours.
    """
    place = 0
    while place < len(words):
        word = words[place]
        if word == "--":
            end = place + 2
        elif word.startswith("-m"):
            end = place + (2 if word == "-m" else 1)
        elif not word.startswith("-") or word == "-":  # python reads a script from its input
            end = len(words) if word.endswith(".json") else place + 1
        else:
            with_value = "=" not in word and any(each.startswith(word) for each in _WITH_VALUE)
            place += 2 if with_value else 1
            continue
        return words[:end], words[end:]
    return words, []


@dataclass(frozen=True)
class Wanted:
    """Graphs to tune: ``FILE[:NAME]`` and what their policy says."""

    place: str
    policy: Mapping[str, Any] = field(default_factory=dict)


def run(args: argparse.Namespace) -> int:
    """Tune what is asked for and print what was found."""
    wanted = _wanted(args)
    if args.gpu is not None:
        return _listed(args, wanted or [])
    if not torch.cuda.is_available():
        print("error: torch sees no CUDA device, there is nothing to measure on", file=sys.stderr)
        return 1
    start = time.time()
    code = _script(args) if wanted is None else _declared(args, wanted)
    if args.share is None:
        _print_tuned(start, failed=code != 0)
    return code


def _wanted(args: argparse.Namespace) -> list[Wanted] | None:
    """The graphs that are named; None where a script is to be run."""
    if args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}; expected 1 or more")
    given = [bool(args.graphs), args.module is not None, args.target is not None]
    if sum(given) != 1:
        raise UsageError("expected one of SCRIPT, MANIFEST.json, -m MODULE and --graphs")
    if args.json and args.gpu is None:
        raise UsageError("--json is for --target")
    declared = bool(args.graphs) or str(args.target).endswith(".json")
    if args.budget is not None and not (declared and 0 < args.budget < math.inf):
        known = "expected a number of seconds above 0, and --graphs or a manifest"
        raise UsageError(f"--budget {args.budget:g}; {known}")
    if args.gpu is not None:
        _check_listing(args, declared)
    if args.graphs:
        return [Wanted(place) for place in args.graphs]
    if args.target is not None and args.target.endswith(".json"):
        if args.arguments:
            raise UsageError(f"{args.target} is a manifest, which takes no arguments")
        return _manifest(Path(args.target))
    if args.jobs > 1:
        raise UsageError("--jobs is for --graphs and manifests: a script is one process")
    return None


def _check_listing(args: argparse.Namespace, declared: bool) -> None:
    """Raise :class:`UsageError` for a listing that makes no sense."""
    check_target(args.gpu)
    if args.jobs > 1 or args.budget is not None:
        option = "--jobs" if args.jobs > 1 else "--budget"
        raise UsageError(f"{option} is for a GPU that is here: --target measures nothing")
    if not declared:
        raise UsageError("--target is for --graphs and manifests: it runs no script")


def _manifest(path: Path) -> list[Wanted]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no manifest: {error}") from None
    rows = content.get("graphs") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise UsageError(f'{path} is no manifest: expected {{"graphs": [{{"file": "FILE:NAME"}}]}}')
    wanted = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("file"), str):
            raise UsageError(f'{path}: graph {number} has no "file"')
        policy = row.get("policy", {})
        unknown = sorted(set(row) - {"file", "policy"})
        if unknown or not isinstance(policy, dict):
            what = f"an unknown field '{unknown[0]}'" if unknown else "a policy that is no object"
            raise UsageError(f"{path}: graph {number} has {what}")
        try:
            check_options(policy)
            Policy(**policy)
        except CudnnGraphError as error:
            raise UsageError(f"{path}: graph {number}: {error}") from None
        wanted.append(Wanted(str(path.parent / row["file"]), policy))
    return wanted


# -- a script --------------------------------------------------------------------------------------


def _script(args: argparse.Namespace) -> int:
    """Run a script with ``CUDNNGRAPH_TUNE=autotune``; its exit code."""
    what = ["-m", args.module] if args.module is not None else [args.target]
    environment = {**os.environ, "CUDNNGRAPH_TUNE": "autotune"}
    return subprocess.run(
        [sys.executable, *what, *args.arguments], env=environment, check=False
    ).returncode


# -- declared graphs -------------------------------------------------------------------------------


def _declared(args: argparse.Namespace, wanted: Sequence[Wanted]) -> int:
    if args.jobs > 1:
        return _in_processes(args)

    mine, count = (int(part) for part in (args.share or "0/1").split("/"))
    workers.one_of(count)
    graphs, failed = _load(wanted, tell=mine == 0)
    ends = math.inf if args.budget is None else time.monotonic() + args.budget
    for number in range(mine, len(graphs), count):
        if time.monotonic() >= ends:
            left = len(range(number, len(graphs), count))
            print(f"the budget is spent, {left} graphs are left to the next call", flush=True)
            break
        start = time.monotonic()
        graph, policy = graphs[number]
        try:
            spec = graph.spec() if isinstance(graph, Graph) else graph
            made = compile_spec(spec, "cuda", policy=policy)
        except CudnnGraphError as error:
            print(f"error: graph '{graph.name}': {error}", file=sys.stderr)
            failed += 1
            continue
        how = "tuned" if made.tier == "built" else made.tier
        took_s = time.monotonic() - start
        place = f"{number + 1} of {len(graphs)}"
        print(f"{place}: '{clean(graph.name)}': {how}, {took_s:.1f} s", flush=True)
    return 1 if failed else 0


def _load(
    wanted: Sequence[Wanted], *, tell: bool = True
) -> tuple[list[tuple[Graph | GraphSpec, Policy]], int]:
    """The graphs with their policies, and how many places have none, which is told if wanted."""
    found: list[tuple[Graph | GraphSpec, Policy]] = []
    failed = 0
    for each in wanted:
        try:
            graphs = load(each.place)
        except (Unusable, CudnnGraphError) as error:
            if tell:
                print(f"error: {error}", file=sys.stderr)
            failed += 1
            continue
        policy = Policy(**{**each.policy, "tune": "autotune"})
        found += [(graph, policy) for graph in graphs]
    return found, failed


def _in_processes(args: argparse.Namespace) -> int:
    """One process for each share of the graphs."""
    what = [f"--graphs={place}" for place in args.graphs] or [args.target]
    what += [] if args.budget is None else [f"--budget={args.budget}"]
    command = [sys.executable, "-m", "cudnngraph", "tune"]
    running = [
        subprocess.Popen([*command, f"--share={number}/{args.jobs}", *what])
        for number in range(args.jobs)
    ]
    return max([process.wait() for process in running])


# -- a GPU that is not here ------------------------------------------------------------------------


def _listed(args: argparse.Namespace, wanted: Sequence[Wanted]) -> int:
    """Print what a search of the graphs would build on ``args.gpu``, and keep the rankings."""
    env.frontend()  # without it there is nothing to ask, whatever the graphs are
    found: list[Candidates] = []
    graphs, failed = _load(wanted)
    for graph, policy in graphs:
        try:
            found.append(candidates(graph, args.gpu, policy=policy))
        except CudnnGraphError as error:
            print(f"error: graph '{graph.name}': {error}", file=sys.stderr)
            failed += 1
            continue
        if not args.json:
            print(f"{found[-1]}\n", flush=True)
    if args.json:
        body = {"schema": JSON_SCHEMA, "graphs": [each.to_dict() for each in found]}
        print(json.dumps(body, indent=2))
    elif found:
        kept = sum(each.kept for each in found)
        print(f"rankings that are kept for {found[0].gpu_name}: {kept}")
    return 1 if failed else 0


# -- what was found --------------------------------------------------------------------------------


def _print_tuned(start: float, *, failed: bool) -> None:
    """The entries that came into the cache since ``start``."""
    store = open_store(settings.current().cache_dir)
    found = [entry.record for entry in store.scan() if entry.record is not None]
    new = [
        each for each in found if each.created >= start and each.policy.get("tune") == "autotune"
    ]
    if not new:
        why = "" if failed else ": every graph has a tuned plan in the cache"
        print(f"nothing new was tuned{why}")
        return
    print_table(_COLUMNS, [_row(each) for each in sorted(new, key=lambda each: each.created)])


def _row(record: PlanRecord) -> list[str]:
    steps = [
        " ".join(op for op in step.ops if op != "constant")
        + ("" if step.kind == "cudnn" else " (torch)")
        for step in record.steps
    ]
    tried = sum(each.time_us is not None for step in record.steps for each in step.candidates)
    time_us = "" if record.time_us is None else f"{record.time_us:.1f} µs"
    return [clean(record.summary), clean(" | ".join(steps)), time_us, str(tried)]
