"""Processes of users: killed, interrupted or forked, they leave nothing behind.

The workers are stand-ins (stand_in_worker.py), the users real processes (user_programs.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cudnngraph.select import processes, workers
from plans_cache.gate import Gate
from tests.pools import GONE_S, gone, lives
from tests.workers.user_programs import PATIENCE_S, STAND_IN, until

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
pytestmark = [linux]
ROOT = Path(__file__).parents[3]


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
        """Return what the program has said under these names, waiting for each."""
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
