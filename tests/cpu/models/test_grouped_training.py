"""Convolutions of groups by weights that change, imported for a GPU as dense ones."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.device import rules
from cudnngraph.ir.spec import Node
from cudnngraph.models import dynamo
from tests import numerics
from tests.training import gradients

pytestmark = pytest.mark.usefixtures("forgotten")

Tensor = torch.Tensor
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


class Grouped(nn.Module):
    """A convolution of groups behind another, so that its image has a gradient, and in front of an
    activation."""

    def __init__(self, rank: int, channels: int, results: int, **options: Any) -> None:
        super().__init__()
        conv: Any = nn.Conv2d if rank == 2 else nn.Conv3d
        self.first = conv(3, channels, 1)
        self.grouped = conv(channels, results, **options)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.grouped(self.first(x)).sigmoid()
        return made


def trains(model: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    """Results and gradients are as near to float64 as eager's."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        by = torch.randn_like(exact(x.double()))
    ours: Any = torch.compile(model, backend=dynamo.backend)
    found = gradients(model, ours, x.requires_grad_(), by)
    eager = gradients(model, model, x, by)
    wanted = gradients(exact, exact, x.detach().double().requires_grad_(), by)
    numerics.no_farther_than_eager(found, eager, wanted, dtype)
    assert _lie(found) == _lie(eager)


def _lie(tensors: list[Tensor]) -> list[list[int]]:
    """The strides of dims of several elements."""
    pairs = [zip(each.shape, each.stride(), strict=True) for each in tensors]
    return [[stride for size, stride in each if size > 1] for each in pairs]


@pytest.mark.parametrize("seed", range(40))
def test_grouped_convolutions_of_any_kind_train(seed: int, convolutions: list[Node]) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rank, groups = draw.choice((2, 2, 3)), draw.choice((2, 3, 4, 6, 8))
    many, results = draw.choice((2, 3, 4, 5, 8, 16)), draw.choice((2, 3, 4, 6, 8))
    results = many if draw.random() < 0.3 else results
    window = draw.choice((1, 3, (3, 2, 1)[:rank]))
    options: dict[str, Any] = {"stride": draw.choice((1, 2)), "padding": draw.choice((0, 1))}
    options |= {"kernel_size": window, "groups": groups, "bias": draw.random() < 0.5}
    model: Any = Grouped(rank, groups * many, groups * results, **options)
    dtype = draw.choice((torch.float16, torch.bfloat16))
    x = torch.randn(2, 3, *(7, 6, 5)[:rank])
    if draw.random() < 0.7:
        x = x.contiguous(memory_format=LAST[rank])
    if draw.random() < 0.7:
        model = model.to(memory_format=LAST[rank])
    if draw.random() < 0.2:
        model.grouped.requires_grad_(False)
    limit = draw.choice((0, 2 * many, groups * many, 512))
    widths = draw.choice(((0, 0), (8, 16), (16, 32)))
    table = tuple(zip((7, 8, 16), (widths[0], widths[1], widths[1]), (0, 0, 4), strict=True))
    narrow_groups = table if any(widths) else ()
    with rules.changed(grouped_as_dense_max_channels=limit, narrow_groups=narrow_groups):
        trains(model.to(dtype), x.to(dtype), dtype)
    alone = limit == 0 or (many == results and many & (many - 1) == 0 and window != 1)
    kinds = {node.attr("groups") for node in convolutions} - {1}
    if alone or not any(n * many <= limit for n in _divisors(groups)):
        together = widths[many >= 8] // many
        narrow = many == results and together > 1 and groups % together == 0
        narrow &= many <= 8 or groups % 4 != 0
        assert kinds == {groups // (together if narrow else 1)} - {1}
    else:
        assert not kinds


def _divisors(number: int) -> list[int]:
    return [n for n in range(2, number + 1) if number % n == 0]


def test_what_is_not_finite_stays_in_its_group(convolutions: list[Node]) -> None:
    """A weight of one group that is infinite tells nothing to the others, whose zeros it meets."""
    model = Grouped(2, 9, 9, kernel_size=3, groups=3).half()
    with torch.no_grad():
        model.grouped.weight[0, 0, 0, 0] = torch.inf
    x = torch.randn(1, 3, 5, 5).half()
    ours: Any = torch.compile(model, backend=dynamo.backend)
    with cg.settings.override(check=False):
        found, eager = ours(x), model(x)
    assert all(node.attr("groups") == 1 for node in convolutions)
    assert torch.equal(found[:, 3:].isfinite(), eager[:, 3:].isfinite())
    assert found[:, 3:].isfinite().all()
