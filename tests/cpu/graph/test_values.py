"""What Python asks of the values of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cudnngraph as cg

F32 = torch.float32


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: 1 if x > 0 else 2,
        lambda x: 0 < x < 1,
        lambda x: x or x,
        lambda x: not x,
        lambda x: max(x, x + 1),
        bool,
    ],
)
def test_a_value_is_neither_true_nor_false(ask: Callable[[Any], Any]) -> None:
    """Python would take it for true, and one branch of two for the whole graph."""
    x = cg.Graph("g").input("x", (2,), F32)
    with pytest.raises(cg.GraphError, match=r"neither true nor false.*g\.where"):
        ask(x)
