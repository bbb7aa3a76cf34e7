"""Lookups by `tune`: what autotune measures anew, and what cached serves or raises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import cudnngraph as cg
from cudnngraph.cache import lookup
from cudnngraph.cache.codec import env_components
from plans_cache.record import from_json
from tests.fakes import H200, World
from tests.lookups import F64, again, compiled, graph, no_knobs, refused

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


@pytest.mark.parametrize(("tune", "serves"), [("autotune", True), ("heuristic", False)])
def test_a_search_that_had_no_memory_for_a_candidate_is_not_done_again(
    world: World, tune: Any, serves: bool
) -> None:
    """Heuristics, which pass over the plans that come first then, are asked again."""
    compiled(tune=tune)
    record = from_json(world.file().read_text())
    step = record.steps[0]
    lost = replace(step.candidates[0], reason="out of memory")
    short = replace(record, steps=(replace(step, candidates=(lost, *step.candidates)),))
    policy = cg.Policy(tune="heuristic")
    assert lookup._satisfies(record, policy)
    assert lookup._satisfies(short, policy) is serves


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
