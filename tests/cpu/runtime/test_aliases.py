"""Results of a fused model are tensors of their own, or its inputs, exactly as torch's are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from tests.models import Of

Function = Callable[[torch.Tensor], Any]


@pytest.fixture(autouse=True)
def _new_compiler() -> None:
    torch._dynamo.reset()


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="cudnngraph")


HANDED: dict[str, Function] = {
    "clone": lambda x: x.clone(),
    "channels last": lambda x: x.clone(memory_format=torch.channels_last),
    "to, copy": lambda x: x.to(x.dtype, copy=True),
    "contiguous of others": lambda x: x.transpose(1, 3).contiguous(),
    "contiguous": lambda x: x.contiguous(),
    "clone of detached": lambda x: x.detach().clone(),
    "itself": lambda x: x,
    "detached": lambda x: x.detach(),
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "twice": lambda x: (x, x.clone(), x),
}


@pytest.mark.parametrize("name", HANDED)
def test_a_result_is_the_input_where_it_is_torchs(name: str) -> None:
    function = HANDED[name]
    x = torch.randn(2, 3, 4, 5)
    right = torch.utils._pytree.tree_leaves(function(x))
    fused = cg.fuse(Of(lambda m, x: function(x)).eval(), x, check=False)
    for made, want in zip(torch.utils._pytree.tree_leaves(fused(x)), right, strict=True):
        assert torch.equal(made, want) and made.stride() == want.stride()
        assert (made.data_ptr() == x.data_ptr()) == (want.data_ptr() == x.data_ptr())
    with torch.no_grad():
        results = compiled(function)(x)
    for made, want in zip(torch.utils._pytree.tree_leaves(results), right, strict=True):
        assert torch.equal(made, want) and made.stride() == want.stride()
        if want.data_ptr() != x.data_ptr():
            assert made.data_ptr() != x.data_ptr()


def test_a_copy_made_before_a_write_keeps_the_old_numbers() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        old = x.clone()
        x.add_(1)
        return old

    x = torch.zeros(3, 4)
    with torch.no_grad():
        old = compiled(function)(x)
    assert float(old.sum()) == 0 and float(x.sum()) == 12


class Last(nn.Module):
    """Gives the mean of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before: torch.Tensor = self.mean.clone()
        self.mean.copy_(x.mean(0))
        return before


def test_a_buffer_that_changes_with_every_call_is_copied() -> None:
    """It is bound anew a few times, and then is an input."""
    plain = Last()
    fast = compiled(copy.deepcopy(plain))
    with torch.no_grad():
        for number in range(8):
            x = torch.full((3, 4), float(number))
            assert torch.equal(fast(x), plain(x)), number


def test_results_that_depend_on_nothing_are_new_in_every_call() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return m.w * 2, torch.zeros(2), torch.arange(2.0), m.w.clone(), m.w

    model = Of(forward, w=torch.ones(2)).eval()
    x = torch.ones(3)
    fused = cg.fuse(model, x)
    want = [t.clone() for t in model(x)]
    for result in fused(x)[:4]:
        result.add_(10)
    for made, right in zip(fused(x), want, strict=True):
        assert torch.equal(made, right)
    assert fused(x)[4].data_ptr() == model(x)[4].data_ptr(), "a parameter is handed on"
