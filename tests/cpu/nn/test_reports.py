"""What the report of `cg.nn.replace` calls a model itself, and attention that is left."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg


class Mixer(nn.Module):
    """Attention by torch's function, in a forward whose control flow may depend on the data."""

    def __init__(self, *, branches: bool = False) -> None:
        super().__init__()
        self.qkv, self.branches = nn.Linear(8, 24), branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        if self.branches and x.sum() > 0:
            return x
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)


def test_a_model_that_is_attention_is_called_the_model() -> None:
    assert str(cg.nn.replace(Mixer())) == "swapped the model (Mixer)"


def test_a_report_of_nothing_is_not_empty() -> None:
    report = cg.nn.replace(nn.Linear(8, 8))
    assert (report.swapped, report.left, str(report)) == ((), (), "swapped nothing")


def test_attention_in_a_forward_that_cannot_be_traced_is_left_with_the_reason() -> None:
    for model, name in (
        (Mixer(branches=True), "the model"),
        (nn.Sequential(Mixer(branches=True)), "0"),
    ):
        report = cg.nn.replace(model)
        assert not report.swapped
        (left,) = report.left
        assert str(left).startswith(f"left {name} (Mixer): its forward "), left
        assert "branches on a tensor's values" in left.reason
