"""``cudnngraph bench [SUITE ...]``: our plans beside torch's own ways, measured in one run.

Exit codes: 0 when every row was measured, 1 when one failed or the page cannot be made, 2 for a
call that makes no sense.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..backend.env import distribution_version
from ..bench.measure import CeilingsOf, Row, measured, with_shares
from ..bench.report import (
    COLUMNS,
    PICTURES,
    Report,
    cells,
    check_matplotlib,
    heading,
    summary_lines,
    to_html,
    to_json,
    to_picture,
)
from ..bench.suites import SUITES, Options
from ..device import files
from ..errors import BackendUnavailable
from ..select.progress import progress_bar
from ..settings import VERSION
from .records import UsageError
from .table import print_table

# What a terminal that is too narrow does without, first come first gone.
_EXPENDABLE = ("GB/s", "notes", "% of ceiling", "TFLOP/s")
MODES = ("default", "reduce-overhead", "max-autotune")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``bench`` and its arguments."""
    parser = subparsers.add_parser(
        "bench",
        help="measure our plans beside torch's own ways",
        description="Measure suites of cases: our plans beside eager torch with cudnn.benchmark, "
        "torch's fused calls and, where asked, torch.compile; all in this process, in turn. The "
        "ceilings (memory, a large product) are measured in the same run. Without a GPU the "
        "reference executor runs small data, to see that everything works.",
        epilog="Exit code: 0 when every row was measured; 1 when one failed, or the page cannot "
        "be made; 2 for a call that makes no sense.",
    )
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help=f"any of {', '.join(SUITES)}; none for all",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has the text")
    parser.add_argument("--quick", action="store_true", help="small data, few rounds")
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument(
        "--tune",
        choices=("autotune", "heuristic"),
        default="autotune",
        help="how our plans are chosen (default: %(default)s)",
    )
    parser.add_argument(
        "--compile",
        action="append",
        choices=MODES,
        default=[],
        dest="modes",
        help="torch.compile in this mode as a further baseline; may be given several times",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write one JSON object; '-' prints it and nothing else"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with plots (needs matplotlib)")
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help="write all ratios and the roofline as one picture, svg or png (needs matplotlib)",
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        default=math.inf,
        metavar="SECONDS",
        help="start no row after so many; a note says how many are left out",
    )


def seconds(text: str) -> float:
    """Seconds, 0 or more; ``type=seconds`` of an argument."""
    value = _number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got '{text}'")
    return value


def seconds_over_zero(text: str) -> float:
    """Seconds over 0; ``type=seconds_over_zero`` of an argument."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected seconds over 0, got '{text}'")
    return value


def _number(text: str) -> float:
    """The number that a text is, NaN for none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def run(args: argparse.Namespace) -> int:
    """Measure and show; see the module's description for the exit code."""
    unknown = [name for name in args.suites if name not in SUITES]
    if "zoo" in unknown:
        raise UsageError("zoo is no suite among others: cudnngraph bench zoo, and its own options")
    if unknown:
        raise UsageError(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}")
    _check_files(args)
    device = find_device(args.device)
    before, threads = torch.backends.cudnn.benchmark, torch.get_num_threads()
    torch.backends.cudnn.benchmark = True
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)  # on small data threads wait for each other
        report, failed = _measure(args, device)
    finally:
        torch.backends.cudnn.benchmark = before
        torch.set_num_threads(threads)
    failed += _write(args, report)  # before the table: who reads that may stop
    if args.json == "-":
        print(json.dumps(to_json(report), indent=1))
    elif not any(map(files.is_standard_output, _files(args).values())):
        _print(report)
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failed else 0


def find_device(name: str | None) -> torch.device:
    """The device of that name, by default a GPU where there is one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(("cuda" if count else "cpu") if name is None else name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise UsageError(f"--device {name}: expected cuda, cuda:1 … or cpu")
    if device.type == "cpu":
        return device
    if not count:
        raise BackendUnavailable("--device cuda and torch sees no CUDA device; leave it out")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise BackendUnavailable(f"--device {name}: torch sees {count} CUDA devices, from cuda:0")
    return torch.device("cuda", index)


# -- files -----------------------------------------------------------------------------------------


def _files(args: argparse.Namespace) -> dict[str, Path]:
    """The files to write by their options."""
    given = {"--json": args.json, "--html": args.html, "--picture": args.picture}
    if given["--json"] == "-":
        del given["--json"]
    return {option: Path(text) for option, text in given.items() if text is not None}


def _check_files(args: argparse.Namespace) -> None:
    """Raise now for what cannot be written when all is measured."""
    given = _files(args)
    for option, file in given.items():
        if str(file) == "-":
            why = "only --json can be printed; give the name of a file"
            raise UsageError(f"{option} {file}: {why}")
        try:
            files.check(file)
        except OSError as error:
            raise UsageError(f"{option} {file}: {error.strerror or error}") from None
    picture = given.get("--picture")
    if picture is not None and picture.suffix.lower() not in PICTURES:
        raise UsageError(f"--picture {picture}: expected a name that ends in {', '.join(PICTURES)}")
    if len({os.path.realpath(file) for file in given.values()}) < len(given):
        raise UsageError(f"{' and '.join(given)} need a file each")
    if "--html" in given:
        check_matplotlib("the page")
    if picture is not None:
        check_matplotlib("the picture")


def _write(args: argparse.Namespace, report: Report) -> list[str]:
    """Write every file; a line for each that could not be."""
    makers: dict[str, Callable[[Path], object]] = {
        "--json": lambda file: files.write(file, json.dumps(to_json(report), indent=1) + "\n"),
        "--html": lambda file: files.write(file, to_html(report)),
        "--picture": lambda file: to_picture(report, file),
    }
    failed = []
    for option, file in _files(args).items():
        try:
            makers[option](file)
        except OSError as error:
            failed.append(f"{option} {file} cannot be written: {error.strerror or error}")
    return failed


# -- measuring and printing ------------------------------------------------------------------------


def _measure(args: argparse.Namespace, device: torch.device) -> tuple[Report, list[str]]:
    options = Options(device, args.quick, args.tune, tuple(dict.fromkeys(args.modes)))
    suites = [SUITES[name](options) for name in dict.fromkeys(args.suites or SUITES)]
    by_suite = [[task for task in suite.tasks if args.only in task.name] for suite in suites]
    tasks = [task for row in itertools.zip_longest(*by_suite) for task in row if task is not None]
    if not tasks:
        named = f" with '{args.only}' in its name" if args.only else ""
        where = ", ".join(dict.fromkeys(args.suites or SUITES))
        raise UsageError(f"there is no row{named} on {device.type} in {where}")
    notes = [note for suite in suites for note in suite.notes]
    ceilings = CeilingsOf(device, quick=args.quick)
    rows: list[Row] = []
    failed: list[str] = []
    start = time.monotonic()
    with progress_bar("measuring", after_s=2.0) as tell:
        for done, task in enumerate(tasks):
            tell(done, len(tasks))
            if time.monotonic() - start > args.limit:
                notes.append(f"{len(tasks) - done} rows left out after {args.limit:g} s")
                break
            try:
                rows.append(measured(task, device, ceilings, quick=options.small))
            except Exception as error:  # the other rows are worth having
                failed.append(f"{task.suite} {task.name}: {type(error).__name__}: {error}")
        tell(len(tasks), len(tasks))
    known, rows = with_shares(ceilings.known, rows)
    gpu = device.type == "cuda"
    versions = {"torch": str(torch.__version__), "cudnngraph": VERSION}
    versions["frontend"] = distribution_version("nvidia-cudnn-frontend") or "unknown"
    report = Report(
        device=torch.cuda.get_device_name(device) if gpu else "CPU",
        versions=versions,
        reference=not gpu,
        quick=args.quick,
        ceilings=known,
        rows=rows,
        notes=notes,
    )
    return report, failed


def _print(report: Report) -> None:
    for line in heading(report):
        print(line)
    for suite in report.suites:
        rows = report.of(suite)
        print()
        print_table(COLUMNS, [cells(row) for row in rows], suite, expendable=_EXPENDABLE)
        for line in summary_lines(rows):
            print(line)
