"""The list of graphs whose plans ship as seeds."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import functional, settings
from cudnngraph.backend.plan import Choice, Verified
from cudnngraph.bench import seeds
from cudnngraph.cache import codec, near
from cudnngraph.cache.codec import env_components
from cudnngraph.cli.explain import load
from cudnngraph.cli.transfer import seed_folder
from cudnngraph.graph.builder import Graph
from cudnngraph.ir.canonical import canonical
from cudnngraph.ir.key import Key, graph_key
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.policy import Policy
from cudnngraph.runtime import compile as compiling
from cudnngraph.select.decision import Selection, StepPlan
from plans_cache.record import PlanRecord, from_json
from plans_cache.store import PACKAGED_SEEDS, SEED_FAMILIES, SEED_STEPS
from tests.fakes import H200

POLICY = Policy(allow_tf32=False, kernels=True)


def test_every_graph_is_there_once_in_each_batch_and_dtype() -> None:
    keys = [graph_key(graph.spec(), POLICY) for graph in seeds.graphs()]
    layers = (seeds.CONVOLUTIONS, seeds.LINEAR, seeds.ATTENTION, seeds.NORMS)
    assert len(set(keys)) == len(keys) == sum(map(len, layers)) * 6
    place = env_components(H200)
    families = Counter(near.family(key.components, place) for key in keys)
    assert None not in families
    assert set(families.values()) == {len(seeds.BATCHES)}


def test_the_first_third_has_every_layer_so_that_the_others_begin_with_its_plans() -> None:
    place = env_components(H200)
    found = [near.family(graph_key(g.spec(), POLICY).components, place) for g in seeds.graphs()]
    third = len(found) // len(seeds.BATCHES)
    assert len(set(found[:third])) == third
    assert {*found[:third]} == {*found[third : 2 * third]} == {*found[2 * third :]}


def test_functions_and_modules_find_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed is of one graph: of what they declare for tensors as torch lays them out."""
    asked: list[Key] = []
    program = compiling._program

    def asking(spec: GraphSpec, device: torch.device, policy: Policy, key: Key, *rest: Any) -> Any:
        asked.append(key)
        return program(spec, device, policy, key, *rest)

    monkeypatch.setattr(compiling, "_program", asking)
    last = torch.channels_last
    dtype = torch.bfloat16

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    narrow = torch.nn.Conv2d(512, 2048, 1).to(dtype).to(memory_format=last)
    wide = torch.nn.Conv2d(512, 512, 3, padding=1).to(dtype).to(memory_format=last)
    image, wider = (made(1, c, 7, 7).contiguous(memory_format=last) for c in (512, 2048))
    x, q, w = made(1, 128, 768), made(1, 12, 128, 64), made(768)
    with settings.override(kernels=True), torch.no_grad():
        functional.conv_bias_act(image, wide.weight, wide.bias, padding=1)
        functional.conv_bias_act(image, narrow.weight, narrow.bias, residual=wider)
        cg.FusedConvBlock(512, 512, 3, padding=1, norm=None).to(dtype).to(memory_format=last)(image)
        functional.linear(x, made(768, 768), w)
        functional.linear(x, made(3072, 768), made(3072), activation="gelu")
        functional.scaled_dot_product_attention(q, q.clone(), q.clone())
        functional.layer_norm(x, (768,), w, w.clone())
        functional.rms_norm(x, (768,), w, eps=1e-6)
    assert len(asked) == 8
    known = {graph_key(graph.spec(), POLICY): graph.name for graph in seeds.graphs()}
    assert [key in known for key in asked] == [True] * 8


def test_the_command_that_makes_seeds_finds_the_graphs() -> None:
    found = load(str(Path(seeds.__file__)))
    names = {graph.name for graph in found if isinstance(graph, Graph)}
    assert names == {graph.name for graph in seeds.graphs()}
    assert len(names) == len(found)


def test_the_graphs_hold_16_bit_data() -> None:
    dtypes = {
        spec.tensors[name].dtype
        for spec in (graph.spec() for graph in seeds.graphs())
        for name in (*spec.inputs, *spec.outputs)
    }
    assert dtypes == {torch.float16, torch.bfloat16}


# -- what ships ------------------------------------------------------------------------------------

MOST_BYTES = 5_000_000  # of the wheel, which is compressed


def wrong_with(folder: Path) -> list[str]:
    """What is wrong with seeds that are to ship."""
    found: list[str] = []
    total = 0
    for place in sorted(each for each in folder.glob("*/") if each.name != "__pycache__"):
        listing = place / SEED_FAMILIES
        families = json.loads(listing.read_text()) if listing.exists() else {}
        listed = {id: family for family, ids in families.items() for id in ids}
        for file in sorted(place.glob("*.json")):
            total += len(zlib.compress(file.read_bytes()))
            if file.name == SEED_FAMILIES or fnmatch(file.name, SEED_STEPS):
                continue
            record = from_json(file.read_text())
            own = near.family(record.key, record.env)
            checks = {
                "is not named by its id": file.stem == record.id,
                "is of another GPU": seed_folder(json.loads(dict(record.env)["gpu_name"]))
                == place.name,
                "was not measured": near.is_measured(record),
                "has serialized plans": record.blob is None,
                "is not listed by its family": own is not None and listed.get(record.id) == own,
                "has a plan that was not checked": all(
                    step.kind == "torch" or codec.VERIFIED in step.extra for step in record.steps
                ),
            }
            found += [f"{file.name} {what}" for what, fine in checks.items() if not fine]
    if total > MOST_BYTES:
        found.append(f"the seeds take {total} bytes of the wheel, over {MOST_BYTES}")
    return found


def test_the_seeds_that_ship_are_measured_checked_listed_and_small() -> None:
    assert wrong_with(PACKAGED_SEEDS) == []


def tuned(graph: Graph, **change: Any) -> PlanRecord:
    """The record of a graph as one plan, made up."""
    spec = canonical(graph.spec())
    proof = Verified(1e-4, "NVIDIA H200", 91900, "1.28.0", "2.13")
    step = StepPlan(spec, Choice(3, ()), 0, (), 5.0, proof)
    policy = replace(POLICY, tune="autotune")
    key = graph_key(spec, policy)
    made = codec.to_record(spec, key, H200, policy, Selection((step,), (None,)))
    return replace(made, **change)


def test_what_is_wrong_with_seeds_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = list(seeds.graphs())[:5]
    fine, untuned, unchecked, stray, foreign = map(tuned, graphs)
    untuned = replace(untuned, policy={"tune": "heuristic"})
    unchecked = replace(unchecked, steps=(replace(unchecked.steps[0], extra={}),))
    place = tmp_path / "nvidia-h200"
    place.mkdir()
    for record in (fine, untuned, unchecked, stray):
        (place / f"{record.id}.json").write_text(record.to_json())
    listed = {str(r.family): [r.id] for r in (fine, unchecked)}
    listed[str(near.family(untuned.key, untuned.env))] = [untuned.id]
    (place / SEED_FAMILIES).write_text(json.dumps(listed))
    expected = {
        f"{untuned.id}.json was not measured",
        f"{unchecked.id}.json has a plan that was not checked",
        f"{stray.id}.json is not listed by its family",
    }
    assert set(wrong_with(tmp_path)) == expected
    (tmp_path / "nvidia-a100").mkdir()
    (tmp_path / "nvidia-a100" / "other.json").write_text(foreign.with_blob(b"plan").to_json())
    expected |= {
        "other.json is not named by its id",
        "other.json is of another GPU",
        "other.json has serialized plans",
        "other.json is not listed by its family",
    }
    assert set(wrong_with(tmp_path)) == expected
    monkeypatch.setattr("tests.cpu.bench.test_seeds.MOST_BYTES", 100)
    (large,) = set(wrong_with(tmp_path)) - expected
    assert large.endswith("bytes of the wheel, over 100")
