"""What a search would try on a described GPU, against the real cuDNN library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import settings
from cudnngraph.backend import deviceless, env, libraries
from cudnngraph.cache.measured import Measured
from cudnngraph.cache.state import STATE
from cudnngraph.cli import main
from cudnngraph.explain.candidates import Candidates, candidates
from cudnngraph.ir.key import step_digest
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select.remembered import RememberedBench
from tests.searches import POLICY, Bench, Offer, block, chain, run

TARGETS = ("nvidia-h100", "nvidia-h200")
F16, F32 = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache directory, of a process that has read nothing of it."""
    monkeypatch.setattr(STATE, "measurements", {})
    with settings.override(cache_dir=tmp_path / "plans"):
        yield tmp_path / "plans"


def product(dtype: torch.dtype) -> GraphSpec:
    g = cg.Graph("product")
    a, b = (g.input(name, (64, 64), dtype) for name in "ab")
    g.output("y", g.matmul(a, b))
    return g.spec()


def asked_of(spec: GraphSpec) -> list[tuple[str, ...]]:
    """The ops of the parts that a search of made-up plans asks cuDNN for, in its order."""
    asked: list[GraphSpec] = []

    class Asked(Bench):
        def proposals(self, spec: GraphSpec, known: Any = None) -> Any:
            asked.append(spec)
            return super().proposals(spec, known)

    run(spec, Asked(lambda part: [Offer(10.0)]))
    digests = dict.fromkeys(map(step_digest, asked))
    assert len(digests) == len(asked), "each once"
    return [tuple(n.op for n in part.nodes if n.op != "constant") for part in asked]


@pytest.mark.parametrize("target", TARGETS)
def test_the_listing_has_the_parts_of_a_search_and_cudnns_plans_in_their_order(
    target: str,
) -> None:
    spec = block()
    found = candidates(spec, target, policy=POLICY)
    assert found.gpu_name == deviceless.gpu_name(target)
    parts = [part.ops for part in found.parts]
    assert parts[0] == ("conv", "bias", "relu"), "the whole comes first"
    assert sorted(part.ops for part in found.parts if not part.thresholds) == sorted(
        dict.fromkeys(asked_of(spec))
    )
    for part in found.parts[:1]:
        _, ranked = deviceless.propose_for(part.spec, target, more=True)
        assert [plan.choice for plan in part.plans] == [each.choice for each in ranked]
        assert len(part.plans) > 10
    assert {part.ops: part.torch for part in found.parts}[("relu",)]


@pytest.mark.parametrize("spec", [chain(), block("contiguous")], ids=["chain", "contiguous"])
def test_no_part_of_a_search_is_left_out(spec: GraphSpec) -> None:
    found = [part.ops for part in candidates(spec, TARGETS[0], policy=POLICY).parts]
    assert set(asked_of(spec)) <= set(found)


def test_plans_that_the_policy_bars_are_not_among_those_to_build() -> None:
    exact, loose = (
        candidates(product(F32), "nvidia-h200", allow_tf32=tf32).parts[0] for tf32 in (False, True)
    )
    assert [plan.choice for plan in exact.plans] == [plan.choice for plan in loose.plans]
    counts = [sum(plan.allowed for plan in part.plans) for part in (exact, loose)]
    assert counts[0] < counts[1] == len(loose.plans)
    assert "barred by the policy: less exact than float32" in str(exact.lines(12))


def test_a_graph_that_is_no_work_for_cudnn_says_so() -> None:
    found = candidates(product(torch.float64), "nvidia-h200")
    assert (found.parts, found.whole_by_torch) == ((), "cuDNN graphs have no float64")
    assert "by torch, there is nothing to search: cuDNN graphs have no float64" in str(found)


@pytest.mark.parametrize("name", ["H200", "NVIDIA H200", " nvidia_h200 ", "nvidia-h200"])
def test_a_target_may_be_called_as_people_do(name: str) -> None:
    assert deviceless.target_of(name) == "nvidia-h200"
    assert candidates(block(), name).gpu_name == "NVIDIA H200"
    assert cg.explain(block(), name).to_dict() == cg.explain(block(), "nvidia-h200").to_dict()


def test_a_target_that_is_not_described_is_refused() -> None:
    """cuDNN has plans for it; what is missing is its description."""
    with pytest.raises(cg.NotSupported) as caught:
        candidates(block(), "a100")
    known = "known targets: nvidia-h100, nvidia-h200"
    assert str(caught.value) == f"target 'a100' is not known\n  - {known}"
    assert (caught.value.subject, caught.value.reasons) == ("target 'a100'", (known,))


# -- what is kept ----------------------------------------------------------------------------------


class Building(Bench):
    """A bench that may be asked for no ranking: it has the plans that are known."""

    def __init__(self) -> None:
        super().__init__(lambda spec: [])
        self.tried: list[Any] = []

    def proposals(self, spec: GraphSpec, known: Any = None) -> Any:
        assert known is not None, f"{spec.name} is not ranked"
        self._offers = lambda spec: [Offer(5.0)] * 100  # type: ignore[method-assign]
        found = super().proposals(spec)
        found.candidates = known
        return found


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("target", TARGETS)
def test_a_search_on_that_gpu_starts_with_what_is_kept(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = product(F16)
    found = candidates(spec, target, policy=POLICY)
    assert found.driver and found.kept == 1
    here = deviceless.env_key(target)
    monkeypatch.setattr(env, "env_key", lambda index: here)
    monkeypatch.setattr(STATE, "measurements", {})
    bench = RememberedBench(Building(), Measured(POLICY, 0))  # type: ignore[arg-type]
    listed = bench.proposals(found.parts[0].spec).candidates
    assert [each.choice for each in listed] == [plan.choice for plan in found.parts[0].plans]
    other = next(each for each in TARGETS if each != target)
    monkeypatch.setattr(env, "env_key", lambda index: deviceless.env_key(other))
    bench = RememberedBench(Building(), Measured(POLICY, 0))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="is not ranked"):
        bench.proposals(found.parts[0].spec)


@pytest.mark.usefixtures("driver")
def test_a_listing_that_is_asked_for_again_keeps_nothing_twice(folder: Path) -> None:
    first = candidates(block(), "nvidia-h200")
    files = {path.name: path.read_bytes() for path in (folder / "parts").iterdir()}
    assert len(files) == first.kept > 1
    assert candidates(block(), "nvidia-h200") == first
    assert {path.name: path.read_bytes() for path in (folder / "parts").iterdir()} == files


def test_without_a_driver_nothing_is_kept_and_the_listing_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that began with a list without runtime-compiled engines would miss them."""
    usable = type("Driver", (), {"usable": False})()
    monkeypatch.setattr(libraries, "load_driver", lambda: usable)
    found: Candidates = candidates(block(), "nvidia-h200")
    assert (found.driver, found.kept) == (False, 0) and found.parts[0].plans
    assert "so nothing is kept" in str(found)
    assert not folder.exists()


@pytest.mark.usefixtures("driver")
def test_nothing_counts_as_kept_where_the_directory_cannot_be_used(folder: Path) -> None:
    folder.write_text("a file")
    found = candidates(block(), "nvidia-h200")
    assert found.kept == 0 and found.parts[0].plans
    assert found.to_dict()["unkept"] == found.unkept > 0
    assert f"cannot be written to the cache directory, so are not kept: {found.unkept}" in str(
        found
    )


# -- the command -----------------------------------------------------------------------------------

SOURCE = """
import torch
import cudnngraph as cg

def product(n: int) -> cg.Graph:
    g = cg.Graph(f"product{n}")
    a, b = (g.input(name, (n, n), torch.float16) for name in "ab")
    g.output("y", g.relu(g.matmul(a, b)))
    return g

small, large = product(64), product(512)
"""


@pytest.mark.parametrize("target", TARGETS)
def test_the_command_lists_every_graph(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "graphs.py"
    file.write_text(SOURCE)
    assert main(["tune", "--target", target, "--graphs", str(file)]) == 0
    out = capsys.readouterr().out
    for name in ("product64", "product512"):
        assert f"graph '{name}' as a search would try it on {deviceless.gpu_name(target)}" in out
    assert re.search(r"^part 1 of \d+: matmul → relu: \d+ plans", out, re.M)
    assert re.search(rf"^rankings that are kept for {deviceless.gpu_name(target)}: \d+$", out, re.M)
    assert main(["tune", "--target", target, "--graphs", f"{file}:small", "--json"]) == 0
    (body,) = json.loads(capsys.readouterr().out)["graphs"]
    assert body == json.loads(json.dumps(body))
    assert (body["graph"], body["target"]) == ("product64", target)
    assert body["parts"][0]["ops"] == ["matmul", "relu"]
    assert {"rank", "engine", "knobs", "allowed"} <= set(body["parts"][1]["plans"][0])
