"""Largest elements within graphs of torch.compile, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import cudnngraph as cg
from tests import generated
from tests.fused import compiled
from tests.training import trained

GENERATES = cg.Policy(kernels=True)
ROWS = (6, 7)


@pytest.fixture(autouse=True)
def _new_compiler() -> None:
    torch._dynamo.reset()


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "amax": lambda x: (x + 1 / 3).amax(1),
    "of all": lambda x: (x + 1 / 3).max() - (x * 1.7).min(),
    "of products": lambda x: (x @ x.T).aminmax(dim=1)[0],
    "norm": lambda x: (x * 1.1).norm(math.inf, 1),
    "the larger": lambda x: torch.maximum(x * 1.1, x.flip(0) * 1.1),
    "alike": lambda x: x * (x.exp() == x.exp().amax(1, keepdim=True)),
}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_in_16_bits_equals_the_largest_of_it(
    name: str, dtype: torch.dtype, kernels: bool
) -> None:
    """Though the one is kept in 16 bits and the other is not: gradients are divided by how many."""
    torch.manual_seed(0)
    x = torch.randn(ROWS).to(dtype)
    run = compiled(COMPUTED[name], policy=cg.Policy(kernels=kernels), check=False)
    for mine, own in zip(trained(run, x), trained(COMPUTED[name], x), strict=True):
        torch.testing.assert_close(mine, own)


@pytest.mark.parametrize("name", ["amax", "of products", "alike"])
def test_kernels_find_the_largest_of_16_bits_equal_to_itself(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated.install(monkeypatch)
    torch.manual_seed(0)
    x = torch.randn(ROWS).bfloat16()
    run = compiled(COMPUTED[name], policy=GENERATES, check=False)
    for mine, own in zip(trained(run, x), trained(COMPUTED[name], x), strict=True):
        torch.testing.assert_close(mine, own)
