"""What a model itself gives, that ours is compared with."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cudnngraph.models import check
from tests.models import image

CUDNN = torch.backends.cudnn


class Seen(TorchDispatchMode):
    """Notes each convolution's input channels, its groups, and whether cuDNN may run it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.found.append((args[0].shape[1], args[8], CUDNN.enabled))
        return func(*args, **(kwargs or {}))


class Convolutions(nn.Module):
    """Convolutions of one group, of some, and of as many as there are channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.depthwise = nn.Conv2d(8, 16, 3, padding="same", groups=8)
        self.line = nn.Conv1d(16, 16, 3, groups=16)
        self.one = nn.Conv2d(16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(self.groups(self.stem(x)))
        y = F.conv2d(input=y, weight=self.depthwise.weight, groups=16)
        y = self.line(y.flatten(2)).unflatten(2, (-1, 2))
        return self.one(y)


WANTED = [
    (1, 1, True),
    (8, 4, True),
    (8, 8, False),
    (16, 16, False),
    (16, 16, False),
    (16, 1, True),
]


def test_a_models_own_depthwise_convolutions_run_without_cudnn() -> None:
    with Seen() as seen, torch.no_grad():
        check.results_of(Convolutions(), (image(2, 1, 8, 6),), {})
    assert seen.found == WANTED
    assert CUDNN.enabled
    with CUDNN.flags(enabled=False), torch.no_grad():
        check.results_of(Convolutions(), (image(2, 1, 8, 6),), {})
        assert not CUDNN.enabled


def test_cudnn_is_back_behind_a_convolution_that_raises() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"), torch.no_grad():
        check.results_of(model, (image(2, 8, 2, 2),), {})
    assert CUDNN.enabled


def test_cudnn_is_back_once_the_last_thread_wants_it_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with check._cudnn_left_out():
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with check._cudnn_left_out():
        thread.start()
        assert inside.wait(60)
    assert not CUDNN.enabled
    leave.set()
    thread.join(60)
    assert CUDNN.enabled


def test_what_a_model_compiles_within_itself_stays_one_graph() -> None:
    torch._dynamo.reset()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
            self.compiled = torch.compile(self.inner, backend="eager", fullgraph=True)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.depthwise(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.compiled(x)

    model, x = Model().eval(), image(2, 8, 6, 6)
    with torch.no_grad():
        (found,) = check.results_of(model, (x,), {})
        assert torch.equal(found, model.inner(x))
