"""Largest elements with their places, and elements at one place of each row."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.kernels.rules import torch_ops as known
from tests import generated
from tests.fused import compiled
from tests.training import Function, alike, torch_steps, trained

GENERATES = cg.Policy(kernels=True)
ROWS, IMAGE = (6, 7), (2, 4, 6, 5)
CLASSES = torch.tensor([0, 5, 2, 2, 6, 1])


@pytest.fixture(autouse=True)
def _new_compiler() -> None:
    torch._dynamo.reset()


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.tanh().max(1)[0].exp() - x.relu().min(0, keepdim=True).values.sum()


def _with_places(x: torch.Tensor) -> torch.Tensor:
    most, at = x.tanh().max(1, keepdim=True)
    return most * x.gather(1, at) + x.exp().gather(1, x.argmin(1, keepdim=True))


FUNCTIONS: dict[str, tuple[Function, tuple[int, ...]]] = {
    "largest of rows": (_largest, ROWS),
    "places of rows": (_with_places, ROWS),
    "largest of points": (lambda x: torch.max(x.exp(), 2)[0], (2, 5, 33)),
    "largest of images": (lambda x: x.tanh().max(-1)[0].max(-1)[0], IMAGE),
    "largest of channels": (lambda x: x.tanh().max(1)[0], IMAGE),
    "logarithms at classes": (
        lambda x: -F.log_softmax(x, 1).gather(1, CLASSES[:, None]).mean(),
        ROWS,
    ),
    "logarithms at indices": (
        lambda x: F.log_softmax(x, 1)[torch.arange(6), CLASSES - 3].exp(),
        ROWS,
    ),
    "added at classes": (
        lambda x: torch.zeros_like(x).scatter_add(1, CLASSES[:, None], x[:, 2:3].exp()),
        ROWS,
    ),
    "numbers at classes": (
        lambda x: x * torch.ones_like(x).scatter(1, CLASSES[:, None], 3.0),
        ROWS,
    ),
    "one of each": (lambda x: (F.log_softmax(x, 1) * F.one_hot(CLASSES, 7)).sum(1), ROWS),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_of_it_is_left_to_torch(name: str) -> None:
    function, shape = FUNCTIONS[name]
    torch.manual_seed(0)
    left = alike(function, torch.randn(shape), policy=GENERATES)
    assert [each for each in left if each not in known.RULES] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_that_are_generated_for_it_compute_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated.install(monkeypatch)
    function, shape = FUNCTIONS[name]
    torch.manual_seed(0)
    alike(function, torch.randn(shape), policy=GENERATES)
    assert torch_steps() == []


TIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: x.max(1)[0],
    "min": lambda x: x.min(1)[0],
    "all": lambda x: x.max() - x.min(),
    "shared": lambda x: x.amax(1) + x.amin(1),
    "points": lambda x: x.view(2, 3, 9).max(2)[0],
}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", TIES)
def test_the_gradient_of_ties_goes_where_torchs_does(name: str, kernels: bool) -> None:
    """To the one whose place is given, and in equal parts to those of amax."""
    torch.manual_seed(0)
    x = torch.randint(-1, 2, (6, 9)).float()
    x[1], x[2, 4], x[3, 3:5] = 0.0, math.inf, math.nan
    run = compiled(TIES[name], policy=cg.Policy(kernels=kernels), check=False)
    for mine, own in zip(trained(run, x), trained(TIES[name], x), strict=True):
        torch.testing.assert_close(mine, own, equal_nan=True)


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "amax": lambda x: (x + 1 / 3).amax(1),
    "of all": lambda x: (x + 1 / 3).max() - (x * 1.7).min(),
    "of products": lambda x: (x @ x.T).aminmax(dim=1)[0],
    "norm": lambda x: (x * 1.1).norm(math.inf, 1),
    "the larger": lambda x: torch.maximum(x * 1.1, x.flip(0) * 1.1),
    "alike": lambda x: x * (x.exp() == x.exp().amax(1, keepdim=True)),
}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_in_16_bits_equals_the_largest_of_it(
    name: str, dtype: torch.dtype, kernels: bool
) -> None:
    """Though the one is kept in 16 bits and the other is not: gradients are divided by how many."""
    torch.manual_seed(0)
    x = torch.randn(ROWS).to(dtype)
    run = compiled(COMPUTED[name], policy=cg.Policy(kernels=kernels), check=False)
    for mine, own in zip(trained(run, x), trained(COMPUTED[name], x), strict=True):
        torch.testing.assert_close(mine, own)


@pytest.mark.parametrize("name", ["amax", "of products", "alike"])
def test_kernels_find_the_largest_of_16_bits_equal_to_itself(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated.install(monkeypatch)
    torch.manual_seed(0)
    x = torch.randn(ROWS).bfloat16()
    run = compiled(COMPUTED[name], policy=GENERATES, check=False)
    for mine, own in zip(trained(run, x), trained(COMPUTED[name], x), strict=True):
        torch.testing.assert_close(mine, own)
