"""What the importer leaves to torch, and declares where kernels are generated."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.models.convert import import_model
from cudnngraph.settings import override
from tests import generated, numerics
from tests.models import Of


class Gate(nn.Module):
    """Squeeze and excitation behind a group norm of small images; means with and without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)
        self.down, self.up = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(x))
        gate = self.up(F.relu(self.down(x.mean((2, 3), keepdim=True))))
        x = x * torch.sigmoid(gate)
        return F.adaptive_avg_pool2d(x, 1).flatten(1) + x.mean((-2, -1)) + x.mean(2).mean(-1)


def ops_of(model: nn.Module, *, kernels: bool) -> list[str]:
    x = torch.randn(2, 16, 6, 6).half()
    spec = import_model(model.half().eval(), (x,), kernels=kernels).spec
    assert spec is not None
    return [node.op for node in spec.nodes]


def test_norms_and_means_are_ops_of_ours_where_kernels_are_generated() -> None:
    assert ops_of(Gate(), kernels=False).count("aten") == 6
    left = ops_of(Gate(), kernels=True)
    assert left.count("aten") == 0
    assert (left.count("group_affine"), left.count("reduction"), left.count("cast")) == (1, 5, 1)


MIXED: dict[str, Callable[..., torch.Tensor]] = {
    "mask": lambda x, b, i: x * b,
    "mask_in_place": lambda x, b, i: x.clone().mul_(b[0]),
    "masks": lambda x, b, i: torch.where((b * (x > 0)) + (x < -1), x, -x),
    "finite": lambda x, b, i: torch.where(torch.isfinite(x), x, 0.0),
    "whole": lambda x, b, i: x * i + i / 3 - torch.sub(x, i, alpha=0.5),
    "compared": lambda x, b, i: torch.where(x > i, x, x + 1),
    "filled": lambda x, b, i: x.masked_fill(b, x.max()) - x.min(),
    "positions": lambda x, b, i: x * b.int().cumsum(1),
    "hashed": lambda x, b, i: x * ((-i) % 3) * ((i & 1) == b),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bools_and_whole_numbers_beside_floats_are_no_torch_steps(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, b, i = torch.randn(4, 9).to(dtype), torch.rand(4, 9) < 0.5, torch.randint(-3, 7, (9,))
    x[0, :3] = torch.tensor([math.inf, math.nan, -math.inf]) if name == "finite" else 0.0
    function = MIXED[name]
    kernels = generated.install(monkeypatch)
    with override(kernels=True):
        model = Of(lambda m, *args: function(*args)).eval()
        fused = cg.fuse(model, (x, b, i))
        made = fused(x, b, i)
    executable = fused.bound(x, b, i).executable
    assert executable is not None and kernels
    assert {step.kind for step in executable.steps} == {"kernel"}
    wide = x.double() if dtype == torch.float32 else x.float()
    wanted, own = function(wide, b, i), function(x, b, i)
    assert made.dtype == own.dtype
    numerics.check(made, wanted.double(), dtype, own, terms=4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("by", ["policy", "setting"])
def test_a_model_computes_the_same(by: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = Gate().eval().half()
    x = torch.randn(2, 16, 6, 6).half().to(memory_format=layout)
    with override(kernels=by == "setting"):
        fused = cg.fuse(model, x, policy=cg.Policy(kernels=True) if by == "policy" else None)
        made = fused(x)
    wanted = Gate().eval().double()
    wanted.load_state_dict(model.state_dict())
    exact = wanted(x.double())
    off = (made.double() - exact).norm() / exact.norm()
    assert off <= 2 * (model(x).double() - exact).norm() / exact.norm() + 1e-3
