"""Attention as models write it: capped, with sinks, biases and relative places."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec, Node
from cudnngraph.models.convert import import_model
from tests.converted import ops

Tensor = torch.Tensor
B, H, S, D = 2, 4, 12, 8
E = H * D


class Model(nn.Module):
    """Self-attention that ``attend`` makes of q, k and v, given a mask of the tokens."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.qkv.weight.data *= 2
        self.sinks = nn.Parameter(torch.linspace(-1.0, 2.0, H))
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.9, H))
        self.rows, self.columns = (nn.Parameter(torch.randn(n, n, D) / 4) for n in (3, 4))
        self.register_buffer("later", torch.ones(S, S).triu(1).bool())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, S, E), (B, S) → (B, S, E)."""
        q, k, v = self.qkv(x).view(B, S, 3, H, D).permute(2, 0, 3, 1, 4)
        y = self.attend(self, q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(B, S, E))


LEAST = torch.finfo(torch.bfloat16).min


def _added(m: Model, q: Tensor, mask: Tensor) -> Tensor:
    """What hides the tokens that a mask does, and later ones."""
    hidden = m.later | ~mask[:, None, None, :]
    return torch.where(hidden, torch.full((), LEAST, dtype=q.dtype), 0.0).to(q.dtype)


def capped(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As Gemma-2."""
    scores = q @ k.transpose(2, 3) * 0.25
    scores = torch.tanh(scores / 3.0) * 3.0
    weights = F.softmax(scores + _added(m, q, mask), dim=-1, dtype=torch.float32).to(q.dtype)
    return weights @ v


def capped_as_it_is(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (2.0 * torch.tanh(q @ k.transpose(2, 3))).softmax(-1) @ v


def sunk(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As gpt-oss."""
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5 + _added(m, q, mask)
    whole = torch.cat([scores, m.sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)], dim=-1)
    whole = whole - whole.max(dim=-1, keepdim=True).values
    return F.softmax(whole, dim=-1, dtype=whole.dtype)[..., :-1] @ v


def sunk_as_it_is(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    whole = torch.cat([q @ k.transpose(2, 3), m.sinks.view(1, H, 1, 1).expand(B, H, S, 1)], 3)
    return whole.softmax(3)[:, :, :, :S] @ v


def along_slopes(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As Bloom: ALiBi in a product of three dims."""
    places = (mask.cumsum(-1) - 1)[:, None, :] * mask[:, None, :]
    alibi = (m.slopes.view(1, H, 1) * places).reshape(B * H, 1, S).to(q.dtype)
    rows = [each.reshape(B * H, S, D) for each in (q, k, v)]
    scores = alibi.baddbmm(rows[0], rows[1].transpose(1, 2), beta=1.0, alpha=0.3)
    scores = scores.view(B, H, S, S) + _added(m, q, mask)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(B * H, S, S), rows[2]).view(B, H, S, D)


def filled_behind_a_bias(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As MPT."""
    places = torch.arange(1 - S, 1).float() * m.slopes.float().view(H, 1, 1)
    scores = q @ k.transpose(-1, -2) * 0.35 + places
    scores = scores.masked_fill(m.later | ~mask[:, None, None, :], LEAST)
    return F.softmax(scores.float(), dim=-1).to(v.dtype) @ v


def filled_by_the_least(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A row of which all is hidden is the mean."""
    scores = (q @ k.transpose(-1, -2)).float()
    scores = scores.masked_fill(~mask[:, None, None, :], LEAST)
    return scores.softmax(-1).to(v.dtype) @ v


def in_float32(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As GPT-J."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) / math.sqrt(D)
    return F.softmax(scores + _added(m, q, mask), dim=-1).to(v.dtype) @ v


def by_rows_and_columns(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As MViT: the places of pixels of 3 x 4, added to a view of the scores."""
    scores = (q * 0.3) @ k.transpose(-2, -1)
    image = q.view(B, H, 3, 4, D)
    across = torch.einsum("byhwc,hkc->byhwk", image, m.rows)
    along = torch.einsum("byhwc,wkc->byhwk", image, m.columns)
    scores[:, :, 0:, 0:] = (
        scores[:, :, 0:, 0:].view(B, -1, 3, 4, 3, 4)
        + across[:, :, :, :, :, None]
        + along[:, :, :, :, None, :]
    ).view(B, -1, S, S)
    return scores.softmax(-1) @ v


FORMS: dict[Callable[..., Tensor], dict[str, Any]] = {
    capped: {"scale": 0.25, "softcap": 3.0},
    capped_as_it_is: {"scale": 2.0, "softcap": 2.0},
    sunk: {"scale": 0.5, "sink": True},
    sunk_as_it_is: {"scale": 1.0, "sink": True},
    along_slopes: {"scale": 0.3},
    filled_behind_a_bias: {"scale": 0.35},
    filled_by_the_least: {"scale": 1.0},
    in_float32: {"scale": 1 / math.sqrt(D)},
    by_rows_and_columns: {"scale": 0.3},
}


def given(dtype: torch.dtype, *, padded: bool) -> tuple[Tensor, Tensor]:
    """Tokens, the first of one sequence hidden: what causality leaves of its first row."""
    x = torch.randn(B, S, E, generator=torch.Generator().manual_seed(1)).to(dtype)
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[1, : 3 if padded else 0] = False
    return x, mask


def attention_of(spec: GraphSpec | None) -> Node:
    assert spec is not None
    assert "softmax" not in ops(spec)
    (node,) = (node for node in spec.nodes if node.op == "sdpa")
    return node


@pytest.mark.parametrize("attend", FORMS, ids=lambda attend: attend.__name__)
def test_attention_as_models_write_it_is_one_op(attend: Callable[..., Tensor]) -> None:
    want = FORMS[attend]
    model, args = Model(attend).bfloat16().eval(), given(torch.bfloat16, padded=False)
    node = attention_of(import_model(model, args, kernels=True).spec)
    assert node.attr("scale") == pytest.approx(want["scale"], rel=1e-6)
    assert node.attr("softcap") == want.get("softcap")
    assert (node.inputs[-1] is not None) == want.get("sink", False)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attend", FORMS, ids=lambda attend: attend.__name__)
def test_attention_as_models_write_it_is_right(attend: Callable[..., Tensor], padded: bool) -> None:
    """The first rows of a padded sequence have nothing that they may attend to."""
    model, args = Model(attend).bfloat16().eval(), given(torch.bfloat16, padded=padded)
    report = cg.fuse(model, args).report
    assert report is not None and report.errors and report.errors[0][0] < 2e-2


def capped_and_scaled(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (2.0 * (3.0 * torch.tanh(q @ k.transpose(2, 3) / 3.0))).softmax(-1) @ v


def masked_and_capped(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(2, 3)).masked_fill(m.later, LEAST)
    return (torch.tanh(scores / 3.0) * 3.0).softmax(-1) @ v


def capped_from_below(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (-2.0 * torch.tanh(q @ k.transpose(2, 3) / 2.0)).softmax(-1) @ v


def sunk_in_front(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    whole = torch.cat([m.sinks.view(1, H, 1, 1).expand(B, H, S, 1), q @ k.transpose(2, 3)], 3)
    return whole.softmax(3)[:, :, :, 1:] @ v


def sunk_by_rows(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    sinks = m.sinks.view(1, H, 1, 1) * torch.arange(S).view(S, 1).to(q.dtype)
    whole = torch.cat([q @ k.transpose(2, 3), sinks.expand(B, H, S, 1)], 3)
    return whole.softmax(3)[..., :-1] @ v


def sunk_by_the_input(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    whole = torch.cat([q @ k.transpose(2, 3), q[..., :1]], 3)
    return whole.softmax(3)[..., :-1] @ v


def less_another_largest(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    whole = torch.cat([q @ k.transpose(2, 3), m.sinks.view(1, H, 1, 1).expand(B, H, S, 1)], 3)
    whole = whole - whole.max(dim=-2, keepdim=True).values
    return whole.softmax(3)[..., :-1] @ v


def of_other_rows(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Weights that are cut into other rows are others."""
    weights = (q @ k.transpose(2, 3)).softmax(-1)
    return weights.transpose(-1, -2).reshape(B * H, S, S).bmm(v.reshape(B * H, S, D)).view_as(v)


def of_a_part(m: Model, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As a lambda layer: softmax of one of several results, through a reshape."""
    part, _ = torch.cat([q @ k.transpose(2, 3), q], -1).split([S, D], -1)
    return part.softmax(-1).reshape(B * H, S, S).bmm(v.reshape(B * H, S, D)).view_as(v)


@pytest.mark.parametrize(
    "attend",
    [
        *(capped_and_scaled, masked_and_capped, capped_from_below, sunk_in_front, sunk_by_rows),
        *(sunk_by_the_input, less_another_largest, of_other_rows, of_a_part),
    ],
    ids=lambda attend: attend.__name__,
)
def test_what_is_not_quite_such_attention_stays_as_written(attend: Callable[..., Tensor]) -> None:
    model, args = Model(attend).bfloat16().eval(), given(torch.bfloat16, padded=False)
    spec = import_model(model, args, kernels=True).spec
    assert spec is not None and "sdpa" not in ops(spec) and "softmax" in ops(spec)
    report = cg.fuse(model, args).report
    assert report is not None and report.errors[0][0] < 2e-2
