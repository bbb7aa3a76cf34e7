"""The gate between processes: shared by many, or one alone, and freed when its holder dies."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plans_cache import gate as gates
from plans_cache.gate import Gate
from tests.workers.user_programs import PATIENCE_S, until

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
pytestmark = [linux]


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
