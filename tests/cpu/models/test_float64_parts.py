"""Models in float32 or 16 bits that compute in float64 here and there keep its precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.models.convert import import_model
from cudnngraph.select.rules import NO_FLOAT64, why_not_cudnn
from tests import numerics


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


NARROW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: x - x.float() * 0.3,
    "whole_numbers": lambda x: x - torch.floor(x / 0.25).int() * 0.3,
    "rms_norm": lambda x: (
        x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    ).to(x.dtype),
    "softmax": lambda x: torch.softmax(x @ x.T, -1, dtype=torch.float32).to(x.dtype) @ x,
    "sum": lambda x: x + (x.mean(1, dtype=torch.float32) * 0.3).sum(),
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("kind", ["fuse", "torch.compile"])
def test_what_a_float64_model_has_in_float32_is_rounded_to_it(name: str, kind: str) -> None:
    torch._dynamo.reset()
    x, function = torch.randn(4, 8, dtype=torch.float64), NARROW[name]
    model = Part(function).eval()
    run = cg.fuse(model, x) if kind == "fuse" else torch.compile(model, backend="cudnngraph")
    made, wanted = run(x), function(x)
    assert made.dtype == wanted.dtype
    # One rounding to float32 more or less would be off by 1e-8 of the largest number.
    assert (made - wanted).abs().max() <= 1e-13 * wanted.abs().max()


OTHERWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x.float(), (8,)).type_as(x) + x,
    "group_norm": lambda x: F.group_norm(x.float()[..., None], 2)[..., 0].type_as(x) * x,
    "attention": lambda x: F.scaled_dot_product_attention(*(x.float()[None, None],) * 3).double(),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_a_float64_model_computes_in_float32_may_be_rounded_otherwise(name: str) -> None:
    x, function = torch.randn(4, 8, dtype=torch.float64), OTHERWISE[name]
    made, wanted = cg.fuse(Part(function).eval(), x)(x), function(x)
    assert made.dtype == wanted.dtype
    assert (made - wanted).norm() <= numerics.BOUNDS["float32"] * wanted.norm()


def test_a_float64_input_leaves_the_rest_of_the_model_in_float32() -> None:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return F.silu(self.conv(x) * t.float()[:, None, None, None])

    arguments = (torch.randn(2, 3, 8, 8), torch.rand(2, dtype=torch.float64))
    spec = import_model(Timed().eval(), arguments, {}).spec
    assert spec is not None and why_not_cudnn(spec) is None
    wide = [name for name, form in spec.tensors.items() if form.dtype == torch.float64]
    assert wide == [spec.inputs[1]]


def test_a_float64_model_with_numbers_of_float32_is_not_shown_to_cudnn() -> None:
    model = Part(lambda x: x.relu() * 0.3 + 1.5).eval()
    spec = import_model(model, (torch.randn(4, 8, dtype=torch.float64),), {}).spec
    assert spec is not None and why_not_cudnn(spec) == NO_FLOAT64
