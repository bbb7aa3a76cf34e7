"""torch's transformers with masks: traced, and as the model gives them in evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from tests import numerics
from tests.models import image

ENDS = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()
BEGINS, NONE = ENDS.flip(1), torch.zeros(2, 5).bool()
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


def encoder(norm: bool = False, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
    made = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8) if norm else None, **options)
    if norm:
        nn.init.normal_(made.norm.bias)
    return made.eval()


def same(model: nn.Module, fused: Any, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        own = model(*args, **kwargs)
    numerics.check(fused(*args, **kwargs), own.double(), torch.float32, own, terms=64)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("options", [{}, {"mask_check": False}, {"enable_nested_tensor": False}])
def test_padding_is_what_an_encoder_gives_for_it(norm: bool, options: Any) -> None:
    model, x = encoder(norm, **options), image(2, 5, 8)
    before = vars(model).copy()
    fused = cg.fuse(model, x, kwargs={"src_key_padding_mask": ENDS})
    assert vars(model) == before and not model._forward_hooks
    masks = [ENDS, NONE] if options.get("mask_check") is False else [ENDS, NONE, BEGINS]
    for mask in masks:
        same(model, fused, image(2, 5, 8), src_key_padding_mask=mask)
    assert len(fused) == 1


def test_a_causal_mask_is_a_mask() -> None:
    model, x = encoder(), image(2, 5, 8)
    for mask in (CAUSAL, CAUSAL < 0):
        fused = cg.fuse(model, x, kwargs={"mask": mask})
        same(model, fused, x, mask=mask)
        same(model, fused, x, mask=mask.flip(0).flip(1))
    fused = cg.fuse(model, x, kwargs={"mask": CAUSAL < 0, "src_key_padding_mask": ENDS})
    same(model, fused, x, mask=CAUSAL < 0, src_key_padding_mask=ENDS)


def test_a_whole_transformer_of_torchs() -> None:
    torch.manual_seed(0)
    model, args = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval(), (image(2, 5, 8),) * 2
    masks = {"src_key_padding_mask": ENDS, "memory_key_padding_mask": ENDS, "tgt_mask": CAUSAL}
    same(model, cg.fuse(model, args, kwargs=masks), *args, **masks)
