"""Memory that outlasts a call is asked for on a thread of its own."""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

allocation: Any = importlib.import_module("cudnngraph.device.allocation")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class Cuda:
    """torch.cuda, as far as it is asked: the current stream is each thread's own."""

    def __init__(self, *, capturing: bool = False) -> None:
        self.capturing = capturing
        self.now = threading.local()
        self.now.stream = "the caller's"

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self, device: Any = None) -> str:
        assert device in (None, GPU)
        return getattr(self.now, "stream", "the default")

    @contextlib.contextmanager
    def stream(self, stream: str) -> Any:
        self.now.stream = stream
        yield


def put(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> Cuda:
    monkeypatch.setattr(allocation, "torch", SimpleNamespace(cuda=cuda))
    return cuda


def test_a_thread_of_its_own_makes_it_on_the_callers_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = put(monkeypatch, Cuda())
    ident, stream = allocation.outside_graph_pool(
        GPU, lambda: (threading.get_ident(), cuda.current_stream())
    )
    assert ident != threading.get_ident()
    assert stream == "the caller's"
    assert all(each.name != "cudnngraph-lasting" for each in threading.enumerate())


def test_what_is_raised_there_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, Cuda())

    def fails() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        allocation.outside_graph_pool(GPU, fails)


def test_what_was_raised_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that tries again with less needs the memory that it held."""
    put(monkeypatch, Cuda())

    class Held:
        pass

    def fails() -> None:
        raise torch.OutOfMemoryError("no room")

    def tries() -> weakref.ref[Held]:
        held = Held()
        found = weakref.ref(held)
        with contextlib.suppress(torch.OutOfMemoryError):
            allocation.outside_graph_pool(GPU, fails)
        return found

    gc.collect()
    gc.disable()
    try:
        assert tries()() is None
    finally:
        gc.enable()


def test_a_finalizer_at_the_end_of_the_process_makes_it_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that is started then, Python 3.11 waits for in vain."""
    put(monkeypatch, Cuda())
    monkeypatch.setattr(allocation.sys, "is_finalizing", lambda: True)
    assert allocation.outside_graph_pool(GPU, threading.get_ident) == threading.get_ident()


@pytest.mark.parametrize(("device", "capturing"), [(CPU, False), (GPU, True)])
def test_on_a_cpu_and_in_a_capture_it_is_made_here(
    device: torch.device, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, Cuda(capturing=capturing))
    assert allocation.outside_graph_pool(device, threading.get_ident) == threading.get_ident()


def test_where_no_thread_can_be_started_it_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, Cuda())

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert allocation.outside_graph_pool(GPU, threading.get_ident) == threading.get_ident()
