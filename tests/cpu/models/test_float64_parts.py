"""Models in float32 or 16 bits that compute in float64 here and there keep its precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg


class Part(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cancels": lambda x: (x.double() * 1e-3 + 1e5 - 1e5).float(),
    "number": lambda x: x.double() * (1 / 3),
    "float_power": lambda x: x.float_power(2),
    "sum": lambda x: x.sum(dtype=torch.float64),
    "softmax": lambda x: x.softmax(-1, dtype=torch.float64),
    "product": lambda x: x.double() @ x.double().T,
    "var": lambda x: x.double().var(1),
    "gelu": lambda x: F.gelu(x.double()) / 3,
    "beside_float32": lambda x: (x * (1 / 3)).relu() + (x.double() / 3).relu(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", ["fuse", "torch.compile"])
def test_what_is_cast_to_float64_is_computed_in_it(name: str, kind: str) -> None:
    torch._dynamo.reset()
    x, function = torch.randn(4, 8), FUNCTIONS[name]
    model = Part(function).eval()
    run = cg.fuse(model, x) if kind == "fuse" else torch.compile(model, backend="cudnngraph")
    made, wanted = run(x), function(x)
    assert made.dtype == wanted.dtype
    # Computed in float32 each would be off by 1e-9 of its largest number and more.
    bound = 1e-13 if wanted.dtype == torch.float64 and name != "beside_float32" else 1e-7
    assert (made - wanted).abs().max() <= bound * wanted.abs().max()


def test_gradients_through_float64_keep_it() -> None:
    g = cg.Graph("wide")
    x = g.input("x", (4, 8), torch.float32)
    y = g.cast(x, torch.float64) * (1 / 3) + 1e5 - 1e5
    g.output("y", g.cast(y * y, torch.float32))
    given = torch.randn(4, 8, requires_grad=True)
    mine = g.compile("cpu", training=True)(x=given)
    wanted = ((given.double() / 3 + 1e5 - 1e5) ** 2).float()
    for a, b in (
        (mine, wanted),
        (torch.autograd.grad(each.sum(), given)[0] for each in (mine, wanted)),
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
