"""Models that differentiate within their forward, as those of forces do, or map by vmap."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cudnngraph as cg
from cudnngraph.errors import CannotImport
from cudnngraph.models import export, trace
from tests import numerics
from tests.models import Of, image


def forces(energy: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The energy, and less its gradient."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            made = energy(m, x).square().sum()  # of one sign, so that nothing cancels
            return made.detach(), -torch.autograd.grad(made, x)[0]

    return forward


def _twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(m.l(x).tanh().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]


MODELS: dict[
    str, tuple[Callable[..., Any], Callable[[], dict[str, nn.Module]], tuple[int, ...]]
] = {
    "layers": (
        forces(lambda m, x: m.two(F.silu(m.one(x)))),
        lambda: {"one": nn.Linear(3, 8), "two": nn.Linear(8, 1)},
        (5, 3),
    ),
    "distances": (
        forces(lambda m, x: torch.exp(-(x[:, None] - x + torch.ones_like(x)).norm(dim=-1))),
        lambda: {},
        (5, 3),
    ),
    "images": (
        forces(lambda m, x: F.max_pool2d(m.norm(m.conv(x)), 2).relu()),
        lambda: {"conv": nn.Conv2d(3, 4, 3), "norm": nn.GroupNorm(2, 4)},
        (2, 3, 8, 8),
    ),
    "attention": (
        forces(lambda m, x: m.a(x, x, x)[0].pow(2)),
        lambda: {"a": nn.MultiheadAttention(8, 2, batch_first=True)},
        (2, 5, 8),
    ),
    "twice": (_twice, lambda: {"l": nn.Linear(8, 8)}, (2, 8)),
    "function": (
        lambda m, x: torch.func.grad(lambda row: m.l(row).pow(2).sum())(x),
        lambda: {"l": nn.Linear(8, 8)},
        (2, 8),
    ),
    "a vector": (
        lambda m, x: torch.func.vjp(m.l, x)[1](x)[0],
        lambda: {"l": nn.Linear(8, 8)},
        (8,),
    ),
    "of each row": (
        lambda m, x: torch.vmap(torch.func.grad(lambda row: m.l(row).tanh().sum()))(x),
        lambda: {"l": nn.Linear(8, 8)},
        (3, 8),
    ),
    "Jacobian": (
        lambda m, x: torch.func.jacrev(lambda row: m.l(row).tanh())(x),
        lambda: {"l": nn.Linear(8, 4)},
        (8,),
    ),
    "Hessian": (
        lambda m, x: torch.func.hessian(lambda row: m.l(row).tanh().sum())(x),
        lambda: {"l": nn.Linear(8, 8)},
        (8,),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_within_a_model_are_traced(name: str) -> None:
    forward, parts, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = Of(forward, **parts()).eval(), image(*shape)
    assert trace.trace(model, (x,), {}) is not None
    fused = cg.fuse(model, x)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    for value in (x, image(*shape) + 1):
        made, own = (torch.utils._pytree.tree_leaves(each(value)) for each in (fused, model))
        exact = torch.utils._pytree.tree_leaves(model.double()(value.double()))
        model.float()
        for mine, theirs, wanted in zip(made, own, exact, strict=True):
            assert mine.dtype == theirs.dtype and not mine.requires_grad
            numerics.check(mine, wanted.detach(), torch.float32, theirs.detach(), terms=64)


def _along(m: Any, x: torch.Tensor) -> torch.Tensor:
    _, along = torch.func.jvp(m.l, (x,), (torch.ones_like(x),))
    assert isinstance(along, torch.Tensor)
    return along


@pytest.mark.parametrize("by", ["fuse", "torch.export"])
def test_forward_mode_is_refused_and_leaves_nothing_behind(by: str) -> None:
    """torch.export left a transform and a level of tangents behind, for all that ran next."""
    model, x = Of(_along, l=nn.Linear(3, 3)).eval(), image(3)
    if by == "fuse":
        with pytest.raises(CannotImport, match=r"forward-mode gradients .* torch.func.vjp"):
            cg.fuse(model, x)
    else:
        with pytest.raises(CannotImport, match="cannot be exported"):
            export.by_torch(model, (x,))
    assert torch.ones(2).requires_grad_().requires_grad
    assert model(x).shape == x.shape


def test_gradients_of_what_records_none_are_refused_with_the_mend() -> None:
    """A model that runs in eager torch unless it is called under no_grad."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(m.l(x).tanh().sum(), x)[0]

    says = r"takes gradients where torch records none, as under torch\.no_grad\(\) "
    says += r"\(test_inner_gradients\.py:\d+ in forward: return torch\.autograd\.grad\(.*\); "
    with pytest.raises(CannotImport, match=says + r"compute .* within torch\.enable_grad\(\)"):
        cg.fuse(Of(forward, l=nn.Linear(3, 3)).eval(), torch.randn(2, 3))


MAPPED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "columns": lambda m, x: torch.vmap(lambda t: t.roll(1) * t.sum(), out_dims=1)(x),
    "two": lambda m, x: torch.vmap(lambda t, k: t * k.max(), in_dims=(0, None))(x, x[0]),
    "whole ops": lambda m, x: torch.vmap(lambda t: F.layer_norm(m.l(t), (4,)).softmax(-1))(x),
    "members": lambda m, x: torch.vmap(lambda w, t: t @ w.t(), in_dims=(0, None))(
        m.l.weight.expand(2, 4, 4), x
    ).mean(0),
    "maps of maps": lambda m, x: torch.vmap(torch.vmap(lambda a: a * 2 + m.l.bias[0]))(x),
}


@pytest.mark.parametrize("name", MAPPED)
def test_what_vmap_maps_is_traced(name: str) -> None:
    torch.manual_seed(0)
    model, x = Of(MAPPED[name], l=nn.Linear(4, 4)).eval(), torch.randn(4, 4)
    wide = copy.deepcopy(model).double()
    assert trace.trace(copy.deepcopy(model), (x,), {}) is not None
    fused = cg.fuse(model, x)
    for y in (x, x.flip(0) * 0.5):
        with torch.no_grad():
            numerics.check(fused(y), wide(y.double()), torch.float32, model(y), terms=4)
