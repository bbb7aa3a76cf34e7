"""``cudnngraph bench zoo``: published models beside eager torch and torch.compile.

Exit codes: 0 when every model whose library is installed was measured and is right, 1 when one
failed or was not reached, 2 for a call that makes no sense, 130 when it is interrupted; the same
call then goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime
import math
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ..backend import env
from ..bench.report import check_matplotlib
from ..bench.zoo import check, page
from ..bench.zoo.entries import Entry
from ..bench.zoo.registry import DEFAULT, ZOO, chosen, entries
from ..bench.zoo.results import Results, loaded
from ..bench.zoo.run import Options, Zoo
from ..bench.zoo.ways import ON_CPU, WAYS
from ..device import files
from ..settings import VERSION
from .bench import find_device, seconds_over_zero
from .records import UsageError
from .table import print_table

NAME = "bench zoo"
LIBRARIES = ("timm", "torchvision", "transformers", "diffusers")
LIMIT_S = 300.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``bench zoo`` and its arguments."""
    parser = subparsers.add_parser(
        NAME,
        help="measure published models beside torch.compile",
        description=f"Measure {len(ZOO)} published models of timm, torchvision, transformers and "
        "diffusers, as far as these are installed, with random weights at their real sizes: time, "
        "memory, cold and warm start, and parity to float64. Each model runs in a process of its "
        "own; results are kept as they come, and a call goes on from those that are there.",
        epilog="Exit code: 0 when every model was measured and is right; 1 when one failed or was "
        "not reached; 2 for a call that makes no sense; 130 when it is interrupted. A model whose "
        "library is not installed is named, and is no failure.",
    )
    parser.add_argument(
        "--models",
        type=_words,
        default=[],
        metavar="GLOB,...",
        help="the models whose name matches, in upper or lower case",
    )
    parser.add_argument(
        "--ways",
        type=_words,
        default=[],
        metavar="WAY,...",
        help=f"any of {', '.join(WAYS)} (default: all; without a GPU {', '.join(ON_CPU)})",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="the same models with small widths, few layers and small inputs",
    )
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument(
        "--limit",
        type=seconds_over_zero,
        default=LIMIT_S,
        metavar="SECONDS",
        help="end a process that takes longer; its model has the reason (default: %(default)g)",
    )
    parser.add_argument(
        "--budget",
        type=seconds_over_zero,
        default=math.inf,
        metavar="SECONDS",
        help="stop after so long, to go on another time",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="cold starts of N models side by side, but for ways that measure while they compile",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="keep results there, and go on from those that are there"
    )
    parser.add_argument(
        "--resume",
        action="append",
        default=[],
        metavar="FILE",
        help="take in the results of another run; may be given several times",
    )
    parser.add_argument("--again", action="store_true", help="measure what is done once more")
    parser.add_argument("--retry", action="store_true", help="measure what failed once more")
    parser.add_argument(
        "--out",
        metavar="PAGE.md",
        help="write a page, with a picture beside it if there are times (needs matplotlib); "
        "--json is PAGE.json if it is not given",
    )
    parser.add_argument(
        "--page-only", action="store_true", help="measure nothing, write the page of what is there"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="measure nothing: build each model at its real size without memory, and call it so",
    )
    parser.add_argument(
        "--caches",
        metavar="FOLDER",
        help="keep the caches of compilers there (default: a temporary folder)",
    )
    parser.add_argument(
        "--registry",
        default=DEFAULT,
        metavar="MODULE:NAME",
        help="other models: a list of cudnngraph.bench.zoo.entries.Entry",
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def run(args: argparse.Namespace) -> int:
    """Measure and show; see the module's description for the exit code."""
    try:
        listed = entries(args.registry)
        picked = chosen(listed, args.models)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.check:
        return _checked(picked)
    if args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}; expected 1 or more")
    if args.again and args.retry:
        raise UsageError("--again measures all models, --retry those that failed; give one of them")
    kept = _json_file(args)
    results, complete = _loaded(args, kept), True
    if args.page_only:
        if results is None:
            raise UsageError("--page-only needs results: --resume FILE, or a --json FILE there is")
    else:
        device = find_device(args.device)
        new = Results(_name_of(device), args.tiny, [_this_run(args, device)])
        results = new if results is None else _merged(results, new)
        complete = _measured(args, device, picked, results, kept)
    results.sort([entry.name for entry in listed])
    failed = _write(args, kept, results)
    _print(results, complete)
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    names = {entry.name for entry in picked}
    wrong = any(row["status"] == "failed" for row in results.rows.values() if row["name"] in names)
    return 1 if failed or not complete or (wrong and not args.page_only) else 0


# -- files -----------------------------------------------------------------------------------------


def _json_file(args: argparse.Namespace) -> Path | None:
    """The file that results are kept in. Raise now for what cannot be written in the end."""
    given = {"--json": args.json, "--out": args.out}
    for option, name in given.items():
        if name is not None:
            try:
                files.check(name)
            except OSError as error:
                raise UsageError(f"{option} {name}: {error.strerror or error}") from None
    if args.out is not None:
        if Path(args.out).suffix != ".md":
            raise UsageError(f"--out {args.out}: expected a name that ends in .md")
        check_matplotlib("the page")
    if args.json is not None:
        return Path(args.json)
    return None if args.out is None else Path(args.out).with_suffix(".json")


def _loaded(args: argparse.Namespace, kept: Path | None) -> Results | None:
    """The results that are there; None if there are none."""
    names = [Path(name) for name in args.resume]
    if kept is not None and kept.exists():
        names.append(kept)
    found: Results | None = None
    for name in dict.fromkeys(names):
        try:
            one = loaded(name)
        except ValueError as error:
            raise UsageError(str(error)) from None
        found = one if found is None else _merged(found, one)
    return found


def _merged(first: Results, other: Results | None) -> Results:
    if other is not None:
        try:
            first.merge(other)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return first


def _write(args: argparse.Namespace, kept: Path | None, results: Results) -> list[str]:
    """Write every file; a line for each that could not be."""
    failed = []
    try:
        if kept is not None:
            results.save(kept)
        if args.out is not None:
            out = Path(args.out)
            image, name = page.picture(results), ""
            if image is not None:
                files.write(out.with_suffix(".svg"), image)
                name = out.with_suffix(".svg").name
            before = out.read_text() if out.exists() else ""
            files.write(out, page.with_notes(page.page(results, name), before))
    except OSError as error:
        failed.append(f"{error.filename or args.out} cannot be written: {error.strerror or error}")
    return failed


# -- measuring -------------------------------------------------------------------------------------


def _measured(
    args: argparse.Namespace,
    device: torch.device,
    picked: Sequence[Entry],
    results: Results,
    kept: Path | None,
) -> bool:
    """Measure into ``results``; whether all models were reached."""
    unknown = [name for name in args.ways if name not in WAYS]
    if unknown:
        raise UsageError(f"no way {', '.join(unknown)}; there are {', '.join(WAYS)}")
    gpu = device.type == "cuda"
    wanted = set(args.ways or (WAYS if gpu else ON_CPU))
    left_out = sorted(wanted - set(ON_CPU)) if not gpu else []
    if left_out:
        raise UsageError(f"--ways {','.join(left_out)} needs a GPU; there are {', '.join(ON_CPU)}")
    if not any(WAYS[name].ours for name in wanted):
        ours = ", ".join(name for name, way in WAYS.items() if way.ours)
        raise UsageError(f"--ways has none of ours to compare with: {ours}")
    with ExitStack() as stack:
        folder = args.caches or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="cudnngraph-zoo-", ignore_cleanup_errors=True)
        )
        options = Options(
            registry=args.registry,
            device=str(device),
            tiny=args.tiny,
            ways=tuple(name for name in WAYS if name in wanted),
            caches=Path(folder).resolve(),
            limit_s=args.limit,
            budget_s=args.budget,
            jobs=args.jobs,
            retry=args.retry,
            again=args.again,
        )

        def save() -> None:
            if kept is not None:
                results.save(kept)

        zoo = Zoo(options, results, say=_say, save=save)
        return zoo.run(picked)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _this_run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """When, by which versions and by which call a run is."""
    names = {"frontend": "nvidia-cudnn-frontend", **{name: name for name in LIBRARIES}}
    versions = {"cudnngraph": VERSION, "torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["cuDNN"] = str(env.cudnn_version())
    for name, distribution in names.items():
        version = env.distribution_version(distribution)
        if version is not None:
            versions[name] = version
    date = datetime.datetime.now(datetime.timezone.utc).date()
    return {"date": str(date), "versions": versions, "command": _command(args)}


def _command(args: argparse.Namespace) -> str:
    """The call, as far as it says what was measured and how."""
    words = ["cudnngraph", "bench", "zoo"]
    for name in ("models", "ways"):
        words += [f"--{name}", ",".join(getattr(args, name))] if getattr(args, name) else []
    words += ["--tiny"] if args.tiny else []
    words += ["--jobs", str(args.jobs)] if args.jobs > 1 else []
    words += ["--limit", f"{args.limit:g}"] if args.limit != LIMIT_S else []
    return shlex.join(words)


# -- printing --------------------------------------------------------------------------------------


def _print(results: Results, complete: bool) -> None:
    for name, row in results.rows.items():
        if row["status"] in ("failed", "missing"):
            print(f"{name}: {row['status']}: {_first_line(row)}")
    lines = page.summary_lines(results)
    print_table(["what", "found"], [line.split(": ", 1) for line in lines])
    if not complete:
        print("stopped by --budget; the same call goes on from there")


def _first_line(row: dict[str, Any]) -> str:
    return (str(row.get("error", "")).strip().splitlines() or [""])[0]


def _checked(picked: Sequence[Entry]) -> int:
    """Build each model without memory; a row for each."""
    rows, failed = [], 0
    for entry in picked:
        made = check.built(entry)
        failed += bool(made.error)
        shapes = ", ".join("x".join(map(str, shape)) for shape in made.results)
        inputs = ", ".join(map(str, entry.real.inputs))
        found = made.error.splitlines()[0] if made.error else f"{inputs} → {shapes}"
        rows.append([entry.name, entry.library, f"{made.parameters_m:.1f} M", found])
    print_table(["model", "library", "parameters", "found"], rows)
    print(f"{len(rows) - failed} of {len(rows)} models can be built and called")
    return 1 if failed else 0
