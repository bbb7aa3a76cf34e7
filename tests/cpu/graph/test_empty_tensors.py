"""Empty batches, no keys, height zero and no channels give empty results, zeros or the bias."""

from __future__ import annotations

import pytest
import torch

import cudnngraph as cg
from tests.mistakes.declare import F16, F32, weight


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_an_empty_batch_gives_an_empty_result_of_the_right_shape(layout: str) -> None:
    g = cg.Graph("g")
    x = g.input("x", (0, 16, 8, 8), F16, layout=layout)
    g.output("y", g.conv_bias_act(x, weight(g), g.input("b", (32,), F16), padding=1))
    exe = g.compile("cpu")
    y = exe(
        x=torch.empty_strided((0, 16, 8, 8), exe.spec.tensors["x"].stride, dtype=F16),
        w=torch.ones(32, 16, 3, 3, dtype=F16),
        b=torch.ones(32, dtype=F16),
    )
    assert y.shape == (0, 32, 8, 8)
    assert y.dtype == F16


def test_an_empty_batch_of_attention_gives_empty_results() -> None:
    g = cg.Graph("g")
    q = g.input("q", (0, 4, 8, 16), F16)
    o, lse = g.sdpa(
        q, g.input("k", (0, 4, 9, 16), F16), g.input("v", (0, 4, 9, 24), F16), return_lse=True
    )
    g.output("o", o)
    g.output("lse", lse)
    empty = torch.empty
    result = g.compile("cpu")(
        q=empty(0, 4, 8, 16, dtype=F16),
        k=empty(0, 4, 9, 16, dtype=F16),
        v=empty(0, 4, 9, 24, dtype=F16),
    )
    assert result.o.shape == (0, 4, 8, 24)
    assert result.lse.shape == (0, 4, 8)


def test_attention_over_no_keys_gives_zeros() -> None:
    g = cg.Graph("g")
    q = g.input("q", (1, 2, 3, 8), F16)
    g.output("o", g.sdpa(q, g.input("k", (1, 2, 0, 8), F16), g.input("v", (1, 2, 0, 8), F16)))
    o = g.compile("cpu")(
        q=torch.ones(1, 2, 3, 8, dtype=F16),
        k=torch.ones(1, 2, 0, 8, dtype=F16),
        v=torch.ones(1, 2, 0, 8, dtype=F16),
    )
    assert torch.equal(o, torch.zeros(1, 2, 3, 8, dtype=F16))


def test_height_zero_with_padding_gives_the_bias() -> None:
    """The output is not empty: every tap falls on padding (pytorch#31425)."""
    g = cg.Graph("g")
    x = g.input("x", (2, 3, 0, 5), F32)
    w, b = g.input("w", (4, 3, 3, 3), F32), g.input("b", (4,), F32)
    g.output("y", g.bias(g.conv(x, w, padding=(2, 1)), b))
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = g.compile("cpu")(x=torch.empty(2, 3, 0, 5), w=torch.ones(4, 3, 3, 3), b=bias)
    assert torch.equal(y, bias.view(1, 4, 1, 1).expand(2, 4, 2, 5))


def test_no_input_channels_give_the_bias() -> None:
    g = cg.Graph("g")
    x, w = g.input("x", (2, 0, 6, 6), F32), g.input("w", (4, 0, 3, 3), F32)
    g.output("y", g.bias(g.conv(x, w), g.input("b", (4,), F32)))
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = g.compile("cpu")(x=torch.empty(2, 0, 6, 6), w=torch.empty(4, 0, 3, 3), b=bias)
    assert torch.equal(y, bias.view(1, 4, 1, 1).expand(2, 4, 4, 4))
