"""Softmax and losses over rows that registers do not hold as numbers: long ones, at any place.

Rows with NaN and infinities come out as torch's.
"""

from __future__ import annotations

import math

import pytest
import torch

import cudnngraph as cg
from cudnngraph.device.rules import changed
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from tests import host_kernels

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
PROCESSORS = 4
ROWS = 5
#: Rows that are whole vectors, and such that start at any element.
EXTENTS = (50257, 40000, 36001, 66000, 70007)
OFF = (
    {"kernel_rows_online": False},
    {"kernel_rows_in_memory_form": False},
    {"kernel_rows_aligned": False},
)


def scores(extent: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of random numbers: plain ones, of -inf but for some, of -inf alone, with inf or NaN."""
    gen = torch.Generator().manual_seed(seed)
    x = 6.0 * torch.randn(ROWS, extent, generator=gen)
    at = torch.randint(extent, (3,), generator=gen)
    x[1] = -math.inf
    x[1, at] = torch.tensor([1.0, 2.0, -300.0])
    x[2] = -math.inf
    x[3, at[0]] = math.inf
    x[4, at[1]] = math.nan
    return x.to(dtype)


def graph(op: str, extent: int, dtype: torch.dtype) -> GraphSpec:
    g = cg.Graph(op)
    x = g.input("x", (ROWS, extent), dtype)
    if op == "cross_entropy":
        g.output("y", g.cross_entropy(x, g.input("t", (ROWS,), torch.int64), "none"))
    elif op == "scaled":
        g.output("y", g.softmax(g.add(g.mul(x, 0.5), g.input("b", (extent,), F32)), 1), dtype=F32)
    else:
        g.output("y", getattr(g, op)(x, 1))
    return g.spec()


def made(spec: GraphSpec, choice: object, inputs: list[torch.Tensor]) -> torch.Tensor:
    (name,) = spec.outputs
    source = host_kernels.expect(patterns.source(spec, choice, 16 * PROCESSORS))  # type: ignore[arg-type]
    found = []
    for backwards in (False, True):
        out = spec.tensors[name].empty("cpu").fill_(7.0)
        host_kernels.run(source, [*inputs, out], backwards=backwards)
        found.append(out)
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    return found[0]


@pytest.mark.parametrize("dtype", (F16, BF16, F32), ids=str)
@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("op", ("softmax", "log_softmax", "cross_entropy", "scaled"))
def test_long_rows_are_as_in_float64(op: str, extent: int, dtype: torch.dtype) -> None:
    spec = graph(op, extent, dtype)
    inputs = [scores(extent, dtype, extent)]
    if op == "cross_entropy":
        inputs.append(torch.tensor([0, 5, extent - 1, -100, 7]))
    elif op == "scaled":
        inputs.append(torch.randn(extent))
    (wanted,) = reference.run(spec, [x.double() if x.is_floating_point() else x for x in inputs])
    for values in ({}, *OFF):
        with changed(**values):
            choice = patterns.by_rule(spec, PROCESSORS)
            out = made(spec, choice, inputs)
        print(op, extent, dtype, values, choice, (out.double() - wanted).nan_to_num().abs().max())
        assert torch.equal(out.isnan(), wanted.isnan()), values
        assert torch.equal(out.isinf(), wanted.isinf()), values
