"""A mixture of experts in plain torch, as models of transformers have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.models import check

Tensor = torch.Tensor


class Experts(nn.Module):
    """A router and gated experts. ``how`` they run can be set, as of models of transformers."""

    def __init__(
        self, width: int, inner: int, experts: int, top: int, how: str = "grouped_mm"
    ) -> None:
        super().__init__()
        torch.manual_seed(width + experts)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 2 * inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, inner) / inner**0.5)
        self.top, self.how = top, how

    def get_experts_implementation(self) -> dict[str, str]:
        """By part of the model."""
        return {"": self.how}

    def set_experts_implementation(self, how: dict[str, str]) -> None:
        """By part of the model."""
        self.how = how[""]

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, width) and what its experts make of it."""
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = F.softmax(self.router(rows).float(), -1).topk(self.top, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        run = self._grouped if self.how == "grouped_mm" else self._looped
        return x + run(rows, weights, chosen).view_as(x)

    def _grouped(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        expert, order = chosen.reshape(-1).sort()
        counts = torch.histc(expert.float(), len(self.up), 0, len(self.up) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = F.grouped_mm(rows[order // self.top], self.up.transpose(1, 2), offs=ends)
        gate, up = inner.chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        made = made * weights.reshape(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return made[back].view(len(rows), self.top, -1).sum(1)

    def _looped(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(rows)
        mask = F.one_hot(chosen, len(self.up)).permute(2, 1, 0)
        for (each,) in (mask.sum((-1, -2)) > 0).nonzero():
            place, token = torch.where(mask[each])
            gate, up = F.linear(rows[token], self.up[each]).chunk(2, -1)
            own = F.linear(F.silu(gate) * up, self.down[each]) * weights[token, place, None]
            made.index_add_(0, token, own)
        return made


@torch.no_grad()
def both(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The model's own result, and the one in float64."""
    own = model(x)
    wide = check.in_wide(model, (x,), {}, [own])
    assert wide is not None
    return own, wide[0]
