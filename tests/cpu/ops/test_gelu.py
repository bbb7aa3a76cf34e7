"""The formula in place of erf behind a matmul: as exact as 16 bits can tell."""

from __future__ import annotations

import math
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.lowering.driver import RULES

NUMBERS: Any = SimpleNamespace(  # the frontend's ops, on tensors of torch
    mul=operator.mul,
    add=operator.add,
    tanh=torch.tanh,
    gelu=lambda x, name: torch.nn.functional.gelu(x),
)


def lowered(x: torch.Tensor, dtype: torch.dtype = torch.float16, product: bool = True) -> Any:
    """Compute gelu(x @ w), or gelu(x), as it is lowered, in x's dtype."""
    g = cg.Graph("gelu")
    y = g.input("x", (4, 8), torch.float16)
    y = g.matmul(y, g.input("w", (8, 8), torch.float16)) if product else y
    g.output("y", g.gelu(y), dtype=dtype)
    spec = g.spec()
    node = spec.nodes[-1]
    context: Any = SimpleNamespace(
        graph=NUMBERS,
        spec=spec,
        operands=lambda node: [x],
        temporary=lambda value, like: value,
        scalar=float,
    )
    return RULES["gelu"](context, node)


def exact(x: torch.Tensor) -> torch.Tensor:
    """x Phi(x), without the cancellation of 1 + erf."""
    return x * torch.special.erfc(-x / math.sqrt(2)) / 2


def test_every_float16_is_rounded_as_gelu_or_next_to_it() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.float16)
    x = x[x.isfinite()].double()
    made, want = lowered(x), exact(x)
    place = want.abs().clamp_min(2.0**-14).log2().floor() - 10  # of a float16's last bit
    off = (made.half().double() - want).abs() / torch.pow(2.0, place)
    assert float(off.max()) < 0.61
    assert float((off <= 0.5).double().mean()) > 0.98
    assert float((made - want).abs().max()) < 1.1e-5
    single = (lowered(x.float()) - want).abs()
    assert float((single - 1e-6 * x.abs()).max()) < 1.1e-5
    theirs = (torch.nn.functional.gelu(x, approximate="tanh") - want).abs()
    assert float(theirs.max()) > 4e-4  # the approximation that has the name is far off


def test_what_is_large_stays_so_or_becomes_nothing() -> None:
    x = torch.tensor([-3e38, -65504.0, -100.0, -12.0, 0.0, 12.0, 100.0, 65504.0, 3e38])
    assert torch.equal(lowered(x), x.clamp_min(0.0))
    strange = torch.tensor([math.inf, -math.inf, math.nan])
    theirs = torch.nn.functional.gelu(strange.double()).float()  # in float32 on a CPU: all NaN
    torch.testing.assert_close(lowered(strange), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "product"), [(torch.float32, True), (torch.float16, False), (torch.float32, False)]
)
def test_float32_results_and_what_is_no_product_have_erf(dtype: torch.dtype, product: bool) -> None:
    x = torch.linspace(-6, 6, 1001)
    assert torch.equal(lowered(x, dtype, product), torch.nn.functional.gelu(x))
    assert not torch.equal(lowered(x), torch.nn.functional.gelu(x))
