"""`cudnngraph tune --jobs` in processes, on a GPU that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from plans_cache import PlanStore

ROOT = Path(__file__).parents[3]
COUNT = 12
SOURCE = f"""
import torch
import cudnngraph as cg

def small(n):
    g = cg.Graph(f"g{{n}}")
    a, b = (g.input(name, (8, 8 * n + 8), torch.float16) for name in "ab")
    g.output("y", g.relu(g.add(a, b)))
    return g

globals().update({{f"g{{n}}": small(n) for n in range({COUNT})}})
"""


@dataclass(frozen=True)
class Span:
    """What a process did, from when to when."""

    what: str
    process: str
    begun: float
    ended: float

    def overlaps(self, other: Span) -> bool:
        return self.begun < other.ended and other.begun < self.ended


@dataclass(frozen=True)
class Run:
    """A call of ``tune``: what it printed, and what its processes did."""

    out: str
    spans: list[Span]

    def of(self, what: str) -> list[Span]:
        return sorted((s for s in self.spans if s.what == what), key=lambda span: span.begun)


def tune(folder: Path, *options: str, processes: int = 1) -> Run:
    log = folder / "log"
    log.write_text("")
    (folder / "graphs.py").write_text(SOURCE)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'tests' / 'workers' / 'fake_gpu'}{os.pathsep}{ROOT}",
        "CUDNNGRAPH_CACHE_DIR": str(folder / "cache"),
        "FAKE_GPU_LOG": str(log),
        "FAKE_GPU_PROCESSES": str(processes),
    }
    command = [sys.executable, "-m", "cudnngraph", "tune", "--graphs", str(folder / "graphs.py")]
    done = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in log.read_text().splitlines()]
    return Run(done.stdout, [Span(what, pid, float(a), float(b)) for what, pid, a, b in rows])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A run of many small graphs in three processes."""
    folder = tmp_path_factory.mktemp("jobs")
    return folder, tune(folder, "--jobs", "3", processes=3)


def test_processes_build_side_by_side_and_measure_one_by_one(ran: tuple[Path, Run]) -> None:
    _, run = ran
    builds, measures = run.of("build"), run.of("measure")
    assert Counter(span.process for span in builds) == dict.fromkeys(
        {span.process for span in builds}, COUNT // 3
    )
    assert len({span.process for span in builds}) == 3
    others = [(a, b) for a in builds for b in builds if a.process != b.process]
    assert any(a.overlaps(b) for a, b in others)
    assert len(measures) == COUNT
    assert all(a.ended <= b.begun for a, b in pairwise(measures))
    assert any(a.overlaps(b) for a in builds for b in measures if a.process != b.process), (
        "nobody waits to build while another measures"
    )


def test_every_graph_is_told_of_once_and_kept(ran: tuple[Path, Run]) -> None:
    folder, run = ran
    told = re.findall(rf"^(\d+) of {COUNT}: '(g\d+)': tuned, \d+\.\d s$", run.out, re.M)
    assert sorted((int(number), name) for number, name in told) == [
        (n + 1, f"g{n}") for n in range(COUNT)
    ]
    store = PlanStore(folder / "cache", seeds=None)
    kept = [entry.record for entry in store.scan() if entry.record is not None]
    assert len(kept) == COUNT and all(each.policy["tune"] == "autotune" for each in kept)
    assert run.out.count("add relu") == COUNT, "the table has each once"


def test_another_call_measures_nothing_again(ran: tuple[Path, Run]) -> None:
    folder, _ = ran
    again = tune(folder, "--jobs", "2", "--budget", "100")
    assert again.spans == []
    assert again.out.count(": disk, serialized, ") == COUNT
    assert again.out.endswith("nothing new was tuned: every graph has a tuned plan in the cache\n")
