"""Every module in every dtype, forward and backward, beside torch's modules in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from tests import numerics
from tests.samples import BF16, F16, F32, F64

Make = Callable[[], tuple[nn.Module, nn.Module, tuple[int, ...]]]


def block(transposed: bool, norm: bool, training: bool) -> Make:
    def make() -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        kind: Any = nn.ConvTranspose2d if transposed else nn.Conv2d
        # A bias in front of a norm by the batch changes nothing: its gradient is rounding. A ReLU
        # has another gradient where rounding changes a sign.
        bias = not (norm and training)
        parts = [
            kind(8, 6, 3, stride=2, bias=bias),
            *([nn.BatchNorm2d(6)] if norm else []),
            nn.SiLU(),
        ]
        if norm:
            parts[1].running_mean.normal_()
            parts[1].running_var.uniform_(0.5, 2.0)
        plain = nn.Sequential(*parts).train(training)
        owner: Any = cg.FusedConvTransposeBlock if transposed else cg.FusedConvBlock
        conv, *rest = copy.deepcopy(plain)
        ours = owner.from_torch(conv, rest[0] if norm else None, rest[-1])
        return ours.train(training), plain, (2, 8, 7, 9)

    return make


class Attention(nn.Module):
    """torch's, of the parameters of ours."""

    def __init__(self, of: cg.FusedMultiheadAttention) -> None:
        super().__init__()
        self.of = copy.deepcopy(of)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, (batch, length, _) = self.of, x.shape
        packed = F.linear(x, m.in_proj_weight, m.in_proj_bias)
        split = packed.view(batch, length, 3 * m.num_heads, m.head_dim).transpose(1, 2)
        o = F.scaled_dot_product_attention(*split.chunk(3, 1), is_causal=True)
        return m.out_proj(o.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


def attention() -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
    ours = cg.FusedMultiheadAttention(16, 4, causal=True)
    return ours, Attention(ours), (2, 6, 16)


def norm(kind: type[nn.Module], plain: type[nn.Module], **options: Any) -> Make:
    def make() -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        right: Any = plain(16, **options)
        nn.init.normal_(right.weight)
        ours: Any = kind
        return ours.from_torch(copy.deepcopy(right)), right, (3, 5, 16)

    return make


def mlp() -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
    plain = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
    return cg.FusedMLP.from_torch(copy.deepcopy(plain)), plain, (3, 5, 16)


MODULES: dict[str, Make] = {
    "conv": block(False, norm=False, training=True),
    "conv, norm by the batch": block(False, norm=True, training=True),
    "conv, norm by running statistics": block(False, norm=True, training=False),
    "transposed": block(True, norm=False, training=True),
    "transposed, norm by the batch": block(True, norm=True, training=True),
    "transposed, norm by running statistics": block(True, norm=True, training=False),
    "attention": attention,
    "layer norm": norm(cg.FusedLayerNorm, nn.LayerNorm),
    "rms norm": norm(cg.FusedRMSNorm, nn.RMSNorm),
    "rms norm, eps": norm(cg.FusedRMSNorm, nn.RMSNorm, eps=1e-3),
    "mlp": mlp,
}


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_results_and_gradients_are_within_the_policy(name: str, dtype: torch.dtype) -> None:
    """Compared with float64 on weights and data rounded to the dtype, and with torch's own."""
    torch.manual_seed(0)
    ours, plain, shape = MODULES[name]()
    ours, plain = ours.to(dtype), plain.to(dtype)
    exact = copy.deepcopy(plain).double()
    x = torch.randn(shape).to(dtype)
    found = []
    for module in (ours, exact, plain):
        kept = next(module.parameters()).dtype
        leaf = x.to(kept).requires_grad_()
        y = module(leaf)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(kept)
        parameters = list(module.parameters())
        found.append([y.detach(), *torch.autograd.grad(y, [leaf, *parameters], grad)])
        found[-1] += [b for b in module.buffers() if b.is_floating_point()]
    for made, want, torchs in zip(*found, strict=True):
        assert made.dtype == dtype
        numerics.check(made, want, dtype, torchs, terms=256)
