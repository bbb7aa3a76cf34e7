"""Habits of serving: what is done with results, weights, transforms and tracers around a fused
model."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import cudnngraph as cg


@pytest.fixture(autouse=True)
def _new_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    yield


class MakesConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x), torch.tensor([1.0, 2.0]), torch.tensor(3.0), self.linear.bias


def test_what_a_model_makes_of_numbers_is_the_callers() -> None:
    model, x = MakesConstants().eval(), torch.randn(2, 4)
    fused = cg.fuse(model, x)
    for _ in range(2):
        y, made, scalar, bias = fused(x)
        assert made.tolist() == [1.0, 2.0] and scalar.item() == 3.0
        for each in (y, made, scalar):
            each.fill_(7.0)
    assert bias.data_ptr() == model.linear.bias.data_ptr(), "what it holds is handed on"
