"""Lookups in which the directory, a build or another thread fails."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.runtime.process import PROCESS
from cudnngraph.select import guard
from plans_cache.record import PlanRecord
from plans_cache.store import PlanStore
from tests.fakes import World
from tests.lookups import again, compiled

# -- faults of the store ---------------------------------------------------------------------------


def open_to_all(world: World) -> None:
    world.directory.mkdir()
    world.directory.chmod(0o777)


def a_file(world: World) -> None:
    world.directory.write_text("not a directory")


@pytest.mark.parametrize("fault", [open_to_all, a_file])
def test_without_a_directory_plans_are_kept_in_memory(
    world: World, fault: Callable[[World], None], caplog: pytest.LogCaptureFixture
) -> None:
    fault(world)
    assert compiled().tier == "built"
    PROCESS.programs.clear()
    assert compiled().tier == "memory, serialized"
    assert compiled("tanh").tier == "built"
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "plans are kept in memory only" in warnings[0]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_read_only_directory_serves_and_keeps_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    compiled()
    for path in (*world.directory.rglob("*"), world.directory):
        if path.is_dir():
            path.chmod(0o500)
    try:
        assert again().tier == "disk, serialized"
        assert compiled("tanh").tier == "built"
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    finally:
        for path in (world.directory, *world.directory.rglob("*")):
            if path.is_dir():
                path.chmod(0o700)


def test_a_store_that_fails_while_building_does_not_lose_the_plan(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: PlanStore, record: PlanRecord, blob: bytes | None = None) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PlanStore, "put", full)
    assert compiled().tier == "built"
    assert len(world.built) == 1, "the plan was built twice"
    assert "the plan cache is left out" in caplog.text


def test_a_builder_that_fails_raises_its_own_error(world: World) -> None:
    world.refuse = lambda spec: True
    with pytest.raises(cg.NotSupported, match="no engine for conv"):
        compiled(fallback="error")
    assert world.files("json") == []
    assert cg.cache_stats().lookups == {}


# -- one build -------------------------------------------------------------------------------------


def together(count: int, work: Callable[[], cg.Executable]) -> list[cg.Executable]:
    barrier = threading.Barrier(count)
    done: list[cg.Executable] = []

    def run() -> None:
        barrier.wait(30)
        done.append(work())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == count
    return done


def test_a_build_that_fails_as_a_disk_would_is_not_tried_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def fail(spec: GraphSpec, policy: cg.Policy, index: int, ahead: Any) -> Any:
        tried.append(spec.name)
        raise OSError("no such library")

    monkeypatch.setattr(guard, "build_first", fail)
    with pytest.raises(OSError, match="no such library"):
        compiled()
    assert len(tried) == 1


def test_threads_that_want_the_same_plan_build_it_once(world: World) -> None:
    world.build_s = 0.1
    done = together(8, compiled)
    assert len(world.built) == 1
    assert len({str(exe.steps) for exe in done}) == 1
    lookups = cg.cache_stats().lookups
    assert lookups["built"] == 1
    assert sum(lookups.values()) == 8


def test_threads_build_again_where_the_first_one_fails(world: World) -> None:
    attempts: list[int] = []

    def first_fails(spec: GraphSpec) -> bool:
        attempts.append(1)
        if len(attempts) == 1:
            raise MemoryError("once")
        return False

    world.refuse = first_fails

    def work() -> Any:
        try:
            return compiled()
        except MemoryError:
            return None

    done = together(4, work)
    assert done.count(None) == 1  # type: ignore[arg-type]
    assert len(attempts) == 2
