"""Reports of a lookup: hooks told of misses, counters, the log, `explain`."""

from __future__ import annotations

import logging

import pytest

import cudnngraph as cg
from cudnngraph.cache import lookup
from cudnngraph.runtime.process import PROCESS
from tests.fakes import World
from tests.lookups import again, compiled, other_steps, refused

# -- hooks -----------------------------------------------------------------------------------------


def test_a_hook_is_told_of_every_miss_until_it_is_taken_off(world: World) -> None:
    seen: list[cg.MissInfo] = []
    remove = cg.on_miss(seen.append)
    exe = compiled()
    compiled()
    again()
    assert seen == [
        cg.MissInfo(
            "conv → bias → relu: f16[2, 8, 6, 6], f16[16, 8, 3, 3], f16[16] → f16[2, 16, 6, 6]",
            exe.key,
            "absent",
        )
    ]
    other_steps(world)
    again()
    assert seen[-1].reason == "stale: step 1 has an op 'elsewhere' that is not there, or twice"
    remove()
    remove()
    compiled("tanh")
    assert len(seen) == 2


def test_a_hook_is_told_before_cached_raises(world: World) -> None:
    seen: list[cg.MissInfo] = []
    cg.on_miss(seen.append)
    refused()
    assert [info.reason for info in seen] == ["absent"]


def test_a_hook_that_fails_stops_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def broken(info: cg.MissInfo) -> None:
        raise ZeroDivisionError("in the hook")

    seen: list[cg.MissInfo] = []
    cg.on_miss(broken)
    cg.on_miss(seen.append)
    assert compiled().tier == "built"
    assert len(seen) == 1
    assert "a miss hook failed" in caplog.text and "in the hook" in caplog.text


def test_a_hook_may_take_itself_off(world: World) -> None:
    seen: list[str] = []

    def once(info: cg.MissInfo) -> None:
        seen.append("once")
        remove()

    remove = cg.on_miss(once)
    cg.on_miss(lambda info: seen.append("always"))
    compiled("relu")
    compiled("tanh")
    assert seen == ["once", "always", "always"]


# -- counters, log, memory -------------------------------------------------------------------------


def test_counters_tell_tiers_reasons_and_times(world: World) -> None:
    assert cg.cache_stats() == cg.CacheStats(
        {}, {}, 0.0, 0.0, 0, 0, cg.cache_stats().workspace_high_water_bytes, lookup.store().stats()
    )
    world.build_s = 0.01
    compiled("relu")
    compiled("tanh")
    compiled("relu")
    again("relu")
    stats = cg.cache_stats()
    assert stats.lookups == {"built": 2, "memory": 1, "disk": 1}
    assert stats.misses == {"absent": 2}
    assert stats.build_ms >= 20
    assert stats.load_ms > 0
    assert stats.programs == 1
    assert (stats.store.writes, stats.store.built) == (2, 2)
    assert stats.store.hits == {"disk": 1}


def test_the_log_says_what_was_found_where(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cudnngraph"):
        compiled()
        again()
        PROCESS.programs.clear()
        compiled()
    found = [r.getMessage() for r in caplog.records if r.name == "cudnngraph.cache.lookup"]
    assert len(found) == 3
    id = world.file().stem[:16]
    assert found[0].startswith(f"cache_miss {id} (absent): conv → bias → relu: f16[2, 8, 6, 6]")
    assert found[1] == f"persistent_cache_hit {id} (disk, serialized)"
    assert found[2] == f"cache_hit {id} (memory, serialized)"


def test_explain_says_where_plans_came_from(world: World) -> None:
    assert "plans from: built" in compiled().explain()
    assert "plans from: disk, serialized" in again().explain()
