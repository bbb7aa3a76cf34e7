"""Programs of users, which start workers and then end, are interrupted, fork, or may do little.

    python user_programs.py

imports cudnngraph once. For each line of its input, {"does", "folder", "behaviours"}, it forks a
process in a session of its own that does what the function of that name does, with workers as
stand_in_worker.py has them, and ends as a program does: at the end of this file. What it says goes
to FOLDER/said, a line of JSON each, its output to FOLDER/out and its exit code to FOLDER/code.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph import settings
from cudnngraph.backend import env, handles
from cudnngraph.backend.env import EnvKey
from cudnngraph.backend.plan import Choice, Verified
from cudnngraph.cache import lookup
from cudnngraph.select import guard, workers
from cudnngraph.select.processes import Server, Unusable
from cudnngraph.select.workers import Answer, Workers

STAND_IN = Path(__file__).with_name("stand_in_worker.py")
POLICY = cg.Policy(allow_tf32=False, verify="isolated")
PATIENCE_S = 30.0


def graph(name: str = "g", size: int = 4) -> cg.GraphSpec:
    g = cg.Graph(name)
    g.output("y", g.relu(g.input("x", (size,), torch.float16)))
    return g.spec()


def until(condition: Callable[[], Any], limit_s: float = PATIENCE_S) -> bool:
    """Whether a condition came true in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class User:
    """The tools of such a program."""

    def __init__(self, folder: Path, behaviours: dict[str, str]) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.touch()
        self._told = json.dumps(behaviours)
        workers.Server = partial(Server, self._command)  # type: ignore[misc,assignment,attr-defined]
        workers._server = workers.Server()
        workers._pools[0] = Workers(0, 2)

    def _command(self, file: int) -> Sequence[str]:
        return [sys.executable, str(STAND_IN), self._told, str(self.log), str(file)]

    def ask(self, name: str = "g") -> Future[Answer]:
        return workers.on(0).first(graph(name), POLICY, {})

    def attempts(self) -> list[list[str]]:
        return [line.split() for line in self.log.read_text().splitlines()]

    def wait_for_attempts(self, count: int) -> None:
        assert until(lambda: len(self.attempts()) >= count), self.attempts()

    def say(self, **what: Any) -> None:
        with (self.folder / "said").open("a") as file:
            file.write(json.dumps(what) + "\n")


def server() -> int:
    """The process that forks workers."""
    assert workers._server._process is not None
    return workers._server._process.pid


# -- what they do ----------------------------------------------------------------------------------


def begins(user: User) -> Future[Answer]:
    """Start something that hangs."""
    asked = user.ask()
    user.wait_for_attempts(1)
    user.say(server=server(), worker=int(user.attempts()[0][2]))
    return asked


def waits(user: User) -> None:
    """To be killed meanwhile."""
    begins(user).result()


def returns(user: User) -> None:
    begins(user)


def exits(user: User) -> None:
    begins(user)
    os._exit(0)


def raises(user: User) -> None:
    begins(user)
    raise ValueError("a mistake of the user's")


def is_interrupted(user: User) -> None:
    """Engine 4 waits for a file; a second task waits for another one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    first = user.ask("first")
    user.wait_for_attempts(1)
    try:
        user.say(waits=True)
        first.result(PATIENCE_S)
    except KeyboardInterrupt:
        user.say(interrupted=True, done=first.done())
    (user.folder / "go").touch()
    second = user.ask("second")
    found = [each.result(PATIENCE_S) for each in (first, second)]
    user.say(blobs=[str(each.blob) for each in found], faults=[len(each.faults) for each in found])


def forks(user: User) -> None:
    """The child has workers of its own and lives on; the parent is to be killed."""
    before = user.ask("before").result(PATIENCE_S).blob
    if os.fork() == 0:
        blob = user.ask("child").result(PATIENCE_S).blob
        user.say(child=os.getpid(), blob=str(blob), childs=server())
        time.sleep(600)
    after = user.ask("after").result(PATIENCE_S).blob
    user.say(parent=os.getpid(), blobs=[str(before), str(after)], parents=server())
    time.sleep(600)


def in_a_pool(user: User, number: int) -> tuple[int, str]:
    return os.getpid(), str(user.ask(f"child{number}").result(PATIENCE_S).blob)


def has_a_pool(user: User) -> None:
    user.ask("parent").result(PATIENCE_S)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map(partial(in_a_pool, user), range(4), chunksize=1)
    user.say(blobs=[blob for _, blob in found], server=server())


def ignores_children(user: User) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    answer = user.ask().result(PATIENCE_S)
    user.say(blob=str(answer.blob), faults=list(answer.faults.values()))


def has_no_files(user: User) -> None:
    """None to be opened, then as many as before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        user.ask().result(PATIENCE_S)
    except Unusable as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    user.say(why=said, blob=str(user.ask().result(PATIENCE_S).blob))


def has_no_right(user: User) -> None:
    """To start a thread or a process: root has it anyway."""
    if os.geteuid() == 0:
        os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        user.ask().result(PATIENCE_S)
    except Unusable as error:
        print(error)  # the folder is root's


def shares_a_cache(user: User) -> None:
    """Two processes at once with one directory, then a third that knows what they learned."""
    os.environ["CUDNNGRAPH_CACHE_DIR"] = str(user.folder / "cache")
    settings._from_environ = None
    env.env_key = lambda index: EnvKey(91900, "1.28.0", "NVIDIA H200", (9, 0), 132, 1)
    env.uuid = lambda index: "GPU"
    handles.handle = lambda index: None
    checked = Verified(1e-4, "a GPU", 91900, "1.28.0", "2.13")
    Verified.here = lambda index, error: checked  # type: ignore[method-assign,assignment]
    guard.load = lambda blob, choice, index: partial(str, choice)  # type: ignore[assignment]
    lookup.Rejected(0).gate.parent.mkdir(0o700, parents=True)  # type: ignore[union-attr]
    user.say(gate=str(lookup.Rejected(0).gate))

    def build(who: str) -> None:
        engines = []
        for size in range(1, 7):
            kept = lookup.Rejected(0)
            _, outcomes = guard.Builder(POLICY, 0, kept)(graph(f"{who}{size}", size))
            engines.append(outcomes[-1].candidate.choice.engine)
            assert Choice(4, ()) in kept.of(graph(who, size), POLICY)
        user.say(who=who, engines=engines)

    children = []
    for who in ("a", "b"):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                build(who)
            finally:
                os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    build("c")


# -- their processes -------------------------------------------------------------------------------


def told() -> dict[str, Any] | None:
    """The task of this process; None at the end, in the one that forks them."""
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        folder = Path(asked["folder"])
        pid = os.fork()
        if pid:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            (folder / "code.tmp").write_text(str(code))
            (folder / "code.tmp").rename(folder / "code")
            continue
        os.setsid()
        out = os.open(folder / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, out)):
            os.dup2(file, stream)
        (folder / "pid.tmp").write_text(str(os.getpid()))
        (folder / "pid.tmp").rename(folder / "pid")
        return asked
    return None


if __name__ == "__main__":
    print("ready", flush=True)
    asked = told()
    if asked is not None:
        globals()[asked["does"]](User(Path(asked["folder"]), asked["behaviours"]))
