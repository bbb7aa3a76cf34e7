"""GELU in kernels that write 16-bit numbers: of every such number, and beside sums in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.scalars import NARROW, ROUNDED
from tests import host_kernels, numerics
from tests.generated import PROCESSORS

F32 = torch.float32
SHORT = [torch.float16, torch.bfloat16]


def both_ways(dtype: torch.dtype) -> GraphSpec:
    """GELU of 256 x 256 numbers, and its gradient for a gradient of one."""
    g = cg.Graph("both")
    x = g.input("x", (256, 256), dtype)
    g.output("y", g.gelu(x))
    g.output("dx", g.gelu_backward(g.input("dy", (256, 256), dtype), x))
    return g.spec()


def made(spec: GraphSpec, macro: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the kernel by rule makes, which is told that so much is rounded."""
    source = patterns.source(spec, patterns.by_rule(spec, PROCESSORS))
    assert source.text.startswith(f"#define {macro}\n")
    outputs = [spec.tensors[name].empty("cpu") for name in spec.outputs]
    host_kernels.run(source, [*inputs, *outputs])
    return outputs


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_of_every_number_of_16_bits_it_is_as_near_as_these_are(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).view(256, 256)
    wide = every.double().requires_grad_()
    y = F.gelu(wide)
    (dx,) = torch.autograd.grad(y.sum(), wide)
    results = made(both_ways(dtype), ROUNDED, [every, torch.ones_like(every)])
    narrow, single = torch.finfo(dtype), torch.finfo(F32)
    for out, exact in zip(results, (y.detach(), dx), strict=True):
        theirs = exact.to(dtype)
        assert torch.equal(out.isnan(), theirs.isnan())
        finite = theirs.isfinite()
        assert torch.equal(out[~finite & ~out.isnan()], theirs[~finite & ~out.isnan()])
        off = (out.double() - exact).abs()[finite]
        near = narrow.eps * (exact.abs() + narrow.smallest_normal) + single.eps
        assert bool((off <= near[finite]).all()), (off / near[finite]).max()


@pytest.mark.parametrize("op", ["gelu_backward", "gelu_tanh_backward"])
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_sums_of_its_gradient_are_as_exact_as_float32(dtype: torch.dtype, op: str) -> None:
    g = cg.Graph("summed")
    x, dy = (g.input(name, (2048, 64), dtype) for name in ("x", "dy"))
    dx = getattr(g, op)(dy, x)
    g.output("dx", dx)
    g.output("db", g.cast(g.reduction(dx, 0), F32))
    spec = g.spec()
    gen = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2048, 64, generator=gen).to(dtype) for _ in range(2)]
    exact = reference.run(spec, inputs, torch.float64)
    eager = reference.run(spec, inputs)
    short, sums = made(spec, NARROW, inputs)
    numerics.check(short, exact[0], dtype)
    assert sums.dtype == F32
    numerics.check(sums, exact[1], F32, eager[1], terms=2048)


def test_in_float32_it_is_by_erf() -> None:
    g = cg.Graph("wide")
    x = g.input("x", (256, 64), torch.bfloat16)
    g.output("y", g.cast(g.gelu(x), F32))
    spec = g.spec()
    source = patterns.source(spec, patterns.by_rule(spec, PROCESSORS))
    assert "#define" not in source.text.partition("typedef")[0]
