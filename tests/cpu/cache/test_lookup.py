"""The tiers without a GPU: plans are fakes, everything above them is real."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cudnngraph as cg
from cudnngraph import settings
from cudnngraph.cache import lookup, state
from cudnngraph.cache.state import STATE
from cudnngraph.partition import analysis, cuts
from cudnngraph.runtime.process import PROCESS
from cudnngraph.select import heuristic
from plans_cache.record import from_json
from plans_cache.store import PlanStore
from tests.fakes import FakePlan, World
from tests.lookups import again, compiled, graph, in_pieces, no_knobs, other_steps

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
        STATE.stores[world.directory, False] = PlanStore(world.directory, seeds=seeds)

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
    STATE.stores[world.directory, False] = PlanStore(world.directory, seeds=seeds)
    assert compiled().tier == "seed, replayed"
    assert cg.cache_stats().lookups == {"built": 1, "seed": 1}


@pytest.mark.parametrize("wanted", [False, True])
def test_a_setting_says_whether_what_ships_may_serve(
    wanted: bool, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    shipped = tmp_path / "seeds"
    shipped.mkdir()
    world.file().rename(shipped / world.file().name)
    monkeypatch.setattr(state, "PACKAGED_SEEDS", shipped)
    STATE.stores.clear()
    cg.cache_clear()
    with settings.override(seeds=wanted):
        assert compiled().tier == ("seed, replayed" if wanted else "built")


def test_a_damaged_record_is_a_miss_and_replaced(world: World) -> None:
    compiled()
    path = world.file()
    path.write_text(path.read_text().replace('"engine"', '"enigne"', 1))
    assert again().tier == "built"
    assert cg.cache_stats().misses == {"absent": 1, "corrupt": 1}
    assert cg.cache_stats().store.quarantined == 1
    assert again().tier == "disk, serialized"


# -- counters, log, memory -------------------------------------------------------------------------


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
