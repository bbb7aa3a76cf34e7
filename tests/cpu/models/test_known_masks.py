"""Masks that are made of nothing but sizes, and what attention has in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.models import dynamo, known_masks
from tests import numerics

Tensor = torch.Tensor
Mask = Callable[[Tensor], Tensor]
ROWS = 12


class Attention(nn.Module):
    """Attention with a mask that is made while it is compiled."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(16, 48), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))


def _expanded(x: Tensor) -> Tensor:
    rows = torch.arange(ROWS, device=x.device)
    return (rows[None, None, :, None] >= 0).expand(x.shape[0], -1, ROWS, ROWS)


def _of_a_function(x: Tensor) -> Tensor:
    return torch.zeros(ROWS, ROWS, dtype=x.dtype)  # of float32 torch's own is wrong in float64


def _lower(x: Tensor) -> Tensor:
    rows = torch.arange(ROWS)
    return (rows[:, None] >= rows[None, :]).expand(x.shape[0], 1, ROWS, ROWS)


def _lower_numbers(x: Tensor) -> Tensor:
    return torch.full((ROWS, ROWS), -torch.inf, dtype=x.dtype).triu(1)


def _window(x: Tensor) -> Tensor:
    rows = torch.arange(ROWS)
    apart = rows[:, None] - rows[None, :]
    return (apart < 4) & (apart > -4)


def _of_data(x: Tensor) -> Tensor:
    return (x[:, :, 0] < 9.0)[:, None, None, :].expand(-1, 1, ROWS, ROWS)


def _of_data_by_row(x: Tensor) -> Tensor:
    return (x[:, :, 0] < 9.0)[:, None, :, None].expand(-1, 1, ROWS, ROWS)


def _written(x: Tensor) -> Tensor:
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool)
    mask[:, 7:] = False
    return mask


def _written_through_a_view(x: Tensor) -> Tensor:
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool)
    mask.narrow(1, 7, 3).fill_(False)
    return mask


def _lost(x: Tensor) -> Tensor:
    """No key for the first row."""
    return torch.ones(ROWS, ROWS, dtype=torch.bool).tril(-1)


CASES: dict[Mask, str] = {
    _expanded: "none",
    _of_a_function: "none",
    _lower: "causal",
    _lower_numbers: "causal",
    _window: "mask",
    _of_data: "mask",
    _of_data_by_row: "copied",
    _written: "mask",
    _written_through_a_view: "mask",
    _lost: "mask",
}


def _seen(model: nn.Module, x: Tensor) -> tuple[str, Tensor]:
    """What attention is given once flagged, and the results of that graph."""
    found: list[str] = []

    def look(module: torch.fx.GraphModule, given: Any) -> Any:
        known_masks.flag(module)
        for node in module.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                mask = node.kwargs.get("attn_mask")
                copied = isinstance(mask, torch.fx.Node) and mask.target == "contiguous"
                flag = "causal" if node.kwargs.get("is_causal") else "none"
                found.append("copied" if copied else "mask" if mask is not None else flag)
        return module

    torch._dynamo.reset()
    made = torch.compile(model, backend=look)(x)
    return found[0], made


@pytest.mark.parametrize("mask", CASES, ids=lambda mask: mask.__name__.strip("_"))
def test_a_mask_that_says_nothing_is_left_out_and_one_of_the_diagonal_is_a_flag(mask: Mask) -> None:
    torch.manual_seed(0)
    model, x = Attention(mask), torch.randn(2, ROWS, 16)
    kind, made = _seen(model, x)
    assert kind == CASES[mask]
    with torch.no_grad():
        wanted = model.double()(x.double())
    numerics.check(made, wanted, torch.float32, terms=16)


def test_a_mask_that_learns_or_of_sizes_that_are_open_stays() -> None:
    learned = nn.Parameter(torch.zeros(ROWS, ROWS))
    assert _seen(Attention(lambda x: learned), torch.randn(2, ROWS, 16))[0] == "mask"
    kinds = []

    def look(module: torch.fx.GraphModule, given: Any) -> Any:
        known_masks.flag(module)
        kinds.extend(
            node.kwargs["attn_mask"] is None
            for node in module.graph.nodes
            if node.target is F.scaled_dot_product_attention
        )
        return module

    torch._dynamo.reset()
    model = Attention(lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
    quick, x = torch.compile(model, backend=look, dynamic=True), torch.randn(2, ROWS, 16)
    torch.testing.assert_close(quick(x), model(x))
    assert kinds == [False]


def test_training_with_such_a_mask_is_attention_of_ours_without_one() -> None:
    """Its gradients are those of the model with the mask."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Attention(_expanded), torch.randn(2, ROWS, 16)
    made: list[Any] = []

    def look(module: torch.fx.GraphModule, given: Any) -> Any:
        made.append(dynamo.backend(module, given))
        return made[-1]

    torch.compile(model, backend=look)(x).square().sum().backward()
    weight = model.qkv.weight
    ours, weight.grad = weight.grad, None
    model(x).square().sum().backward()
    own = weight.grad
    exact = Attention(_expanded).double()
    exact.load_state_dict(model.state_dict())
    exact(x.double()).square().sum().backward()
    assert ours is not None and own is not None and exact.qkv.weight.grad is not None
    numerics.check(ours, exact.qkv.weight.grad, torch.float32, own, terms=64)
