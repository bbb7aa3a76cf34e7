"""Tensors of the CPU beside those of a GPU, as torch takes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.models.dynamo import backend
from tests import numerics

F32 = torch.float32


class Mixed(nn.Module):
    """Indices, a number and a count of the CPU, which ``cuda()`` does not move."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)
        self.at, self.scale, self.count = (
            torch.tensor([2, 0, 5]),
            torch.tensor(0.5),
            torch.tensor(3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.layer.weight.device)
        return self.scale * self.layer(x)[:, self.at] * self.count


def both() -> tuple[Mixed, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = Mixed().eval().cuda()
    exact = copy.deepcopy(model).double()
    exact.scale = exact.scale.double()
    return model, exact, torch.randn(4, 16)


def test_a_fused_model_reads_what_it_holds_on_the_cpu() -> None:
    model, exact, x = both()
    fused = cg.fuse(model, x.cuda(), check=False)
    numerics.check(fused(x.cuda()), exact(x.cuda().double()), F32, terms=16)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_model_trains_with_what_it_holds_and_gets_on_the_cpu(mode: str | None) -> None:
    model, exact, x = both()
    options = {} if mode is None else {"mode": mode}
    compiled = torch.compile(model, backend=lambda m, i: backend(m, i, **options))
    for _ in range(4):  # the third is recorded with "reduce-overhead"
        model.zero_grad()
        exact.zero_grad()
        y = compiled(x)
        want = exact(x.double())
        numerics.check(y, want, F32, terms=16)
        y.square().sum().backward()
        want.square().sum().backward()
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            numerics.check(ours.grad, theirs.grad, F32, terms=16)


def test_results_that_a_model_copies_to_the_cpu_are_there() -> None:
    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, (x + 1).cpu()

    x = torch.randn(3, 5, device="cuda")
    for run in (cg.fuse(Counted().eval(), x), torch.compile(Counted(), backend=backend)):
        twice, more = run(x)
        assert (twice.device, more.device) == (x.device, torch.device("cpu"))
        numerics.check(twice, x.double() * 2, F32)
        numerics.check(more, x.double().cpu() + 1, F32)
