"""Modules live random lives beside torch's, and do the same in every call.

``tests/random_lives.py`` says how to make many more, or one.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from tests import numerics
from tests.random_lives import Life

FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_LIVES", "160"))
PART, CALLS = 40, 6


def one(seed: int) -> str:
    """What is wrong in the life of a seed, "" for nothing."""
    life = Life(seed)
    for _ in range(CALLS):
        if wrong := life.call():
            return "\n  ".join([wrong, *life.told])
        if life.m.chance(0.7):
            life.happen()
    return ""


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, PART))
def test_modules_do_as_torchs_through_random_lives(first: int) -> None:
    told = {seed: one(seed) for seed in range(first, min(first + PART, FIRST + COUNT))}
    wrong = [f"seed {seed}: {what}" for seed, what in told.items() if what]
    assert not wrong, "\n".join(wrong)


# -- what they found -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [cg.FusedConvBlock, cg.FusedDepthwiseSeparable])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_call_that_is_refused_counts_no_batch(kind: Any, momentum: float | None) -> None:
    block = kind(3, 4, 3, momentum=momentum)
    before = {name: buffer.clone() for name, buffer in block.named_buffers()}
    with pytest.raises(cg.GraphError):
        block(torch.ones(2, 5, 8, 8))
    assert all(torch.equal(before[name], buffer) for name, buffer in block.named_buffers())
    block(torch.randn(2, 3, 8, 8))
    counts = [b for name, b in block.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts and all(int(count) == 1 for count in counts)


def test_a_hardtanh_without_bounds_is_none() -> None:
    conv = nn.Conv2d(3, 4, 1)
    block = cg.FusedConvBlock.from_torch(conv, None, nn.Hardtanh(-math.inf, math.inf))
    x = torch.randn(2, 3, 4, 4)
    numerics.check(block(x).detach(), conv(x).detach().double(), torch.float32)
