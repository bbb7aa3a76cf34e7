"""Training of a function by the backend of torch.compile, beside torch and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.ops.table import OPS
from tests import numerics
from tests.fused import compiled

Function = Callable[..., torch.Tensor]


def left_to_torch() -> list[str]:
    """The ops that are torch's own in the graphs of this test."""
    found = cg.reports()
    assert found and not any(report.refused for report in found), list(map(str, found))
    return [name for report in found for name, _ in report.opaque]


def torch_steps() -> list[list[str]]:
    """The ops of each step of this test's graphs that torch runs, but for views."""
    steps = [step.spec.nodes for report in cg.reports() for step in report.steps if not step.choice]
    named = [[node.op for node in nodes if not OPS[node.op].view] for nodes in steps]
    return [each for each in named if each]


def trained(call: Function, *data: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    """The result and the gradients of what floats, with random numbers of a seed."""
    given = [x.detach().requires_grad_(x.is_floating_point()) for x in data]
    torch.manual_seed(seed)
    y = call(*given)
    scale = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scale = scale.to(y.device)
    wanted = [x for x in given if x.requires_grad]
    return [y.detach(), *torch.autograd.grad((y * scale.to(y.dtype)).sum(), wanted)]


def alike(
    function: Function, *data: torch.Tensor, dtype: torch.dtype = torch.float32, **options: Any
) -> list[str]:
    """Train a function by the backend, compare with float64, and return what is left to torch.

    ``dtype`` is the coarsest that the function computes in.
    """
    found = trained(compiled(function, **options), *data)
    own = trained(function, *data)
    wide = [x.double() if x.is_floating_point() else x for x in data]
    for mine, torchs, exact in zip(found, own, trained(function, *wide), strict=True):
        assert mine.shape == torchs.shape and mine.dtype == torchs.dtype
        numerics.check(mine, exact, dtype, torchs, terms=64)
    return left_to_torch()


def gradients(
    model: nn.Module, run: Function, x: torch.Tensor, by: torch.Tensor
) -> list[torch.Tensor]:
    """What ``run`` makes of x by a model, and the gradients of ``(result * by).sum()`` of x and of
    the parameters that want one."""
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    y = run(x)
    return [y, *torch.autograd.grad((y.double() * by).sum(), leaves)]
