"""Builds that workers begin ahead of a compile, on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.plan import Verified
from cudnngraph.cache import lookup
from cudnngraph.executor import streams
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.runtime import compile as compiling
from cudnngraph.runtime.program import Program
from cudnngraph.select import guard, workers
from cudnngraph.select.workers import Answer
from tests.fakes import FakePlan, World, choice_for

CUDA = torch.device("cuda:0")
POLICY = cg.Policy(tune="heuristic", verify="isolated", kernels=False, allow_tf32=False)
CHECKED = Verified(1e-4, "a GPU", 91900, "1.28.0", "2.13")


def graph(anchors: int = 8, batch: int = 2) -> GraphSpec:
    """Convolutions of several sizes, as many as are cut at each."""
    g = cg.Graph("g")
    x = g.input("x", (batch, 8, 16, 16), torch.float16, layout="channels_last")
    for at in range(anchors):
        channels = x.shape[1]
        shape = (8 * (1 + at % 3), channels, 3, 3)
        w = g.input(f"w{at}", shape, torch.float16, layout="channels_last")
        x = g.relu(g.conv(x, w, padding=1))
    g.output("y", x)
    return g.spec()


class Pool:
    """Workers that answer at once, or when told, and what they were asked for."""

    def __init__(self) -> None:
        self.asked: list[GraphSpec] = []
        self.futures: list[Future[Answer]] = []
        self.waits = False
        self.starts = 0

    def first(self, spec: GraphSpec, *args: Any, **options: Any) -> Future[Answer]:
        self.asked.append(spec)
        self.futures.append(Future())
        if not self.waits:
            self.answer()
        return self.futures[-1]

    def answer(self) -> None:
        for spec, future in zip(self.asked, self.futures, strict=True):
            if not future.done():
                taken = Outcome(Candidate(0, choice_for(spec), "eng"), True)
                future.set_result(Answer(outcomes=(taken,)))

    def start(self) -> None:
        self.starts += 1


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    made = Pool()
    World(tmp_path).install(monkeypatch)
    monkeypatch.setattr(workers, "on", lambda index: made)
    monkeypatch.setattr(guard, "_in_process", "")
    monkeypatch.setattr(guard, "replay", lambda spec, choice, index: FakePlan(choice))
    monkeypatch.setattr(guard.handles, "handle", lambda index: None)
    monkeypatch.setattr(Verified, "here", classmethod(lambda cls, index, error: CHECKED))
    monkeypatch.setattr(streams, "streams", lambda device: [])
    monkeypatch.setattr(Program, "_torch_run", lambda self, step: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield made


def steps(executable: cg.Executable) -> list[Any]:
    return [(step.choice, step.decisions) for step in executable.steps]


def test_what_was_begun_is_what_a_compile_takes(pool: Pool) -> None:
    pool.waits = True
    begun = compiling.begin(graph(), CUDA, policy=POLICY)
    assert begun is not None and pool.asked, "before anything is waited for"
    asked = len(pool.asked)
    pool.answer()
    made = compiling.compile(graph(), CUDA, policy=POLICY, begun=begun)
    assert made.tier == "built" and len(pool.asked) == asked, "nothing is built twice"
    begun.cancel()
    lookup.store().remove(next(iter(lookup.store().scan())).id)
    cg.cache_clear()
    pool.waits = False
    alone = compiling.compile(graph(), CUDA, policy=POLICY)
    assert alone.tier == "built" and steps(alone) == steps(made)


def test_what_nobody_takes_is_not_built(pool: Pool) -> None:
    pool.waits = True
    begun = compiling.begin(graph(), CUDA, policy=POLICY)
    assert begun is not None
    begun.cancel()
    assert pool.futures and all(each.cancelled() for each in pool.futures)


def test_what_is_kept_or_in_memory_is_not_begun(pool: Pool) -> None:
    assert compiling.builds(graph(), CUDA, policy=POLICY)
    compiling.compile(graph(), CUDA, policy=POLICY)
    assert not compiling.builds(graph(), CUDA, policy=POLICY)
    cg.cache_clear()  # as in a new process
    before = cg.cache_stats()
    assert not compiling.builds(graph(), CUDA, policy=POLICY)
    assert compiling.begin(graph(), CUDA, policy=POLICY) is None
    assert cg.cache_stats() == before, "a look that counts as none"
    assert compiling.compile(graph(), CUDA, policy=POLICY).tier.startswith("disk")
    assert compiling.builds(graph(batch=3), CUDA, policy=POLICY)


@pytest.mark.parametrize(
    ("change", "builds"),
    [
        ({"tune": "cached"}, False),
        ({"tune": "autotune"}, True),
        ({"verify": "off"}, True),
        ({"verify": "inprocess"}, True),
        ({"fallback": "error"}, True),
    ],
)
def test_nothing_is_begun_that_would_not_be_asked_for(
    change: dict[str, Any], builds: bool, pool: Pool
) -> None:
    policy = replace(POLICY, **change)
    assert compiling.builds(graph(), CUDA, policy=policy) is builds
    assert compiling.begin(graph(), CUDA, policy=policy) is None and not pool.asked


def test_ranks_and_cpus_begin_nothing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compiling.builds(graph(), "cpu", policy=POLICY)
    compiling.start_workers(torch.device("cpu"), POLICY)
    monkeypatch.setattr(compiling, "is_distributed", lambda: True)
    assert not compiling.builds(graph(), CUDA, policy=POLICY)
    compiling.start_workers(CUDA, POLICY)
    assert pool.starts == 0


def test_workers_start_early_if_nothing_is_kept(pool: Pool) -> None:
    for policy in (POLICY, replace(POLICY, verify="off"), replace(POLICY, tune="cached")):
        compiling.start_workers(CUDA, policy)
    assert pool.starts == 1
    compiling.compile(graph(), CUDA, policy=POLICY)
    compiling.start_workers(CUDA, POLICY)
    assert pool.starts == 1
