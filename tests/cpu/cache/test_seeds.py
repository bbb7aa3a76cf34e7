"""Seeds, from the run that makes them to the machines that they serve, on a fake library."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import cli
from cudnngraph.backend.env import EnvKey
from cudnngraph.backend.plan import Choice, Verified
from cudnngraph.bench import seeds
from cudnngraph.cache import lookup
from cudnngraph.cli import tune
from cudnngraph.ir.key import graph_key, step_digest
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.runtime import compile as compiling
from cudnngraph.select import guard
from plans_cache import PlanStore
from plans_cache.record import PlanRecord, from_json, is_id
from tests.fakes import H200, World

H100 = replace(H200, gpu_name="NVIDIA H100 80GB HBM3")
LISTED = {graph.name: graph for graph in seeds.graphs()}
LAYERS = ("conv_{}_float16_64_64_56_3_1_relu", "linear_{}_bfloat16_128_768_3072_gelu")
LAYERS += ("attention_{}_float16_12_128_64_False", "norm_{}_bfloat16_128_768_layer_norm")


class Checks:
    """Stands for the workers: what was checked on this machine, and what does not pass."""

    def __init__(self) -> None:
        self.asked: list[Choice] = []
        self.wrong: set[int] = set()

    def check(
        self, spec: GraphSpec, policy: cg.Policy, choice: Choice, index: int, kept: Any
    ) -> tuple[str | None, Verified | None]:
        self.asked.append(choice)
        if choice.engine in self.wrong:
            return "wrong: off by 0.5", None
        environment = lookup.env.env_key(index)
        versions = (environment.cudnn_version, environment.frontend_version, "2.13")
        return None, Verified(1e-4, environment.gpu_name, *versions)


class Builder:
    """Stands for the choice by heuristics, whose workers build here."""

    def __init__(self, world: World, policy: cg.Policy, index: int) -> None:
        self._build = partial(world.build_first, policy=policy, index=index)

    def __call__(self, part: GraphSpec) -> Any:
        return self._build(part)

    def expect(self, parts: Any) -> None:
        """Nothing is built ahead."""

    def expect_kernels(self, parts: Any) -> None:
        """Nor here."""

    def cancel(self) -> None:
        """Nothing was begun."""

    def kernels(self, parts: Any) -> Any:
        raise AssertionError("no kernel is generated here")


@dataclass
class Shipped:
    """Seeds of a run, and machines that have them and nothing else."""

    world: World
    checks: Checks
    folder: Path
    records: dict[str, PlanRecord]  # by the names of the graphs
    monkeypatch: pytest.MonkeyPatch

    def machine(self, environment: EnvKey = H200) -> PlanStore:
        """From now on another machine, with an empty directory."""
        made = PlanStore(self.folder.parent / "machine", seeds=self.folder, strict=True)
        self.monkeypatch.setattr(lookup, "store", lambda: made)
        self.world.environment = environment
        self.world.measured.clear()
        self.world.built.clear()
        self.world.hints.clear()
        self.checks.asked.clear()
        cg.cache_clear()
        return made

    def restart(self) -> None:
        """A new process on that machine."""
        lookup.store().clear_memory()
        cg.cache_clear()


@pytest.fixture
def shipped(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shipped:
    """Seeds of each kind of layer in the first batch, measured on an H200 and checked there."""
    checks = Checks()
    monkeypatch.setattr(guard, "check", checks.check)
    monkeypatch.setattr(compiling, "Builder", lambda policy, i, *_: Builder(world, policy, i))
    monkeypatch.setenv("CUDNNGRAPH_VERIFY", "isolated")
    first = seeds.BATCHES[0]
    names = [layer.format(first) for layer in LAYERS]
    for name in names:
        LISTED[name].compile("cuda:0", tune="autotune")
    folder = tmp_path / "seeds"
    assert cli.main(["plans", "export", "--seeds", str(folder)]) == 0
    by_key = {record.key: record for record in records_in(folder)}
    assert len(by_key) == len(names)
    records = {name: by_key[key_of(name)] for name in names}
    return Shipped(world, checks, folder, records, monkeypatch)


def records_in(folder: Path) -> list[PlanRecord]:
    files = [file for file in folder.rglob("*.json") if is_id(file.stem)]
    return [from_json(file.read_text()) for file in files]


def key_of(name: str) -> Any:
    policy = cg.Policy(allow_tf32=False, kernels=False)
    return graph_key(LISTED[name].spec(), policy).components


def choices(steps: Any) -> list[Choice]:
    return [step.choice for step in steps if step.choice is not None]


def choices_of(record: PlanRecord) -> list[Choice]:
    return [Choice(s.engine, s.knobs) for s in record.steps if s.engine is not None]


# -- the very graph --------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("how", ["heuristic", "autotune", "cached"])
def test_a_graph_with_a_seed_takes_the_tuned_choice_without_a_search(
    how: Any, layer: str, shipped: Shipped
) -> None:
    shipped.machine()
    name = layer.format(seeds.BATCHES[0])
    exe = LISTED[name].compile("cuda:0", tune=how)
    assert exe.tier == "seed, replayed"
    assert choices(exe.steps) == choices_of(shipped.records[name])
    assert (shipped.world.measured, shipped.world.built) == ([], [])


def test_a_seed_that_was_served_is_kept_with_its_plans_for_the_next_process(
    shipped: Shipped,
) -> None:
    """Else each process would build what the first one has built."""
    store = shipped.machine()
    name = LAYERS[0].format(seeds.BATCHES[0])
    first = LISTED[name].compile("cuda:0")
    shipped.restart()
    again = LISTED[name].compile("cuda:0")
    assert again.tier == "disk, serialized"
    assert choices(again.steps) == choices(first.steps)
    assert [entry.tier for entry in store.scan() if entry.id == shipped.records[name].id] == [
        "disk"
    ]


def test_a_seed_made_with_another_frontend_serves_once_its_plans_are_checked_here(
    shipped: Shipped,
) -> None:
    shipped.machine(replace(H200, frontend_version="1.32.0"))
    name = LAYERS[0].format(seeds.BATCHES[0])
    exe = LISTED[name].compile("cuda:0", tune="autotune")
    assert exe.tier == "seed, replayed" and not shipped.world.measured
    assert shipped.checks.asked == list(dict.fromkeys(choices_of(shipped.records[name])))
    shipped.restart()
    shipped.checks.asked.clear()
    assert LISTED[name].compile("cuda:0", tune="autotune").tier == "disk, serialized"
    assert shipped.checks.asked == [], "what passed is kept"


# -- near misses -----------------------------------------------------------------------------------

NEAR: dict[str, tuple[int, EnvKey, str]] = {
    "batch": (seeds.BATCHES[1], H200, "batch 8 in place of 1"),
    "cudnn": (seeds.BATCHES[0], replace(H200, cudnn_version=91000), "cuDNN 9.19.0 in place of 9.1"),
    "gpu": (seeds.BATCHES[0], H100, "NVIDIA H200 in place of NVIDIA H100 80GB HBM3"),
    "all": (
        seeds.BATCHES[2],
        replace(H100, cudnn_version=92200, frontend_version="1.32.0"),
        "batch 8 in place of 32, cuDNN 9.19.0 in place of 9.22.0, NVIDIA H200 in place of",
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("near", NEAR)
def test_a_near_miss_takes_the_nearest_seeds_choice_once_it_is_checked(
    near: str, layer: str, shipped: Shipped
) -> None:
    batch, environment, differs = NEAR[near]
    record = shipped.records[layer.format(seeds.BATCHES[0])]
    shipped.machine(environment)
    exe = LISTED[layer.format(batch)].compile("cuda:0")
    assert (exe.tier, shipped.world.built) == ("built", [])
    assert choices(exe.steps) == choices_of(record)
    assert shipped.checks.asked == list(dict.fromkeys(choices_of(record)))
    assert f"taken from entry {record.id[:12]} ({differs}" in exe.explain()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("near", NEAR)
def test_a_search_of_a_near_miss_begins_with_the_nearest_seeds_choice(
    near: str, layer: str, shipped: Shipped
) -> None:
    batch, environment, differs = NEAR[near]
    record = shipped.records[layer.format(seeds.BATCHES[0])]
    shipped.machine(environment)
    exe = LISTED[layer.format(batch)].compile("cuda:0", tune="autotune")
    assert len(shipped.world.measured) == 1
    (hints,) = shipped.world.hints
    for step, choice in zip(
        [step for step in exe.steps if step.choice is not None], choices_of(record), strict=True
    ):
        told = hints[step_digest(step.spec)]
        assert next(iter(told)) == choice and differs in told[choice]


def test_of_several_seeds_the_nearest_comes_first(shipped: Shipped, tmp_path: Path) -> None:
    """The same graph by another cuDNN comes before another batch by this one."""
    layer = LAYERS[0]
    shipped.machine(replace(H200, cudnn_version=91000))
    LISTED[layer.format(1)].compile("cuda:0", tune="autotune")
    with cg.settings.override(cache_dir=shipped.folder.parent / "machine"):
        assert cli.main(["plans", "export", "--seeds", str(shipped.folder)]) == 0
    third = PlanStore(tmp_path / "third", seeds=shipped.folder, strict=True)
    shipped.monkeypatch.setattr(lookup, "store", lambda: third)
    shipped.world.environment = H200
    cg.cache_clear()
    exe = LISTED[layer.format(1)].compile("cuda:0")
    assert "(cuDNN 9.10.0 in place of 9.19.0)" in exe.explain()


# -- what the installed cuDNN refuses --------------------------------------------------------------


def gone(shipped: Shipped, record: PlanRecord) -> None:
    shipped.world.gone = {choice.engine for choice in choices_of(record)}


def wrong(shipped: Shipped, record: PlanRecord) -> None:
    shipped.checks.wrong = {choice.engine for choice in choices_of(record)}


def barred(shipped: Shipped, record: PlanRecord) -> None:
    shipped.world.bad = "it is known to be wrong"


@pytest.mark.parametrize("how", ["heuristic", "autotune"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("refuse", [gone, barred])
def test_a_seed_whose_plan_is_refused_falls_back_without_an_error(
    refuse: Callable[..., None], layer: str, how: Any, shipped: Shipped
) -> None:
    name = layer.format(seeds.BATCHES[0])
    shipped.machine()
    refuse(shipped, shipped.records[name])
    exe = LISTED[name].compile("cuda:0", tune=how)
    assert exe.tier == "built"
    assert bool(shipped.world.measured) is (how == "autotune")
    assert bool(shipped.world.built) is (how == "heuristic")
    assert "taken from" not in exe.explain()
    shipped.world.gone, shipped.world.bad = set(), None
    shipped.restart()
    assert LISTED[name].compile("cuda:0", tune=how).tier == "disk, serialized", "what was built"


def test_a_seed_that_does_not_serve_is_not_served_for_cached(shipped: Shipped) -> None:
    name = LAYERS[0].format(seeds.BATCHES[0])
    shipped.machine()
    gone(shipped, shipped.records[name])
    with pytest.raises(cg.PlanNotCached, match="stale"):
        LISTED[name].compile("cuda:0", tune="cached")


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("refuse", [gone, wrong, barred])
@pytest.mark.parametrize("near", NEAR)
def test_a_near_seed_whose_plan_is_refused_falls_back_without_an_error(
    near: str, refuse: Callable[..., None], layer: str, shipped: Shipped
) -> None:
    batch, environment, _ = NEAR[near]
    shipped.machine(environment)
    refuse(shipped, shipped.records[layer.format(seeds.BATCHES[0])])
    exe = LISTED[layer.format(batch)].compile("cuda:0")
    assert exe.tier == "built" and shipped.world.built
    assert "taken from" not in exe.explain()


# -- the run that makes them -----------------------------------------------------------------------


def test_a_run_that_is_stopped_exports_what_was_done_and_the_next_goes_on(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the commands that the list of seeds names."""
    names = list(LISTED)
    now = [0.0]
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0))
    autotune = world.autotune

    def second_each(*args: Any, **options: Any) -> Any:
        now[0] += 1.0
        return autotune(*args, **options)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(compiling, "by_measurement", second_each)
    folder = tmp_path / "seeds"

    def run(budget_s: float) -> list[str]:
        cg.cache_clear()
        graphs = str(Path(seeds.__file__))
        assert cli.main(["tune", "--graphs", graphs, f"--budget={budget_s}"]) == 0
        return capsys.readouterr().out.splitlines()

    def exported() -> set[Any]:
        assert cli.main(["plans", "export", "--seeds", str(folder)]) == 0
        capsys.readouterr()
        found = records_in(folder)
        listed = json.loads((folder / "nvidia-h200" / "families.json").read_text())
        assert {id for ids in listed.values() for id in ids} == {each.id for each in found}
        return {each.key for each in found}

    out = run(10.0)
    assert [line.split(": ")[0] for line in out[:10]] == [
        f"{number} of {len(names)}" for number in range(1, 11)
    ]
    assert f"the budget is spent, {len(names) - 10} graphs are left to the next call" in out
    assert exported() == {key_of(name) for name in names[:10]}
    out = run(5.0)
    assert [": disk, serialized, 0.0 s" in line for line in out[:15]] == [True] * 10 + [False] * 5
    assert len(exported()) == 15 == len(world.measured)
