"""Whole models cut into regions and steps, as for a GPU."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.bench import models
from cudnngraph.executor import streams as lanes
from cudnngraph.ir.canonical import canonical, canonical_tensor_names
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.models.convert import import_model
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.partition.cuts import subgraph_of
from cudnngraph.partition.memory import StepMemory
from cudnngraph.partition.regions import regions
from cudnngraph.rewrite.annotate import annotate
from cudnngraph.rewrite.passes import prepared
from cudnngraph.select.decision import ALIAS
from cudnngraph.select.graph_trial import GraphTrial
from cudnngraph.select.heuristic import heuristic
from tests.fakes import builder
from tests.models import NETS

fusing: Any = importlib.import_module("cudnngraph.models.fused")
CPU = torch.device("cpu")
POLICY = cg.Policy(allow_tf32=False)


@pytest.fixture(autouse=True)
def _new_compiler() -> None:
    torch._dynamo.reset()


def imported(name: str) -> tuple[GraphSpec, dict[str, torch.Tensor], torch.Tensor]:
    """A model's graph with its tensors by name, and its result in float64."""
    torch.manual_seed(1)
    model, x = NETS[name]()
    model = models.randomized(model)
    made = import_model(model, (x,), channels_last=True)
    assert made.spec is not None
    tensors = dict(made.constants)
    (given,) = made.inputs
    assert given is not None
    declared = made.spec.tensors[given]
    tensors[given] = torch.empty_strided(x.shape, declared.stride, dtype=x.dtype).copy_(x)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    with torch.no_grad():
        want = model.double()(x.double() if x.is_floating_point() else x)
    return made.spec, tensors, want


@pytest.mark.parametrize("name", NETS)
def test_a_whole_model_in_torch_steps_computes_what_it_should(name: str) -> None:
    """Cut as for a GPU, in one block of memory, by the torch steps that a GPU runs."""
    spec, tensors, want = imported(name)
    names = canonical_tensor_names(spec)
    spec = canonical(spec)
    steps = heuristic(spec, POLICY, builder(lambda part: True)).steps
    chain = GraphTrial(spec, POLICY, CPU)
    for key, tensor in tensors.items():
        chain._inputs[names[key]] = tensor
    launch = chain.launch([(step.spec, None) for step in steps])
    for _ in range(2):
        launch()
    (out,) = chain._outputs.values()
    error = float((out.double() - want).norm() / want.norm())
    assert error < 2e-6
    assert sum(ALIAS in step.decisions for step in steps) < len(steps)


@pytest.mark.parametrize("name", NETS)
def test_regions_hold_every_op_once_in_an_order_that_can_be_run(name: str) -> None:
    spec, _, _ = imported(name)
    graph = CutGraph(prepared(annotate(spec, deterministic=False)))
    groups = regions(graph)
    assert len(groups) > 6
    assert Counter(n.name for group in groups for n in group) == Counter(
        n.name for n in compute_nodes(graph.spec.nodes)
    )
    there = set(graph.spec.inputs) | graph._numbers
    for group in groups:
        made = {name for node in group for name in node.results}
        assert {name for node in group for name in node.operands} <= there | made
        there |= made
        assert sum(map(graph.is_anchor, group)) <= 1


def test_the_regions_of_a_resnet_are_convolutions_with_all_that_follows() -> None:
    spec, _, _ = imported("resnet")
    groups = [
        " ".join(n.op for n in group)
        for group in regions(CutGraph(prepared(annotate(spec, deterministic=False))))
    ]
    assert Counter(groups) == {
        "conv bias relu": 7,
        "conv add bias relu": 3,
        "conv": 2,
        "max_pool": 1,
        "reduction": 1,
        "reshape": 1,
        "matmul add": 1,
    }


def test_the_shorter_branch_of_a_block_runs_beside_the_longer_one_and_is_added_there() -> None:
    spec, _, _ = imported("resnet")
    graph = CutGraph(prepared(annotate(spec, deterministic=False)))
    groups = regions(graph)
    steps = [StepMemory(subgraph_of(graph, group), True, 0) for group in groups]
    branches = [place for place, group in enumerate(groups) if [n.op for n in group] == ["conv"]]
    beside = lanes.overlappable(steps)
    assert len(branches) == 2 and set(branches) <= set(beside)
    for place in branches:
        reader = beside[place] + 1
        assert [n.op for n in groups[reader]] == ["conv", "add", "bias", "relu"]
        assert steps[place].spec.outputs[0] in steps[reader].spec.inputs


@pytest.mark.parametrize(("name", "joined"), [("deeplab", 5), ("unet", 6)])
def test_what_a_model_concatenates_is_written_in_its_place(name: str, joined: int) -> None:
    spec, _, _ = imported(name)
    graph = CutGraph(prepared(annotate(spec, deterministic=False)))
    joins = [node for node in graph.spec.nodes if node.op == "concat"]
    results = {node.results[0] for node in joins}
    assert sum(each.root in results for each in graph.aliases.order) == joined
    assert joins and all(map(graph.is_free, joins))
