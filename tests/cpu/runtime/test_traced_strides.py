"""Graphs of torch.compile whose tensors have other strides than torch's trace says."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.models import dynamo
from tests import numerics
from tests.fused import compiled

pytestmark = pytest.mark.usefixtures("forgotten")


class Softened(nn.Module):
    """A softplus behind a transpose: its gradient does not lie as torch's trace says on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(self.linear(x)).transpose(1, 2).unsqueeze(-1) * self.scale


@pytest.mark.parametrize("by_torch", [False, True])
def test_strides_that_are_not_those_of_the_trace_are_compared_and_run_by_torch(
    by_torch: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a graph was compared with nothing, and failed where torch was to run it."""
    torch.manual_seed(0)
    model, x = Softened(), torch.randn(2, 5, 3)

    def trained(run: Any, x: torch.Tensor) -> list[torch.Tensor]:
        y = run(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(run.parameters()))]

    own, exact = trained(model, x), trained(copy.deepcopy(model).double(), x.double())
    with caplog.at_level(logging.INFO, "cudnngraph"):
        if by_torch:
            monkeypatch.setattr(dynamo._Compiled, "_made", lambda self, args: None)
        mine = trained(compiled(model, check=True), x)
    numerics.no_farther_than_eager(mine, own, exact, torch.float32)
    assert "is not compared with eager" not in caplog.text
    assert ("floating results are as near" in caplog.text) != by_torch
