"""A fused model follows settings, hooks and methods of its model, and what stands within it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from tests import numerics


class Head(nn.Module):
    """A model with settings in each place where models keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.more = nn.ModuleList()
        self.inner = nn.Sequential()
        self.loose = [nn.Linear(8, 8)]
        self.scale, self.flag = 1.5, True
        self.shift = torch.randn(8)
        self.options: dict[str, Any] = {"factor": 2.0, "deep": {"signs": [1.0]}}
        self.config = SimpleNamespace(power=2.0, names=["a"])
        self.size: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = tuple(x.shape[1:])
        y = self.norm(self.first(x)) * self.scale
        for each in (*self.more, *self.inner.children(), *self.loose):
            y = each(y)
        y = (y + self.shift) * self.options["factor"] * self.options["deep"]["signs"][0]
        if hasattr(self, "late"):
            y = y + self.late
        y = y * self.config.power * len(self.config.names)
        return y if self.flag else -y


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def hooked(model: Any) -> None:
    model.first.register_forward_hook(lambda module, args, result: result * 2)


def hooked_before(model: Any) -> None:
    model.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def hooked_as_a_whole(model: Any) -> None:
    model.register_forward_hook(lambda module, args, result: result * 2)


def written_in_a_list(model: Any) -> None:
    with torch.no_grad():
        model.loose[0].weight.mul_(2.0)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda model: setattr(model, "scale", 3.0),
    "a flag": lambda model: setattr(model, "flag", False),
    "a number of a part": lambda model: setattr(model.norm, "eps", 1.0),
    "a tensor": lambda model: setattr(model, "shift", torch.ones(8)),
    "a tensor that is written": lambda model: model.shift.fill_(2.0),
    "an item": lambda model: model.options.update(factor=3.0),
    "an item within": lambda model: model.options["deep"]["signs"].__setitem__(0, -1.0),
    "a record": lambda model: setattr(model.config, "power", 4.0),
    "a longer list": lambda model: model.config.names.append("b"),
    "a hook": hooked,
    "a hook before": hooked_before,
    "a hook of the whole": hooked_as_a_whole,
    "a method": lambda model: setattr(model.first, "forward", lambda x: x * 2),
    "the whole method": lambda model: setattr(model, "forward", lambda x: x * 2),
    "a class": lambda model: setattr(model.first, "__class__", Doubled),
    "a first layer": lambda model: model.more.append(nn.Linear(8, 8)),
    "a first child": lambda model: model.inner.add_module("child", nn.Linear(8, 8)),
    "a first buffer": lambda model: model.register_buffer("late", torch.ones(8)),
    "a layer of a list": lambda model: model.loose.__setitem__(0, nn.Linear(8, 8)),
    "a weight of a list": written_in_a_list,
    "memory": lambda model: setattr(model.first.weight, "data", torch.randn(8, 8)),
}


def assert_as_near(found: torch.Tensor, model: Any, x: torch.Tensor) -> None:
    wide = copy.deepcopy(model).double()
    for each in wide.modules():
        if isinstance(each, Head):
            each.loose = [layer.double() for layer in each.loose]
            each.shift = each.shift.double()
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


def test_methods_of_classes_are_followed(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    model = head()
    fused = cg.fuse(model, x)
    monkeypatch.setattr(Head, "forward", lambda self, x: self.first(x))
    assert_as_near(fused(x), model, x)


def test_what_is_set_within_a_fused_model_within_is_followed(x: torch.Tensor) -> None:
    model = head()
    around = nn.Sequential(cg.fuse(model, x), nn.Linear(8, 2)).eval()
    fused = cg.fuse(around, x)
    before = fused(x)
    model.scale = 4.0
    after = fused(x)
    assert_as_near(after, nn.Sequential(model, around[1]), x)
    assert not torch.equal(after, before)


def test_values_that_are_equal_change_nothing(x: torch.Tensor) -> None:
    model = head()
    model(x)
    fused = cg.fuse(model, x)
    fused(x.repeat(2, 1))
    ready = {*map(id, fused._forms.values())}
    model.scale = float("1.5")
    model.size = tuple([8])
    model(x.repeat(3, 1))  # notes its size anew
    fused(x)
    fused(x.repeat(2, 1))
    assert {*map(id, fused._forms.values())} == ready


def test_a_part_in_training_mode_is_followed(x: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    fused = cg.fuse(model, x)
    model[1].train()
    with pytest.raises(cg.CannotImport, match="a batch norm in training mode"):
        fused(x)
    model.train()
    with pytest.raises(cg.PolicyError, match=r"training mode; call model\.eval"):
        fused(x)
    model.eval()
    assert_as_near(fused(x), model, x)
