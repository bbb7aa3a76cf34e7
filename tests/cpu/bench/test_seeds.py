"""The list of graphs whose plans ship as seeds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from cudnngraph.bench import seeds
from cudnngraph.cache import near
from cudnngraph.cache.codec import env_components
from cudnngraph.cli.explain import load
from cudnngraph.graph.builder import Graph
from cudnngraph.ir.key import graph_key
from cudnngraph.policy import Policy
from tests.fakes import H200

POLICY = Policy(allow_tf32=False, kernels=True)


def test_every_graph_is_there_once_in_each_batch_and_dtype() -> None:
    keys = [graph_key(graph.spec(), POLICY) for graph in seeds.graphs()]
    layers = (seeds.CONVOLUTIONS, seeds.LINEAR, seeds.ATTENTION, seeds.NORMS)
    assert len(set(keys)) == len(keys) == sum(map(len, layers)) * 6
    place = env_components(H200)
    families = Counter(near.family(key.components, place) for key in keys)
    assert None not in families
    assert all(count % len(seeds.BATCHES) == 0 for count in families.values())
    for at in range(0, len(keys), len(seeds.BATCHES)):
        alike = keys[at : at + len(seeds.BATCHES)]
        assert len({near.family(key.components, place) for key in alike}) == 1


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
