"""Inputs that a forward writes: the backward computes with the values that they had before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from tests import numerics
from tests.fused import compiled

Tensor = torch.Tensor


class Counted(nn.Module):
    """Divides by how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.state = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.state.add_(1)
        out: Tensor = self.linear(x) / self.state
        return out


class Centred(nn.Module):
    """Takes away a running mean of its inputs, the present one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.state = nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.state.lerp_(x.detach().mean(0), 0.25)
        out: Tensor = self.linear(x - self.state)
        return out


class Decayed(nn.Module):
    """Makes a parameter smaller when it has been read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.state = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x * (self.state + 1).sin())
        with torch.no_grad():
            self.state.mul_(0.5)
        return out


class Queued(nn.Module):
    """Compares with what it has kept, a view of it, and keeps what is new."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.state = nn.Buffer(torch.arange(6.0).reshape(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        out: Tensor = made @ self.state.clone().t()
        self.state.copy_(made.detach()[:2])
        return out


Function = Callable[..., Tensor]
Result = list[Tensor]


def _trained(make: Callable[[nn.Module], Function], model: nn.Module, dtype: torch.dtype) -> Result:
    model = copy.deepcopy(model).to(dtype)
    run, found = make(model), Result()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        model.zero_grad()
        y = run(torch.randn(4, 3, generator=generator, dtype=torch.float32).to(dtype))
        y.square().sum().backward()
        found.append(y.detach())
        found += [each.grad for each in model.parameters() if each.grad is not None]
        found.append(model.state_dict()["state"].clone())
    return [each.to(torch.float64) for each in found]


@pytest.mark.parametrize("budget", [None, 0.0])
@pytest.mark.parametrize("make", [Counted, Centred, Decayed, Queued])
def test_gradients_are_those_of_the_values_before(
    make: type[nn.Module], budget: float | None
) -> None:
    torch.manual_seed(0)
    model = make()
    exact = _trained(lambda f: f, model, torch.float64)
    eager = _trained(lambda f: f, model, torch.float32)
    within = partial(compiled, activation_memory_budget=budget)
    mine = _trained(within, model, torch.float32)
    numerics.no_farther_than_eager(mine, eager, exact, torch.float32)


def test_an_argument_with_a_gradient_may_be_written() -> None:
    """torch writes it when the graph has run, and refused a backward that would read it."""

    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        y = x.add(1.0).sin() @ weight
        x.mul_(3.0)
        return y

    def trained(run: Callable[..., Tensor], dtype: torch.dtype) -> Result:
        source = torch.linspace(-1, 1, 6, dtype=dtype).reshape(2, 3).requires_grad_()
        weight = torch.linspace(-1, 2, 9, dtype=dtype).reshape(3, 3).requires_grad_()
        x = source * 1.0
        y = run(x, weight)
        (y.square().sum() + x.sum()).backward()
        assert source.grad is not None and weight.grad is not None
        return [each.double() for each in (y.detach(), x.detach(), source.grad, weight.grad)]

    exact, eager = trained(scaled, torch.float64), trained(scaled, torch.float32)
    mine = trained(compiled(scaled), torch.float32)
    numerics.no_farther_than_eager(mine, eager, exact, torch.float32)
