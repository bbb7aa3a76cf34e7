"""Sums of products that models write out, imported as matmuls."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cudnngraph.models.convert import import_model
from tests.converted import F32, check, ops
from tests.models import Of

Tensor = torch.Tensor


def drawn(number: random.Random) -> tuple[tuple[int, ...], tuple[int, ...], list[int], list[str]]:
    """Shapes of two tensors that repeat each other, the dims that are summed over, and of each dim
    whether it is of both (b), of one alone (r, c), or summed over (k)."""
    kinds = [*"rck", *number.choices("brck1", k=number.randint(0, 2))]
    number.shuffle(kinds)
    extents = [1 if kind == "1" else number.choice((2, 3, 8, 9)) for kind in kinds]
    a = tuple(1 if kind == "c" else n for kind, n in zip(kinds, extents, strict=True))
    b = tuple(1 if kind == "r" else n for kind, n in zip(kinds, extents, strict=True))
    over = [dim for dim, kind in enumerate(kinds) if kind == "k" or (kind == "1" and dim % 2)]
    over = [dim - len(kinds) if number.random() < 0.5 else dim for dim in over]
    while len(b) > 1 and b[0] == 1 and number.random() < 0.5:
        b = b[1:]
    return a, b, over, kinds


def sides(a: tuple[int, ...], b: tuple[int, ...], over: list[int]) -> list[int]:
    """Rows, columns and terms of the product."""
    b = (1,) * (len(a) - len(b)) + b
    summed = {dim % len(a) for dim in over}
    found = [1, 1, 1]
    for dim, (one, two) in enumerate(zip(a, b, strict=True)):
        place = 2 if dim in summed else 0 if one > two else 1 if two > one else None
        if place is not None:
            found[place] *= max(one, two)
    return found


@pytest.mark.parametrize("seed", range(80))
def test_sums_of_products_of_any_shape_are_right(seed: int) -> None:
    number = random.Random(seed)
    a, b, over, _ = drawn(number)
    keepdim, expand = number.random() < 0.5, number.random() < 0.3
    torch.manual_seed(seed)
    x, y = torch.randn(a), torch.randn(b)
    whole = torch.broadcast_shapes(a, b)

    def written(m: Any, x: Tensor, y: Tensor) -> Tensor:
        left = x.expand(whole) if expand else x
        return (left * y).sum(over, keepdim=keepdim)

    swapped = number.random() < 0.5
    model = Of((lambda m, x, y: written(m, y, x)) if swapped else written)
    given = (y, x) if swapped else (x, y)
    found = check(model, *given, terms=torch.Size(whole).numel())
    product = min(sides(a, b, over)) >= 8
    assert ("matmul" in ops(found.spec)) == product, (a, b, over)
    assert not product or "mul" not in ops(found.spec)


def kept(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = x[:, None] * y[None]
    return z.sum(-1) + z.amax(-1)


def squared(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = x[:, None] - y[None]
    return (z * z).sum(-1)


def one_sided(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] * y[None]).sum(1)


def of_one(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] * 2.0).sum(-1) + y.sum(-1)


def averaged(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] * y[None]).mean(-1)


@pytest.mark.parametrize("written", [kept, squared, one_sided, of_one, averaged])
def test_other_sums_stay_sums(written: Callable[..., Tensor]) -> None:
    x, y = torch.randn(9, 16), torch.randn(10, 16)
    if written in (one_sided, of_one):
        y = y[:9]
    assert "matmul" not in ops(check(Of(written), x, y, terms=64).spec)


class Scan(nn.Module):
    """The scan within a chunk of a state space model, as transformers' Mamba-2 wrote it."""

    def forward(self, b: Tensor, c: Tensor, decay: Tensor, x: Tensor) -> Tensor:
        """b, c (N, chunks, L, H, S), decay (N, H, chunks, L, L), x (N, chunks, L, H, P)."""
        scores = (c[:, :, :, None] * b[:, :, None]).sum(dim=-1)
        weights = (scores[..., None] * decay.permute(0, 2, 3, 4, 1)[..., None]).sum(dim=-1)
        y: Tensor = (weights[..., None] * x[:, :, None]).sum(dim=3)
        states = (b[..., None, :] * x[..., None]).sum(dim=2)
        return y + (c[..., None, :] * states[:, :, None]).sum(-1)


def test_the_scan_of_a_state_space_model_is_four_products() -> None:
    torch.manual_seed(0)
    b, c = (torch.randn(2, 3, 8, 4, 16) for _ in range(2))
    given = (b, c, torch.rand(2, 4, 3, 8, 8), torch.randn(2, 3, 8, 4, 8))
    found = check(Scan(), *given, terms=256)
    assert ops(found.spec).count("matmul") == 4 and found.opaque == ()


def test_whole_numbers_and_sums_of_another_dtype_stay_as_they_are() -> None:
    x = torch.randint(9, (9, 16))
    model = Of(lambda m, x, y: (x[:, None] * x[None]).sum(-1) + y.sum().long())
    assert "matmul" not in ops(import_model(model, (x, torch.randn(3))).spec)
    half = torch.randn(9, 16).half()
    model = Of(lambda m, x: (x[:, None] * x[None]).sum(-1, dtype=F32))
    assert "matmul" not in ops(import_model(model, (half,), kernels=True).spec)
    model = Of(lambda m, x: (x[:, None] * x[None]).sum(-1))
    assert "matmul" in ops(import_model(model, (half,), kernels=True).spec)
