"""The processes that build and check plans, when what is around them is killed, stopped, forked,
interrupted or short of everything: every task ends, and nothing outlives its user's process.

The workers are stand-ins (stand_in_worker.py), the users real processes (user_programs.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cudnngraph.select import processes, workers
from cudnngraph.select.processes import Server, Unusable
from cudnngraph.select.workers import Workers
from plans_cache import gate as gates
from plans_cache.gate import Gate
from tests.workers.user_programs import PATIENCE_S, POLICY, STAND_IN, graph, until

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
pytestmark = [linux]

ROOT = Path(__file__).parents[3]
GONE_S = 5.0  # in which what has no user any more ends


def lives(pid: int) -> bool:
    """Whether a process is there; a zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def gone(*pids: int, limit_s: float = GONE_S) -> bool:
    """Whether processes have ended in time."""
    return until(lambda: not any(map(lives, pids)), limit_s)


class Pool:
    """Workers that behave as told, and what they tried."""

    def __init__(self, folder: Path, behaviours: dict[str, str], most: int = 1) -> None:
        self._log = folder / "log"
        self._log.touch()
        told = json.dumps(behaviours)

        def command(file: int) -> Sequence[str]:
            return [sys.executable, str(STAND_IN), told, str(self._log), str(file)]

        self._forks = Server(command)
        self.workers = Workers(0, most, self._forks)

    def ask(self, name: str = "g") -> Any:
        return self.workers.first(graph(name), POLICY, {})

    @property
    def attempts(self) -> list[tuple[str, int, int]]:
        """Graph, engine and process of each, in order."""
        lines = [line.split() for line in self._log.read_text().splitlines()]
        return [(name, int(engine), int(pid)) for name, engine, pid in lines]

    @property
    def processes(self) -> list[int]:
        return list(dict.fromkeys(pid for _, _, pid in self.attempts))

    @property
    def server(self) -> int:
        assert self._forks._process is not None
        return self._forks._process.pid


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
    last = {pid: (name, engine) for name, engine, pid in pool.attempts}
    assert killed
    for name, answer in answers.items():
        assert set(answer.faults.values()) <= {"the process that tried it died of SIGKILL"}
        for choice in answer.faults:
            assert (name, choice.engine) in [last[pid] for pid in killed], "it was in flight"
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


# -- users' processes ------------------------------------------------------------------------------


class Program:
    """A user's process: what it says, its processes, and how it ended."""

    def __init__(self, nursery: Any, does: str, folder: Path, behaviours: dict[str, str]) -> None:
        self.folder = folder
        told = {"does": does, "folder": str(folder), "behaviours": behaviours}
        nursery.stdin.write(json.dumps(told) + "\n")
        nursery.stdin.flush()
        assert until((folder / "pid").exists)
        self.pid = int((folder / "pid").read_text())

    def said(self, *names: str) -> list[Any]:
        """What it has said under these names, waiting for each."""
        found: dict[str, Any] = {}

        def read() -> bool:
            path = self.folder / "said"
            for line in path.read_text().splitlines() if path.exists() else ():
                with contextlib.suppress(json.JSONDecodeError):  # half of a line
                    found.update(json.loads(line))
            return set(names) <= set(found) or self.ended

        until(read)
        read()
        assert set(names) <= set(found), (found, self.output)
        return [found[name] for name in names]

    @property
    def ended(self) -> bool:
        return (self.folder / "code").exists()

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text()

    def code(self, limit_s: float = PATIENCE_S) -> int:
        assert until(lambda: self.ended, limit_s), self.output
        return int((self.folder / "code").read_text())


@pytest.fixture(scope="module")
def nursery() -> Iterator[Any]:
    """The process that forks users' processes, with all imported."""
    path = Path(__file__).parents[2] / "workers" / "user_programs.py"
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


Start = Callable[..., Program]


@pytest.fixture
def user(nursery: Any, tmp_path: Path) -> Iterator[Start]:
    """Start a user's process that does what is said."""
    started: list[Program] = []

    def start(does: str, **behaviours: str) -> Program:
        told = {name.removeprefix("e"): does for name, does in behaviours.items()}
        started.append(Program(nursery, does, tmp_path, told))
        return started[-1]

    yield start
    for each in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)
        assert each.code() is not None


def test_a_user_that_is_killed_leaves_nothing(user: Start) -> None:
    program = user("waits", e4="hangs")
    worker, server = program.said("worker", "server")
    assert lives(worker) and lives(server)
    os.kill(program.pid, signal.SIGKILL)
    assert gone(worker, server)


@pytest.mark.parametrize(
    ("does", "code", "output"),
    [("returns", 0, ""), ("exits", 0, ""), ("raises", 1, "ValueError: a mistake of the user's")],
)
def test_a_user_that_ends_while_a_task_runs_ends_at_once_and_leaves_nothing(
    does: str, code: int, output: str, user: Start
) -> None:
    program = user(does, e4="hangs")
    worker, server = program.said("worker", "server")
    assert program.code(GONE_S) == code
    assert gone(worker, server)
    lines = program.output.splitlines()
    assert lines[-1:] == ([output] if output else [])
    assert program.output.count("Traceback") == bool(output), program.output


def test_an_interrupt_is_for_the_user_alone(user: Start, tmp_path: Path) -> None:
    """As a terminal sends it, to the whole process group."""
    program = user("is_interrupted", e4=f"waits for {tmp_path / 'go'}")
    program.said("waits")
    os.killpg(program.pid, signal.SIGINT)
    interrupted, done, blobs, faults = program.said("interrupted", "done", "blobs", "faults")
    assert interrupted and not done, "at once"
    assert blobs == ["b'plan 4'"] * 2 and faults == [0, 0], "the next task too"
    tried = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert tried == ["first", "second"], "no worker has seen it"
    assert program.code() == 0


def test_a_forked_child_has_workers_of_its_own(user: Start) -> None:
    program = user("forks", e7="is right")
    blobs, parents, blob, child, childs = program.said(
        "blobs", "parents", "blob", "child", "childs"
    )
    assert blobs == ["b'plan 7'"] * 2 and blob == "b'plan 7'" and parents != childs
    names: dict[str, set[str]] = {}
    for name, _, pid in map(str.split, (program.folder / "log").read_text().splitlines()):
        names.setdefault(pid, set()).add(name)
    assert sorted(map(sorted, names.values())) == [["after", "before"], ["child"]]
    try:
        os.kill(program.pid, signal.SIGKILL)
        assert gone(parents) and lives(child) and lives(childs)
    finally:
        os.kill(child, signal.SIGKILL)
    assert gone(childs)


def test_a_pool_of_forked_processes_works(user: Start) -> None:
    program = user("has_a_pool", e7="is right")
    blobs, server = program.said("blobs", "server")
    assert blobs == ["b'plan 7'"] * 4
    assert program.code() == 0 and program.output == ""
    pids = {int(line.split()[2]) for line in (program.folder / "log").read_text().splitlines()}
    assert len(pids) >= 2 and gone(server, *pids)


def test_a_user_that_ignores_its_children_has_workers(user: Start) -> None:
    program = user("ignores_children", e4="aborts", e7="is right")
    blob, faults = program.said("blob", "faults")
    assert (blob, faults) == ("b'plan 7'", [f"{workers.LOST} died of SIGABRT"])


def test_without_file_descriptors_there_are_no_workers(user: Start) -> None:
    why, blob = user("has_no_files", e7="is right").said("why", "blob")
    assert "Too many open files" in why
    assert blob == "b'plan 7'", "when there are some again"


def test_without_the_right_to_start_a_process_there_are_no_workers(user: Start) -> None:
    program = user("has_no_right", e7="is right")
    assert program.code() == 0
    assert program.output == "no thread can be started: can't start new thread\n"


def test_two_processes_with_one_cache_share_what_they_learn(user: Start, tmp_path: Path) -> None:
    """And while another one measures, none of their plans runs."""
    program = user("shares_a_cache", e4="aborts", e7="takes 0.05")
    (path,) = program.said("gate")
    runs = tmp_path / "log.runs"

    def counted() -> tuple[int, int]:
        text = runs.read_text() if runs.exists() else ""
        return text.count("begins"), text.count("ends")

    measured = 0

    def another() -> bool:
        return counted()[1] > measured or program.ended

    while not program.ended:
        assert until(another)
        with Gate(Path(path), 30.0).alone():
            before = counted()
            still = time.monotonic() + 0.05
            while time.monotonic() < still:
                assert counted() == before, "no plan runs beside what is measured"
        measured = counted()[1]
    assert measured
    assert program.code() == 0 and program.output.count("Traceback") == 0, program.output
    lines = (tmp_path / "said").read_text().splitlines()
    engines = {said["who"]: said["engines"] for said in map(json.loads, lines) if "who" in said}
    assert engines == {who: [7] * 6 for who in "abc"}
    tried = [line.split()[:2] for line in (tmp_path / "log").read_text().splitlines()]
    assert {name[0] for name, engine in tried if engine == "4"} <= {"a", "b"}, "once learned"
    assert len([None for name, engine in tried if name[0] == "c" and engine == "7"]) == 6


# -- how programs are started ----------------------------------------------------------------------

TEXT = """
import os, sys
sys.path.insert(0, {root!r})
import torch
import cudnngraph as cg
from cudnngraph.select import processes, workers
processes._PROGRAM = {program!r}
os.chdir({elsewhere!r})
sys.path[:0] = ["", {tools!r}, {path_like}]
def ask():
    g = cg.Graph("g")
    g.output("y", g.relu(g.input("x", (4,), torch.float16)))
    answer = workers.on(0).first(g.spec(), cg.Policy(allow_tf32=False), {{}}).result(60.0)
    with open({result!r}, "w") as file:
        file.write(str(answer.blob))
{call}
"""
IN_A_THREAD = """
import threading
thread = threading.Thread(target=ask)
thread.start()
thread.join()
"""


def program_that_stands_in(log: Path) -> str:
    """The fork server's own program, but for what it forks."""
    head, last = processes._PROGRAM.rstrip().rsplit("\n", 1)
    assert last.startswith("forkserver.serve(")
    return f"""{head}
import importlib.util, json, pathlib, queue, select
found = importlib.util.spec_from_file_location("stand_in_worker", {str(STAND_IN)!r})
stand_in = importlib.util.module_from_spec(found)
found.loader.exec_module(stand_in)
forkserver.serve(int(file), lambda: stand_in.load({{"7": "is right"}}, pathlib.Path({str(log)!r})))
"""


def test_programs_of_every_kind_have_workers(tmp_path: Path) -> None:
    """Without a main guard, from a string, in a thread, where other modules have the names of
    those that are needed, without standard streams."""
    elsewhere, tools = tmp_path / "elsewhere", tmp_path / "tools"
    for folder, names in (
        (elsewhere, "json queue select types random torch cudnngraph contextlib"),
        (tools, "json queue select random contextlib"),
    ):
        folder.mkdir()
        for name in names.split():
            (folder / f"{name}.py").write_text("raise ImportError('the wrong one')\n")

    def text(kind: str, call: str) -> str:
        return TEXT.format(
            root=str(ROOT),
            program=program_that_stands_in(tmp_path / f"{kind} log"),
            elsewhere=str(elsewhere),
            tools=str(tools),
            path_like=f"__import__('pathlib').Path({str(tools)!r})",
            result=str(tmp_path / kind),
            call=call,
        )

    running = {}
    started = text("stdin", IN_A_THREAD)
    running["stdin"] = subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE)
    assert running["stdin"].stdin is not None
    running["stdin"].stdin.write(f"exec({started!r})".encode())
    running["stdin"].stdin.close()
    script = tmp_path / "script.py"
    script.write_text(text("script", "ask()"))
    running["script"] = subprocess.Popen([sys.executable, str(script)])
    bare = tmp_path / "bare.py"
    bare.write_text(text("bare", "ask()"))
    closed = ["/bin/sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-I", str(bare)]
    running["bare"] = subprocess.Popen(closed)
    for kind, process in running.items():
        assert process.wait(PATIENCE_S) == 0, kind
        assert (tmp_path / kind).read_text() == "b'plan 7'", kind


# -- the gate --------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "gates" / "one.gate"


def side(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_many_share_a_gate(path: Path) -> None:
    both = threading.Barrier(2)

    def share() -> None:
        with Gate(path, 30.0).shared():
            both.wait(PATIENCE_S)

    threads = [side(share), side(share)]
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not both.broken and both.n_waiting == 0


@pytest.mark.parametrize("other", ["shared", "alone"])
def test_one_alone_excludes_all_others(path: Path, other: str) -> None:
    order: list[str] = []
    asks = threading.Event()

    def ask() -> None:
        asks.set()
        with getattr(Gate(path, 30.0), other)():
            order.append("the other")

    with Gate(path, 30.0).alone():
        thread = side(ask)
        asks.wait()
        thread.join(0.1)
        order.append("alone")
    thread.join(PATIENCE_S)
    assert order == ["alone", "the other"]


def test_who_is_to_be_alone_comes_before_a_stream_of_sharers(path: Path) -> None:
    inside, lock, stop = set[int](), threading.Lock(), threading.Event()

    def share(number: int) -> None:
        while not stop.is_set():
            with Gate(path, 30.0).shared():
                with lock:
                    inside.add(number)
                stop.wait(0.01 * (1 + number))
                with lock:
                    inside.discard(number)

    threads = [side(lambda number=number: share(number)) for number in range(4)]  # type: ignore[misc]
    assert until(lambda: len(inside) > 1)
    start = time.monotonic()
    with Gate(path, 30.0).alone():
        waited_s = time.monotonic() - start
        with lock:
            assert not inside
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert waited_s < 5.0


class Holder:
    """A forked process that has a gate to itself until it is killed."""

    def __init__(self, path: Path) -> None:
        here, there = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                with Gate(path).alone():
                    os.write(there, b"!")
                    time.sleep(600)
            finally:
                os._exit(0)
        os.close(there)
        assert os.read(here, 1) == b"!"
        os.close(here)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_a_holder_that_dies_frees_the_gate(path: Path) -> None:
    holder = Holder(path)
    threading.Timer(0.1, holder.end).start()
    start = time.monotonic()
    with Gate(path, 60.0).shared():
        assert time.monotonic() - start < 10.0


@pytest.mark.parametrize("how", ["shared", "alone"])
def test_a_holder_that_is_stopped_delays_others_by_the_timeout(path: Path, how: str) -> None:
    holder = Holder(path)
    try:
        os.kill(holder.pid, signal.SIGSTOP)
        start = time.monotonic()
        with getattr(Gate(path, 1.0), how)():
            assert 1.0 <= time.monotonic() - start < 1.9, "once"
    finally:
        holder.end()


def test_a_forked_child_holds_no_gate_of_its_parents(path: Path) -> None:
    """While it has it, and after."""
    with Gate(path, 30.0).alone():
        child = os.fork()
        if child == 0:
            time.sleep(600)
    try:
        start = time.monotonic()
        with Gate(path, 30.0).alone():
            assert time.monotonic() - start < 10.0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_child_forked_in_the_middle_keeps_no_gate_closed_when_its_parent_dies(
    path: Path,
) -> None:
    here, there = os.pipe()
    parent = os.fork()
    if parent == 0:
        with Gate(path, 30.0).alone():
            child = os.fork()
            if child == 0:
                os.write(there, f"{os.getpid()}\n".encode())
                time.sleep(600)
            time.sleep(600)
    child = int(os.read(here, 100))
    try:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        start = time.monotonic()
        with Gate(path, 30.0).shared():
            assert time.monotonic() - start < 10.0
    finally:
        os.kill(child, signal.SIGKILL)


def no_path(path: Path) -> Path | None:
    return None


def a_file_for_a_folder(path: Path) -> Path:
    path.parent.parent.mkdir()
    path.parent.touch()
    return path


def a_folder_for_the_file(path: Path) -> Path:
    path.parent.parent.mkdir()
    path.parent.mkdir(0o700)
    path.mkdir()
    return path


def others_may_write(path: Path) -> Path:
    path.parent.parent.mkdir()
    path.parent.parent.chmod(0o777)
    return path


def read_only(path: Path) -> Path:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    path.parent.parent.mkdir()
    path.parent.mkdir(0o500)
    return path


def no_locks(path: Path) -> Path:
    return path


@pytest.mark.parametrize(
    "where",
    [
        no_path,
        a_file_for_a_folder,
        a_folder_for_the_file,
        others_may_write,
        read_only,
        no_locks,
    ],
    ids=lambda where: where.__name__,
)
def test_where_there_can_be_no_gate_nobody_waits(
    where: Callable[[Path], Path | None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = where(path)

    def refused(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    if where is no_locks:
        monkeypatch.setattr(gates.fcntl, "flock", refused)
    files = len(os.listdir("/proc/self/fd"))
    start = time.monotonic()
    with Gate(made, 30.0).alone(), Gate(made, 30.0).shared():
        assert time.monotonic() - start < 10.0
    assert len(os.listdir("/proc/self/fd")) <= files  # others may close theirs meanwhile
