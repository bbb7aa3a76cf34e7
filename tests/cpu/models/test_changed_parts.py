"""A fused model follows hooks of its model, and parts that come to stand within it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from tests import numerics


class Head(nn.Module):
    """A model with places for parts that are not there yet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.more = nn.ModuleList()
        self.inner = nn.Sequential()
        self.size: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = tuple(x.shape[1:])
        y = self.norm(self.first(x))
        for each in (*self.more, *self.inner.children()):
            y = each(y)
        return y + self.late if hasattr(self, "late") else y


def hooked(model: Any) -> None:
    model.first.register_forward_hook(lambda module, args, result: result * 2)


def hooked_before(model: Any) -> None:
    model.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def hooked_as_a_whole(model: Any) -> None:
    model.register_forward_hook(lambda module, args, result: result * 2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook": hooked,
    "a hook before": hooked_before,
    "a hook of the whole": hooked_as_a_whole,
    "a first layer": lambda model: model.more.append(nn.Linear(8, 8)),
    "a first child": lambda model: model.inner.add_module("child", nn.Linear(8, 8)),
    "a first buffer": lambda model: model.register_buffer("late", torch.ones(8)),
    "memory": lambda model: setattr(model.first.weight, "data", torch.randn(8, 8)),
}


def assert_as_near(found: torch.Tensor, model: Any, x: torch.Tensor) -> None:
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        numerics.check(found, wide(x.double()), torch.float32, model(x), terms=64)


def head() -> Any:
    torch.manual_seed(0)
    return Head().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_followed_at_the_next_call(name: str, x: torch.Tensor) -> None:
    model = head()
    fused = cg.fuse(model, x)
    before = fused(x)
    CHANGES[name](model)
    after = fused(x)
    assert_as_near(after, model, x)
    assert not torch.equal(after, before)


def test_a_hook_that_is_removed_is_gone(x: torch.Tensor) -> None:
    model = head()
    hook = model.first.register_forward_hook(lambda module, args, result: result * 2)
    fused = cg.fuse(model, x)
    hook.remove()
    assert_as_near(fused(x), model, x)


def test_hooks_of_all_modules_are_followed(x: torch.Tensor) -> None:
    model = head()
    fused = cg.fuse(model, x)
    before = fused(x)

    def double(module: nn.Module, args: Any, result: Any) -> Any:
        return result * 2 if isinstance(module, nn.LayerNorm) else None

    hook = nn.modules.module.register_module_forward_hook(double)
    try:
        after = fused(x)
        assert_as_near(after, model, x)
    finally:
        hook.remove()
    assert not torch.equal(after, before) and torch.equal(fused(x), before)


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_fused_model_within_are_followed(name: str, x: torch.Tensor) -> None:
    model = head()
    around = nn.Sequential(cg.fuse(model, x), nn.Linear(8, 2)).eval()
    fused = cg.fuse(around, x)
    before = fused(x)
    CHANGES[name](model)
    after = fused(x)
    assert_as_near(after, nn.Sequential(model, around[1]), x)
    assert not torch.equal(after, before)


def test_what_a_run_notes_changes_nothing(x: torch.Tensor) -> None:
    model = head()
    fused = cg.fuse(model, x)
    fused(x.repeat(2, 1))
    ready = {*map(id, fused._forms.values())}
    model(x.repeat(3, 1))  # notes its size anew
    fused(x)
    fused(x.repeat(2, 1))
    assert {*map(id, fused._forms.values())} == ready
