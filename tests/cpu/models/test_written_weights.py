"""A fused model follows writes into the weights of the model that it stands for."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cudnngraph as cg
from cudnngraph.models.changes import MANY_CHANGES
from tests.fused import net
from tests.models import image

fusing: Any = importlib.import_module("cudnngraph.models.fused")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The forms that are made."""
    found: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        found.append(real(*args, **kwargs))
        return found[-1]

    real = fusing.make
    monkeypatch.setattr(fusing, "make", make)
    return found


def close(fused: cg.Fused, x: torch.Tensor) -> None:
    with torch.no_grad():
        wanted = copy.deepcopy(fused.unfused).double()(x.double()).float()
        torch.testing.assert_close(fused(x), wanted, rtol=1e-5, atol=1e-5)


def loaded(model: nn.Module) -> None:
    torch.manual_seed(1)
    other = net()
    for module in other.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    model.load_state_dict(other.state_dict())


def trained(model: nn.Module) -> None:
    model.train()
    model(image(4, 3, 32, 32)).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad(set_to_none=True)
    model.eval()


def scaled(model: Any) -> None:
    with torch.no_grad():
        model.stem[0].weight.mul_(-1.0)


@pytest.mark.parametrize("write", [loaded, trained, scaled])
def test_writes_are_followed_at_the_next_call(
    write: Callable[[nn.Module], None], made: list[Any]
) -> None:
    model, x = net(), image(2, 3, 32, 32)
    fused = cg.fuse(model, x)
    before = fused(x).clone()
    fused(image(3, 3, 32, 32))
    assert len(made) == len(fused) == 2
    write(model)
    close(fused, x)
    assert not torch.allclose(fused(x), before)
    assert len(made) == 3 and len(fused) == 1, "others are made when they come"
    close(fused, image(3, 3, 32, 32))
    fused(x)
    assert len(made) == 4


def test_a_shape_that_is_new_behind_a_write_is_compiled_once(made: list[Any]) -> None:
    model, x = net(), image(2, 3, 32, 32)
    fused = cg.fuse(model, x)
    scaled(model)
    close(fused, image(3, 3, 32, 32))
    assert len(made) == 2 and len(fused) == 1


def test_a_bound_graph_is_of_the_weights_of_then() -> None:
    model, x = net(), image(2, 3, 32, 32)
    fused = cg.fuse(model, x)
    first = fused.bound(x)
    scaled(model)
    second = fused.bound(x)
    assert second is not first and fused.bound(x) is second
    (result,) = second.run([x])
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)


def test_what_torch_does_not_count_needs_a_word(made: list[Any]) -> None:
    model, x = net(), image(2, 3, 32, 32)
    fused = cg.fuse(model, x)
    before = fused(x).clone()
    next(model.parameters()).data.mul_(-1.0)
    assert torch.equal(fused(x), before) and len(made) == 1
    fused.refresh()
    close(fused, x)


def test_weights_of_inference_mode_are_bound_once(made: list[Any]) -> None:
    with torch.inference_mode():
        model, x = net(), image(2, 3, 32, 32)
        fused = cg.fuse(model, x)
        before = fused(x).clone()
        scaled(model)
        assert torch.equal(fused(x), before) and len(made) == 1
        fused.refresh()
        assert not torch.equal(fused(x), before)


def test_the_log_says_what_writes_cost(caplog: pytest.LogCaptureFixture) -> None:
    model, x = net(), image(2, 3, 32, 32)
    fused = cg.fuse(model, x)
    with caplog.at_level(logging.WARNING, "cudnngraph"):
        for count in range(MANY_CHANGES + 2):
            assert len(caplog.messages) == (count >= MANY_CHANGES)
            scaled(model)
            fused(x)
    assert caplog.messages == [
        "ResNet: weights were written, so its graphs are compiled anew (change 8; for a model that "
        "changes often, torch.compile(model, backend='cudnngraph'))"
    ]
