"""Run the GPU tier and the demo for one or more frontends and write the results page.

    python tests/gpu/report.py --out docs/results/h200-tests.md PATH [PATH ...]

Each PATH is a folder that holds one version of the frontend (``pip install --target PATH``); "."
takes the installed one. Tests run side by side, and those that need the GPU for themselves (marked
``alone``) behind them, one by one. After ``--limit`` seconds what is still running is stopped, and
the page has what had run by then. Prints a short table last; exits 1 if a test failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PROCESSES = max(1, min(24, (os.cpu_count() or 1) - 2))
LONGEST_TEST_S = 150  # after which the log has what every thread is at
VERSIONS = """
import platform, torch
from cudnngraph.backend import env
print("|".join([env.frontend_version(), str(env.cudnn_version()), torch.__version__,
    str(torch.version.cuda), torch.cuda.get_device_name(), platform.python_version()]))
"""


@dataclass(frozen=True)
class Run:
    """The outcome of one frontend's tests."""

    frontend: str
    cudnn: str
    torch: str
    cuda: str
    gpu: str
    python: str
    passed: int
    failed: int
    skipped: tuple[str, ...]
    seconds: float
    summary: str
    failures: tuple[str, ...]


def environment(path: str) -> dict[str, str]:
    """The environment with one frontend in front."""
    here = [str(REPO)] if path == "." else [path, str(REPO)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(here)}


def start(path: str, folder: Path, *, alone: bool = False) -> subprocess.Popen[bytes]:
    """Start pytest for one frontend; its output and its results go to files in ``folder``.

    ``alone``: the tests that need the GPU for themselves, one after the other; else the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-v", "-ra", "--durations=25"]
    command += ["-p", "no:cacheprovider", "-o", f"faulthandler_timeout={LONGEST_TEST_S}"]
    command += ["-m", "alone" if alone else "not alone"]
    if not alone and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(PROCESSES), "--dist", "worksteal"]
    with open(folder / "log.txt", "wb") as log:
        return subprocess.Popen(
            [*command, f"--junitxml={folder / 'junit.xml'}"],
            cwd=REPO,
            env=environment(path),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes], patience_s: float = 15.0) -> None:
    """Interrupt pytest, which then sums up what it has; kill it and its workers after a while."""
    os.kill(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read(path: str, folder: Path) -> Run:
    """Read the outcome that a finished run left behind."""
    asked = subprocess.run(
        [sys.executable, "-c", VERSIONS],
        cwd=REPO,
        env=environment(path),
        capture_output=True,
        text=True,
        check=True,
    )
    versions = asked.stdout.strip().splitlines()[-1].split("|")
    if not (folder / "junit.xml").exists():
        return unfinished(versions, (folder / "log.txt").read_text(errors="replace"))
    suite = next(ElementTree.parse(folder / "junit.xml").getroot().iter("testsuite"))
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    skipped = [
        f"{case.get('name')}: {skip.get('message')}"
        for case in suite.iter("testcase")
        for skip in case.iter("skipped")
    ]
    failures = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    failed = count["failures"] + count["errors"]
    ran = {name: counted(suite, name) for name in ("ran", "ran of what cuDNN has")}
    log = (folder / "log.txt").read_text(errors="replace")
    tables = re.findall(r"^=+ recorded by (\S+) =+\n(.*?)(?=^=)", log, re.MULTILINE | re.DOTALL)
    return Run(
        *versions,
        passed=count["tests"] - failed - count["skipped"],
        failed=failed,
        skipped=tuple(skipped),
        seconds=float(suite.get("time", "0")),
        summary="\n\n".join(
            [
                *["stopped by its time limit before the end"] * ("KeyboardInterrupt" in log),
                *(f"sample graphs, how they {name}: {dict(each)}" for name, each in ran.items()),
                *(text.strip() for _, text in tables),
            ]
        ),
        failures=tuple(failures),
    )


def together(run: Run, alone: Run) -> Run:
    """A frontend's tests: those side by side, and those one after the other."""
    return replace(
        run,
        passed=run.passed + alone.passed,
        failed=run.failed + alone.failed,
        skipped=run.skipped + alone.skipped,
        seconds=run.seconds + alone.seconds,
        failures=run.failures + alone.failures,
    )


def unfinished(versions: list[str], log: str) -> Run:
    """Read what a run had done when it was stopped, from its log."""
    by_name = re.findall(
        r"^(?:\[gw\d+\] \[ *\d+%\] )(PASSED|FAILED|ERROR|SKIPPED) (\S.*)$", log, re.M
    )
    failures = tuple(name for outcome, name in by_name if outcome in ("FAILED", "ERROR"))
    if not by_name:
        failures = (f"nothing ran: {log.strip().splitlines()[-1] if log.strip() else 'no log'}",)
    return Run(
        *versions,
        passed=sum(outcome == "PASSED" for outcome, _ in by_name),
        failed=len(failures),
        skipped=tuple(name for outcome, name in by_name if outcome == "SKIPPED"),
        seconds=math.nan,
        summary="stopped by its time limit before the end",
        failures=failures,
    )


def counted(suite: ElementTree.Element, name: str) -> Counter[str]:
    """Count the values that tests recorded under a name."""
    return Counter(
        str(entry.get("value"))
        for case in suite.iter("testcase")
        for entry in case.iter("property")
        if entry.get("name") == name
    )


def demo(path: str) -> str:
    """The table that the demo prints."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "examples/demo.py", "--out", str(Path(folder) / "sharpened.png")],
            cwd=REPO,
            env={**environment(path), "COLUMNS": "120", "TERM": "dumb"},
            capture_output=True,
            text=True,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if "sharpened picture" not in line]
    return "\n".join(lines) if done.returncode == 0 else f"failed:\n{done.stdout}{done.stderr}"


def driver() -> str:
    """The driver's version as nvidia-smi tells it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else "unknown"


def page(runs: list[Run], demo_table: str, command: str) -> str:
    """The results page."""
    first = runs[0]
    today = datetime.datetime.now(datetime.timezone.utc).date()
    lines = [
        "# The test tier of the GPU, and the demo",
        "",
        f"{first.gpu}, driver {driver()}, CUDA {first.cuda}, torch {first.torch}, "
        f"Python {first.python}; {today}.",
        "",
        "```",
        command,
        "```",
        "",
        "| frontend | cuDNN | passed | failed | skipped | seconds |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {run.frontend} | {run.cudnn} | {run.passed} | {run.failed} | {len(run.skipped)} "
        f"| {run.seconds:.0f} |"
        for run in runs
    ]
    for run in runs:
        if run.failures:
            lines += ["", f"Failed with frontend {run.frontend}:", ""]
            lines += [f"- `{name}`" for name in run.failures]
    if first.skipped:
        lines += ["", "Skipped:", "", *(f"- {text}" for text in first.skipped)]
    lines += [
        "",
        "Sample graphs run with TF32 off, each within the policy of `tests/numerics.py` of float64 "
        "and of torch's own result. What follows is from the first frontend.",
        "",
        "```",
        first.summary,
        "```",
        "",
        "## The demo",
        "",
        "Times are medians of one run on a shared machine: read them as ratios.",
        "",
        "```",
        demo_table,
        "```",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run everything; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("frontends", nargs="+", metavar="PATH")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--logs", type=Path, default=None, help="folder for full logs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        logs = args.logs or Path(scratch)
        ends = time.monotonic() + args.limit
        runs = []
        for number, path in enumerate(args.frontends):
            parts = []
            for alone in (False, True):
                folder = logs / str(number) / ("alone" if alone else "")
                process = start(path, folder, alone=alone)
                left = max(1.0, ends - time.monotonic())
                try:
                    process.wait(None if math.isinf(left) else left)
                except subprocess.TimeoutExpired:
                    stop(process)
                parts.append(read(path, folder))
            runs.append(together(*parts))
    names = " ".join(f"frontend-{run.frontend}" for run in runs)
    command = f"python tests/gpu/report.py --out docs/results/h200-tests.md {names}"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page(runs, demo(args.frontends[0]), command))
    for run in runs:
        print(f"frontend {run.frontend}: {run.passed} passed, {run.failed} failed", *run.failures)
    return 1 if any(run.failed for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
