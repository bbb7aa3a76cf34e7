"""Models that are fused and called under autocast on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cudnngraph as cg
from tests import numerics
from tests.models import Of

PARTS: dict[str, Callable[[], nn.Module]] = {
    "l": lambda: nn.Linear(32, 32),
    "c": lambda: nn.Conv2d(8, 16, 3, padding=1),
    "b": lambda: nn.BatchNorm2d(16),
    "g": lambda: nn.GroupNorm(4, 16),
    "n": lambda: nn.LayerNorm(32),
    "gru": lambda: nn.GRU(32, 16, batch_first=True),
    "lstm": lambda: nn.LSTM(32, 16, 2, batch_first=True, bidirectional=True),
    "mha": lambda: nn.MultiheadAttention(32, 4, batch_first=True),
}
IMAGE, ROWS = (2, 8, 16, 16), (2, 24, 32)
FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, ...]]] = {
    "conv, batch norm": (lambda m, x: F.relu(m.b(m.c(x))), IMAGE),
    "conv, group norm": (lambda m, x: F.silu(m.g(m.c(x))), IMAGE),
    "linear, layer norm": (lambda m, x: x + m.n(F.gelu(m.l(x))), ROWS),
    "softmax": (lambda m, x: m.l(x).softmax(-1) @ x.mT, ROWS),
    "attention": (
        lambda m, x: F.scaled_dot_product_attention(m.l(x)[:, None], *[x[:, None]] * 2),
        ROWS,
    ),
    "heads": (lambda m, x: m.mha(m.l(x), x, x)[0], ROWS),
    "gru": (lambda m, x: m.gru(x)[0], ROWS),
    "lstm": (lambda m, x: m.lstm(m.l(x))[0], ROWS),
    "einsum": (lambda m, x: torch.einsum("bij,kj->bik", m.l(x), m.l.weight), ROWS),
    "sums": (lambda m, x: (m.l(x).sum(-1), m.l(x).exp(), torch.cat([x, m.l(x)], 1)), ROWS),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_torchs(name: str, dtype: torch.dtype) -> None:
    function, shape = FUNCTIONS[name]
    torch.manual_seed(0)
    model = Of(function, **{each: make() for each, make in PARTS.items()}).cuda().eval()
    exact = copy.deepcopy(model).double()
    x = torch.randn(shape, device="cuda")
    with torch.autocast("cuda", dtype):
        fused = cg.fuse(model, x)
    for y in (x, x.flip(0) * 0.5):
        with torch.no_grad():
            right = torch.utils._pytree.tree_leaves(exact(y.double()))
            with torch.autocast("cuda", dtype):
                own, ours = map(torch.utils._pytree.tree_leaves, (model(y), fused(y)))
        assert [each.dtype for each in ours] == [each.dtype for each in own]
        for made, theirs, wanted in zip(ours, own, right, strict=True):
            # What is computed in 16 bits on the way to float32 is no nearer.
            numerics.check(made.to(dtype), wanted, dtype, theirs.to(dtype), terms=32)
