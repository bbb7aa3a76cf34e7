"""What training loops do around a compiled model, and within one: as torch does it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import numerics
from tests.fused import compiled
from tests.models import image
from tests.training import alike, left_to_torch


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_of_an_optimizer_writes_parameters(foreach: bool) -> None:
    """They require a gradient, and are leaves."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    own = copy.deepcopy(model)
    data = image(5, 4)
    for each, make in ((model, compiled), (own, lambda step: step)):
        options = {"momentum": 0.9, "foreach": foreach}
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, **options)
        step = make(lambda optimizer=optimizer: optimizer.step())
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(each(data), data[:, :2]).backward()
            step()
        if make is compiled:
            assert all(name.startswith("aten._foreach_") for name in left_to_torch())
    for mine, torchs in zip(model.parameters(), own.parameters(), strict=True):
        assert mine.requires_grad and mine.is_leaf
        numerics.check(mine.detach(), torchs.detach().double(), torch.float32, terms=64)


def test_a_check_of_a_matrix_raises_its_error_and_nothing_is_written() -> None:
    """torch.linalg checks what a factorization says of itself: a call that gives nothing."""

    class Whitened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.seen = nn.Buffer(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1.0)
            factor = torch.linalg.cholesky(self.scale * (x.mT @ x))
            return x @ torch.linalg.inv(factor)

    model = Whitened()
    run = compiled(model)
    data = image(6, 3)
    found = run(data)
    found.square().sum().backward()
    own = Whitened()
    wanted = own(data)
    wanted.square().sum().backward()
    assert "aten.linalg_cholesky_ex.default" in left_to_torch()
    numerics.check(found.detach(), wanted.detach().double(), torch.float32, terms=2048)
    numerics.check(model.scale.grad, own.scale.grad.double(), torch.float32, terms=2048)
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        run(torch.zeros(6, 3))
    assert float(model.seen) == 1.0


def test_an_op_without_a_kernel_for_tensors_without_memory_is_a_step_of_torch() -> None:
    """Quantization in training has none; torch.compile runs its own on zeros."""

    def quantized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, torch.fake_quantize_per_tensor_affine(weight, 0.05, 0, -128, 127))

    left = alike(quantized, image(5, 4), image(3, 4))
    assert "aten.fake_quantize_per_tensor_affine_cachemask.default" in left


def test_nan_is_under_no_threshold() -> None:
    x = torch.tensor([-1.0, math.nan, 0.5, 2.0], requires_grad=True)
    y = compiled(lambda x: F.threshold(x, 0.5, 7.0))(x)
    (dx,) = torch.autograd.grad(y, x, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert [each for each in y.tolist() if each == each] == [7.0, 7.0, 2.0] and y[1].isnan()
    assert dx.tolist() == [0.0, 2.0, 0.0, 4.0]
    assert left_to_torch() == []


@pytest.mark.parametrize("act", [F.elu, F.selu])
def test_the_slope_at_nan_is_that_above(act: Any) -> None:
    x = torch.tensor([-1.0, math.nan, 2.0], requires_grad=True)
    (dx,) = torch.autograd.grad(compiled(act)(x), x, torch.ones(3))
    (wanted,) = torch.autograd.grad(act(x), x, torch.ones(3))
    assert left_to_torch() == [] and not wanted.isnan().any()
    numerics.check(dx, wanted.double(), torch.float32)


def test_statistics_that_an_instance_norm_keeps_are_written() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.variance = nn.Buffer(torch.zeros(3)), nn.Buffer(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.instance_norm(x, self.mean, self.variance, use_input_stats=True)

    model, own, data = Kept(), Kept(), image(2, 3, 4, 4)
    numerics.check(compiled(model)(data), own(data).double(), torch.float32, terms=64)
    torch.testing.assert_close(model.mean, own.mean)
    torch.testing.assert_close(model.variance, own.variance)
    assert own.mean.abs().max() > 0


class Penalised(nn.Module):
    """A critic's gradient by each image has norm one, as in WGAN-GP."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 8, 3, 2, 1)]
        self.net = nn.Sequential(*layers, nn.SiLU(), nn.Flatten(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda image: self.net(image).sum())(x)
        return self.net(x).mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()


class Curved(nn.Module):
    """The residual of a differential equation of second order, at each point."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.last, self.factor = nn.Linear(8, 1), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda point: self.last(self.net(point)).sum())
        first, second = torch.vmap(slope)(x), torch.vmap(torch.func.jacrev(slope))(x)
        return (first[:, 1] - self.factor * second[:, 0, 0]).square().mean()


@pytest.mark.parametrize("kind, size", [(Penalised, (4, 3, 8, 8)), (Curved, (6, 2))])
def test_a_loss_of_gradients_by_torch_func_is_trained(
    kind: type[nn.Module], size: tuple[int, ...]
) -> None:
    """Gradients of a gradient, and of one of second order, over several steps."""

    def steps(model: nn.Module, run: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            loss = run(torch.randn(size, generator=generator).to(dtype))
            loss.backward()
            given = [p.grad for p in model.parameters() if p.grad is not None]
            found += [each.double() for each in (loss.detach(), *given)]
            optimizer.step()
        return found

    torch.manual_seed(0)
    model = kind()
    own, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    found = steps(model, compiled(model), torch.float32)
    assert left_to_torch() == []
    wanted = steps(wide, wide, torch.float64)
    numerics.no_farther_than_eager(found, steps(own, own, torch.float32), wanted, torch.float32)
    assert all(
        bool(mine.any()) == bool(exact.any()) for mine, exact in zip(found, wanted, strict=True)
    )


def test_a_gradient_of_a_compiled_model_has_no_gradient() -> None:
    """torch.compile refuses it, by whichever backend; the documentation names the text."""
    run, x = compiled(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), image(2, 3).requires_grad_()
    (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        slope.square().sum().backward()
