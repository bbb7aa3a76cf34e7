"""Random module trees before and after ``replace``, through what happens to a model later.

``tests/random_trees.py`` says how to make many more, or one.
"""

from __future__ import annotations

import copy
import io
import os
import random
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from tests.cpu.nn.agreement import differences, step
from tests.random_trees import NORMS, WIDTH, Heads, prepared

FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_TREES", "100"))
PART = 20
STEP = 1e-6  # of a finite difference


def happen(ours: nn.Module, theirs: nn.Module, rng: random.Random) -> tuple[nn.Module, str]:
    """Something that happens to both models between two steps."""
    event = rng.choice(
        ("nothing", "frozen", "copied", "saved", "hooked", "again", "weights", "eval")
    )
    seed = rng.randrange(10**6)
    if event == "frozen":
        for model in (ours, theirs):
            for module in model.modules():
                if isinstance(module, NORMS):
                    module.eval()
    elif event == "copied":
        ours = copy.deepcopy(ours)
    elif event == "saved":
        file = io.BytesIO()
        torch.save(ours.state_dict(), file)
        file.seek(0)
        theirs.load_state_dict(torch.load(file))
    elif event == "hooked":
        for model in (ours, theirs):
            chosen = random.Random(seed).choice([*model.modules()][1:] or [model])
            chosen.register_forward_hook(double)
    elif event == "again":
        cg.nn.replace(ours)
    elif event == "weights":
        for model in (ours, theirs):
            torch.manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return ours, event


def double(module: nn.Module, args: Any, made: Any) -> Any:
    return made * 2 if isinstance(made, torch.Tensor) else None


def drops(model: nn.Module) -> bool:
    """Whether attention drops weights in training, which torch and a graph choose apart."""
    return any(
        isinstance(m, (Heads, nn.MultiheadAttention)) and m.dropout > 0 for m in model.modules()
    )


def torch_is_wrong(model: nn.Module, training: bool, x: torch.Tensor) -> bool:
    """Whether torch's own gradient is none: of batch norms in some strides of dims of 1, say."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        one = copy.deepcopy(model).train(training)
        torch.manual_seed(2)
        y = one(x * 1.0)
        return (y * torch.randn(y.shape, dtype=y.dtype)).sum()

    way, leaf = torch.randn_like(x), x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    change = (loss(x + STEP * way) - loss(x - STEP * way)).detach() / (2 * STEP)
    along = (gradient * way).sum()
    return bool((along - change).abs() > 1e-3 * (1 + change.abs()))


def one(seed: int) -> str:
    """What is wrong with a seed, "" for nothing, "-" if torch itself cannot run it."""
    theirs, x, rng = prepared(seed)
    ours = copy.deepcopy(theirs)
    keys, names = list(theirs.state_dict()), [n for n, _ in theirs.named_modules()]
    report = cg.nn.replace(ours)
    repr(report)
    if list(ours.state_dict()) != keys or [n for n, _ in ours.named_modules()] != names:
        return f"keys {list(ours.state_dict())}\n{keys}"
    told, ran = [], False
    for training in (False, False) if drops(theirs) else (True, False, True, False):
        try:
            expected = step(theirs, training, x)
        except (RuntimeError, ValueError):
            return "" if ran else "-"
        ran = True
        if wrong := differences(expected, step(ours, training, x)):
            if torch_is_wrong(theirs, training, x):
                return "-"
            return f"training={training}, {told}: {wrong}\n{report}\n{theirs}\n{theirs.steps}"
        ours, event = happen(ours, theirs, rng)
        told.append(event)
    return ""


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, PART))
def test_random_trees_compute_the_same_after_they_were_replaced(first: int) -> None:
    told = {seed: one(seed) for seed in range(first, min(first + PART, FIRST + COUNT))}
    wrong = [f"seed {seed}: {what}" for seed, what in told.items() if what not in ("", "-")]
    assert not wrong, "\n".join(wrong)
    assert list(told.values()).count("-") <= len(told) / 2


class Shared(nn.Module):
    """One norm behind x and behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.conv(self.norm(x)))


def test_a_norm_that_torch_calls_too_trains() -> None:
    """A fused call's write to its statistics was a change of what torch's gradient reads."""
    theirs = Shared().double()
    ours = copy.deepcopy(theirs)
    assert "swapped conv (Conv2d)" in str(cg.nn.replace(ours.train()))
    x = torch.randn(3, WIDTH, 5, 5, dtype=torch.float64)
    for training in (True, False, True):
        assert differences(step(theirs, training, x), step(ours, training, x)) == {}
