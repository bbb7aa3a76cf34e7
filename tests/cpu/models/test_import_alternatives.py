"""What the import of a model decides is measured, kept, and followed by later imports."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.cache import lookup
from cudnngraph.device.rules import Values
from cudnngraph.executor import streams
from cudnngraph.ir.key import step_digest
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.models import alternatives
from cudnngraph.models.alternatives import Copied, compiled
from cudnngraph.models.convert import Imported, convert
from cudnngraph.models.export import export
from cudnngraph.models.report import Report
from cudnngraph.runtime import compile as compiling
from cudnngraph.runtime.executable import import_of
from cudnngraph.runtime.program import Program
from cudnngraph.select.alternatives import by_measurement
from plans_cache.record import PlanRecord
from tests.fakes import World
from tests.searches import Bench, Offer

CUDA = torch.device("cuda:0")
F16 = torch.float16


class Stem(nn.Module):
    """An image of three channels that patches are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 4, stride=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(self.conv(x), 3, 1, 1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.conv(x)))


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x).reshape(-1, 4, 4) + self.k(x).reshape(-1, 4, 4)


class Short(nn.Module):
    """Short sequences of attention, as windows are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(4096, 16, 4, 32).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape)


IMAGE, FEATURES = (2, 3, 16, 16), (2, 16, 8, 8)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Values]] = {
    "channels": (Stem, IMAGE, (("pads_three_channels", False),)),
    "columns": (Stem, IMAGE, (("patches_as_channels", False),)),
    "pooling": (Pooled, FEATURES, (("average_by_convolution", ()),)),
    "norm": (Normed, FEATURES, (("group_norm_min_elements_channels_last", 1 << 62),)),
    "siblings": (Siblings, (4, 16), (("sibling_max_multiplications", 0),)),
    "short": (Short, (1, 4096 * 16, 128), (("attention_block_rows", 0),)),
}


class Case:
    """A model, its imports as for a GPU, and a GPU of made-up times."""

    def __init__(self, name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        make, shape, self.values = MODELS[name]
        torch.manual_seed(0)
        made = export(make().to(F16).eval(), (torch.zeros(shape, dtype=F16),))
        self.exported = made
        self.imports = 0
        self.searches: list[str] = []
        self.took: Callable[[GraphSpec], float] = lambda part: 10.0

        def search(spec: GraphSpec, policy: Any, _: Any, tell: Any, *rest: Any, **how: Any) -> Any:
            self.searches.append(spec.name)
            found: Any = Bench(lambda part: [Offer(self.took(part))], self.took)
            return by_measurement(spec, policy, found, tell, None, rest[1], **how)

        monkeypatch.setattr(compiling, "by_measurement", search)

    def again(self) -> Imported:
        self.imports += 1
        return convert(
            Copied(self.exported.module),
            self.exported.constants,
            self.exported.placeholders,
            channels_last=True,
            on_gpu=True,
            kernels=True,
        )

    def run(self, tune: str = "autotune") -> tuple[Imported, cg.Executable, Values]:
        cg.cache_clear()  # as a new process has nothing in memory
        self.imports, self.searches = 0, []
        imported, executable, values = compiled(self.again, CUDA, tune=tune)
        assert executable is not None
        return imported, executable, values


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Case]:
    world = World(tmp_path)
    world.install(monkeypatch)
    # There are none without a GPU.
    monkeypatch.setattr(streams, "streams", lambda device: [])
    monkeypatch.setattr(Program, "_torch_run", lambda self, step: None)
    return lambda name: Case(name, world, monkeypatch)


def forms(case: Case) -> tuple[GraphSpec, GraphSpec]:
    """The graphs of the import by the rules and of the other one."""
    first = case.again().spec
    with alternatives.following(case.values):
        other = case.again().spec
    assert first is not None and other is not None and first != other
    return first, other


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_import_is_taken_kept_and_followed(
    name: str, faster: bool, case: Callable[[str], Case]
) -> None:
    its = case(name)
    first, other = forms(its)
    known = {step_digest(part) for part in parts(first)}
    mine = {step_digest(part) for part in parts(other)} - known
    assert mine
    # What the other import alone has is fast or slow.
    its.took = lambda part: (0.1 if faster else 500.0) if step_digest(part) in mine else 50.0
    imported, executable, values = its.run()
    assert dict(its.values).items() <= dict(values).items() if faster else values == ()
    assert (imported.spec == first) is not faster
    told = str(Report.of("m", imported, executable, CUDA, channels_last=True, instead=values))
    assert ("imported by what was measured" in told) is faster
    for tune in ("autotune", "heuristic", "cached"):
        again, later, followed = its.run(tune)
        assert (again.spec, followed, its.searches) == (imported.spec, values, [])
        assert its.imports == (2 if values else 1)
        assert [s.choice for s in later.steps] == [s.choice for s in executable.steps]


def parts(spec: GraphSpec) -> list[GraphSpec]:
    """Every part that a search times for a graph."""
    seen: list[GraphSpec] = []

    def note(part: GraphSpec) -> float:
        seen.append(part)
        return 10.0

    found: Any = Bench(lambda part: [Offer(note(part))], note)
    by_measurement(spec, cg.Policy(tune="autotune", allow_tf32=False, budget_s=1e6), found)
    return seen


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MODELS)
def test_no_import_that_is_taken_is_slower(
    name: str, seed: int, case: Callable[[str], Case]
) -> None:
    its = case(name)
    its.took = lambda part: random.Random(f"{step_digest(part)} {seed}").uniform(1.0, 40.0)
    first = its.again()
    assert first.spec is not None
    by_rules: Any = compiling.compile(first.spec, CUDA, tune="autotune")
    _, executable, _ = its.run()
    total = sum(step.time_us or 0.0 for step in executable.steps)
    assert total <= 1.02 * sum(step.time_us or 0.0 for step in by_rules.steps)  # ties


def test_without_a_search_nothing_is_imported_twice(case: Callable[[str], Case]) -> None:
    its = case("channels")
    _, executable, values = its.run("heuristic")
    assert (values, its.imports, import_of(executable)) == ((), 1, None)
    assert its.run("cached")[2] == () and its.imports == 1


def test_the_searches_of_a_model_share_a_bench_and_its_time(
    case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    its = case("channels")
    benches: list[Any] = []
    left: list[float] = []
    made, search = compiling.GuardedBench, compiling.by_measurement

    def bench(*args: Any) -> Any:
        benches.append(args)
        return made(*args)

    def searched(*args: Any, **options: Any) -> Any:
        left.append(options["left_s"])
        return search(*args, **options)

    monkeypatch.setattr(compiling, "GuardedBench", bench)
    monkeypatch.setattr(compiling, "by_measurement", searched)
    _, executable, _ = its.run()
    assert len(its.searches) > 1 and len(benches) == 1
    total_s = executable.policy.total_s
    assert total_s >= left[0] > left[-1] > 0.0 and left == sorted(left, reverse=True)
    told = [d for d in executable.steps[0].decisions if d.subject == compiling.SEARCH]
    assert len(told) == 1 and "waiting for builds" in told[0].reason
    assert told[0].reason in executable.explain()
    its.run()
    assert len(benches) == 1, "a warm start searches nothing"


def test_a_model_whose_time_is_spent_is_imported_once(case: Callable[[str], Case]) -> None:
    its = case("channels")
    cg.cache_clear()
    done = compiled(its.again, CUDA, tune="autotune", total_s=1e-9)
    assert done[1] is not None and done[2] == () and its.imports == 1


def test_a_search_without_time_left_tries_no_other_import(case: Callable[[str], Case]) -> None:
    its = case("channels")
    cg.cache_clear()
    done = compiled(its.again, CUDA, tune="autotune", budget_s=1e-9)
    assert done[2] == () and its.imports == 1


def kept(its: Case, spec: GraphSpec) -> PlanRecord:
    """The record of a graph of the case."""
    key = compiling.compile(spec, CUDA, tune="cached").key
    (found,) = (
        each.record
        for each in lookup.store().scan()
        if each.record is not None and each.record.key == key.components
    )
    return found


def test_a_record_that_says_nothing_of_imports_is_served_as_it_is(
    case: Callable[[str], Case],
) -> None:
    """As one of an earlier release: a warm start searches nothing."""
    its = case("channels")
    imported, _, _ = its.run()
    assert imported.spec is not None
    record = kept(its, imported.spec)
    assert record.extra["imported"] == {}
    lookup.store().put(replace(record, extra={}))
    assert its.run()[2] == () and (its.searches, its.imports) == ([], 1)


def test_without_the_other_imports_record_the_first_import_is_run(
    case: Callable[[str], Case],
) -> None:
    """As where the one record was exported, and the other was not."""
    its = case("channels")
    first, other = forms(its)
    known = {step_digest(part) for part in parts(first)}
    mine = {step_digest(part) for part in parts(other)} - known
    its.took = lambda part: 0.1 if step_digest(part) in mine else 50.0
    imported, _, values = its.run()
    assert imported.spec == other and dict(its.values).items() <= dict(values).items()
    lookup.store().remove(kept(its, other).id)
    for tune in ("heuristic", "cached"):
        again, _, followed = its.run(tune)
        assert (again.spec, followed) == (first, ())


def test_an_import_that_cannot_be_is_left(
    case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    its = case("channels")
    imports: list[Imported] = []

    def again() -> Imported:
        if imports:
            raise cg.CannotImport("there is a reason")
        imports.append(its.again())
        return imports[0]

    _, executable, values = compiled(again, CUDA, tune="autotune")
    assert len(imports) == 1
    assert values == () and executable is not None and import_of(executable) == ()
