"""Near entries: which they are, and what becomes of their choices for a graph that has no entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.env import EnvKey
from cudnngraph.backend.plan import Choice, Verified
from cudnngraph.cache import lookup, near
from cudnngraph.cache.codec import env_components
from cudnngraph.cli import records, transfer
from cudnngraph.ir.key import graph_key, step_digest
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select import guard
from plans_cache.record import PlanRecord, from_json
from tests.fakes import H200, World
from tests.searches import Offer, run, table

F16, BF16 = torch.float16, torch.bfloat16
POLICY = cg.Policy(allow_tf32=False, tune="autotune", kernels=False)
H100 = replace(H200, gpu_name="NVIDIA H100 80GB HBM3")


def conv(
    batch: int = 8,
    dtype: torch.dtype = F16,
    layout: str = "channels_last",
    channels: int = 16,
    side: int = 6,
    act: str = "relu",
) -> cg.Graph:
    g = cg.Graph("conv")
    x = g.input("x", (batch, 8, side, side), dtype, layout=layout)
    w = g.input("w", (channels, 8, 3, 3), dtype, layout=layout)
    b = g.input("b", (channels,), dtype)
    g.output("y", g.conv_bias_act(x, w, b, padding=1, activation=act))
    return g


def linear(batch: int = 8, split: int = 16) -> cg.Graph:
    """Rows (batch * split, 32) by a weight, shown as (batch, split, 64), and the first rows."""
    g = cg.Graph("linear")
    x, w = g.input("x", (batch * split, 32), F16), g.input("w", (32, 64), F16)
    y = g.reshape(g.matmul(x, w), (batch, split, 64))
    g.output("y", g.slice(y, 1, 0, split // 2))
    return g


def attention(batch: int = 8, length: int = 32) -> cg.Graph:
    g = cg.Graph("attention")
    q, k, v = (g.input(name, (batch, 2, length, 16), F16) for name in "qkv")
    g.output("o", g.sdpa(q, k, v))
    return g


def norm(batch: int = 8) -> cg.Graph:
    g = cg.Graph("norm")
    w, b = g.input("w", (64,), F16), g.input("b", (64,), F16)
    g.output("y", g.layer_norm(g.input("x", (batch, 64), F16), w, b, eps=1e-5))
    return g


def family(spec: GraphSpec, policy: cg.Policy = POLICY, env: EnvKey = H200) -> str | None:
    return near.family(graph_key(spec, policy).components, env_components(env))


@pytest.mark.parametrize("graph", [conv, linear, attention, norm])
def test_graphs_of_other_batches_are_of_one_family(graph: Callable[..., cg.Graph]) -> None:
    families = {family(graph(batch).spec()) for batch in (1, 2, 8, 32)}
    assert len(families) == 1 and None not in families


def test_another_gpu_of_the_architecture_and_a_minor_version_are_of_the_family() -> None:
    spec = conv().spec()
    for env in (H100, replace(H200, cudnn_version=91000), replace(H200, frontend_version="1.32.0")):
        assert family(spec, env=env) == family(spec)


@pytest.mark.parametrize(
    "far",
    [
        conv(dtype=BF16),
        conv(layout="contiguous"),
        conv(channels=32),
        conv(side=8),
        conv(act="tanh"),
        attention(length=64),
        linear(split=32),
    ],
    ids=["dtype", "layout", "channels", "side", "op", "length", "rows"],
)
def test_any_other_difference_makes_another_family(far: cg.Graph) -> None:
    spec = far.spec()
    others = (conv(), attention(), linear())
    assert all(family(spec) != family(other.spec()) for other in others)


@pytest.mark.parametrize("change", [{"deterministic": True}, {"workspace_limit": 1}])
def test_another_policy_is_another_family(change: dict[str, Any]) -> None:
    assert family(conv().spec(), replace(POLICY, **change)) != family(conv().spec())


@pytest.mark.parametrize(
    "change", [{"compute_capability": (8, 0)}, {"cudnn_version": 80900}, {"schema": 7}]
)
def test_another_architecture_or_major_version_is_another_family(change: dict[str, Any]) -> None:
    assert family(conv().spec(), env=replace(H200, **change)) != family(conv().spec())


def test_a_batch_that_one_operand_alone_has_is_far(world: World) -> None:
    """All first dims that differ do so by one factor."""

    def two(a: int, b: int) -> cg.Graph:
        g = cg.Graph("two")
        g.output("x", g.relu(g.input("p", (a, 4), F16)))
        g.output("y", g.tanh(g.input("q", (b, 4), F16)))
        return g

    stored = _record(two(2, 4), world)
    wanted = [graph_key(two(*sizes).spec(), POLICY).components for sizes in ((4, 8), (8, 8))]
    found = [near.nearest(key, env_components(H200), [stored]) for key in wanted]
    assert [len(each) for each in found] == [1, 0]


def _record(
    graph: cg.Graph, world: World, env: EnvKey = H200, policy: cg.Policy = POLICY
) -> PlanRecord:
    """The record of a graph that was measured in an environment, which is kept."""
    before, world.environment = world.environment, env
    cg.cache_clear()
    graph.compile("cuda:0", policy=policy)
    world.environment = before
    cg.cache_clear()
    env_ = env_components(env)
    found = [from_json(path.read_text()) for path in world.files("json")]
    key = graph_key(graph.spec(), policy).components
    (record,) = [each for each in found if each.key == key and each.env == env_]
    return record


def test_the_nearest_of_several_is_the_first(world: World) -> None:
    records = {
        "batch 8 in place of 4": _record(conv(8), world),
        "batch 1 in place of 4": _record(conv(1), world),
        "NVIDIA H100 80GB HBM3 in place of NVIDIA H200": _record(conv(4), world, H100),
        "cuDNN 9.18.0 in place of 9.19.0": _record(
            conv(4), world, replace(H200, cudnn_version=91800)
        ),
    }
    key = graph_key(conv(4).spec(), POLICY).components
    place = env_components(H200)
    found = near.nearest(key, place, records.values())
    assert [each.differs for each in found] == [
        "NVIDIA H100 80GB HBM3 in place of NVIDIA H200",
        "cuDNN 9.18.0 in place of 9.19.0",
        "batch 8 in place of 4",
    ]
    assert near.near(lookup.store(), key, place) == found, "by the index"
    untuned = replace(records["batch 8 in place of 4"], policy={"tune": "heuristic"})
    assert near.nearest(key, place, [untuned]) == ()


def test_another_cudnn_is_far_where_results_have_to_be_the_same(world: World) -> None:
    policy = replace(POLICY, deterministic=True)
    older = _record(conv(), world, replace(H200, cudnn_version=91800), policy)
    key = graph_key(conv().spec(), policy).components
    assert near.nearest(key, env_components(H200), [older]) == ()


@pytest.mark.parametrize("change", ["{}", "null", "[]", '"x"', "7", "[[]]", '[["conv"]]'])
@pytest.mark.parametrize("component", ["ops", "inputs", "outputs", "intermediates"])
def test_a_hostile_key_is_near_to_nothing(component: str, change: str, world: World) -> None:
    record = _record(conv(), world)
    key = tuple((n, change if n == component else v) for n, v in record.key)
    forged = replace(record, key=key)
    own = graph_key(conv(1).spec(), POLICY).components
    assert near.nearest(own, record.env, [forged]) == ()


# -- what becomes of their choices -----------------------------------------------------------------


class Checks:
    """What checks a plan: passes all but some engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Choice] = []
        self.wrong: set[int] = set()
        monkeypatch.setattr(guard, "check", self.check)

    def check(
        self, spec: GraphSpec, policy: cg.Policy, choice: Choice, index: int, kept: Any
    ) -> tuple[str | None, Verified | None]:
        assert policy.verify != "off", "a choice of other sizes is checked in any case"
        self.asked.append(choice)
        if choice.engine in self.wrong:
            return "wrong: off by 0.5", None
        return None, Verified(1e-4, "a GPU", 91900, "1.28.0", "2.13")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    return Checks(monkeypatch)


@pytest.mark.parametrize("graph", [conv, linear, attention, norm])
def test_a_heuristic_takes_the_choice_that_was_measured_for_another_batch(
    graph: Callable[..., cg.Graph], world: World, checks: Checks
) -> None:
    record = _record(graph(8), world)
    exe = graph(1).compile("cuda:0", kernels=False)
    chosen = [(step.engine, step.knobs) for step in record.steps if step.engine is not None]
    assert [(c.engine, c.knobs) for c in (s.choice for s in exe.steps) if c] == chosen
    assert len(checks.asked) == len(set(chosen))
    assert (exe.tier, world.built) == ("built", [])
    said = f"taken from entry {record.id[:12]} (batch "
    assert all(said in step.decisions[0].reason for step in exe.steps)
    assert said in exe.explain()
    cg.cache_clear()
    again = graph(1).compile("cuda:0", kernels=False, tune="cached")
    assert [step.choice for step in again.steps] == [step.choice for step in exe.steps]
    assert said in again.explain(), "the record keeps where it comes from"


def test_a_choice_that_is_wrong_in_other_sizes_gives_way_to_the_heuristic(
    world: World, checks: Checks
) -> None:
    record = _record(conv(8), world)
    assert record.steps[0].engine is not None
    checks.wrong = {record.steps[0].engine}
    exe = conv(1).compile("cuda:0", kernels=False)
    assert len(checks.asked) == 1 and len(world.built) == 1
    assert "taken from" not in exe.explain()


def test_the_next_near_entry_is_tried_where_the_nearest_is_not_to_be_had(
    world: World, checks: Checks
) -> None:
    nearest, other = _record(conv(8), world), _record(conv(32), world)
    assert nearest.steps[0].engine is not None
    world.gone = {nearest.steps[0].engine}
    exe = conv(4).compile("cuda:0", kernels=False)
    assert other.id[:12] in exe.steps[0].decisions[0].reason and not world.built


def test_too_much_workspace_in_other_sizes_leaves_the_entry_out(
    world: World, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = replace(POLICY, workspace_limit=4096)
    _record(conv(8), world, policy=policy)
    replayed = world.replay

    def larger(spec: GraphSpec, choice: Choice, index: int) -> Any:
        plan = replayed(spec, choice, index)
        plan.workspace_bytes = 4097
        return plan

    monkeypatch.setattr(lookup, "replay", larger)
    conv(1).compile("cuda:0", kernels=False, workspace_limit=4096)
    assert len(world.built) == 1


def test_cached_takes_nothing_from_a_near_entry(world: World, checks: Checks) -> None:
    _record(conv(8), world)
    with pytest.raises(cg.PlanNotCached):
        conv(1).compile("cuda:0", kernels=False, tune="cached")
    assert not checks.asked


def test_an_untuned_entry_is_not_near(world: World, checks: Checks) -> None:
    conv(8).compile("cuda:0", kernels=False)
    conv(1).compile("cuda:0", kernels=False)
    assert (len(world.built), checks.asked) == (2, [])


def test_a_search_is_told_the_choices_of_near_entries(world: World, checks: Checks) -> None:
    record = _record(conv(8), world)
    exe = conv(1).compile("cuda:0", policy=POLICY)
    assert world.hints[0] == {}
    (choice,) = world.hints[1][step_digest(exe.steps[0].spec)]
    assert (choice.engine, choice.knobs) == (record.steps[0].engine, record.steps[0].knobs)
    assert not checks.asked, "the search checks what it takes"


@pytest.mark.parametrize("damage", ["cut", "another", "steps", "gone"])
def test_a_damaged_near_entry_is_none(damage: str, world: World, checks: Checks) -> None:
    record = _record(conv(8), world)
    file = world.file()
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:500])
    elif damage == "another":
        file.write_text(replace(record, created=0.0).to_json().replace("created", "cheated"))
    elif damage == "gone":
        file.unlink()
    else:
        forged = replace(record.steps[0], nodes=("elsewhere",), ops=("conv",))
        file.write_text(replace(record, steps=(forged,), blob=None).to_json())
    lookup.store().clear_memory()
    assert conv(1).compile("cuda:0", kernels=False).tier == "built"
    assert (len(world.built), checks.asked) == (1, [])


def test_a_miss_reads_no_entry_of_another_family(
    world: World, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in (4, 5, 7, 8):
        _record(conv(side=side), world)
    read: list[str] = []
    disk = lookup.store()._disk
    assert disk is not None
    plain = disk.read
    monkeypatch.setattr(disk, "read", lambda id, **o: read.append(id) or plain(id, **o))
    conv(1, side=7).compile("cuda:0", kernels=False)
    assert len(set(read)) == 2, "its own id, and that of the near entry"


def test_pruned_entries_leave_their_families(world: World) -> None:
    _record(conv(8), world)
    (listed,) = (world.directory / "v1" / "families").rglob("*/*")
    assert listed.name == world.file().stem
    lookup.store().prune(lambda entry: True)
    assert not list((world.directory / "v1" / "families").iterdir())


def test_seeds_are_found_by_family(world: World) -> None:
    record = _record(conv(8), world)
    seeds = world.directory.parent / "seeds"
    (seeds / "gpu").mkdir(parents=True)
    (seeds / "gpu" / f"{record.id}.json").write_text(record.with_blob(None).to_json())
    (seeds / "gpu" / "families.json").write_text(json.dumps({record.family: [record.id]}))
    store = lookup.PlanStore(None, seeds=seeds)
    key = graph_key(conv(1).spec(), POLICY).components
    (found,) = near.near(store, key, record.env)
    assert found.record.id == record.id
    (seeds / "gpu" / "families.json").write_text("[7")
    assert near.near(lookup.PlanStore(None, seeds=seeds), key, record.env) == ()


def test_exported_seeds_serve_their_graph_and_begin_others(
    world: World, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = world.directory.parent / "seeds"
    exported = [_record(graph, world) for graph in (conv(1), conv(8), norm(8))]
    for record in exported:  # one after the other: what is listed stays
        found, _ = records.scan(lookup.store())
        mine = [each for each in found if each.id == record.id]
        assert transfer.export_seeds(mine, seeds) == 1
    listed = json.loads((seeds / "nvidia-h200" / "families.json").read_text())
    assert {id for ids in listed.values() for id in ids} == {each.id for each in exported}
    assert len(listed) == 2

    empty = lookup.PlanStore(world.directory.parent / "empty", seeds=seeds, strict=True)
    monkeypatch.setattr(lookup, "store", lambda: empty)
    cg.cache_clear()
    assert conv(8).compile("cuda:0", policy=POLICY).tier == "seed, replayed"
    near_one = conv(32).compile("cuda:0", kernels=False)
    assert "(batch 8 in place of 32)" in near_one.explain()
    assert (world.built, len(world.measured)) == ([], 3)


# -- the search ------------------------------------------------------------------------------------


def test_a_hint_is_built_first_and_not_left_out_by_limits() -> None:
    spec = conv().spec()
    offers = [Offer(90.0), Offer(80.0), Offer(70.0), Offer(20.0)]
    policy = replace(POLICY, max_candidates=1, budget_s=0.0)
    plain = run(spec, table({"conv bias relu last": offers}), policy)
    assert plain.steps[0].choice == Choice(0, (("TILE", 0),))
    choice = Choice(3, (("TILE", 3),))
    bench = table({"conv bias relu last": offers})
    found = run(spec, bench, policy, {step_digest(plain.steps[0].spec): {choice: "entry 12"}})
    assert found.steps[0].choice == choice
    assert bench.built[0] == ("conv bias relu last", 3)
    (taken,) = [d for d in found.steps[0].decisions if d.choice == choice]
    assert taken.reason == "the fastest; tried first, taken from entry 12"
