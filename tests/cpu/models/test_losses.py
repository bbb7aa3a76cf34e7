"""Losses with weights, of probabilities, margins and 16 bits within graphs of torch.compile."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.kernels.rules import torch_ops
from tests import generated
from tests.fused import compiled
from tests.training import Function, alike, left_to_torch, torch_steps, trained

GENERATES = cg.Policy(kernels=True)
REDUCTIONS = ("mean", "sum", "none")
CLASSES = torch.tensor([0, 5, 2, 2, 6, 1])
PIXELS = (torch.arange(2 * 5 * 3) % 4).view(2, 5, 3)
WEIGHTS, SHARES = torch.linspace(0.5, 1.5, 7), torch.linspace(0, 1, 42).view(6, 7)
SIGNS = 1 - 2 * (torch.arange(42).view(6, 7) % 3 == 0).float()


@pytest.fixture(autouse=True)
def _new_compiler() -> None:
    torch._dynamo.reset()


def like(x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(each.to(x.dtype) for each in others)


def _entropy(x: torch.Tensor, target: torch.Tensor, how: str, **more: float) -> torch.Tensor:
    (weight,) = like(x, WEIGHTS[: x.shape[min(1, x.dim() - 1)]])
    return F.cross_entropy(x, target, weight, reduction=how, **more)  # type: ignore[arg-type]


def _probable(x: torch.Tensor, how: str, weight: torch.Tensor | None) -> torch.Tensor:
    weight = None if weight is None else weight.to(x.dtype)
    return F.binary_cross_entropy(x.sigmoid(), *like(x, SHARES), weight, reduction=how)


ROWS, IMAGE = (6, 7), (2, 4, 5, 3)
LOSSES: dict[str, tuple[Function, tuple[int, ...]]] = {
    f"{name}, {how}": (lambda x, loss=loss, how=how: loss(x, how), shape)
    for how in REDUCTIONS
    for name, (loss, shape) in {
        "weighted classes": (lambda x, how: _entropy(x, CLASSES, how), ROWS),
        "some ignored": (lambda x, how: _entropy(x, CLASSES, how, ignore_index=2), ROWS),
        "smoothed": (
            lambda x, how: _entropy(x, CLASSES, how, ignore_index=2, label_smoothing=0.2),
            ROWS,
        ),
        "weighted pixels": (lambda x, how: _entropy(x, PIXELS, how, ignore_index=1), IMAGE),
        "one row": (lambda x, how: _entropy(x[1], CLASSES[1], how), ROWS),
        "one row alone": (
            lambda x, how: F.cross_entropy(x[1], CLASSES[1], reduction=how),
            ROWS,
        ),
        "probabilities": (lambda x, how: _probable(x, how, None), ROWS),
        "weighted probabilities": (lambda x, how: _probable(x, how, WEIGHTS), ROWS),
        "margins": (
            lambda x, how: F.soft_margin_loss(3 * x, *like(x, SIGNS), reduction=how),
            ROWS,
        ),
        "labels": (
            lambda x, how: F.multilabel_soft_margin_loss(x, *like(x, SHARES), reduction=how),
            ROWS,
        ),
    }.items()
}


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_of_it_is_left_to_torch(name: str) -> None:
    function, shape = LOSSES[name]
    torch.manual_seed(0)
    left = alike(function, torch.randn(shape), policy=GENERATES)
    assert [name for name in left if name not in torch_ops.RULES] == []


NARROW: dict[str, Function] = {
    "weighted classes": lambda x: _entropy(x, CLASSES, "none", ignore_index=2),
    "probabilities": lambda x: _probable(x, "mean", WEIGHTS),
    "margins": lambda x: F.soft_margin_loss(x, *like(x, SIGNS)),
    "squares": lambda x: F.mse_loss(x.tanh(), *like(x, SHARES)),
    "smooth": lambda x: F.smooth_l1_loss(x, *like(x, SHARES), beta=0.7, reduction="none"),
    "Huber": lambda x: F.huber_loss(x, *like(x, SHARES), delta=0.6),
    "logits": lambda x: F.binary_cross_entropy_with_logits(x, *like(x, SHARES)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NARROW)
def test_losses_of_16_bits_are_rounded_no_more_than_torchs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS).to(dtype)
    assert alike(NARROW[name], x, dtype=dtype, policy=GENERATES) == []


@pytest.mark.parametrize(
    "name",
    [
        *("some ignored, mean", "weighted pixels, none", "one row, mean"),
        *("weighted probabilities, mean", "margins, sum", "smoothed, mean"),
    ],
)
def test_kernels_that_are_generated_for_it_compute_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated.install(monkeypatch)
    function, shape = LOSSES[name]
    torch.manual_seed(0)
    alike(function, torch.randn(shape), policy=GENERATES)
    assert torch_steps() == []


@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("kernels", [True, False])
def test_rows_that_are_all_ignored_are_nothing(how: str, kernels: bool) -> None:
    """The mean of them is NaN, as torch has it, and gradients are 0; so with weights that are 0."""
    ignored = torch.full_like(CLASSES, -100)
    nothing = torch.zeros(7)

    def without_rows(x: torch.Tensor) -> torch.Tensor:
        return _entropy(x, ignored, how)

    def without_weights(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, CLASSES, nothing, reduction=how)

    for loss in (without_rows, without_weights):
        x = torch.randn(ROWS)
        run = compiled(loss, policy=cg.Policy(kernels=kernels), check=False)
        for mine, own in zip(trained(run, x), trained(loss, x), strict=True):
            torch.testing.assert_close(mine, own, equal_nan=True)


def test_infinite_logarithms_are_torchs() -> None:
    """They count by their weight, which may be 0, or not at all."""
    x = torch.randn(ROWS)
    x[:, 0] = -math.inf
    weight = torch.tensor([0.0, 1, 2, 3, 4, 5, 6])
    target = torch.tensor([0, 1, -100, 3, 4, 5])

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(x, target, weight, reduction="none")

    run = compiled(loss, policy=GENERATES, check=False)
    for mine, own in zip(trained(run, x), trained(loss, x), strict=True):
        assert torch.equal(mine.nan_to_num(77.0), own.nan_to_num(77.0))


def test_no_logarithm_of_a_probability_is_below_100() -> None:
    """Nor is a slope divided by less than 1e-12. NaN stays."""
    x = torch.tensor([0.0, 1.0, 1e-38, 2**-40, 1 - 2**-24, 2**-30, 0.5, math.nan]).repeat(3, 1)
    target = torch.tensor([0.0, 1.0, 0.25]).view(3, 1).expand(3, 8).contiguous()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(x, target, reduction="none")

    checked = x.clone()
    checked[:, -1] = 0.5  # torch's CPU refuses NaN
    run = compiled(loss, policy=GENERATES, check=False)
    for mine, own in zip(trained(run, checked), trained(loss, checked), strict=True):
        torch.testing.assert_close(mine, own)
    found, slope = trained(run, x)
    assert left_to_torch() == []
    assert bool(found[:, -1].isnan().all() and slope[:, -1].isnan().all())
    assert float(found[:, :-1].max()) == 100.0


def test_margins_overflow_where_torchs_do() -> None:
    x, target = torch.tensor([-200.0, -88.0, 0.0, 88.0, 200.0, math.nan]), torch.ones(6)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.soft_margin_loss(x, target, reduction="none")

    run = compiled(loss, policy=GENERATES, check=False)
    for mine, own in zip(trained(run, x), trained(loss, x), strict=True):
        torch.testing.assert_close(mine, own, equal_nan=True)


def test_weights_of_classes_are_torchs_without_kernels() -> None:
    left = alike(
        lambda x: _entropy(x, CLASSES, "mean"), torch.randn(ROWS), policy=cg.Policy(kernels=False)
    )
    assert sorted(left) == ["aten.nll_loss_backward.default", "aten.nll_loss_forward.default"]
