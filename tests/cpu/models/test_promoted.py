"""Torch's own ops, and products, behind 16-bit numbers that a vector in float32 makes float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests import generated, numerics, simulated
from tests.fused import compiled
from tests.training import left_to_torch, trained

ROWS, WIDTH = torch.tensor([1, 0, 3, 2]), 6
Function = Callable[[torch.Tensor], torch.Tensor]


def _base(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, -0.5)


OPS: dict[str, Function] = {
    "scatter_reduce": lambda x: _base(x).scatter_reduce(0, ROWS[:, None].expand(x.shape), x, "sum"),
    "scatter_add": lambda x: _base(x).scatter_add(0, ROWS[:, None].expand(x.shape), x),
    "of a view": lambda x: _base(x.view(8, 3)).index_add(0, torch.arange(8), (x + x).view(8, 3)),
    "index_put": lambda x: _base(x).index_put((ROWS,), x),
    "masked_scatter": lambda x: _base(x).masked_scatter(x > 0, x),
    "cdist": lambda x: torch.cdist(x, _base(x)),
    "solve": lambda x: torch.linalg.solve(torch.eye(4, dtype=x.dtype) + 1, x),
    "grid_sample": lambda x: F.grid_sample(
        _base(x).cumsum(0)[None, None], x.view(1, 2, 6, 2), align_corners=False
    ),
    "cumsum": lambda x: x.cumsum(0),
    "gather": lambda x: x.gather(0, ROWS[:, None].expand(x.shape)),
}


@pytest.mark.parametrize("name", OPS)
def test_they_take_it_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch has it: in 16 bits it would not fit their other operands."""
    simulated.install(monkeypatch, None)
    x, weight = torch.randn(len(ROWS), WIDTH).bfloat16(), torch.rand(WIDTH) + 0.5

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return OPS[name](F.leaky_relu(x * weight))

    found = trained(compiled(function, check=False), x, weight)
    assert left_to_torch()
    own, exact = trained(function, x, weight), trained(function, x.double(), weight.double())
    for mine, torchs, want in zip(found, own, exact, strict=True):
        assert mine.dtype == torchs.dtype
        numerics.check(mine, want, mine.dtype, torchs, terms=64)


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "first": F.linear,
    "computed": lambda x, w: F.gelu(x + 1) @ w.mT,
    "second": lambda x, w: w[:, :4] @ x,
    "viewed": lambda x, w: x.view(8, 3) @ w[:3],
    "convolved": lambda x, w: F.conv1d(x.view(1, 4, 6), w.view(3, 4, 3)),
    "attended": lambda x, w: F.scaled_dot_product_attention(
        x[None, None], *w.expand(2, 1, 1, 6, 6)
    ),
    "values": lambda x, w: F.scaled_dot_product_attention(
        *x.expand(2, 1, 1, 4, 6), w[None, None, :4]
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_read_it_in_float32(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded to 16 bits, what they multiply would be off by a part in a thousand."""
    generated.install(monkeypatch)
    x, weight = torch.randn(len(ROWS), WIDTH).to(dtype), torch.rand(WIDTH) + 0.5
    other = torch.randn(6, WIDTH)

    def function(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return PRODUCTS[name](x * weight, other)

    with torch.no_grad():  # in training it is a result of the forward, and is kept as it is
        y = compiled(function, check=False)(x, weight, other)
    assert y.dtype == torch.float32
    exact = function(x.double(), weight.double(), other.double())
    numerics.check(y, exact, torch.float32, function(x, weight, other), terms=64)
