"""Regions that grow into kernels: in what time, and each by its own graph."""

from __future__ import annotations

import time

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.plan import Choice
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.tape import Cut
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.select.kernels import Kernels
from tests import generated, numerics

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


# -- ops that move from one kernel to the next -----------------------------------------------------


def kernels_of(g: cg.Graph) -> list[tuple[str, ...]]:
    steps = generated.selection(g.spec(), 132).steps
    return [tuple(node.op for node in s.spec.nodes) for s in steps if s.kind == "kernel"]


@pytest.mark.parametrize("wide", [False, True])
def test_ops_behind_a_norm_are_parts_of_the_kernel_that_reads_it_anyway(wide: bool) -> None:
    """Without the move the product with the cosines is one more result of the norm's kernel."""
    first, second = kernels_of(generated.rotated(wide=wide))
    assert "mul" not in first and second.count("mul") == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_moved_ops_compute_the_same(
    wide: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = generated.install(monkeypatch)
    g = generated.rotated(dtype, wide=wide)
    spec = g.spec()
    torch.manual_seed(0)
    forms = {name: spec.tensors[name] for name in spec.inputs}
    given = {n: torch.randn(form.shape).to(form.dtype) for n, form in forms.items()}
    given |= {name: each / 512**0.5 for name, each in given.items() if name[0] == "k"}
    y = g.compile("cpu")(**given)
    assert [step.kind for step in steps].count("kernel") == 2
    exact = reference.run(spec, [given[name] for name in spec.inputs], torch.float64)[0]
    numerics.check(y, exact, dtype)


# -- copies to another order -----------------------------------------------------------------------


def of_keys(turned: bool, *, scaled: bool = False) -> cg.Graph:
    """The gradient of attention's keys in rows of tokens, and its sum, which a bias has."""
    g = cg.Graph("keys")
    shape = (24, 32, 64) if turned else (24, 64, 32)
    x = g.input("x", shape, torch.bfloat16)
    heads = g.reshape(g.transpose(x, 1, 2) if turned else x, (4, 6, 64, 32))
    rows = g.reshape(g.permute(heads, (0, 2, 1, 3)), (256, 192))
    rows = g.mul(rows, 0.125) if scaled else rows
    g.output("rows", rows)
    g.output("bias", g.reduction(g.cast(rows, torch.float32), (0,)))
    return g


@pytest.mark.parametrize(("turned", "count"), [(True, 2), (False, 1)])
def test_a_copy_across_the_rows_of_a_reduction_is_a_kernel_of_its_own(
    turned: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sum it would be written an element at a time. The sum reads what was copied."""
    steps = generated.selection(of_keys(turned).spec(), 132).steps
    kernels = [step for step in steps if step.kind == "kernel"]
    assert len(kernels) == count and {step.kind for step in steps if step.choice} == {"kernel"}
    sums = next(s for s in kernels if any(node.op == "reduction" for node in s.spec.nodes))
    assert turned == ("x" not in sums.spec.inputs)
    generated.install(monkeypatch)
    x = torch.randn(of_keys(turned).spec().tensors["x"].shape).bfloat16()
    made = of_keys(turned).compile("cpu")(x=x)
    exact = reference.run(of_keys(turned).spec(), [x], torch.float64)
    for ours, want, dtype in zip(made, exact, (torch.bfloat16, torch.float32), strict=True):
        numerics.check(ours, want, dtype, terms=256)


def test_what_is_computed_across_the_rows_of_a_reduction_stays_with_it() -> None:
    (kernel,) = kernels_of(of_keys(True, scaled=True))
    assert {"mul", "reduction"} <= set(kernel)


def of_queries() -> cg.Graph:
    """The gradients of normalized queries and of values, which lie along tokens, in rows of tokens
    as they were read, and their sum."""
    g = cg.Graph("queries")
    images, heads, width, tokens = 4, 8, 48, 196
    dq, dv = (g.input(n, (images, heads, width, tokens), torch.bfloat16) for n in ("dq", "dv"))
    stride = (tokens * 2 * heads * width, width, 1, 2 * heads * width)
    q = g.input("q", (images, heads, width, tokens), torch.bfloat16, stride=stride)
    dq, q = g.cast(dq, torch.float32), g.cast(q, torch.float32)
    dq = g.sub(dq, g.mul(q, g.reduction(g.mul(dq, q), (3,), "sum", True)))
    parts = [
        g.reshape(each, (1, images, heads, width, tokens))
        for each in (dq, g.cast(dv, torch.float32))
    ]
    rows = g.permute(g.concat(parts, 0), (1, 4, 0, 2, 3))
    rows = g.reshape(rows, (images * tokens, 2 * heads * width))
    made = g.cast(rows, torch.bfloat16)
    g.output("dx", made)
    g.output("bias", g.reduction(g.cast(made, torch.float32), (0,)))
    return g


def test_a_sum_and_what_is_written_across_its_rows_are_no_kernel_of_several_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = of_queries().spec()
    with pytest.raises(Cut, match="a result across the rows of a sum"):
        patterns.by_rule(spec, 132)
    assert len(kernels_of(of_queries())) == 2
    generated.install(monkeypatch)
    given = {name: spec.tensors[name].empty("cpu").normal_() for name in spec.inputs}
    made = of_queries().compile("cpu")(**given)
    exact = reference.run(spec, [given[name] for name in spec.inputs], torch.float64)
    for ours, want, dtype in zip(made, exact, (torch.bfloat16, torch.float32), strict=True):
        numerics.check(ours, want, dtype, terms=784)
