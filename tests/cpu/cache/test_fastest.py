"""Steps measured within other graphs: a choice by ranking begins with what was fastest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.env import EnvKey
from cudnngraph.backend.plan import KERNEL, Choice, Verified
from cudnngraph.cache import codec, fastest, lookup, near
from cudnngraph.cache.measured import Measured
from cudnngraph.cache.state import STATE
from cudnngraph.cli import records, transfer
from cudnngraph.errors import UnkeyableError
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.key import graph_key
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition.analysis import CutGraph
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.rewrite.passes import legalize
from cudnngraph.runtime import compile as compile_module
from cudnngraph.select.decision import Selection, StepPlan
from cudnngraph.select.kernels import Kernels
from cudnngraph.select.remembered import keep_settled
from cudnngraph.select.settled import APART, TORCH
from plans_cache import PlanStore
from plans_cache.record import digest, entry_id
from plans_cache.store import SEED_STEPS, SeedSteps
from tests.fakes import H200, FakePlan, World

F16 = torch.float16
POLICY = cg.Policy(allow_tf32=False, kernels=False, tune="autotune")
SEEDED, TIMED = Choice(33, (("STAGES", 2),)), Choice(44, ())


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STATE, "measurements", {})


def layer(batch: int = 2, name: str = "layer", dtype: torch.dtype = F16) -> cg.Graph:
    g = cg.Graph(name)
    x, w = g.input("x", (batch, 16, 8, 8), dtype), g.input("w", (16, 16, 3, 3), dtype)
    g.output("y", g.relu(g.conv(x, w, padding=1)))
    return g


def model(
    batch: int = 2, dtype: torch.dtype = F16, name: str = "model", groups: int = 1
) -> cg.Graph:
    """The layer within a larger graph, under other names, behind another convolution."""
    g = cg.Graph(name)
    x, first = (
        g.input("image", (batch, 8, 8, 8), dtype),
        g.input("k", (16, 8 // groups, 1, 1), dtype),
    )
    second = g.input("filter", (16, 16, 3, 3), dtype)
    g.output("z", g.relu(g.conv(g.conv(x, first, groups=groups), second, padding=1)))
    return g


def kept(graph: cg.Graph, policy: cg.Policy = POLICY, **change: Any) -> None:
    """An entry of a search, in which the whole graph is one step."""
    spec = canonical(graph.spec())
    verified = Verified(1e-4, "NVIDIA H200", 91900, "1.28.0", "2.13")
    step = StepPlan(legalize(spec, policy), SEEDED, 0, (), 5.0, verified)
    step = replace(step, **change)
    chosen = Selection((step,), (None,))
    record = codec.to_record(spec, graph_key(spec, policy), H200, policy, chosen)
    lookup.store().put(record)


Ship = Callable[..., PlanStore]


@pytest.fixture
def ship(world: World, monkeypatch: pytest.MonkeyPatch) -> Ship:
    """Have what is kept shipped as seeds, to a machine that has nothing else."""
    folder = world.directory.parent / "seeds"

    def ship(environment: EnvKey = H200) -> PlanStore:
        found, _ = records.scan(lookup.store())
        transfer.export_seeds([each for each in found if near.is_measured(each.record)], folder)
        empty = PlanStore(folder.parent / "machine", seeds=folder, strict=False)
        monkeypatch.setattr(lookup, "store", lambda: empty)
        world.environment = environment
        cg.cache_clear()
        return empty

    return ship


def listings(world: World) -> list[Path]:
    return sorted((world.directory.parent / "seeds").glob(f"*/{SEED_STEPS}"))


def listing(world: World) -> Path:
    (found,) = listings(world)
    assert found.parent.name == "nvidia-h200"
    return found


def measured(graph: cg.Graph, times: dict[Choice | None, float], **change: Any) -> None:
    """What a search of another graph keeps of a step."""
    memo = Measured(replace(POLICY, **change), 0)
    spec = legalize(canonical(graph.spec()), POLICY)
    choices = [
        None if each is None else [each.engine, [list(knob) for knob in each.knobs]]
        for each in times
    ]
    for choice in choices:
        if choice is not None:
            row = {"what": "built", "choice": choice, "right": True, "workspace_bytes": 0}
            memo.add(spec, row)
    row = {"what": "times", "choices": choices, "rounds": 5, "times": [*times.values()]}
    memo.add(spec, row)


def parts(exe: cg.Executable) -> list[tuple[str, Choice | None]]:
    return [("+".join(node.op for node in step.spec.nodes), step.choice) for step in exe.steps]


def taken(exe: cg.Executable) -> list[Choice | None]:
    return [step.choice for step in exe.steps if step.spec.nodes[-1].op == "relu"]


def reasons(exe: cg.Executable) -> list[str]:
    return [each.reason for step in exe.steps for each in step.decisions if each.accepted]


# -- seeds -----------------------------------------------------------------------------------------


def test_a_seeds_step_is_taken_within_a_larger_graph(world: World, ship: Ship) -> None:
    """Without a search, and with no more builds than there were; nothing else changes."""
    plain = model().compile("cuda:0")
    builds = len(world.built)
    kept(layer())
    ship()
    world.ahead.clear()
    exe = model().compile("cuda:0")
    assert exe.tier == "built" and not world.measured
    assert world.ahead == [None, SEEDED] and len(world.built) == 2 * builds
    (first, one), (second, other) = parts(exe)
    assert [(first, one), second] == [parts(plain)[0], parts(plain)[1][0]]
    assert other == SEEDED != parts(plain)[1][1]
    assert reasons(exe) == ["first of cuDNN's ranking that builds", fastest.SEED]
    assert "measured fastest for this step on such a GPU: a seed" in exe.explain()
    cg.cache_clear()
    again = model().compile("cuda:0")
    assert again.tier == "disk, serialized" and parts(again) == parts(exe)


OTHERS: dict[str, Any] = {
    "batch": {"batch": 4},
    "dtype": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_seeds_step_is_not_taken_in_another_batch_or_dtype(
    other: str, world: World, ship: Ship
) -> None:
    kept(layer())
    ship()
    exe = model(**OTHERS[other]).compile("cuda:0")
    assert world.ahead == [None, None] and fastest.SEED not in reasons(exe)


ELSEWHERE = {
    "cudnn": replace(H200, cudnn_version=91000),
    "gpu": replace(H200, gpu_name="NVIDIA H100 80GB HBM3"),
    "sms": replace(H200, sm_count=100),
}
FAR = {
    "cudnn": replace(H200, cudnn_version=100000),
    "gpu": replace(H200, gpu_name="NVIDIA A100", compute_capability=(8, 0)),
    "schema": replace(H200, schema=H200.schema + 1),
}
SAID = {
    "cudnn": "cuDNN 9.19.0 in place of 9.10.0",
    "gpu": "NVIDIA H200 in place of NVIDIA H100 80GB HBM3",
    "sms": "NVIDIA H200 in place of NVIDIA H200",
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_seeds_step_is_taken_in_a_near_environment(where: str, world: World, ship: Ship) -> None:
    kept(layer())
    ship(ELSEWHERE[where])
    exe = model().compile("cuda:0")
    assert world.ahead == [None, SEEDED]
    assert reasons(exe)[1] == fastest.NEAR_SEED.format(SAID[where])


@pytest.mark.parametrize("where", FAR)
def test_a_seeds_step_is_not_taken_in_one_that_is_far(where: str, world: World, ship: Ship) -> None:
    kept(layer())
    ship(FAR[where])
    model().compile("cuda:0")
    assert world.ahead == [None, None]


def test_under_deterministic_a_seed_of_another_cudnn_is_not_taken(world: World, ship: Ship) -> None:
    """Its engine may be another there; that of another GPU is the same."""
    kept(layer(), replace(POLICY, deterministic=True))
    for where, taken in (("cudnn", None), ("gpu", SEEDED)):
        world.ahead.clear()
        ship(ELSEWHERE[where])
        model().compile("cuda:0", deterministic=True)
        assert world.ahead == [None, taken], where


def test_a_seed_of_this_gpu_comes_before_one_of_another(world: World, ship: Ship) -> None:
    kept(layer())
    ship()
    own = listing(world)
    env = codec.env_components(ELSEWHERE["gpu"])
    step = legalize(canonical(layer().spec()), POLICY)
    made = SeedSteps(env, {entry_id(fastest._key(step, POLICY), digest(env)): [44, []]})
    place = own.parents[1] / "nvidia-h100"
    place.mkdir()
    (place / made.file).write_text(made.to_json())
    for environment, wanted in ((H200, SEEDED), (ELSEWHERE["gpu"], TIMED)):
        empty = PlanStore(world.directory.parent / "x", seeds=own.parents[1])
        world.environment = environment
        assert (fastest.Fastest(empty, POLICY, 0)(step) or (None,))[0] == wanted


def test_another_frontend_takes_a_seeds_step(world: World, ship: Ship) -> None:
    """It is built and checked like any."""
    kept(layer())
    ship(replace(H200, frontend_version="1.32.0"))
    model().compile("cuda:0")
    assert world.ahead == [None, SEEDED]


@pytest.mark.parametrize(
    "options",
    [
        {"deterministic": True},
        {"workspace_limit": 1 << 20},
        {"exclude_engines": ("eng34",)},
        {"allow_tf32": True},
    ],
    ids=str,
)
def test_a_step_measured_under_another_policy_is_not_taken(
    options: dict[str, Any], world: World, ship: Ship
) -> None:
    """What this one bars may be what was fastest there."""
    here = {"allow_tf32": False, **options}
    dtype = torch.float32 if options.get("allow_tf32") else F16
    kept(layer(dtype=dtype))
    ship()
    model(dtype=dtype).compile("cuda:0", **here)
    assert world.ahead == [None, None]
    lookup.store().prune(lambda entry: True)
    kept(layer(dtype=dtype), replace(POLICY, **options))
    ship()
    world.ahead.clear()
    model(dtype=dtype).compile("cuda:0", **here)
    assert world.ahead == [None, SEEDED], "measured under the same policy"


@pytest.mark.parametrize("allowed", [False, True])
def test_a_step_without_float32_has_the_same_plans_whatever_tf32_is(
    allowed: bool, world: World, ship: Ship
) -> None:
    kept(layer(), replace(POLICY, allow_tf32=not allowed))
    ship()
    model().compile("cuda:0", allow_tf32=allowed)
    measured(layer(), {TIMED: 4.0}, allow_tf32=not allowed)
    model(name="another", groups=2).compile("cuda:0", allow_tf32=allowed)
    assert world.ahead == [None, SEEDED, None, TIMED]


def test_a_step_with_kernels_allowed_has_the_same_plans(world: World, ship: Ship) -> None:
    kept(layer(), replace(POLICY, kernels=True))
    ship()
    model().compile("cuda:0", kernels=False)
    assert world.ahead == [None, SEEDED]


def test_a_refused_choice_falls_back_to_the_ranking_without_an_error(
    world: World, ship: Ship
) -> None:
    plain = model().compile("cuda:0")
    kept(layer())
    ship()
    world.gone = {SEEDED.engine}
    exe = model().compile("cuda:0")
    assert world.ahead[-1] == SEEDED
    assert parts(exe) == parts(plain) and fastest.SEED not in reasons(exe)
    lost = [each for each in exe.steps[1].decisions if each.choice == SEEDED]
    assert [(each.accepted, each.reason) for each in lost] == [(False, "does not launch")]


@pytest.mark.parametrize(
    "change",
    [
        {"choice": Choice(KERNEL, ())},
        {"time_us": None},
        {"choice": None, "verified": None, "time_us": None},
    ],
    ids=["kernel", "untimed", "untimed torch"],
)
def test_what_is_not_settled_is_not_listed(
    change: dict[str, Any], world: World, ship: Ship
) -> None:
    kept(layer(), **change)
    ship()
    assert SeedSteps.of(listing(world).read_bytes()).choices == {}
    model().compile("cuda:0")
    assert world.ahead == [None, None]


def apart(spec: GraphSpec) -> Selection:
    """A choice by measurement, in which the convolution is apart from a kernel behind it."""
    legal = legalize(spec, POLICY)
    cut = CutGraph(legal)
    front, behind = ([node] for node in legal.nodes)
    verified = Verified(1e-4, "NVIDIA H200", 91900, "1.28.0", "2.13")
    generated = Choice(KERNEL, ())
    steps = (
        StepPlan(subgraph_of(cut, front), None, 0, (), 5.0),
        StepPlan(subgraph_of(cut, behind), generated, 0, (), 2.0, verified),
    )
    return Selection(steps, (None, FakePlan(generated)))


def parted(graph: cg.Graph) -> None:
    """An entry of such a search."""
    spec = canonical(graph.spec())
    chosen = apart(spec)
    lookup.store().put(codec.to_record(spec, graph_key(spec, POLICY), H200, POLICY, chosen))


def test_seeds_say_what_torch_runs_and_what_is_apart(world: World, ship: Ship) -> None:
    """Of a step with a product; a plan that ships elsewhere is for who asks for a plan."""
    kept(layer(), choice=None, verified=None)
    parted(layer(4))
    find = fastest.Fastest(ship(), POLICY, 0)
    whole, other = (legalize(canonical(layer(batch).spec()), POLICY) for batch in (2, 4))
    alone = subgraph_of(CutGraph(other), other.nodes[:1])
    assert find.settled(whole) == (TORCH, fastest.SEED) == find.settled(alone)
    assert find.settled(other) == (APART, fastest.SEED)
    assert find(whole) is None and find(other) is None and find(alone) is None
    memo = Measured(POLICY, 0)
    keep_settled(memo, [(other, TORCH)])
    find = fastest.Fastest(lookup.store(), POLICY, 0)
    assert find.settled(other) == (TORCH, fastest.BEFORE)
    keep_settled(memo, [(other, SEEDED)])
    find = fastest.Fastest(lookup.store(), POLICY, 0)
    assert find.settled(other) is None, "a plan, as was measured here at last"
    assert find.settled(legalize(canonical(layer(8).spec()), POLICY)) is None


def test_a_settled_seed_of_a_near_environment_serves(world: World, ship: Ship) -> None:
    parted(layer())
    find = fastest.Fastest(ship(ELSEWHERE["gpu"]), POLICY, 0)
    whole = legalize(canonical(layer().spec()), POLICY)
    assert find.settled(whole) == (APART, fastest.NEAR_SEED.format(SAID["gpu"]))


def test_what_seeds_settle_is_followed_within_a_larger_graph(
    world: World, ship: Ship, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels are generated, which this machine only says."""
    kept(layer(), choice=None, verified=None)
    ship()
    monkeypatch.setattr(Kernels, "on", lambda index: Kernels(132))
    exe = model().compile("cuda:0", kernels=True)
    assert [(step.kind, step.spec.nodes[-1].op) for step in exe.steps][-1] == ("torch", "relu")
    assert fastest.SEED in [each.reason for each in exe.steps[-1].decisions]


def test_a_search_keeps_what_it_settles(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it had kernels to choose from."""
    monkeypatch.setattr(Kernels, "on", lambda index: Kernels(132))
    monkeypatch.setattr(compile_module, "by_measurement", lambda spec, *rest, **more: apart(spec))
    find = fastest.Fastest(lookup.store(), POLICY, 0)
    whole = [legalize(canonical(layer(batch).spec()), POLICY) for batch in (2, 4)]
    for batch, kernels in ((2, True), (4, False)):
        layer(batch).compile("cuda:0", tune="autotune", kernels=kernels)
    assert [find.settled(each) for each in whole] == [(APART, fastest.BEFORE), None]


def test_untuned_records_list_no_steps(world: World, ship: Ship) -> None:
    kept(layer(), replace(POLICY, tune="heuristic"))
    ship()
    assert listings(world) == []


def test_what_was_listed_stays_when_more_is_exported(world: World, ship: Ship) -> None:
    for batch in (2, 4):
        kept(layer(batch))
        found, _ = records.scan(lookup.store())
        (one,) = [each for each in found if f"f16[{batch}, " in each.record.summary]
        transfer.export_seeds([one], world.directory.parent / "seeds", steps_alone=batch == 4)
    assert len(SeedSteps.of(listing(world).read_bytes()).choices) == 2
    place = listing(world).parent
    assert len([*place.glob("*.json")]) == 3, "a record, the families, the steps"


DAMAGED = ("[7", "[7]", "7", '{"a": 7}', "", '{"environment": 7, "steps": {}}', *(
    json.dumps({"environment": env, "steps": steps})
    for env, steps in (({}, {}), ({"schema": "x"}, {}), ([], {}), ({"schema": "1"}, []))
))  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_list_of_steps_is_passed_by(text: str, world: World, ship: Ship) -> None:
    kept(layer())
    ship()
    listing(world).write_text(text)
    model().compile("cuda:0")
    assert world.ahead == [None, None]


@pytest.mark.parametrize("choice", [7, None, [], [1], ["x", []], [1, 2], [1, [[1]]], {}, "ab"])
def test_a_choice_that_is_none_is_passed_by(choice: Any, world: World, ship: Ship) -> None:
    kept(layer())
    ship()
    found = SeedSteps.of(listing(world).read_bytes())
    made = replace(found, choices=dict.fromkeys(found.choices, choice))
    listing(world).write_text(made.to_json())
    model().compile("cuda:0")
    assert world.ahead == [None, None]


# -- measurements ----------------------------------------------------------------------------------


def test_measurements_of_another_graphs_search_are_taken_before_a_seed(
    world: World, ship: Ship
) -> None:
    kept(layer())
    ship()
    measured(layer(), {TIMED: 4.0, Choice(45, ()): 5.0})
    exe = model().compile("cuda:0")
    assert world.ahead == [None, TIMED] and not world.measured
    assert reasons(exe)[1] == fastest.BEFORE
    assert "measured fastest for this step on such a GPU: a search before" in exe.explain()


def test_measurements_in_another_environment_are_not_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch and the generator of kernels too: the times were beside theirs."""
    measured(layer(), {TIMED: 4.0})
    for environment in ELSEWHERE.values():
        world.environment = environment
        model().compile("cuda:0")
    world.environment = H200
    monkeypatch.setattr(torch, "__version__", "9.9")
    model().compile("cuda:0")
    assert set(world.ahead) == {None}


def test_a_graph_that_was_compiled_before_keeps_its_plans(world: World) -> None:
    before = model().compile("cuda:0")
    measured(layer(), {TIMED: 4.0})
    cg.cache_clear()
    after = model().compile("cuda:0")
    assert after.tier == "disk, serialized" and parts(after) == parts(before)


def test_nothing_is_read_without_seeds_and_measurements(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any) -> Any:
        raise AssertionError("something is read")

    monkeypatch.setattr("plans_cache.measurements._read", read)
    monkeypatch.setattr("cudnngraph.kernels.kernel.generator", read)
    monkeypatch.setattr(lookup, "store", lambda: PlanStore(world.directory, seeds=None))
    assert len(model().compile("cuda:0").steps) == 2


def test_a_step_without_a_key_has_no_choice(
    world: World, ship: Ship, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unkeyable(*args: Any, **options: Any) -> Any:
        raise UnkeyableError("-inf is not finite")

    kept(layer())
    find = fastest.Fastest(ship(), POLICY, 0)
    measured(layer(4), {TIMED: 4.0})
    step = legalize(canonical(layer().spec()), POLICY)
    assert find(step) == (SEEDED, fastest.SEED)
    monkeypatch.setattr(fastest, "graph_key", unkeyable)
    monkeypatch.setattr("cudnngraph.cache.measured.graph_key", unkeyable)
    assert find(step) is None
