"""Mistakes in the ops of gradients are reported in the words that mend them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cudnngraph as cg

F16, F32 = torch.float16, torch.float32
BAD: dict[str, tuple[Callable[[cg.Graph, cg.Value], object], str]] = {
    "wgrad_size": (
        lambda g, x: g.conv_wgrad(x, x, kernel=3),
        "expected (N, K, out...) = (2, K, 6, 6), the convolution's result",
    ),
    "wgrad_groups": (
        lambda g, x: g.conv_wgrad(x, x, kernel=1, groups=3),
        "x has 16 channels, not a multiple of groups=3",
    ),
    "grouped_rows": (
        lambda g, x: g.grouped_matmul_wgrad(
            g.input("a", (7, 8), F16), g.input("b", (6, 5), F16), g.input("e", (3,), torch.int32)
        ),
        "dy 'b' has 6 rows, x 'a' has 7; expected (7, N)",
    ),
    "grouped_ends": (
        lambda g, x: g.grouped_matmul_wgrad(
            g.input("a", (7, 8), F16), g.input("b", (7, 5), F16), g.input("e", (3, 1), torch.int32)
        ),
        "ends 'e' has shape (3, 1); expected (G,), the end of each group",
    ),
    "reduction_dim": (lambda g, x: g.reduction(x, (4,)), "dims=(4,) is out of range"),
    "reduction_twice": (lambda g, x: g.reduction(x, (1, -3)), "names a dim twice"),
    "reduction_mode": (lambda g, x: g.reduction(x, mode="median"), "mode='median' is unknown"),
    "reduction_kept": (
        lambda g, x: g.reduction(x, (1,), keepdim=(2,)),
        "keepdim=(2,) names dims that are not reduced; expected some of (1,)",
    ),
    "expand_shape": (
        lambda g, x: g.expand(x, (2, 5, 8, 8)),
        "x 'x' has shape (2, 16, 8, 8); expected 1 or (2, 5, 8, 8)",
    ),
    "relu_backward": (
        lambda g, x: g.relu_backward(g.input("dy", (2, 16, 8, 1), F16), x),
        "dy 'dy' has shape (2, 16, 8, 1); expected (2, 16, 8, 8), the shape of y",
    ),
    "norm_running": (
        lambda g, x: g.batch_norm_train(x, *(g.input(n, (16,), F32) for n in ("w", "b", "m"))),
        "running_mean is given alone; expected running_mean and running_var, or neither",
    ),
    "norm_values": (
        lambda g, x: g.batch_norm_train(
            g.reduction(x, (0, 2, 3), keepdim=True),
            *(g.input(n, (16,), F32) for n in ("w", "b")),
        ),
        "has 1 values per channel (1, 16, 1, 1); expected at least 2, to have a variance",
    ),
    "attention_lse": (
        lambda g, x: g.sdpa_backward(x, x, x, x, x, g.input("lse", (2, 16, 8), F16)),
        "lse 'lse' is float16 (2, 16, 8); expected float32 (B, H, S_q) = (2, 16, 8)",
    ),
    "attention_mask": (
        lambda g, x: g.sdpa_backward(
            x, x, x, x, x, g.input("lse", (2, 16, 8), F32), mask_grad=True
        ),
        "mask_grad=True without an additive mask",
    ),
    "layer_norm_stats": (
        lambda g, x: g.layer_norm_backward(
            x, x, g.input("w", (8,), F32), *(g.input(n, (2, 16, 8), F32) for n in ("m", "i"))
        ),
        "mean 'm' is float32 (2, 16, 8); expected float32 (2, 16, 8, 1)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_reported_in_the_words_that_mend_it(name: str) -> None:
    declare, says = BAD[name]
    g = cg.Graph("bad")
    result = declare(g, g.input("x", (2, 16, 8, 8), F16))
    values = result if isinstance(result, tuple) else (result,)
    g.output("y", values[0])  # type: ignore[arg-type]
    with pytest.raises(cg.GraphError) as caught:
        g.spec()
    assert says in str(caught.value)
