"""Flex attention under torch.compile on a GPU: ours in bands, by torch's own kernels elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests import numerics
from tests.fused import compiled
from tests.training import left_to_torch, trained

CUDA = torch.device("cuda")
B, H, S, D = 2, 4, 384, 64
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _new_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def _masks() -> dict[str, Function | None]:
    part = torch.arange(S, device=CUDA) // 100
    return {
        "all": None,
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i >= j) & (i - j < 70),
        "prefix": lambda b, h, i, j: (i >= j) | (j < 33),
        "parts": lambda b, h, i, j: (part[i] == part[j]) & (i >= j),
    }


def _scores() -> dict[str, Function | None]:
    slopes = torch.exp2(-torch.arange(1.0, H + 1, device=CUDA))
    return {
        "as they are": None,
        "cap": lambda s, b, h, i, j: 3 * torch.tanh(s / 3),
        "slopes": lambda s, b, h, i, j: s + slopes[h] * (j - i),
    }


CASES = {
    ("all", "as they are"): True,
    ("causal", "as they are"): True,
    ("window", "as they are"): True,
    ("causal", "cap"): True,
    ("prefix", "as they are"): False,
    ("parts", "as they are"): False,
    ("causal", "slopes"): False,
    ("parts", "cap"): False,
}


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "trained"])
@pytest.mark.parametrize(("mask", "score"), CASES, ids=lambda name: name.replace(" ", "_"))
def test_it_is_right_and_where_it_should_be(
    mask: str, score: str, grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keeps, change = _masks()[mask], _scores()[score]
    blocks = None if keeps is None else create_block_mask(keeps, None, None, S, S, device="cuda")

    def call(q: Any, k: Any, v: Any) -> torch.Tensor:
        # A smooth function behind it: where relu's argument is near 0, a rounding turns a gradient.
        return torch.tanh(flex_attention(q * 2, k, v, score_mod=change, block_mask=blocks))

    def exactly(q: Any, k: Any, v: Any) -> torch.Tensor:
        b, h, i, j = (
            torch.arange(n, device=CUDA).view([-1 if dim == at else 1 for dim in range(4)])
            for at, n in enumerate((B, H, S, S))
        )
        scores = (q * 2) @ k.transpose(-2, -1) * D**-0.5
        scores = scores if change is None else change(scores, b, h, i, j)
        scores = scores if keeps is None else scores.masked_fill(~keeps(b, h, i, j), -torch.inf)
        return torch.tanh(scores.softmax(-1) @ v)

    inputs = [torch.randn(B, H, S, D, device=CUDA, dtype=torch.bfloat16) for _ in range(3)]
    with caplog.at_level(logging.WARNING, logger="cudnngraph"):
        if grad:
            found = trained(compiled(call), *inputs)
            exact = trained(exactly, *(x.double() for x in inputs))
        else:
            with torch.no_grad():
                found = [compiled(call)(*inputs)]
                exact = [exactly(*(x.double() for x in inputs))]
    for mine, wanted in zip(found, exact, strict=True):
        numerics.check(mine, wanted, torch.bfloat16, terms=S)
    ops = {"flex_attention", "flex_attention_backward"} if grad else {"flex_attention"}
    left = {name for name in left_to_torch() if name.startswith("flex")}
    assert left == (set() if CASES[mask, score] else ops)
    assert "not compiled" not in caplog.text, "torch has a kernel"
