"""Batch norms of a model: folded into a convolution, or a scale and a bias."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.bench import models
from cudnngraph.models.convert import import_model
from tests import numerics
from tests.converted import F32, IMAGE, check, ops, run
from tests.models import Of, image


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(6, 8, 3, bias=False),
        nn.Conv2d(6, 8, 3, groups=2),
        nn.ConvTranspose2d(6, 8, 3, stride=2),
        nn.ConvTranspose2d(6, 8, 3, groups=2, bias=False),
    ],
    ids=str,
)
def test_a_batch_norm_behind_a_convolution_is_folded(conv: nn.Module) -> None:
    model = models.randomized(nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU()))
    imported = check(model, image(*IMAGE), terms=4096)
    kind = "conv" if isinstance(conv, nn.Conv2d) else "conv_transpose"
    assert ops(imported.spec) == [kind, "bias", "relu"]
    assert imported.folded == 1


def test_folded_weights_are_computed_in_float64_and_rounded_once() -> None:
    conv, norm = nn.Conv2d(3, 4, 1, bias=False).half(), nn.BatchNorm2d(4).half()
    model = models.randomized(nn.Sequential(conv, norm))
    imported = import_model(model, (image(1, 3, 4, 4).half(),))
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    want = (conv.weight.double() * scale.view(-1, 1, 1, 1)).half()
    shift = (norm.bias.double() - norm.running_mean.double() * scale).half()
    weight, bias = imported.constants.values()
    assert torch.equal(weight, want.detach())
    assert torch.equal(bias, shift.detach())


def test_a_batch_norm_that_no_convolution_can_take_is_a_scale_and_a_bias() -> None:
    conv = nn.Conv2d(6, 6, 1)
    apart = models.randomized(nn.BatchNorm2d(6))
    imported = check(Of(lambda m, x: m.norm(F.relu(x)), norm=apart), image(*IMAGE))
    assert ops(imported.spec) == ["relu", "scale", "bias"]
    twice = check(
        Of(lambda m, x: (y := m.conv(x), m.norm(y)), conv=conv, norm=apart), image(*IMAGE), terms=64
    )
    assert ops(twice.spec) == ["conv", "bias", "scale", "bias"]
    assert imported.folded == twice.folded == 0


@pytest.mark.parametrize(
    "conv",
    [nn.Conv2d(6, 8, 1, bias=False), nn.Conv2d(6, 8, 1, 2), nn.Conv2d(6, 8, 1, padding="same")],
    ids=str,
)
def test_a_batch_norm_in_front_of_a_convolution_of_pixels_is_folded(conv: nn.Module) -> None:
    norm = nn.BatchNorm2d
    model = models.randomized(nn.Sequential(norm(6), conv, norm(8), nn.ReLU()))
    imported = check(model, image(*IMAGE), terms=4096)
    assert ops(imported.spec) == ["conv", "bias", "relu"]
    assert imported.folded == 2


def test_a_batch_norm_between_two_convolutions_is_folded_once() -> None:
    parts = nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
    imported = check(models.randomized(nn.Sequential(*parts)), image(*IMAGE), terms=4096)
    assert ops(imported.spec) == ["conv", "bias", "conv", "bias"]
    assert imported.folded == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mean", [0.4, 3.0, 100.0])
def test_a_batch_norm_in_front_of_a_convolution_keeps_its_precision(
    dtype: torch.dtype, mean: float
) -> None:
    """Rounded weights times means that are large beside deviations would not."""
    norm, conv = nn.BatchNorm2d(64), nn.Conv2d(64, 32, 1, bias=False)
    norm.running_mean.fill_(mean)
    model = nn.Sequential(norm, conv).eval().to(dtype)
    x = (image(2, 64, 8, 8) + mean).to(dtype)
    imported = import_model(model, (x,))
    (y,) = run(imported, (x,))
    with torch.no_grad():
        own, exact = model(x), model.double()(x.double())
    numerics.check(y, exact, dtype, own, terms=64)
    assert imported.folded == (mean < 1)


def test_a_batch_norm_in_front_that_weights_cannot_hold_stays() -> None:
    """Means that cancel in the sum, and scales beyond the range of float16."""
    conv = nn.Conv2d(64, 32, 1, bias=False)
    conv.weight.data -= conv.weight.data.mean(1, keepdim=True)
    conv.weight.data *= 0.05
    for dtype, mean, var, eps in (
        (F32, 300.0, 1.0, 1e-5),
        (torch.float16, 0.0, 6e4, 1e-5),
        (torch.float16, 0.0, 0.0, 1e-14),
    ):
        norm = nn.BatchNorm2d(64, eps=eps)
        norm.running_mean.fill_(mean)
        norm.running_var.fill_(var)
        model = copy.deepcopy(nn.Sequential(norm, conv)).eval().to(dtype)
        assert import_model(model, (torch.zeros(1, 64, 4, 4, dtype=dtype),)).folded == 0


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 8, 3)),
        nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 8, 1, padding=1)),
        nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 8, 1, groups=2)),
        nn.Sequential(nn.BatchNorm2d(6), nn.ConvTranspose2d(6, 8, 1)),
        Of(lambda m, x: m.c(y := m.n(x)) + y, n=nn.BatchNorm2d(6), c=nn.Conv2d(6, 6, 1)),
    ],
    ids=["3x3", "padded", "groups", "transposed", "read twice"],
)
def test_a_batch_norm_in_front_that_would_not_be_the_same_stays(model: nn.Module) -> None:
    imported = check(models.randomized(model), image(*IMAGE), terms=4096)
    assert ops(imported.spec)[:2] == ["scale", "bias"]
    assert imported.folded == 0


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (y := F.conv2d(x, m.w)) * y,
        lambda m, x: (y := F.conv2d(x, m.w)) + y,
        lambda m, x: torch.cat([y := F.conv2d(x, m.w), y], 1),
        lambda m, x: torch.addcmul(y := F.conv2d(x, m.w), y, y),
        lambda m, x: F.batch_norm(y := F.conv2d(x, m.w), z := y.mean((0, 2, 3)), z.abs() + 1),
    ],
)
def test_what_reads_a_convolution_twice_is_no_norm_of_it(forward: Any) -> None:
    check(Of(forward, w=image(4, 6, 3, 3)), image(2, 6, 9, 8), terms=54)
