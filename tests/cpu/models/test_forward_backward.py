"""What a forward keeps for its backward: less than torch's ops say, and the gradients are right."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.models import dynamo, forward_backward
from cudnngraph.models.convert import convert
from tests import numerics
from tests.training import gradients

pytestmark = pytest.mark.usefixtures("forgotten")

Tensor = torch.Tensor
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
_partitioners: Any = import_module("torch._functorch.partitioners")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are imported: the backward, then the forward, or as they are compiled."""
    made: list[Any] = []

    def noted(*args: Any, **options: Any) -> Any:
        made.append(convert(*args, **options))
        return made[-1]

    monkeypatch.setattr(dynamo, "convert", noted)
    return made


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "gelu of a sum": lambda x: F.gelu(x + 1.5),
    "mish": F.mish,
    "elu": F.elu,
    "softplus": F.softplus,
    "hardsigmoid": lambda x: x * F.hardsigmoid(x),
    "a gate": lambda x: F.silu(x) * x.mean((2, 3), keepdim=True).sigmoid(),
    "read twice": lambda x: F.silu(x) + x.mul(0.5).tanh(),
}


class Normed(nn.Module):
    """Two convolutions, a batch norm and an activation behind each."""

    def __init__(self, rank: int, act: Callable[[Tensor], Tensor], affine: bool = True) -> None:
        super().__init__()
        conv: Any = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[rank]
        norm: Any = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[rank]
        self.first, self.second = (conv(n, 8, 3, padding=1, bias=False) for n in (3, 8))
        self.norms = nn.ModuleList([norm(8, affine=affine) for _ in range(2)])
        self.last, self.act = conv(8, 4, 1), act

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norms[0](self.first(x)))
        y: Tensor = self.last(self.act(self.norms[1](self.second(x))))
        return y


def compared(model: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    """Gradients and buffers through torch.compile are as near to float64 as eager's."""
    exact, theirs = copy.deepcopy(model).double(), copy.deepcopy(model)
    ours: Any = torch.compile(model, backend="cudnngraph")
    by = torch.randn(model(x).shape, dtype=torch.float64)
    for each in (model, theirs, exact):  # the call above has counted
        for module in each.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.reset_running_stats()
    found = gradients(model, ours, x.requires_grad_(), by)
    eager = gradients(theirs, theirs, x, by)
    wanted = gradients(exact, exact, x.detach().double().requires_grad_(), by)
    found, eager, wanted = (
        [*made, *each.buffers()]
        for made, each in ((found, model), (eager, theirs), (wanted, exact))
    )
    numerics.no_farther_than_eager(found, eager, wanted, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_what_a_batch_norm_gives_is_computed_again(
    kind: str, dtype: torch.dtype, graphs: list[Any]
) -> None:
    """A forward keeps what is normed and what the next convolution reads."""
    torch.manual_seed(0)
    model = Normed(4, ACTIVATIONS[kind]).to(dtype)
    model.norms.float()  # as autocast leaves them
    compared(model, torch.randn(4, 3, 6, 5).to(dtype), dtype)
    forward = graphs[0].spec
    assert {node.op for node in forward.nodes} >= {"batch_norm_train"}
    sizes = [math.prod(forward.tensors[name].shape) for name in forward.outputs]
    assert sizes.count(4 * 8 * 6 * 5) == 4


@pytest.mark.parametrize("rank", [3, 5])
@pytest.mark.parametrize("affine", [True, False])
def test_of_any_rank(rank: int, affine: bool) -> None:
    torch.manual_seed(0)
    model = Normed(rank, F.silu, affine)
    compared(model, torch.randn(4, 3, *(6, 5, 4)[: rank - 2]), F32)


def test_by_channels_and_with_sizes_that_change() -> None:
    torch.manual_seed(0)
    model = Normed(4, F.silu).to(memory_format=torch.channels_last)
    for size in (6, 7, 9):
        x = torch.randn(2, 3, size, 5).contiguous(memory_format=torch.channels_last)
        compared(model, x, F32)


class Read(nn.Module):
    """A batch norm that a convolution reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(self.norm(F.gelu(x)))
        return y


def test_what_a_convolution_reads_is_kept(graphs: list[Any]) -> None:
    """Its gradient needs that in memory. GELU in front of the norm is computed again."""
    torch.manual_seed(0)
    compared(Read(), torch.randn(4, 8, 6, 5), F32)
    forward, backward = (made.spec for made in graphs[:2])
    kept = [n for n in forward.outputs if forward.tensors[n].shape == (4, 8, 6, 5)]
    assert len(kept) == 1
    (made,) = (node for node in forward.nodes if kept[0] in node.results)
    assert made.op == "batch_norm_train"
    assert "gelu" in {node.op for node in backward.nodes}


def test_a_norm_in_evaluation_is_as_torch_traces_it() -> None:
    torch.manual_seed(0)
    model = Normed(4, F.silu)
    for norm in model.norms:
        norm.eval()
    compared(model, torch.randn(4, 3, 6, 5), F32)


def test_a_norm_of_float32_in_front_of_16_bits_keeps_16_bits(graphs: list[Any]) -> None:
    """What is widened for a layer norm is widened again for its gradient."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (nn.Linear(16, 16).to(BF16) for _ in range(2))
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.norm(self.first(x).float()).to(BF16))
            return y

    torch.manual_seed(0)
    model, x = Rows(), torch.randn(6, 16).to(BF16).requires_grad_()
    torch.compile(model, backend="cudnngraph")(x).sum().backward()
    forward = graphs[0].spec
    rows = [n for n in forward.outputs if forward.tensors[n].shape == (6, 16)]
    assert len(rows) == 3 and all(forward.tensors[name].dtype == BF16 for name in rows)


def test_torchs_lists_are_its_own_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it fails; and a torch without them parts graphs as it does."""
    theirs = _partitioners.get_default_op_list
    with pytest.raises(ZeroDivisionError), forward_backward._told():
        found, before = _partitioners.get_default_op_list(), theirs()
        assert found.fusible_ops > before.fusible_ops
        assert found.recomputable_ops > before.recomputable_ops
        raise ZeroDivisionError
    assert _partitioners.get_default_op_list is theirs
    monkeypatch.delattr(_partitioners, "get_default_op_list")
    with forward_backward._told():
        assert not hasattr(_partitioners, "get_default_op_list")
