"""What a mask picks and puts back elementwise is a choice by the mask; anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import cudnngraph as cg
from cudnngraph.models import trace
from tests import numerics
from tests.models import Of

F32 = torch.float32
Tensor = torch.Tensor
Model = Callable[..., Any]


def copied(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    y = y.clone()
    y[mask] = x[mask]
    return y


def computed(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    y = y.clone()
    y[mask] = F.gelu(x[mask].double()).to(y.dtype) * y[mask] + 1
    return y


def counted_up(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    y = y.clone()
    y[mask] += x[mask].exp()
    y[~mask] -= y[~mask] * 0.5
    return y


def of_before(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What was picked stays what it was when others are written."""
    x, y = x.clone(), y.clone()
    picked = x[mask]
    x *= 2
    y[mask] = 7.0
    picked *= 3
    picked.add_(1)
    y[mask] = picked
    return y, x


def by_comparison(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    y = y.clone()
    y[x > 0] = torch.sqrt(x[x > 0])  # NaN elsewhere
    y[(x > 0) == 0] = x[(x > 0) == 0].clamp(min=-1)
    return y


def behind(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    y = y.clone()
    y[:, mask] = x[:, mask] * torch.arange(float(x.shape[-1])) + 1
    return y


def behind_all(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    y = y.clone()
    y[:, mask, :] = x[:, mask, :].sigmoid()
    return y


CASES: list[tuple[Model, tuple[int, ...], tuple[int, ...]]] = [
    *((each, (3, 5), (3, 5)) for each in (copied, computed, counted_up, of_before, by_comparison)),
    *((each, (3, 5, 4), (3,)) for each in (copied, computed, of_before)),
    *((each, (3, 5, 4), (3, 5)) for each in (copied, counted_up)),
    *((each, (1, 5), (1,)) for each in (copied, computed)),
    *((each, (3, 5, 4), (5,)) for each in (behind, behind_all)),
]


@pytest.mark.parametrize(("model", "shape", "mask_shape"), CASES)
def test_what_a_mask_picks_and_puts_back_is_a_choice(
    model: Model, shape: tuple[int, ...], mask_shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    module = Of(model).eval()
    x, y = torch.randn(2, *shape)
    masks = (torch.rand(mask_shape) > 0.5, *(torch.full(mask_shape, n > 0) for n in range(2)))
    fused = cg.fuse(module, (x, y, masks[0]))
    for mask in masks:  # of the same graph
        made, own = fused(x, y, mask), module(x, y, mask)
        exact = module(x.double(), y.double(), mask)
        made, own, exact = (each if type(each) is tuple else (each,) for each in (made, own, exact))
        for found, mine, wanted in zip(made, own, exact, strict=True):
            assert (found.shape, found.dtype) == (mine.shape, mine.dtype)
            numerics.check(found, wanted, F32, mine)
    assert len(fused) == 1


def test_whole_numbers_are_picked_too() -> None:
    module = Of(copied).eval()
    x, y, mask = torch.arange(6), -torch.arange(6), torch.arange(6) % 2 == 0
    assert torch.equal(cg.fuse(module, (x, y, mask))(x, y, mask), module(x, y, mask))


def put(change: Callable[[Tensor], Any]) -> Model:
    def run(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        y = y.clone()
        y[mask] = change(x[mask])
        return y

    return run


def another_mask(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    y = y.clone()
    y[mask] = x[x > 0]
    return y


def a_mask_that_was_written(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    y, mask = y.clone(), mask.clone()
    picked = x[mask]
    mask[0, 0] = True
    y[mask] = picked
    return y


def of_whole_numbers(m: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Elsewhere it may divide by 0, which torch refuses."""
    y = y.long()
    y[mask] = y[mask] // x.long()[mask]
    return y


REFUSED: list[Model] = [
    put(lambda x: x.softmax(-1)),
    put(lambda x: x - x.mean()),
    put(lambda x: x / x.shape[0]),
    put(lambda x: x / x.size(0)),
    put(lambda x: x / x.numel()),
    put(lambda x: x * len(x)),
    put(lambda x: x + torch.ones(x.numel())),
    put(lambda x: x.flip(0)),
    put(lambda x: x.double()),  # which torch refuses
    put(lambda x: F.dropout(x, 0.5, training=True)),
    put(lambda x: torch.stack([each * 2 for each in x])),
    lambda m, x, y, mask: x[mask],
    lambda m, x, y, mask: x[mask] * 2,
    lambda m, x, y, mask: y.masked_scatter(mask, x[mask]),
    another_mask,
    a_mask_that_was_written,
    of_whole_numbers,
]


@pytest.mark.parametrize("model", REFUSED)
def test_anything_else_is_not_traced(model: Model) -> None:
    torch.manual_seed(0)
    given = (torch.randn(3, 5), torch.randn(3, 5), torch.ones(3, 5, dtype=torch.bool))
    asked: list[str] = []
    assert trace.trace(Of(model).eval(), given, {}, asked=asked) is None
    assert len(asked) == 1 and "test_picked.py" in asked[0]


def test_what_is_refused_names_the_line_and_the_mend() -> None:
    given = (torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 5) > 0)
    with pytest.raises(cg.CannotImport, match=r"y\[mask\] = change.*choose with torch.where"):
        cg.fuse(Of(put(lambda x: x * len(x))).eval(), given)
