"""The tiers without a GPU: plans are fakes, everything above them is real."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import settings
from cudnngraph.cache import lookup
from cudnngraph.cache.codec import env_components
from cudnngraph.cache.state import STATE
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition import analysis, cuts
from cudnngraph.runtime.process import PROCESS
from cudnngraph.select import guard, heuristic
from plans_cache.record import PlanRecord, from_json
from plans_cache.store import PlanStore
from tests.fakes import H200, FakePlan, World

F16, F64 = torch.float16, torch.float64


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """See :meth:`World.install`."""
    made = World(tmp_path / "cache")
    made.install(monkeypatch)
    return made


def graph(act: str = "relu", channels: int = 8, name: str = "stem") -> cg.Graph:
    g = cg.Graph(name)
    x, w = g.input("x", (2, channels, 6, 6), F16), g.input("w", (16, channels, 3, 3), F16)
    g.output("y", g.conv_bias_act(x, w, g.input("b", (16,), F16), padding=1, activation=act))
    return g


def compiled(act: str = "relu", **options: Any) -> cg.Executable:
    return graph(act).compile("cuda:0", **options)


def again(act: str = "relu", **options: Any) -> cg.Executable:
    """Compile as a new process would: nothing is in memory."""
    cg.cache_clear()
    return compiled(act, **options)


def in_pieces(spec: GraphSpec) -> bool:
    """Refuse everything but single ops, and refuse bias too: it becomes a torch step."""
    return len(spec.nodes) > 1 or spec.nodes[0].op == "bias"


# -- the tiers -------------------------------------------------------------------------------------


def test_what_was_built_is_brought_back_from_its_serialized_plan(world: World) -> None:
    first = compiled()
    assert first.tier == "built"
    second = again()
    assert second.tier == "disk, serialized"
    assert second.steps == first.steps
    assert (len(world.built), len(world.loaded), world.replayed) == (1, 1, [])


def test_a_program_in_memory_is_taken_as_it_is(world: World) -> None:
    first = compiled()
    renamed = graph(name="other").compile("cuda:0")
    assert renamed._program is first._program
    assert cg.cache_stats().lookups == {"built": 1, "memory": 1}


def test_a_record_in_memory_serves_another_device(world: World) -> None:
    compiled()
    assert graph().compile("cuda:1").tier == "memory, serialized"
    assert len(world.built) == 1


def test_a_graph_in_steps_comes_back_with_its_torch_step(world: World) -> None:
    world.refuse = in_pieces
    first = compiled()
    assert [step.choice is None for step in first.steps] == [False, True, False]
    second = again()
    assert (second.tier, second.steps) == ("disk, serialized", first.steps)
    assert len(world.loaded) == 2


def test_a_graph_of_torch_steps_alone_is_not_asked_for_again(world: World) -> None:
    world.refuse = lambda spec: True
    compiled()
    asked = len(world.built)
    assert again().tier == "disk, torch"
    assert len(world.built) == asked


def truncated(world: World) -> None:
    path = world.file("blob")
    path.write_bytes(path.read_bytes()[:-3])


def missing(world: World) -> None:
    world.file("blob").unlink()


def of_another_version(world: World) -> None:
    world.loadable = False


def of_other_steps(world: World) -> None:
    """Whole, with the right checksum, and cut into other parts than the record's."""
    lookup.store().put(from_json(world.file().read_text()), b"\x01" + bytes(7) + b"p" + b"more")


@pytest.mark.parametrize("fault", [truncated, missing, of_another_version, of_other_steps])
def test_without_a_serialized_plan_the_choice_is_replayed(
    world: World, fault: Callable[[World], None]
) -> None:
    first = compiled()
    fault(world)
    second = again()
    assert second.tier == "disk, replayed"
    assert second.steps == first.steps
    assert world.replayed == [first.steps[0].choice]
    assert len(world.built) == 1
    if fault is not of_another_version:
        assert again().tier == "disk, serialized", "what was replayed is kept in its place"


def test_a_step_that_does_not_load_is_replayed_alone(world: World) -> None:
    world.refuse = in_pieces
    first = compiled()
    conv, _, relu = (step.choice for step in first.steps)
    assert conv is not None and relu is not None
    parts = [FakePlan(conv).serialize(), b"", b"of another version"]
    blob = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    lookup.store().put(from_json(world.file().read_text()), blob)
    assert again().tier == "disk, replayed and serialized"
    assert again().tier == "disk, serialized"
    assert world.replayed == [relu]


def test_a_plan_that_cannot_be_serialized_is_kept_as_a_choice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FrontendError(Exception):
        """As the frontend's own NotSupported: no RuntimeError."""

    def serialize(plan: FakePlan) -> bytes:
        raise FrontendError("no serialization for this engine")

    monkeypatch.setattr(FakePlan, "serialize", serialize)
    assert compiled().tier == "built"
    assert world.files("blob") == []
    assert again().tier == "disk, replayed"


# -- stale records ---------------------------------------------------------------------------------


def no_knobs(world: World) -> None:
    record = from_json(world.file().read_text())
    world.loadable = False
    world.gone = {record.steps[0].engine or 0}


def other_steps(world: World) -> None:
    world.rewrite(nodes=("elsewhere",), ops=("conv",))


def other_types(world: World) -> None:
    world.rewrite(outputs=(("t5", "f32[1]"),))


@pytest.mark.parametrize("fault", [no_knobs, other_steps, other_types])
def test_a_stale_record_is_built_anew_and_replaced(
    world: World, fault: Callable[[World], None]
) -> None:
    first = compiled()
    fault(world)
    second = again()
    assert second.tier == "built"
    assert second.steps == first.steps
    assert cg.cache_stats().misses == {"absent": 1, "stale": 1}
    world.loadable, world.gone = True, set()
    assert again().tier == "disk, serialized"
    assert len(world.built) == 2


def test_a_graph_whose_steps_pass_other_tensors_now_is_built_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.refuse = in_pieces
    compiled()
    monkeypatch.setattr(analysis.CutGraph, "passed", {})  # float32 crosses as float32
    second = again()
    assert second.tier == "built"
    assert cg.cache_stats().misses["stale"] == 1
    assert second.steps[0].spec.tensors[second.steps[0].spec.outputs[0]].dtype == torch.float32
    assert again().tier == "disk, serialized"


def test_a_graph_that_would_be_cut_otherwise_now_is_brought_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are made of the nodes that the record names, in whatever way they were found."""
    world.refuse = in_pieces
    first = compiled()
    monkeypatch.setattr(cuts, "cuts", lambda graph, nodes: ())
    monkeypatch.setattr(heuristic, "cuts", lambda graph, nodes: ())
    second = again()
    assert (second.tier, second.steps) == ("disk, serialized", first.steps)


def test_a_plan_that_is_known_to_be_wrong_by_now_is_not_brought_back(world: World) -> None:
    compiled()
    world.bad = "known to be wrong: found out later"
    seen: list[cg.MissInfo] = []
    cg.on_miss(seen.append)
    assert again().tier == "built"
    assert [info.reason for info in seen] == ["stale: known to be wrong: found out later"]


def test_a_stale_seed_is_replaced_once(world: World, tmp_path: Path) -> None:
    """A seed cannot be removed: its replacement has to stand before it."""
    first = compiled()
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    record = from_json(world.file().read_text())
    step = replace(record.steps[0], nodes=("elsewhere",), ops=("conv",))
    stale = replace(record, steps=(step,), blob=None)
    (seeds / f"{stale.id}.json").write_text(stale.to_json())
    lookup.store().remove(stale.id)

    def new_process() -> None:
        PROCESS.programs.clear()
        STATE.stores[world.directory] = PlanStore(world.directory, seeds=seeds)

    new_process()
    second = compiled()
    assert (second.tier, second.steps) == ("built", first.steps)
    new_process()
    assert compiled().tier == "disk, serialized"
    assert len(world.built) == 2


def test_a_seed_serves_where_the_directory_has_nothing(world: World, tmp_path: Path) -> None:
    compiled()
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    world.file().rename(seeds / world.file().name)
    cg.cache_clear()
    STATE.stores[world.directory] = PlanStore(world.directory, seeds=seeds)
    assert compiled().tier == "seed, replayed"
    assert cg.cache_stats().lookups == {"built": 1, "seed": 1}


def test_a_damaged_record_is_a_miss_and_replaced(world: World) -> None:
    compiled()
    path = world.file()
    path.write_text(path.read_text().replace('"engine"', '"enigne"', 1))
    assert again().tier == "built"
    assert cg.cache_stats().misses == {"absent": 1, "corrupt": 1}
    assert cg.cache_stats().store.quarantined == 1
    assert again().tier == "disk, serialized"


# -- tune="autotune" -------------------------------------------------------------------------------


def kept_tune(world: World) -> object:
    return from_json(world.file().read_text()).policy["tune"]


def test_what_was_measured_is_kept_and_serves_every_tune(world: World) -> None:
    first = compiled(tune="autotune")
    assert (first.tier, kept_tune(world)) == ("built", "autotune")
    for tune in ("autotune", "heuristic", "cached"):
        second = again(tune=tune)
        assert (second.tier, second.steps) == ("disk, serialized", first.steps)
    assert (len(world.measured), world.built) == (1, [])
    assert cg.cache_stats().misses == {"absent": 1}


def test_an_untuned_record_is_measured_once_and_replaced(world: World) -> None:
    seen: list[str] = []
    cg.on_miss(lambda info: seen.append(info.reason))
    compiled()
    assert kept_tune(world) == "heuristic"
    assert again(tune="autotune").tier == "built"
    assert cg.cache_stats().misses == {"absent": 1, "untuned": 1}
    assert seen[1] == "untuned: what is kept was chosen without measuring"
    assert (kept_tune(world), len(world.measured)) == ("autotune", 1)
    assert again(tune="autotune").tier == "disk, serialized"
    assert again(tune="heuristic").tier == "disk, serialized"
    assert (kept_tune(world), len(world.measured), len(world.built)) == ("autotune", 1, 1)


def test_an_untuned_program_in_memory_does_not_serve_autotune(world: World) -> None:
    first = compiled()
    second = compiled(tune="autotune")
    assert second._program is not first._program
    assert len(world.measured) == 1
    for tune in ("heuristic", "autotune", "cached"):
        assert compiled(tune=tune)._program is second._program
    assert len(world.measured) == 1


def test_an_untuned_record_serves_where_nothing_may_be_built(world: World) -> None:
    compiled()
    assert again(tune="cached").tier == "disk, serialized"


def test_a_stale_tuned_record_is_measured_anew(world: World) -> None:
    compiled(tune="autotune")
    no_knobs(world)
    assert again(tune="autotune").tier == "built"
    assert (len(world.measured), cg.cache_stats().misses["stale"]) == (2, 1)


def test_a_graph_that_cudnn_never_sees_is_not_measured(world: World) -> None:
    g = cg.Graph("wide")
    g.output("y", g.input("x", (2, 3), F64).relu())
    exe = g.compile("cuda:0", tune="autotune")
    assert (exe.tier, world.measured, world.files("json")) == ("torch", [], [])


# -- tune="cached" ---------------------------------------------------------------------------------


def refused(act: str = "relu", **options: Any) -> cg.PlanNotCached:
    with pytest.raises(cg.PlanNotCached) as caught:
        again(act, tune="cached", **options)
    return caught.value


def test_cached_raises_where_nothing_is_and_builds_nothing(world: World) -> None:
    error = refused()
    assert str(error) == (
        "no plan for 'conv → bias → relu: f16[2, 8, 6, 6], f16[16, 8, 3, 3], f16[16] → "
        "f16[2, 16, 6, 6]' in the cache: absent, and the cache is empty"
    )
    assert (error.nearest, error.differences) == ("", ())
    assert world.built == []
    assert world.files("json") == []


def test_what_was_stored_by_another_tune_is_served_under_cached(world: World) -> None:
    first = compiled(tune="heuristic")
    second = again(tune="cached")
    assert second.tier == "disk, serialized"
    assert second.key == first.key
    assert compiled(tune="cached")._program is second._program


def test_cached_names_the_nearest_entry_and_what_differs(world: World) -> None:
    near, far = compiled("relu"), graph("tanh", channels=16).compile("cuda:0")
    assert near.key != far.key
    error = refused("sigmoid")
    ids = {
        record.key: record.id
        for record in (from_json(path.read_text()) for path in world.files("json"))
    }
    assert error.nearest == ids[near.key.components]
    ((name, wanted, stored),) = error.differences
    assert name == "ops"
    assert "sigmoid" in (wanted or "") and "relu" in (stored or "")
    assert f"the nearest entry is {error.nearest[:16]}; it differs in:" in str(error)
    assert f"  - ops: wanted {wanted}, stored {stored}" in str(error)
    assert len(world.built) == 2


def test_every_component_that_differs_is_named(world: World) -> None:
    compiled("relu", deterministic=True)
    error = refused("tanh", deterministic=False)
    assert [name for name, _, _ in error.differences] == ["ops", "policy.deterministic"]


def test_the_same_graph_for_another_environment_is_named(world: World) -> None:
    compiled()
    elsewhere = replace(H200, gpu_name="NVIDIA B200", compute_capability=(10, 0), sm_count=148)
    foreign = world.move(elsewhere)
    error = refused()
    assert (
        "absent in this environment; the same graph is there for another"
        in (str(error).splitlines()[0])
    )
    assert error.nearest == foreign.id
    assert error.differences == (
        ("gpu_name", '"NVIDIA H200"', '"NVIDIA B200"'),
        ("compute_capability", "[9, 0]", "[10, 0]"),
        ("sm_count", "132", "148"),
    )
    assert again().tier == "built", "another GPU's plan was used"


def test_of_several_environments_the_nearest_is_named(world: World) -> None:
    compiled()
    far = world.move(replace(H200, gpu_name="NVIDIA B200", sm_count=148))
    near = replace(far, env=env_components(replace(H200, cudnn_version=92200)))
    lookup.store().put(near)
    error = refused()
    assert error.nearest == near.id
    assert error.differences == (("cudnn_version", "91900", "92200"),)


def test_a_stale_record_stays_where_nothing_may_be_built(world: World) -> None:
    compiled()
    no_knobs(world)
    error = refused()
    assert "stale: engine" in str(error) and "is not to be had" in str(error)
    assert "differs in" not in str(error)
    assert error.differences == ()
    assert len(world.files("json")) == 1, "a process that may not build has removed an entry"
    world.loadable, world.gone = True, set()
    assert again(tune="cached").tier == "disk, serialized"


def test_what_never_reaches_cudnn_needs_no_cache(world: World) -> None:
    g = cg.Graph("double")
    g.output("y", g.input("x", (4,), F64).relu())
    exe = g.compile("cuda:0", tune="cached")
    assert exe.tier == "torch"
    assert cg.cache_stats().lookups == {"torch": 1}
    assert graph().compile("cpu", tune="cached").tier == "reference"
    assert world.files("json") == []


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

    def fail(spec: GraphSpec, policy: cg.Policy, index: int) -> Any:
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


def test_clearing_forgets_memory_and_leaves_the_disk(world: World) -> None:
    first = compiled()
    assert cg.cache_stats().programs == cg.cache_stats().store.entries == 1
    cg.cache_clear()
    stats = cg.cache_stats()
    assert (stats.programs, stats.store.entries, stats.store.bytes) == (0, 0, 0)
    assert len(world.files("json")) == len(world.files("blob")) == 1
    assert first.steps and first.tier == "built"
    second = compiled()
    assert second.tier == "disk, serialized"
    assert second._program is not first._program


def test_explain_says_where_plans_came_from(world: World) -> None:
    assert "plans from: built" in compiled().explain()
    assert "plans from: disk, serialized" in again().explain()


def test_the_policy_that_built_is_in_the_record(world: World) -> None:
    compiled(workspace_limit=1 << 20)
    policy = json.loads(world.file().read_text())["policy"]
    assert policy["workspace_limit"] == 1 << 20
    assert policy["tune"] == "heuristic"


def test_each_directory_has_a_store_of_its_own(world: World, tmp_path: Path) -> None:
    compiled()
    with settings.override(cache_dir=tmp_path / "other"):
        cg.cache_clear()
        assert compiled().tier == "built"
        assert (tmp_path / "other" / "v1").is_dir()
    assert len(world.files("json")) == 1


# -- warm-up ---------------------------------------------------------------------------------------


def test_warm_up_compiles_every_graph(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    graphs: list[Any] = [graph("relu"), graph("tanh").spec(), graph("relu", name="renamed")]
    stats = cg.warm_up(iter(graphs), "cuda:0", progress=False)
    assert stats.lookups == {"built": 2, "memory": 1}
    assert compiled("tanh")._program.tier == "built"
    assert len(world.built) == 2
    assert capfd.readouterr() == ("", "")


def test_warm_up_takes_the_policys_fields(world: World) -> None:
    cg.warm_up([graph()], "cuda:0", deterministic=True)
    assert compiled(deterministic=True)._program is not compiled()._program
    assert cg.cache_stats().lookups == {"built": 2, "memory": 1}
    with pytest.raises(cg.PlanNotCached):
        cg.warm_up([graph("tanh")], "cuda:0", policy=cg.Policy(tune="cached"))


def test_the_bar_is_drawn_on_standard_error_alone(capfd: pytest.CaptureFixture[str]) -> None:
    cg.warm_up([graph("relu"), graph("tanh")], "cpu", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "compiling" in err


def test_no_bar_where_standard_error_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    stats = cg.warm_up([graph("relu")], "cpu")
    assert stats.lookups["reference"] + stats.lookups.get("memory", 0) > 0
    assert capfd.readouterr() == ("", "")
