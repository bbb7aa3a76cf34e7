"""Loops that train, for ``mode="reduce-overhead"`` of the backend, and what their calls were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.models import dynamo
from cudnngraph.models.replay import Replayed, ReplayedBackward

Step = Callable[[nn.Module, Callable[..., torch.Tensor], int], None]


def compiled(model: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def backend(module: Any, given: Any) -> Any:
        return dynamo.backend(module, given, mode="reduce-overhead")

    made: Callable[..., torch.Tensor] = torch.compile(model, backend=backend)
    return made


def net(device: str) -> nn.Module:
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
    return made.to(device)


def data(model: nn.Module, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    device = next(model.parameters()).device
    made = torch.Generator(device).manual_seed(number)
    x = torch.randn(4, 8, 12, 12, device=device, generator=made)
    return x, torch.randint(8, (4,), device=device, generator=made)


def each_step(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    model.zero_grad(set_to_none=True)
    x, y = data(model, number)
    F.cross_entropy(run(x), y).backward()


def before_backward(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    x, y = data(model, number)
    loss = F.cross_entropy(run(x), y)
    model.zero_grad(set_to_none=True)
    loss.backward()


def accumulated(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    if number % 3 == 0:
        model.zero_grad(set_to_none=number % 2 == 0)
    x, y = data(model, number)
    F.cross_entropy(run(x), y).backward()


def two_parts(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    """Gradients of two batches, the second added to where the first's lie."""
    model.zero_grad(set_to_none=True)
    for more in range(2):
        x, y = data(model, 2 * number + more)
        F.cross_entropy(run(x), y).backward()


def later_before_backward(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    """Lets go of gradients early for some steps, and late from then on."""
    (each_step if number < 5 else before_backward)(model, run, number)


def two_before_one(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    model.zero_grad(set_to_none=True)
    (x, y), (z, w) = data(model, 2 * number), data(model, 2 * number + 1)
    first, second = run(x), run(z)
    (F.cross_entropy(first, y) + 2 * F.cross_entropy(second, w)).backward()


def left_behind(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    kept = run(data(model, 100 + number)[0])  # whose gradient is never asked for
    before = kept.detach().clone()
    each_step(model, run, number)
    assert torch.equal(kept, before)


def forward_alone(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    """Runs forwards before the first backward, and between two."""
    if number in (0, 5):
        for more in range(4):
            run(data(model, 200 + more)[0])
    each_step(model, run, number)


def backward_again(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    """Goes backward twice in some steps: what was saved has to be there still."""
    model.zero_grad(set_to_none=True)
    x, y = data(model, number)
    loss = F.cross_entropy(run(x), y)
    if number % 5 == 4:
        loss.backward(retain_graph=True)
    loss.backward()


def two_sizes(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    model.zero_grad(set_to_none=True)
    x, y = data(model, number)
    several = 2 + 2 * (number % 2)
    F.cross_entropy(run(x[:several]), y[:several]).backward()


class Placed:
    """A compiled model whose images, and gradients of results, lie where none lay before.

    Else it were chance, memory being reused, how often an input is found elsewhere and a graph is
    captured anew. Those that are ``still`` lie at one place.
    """

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        self.run = run
        self.still: set[str] = set()
        self._held: list[torch.Tensor] = []
        self._places: dict[str, torch.Tensor] = {}

    def _at(self, name: str, given: torch.Tensor) -> torch.Tensor:
        if name in self.still:
            return self._places.setdefault(name, given.clone()).copy_(given)
        self._held.append(given.clone())
        return self._held[-1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = self.run(self._at("image", x))
        made.register_hook(lambda gradient: self._at("gradient", gradient))
        return made


def elsewhere_later(model: nn.Module, run: Callable[..., torch.Tensor], number: int) -> None:
    """Has images at one place for five steps, and gradients of results for seven."""
    if isinstance(run, Placed):
        until = {"image": 5, "gradient": 7}
        run.still = {name for name, first in until.items() if number < first}
    each_step(model, run, number)


LOOPS: tuple[Step, ...] = (
    *(each_step, before_backward, accumulated, two_parts, later_before_backward),
    *(two_before_one, left_behind, forward_alone, backward_again, two_sizes),
    elsewhere_later,
)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What each call of a graph was: of a forward or a backward, and a replay, behind a capture or
    not, or a run as it is."""
    seen: list[tuple[str, str]] = []
    capture, replay, run = Replayed._capture, Replayed._replay, Replayed.run

    def captured(self: Replayed, *args: Any) -> Any:
        seen[-1] = (seen[-1][0], "capture")
        return capture(self, *args)

    def replayed(self: Replayed, *args: Any) -> Any:
        if seen[-1][1] == "run":
            seen[-1] = (seen[-1][0], "replay")
        return replay(self, *args)

    def ran(self: Replayed, tensors: Any) -> list[Any]:
        seen.append(("backward" if isinstance(self, ReplayedBackward) else "forward", "run"))
        return run(self, tensors)

    monkeypatch.setattr(Replayed, "_capture", captured)
    monkeypatch.setattr(Replayed, "_replay", replayed)
    monkeypatch.setattr(Replayed, "run", ran)
    return seen


def check_loop(step: Step, replays: list[tuple[str, str]], device: str) -> None:
    """Twelve steps have float64's gradients and buffers, and replay what they can."""
    model = net(device)
    exact = copy.deepcopy(model).double()
    run = Placed(compiled(model))
    optimizers = [torch.optim.SGD(each.parameters(), 0.01, 0.9) for each in (model, exact)]
    for number in range(12):
        step(model, run, number)
        step(exact, lambda x: exact(x.double()), number)
        for mine, wanted in zip(model.parameters(), exact.parameters(), strict=True):
            assert mine.grad is not None
            assert wanted.grad is not None
            off = (mine.grad.double() - wanted.grad).norm() / (wanted.grad.norm() + 1e-6)
            assert off < 2e-3, (number, tuple(mine.shape), float(off))
        for optimizer in optimizers:
            optimizer.step()
    for mine, wanted in zip(model.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), wanted.double(), rtol=1e-3, atol=1e-4)
    kinds = [(of, "run" if what == "run" else "replay") for of, what in replays]  # of a capture too
    both = [("forward", "replay"), ("backward", "replay")]
    alone = [("forward", "run"), ("backward", "run")]
    steady = (each_step, before_backward, later_before_backward, forward_alone, two_sizes)
    if step in (*steady, elsewhere_later):
        assert kinds[-6:] == both * 3, replays
    elif step is backward_again:
        assert kinds[-7:] == [both[0], alone[1], both[1], *both * 2], replays
    elif step is two_parts:
        assert kinds[-8:] == [*both, both[0], alone[1]] * 2, replays
    elif step is two_before_one:
        assert kinds[-4:-2] == [both[0], alone[0]], replays
        assert sorted(kinds[-2:]) == [both[1], alone[1]], replays
    elif step is left_behind:
        assert kinds[-3:] == [both[0], *alone], replays
    else:
        assert kinds[-6::2] == [both[0]] * 3, replays
