"""Run the demo in new processes, one after the other, and write the results page.

    python docs/results/first_runs.py --runs 60 --out docs/results/first-runs.md

Each process makes its first call of MKL's vector math, where an error of one run in many could be
(pytorch#188792): `cudnngraph/executor/reference.py` says why, and what it does about it. The exit
code is 1
if a run failed.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
_ROW = re.compile(r"^[│|] (.+?) +[│|] cpu .* ([0-9.]+e[+-][0-9]+|nan|inf)( FAILED)? +[│|]$", re.M)


@dataclass
class Found:
    """Findings of the runs: the largest error of each graph, and the count of runs over it."""

    runs: int = 0
    failed: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    over: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)

    def add(self, code: int, out: str, err: str) -> None:
        """Count one run by its exit code and what it printed."""
        self.runs += 1
        self.failed += code != 0
        for title, error, over in _ROW.findall(out):
            worst = self.worst.get(title, 0.0)
            self.worst[title] = worst if worst >= float(error) else float(error)
            self.over[title] += bool(over)
        if code:
            self.said.append(err.strip().splitlines()[-1] if err.strip() else f"exit code {code}")


def once() -> tuple[int, str, str]:
    """The demo in a new process, with as many threads as torch takes by itself."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
        "OMP_WAIT_POLICY": "passive",  # threads that wait leave the cores to others
    }
    environ.pop("OMP_NUM_THREADS", None)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "demo.py"), "--device", "cpu"],
            cwd=folder,
            env=environ,
            capture_output=True,
            encoding="utf-8",
        )
    return done.returncode, done.stdout, done.stderr


def kernels() -> tuple[int, int] | None:
    """The kernels of MKL's vector math, -1 before its first call, and MKL's number of the CPU.

    MKL maps that number to the kernels. None if this torch has no such MKL.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        look_up, detect = library.mkl_vml_serv_cpu_detect, library.mkl_serv_vml_cpu_detect
    except (OSError, AttributeError):
        return None
    start = ctypes.cast(look_up, ctypes.c_void_p).value
    code = ctypes.string_at(start, 6)
    if start is None or code[:2] != b"\x8b\x05":  # mov eax, [rip + …]: the variable is read first
        return None
    at = start + len(code) + int.from_bytes(code[2:], "little", signed=True)
    return ctypes.c_int32.from_address(at).value, int(detect())


def cpu() -> str:
    """The name of the CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    named = re.search(r"^model name\s*: (.+)$", text, re.M)
    return named[1] if named else platform.processor()


def page(found: Found, taken: tuple[int, int] | None, command: str) -> str:
    """The results page."""
    lines = [
        "# First runs of the demo on a CPU",
        "",
        f"{cpu()}, {os.cpu_count()} cores; torch {torch.__version__}, {torch.get_num_threads()} "
        f"threads; Python {platform.python_version()}; {datetime.date.today()}.",
        "",
        "```",
        command,
        "```",
        "",
        f"{found.runs} runs, each in a new process, one after the other; {found.failed} failed.",
        "",
        "| graph | largest error | runs over the tolerance |",
        "|---|---|---|",
        *(f"| {name} | {error:.1e} | {found.over[name]} |" for name, error in found.worst.items()),
        "",
    ]
    if taken is not None:
        settled, raw = taken
        differ = (
            "On this CPU a first call by several threads can go wrong."
            if settled != raw
            else "They are the same: on this CPU no run could show the fault, with the call or "
            "without."
        )
        lines += [
            f"MKL's vector math first keeps the CPU's type, {raw}, and then the kernels that it "
            f"takes for it, {settled}. {differ}",
            "",
        ]
    return "\n".join([*lines, *(f"Failed: {line}" for line in found.said)]).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None, runs: Iterable[tuple[int, str, str]] = ()) -> int:
    """Run the demo, or take ``runs`` that were made, print the page and write it to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    found = Found()
    for code, out, err in runs or (once() for _ in range(args.runs)):
        found.add(code, out, err)
        print(f"{found.runs}: {max(found.worst.values(), default=0):.1e}", file=sys.stderr)
    torch.exp(torch.zeros(1))
    command = f"python docs/results/first_runs.py --runs {found.runs}"
    text = page(found, kernels(), f"{command} --out docs/results/first-runs.md")
    print(text, end="")
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main())
