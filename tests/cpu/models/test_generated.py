"""What the importer leaves to torch, and declares where kernels are generated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.models.convert import import_model
from cudnngraph.settings import override


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
