"""The processes that build and check plans, by a stand-in without a GPU: what becomes of a task
when its process faults, hangs, is killed or does not start."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.plan import Choice
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select import processes, workers
from cudnngraph.select.processes import Server, Unusable
from cudnngraph.select.verification import RANKING
from cudnngraph.select.workers import Workers

STAND_IN = Path(__file__).parents[2] / "workers" / "stand_in_worker.py"
POLICY = cg.Policy(allow_tf32=False)


def graph(name: str = "g") -> GraphSpec:
    g = cg.Graph(name)
    g.output("y", g.relu(g.input("x", (4,), torch.float16)))
    return g.spec()


class Pool:
    """Workers that behave as told, and what they tried."""

    def __init__(self, folder: Path, behaviours: dict[str, str], most: int = 1) -> None:
        self._log = folder / "log"
        told = json.dumps(behaviours)

        def command(file: int) -> Sequence[str]:
            return [sys.executable, str(STAND_IN), told, str(self._log), str(file)]

        self.workers = Workers(0, most, Server(command))

    def tried(self) -> list[int]:
        """The engines in the order of the attempts."""
        return [int(line.split()[1]) for line in self._log.read_text().splitlines()]

    def processes(self) -> set[int]:
        return {int(line.split()[2]) for line in self._log.read_text().splitlines()}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LIMIT_S", 1.0)
    monkeypatch.setattr(workers, "IDLE_S", 1.0)


def test_the_first_plan_that_passes_is_the_answer(tmp_path: Path) -> None:
    pool = Pool(tmp_path, {"4": "wrong: off by 0.5", "7": "is right", "8": "is right"})
    answer = pool.workers.first(graph(), POLICY, {}).result(30.0)
    assert answer.blob == b"plan 7" and answer.error == 1e-4 and not answer.faults
    assert [(o.candidate.choice.engine, o.accepted, o.reason) for o in answer.outcomes] == [
        (4, False, "wrong: off by 0.5"),
        (7, True, ""),
    ]
    assert pool.tried() == [4, 7]


@pytest.mark.parametrize(
    ("behaviour", "how"),
    [
        ("hangs", "hangs, or takes more than 1 s"),
        ("aborts", "died of SIGABRT"),
        ("is killed", "died of SIGKILL"),
        ("exits", "ended with exit code 3"),
        ("faults", "CUDA error: misaligned address"),
    ],
)
def test_a_plan_that_ends_its_process_is_rejected_and_the_task_goes_on(
    tmp_path: Path, behaviour: str, how: str
) -> None:
    pool = Pool(tmp_path, {"4": behaviour, "7": "is right"})
    answer = pool.workers.first(graph(), POLICY, {}).result(30.0)
    assert answer.blob == b"plan 7"
    assert answer.faults == {Choice(4, ()): f"the process that tried it {how}"}
    assert pool.tried() == [4, 7], "once"
    assert len(pool.processes()) == 2
    again = pool.workers.first(graph(), POLICY, answer.faults).result(30.0)
    assert again.blob == b"plan 7" and not again.faults
    assert pool.tried() == [4, 7, 7], "not again"


@pytest.mark.parametrize("task", ["first", "these", "rank"])
def test_a_ranking_that_ends_its_process_refuses_the_graph(tmp_path: Path, task: str) -> None:
    """On an H200 cuDNN's heuristics had a segmentation fault for one of 7,607 random graphs."""
    pool = Pool(tmp_path, {"ranking": "aborts", "7": "is right"})
    if task == "first":
        answer = pool.workers.first(graph(), POLICY, {}).result(30.0)
    elif task == "rank":
        answer = pool.workers.rank(graph(), POLICY, {}).result(30.0)
    else:
        (asked,) = pool.workers.these(graph(), POLICY, [Choice(7, ())])
        answer = asked.result(30.0)
    died = "the process that tried it died of SIGABRT"
    assert answer.refused == (f"cuDNN's ranking of its engines: {died}",)
    assert answer.faults == {RANKING: died}
    assert pool.tried() == [-1], "once"
    again = pool.workers.first(graph(), POLICY, answer.faults).result(30.0)
    assert again.refused and pool.tried() == [-1], "not again"


def test_a_ranking_is_what_the_library_proposes(tmp_path: Path) -> None:
    pool = Pool(tmp_path, {"4": "is right", "7": "is right"})
    answer = pool.workers.rank(graph(), POLICY, {}).result(30.0)
    assert [(c.index, c.choice, c.tag) for c in answer.candidates] == [
        (0, Choice(4, ()), "eng4"),
        (1, Choice(7, ()), "eng7"),
    ]


def test_where_no_plan_passes_every_reason_is_told(tmp_path: Path) -> None:
    pool = Pool(tmp_path, {"4": "aborts", "7": "wrong", "8": "does not build"})
    answer = pool.workers.first(graph(), POLICY, {}).result(30.0)
    assert answer.blob is None and list(answer.faults) == [Choice(4, ())]
    assert [(each.accepted, each.reason) for each in answer.outcomes] == [
        (False, "not tried again"),
        (False, "wrong"),
        (False, "does not build"),
    ]


def test_a_candidate_that_the_search_asks_for_and_one_that_was_chosen_before(
    tmp_path: Path,
) -> None:
    pool = Pool(tmp_path, {"4": "aborts", "7": "is right", "8": "wrong: off by 2"})
    choices = [Choice(7, ()), Choice(4, ()), Choice(8, ())]
    one, dead, off = [each.result(30.0) for each in pool.workers.these(graph(), POLICY, choices)]
    assert one.blob == b"plan 7" and one.wrong is None
    assert off.wrong == "wrong: off by 2" and off.outcomes[0].wrong
    assert pool.tried() == [7, 4, 8], "what was done is not done again"
    assert dead.blob is None and dead.wrong == "the process that tried it died of SIGABRT"
    bad = pool.workers.check(graph(), POLICY, Choice(8, ())).result(30.0)
    assert bad.wrong == "wrong: off by 2"


@pytest.mark.parametrize(
    ("behaviours", "why"),
    [
        ({"start": "unusable"}, "busy or unavailable"),
        ({"start": "nothing"}, "a worker does not start: ended with exit code 0"),
        ({"task": "is lost"}, "three workers ended without a word: the last ended with exit code"),
    ],
)
def test_where_there_are_no_workers_that_is_said(
    tmp_path: Path, behaviours: dict[str, str], why: str
) -> None:
    pool = Pool(tmp_path, behaviours)
    with pytest.raises(Unusable, match=why.replace("(", r"\(")):
        pool.workers.first(graph(), POLICY, {}).result(60.0)


def test_where_no_process_may_be_started_that_is_said() -> None:
    refused = Workers(0, 1, Server(lambda file: ["/nowhere/python"]))
    with pytest.raises(Unusable, match="no process can be started"):
        refused.first(graph(), POLICY, {}).result(30.0)


def test_a_programming_error_goes_through(tmp_path: Path) -> None:
    pool = Pool(tmp_path, {"4": "fails"})
    with pytest.raises(RuntimeError, match="a worker failed: RuntimeError: a programming error"):
        pool.workers.first(graph(), POLICY, {}).result(30.0)


def test_several_work_at_a_time_and_none_is_left_when_idle(tmp_path: Path) -> None:
    pool = Pool(tmp_path, {"7": "is right"}, most=3)
    futures = [pool.workers.first(graph(f"g{n}"), POLICY, {}) for n in range(24)]
    assert all(future.result(30.0).blob == b"plan 7" for future in futures)
    assert 2 <= len(pool.processes()) <= 3
    deadline = time.monotonic() + 10.0
    while any(map(_lives, pool.processes())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_lives, pool.processes()))
    assert pool.workers.first(graph(), POLICY, {}).result(30.0).blob == b"plan 7", (
        "and started again"
    )


def test_processes_that_tune_at_a_time_share_the_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 16)
    monkeypatch.setattr(workers, "_beside", 1)
    found = {}
    for count in (1, 4, 8, 16, 64):
        monkeypatch.setattr(workers, "_pools", {})
        workers.one_of(count)
        found[count] = workers.on(0)._most
    assert found == {1: workers.MOST, 4: 3, 8: 1, 16: 1, 64: 1}, "each has one of its own"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no processes")
def test_processors_are_those_that_the_process_may_run_on() -> None:
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        assert workers.cores() == 1
    finally:
        os.sched_setaffinity(0, mine)
    assert workers.cores() == len(mine)


@pytest.mark.parametrize(("gib", "most"), [(2, 1), (8, 3), (24, 10), (80, workers.MOST)])
def test_no_more_processes_than_a_quarter_of_the_memory_holds(
    gib: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 64)
    monkeypatch.setattr(workers, "_beside", 1)
    monkeypatch.setattr(workers, "_pools", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    told = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    assert workers.on(0)._most == most


def test_threads_share_the_workers(tmp_path: Path) -> None:
    pool = Pool(tmp_path, {"4": "aborts", "7": "is right"}, most=2)
    found: list[bytes | None] = []

    def ask() -> None:
        found.append(pool.workers.first(graph(), POLICY, {}).result(60.0).blob)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"plan 7"] * 6


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_workers_that_are_started_early_do_the_first_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    fork = Server.fork

    def counted(self: Server, data: object) -> object:
        started.append(0)
        return fork(self, data)

    monkeypatch.setattr(Server, "fork", counted)
    pool = Pool(tmp_path, {"7": "is right"}, most=3)
    pool.workers.start()
    pool.workers.start()
    deadline = time.monotonic() + 20.0
    while len(started) < workers.EARLY and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(started) == workers.EARLY, "before there is a task, and no more of them"
    assert pool.workers.first(graph(), POLICY, {}).result().blob == b"plan 7"
    assert len(started) == workers.EARLY


def test_workers_that_cannot_be_started_early_are_refused_with_the_first_task() -> None:
    def command(file: int) -> Sequence[str]:
        raise Unusable("no process can be started")

    pool = Workers(0, 2, Server(command))
    pool.start()
    with pytest.raises(Unusable, match="no process can be started"):
        pool.first(graph(), POLICY, {}).result()
