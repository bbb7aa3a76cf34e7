"""What training loops do around a compiled model, and within one: as torch does it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import numerics
from tests.fused import compiled
from tests.models import image
from tests.training import left_to_torch


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_of_an_optimizer_writes_parameters(foreach: bool) -> None:
    """They require a gradient, and are leaves."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    own = copy.deepcopy(model)
    data = image(5, 4)
    for each, make in ((model, compiled), (own, lambda step: step)):
        options = {"momentum": 0.9, "foreach": foreach}
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, **options)
        step = make(lambda optimizer=optimizer: optimizer.step())
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(each(data), data[:, :2]).backward()
            step()
        if make is compiled:
            assert all(name.startswith("aten._foreach_") for name in left_to_torch())
    for mine, torchs in zip(model.parameters(), own.parameters(), strict=True):
        assert mine.requires_grad and mine.is_leaf
        numerics.check(mine.detach(), torchs.detach().double(), torch.float32, terms=64)
