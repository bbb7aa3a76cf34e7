"""The backend's ``mode="reduce-overhead"``: CUDA graphs of forward and backward train as eager."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.models import dynamo
from cudnngraph.models.replay import Replayed

Step = Callable[[nn.Module, Callable[..., torch.Tensor], int], None]


@pytest.fixture(autouse=True)
def _new_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    yield


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each call of a graph was: a replay, or a run as it is."""
    seen: list[str] = []
    results, run = Replayed._results, Replayed.run

    def replayed(self: Replayed, tensors: Any) -> list[Any]:
        seen[-1] = "replay"
        return results(self, tensors)

    def ran(self: Replayed, tensors: Any) -> list[Any]:
        seen.append("run")
        return run(self, tensors)

    monkeypatch.setattr(Replayed, "_results", replayed)
    monkeypatch.setattr(Replayed, "run", ran)
    return seen


def compiled(model: nn.Module) -> Callable[..., torch.Tensor]:
    def backend(module: Any, given: Any) -> Any:
        return dynamo.backend(module, given, mode="reduce-overhead")

    made: Callable[..., torch.Tensor] = torch.compile(model, backend=backend)
    return made


def net() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 24),
        nn.LayerNorm(24),
        nn.Linear(24, 8),
    )
    return made.cuda()


def data(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator("cuda").manual_seed(number)
    x = torch.randn(4, 8, 12, 12, device="cuda", generator=made)
    return x, torch.randint(8, (4,), device="cuda", generator=made)


def each_step(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    model.zero_grad(set_to_none=True)
    x, y = data(number)
    F.cross_entropy(run(x), y).backward()


def accumulated(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    if number % 3 == 0:
        model.zero_grad(set_to_none=number % 2 == 0)
    x, y = data(number)
    F.cross_entropy(run(x), y).backward()


def two_before_one(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    model.zero_grad(set_to_none=True)
    (x, y), (z, w) = data(2 * number), data(2 * number + 1)
    first, second = run(x), run(z)
    (F.cross_entropy(first, y) + 2 * F.cross_entropy(second, w)).backward()


def left_behind(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    kept = run(data(100 + number)[0])  # whose gradient is never asked for
    before = kept.detach().clone()
    each_step(model, run, number)
    assert torch.equal(kept, before)


@pytest.mark.parametrize("step", [each_step, accumulated, two_before_one, left_behind])
def test_steps_are_eagers(step: Step, replays: list[str]) -> None:
    model = net()
    exact = copy.deepcopy(model).double()
    run = compiled(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.01, 0.9) for each in (model, exact)]
    for number in range(8):
        step(model, run, number)
        step(exact, lambda x: exact(x.double()), number)
        for mine, wanted in zip(model.parameters(), exact.parameters(), strict=True):
            assert mine.grad is not None and wanted.grad is not None
            off = (mine.grad.double() - wanted.grad).norm() / (wanted.grad.norm() + 1e-6)
            assert off < 2e-3, (number, tuple(mine.shape), float(off))
        for optimizer in optimizers:
            optimizer.step()
    for mine, wanted in zip(model.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), wanted.double(), rtol=1e-3, atol=1e-4)
    assert "replay" in replays
    if step is each_step:
        assert replays[-6:] == ["replay"] * 6


def test_dropout_draws_new_numbers_for_every_replay(replays: list[str]) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5)).cuda()
    run = compiled(model)
    x, seen = torch.ones(16, 32, device="cuda"), []
    for _ in range(6):
        model.zero_grad(set_to_none=True)
        y = run(x)
        y.sum().backward()
        weight = model[0].bias.grad
        assert weight is not None
        torch.testing.assert_close(weight, 2.0 * (y != 0).sum(0).float())
        seen.append((y != 0).clone())
    assert replays[-1] == "replay"
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))


def test_results_of_inference_are_the_users_own(replays: list[str]) -> None:
    model = net().eval()
    run = compiled(model)
    with torch.no_grad():
        given = [data(number)[0] for number in range(6)]
        made = [run(x) for x in given]
        for x, y in zip(given, made, strict=True):
            torch.testing.assert_close(y, model(x), rtol=2e-3, atol=2e-3)
    assert replays[-1] == "replay"
