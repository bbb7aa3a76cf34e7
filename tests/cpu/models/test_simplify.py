"""What a model computes twice, or for nothing, is computed once, or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.errors import CannotImport
from cudnngraph.models.convert import import_model
from tests import numerics


class Repeats(nn.Module):
    """The same activation of the same tensor for each of three uses, and factors of one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(x) @ x + F.silu(x) * 1.0 + F.silu(x) / 1
        return y - 0 + x.sum() * torch.ones(()).item()


class Returns(nn.Module):
    """Results that are equal, and are tensors of their own."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.relu(x), F.relu(x), x * 1


class Different(nn.Module):
    """What looks alike and is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = F.leaky_relu(x, 0.1), F.leaky_relu(x, 0.2)
        whole = torch.arange(3) * 1.0
        return torch.cat([a, b]) + whole + F.softmax(x, 0).sum(1) - F.softmax(x, 1).sum(0)


def ops(model: nn.Module, x: torch.Tensor) -> list[str]:
    spec = import_model(model, (x,)).spec
    assert spec is not None
    return [node.op for node in spec.nodes]


def test_the_same_of_the_same_is_computed_once() -> None:
    made = ops(Repeats(), torch.randn(3, 3))
    assert made.count("silu") == 1
    assert not {"div", "sub"} & set(made)


def test_equal_results_stay_two_tensors() -> None:
    assert ops(Returns(), torch.randn(3)).count("relu") == 2


@pytest.mark.parametrize("model", [Repeats(), Different()], ids=lambda m: type(m).__name__)
def test_a_model_computes_the_same(model: nn.Module) -> None:
    x = torch.randn(3, 3)
    assert torch.allclose(cg.fuse(model.eval(), x)(x), model(x), rtol=1e-5, atol=1e-5)


class Views(nn.Module):
    """Views of a whole tensor as it lies, and one that lies otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.expand(3, 3).permute(0, 1).view(3, 3).reshape(3, -1)
        return whole + whole.permute(1, 0)


def test_a_view_of_all_of_a_tensor_is_the_tensor() -> None:
    assert ops(Views(), torch.randn(3, 3)) == ["permute", "add"]


class Chooses(nn.Module):
    """Views of what has as many rows and columns as numbers in a tensor say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = (x.sum(dim) > 0 for dim in (1, 0))
        return x[rows][:, columns].permute(1, 0).exp()


def test_sizes_that_follow_from_numbers_are_not_compared() -> None:
    """torch refuses to compare them, by an error of its own."""
    with pytest.raises(CannotImport, match="shape of its result depends on the numbers"):
        import_model(Chooses(), (torch.ones(3, 4),))


class Tokens(nn.Module):
    """Tokens in front of an image's, some of which there are none of, and a cache of no keys."""

    def __init__(self, registers: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.registers = nn.Parameter(torch.randn(1, registers, 8))
        self.key = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = (each.expand(len(x), -1, -1) for each in (self.first, self.registers))
        y = torch.cat([*tokens, x], 1)
        past = torch.tensor([], dtype=x.dtype, device=x.device)
        wide = torch.cat([y.half(), y.new_zeros(2, 0, 8)], 1)  # of the wider dtype
        keys = torch.cat([past, self.key(y)], -2)
        return keys.softmax(-1), keys, torch.cat([past, x]), wide


@pytest.mark.parametrize("registers", [0, 2])
def test_what_is_empty_is_not_concatenated(registers: int) -> None:
    model, x = Tokens(registers).eval(), torch.randn(2, 3, 8)
    spec = import_model(model, (x,)).spec
    assert spec is not None
    assert all(tensor.numel for tensor in spec.tensors.values())
    with torch.no_grad():
        theirs, ours, wide = model(x), cg.fuse(model, x)(x), model.double()(x.double())
    assert [(x.dtype, x.stride()) for x in ours] == [(x.dtype, x.stride()) for x in theirs]
    assert numerics.relative_error(ours[3], wide[3]) <= numerics.bound(torch.float16)
    for one, other, exact in zip(ours[:3], theirs, wide, strict=False):
        numerics.check(one, exact, torch.float32, other)
