"""Models trained for 300 steps by the backend learn as torch's do.

What is within noise is measured: torch trains the same model again, each time from weights that are
moved by as much as their dtype rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from cudnngraph import settings
from cudnngraph.bench.models import GPT, ResNet
from tests import numerics
from tests.fused import compiled

Tensor = torch.Tensor
Batches = Iterator[tuple[Tensor, Tensor]]

STEPS = 300
#: Losses are averaged over so many steps: a single one is a draw of a batch.
WINDOW = 20
#: Trainings of torch from moved weights.
MOVED = 2


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Digits:
    """A residual network with batch norms on handwritten digits, by SGD with momentum."""

    ends_below = 0.25

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return ResNet((1, 1), 8, 10)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, nesterov=True)

    def batches(self) -> Batches:
        data = load_digits()
        images = torch.from_numpy(data.images).float().unsqueeze(1) / 8.0 - 1.0
        images = F.interpolate(images, scale_factor=2.0).expand(-1, 3, -1, -1).contiguous()
        labels, order = torch.from_numpy(data.target), _generator(1)
        for _ in range(STEPS):
            batch = torch.randint(len(images), (16,), generator=order)
            yield images[batch], labels[batch]

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.float(), labels)


class Text:
    """A GPT on the characters of this file, by AdamW with clipped gradients."""

    ends_below = 3.0

    def __init__(self) -> None:
        text = Path(__file__).read_text(encoding="utf-8")
        self.alphabet = sorted(set(text))
        self.text = torch.tensor([self.alphabet.index(letter) for letter in text])

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return GPT(len(self.alphabet), width=32, layers=2, length=24)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 2e-3)

    def batches(self) -> Batches:
        order = _generator(1)
        for _ in range(STEPS):
            starts = torch.randint(len(self.text) - 25, (8,), generator=order).tolist()
            rows = torch.stack([self.text[start : start + 25] for start in starts])
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def loss(self, scores: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(scores.float().flatten(0, 1), tokens.flatten())


Task = Digits | Text


def curve(
    task: Task, dtype: torch.dtype, call: Callable[[nn.Module], nn.Module], moved: int = 0
) -> Tensor:
    """The mean loss of each window of steps, from weights moved by rounding if ``moved``."""
    model = task.model().train()
    if moved:
        draws = _generator(moved)
        with torch.no_grad():
            for weight in model.parameters():
                part = torch.rand(weight.shape, generator=draws) - 0.5
                weight.mul_(1 + torch.finfo(dtype).eps * part)
    optimizer, run, losses = task.optimizer(model), call(model), []
    for given, wanted in task.batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            scores = run(given)
        loss = task.loss(scores, wanted)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses).view(-1, WINDOW).mean(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Digits, Text])
def test_losses_of_300_steps_are_torchs_within_noise(kind: type[Task], dtype: torch.dtype) -> None:
    task = kind()
    own = curve(task, dtype, lambda model: model)
    torch._dynamo.reset()
    with settings.override(check=False):
        mine = curve(task, dtype, compiled)
    assert own[-1] < task.ends_below < own[0], f"torch learns nothing: {own}"
    noise = max(
        float((curve(task, dtype, lambda model: model, moved=draw) - own).abs().max())
        for draw in range(1, MOVED + 1)
    )
    limit = numerics.TORCH_FACTOR * max(noise, numerics.floor(dtype, dtype, terms=STEPS))
    apart = float((mine - own).abs().max())
    assert apart <= limit, f"losses part by {apart:.2g}; torch's own by {noise:.2g}"
