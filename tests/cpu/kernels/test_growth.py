"""Regions that grow into kernels: in what time, and each by its own graph."""

from __future__ import annotations

import time

import torch

import cudnngraph as cg
from cudnngraph.backend.plan import Choice
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.select.kernels import Kernels
from tests import generated

SLOW_S = 10.0  # several times what it takes beside other tests


def norms(count: int) -> GraphSpec:
    """Norms with a gate and a residual: each reads what the one before makes in three ways."""
    g = cg.Graph("norms")
    x, weight = g.input("x", (64, 256), torch.float16), g.input("w", (256,), torch.float16)
    for _ in range(count):
        x = g.add(x, g.silu(g.rms_norm(x, weight)))
    g.output("y", x)
    return g.spec()


def test_what_many_paths_lead_to_is_looked_at_once() -> None:
    """As many paths as 2 to the number of norms."""
    start = time.perf_counter()
    patterns.by_rule(norms(21), 132)
    assert time.perf_counter() - start < SLOW_S


def test_500_ops_grow_into_kernels_in_no_time() -> None:
    start = time.perf_counter()
    steps = generated.selection(norms(166), 132).steps
    assert {step.kind for step in steps} == {"kernel"} and len(steps) < 20
    assert time.perf_counter() - start < SLOW_S


def test_a_view_that_a_product_reads_too_is_written_before_it() -> None:
    """What reads the view and the product is no part of the kernel that the product waits for."""
    g = cg.Graph("around")
    x, bias = g.input("x", (64, 64), torch.float16), g.input("b", (64,), torch.float16)
    turned = g.transpose(g.relu(g.add(x, bias)), 0, 1)
    product = g.matmul(turned, g.input("w", (64, 64), torch.float16))
    g.output("y", g.add(g.silu(turned), product))
    made: set[str] = set()
    steps = generated.selection(g.spec(), 132).steps
    for step in steps:
        own = {name for node in step.spec.nodes for name in node.results}
        assert not {name for name in step.spec.inputs if name not in ("x", "b", "w")} - made
        made |= own
    assert [step.kind for step in steps].count("kernel") == 2


def test_nodes_of_one_name_in_two_graphs_are_two_regions() -> None:
    kernels = Kernels(132)
    for dtype, kind in ((torch.float16, Choice), (torch.float64, str)):
        g = cg.Graph("softmax")
        g.output("y", g.softmax(g.input("x", (8, 32), dtype), 1))
        graph = CutGraph(g.spec())
        assert isinstance(kernels.choice(graph, compute_nodes(graph.spec.nodes)), kind)


# -- by measurement --------------------------------------------------------------------------------


def test_a_region_of_too_many_ops_has_no_kernel() -> None:
    kernels = Kernels(132)
    assert kernels.choices(norms(21)) and not kernels.choices(norms(22))
