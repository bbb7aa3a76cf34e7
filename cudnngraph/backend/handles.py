"""The cuDNN handles of each thread, and the stream of each; what is kept until a capture ends."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from ..errors import BackendUnavailable, CaptureError
from . import env


class _HandleOnStream:
    """A cuDNN handle and the stream that was last set on it; None before the first one."""

    __slots__ = ("handle", "stream")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.stream: int | None = None


class _ThreadHandles(threading.local):
    """The handles of one thread, by device index."""

    def __init__(self) -> None:
        self.by_device: dict[int, _HandleOnStream] = {}


_handles = _ThreadHandles()
# Handles of a parent process: kept for ever, since destroying one in a child would reach into a
# CUDA context that is not there.
_abandoned: list[_ThreadHandles] = []


def handle(device_index: int) -> Any:
    """The cuDNN handle of this thread for the device, created on the first call.

    It is never destroyed: cuDNN's teardown at the exit of a thread or of the process is known to
    crash. Its stream is whatever was set last; see :func:`handle_on_current_stream`.

    Raises:
        BackendUnavailable: there is no cuDNN, or it gives no handle for this device.
        CaptureError: the first call on this thread and device came during stream capture.
    """
    return thread_handle(device_index).handle


def raw_stream(device_index: int) -> int:
    """The pointer of torch's current stream of the device, in 0.1 µs."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def handle_on_current_stream(device_index: int) -> Any:
    """This thread's handle for the device, set to torch's current stream of that device."""
    entry = thread_handle(device_index)
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    if stream != entry.stream:
        env.frontend().set_stream(handle=entry.handle, stream=stream)
        entry.stream = stream
    return entry.handle


def thread_handle(device_index: int) -> _HandleOnStream:
    """This thread's handle for the device, and its stream."""
    entry = _handles.by_device.get(device_index)
    if entry is None:
        entry = _handles.by_device[device_index] = _HandleOnStream(_create_handle(device_index))
    return entry


def _create_handle(device_index: int) -> Any:
    cudnn = env.frontend()
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"a cuDNN handle for cuda:{device_index} was asked for during CUDA stream capture; "
            "run the graph once on this thread before capturing it"
        )
    try:
        with torch.cuda.device(device_index):
            return cudnn.create_handle()
    except Exception as error:
        raise BackendUnavailable(
            f"cuDNN gives no handle for cuda:{device_index} ({error}); "
            "run `cudnngraph doctor` for what is missing"
        ) from error


class _Kept(threading.local):
    """Objects that one thread keeps until its capture ends."""

    def __init__(self) -> None:
        self.things: list[Any] = []


_kept = _Kept()


def let_go(*things: Any) -> None:
    """Let go of plans or CUDA graphs, after the capture where this thread's stream is in one.

    Destroying one of them makes CUDA refuse the whole capture, and Python may collect what is
    garbage at any time. What had to be kept goes with the next thing that this thread lets go of.
    """
    initialized: Any = torch.cuda.is_initialized
    if initialized() and torch.cuda.is_current_stream_capturing():
        _kept.things.extend(things)
    else:
        _kept.things.clear()


def _forget_handles() -> None:
    """In a forked child: drop the parent's handles without destroying them."""
    global _handles
    _abandoned.append(_handles)
    _handles = _ThreadHandles()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_handles)
