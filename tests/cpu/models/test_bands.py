"""Masks that are a band of keys: which ones, and attention that is imported with them."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.models.bands import Band, band_of
from cudnngraph.models.convert import import_model
from tests.converted import ops
from tests.fused import compiled

Tensor = torch.Tensor
NEVER = (torch.float16, torch.bfloat16, torch.float32)


def made(rows: int, keys: int, left: int | None, right: int | None) -> Tensor:
    """A mask by its definition, an element at a time."""
    return torch.tensor(
        [
            [
                (left is None or key >= row - left) and (right is None or key <= row + right)
                for key in range(keys)
            ]
            for row in range(rows)
        ]
    ).view(rows, keys)


def forms(keeps: Tensor, number: random.Random) -> Tensor:
    """The mask as a model may have it: with images and heads in front, or as what is added."""
    dtype = number.choice((None, *NEVER))
    mask = keeps
    if dtype is not None:
        lowest = -math.inf if dtype == torch.float32 else -65504.0  # which torch adds for cuDNN
        hidden = number.choice((-math.inf, torch.finfo(dtype).min, lowest))
        mask = torch.zeros(keeps.shape, dtype=dtype).masked_fill(~keeps, hidden)
    shape = number.choice(((), (1,), (1, 1), (2, 1), (3, 2)))
    mask = mask.expand(*shape, *mask.shape)
    return mask.clone() if number.random() < 0.5 else mask


@pytest.mark.parametrize("seed", range(40))
def test_a_band_is_found_in_any_form(seed: int) -> None:
    number = random.Random(seed)
    for _ in range(25):
        rows, keys = number.randint(1, 9), number.randint(1, 9)
        bounds = [number.choice((None, *range(9))) for _ in range(2)]
        keeps = made(rows, keys, *bounds)
        found = band_of(forms(keeps, number))
        if not keeps.any(1).all():
            assert found is None, "a row without a key has other numbers"
            continue
        assert found is not None, (rows, keys, bounds)
        assert torch.equal(made(rows, keys, *found), keeps)
        if keeps.all():
            assert found == (None, None)


@pytest.mark.parametrize("seed", range(40))
def test_a_mask_that_is_no_band_stays_one(seed: int) -> None:
    number = random.Random(seed)
    for _ in range(25):
        rows, keys = number.randint(2, 9), number.randint(2, 9)
        keeps = made(rows, keys, number.choice((None, 1, 3)), number.choice((None, 0, 2)))
        row, key = number.randrange(rows), number.randrange(keys)
        keeps[row, key] ^= True
        found = band_of(forms(keeps, number))
        if found is not None:
            assert torch.equal(made(rows, keys, *found), keeps)


def test_masks_that_differ_between_images_or_weigh_keys_are_no_bands() -> None:
    causal = made(5, 5, None, 0)
    assert band_of(torch.stack([causal, causal])) == (None, 0)
    assert band_of(torch.stack([causal, made(5, 5, 2, 0)])) is None
    for dtype, weighs in ((torch.float32, -65504.0), (torch.bfloat16, -60000.0)):
        mask = torch.zeros(5, 5, dtype=dtype).masked_fill(~causal, weighs)
        assert band_of(mask) is None, "a key that may have weight"
    assert band_of(torch.full((5, 5), 0.5)) is None
    assert band_of(torch.full((5, 5), math.nan)) is None
    assert band_of(causal.long()) is None
    assert band_of(torch.ones(0, 5).bool()) is None and band_of(torch.ones(5).bool()) is None
    assert band_of(made(5, 5, None, 0).to("meta")) is None


class Windowed(nn.Module):
    """Attention of grouped heads under a mask that the model makes of places, as transformers'
    language models do."""

    def __init__(self, left: int | None, right: int | None, added: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.added = left, right, added
        self.qkv = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, 32) → (B, S, 32)."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).split((32, 16, 16), -1)
        q, k, v = (t.view(batch, length, -1, 8).transpose(1, 2) for t in (q, k, v))
        place = torch.arange(length, device=x.device)
        apart = place[None, :] - place[:, None]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device)
        if self.left is not None:
            mask &= apart >= -self.left
        if self.right is not None:
            mask &= apart <= self.right
        if self.added:
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(
                ~mask, torch.finfo(x.dtype).min
            )
        mask = mask[None, None].expand(batch, 1, -1, -1)
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return y.transpose(1, 2).reshape(batch, length, 32)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    ("left", "right", "band"),
    [(None, 0, (None, 0)), (7, 0, (7, 0)), (4, 4, (4, 4)), (None, 3, (None, 3)), (40, 40, None)],
)
def test_a_model_by_a_mask_of_places_attends_in_a_band(
    left: int | None, right: int | None, band: Band | None, added: bool
) -> None:
    model, x = Windowed(left, right, added).eval(), torch.randn(2, 33, 32)
    spec = import_model(model, (x,)).spec
    assert spec is not None
    (node,) = [node for node in spec.nodes if node.op == "sdpa"]
    assert node.attr("window") == band and len(node.operands) == 3, ops(spec)
    with torch.no_grad():
        wanted = model.double()(x.double())
        model.float()
        fused = cg.fuse(model, (x,))
        assert float((fused(x) - wanted).abs().max()) < 1e-5


@pytest.mark.parametrize(("left", "right"), [(None, 0), (7, 0), (4, 4)])
def test_it_is_trained_in_a_band(left: int | None, right: int | None) -> None:
    """Forward and backward alike: a mask of all rows and keys is neither kept nor read."""
    model, x = Windowed(left, right, added=False), torch.randn(2, 33, 32)
    torch._dynamo.reset()
    found = compiled(model)(x)
    found.square().sum().backward()
    bands = {
        node.op: node.attr("window")
        for report in cg.reports()
        for step in report.steps
        for node in step.spec.nodes
        if node.op.startswith("sdpa")
    }
    assert bands == {"sdpa": (left, right), "sdpa_backward": (left, right)}
    mine = [p.grad.double() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.double()(x.double()).square().sum().backward()
    for grad, parameter in zip(mine, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert float((grad - parameter.grad).norm() / parameter.grad.norm()) < 1e-5
