"""Rows by their norms on a GPU: what is no ordinary row, by a plan, a torch step and a kernel."""

from __future__ import annotations

import math

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from tests import numerics

F16, BF16 = torch.float16, torch.bfloat16
SHAPE = (2, 2, 2, 64)
WAYS = {"plan": (256, 128, 64, 1), "columns": (4, 2, 1, 8), "torch": (4096, 1024, 128, 1)}


def unusual(dtype: torch.dtype) -> torch.Tensor:
    """Rows of zeros, of the least and of the largest numbers, with an infinity and with a NaN."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0.0
    x[1] = torch.finfo(dtype).smallest_normal if dtype == F16 else 1e-14
    x[2] = torch.finfo(dtype).max if dtype == F16 else 1e17
    x[3, 5] = math.inf
    x[4, 7] = math.nan
    x[5] *= 1e-5
    return x


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("way", WAYS)
def test_rows_that_are_not_ordinary_are_normalized_as_in_float64(
    dtype: torch.dtype, way: str, kernels: bool
) -> None:
    g = cg.Graph("normalize")
    g.output("y", g.normalize(g.input("x", SHAPE, dtype, stride=WAYS[way])))
    exe = g.compile(kernels=kernels)
    by_torch = way == "torch" and not kernels
    assert [step.choice is None for step in exe.steps] == [by_torch]
    x = torch.empty_strided(SHAPE, WAYS[way], dtype=dtype, device="cuda")
    x.copy_(unusual(dtype).view(SHAPE))
    (exact,) = reference.run(exe.spec, [x.cpu()], torch.float64)
    made, exact = exe(x).cpu().reshape(8, 64), exact.reshape(8, 64)
    finite = exact.isfinite()
    assert torch.equal(finite, made.isfinite())
    assert torch.equal(made[0], torch.zeros_like(made[0]))
    for row in (0, 1, 2, 5, 6, 7):
        numerics.check(made[row], exact[row], dtype, None, terms=64, what=f"row {row}")
    assert torch.equal(made[3].nan_to_num(), torch.zeros_like(made[3]))
