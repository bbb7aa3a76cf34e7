"""Margins of several labels a row, trained within graphs of torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.training import alike

#: Labels in front of the first -1: two of four places, one twice, none, all, one.
LABELS = torch.tensor([[3, 1, -1, 0], [2, 2, -1, -1], [-1, 0, 1, 2], [3, 2, 1, 0], [1, -1, 2, -1]])


@pytest.fixture(autouse=True)
def _new_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [slice(None), 0])
def test_only_labels_in_front_of_the_first_negative_one_count(
    how: str, rows: slice[None, None, None] | int
) -> None:
    torch.manual_seed(0)
    alike(
        lambda x: F.multilabel_margin_loss(x, LABELS[rows], reduction=how),
        torch.randn(5, 4)[rows],
    )


@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_a_module_with_torchs_old_arguments_gives_the_same() -> None:
    torch.manual_seed(0)
    loss = nn.MultiLabelMarginLoss(size_average=False)
    alike(lambda x: loss(x, LABELS), torch.randn(5, 4))


def test_autocast_computes_it_in_float32() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.bfloat16):
            return F.multilabel_margin_loss(x, LABELS)

    torch.manual_seed(0)
    alike(loss, torch.randn(5, 4).bfloat16(), dtype=torch.bfloat16)
