"""Ops that are taken back leave nothing behind."""

from __future__ import annotations

import torch

import cudnngraph as cg

F32 = torch.float32


def test_tables_of_rope_are_taken_back_with_the_ops() -> None:
    g = cg.Graph("g")
    x = g.input("x", (3, 4), F32)
    cos, sin = (g.input(name, (3, 2), F32) for name in ("cos", "sin"))
    mark = g.mark()
    g.rope(x, cos, sin)
    g.undo(mark)
    g.output("y", g.rope(x, cos, sin))
    a, b, c = torch.randn(3, 4), torch.randn(3, 2), torch.randn(3, 2)
    (p, q), y = a.chunk(2, 1), g.compile("cpu")(a, b, c)
    assert torch.allclose(y, torch.cat([p * b - q * c, q * b + p * c], 1), atol=1e-6)
