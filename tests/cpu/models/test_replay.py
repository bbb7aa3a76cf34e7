"""The backend's ``mode="reduce-overhead"`` without a GPU: by a stand-in for CUDA graphs.

A replay of the stand-in computes what was recorded from what lies in the recorded inputs, writes
the recorded results, and then writes over what a graph in the same memory may write over.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from cudnngraph.models import replay
from cudnngraph.models.bound import Direct
from tests.replays import LOOPS, Step, check_loop, compiled, each_step, net, replays

__all__ = ["replays"]

_run = Direct.run
_weak: Any = StorageWeakRef
NOTHING = {True: torch.nan, False: 0}


def shown(tensor: torch.Tensor, memory: Memory | None = None) -> torch.Tensor:
    """A tensor that shows the memory of one, and does not own it; it keeps ``memory``."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size()
    buffer = (ctypes.c_char * size).from_address(tensor.data_ptr())
    buffer.memory = memory  # type: ignore[attr-defined]
    whole = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, 0, tensor.shape, tensor.stride())


class Memory:
    """The memory of graphs: it outlives all tensors that show it."""

    def __init__(self) -> None:
        self.made: list[tuple[torch.Tensor, Any]] = []  # and whether its owner is alive

    def make(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a result lies, and its owner."""
        made = tensor.clone(memory_format=torch.preserve_format)
        made.fill_(NOTHING[made.is_floating_point()])  # nothing is computed while recording
        owner = shown(made, self)
        self.made.append((made, _weak(owner.untyped_storage())))
        return shown(made), owner

    def free(self) -> list[torch.Tensor]:
        return [made for made, owner in self.made if owner.expired()]


class Recorded:
    """In place of a CUDA graph."""

    current: Recorded | None = None

    def __init__(self, call: Callable[[], object], device: Any, memory: Memory) -> None:
        self.memory = memory
        Recorded.current = self
        call()
        Recorded.current = None

    def record(self, direct: Direct, tensors: list[Any]) -> list[Any]:
        self.direct = direct
        self.inputs = [shown(each) for each in tensors]
        held = {each.data_ptr() for each in tensors}
        written = [(tensors[at], tensors[at].clone()) for at in direct.written]
        made = _run(direct, tensors)
        for each, before in written:
            each.copy_(before)
        self.over = self.memory.free()  # what it may write over, when it has read it
        self.made = {}
        for at, each in enumerate(made):
            if not isinstance(each, torch.Tensor) or each.data_ptr() in held or not each.numel():
                continue
            if 0 not in each.stride():  # of what nothing reads, which is made once
                self.made[at], made[at] = self.memory.make(each)
        return made

    def __call__(self) -> None:
        made = _run(self.direct, list(self.inputs))
        for at, each in self.made.items():
            each.copy_(made[at])
        for each in self.over:
            each.fill_(NOTHING[each.is_floating_point()])


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def run(self: Direct, tensors: list[Any]) -> list[Any]:
        now = Recorded.current
        return _run(self, tensors) if now is None else now.record(self, tensors)

    init = replay.Replayed.__init__

    def made(self: replay.Replayed, bound: Direct, device: Any, *args: Any) -> None:
        init(self, bound, SimpleNamespace(type="cuda"), *args)  # type: ignore[arg-type]

    monkeypatch.setattr(replay, "CapturedIn", Recorded)
    monkeypatch.setattr(replay, "GraphMemory", Memory)
    monkeypatch.setattr(replay, "_showing", shown)
    monkeypatch.setattr(replay.Replayed, "__init__", made)
    monkeypatch.setattr(Direct, "run", run)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    torch._dynamo.reset()
    gc.collect()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("step", LOOPS)
def test_steps_are_eagers(step: Step, replays: list[tuple[str, str]]) -> None:
    check_loop(step, replays, "cpu")


def test_a_backward_that_reads_nothing_of_its_forwards_is_replayed(
    replays: list[tuple[str, str]],
) -> None:
    """Its inputs are the forward's own, and what comes of the loss."""
    model = nn.Linear(8, 6)
    run = compiled(model)
    held = []  # so that no two lie at one place
    for number in range(8):
        model.zero_grad(set_to_none=True)
        x = torch.randn(4, 8)
        held += [x, by := torch.randn(4, 6)]
        run(x).backward(by)
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, by.T @ x)
        if number > 4:
            assert replays[-2:] == [("forward", "replay"), ("backward", "replay")]


@pytest.mark.parametrize("of", ["forward", "backward"])
def test_what_cannot_be_captured_runs_as_it_is(
    of: str,
    replays: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Recorded):
        def __init__(self, call: Callable[[], object], device: Any, memory: Memory) -> None:
            kind = "backward" if memory.made else "forward"
            super().__init__(call, device, memory)
            if kind == of:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(replay, "CapturedIn", Failing)
    model = net("cpu")
    exact = copy.deepcopy(model).double()
    run = compiled(model)
    with caplog.at_level(logging.WARNING):
        for number in range(8):
            each_step(model, run, number)
            each_step(exact, lambda x: exact(x.double()), number)
            for mine, wanted in zip(model.parameters(), exact.parameters(), strict=True):
                assert mine.grad is not None
                torch.testing.assert_close(mine.grad.double(), wanted.grad, rtol=1e-3, atol=1e-5)
    said = [each for each in caplog.messages if "not captured" in each]
    assert said == [
        "a graph is not captured, and runs as it is: operation not permitted when stream is "
        "capturing"
    ]
    assert ("backward", "replay") not in replays
    assert (("forward", "replay") in replays) == (of == "backward")
