"""Group norms through torch.compile: right, and in the layout of their images."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.errors import CannotImport
from cudnngraph.models import dynamo, group_norms
from cudnngraph.models.convert import convert
from tests import numerics
from tests.training import gradients

pytestmark = pytest.mark.usefixtures("forgotten")

Tensor = torch.Tensor
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


class Normed(nn.Module):
    """Norms behind convolutions: of groups, of all channels, and one whose bias alone is wanted."""

    def __init__(self, rank: int, affine: bool) -> None:
        super().__init__()
        conv: Any = nn.Conv2d if rank == 4 else nn.Conv3d
        self.first, self.second = conv(3, 8, 3, padding=1), conv(8, 8, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(4, 8, affine=affine), nn.GroupNorm(1, 8)
        self.last.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.first(x)))
        normed: Tensor = self.last(y + self.second(y))
        return normed


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("rank", [4, 5])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_group_norms_train(dtype: torch.dtype, rank: int, last: bool, affine: bool) -> None:
    torch.manual_seed(0)
    model = Normed(rank, affine).to(dtype)
    x = torch.randn(2, 3, *(6, 5, 4)[: rank - 2]).to(dtype)
    if last:
        form = torch.channels_last if rank == 4 else torch.channels_last_3d
        model, x = model.to(memory_format=form), x.contiguous(memory_format=form)
    by = torch.randn(2, 8, *x.shape[2:], dtype=torch.float64)
    exact = copy.deepcopy(model).double()
    ours: Any = torch.compile(model, backend="cudnngraph")
    found = gradients(model, ours, x.requires_grad_(), by)
    eager = gradients(model, model, x, by)
    wanted = gradients(exact, exact, x.detach().double().requires_grad_(), by)
    assert found[0].stride() == eager[0].stride()
    numerics.no_farther_than_eager(found, eager, wanted, dtype)
    reports = [each for each in cg.reports() if not each.refused]
    assert len(reports) == 2 and not any(each.opaque for each in reports)


@pytest.mark.parametrize("affine", [False, True])
def test_the_number_of_channels_may_be_left_open(affine: bool) -> None:
    """As behind a pixel_unshuffle of images whose sizes change."""
    norm = nn.GroupNorm(2, 16, affine=affine)
    model = nn.Sequential(nn.ReLU(), nn.PixelUnshuffle(2), norm)
    exact = copy.deepcopy(model).double()
    ours: Any = torch.compile(model, backend="cudnngraph", dynamic=True)
    for images, rows in ((1, 4), (2, 8)):
        x = torch.randn(images, 4, rows, 8)
        by = torch.randn(images, 16, rows // 2, 4, dtype=torch.float64)
        found = gradients(model, ours, x.requires_grad_(), by)
        eager = gradients(model, model, x, by)
        wanted = gradients(exact, exact, x.detach().double().requires_grad_(), by)
        numerics.no_farther_than_eager(found, eager, wanted, F32)
    assert not any(each.refused for each in cg.reports())


def test_autocast_casts_for_a_group_norm_as_torch_does() -> None:
    model, x = Normed(4, True), torch.randn(2, 3, 6, 5)
    ours: Any = torch.compile(model, backend="cudnngraph")
    with torch.autocast("cpu", BF16):
        y, want = ours(x), model(x)
    assert y.dtype == want.dtype
    numerics.check(y, want, BF16, terms=72)


def test_a_norm_keeps_its_layout_and_results_have_that_of_torch() -> None:
    """On a device that is no CPU torch's norms are contiguous."""
    kept: list[torch.fx.GraphModule] = []

    def noted(module: torch.fx.GraphModule, given: Any) -> Any:
        assert group_norms.Kept(module)
        kept.append(module)
        return module

    def normed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.group_norm(x, 2)
        return y, torch.group_norm(x, 2).relu(), F.conv2d(y, x.new_empty(4, 8, 1, 1))

    x = torch.empty(2, 8, 6, 5, device="meta").contiguous(memory_format=torch.channels_last)
    ours: Any = torch.compile(normed, backend=noted)
    strides = [each.stride() for each in ours(x)]
    assert strides == [each.stride() for each in normed(x)] and x.stride() not in strides[:2]
    called = [n.target for n in kept[0].graph.nodes if n.op == "call_function"]
    assert called.count(group_norms.group_norm) == 2
    assert group_norms.group_norm(x, 2, dtype=F32).stride() == x.stride()
    by = torch.empty_like(x, memory_format=torch.contiguous_format)
    leaf = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(group_norms.group_norm(leaf, 2, dtype=F32), leaf, by)
    assert dx.stride() == x.stride()


class InFloat32(nn.Module):
    """What autocast on a GPU makes of a norm between convolutions of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(n, 8, 3, padding=1).to(BF16) for n in (3, 8))
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(F.silu(self.norm(self.first(x).float())).to(BF16))
        return y


def test_what_a_norm_gives_is_computed_again_and_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward keeps what is normed and what convolutions read, in 16 bits, besides its result."""
    made: list[Any] = []

    def noted(*args: Any, **options: Any) -> Any:
        made.append(convert(*args, **options))
        return made[-1]

    monkeypatch.setattr(dynamo, "convert", noted)
    torch.manual_seed(0)
    model, x = InFloat32(), torch.randn(2, 3, 6, 5).to(BF16)
    exact = copy.deepcopy(model).double()
    exact.forward = lambda x: exact.second(F.silu(exact.norm(exact.first(x))))  # type: ignore[method-assign]
    by = torch.randn(2, 8, 6, 5, dtype=torch.float64)
    ours: Any = torch.compile(model, backend="cudnngraph")
    found = gradients(model, ours, x.requires_grad_(), by)
    eager = gradients(model, model, x, by)
    wanted = gradients(exact, exact, x.detach().double().requires_grad_(), by)
    numerics.no_farther_than_eager(found, eager, wanted, BF16)
    forward = made[0].spec
    images = [name for name in forward.outputs if forward.tensors[name].shape == (2, 8, 6, 5)]
    assert len(images) == 3 and all(forward.tensors[name].dtype == BF16 for name in images)


def test_views_that_only_contiguous_results_have_leave_torchs_norms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device that is no CPU eager has such a view of images that lie by channels."""

    def refused(*args: Any, **options: Any) -> Any:
        raise CannotImport("no graph of ours runs there")

    monkeypatch.setattr(dynamo, "convert", refused)

    def flat(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.group_norm(x, 2)
        return y.view(x.shape[0], -1), y

    x = torch.empty(2, 8, 6, 5, device="meta").contiguous(memory_format=torch.channels_last)
    ours: Any = torch.compile(flat, backend="cudnngraph")
    assert [each.stride() for each in ours(x)] == [each.stride() for each in flat(x)]
