"""Models that assign to ``tensor.data``, or swap tensors: averages of weights, norms of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from tests import numerics
from tests.fused import compiled
from tests.training import left_to_torch

pytestmark = pytest.mark.usefixtures("forgotten")

Tensor = torch.Tensor


class Teacher(nn.Module):
    """A second layer is the average of the first one over time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mean = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for new, mean in zip(self.layer.parameters(), self.mean.parameters(), strict=True):
            mean.data = mean.data * 0.75 + new.data * 0.25
        return F.mse_loss(self.layer(x), self.mean(x), reduction="none")


class Renormed(nn.Module):
    """Rows of a weight have at most a norm, as in EEGNet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.5)
        made: Tensor = self.layer(x)
        return made


class Late(nn.Module):
    """A weight is halved when it has been read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.layer(x).tanh())
        self.layer.weight.data = self.layer.weight.data * 0.5
        return made


def _run(
    make: Callable[[nn.Module], Callable[..., Tensor]],
    model: nn.Module,
    dtype: torch.dtype,
    *,
    train: bool,
) -> list[Tensor]:
    """Results, gradients and the state of three calls; the address of what was assigned moves."""
    model = copy.deepcopy(model).to(dtype)
    run, found = make(model), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(3, 4, generator=generator).to(dtype).requires_grad_(train)
        before = {name: each.detach() for name, each in model.named_parameters()}
        with torch.set_grad_enabled(train):
            y = run(x)
        if train:
            model.zero_grad()
            y.square().sum().backward()
            found += [x.grad, *(each.grad for each in model.parameters() if each.requires_grad)]
        moved = [
            n for n, each in model.named_parameters() if each.data_ptr() != before[n].data_ptr()
        ]
        assert moved == {Teacher: ["mean.weight", "mean.bias"]}.get(type(model), ["layer.weight"])
        found += [y, *(each.clone() for each in model.state_dict().values())]
    return [each.detach().double() for each in found]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("kind", [Teacher, Renormed, Late])
def test_torch_compile_assigns_and_leaves_nothing_to_torch(
    kind: type[nn.Module], mode: str | None, train: bool
) -> None:
    def make(model: nn.Module) -> Callable[..., Tensor]:
        if mode is None:
            return compiled(model, check=True)
        made: Callable[..., Tensor] = torch.compile(model, backend="cudnngraph", mode=mode)
        return made

    torch.manual_seed(0)
    model = kind()
    exact = _run(lambda f: f, model, torch.float64, train=train)
    eager = _run(lambda f: f, model, torch.float32, train=train)
    mine = _run(make, model, torch.float32, train=train)
    numerics.no_farther_than_eager(mine, eager, exact, torch.float32)
    left_to_torch()


def test_weights_that_share_memory_by_an_assignment_share_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.a.weight.data = self.b.weight.data
            made: Tensor = self.a(x) + self.b(x)
            return made

    model = Tied().requires_grad_(False)
    compiled(model)(torch.randn(2, 4))
    assert model.a.weight.data_ptr() == model.b.weight.data_ptr()


@pytest.mark.parametrize("kind", [Teacher, Renormed, Late])
def test_fuse_refuses_what_assigns_to_a_weight(kind: type[nn.Module]) -> None:
    """It computed with the weight before: in silence without a check."""
    model = kind().eval()
    name = "mean.weight" if kind is Teacher else "layer.weight"
    with pytest.raises(cg.CannotImport, match=f"{kind.__name__} changes '{name}' in place, which"):
        cg.fuse(model, torch.randn(3, 4), check=False)


def test_fuse_refuses_what_assigns_to_another_tensor_with_the_line() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.data = y.data * 3
            return y

    says = r"Scaled assigns to \.data of a tensor, which a graph does not \(test_assigned_data.py:"
    says += r"\d+ in forward: y\.data = y\.data \* 3\); go on with the new value"
    with pytest.raises(cg.CannotImport, match=says):
        cg.fuse(Scaled().eval(), torch.randn(3, 4), check=False)


class Swapped(nn.Module):
    """Computes with the second of two weights, which is in the place of the first meanwhile."""

    def __init__(self, *, back: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        torch.utils.swap_tensors(self.first.weight, self.second.weight)
        made: Tensor = self.first(x)
        if self.back:
            torch.utils.swap_tensors(self.first.weight, self.second.weight)
        return made


class SwappedLate(nn.Module):
    """Two weights change their places when the first has been read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.first(x)
        torch.utils.swap_tensors(self.first.weight, self.second.weight)
        return made


@pytest.mark.parametrize(
    "make", [lambda: Swapped(back=True), lambda: Swapped(back=False), SwappedLate]
)
def test_fuse_refuses_what_swaps_tensors(make: Callable[[], nn.Module]) -> None:
    """It computed with the tensors as they had been before: in silence without a check."""
    model = make().eval()
    before = copy.deepcopy(model.state_dict())
    says = r"Swapped(Late)? swaps tensors \(torch\.utils\.swap_tensors\), which a graph does not"
    with pytest.raises(cg.CannotImport, match=says):
        cg.fuse(model, torch.randn(3, 4), check=False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
