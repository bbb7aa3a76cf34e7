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


def test_tables_of_rope_are_taken_back_with_the_ops() -> None:
    g = cg.Graph("g")
    x, cos, sin = (g.input(name, (3, width), F32) for name, width in zip("xcs", (4, 2, 2)))
    mark = g.mark()
    g.rope(x, cos, sin)
    g.undo(mark)
    g.concat([x, x])  # takes the name of what was taken back
    g.output("y", g.rope(x, cos, sin))
    a, b, c = torch.randn(3, 4), torch.randn(3, 2), torch.randn(3, 2)
    (p, q), y = a.chunk(2, 1), g.compile("cpu")(a, b, c)
    assert torch.allclose(y, torch.cat([p * b - q * c, q * b + p * c], 1), atol=1e-6)
