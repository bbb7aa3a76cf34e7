"""Norms as functions and modules: numbers, gradients, sums, state dicts, mistakes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph import functional
from tests import numerics
from tests.samples import BF16, F16, F32, F64

EXACT = 1e-9

# Our function and torch's, of x and the parameters.
Run = Callable[..., Any]
KINDS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Run, Run]] = {
    "layer_norm": (
        (4, 6, 32),
        (32,),
        lambda x, w, b, **o: functional.layer_norm(x, (32,), w, b, 1e-6, **o),
        lambda x, w, b: F.layer_norm(x, (32,), w, b, 1e-6),
    ),
    "layer_norm of two dims": (
        (4, 6, 8),
        (6, 8),
        lambda x, w, b, **o: functional.layer_norm(x, (6, 8), w, b, **o),
        lambda x, w, b: F.layer_norm(x, (6, 8), w, b),
    ),
    "rms_norm": (
        (4, 6, 32),
        (32,),
        lambda x, w, b, **o: functional.rms_norm(x, (32,), w, 1e-6, bias=b, **o),
        lambda x, w, b: F.rms_norm(x, (32,), w, 1e-6) + (0 if b is None else b),
    ),
    "group_norm": (
        (3, 8, 5, 6),
        (8,),
        lambda x, w, b, **o: functional.group_norm(x, 4, w, b, **o),
        lambda x, w, b: F.group_norm(x, 4, w, b),
    ),
    "instance_norm": (
        (3, 8, 5, 6),
        (8,),
        lambda x, w, b, **o: functional.instance_norm(x, w, b, **o),
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    ),
}


def leaves(shape: Sequence[int], *vectors: Sequence[int], dtype: torch.dtype = F64) -> list[Any]:
    gen = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=gen, dtype=F64).to(dtype) for size in (shape, *vectors)]
    return [value.requires_grad_() for value in made]


def same(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert float((a - b).detach().abs().max()) < EXACT


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_and_its_gradients_are_torchs(kind: str, affine: bool) -> None:
    shape, vector, ours, theirs = KINDS[kind]
    given = leaves(shape, vector, vector) if affine else leaves(shape)
    params = given[1:] or [None, None]
    y, want = ours(given[0], *params), theirs(given[0], *params)
    dy = torch.randn(want.shape, dtype=F64)
    same([y], [want])
    same(torch.autograd.grad(y, given, dy), torch.autograd.grad(want, given, dy))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_a_residual_the_sum_comes_too_and_both_have_gradients(
    kind: str, activation: str | None
) -> None:
    shape, vector, ours, theirs = KINDS[kind]
    given = leaves(shape, vector, vector)
    z = torch.randn(shape, dtype=F64, requires_grad=True)
    y, total = ours(given[0], *given[1:], residual=z, activation=activation)
    want = theirs(given[0] + z, *given[1:])
    want = F.silu(want) if activation else want
    same([y, total], [want, given[0] + z])
    dy, dsum = (torch.randn(shape, dtype=F64) for _ in range(2))
    found = torch.autograd.grad([y, total], [*given, z], [dy, dsum])
    right = torch.autograd.grad([want, given[0] + z], [*given, z], [dy, dsum])
    same(found, right)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("params", ["own", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_is_as_good_as_torchs_at_every_dtype(
    kind: str, params: str, dtype: torch.dtype
) -> None:
    shape, vector, ours, theirs = KINDS[kind]
    x = leaves(shape, dtype=dtype)[0].detach()
    vectors = [torch.rand(vector).add(0.5).to(dtype if params == "own" else F32) for _ in "wb"]
    y = ours(x, *vectors)
    exact = theirs(x.double(), *(v.double() for v in vectors))
    torchs = (
        theirs(x, *vectors) if params == "own" else theirs(x.float(), *(v.float() for v in vectors))
    )
    assert y.dtype == dtype
    numerics.check(y, exact, dtype, torchs.to(dtype))


@pytest.mark.parametrize("dtype", [F64, F32, torch.float16, torch.bfloat16], ids=str)
def test_rms_norms_epsilon_is_torchs_where_none_is_given(dtype: torch.dtype) -> None:
    """The epsilon is that of the dtype it computes in, not the data's (bfloat16's is 1/128)."""
    x = torch.full((2, 8), 1e-4, dtype=dtype)
    want = F.rms_norm(x, (8,))
    torch.testing.assert_close(functional.rms_norm(x, (8,)), want)


def test_the_weight_has_the_normalized_shape() -> None:
    x, w = torch.randn(2, 8), torch.randn(4)
    for run in (functional.layer_norm, functional.rms_norm):
        with pytest.raises(cg.GraphError) as error:
            run(x, (8,), w)
        assert "weight has shape (4,); expected (8,), the normalized_shape" in str(error.value)


def test_groups_have_to_divide_the_channels() -> None:
    with pytest.raises(cg.GraphError) as error:
        functional.group_norm(torch.randn(2, 8, 3), 3)
    says = "x has shape (2, 8, 3), num_groups=3; expected (N, C, ...) with C % num_groups == 0"
    assert says.replace("x has", "x 'x' has") in str(error.value)


# -- modules ---------------------------------------------------------------------------------------

MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "layer": (lambda: nn.LayerNorm(16, dtype=F64), cg.FusedLayerNorm),
    "layer without bias": (lambda: nn.LayerNorm((4, 16), bias=False, dtype=F64), cg.FusedLayerNorm),
    "layer without affine": (
        lambda: nn.LayerNorm(16, 1e-3, elementwise_affine=False),
        cg.FusedLayerNorm,
    ),
    "rms": (lambda: nn.RMSNorm(16, dtype=F64), cg.FusedRMSNorm),
    "rms without affine": (
        lambda: nn.RMSNorm((4, 16), 1e-3, elementwise_affine=False),
        cg.FusedRMSNorm,
    ),
}


def module(name: str) -> tuple[nn.Module, Any]:
    make, kind = MODULES[name]
    theirs = make()
    for parameter in theirs.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return theirs, kind


@pytest.mark.parametrize("name", MODULES)
def test_from_torch_shares_the_parameters_and_gives_the_same(name: str) -> None:
    theirs, kind = module(name)
    ours = kind.from_torch(theirs.eval())
    assert [id(p) for p in ours.parameters()] == [id(p) for p in theirs.parameters()]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert not ours.training and ours.extra_repr() == theirs.extra_repr()
    x, z = (torch.randn(3, 4, 16, dtype=F64, requires_grad=True) for _ in range(2))
    total = x + z
    same([ours(x), *ours(x, z)], [theirs(x), theirs(total), total])
    found = torch.autograd.grad(sum(v.square().sum() for v in ours(x, z)), [x, z])
    right = torch.autograd.grad(sum(v.square().sum() for v in (theirs(total), total)), [x, z])
    same(found, right)


@pytest.mark.parametrize("name", MODULES)
def test_state_dicts_go_both_ways(name: str) -> None:
    theirs, kind = module(name)
    ours = copy.deepcopy(kind.from_torch(theirs))
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 4, 16, dtype=F64)
    same([ours(x)], [theirs(x)])


@pytest.mark.parametrize("kind", [cg.FusedLayerNorm, cg.FusedRMSNorm])
def test_a_block_of_norms_compiles_without_a_break(kind: Any) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = kind(16, dtype=F64), kind(16, dtype=F64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, total = self.second(self.first(x), x)
            return y * total

    block = Block()
    x = torch.randn(3, 16, dtype=F64, requires_grad=True)
    fast = torch.compile(block, fullgraph=True, backend="aot_eager")
    of = [x, *block.parameters()]
    y, want = fast(x), block(x)
    same([y], [want])
    same(torch.autograd.grad(y.sum(), of), torch.autograd.grad(want.sum(), of))
