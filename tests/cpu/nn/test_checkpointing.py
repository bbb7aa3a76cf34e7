"""Blocks whose forward is computed again in a backward: torch's numbers, gradients and counts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cudnngraph as cg
from tests import numerics

F32 = torch.float32
LEAST = numerics.bound(F32, terms=4 * 36 * 27)


class Checkpointed(nn.Module):
    """Two layers of which nothing between is kept."""

    def __init__(self, body: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return y


def layers(momentum: float | None) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU()),
        *(
            nn.Conv2d(8, 8, 3, groups=8, bias=False),
            nn.BatchNorm2d(8, momentum=momentum),
            nn.ReLU(),
        ),
        *(nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU()),
    )


def replaced(theirs: nn.Sequential) -> nn.Module:
    ours = copy.deepcopy(theirs)
    assert len(cg.nn.replace(ours).swapped) == 3
    return ours


def separable(theirs: nn.Sequential) -> nn.Module:
    """The first layer as a block, the other two as one."""
    own = copy.deepcopy(theirs)
    blocks = [cg.FusedConvBlock.from_torch(*own[at : at + 3]) for at in (0, 3, 6)]
    return nn.Sequential(blocks[0], cg.FusedDepthwiseSeparable.from_blocks(*blocks[1:]))


def trained(body: nn.Module, reentrant: bool) -> list[torch.Tensor]:
    """Gradients, statistics and counts of two steps."""
    model, found = Checkpointed(body, reentrant=reentrant), []
    dtype = next(body.parameters()).dtype
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(4, 3, 8, 8).to(dtype).requires_grad_()
        y = model(x)
        y.backward(torch.randn(y.shape).to(dtype))
        assert x.grad is not None
        found.append(x.grad)
    grads = [p.grad for p in body.parameters() if p.grad is not None]
    assert len(grads) == 9
    return [*found, *grads, *body.buffers()]


@pytest.mark.parametrize("make", [replaced, separable])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("reentrant", [False, True])
def test_norms_count_a_recomputed_batch_as_torchs_do(
    reentrant: bool, momentum: float | None, make: Callable[[nn.Sequential], nn.Module]
) -> None:
    torch.manual_seed(0)
    theirs = layers(momentum)
    wide = copy.deepcopy(theirs).double()
    found = [trained(body, reentrant) for body in (make(theirs), theirs, wide)]
    for mine, torchs, want in zip(*found, strict=True):
        if want.dim():
            off = numerics.TORCH_FACTOR * numerics.relative_error(torchs, want)
            assert numerics.relative_error(mine, want) <= max(off, LEAST)
        else:
            assert int(mine) == int(want) == 4


def test_a_call_that_is_refused_is_not_counted() -> None:
    for make in (replaced, separable):
        ours = make(layers(None))
        counts = [b for b in ours.buffers() if not b.dim()]
        with pytest.raises((cg.CudnnGraphError, RuntimeError)):
            ours(torch.zeros(1, 3, 2, 2))
        assert [int(count) for count in counts] == [0] * 3
