"""Largest elements with their places, elements at one place of each row, norms and counts."""

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
    "norms": (
        lambda x: (
            x.norm(3, 1)
            + torch.linalg.vector_norm(x.exp(), 0.5, 1)
            + x.norm(-math.inf, 1) * torch.linalg.vector_norm(x.relu(), 0, 1)
        ),
        ROWS,
    ),
    "numbers of some": (
        lambda x: torch.where(x > 0, x, math.nan).nansum(1) + (x / (x > -1)).nanmean(),
        ROWS,
    ),
    "counts": (lambda x: x / x.relu().count_nonzero(1).unsqueeze(1) + x.count_nonzero(), ROWS),
    "gates": (lambda x: F.logsigmoid(9 * x) * x, ROWS),
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


def test_norms_of_any_order_are_torchs_at_nan_and_0() -> None:
    x = torch.tensor([[0.0, -0.0, 2.0], [math.nan, 0.0, 1.0], [-math.inf, 0.0, 1.0], [0.0] * 3])
    orders = (0, 0.5, 3, -1, -2, math.inf, -math.inf)

    def norms(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.linalg.vector_norm(x, order, 1) for order in orders]

    found = compiled(norms, policy=GENERATES, check=False)(x)
    for mine, own in zip(found, norms(x), strict=True):
        torch.testing.assert_close(mine, own, equal_nan=True)


def test_nothing_counts_of_nan_but_in_counts() -> None:
    x = torch.tensor([[math.nan, 0.0, -0.0, 3.0], [math.nan] * 4, [math.inf, math.nan, 1, 0]])

    def counted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = x.nansum(), x.nansum(1, dtype=torch.float32), x.nansum((0, 1), keepdim=True)
        return *sums, x.count_nonzero(), x.count_nonzero((0, 1)), (x > 0).count_nonzero(0)

    found = compiled(counted, policy=GENERATES, check=False)(x)
    for mine, own in zip(found, counted(x), strict=True):
        assert mine.dtype == own.dtype
        torch.testing.assert_close(mine, own, equal_nan=True)


OF_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.exp().sum(1),
    "mean of two dims": lambda x: x.exp().mean((1, 3)),
    "kept": lambda x: x.exp().amax(-1, keepdim=True),
    "with its place": lambda x: x.exp().max(3)[0] * 2,
    "of a number": lambda x: x.mean().exp().sum(0),
    "in another dtype": lambda x: x.sum((1,), dtype=torch.float64).exp(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OF_ONE)
def test_a_reduction_of_one_number_each_is_that_number(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 1, 5, 1).to(dtype)
    run = compiled(OF_ONE[name], policy=GENERATES, check=False)
    for mine, own in zip(trained(run, x), trained(OF_ONE[name], x), strict=True):
        torch.testing.assert_close(mine, own)
    x[0, 0, 0, 0], x[1, 0, 1, 0] = math.nan, math.inf

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return OF_ONE[name](x)

    fused = cg.fuse(Model().eval(), (x,))
    torch.testing.assert_close(fused(x), OF_ONE[name](x), equal_nan=True)
    assert fused.report is not None
    left = [n.attr("dims") for s in fused.report.steps for n in s.spec.nodes if n.op == "reduction"]
    assert left == ([(0, 1, 2, 3)] if name == "of a number" else [])
