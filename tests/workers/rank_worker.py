"""Each rank of ``test_distributed.py``: processes with gloo, and a GPU that is not there.

Every rank has a cache directory of its own, and a fake library whose every plan is of the engine
with the rank's number: the engine of an executable says which rank chose it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudnngraph as cg
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.plan import Choice, Verified
from cudnngraph.cache import distributed, lookup
from cudnngraph.cache.state import STATE
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select import guard, heuristic, workers
from cudnngraph.select.workers import Answer
from tests.fakes import FakePlan, World

PATIENCE = timedelta(seconds=60)  # for what is sure to happen


class Rank(World):
    """A rank's world; ``before_build()`` is called whenever a plan is to be built."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        super().__init__(directory)
        self.rank, self.size = rank, size
        self.before_build: Callable[[], None] = lambda: None
        self.warnings: list[str] = []
        self.checked: Verified | None = None  # of the executable that was compiled last
        self.store: Any = dist.distributed_c10d._get_default_store()

    def build_first(self, spec: GraphSpec, policy: cg.Policy, index: int, ahead: Any = None) -> Any:
        self.built.append(spec.name)
        self.before_build()
        return self._first(spec)

    def autotune(
        self, spec: GraphSpec, policy: cg.Policy, bench: Any, tell: Any, *rest: Any, **how: Any
    ) -> Any:
        self.measured.append(spec.name)
        return heuristic.heuristic(spec, policy, self._first)

    def _first(self, spec: GraphSpec) -> Any:
        choice = Choice(self.rank, (("TILE_SIZE", 2),))
        return FakePlan(choice), (Outcome(Candidate(0, choice, "eng"), True, "", 0),)

    def tell(self, what: str) -> None:
        self.store.set(f"test/{what}", b"")

    def wait(self, *what: str) -> None:
        self.store.wait([f"test/{each}" for each in what], PATIENCE)

    def compiled(self, channels: int, **options: Any) -> dict[str, Any]:
        """Compile the graph of that many channels; its tier and whose plan it got, or the error."""
        g = cg.Graph("g")
        x, w = (g.input(name, (8, channels, 3, 3), torch.float16) for name in "xw")
        g.output("y", g.conv(x, w))
        try:
            exe = g.compile("cuda:0", **options)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        choice = exe.steps[0].choice
        assert choice is not None
        self.checked = exe.steps[0].verified
        return {"tier": exe.tier, "of": choice.engine}


# Each with a graph of its own; all ranks begin one together.


def together(rank: Rank) -> dict[str, Any]:
    """All ask at once, the one that is first takes its time; later they ask again."""
    rank.before_build = lambda: rank.wait(*(f"asked {each}" for each in range(rank.size)))
    rank.tell(f"asked {rank.rank}")
    first = rank.compiled(8)
    files = len(rank.files("json"))
    dist.barrier()
    cg.cache_clear()
    second = rank.compiled(8)
    return {"first": first, "second": second, "built": len(rank.built), "files": files}


def tuned(rank: Rank) -> dict[str, Any]:
    """The graph of :func:`together` once more, to be measured."""
    return {**rank.compiled(8, tune="autotune"), "measured": len(rank.measured)}


def fails(rank: Rank) -> dict[str, Any]:
    """The first rank raises while the others wait for it."""
    if rank.rank:
        rank.wait("failing")
        return {**rank.compiled(16), "built": len(rank.built)}

    def raises() -> None:
        rank.tell("failing")
        raise ZeroDivisionError("a mistake while choosing")

    rank.before_build = raises
    return rank.compiled(16)


def absent(rank: Rank) -> dict[str, Any]:
    """The last rank never asks; it waits until the others are through."""
    last = rank.size - 1
    if rank.rank == last:
        rank.wait(*(f"through {each}" for each in range(last)))
        return {"built": len(rank.built)}
    found = rank.compiled(24)
    rank.tell(f"through {rank.rank}")
    return {**found, "built": len(rank.built)}


def late(rank: Rank) -> dict[str, Any]:
    """The first rank takes longer than the others wait."""
    if rank.rank:
        rank.wait("slow")
        distributed.WAIT_S = 0.2
        found = rank.compiled(32)
        rank.tell(f"gave up {rank.rank}")
        return found
    rank.before_build = lambda: (
        rank.tell("slow"),
        rank.wait(*(f"gave up {each}" for each in range(1, rank.size))),
    )[0]
    return rank.compiled(32)


def served(rank: Rank) -> dict[str, Any]:
    """Only the first rank has a record, and nobody may build."""
    if rank.rank == 0:
        several, distributed.is_distributed = distributed.is_distributed, lambda: False
        rank.compiled(40)
        distributed.is_distributed = several
        cg.cache_clear()
        rank.built.clear()
        found = rank.compiled(40, tune="cached")
        rank.tell("served")
    else:
        rank.wait("served")
        found = rank.compiled(40, tune="cached")
    return {**found, "built": len(rank.built)}


def nobody(rank: Rank) -> dict[str, Any]:
    """No rank has a record, and nobody may build."""
    return rank.compiled(48, tune="cached")


def stale(rank: Rank) -> dict[str, Any]:
    """The choice of the first rank is not to be had on the others."""
    if rank.rank == 0:
        found = rank.compiled(56)
        rank.tell("chosen")
        return found
    rank.wait("chosen")
    rank.gone = {0}
    return rank.compiled(56)


def forged(rank: Rank) -> dict[str, Any]:
    """The first rank sends the others something that is no record."""
    if rank.rank == 0:
        agree = distributed.choose_once
        distributed.choose_once = lambda name, first, other: agree(
            name, lambda: (first()[0], b"{}"), other
        )
        found = rank.compiled(64)
        rank.tell("handed on")
        return found
    rank.wait("handed on")
    return rank.compiled(64)


class Verifies:
    """Workers that find the plan of a rank, and that it is right; each asked for is counted."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.asked = 0

    def first(self, *args: Any, **options: Any) -> Future[Answer]:
        self.asked += 1
        choice = Choice(self._rank, (("TILE_SIZE", 2),))
        found: Future[Answer] = Future()
        outcomes = (Outcome(Candidate(0, choice, "eng"), True, "", 0),)
        found.set_result(Answer(outcomes=outcomes, blob=b"plan", error=1e-4))
        return found

    def check(self, *args: Any, **options: Any) -> Future[Answer]:
        self.asked += 1
        found: Future[Answer] = Future()
        found.set_result(Answer(error=1e-4))
        return found


def verified(rank: Rank) -> dict[str, Any]:
    """Plans are checked by workers, which each rank has of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        at_work = Verifies(rank.rank)
        here = Verified(1e-4, f"the GPU of rank {rank.rank}", 91900, "1.28.0", "2.13")
        monkeypatch.setattr(workers, "on", lambda index: at_work)
        monkeypatch.setattr(guard, "load", lambda blob, choice, index: FakePlan(choice))
        monkeypatch.setattr(guard.handles, "handle", lambda index: None)
        monkeypatch.setattr(STATE, "rejections", {})
        monkeypatch.setattr(Verified, "here", classmethod(lambda cls, index, error: here))
        found = rank.compiled(72, verify="isolated")
        by = None if rank.checked is None else rank.checked.gpu
        return {**found, "asked": at_work.asked, "by": by}


SCENARIOS = (together, tuned, fails, absent, late, served, nobody, stale, forged, verified)


class _Kept(logging.Handler):
    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(record.getMessage())


def work(number: int, size: int, port: int, folder: Path) -> None:
    """Run every scenario as rank ``number`` of ``size``; leaves ``folder/<number>.json``."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=number, world_size=size, timeout=PATIENCE)
    found: dict[str, Any] = {}
    directory = folder / f"cache of {number}"
    patience = distributed.WAIT_S
    for scenario in SCENARIOS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            for name in ("is_distributed", "choose_once", "WAIT_S"):
                monkeypatch.setattr(distributed, name, getattr(distributed, name))
            rank = Rank(directory, number, size)
            rank.install(monkeypatch)
            kept: list[str] = []
            handler = _Kept(kept)
            lookup._log.addHandler(handler)
            distributed._log.addHandler(handler)
            dist.barrier()
            found[scenario.__name__] = {**scenario(rank), "warnings": kept}
            lookup._log.removeHandler(handler)
            distributed._log.removeHandler(handler)
            dist.barrier()
    assert patience == distributed.WAIT_S
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
