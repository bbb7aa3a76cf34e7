"""Recurrent layers within graphs of torch.compile, where dynamo is allowed to trace them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests import numerics
from tests.fused import compiled
from tests.training import Function, left_to_torch

LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {}),
    "LSTM, two layers, both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "LSTM, projected": (nn.LSTM, {"proj_size": 3}),
    "GRU": (nn.GRU, {}),
    "RNN": (nn.RNN, {}),
}


class Last(nn.Module):
    """A recurrent layer, of whose results the first is read."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)[0]
        return found


def _trained(model: nn.Module, run: Function, x: torch.Tensor) -> list[torch.Tensor]:
    y = run(x)
    by = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y.double() * by).sum(), list(model.parameters()))]


@pytest.mark.parametrize("name", LAYERS)
@torch._dynamo.config.patch(allow_rnn=True)
def test_they_train(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    model, x = Last(kind(5, 6, batch_first=True, **options)), torch.randn(3, 4, 5)
    found = _trained(model, compiled(model), x)
    eager = _trained(model, model, x)
    exact = _trained(model.double(), model, x.double())
    numerics.no_farther_than_eager(found, eager, exact, torch.float32)
    assert set(left_to_torch()) <= {"aten.flip.default"}
    assert torch.backends.mkldnn.enabled
