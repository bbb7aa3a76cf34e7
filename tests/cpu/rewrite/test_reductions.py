"""Reductions return float32; what a product reads of them has the product's dtype."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.rewrite.reductions import float32_reductions
from tests import numerics

F16, F32 = torch.float16, torch.float32


def squeezed(*, flat: bool, output: bool = False) -> GraphSpec:
    """The mean of an image's channels, multiplied by a matrix."""
    g = cg.Graph("squeezed")
    x = g.input("x", (2, 8, 4, 4), F16)
    if flat:
        mean = g.reshape(g.reduction(x, (2, 3), "mean", keepdim=True), (2, 8))
        g.output("y", g.matmul(mean, g.input("w", (8, 6), F16)))
    else:
        mean = g.reduction(x, (2, 3), "mean", keepdim=True)
        g.output("y", g.conv(mean, g.input("w", (6, 8, 1, 1), F16)))
    if output:
        g.output("mean", mean, dtype=F32)
    return g.spec()


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_a_product_reads_a_mean_in_its_own_dtype(flat: bool, output: bool) -> None:
    spec = squeezed(flat=flat, output=output)
    seen = float32_reductions(spec)
    (product,) = (node for node in seen.nodes if node.op in ("conv", "matmul"))
    assert [seen.tensors[name].dtype for name in product.operands] == [F16, F16]
    (mean,) = (node for node in seen.nodes if node.op == "reduction")
    assert seen.tensors[mean.results[0]].dtype == F32
    assert seen.outputs == spec.outputs
    made = {*seen.inputs, *(name for node in seen.nodes for name in node.results)}
    assert set(seen.tensors) == made  # none that nothing makes
    assert [seen.tensors[n].dtype for n in seen.outputs] == [F16, F32][: len(seen.outputs)]
    given = [torch.randn(2, 8, 4, 4).to(F16), torch.randn(spec.tensors["w"].shape).to(F16)]
    for made, wanted in zip(
        reference.run(seen, given, torch.float64),
        reference.run(spec, given, torch.float64),
        strict=True,
    ):
        assert torch.allclose(made, wanted, rtol=1e-3, atol=1e-3)


def test_a_product_in_float32_reads_what_there_is() -> None:
    g = cg.Graph("wide")
    x = g.input("x", (2, 8, 4, 4), F32)
    g.output("y", g.matmul(g.reduction(x, (2, 3), "mean"), g.input("w", (8, 6), F32)))
    spec = g.spec()
    assert float32_reductions(spec) == spec


def test_a_graph_of_17_means_has_a_name_of_its_own_for_each_in_16_bits() -> None:
    """The 17th reduction is called as the first one in 16 bits would be."""
    g = cg.Graph("gated")
    y = g.input("x", (2, 8, 4, 4), F16)
    w = g.input("w", (8, 8, 1, 1), F16)
    for _ in range(18):
        y = g.mul(g.sigmoid(g.conv(g.reduction(y, (2, 3), "mean", keepdim=True), w)), y)
    g.output("y", y)
    spec = g.spec()
    assert {"reduction", "reduction_16"} <= set(spec.tensors)
    seen = float32_reductions(spec)
    made = [name for node in seen.nodes for name in node.results]
    assert len(made) == len(set(made))
    given = [torch.randn(spec.tensors[name].shape).to(F16) for name in spec.inputs]
    (found,), (wanted,) = (reference.run(each, given, torch.float64) for each in (seen, spec))
    assert numerics.relative_error(found, wanted) <= numerics.bound(F16)
