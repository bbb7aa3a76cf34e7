"""Workers under stress: killed, stopped, or refused what they need; every task ends all the same.

The workers are stand-ins (stand_in_worker.py).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cudnngraph.select import processes, workers
from cudnngraph.select.processes import Server, Unusable
from cudnngraph.select.workers import Workers
from tests.pools import Pool, gone, lives
from tests.workers.user_programs import PATIENCE_S, POLICY, graph, until

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
pytestmark = [linux]
ROOT = Path(__file__).parents[3]


# -- killed and stopped ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_workers_killed_at_random_moments_lose_what_they_were_at_alone(
    seed: int, tmp_path: Path
) -> None:
    pool = Pool(tmp_path, {"4": "wrong", "7": "takes 0.03", "8": "is right"}, most=3)
    randomly, killed, stop = random.Random(seed), set[int](), threading.Event()

    def kill() -> None:
        while not stop.wait(randomly.uniform(0.0, 0.1)) and len(killed) < 10:
            alive = [pid for pid in pool.processes if pid not in killed and lives(pid)]
            if alive:
                pid = randomly.choice(alive)
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    names = [f"g{number}" for number in range(40)]
    futures = {name: pool.ask(name) for name in names}
    killer = threading.Thread(target=kill)
    killer.start()
    answers = {name: future.result(PATIENCE_S) for name, future in futures.items()}
    stop.set()
    killer.join()
    # A worker that is killed when it has written down an attempt and not said so was heard of at
    # the one before.
    last: dict[int, list[tuple[str, int]]] = {}
    for name, engine, pid in pool.attempts:
        before = last.get(pid, [])[-1:]
        last[pid] = [each for each in before if each[0] == name] + [(name, engine)]
    assert killed
    for name, answer in answers.items():
        assert set(answer.faults.values()) <= {"the process that tried it died of SIGKILL"}
        for choice in answer.faults:
            assert (name, choice.engine) in [each for pid in killed for each in last[pid]]
        if not {7, 8} & {choice.engine for choice in answer.faults}:
            assert answer.blob == b"plan 7"
    assert sum(len(answer.faults) for answer in answers.values()) <= len(killed)


def test_no_plan_is_blamed_where_the_fork_server_is_killed(tmp_path: Path) -> None:
    go = tmp_path / "go"
    pool = Pool(tmp_path, {"4": f"waits for {go}"}, most=2)
    futures = [pool.ask(name) for name in ("a", "b")]
    assert until(lambda: pool.attempts)
    first, old = pool.server, pool.processes
    os.kill(first, signal.SIGKILL)
    assert gone(*old), "its workers end with it"
    go.touch()
    for future in futures:
        answer = future.result(PATIENCE_S)
        assert (answer.blob, answer.faults) == (b"plan 4", {})
    assert pool.server != first
    assert len([each for each in pool.attempts if each[0] == "a"]) == 2, "tried again"


def test_a_worker_that_ends_while_the_fork_server_is_stopped_costs_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "START_S", 2.0)
    pool = Pool(tmp_path, {"7": "is right"})
    assert pool.ask().result(PATIENCE_S).blob == b"plan 7"
    first, (worker,) = pool.server, pool.processes
    os.kill(first, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    answer = pool.ask().result(PATIENCE_S)
    assert (answer.blob, answer.faults) == (b"plan 7", {})
    assert pool.server != first and not lives(first)


def test_a_plan_that_hangs_while_the_fork_server_is_stopped_is_ended_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "START_S", 2.0)
    monkeypatch.setattr(processes, "LIMIT_S", 0.5)
    pool = Pool(tmp_path, {"4": "hangs", "7": "is right"})
    future = pool.ask()
    assert until(lambda: pool.attempts)
    os.kill(pool.server, signal.SIGSTOP)
    answer = future.result(PATIENCE_S)
    assert answer.blob == b"plan 7"
    assert list(answer.faults.values()) == [f"{workers.LOST} hangs, or takes more than 0.5 s"]
    assert gone(pool.processes[0])


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit(5)", "what forks it ended with exit code 5"),
        ("import time; time.sleep(600)", "what forks it does not answer within 0.5 s"),
        ("import os; os.abort()", "what forks it ended with exit code -6"),
    ],
)
def test_a_fork_server_that_dies_at_its_start_is_said(
    program: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "START_S", 0.5)
    started: list[int] = []
    real = subprocess.Popen

    def popen(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        started.append(made.pid)
        return made

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    refused = Workers(0, 1, Server(lambda file: [sys.executable, "-c", program]))
    with pytest.raises(Unusable, match=why):
        refused.first(graph(), POLICY, {}).result(PATIENCE_S)
    assert len(started) == 2 and gone(*started)


def test_a_fork_that_is_refused_harms_none_of_the_workers_that_are_there(tmp_path: Path) -> None:
    go = tmp_path / "go"
    pool = Pool(tmp_path, {"4": f"waits for {go}", "forks": "1"}, most=2)
    pool.workers._start_s = 0.01  # two tasks are worth two workers
    futures = [pool.ask(name) for name in ("a", "b")]
    assert until(lambda: pool.workers._most == 1), "the second was refused"
    go.touch()
    for future in futures:
        answer = future.result(PATIENCE_S)
        assert (answer.blob, answer.faults) == (b"plan 4", {})
    assert len(pool.processes) == 1 and len(pool.attempts) == 2


def test_where_the_only_fork_is_refused_that_is_said(tmp_path: Path) -> None:
    pool = Pool(tmp_path, {"7": "is right", "forks": "0"})
    with pytest.raises(Unusable, match="a worker does not start: BlockingIOError: Resource temp"):
        pool.ask().result(PATIENCE_S)


@pytest.mark.parametrize("error", [PermissionError, BlockingIOError, RuntimeError])
def test_where_no_process_may_be_started_that_is_said(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **options: Any) -> Any:
        raise error("no right to")

    monkeypatch.setattr(processes.subprocess, "Popen", refused)
    pool = Pool(tmp_path, {"7": "is right"})
    for _ in range(2):
        with pytest.raises(Unusable, match="no process can be started: no right to"):
            pool.ask().result(PATIENCE_S)
    monkeypatch.undo()
    assert pool.ask().result(PATIENCE_S).blob == b"plan 7"


@pytest.mark.parametrize("executable", [None, "", "/nowhere/python"])
def test_where_python_is_not_to_be_found_that_is_said(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(Unusable, match="no process can be started: "):
        Workers(0, 1, Server()).first(graph(), POLICY, {}).result(PATIENCE_S)


def test_where_no_thread_can_be_started_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(tmp_path, {"7": "is right"})

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        futures = [pool.ask(), pool.ask()]
    for future in futures:
        with pytest.raises(Unusable, match="no thread can be started: can't start new thread"):
            future.result(PATIENCE_S)
    assert pool.ask().result(PATIENCE_S).blob == b"plan 7", "when there is one again"


# -- how many --------------------------------------------------------------------------------------


def test_quick_tasks_use_one_process(tmp_path: Path) -> None:
    pool = Pool(tmp_path, {"7": "is right", "start": "takes 1"}, most=4)
    futures = [pool.ask(f"g{number}") for number in range(4)]
    assert all(future.result(PATIENCE_S).blob == b"plan 7" for future in futures)
    for number in range(4):
        assert pool.ask(f"h{number}").result(PATIENCE_S).blob == b"plan 7"
    assert len(pool.processes) == 1


def test_many_slow_tasks_use_as_many_processes_as_they_may(tmp_path: Path) -> None:
    pool = Pool(tmp_path, {"7": "takes 0.4"}, most=3)
    futures = [pool.ask(f"g{number}") for number in range(10)]
    assert all(future.result(PATIENCE_S).blob == b"plan 7" for future in futures)
    assert len(pool.processes) == 3


def test_when_idle_neither_worker_nor_server_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.2)
    pool = Pool(tmp_path, {"7": "is right", "idle_s": "0.5"})
    assert pool.ask().result(PATIENCE_S).blob == b"plan 7"
    first, (worker,) = pool.server, pool.processes
    assert gone(worker, first)
    assert pool.workers._threads == 0
    assert pool.ask().result(PATIENCE_S).blob == b"plan 7", "and started anew"
    assert pool.server != first and len(pool.processes) == 2
