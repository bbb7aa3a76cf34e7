"""Device memory: what outlasts the call that asks for it, and copies of the same strides."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

import torch

T = TypeVar("T")
_SHORT = ("OutOfMemory", "OUT_OF_MEMORY", "out of memory", "ALLOC_FAILED")
_SHORT_BYTES = 128 << 20  # a context's next kernel, handle or stack may need as much


def names_shortage(text: str) -> bool:
    """Whether an error's text says that there was no memory."""
    return any(words in text for words in _SHORT)


def for_want_of_memory(error: Exception, device: torch.device) -> bool:
    """Whether a GPU has too little memory left for what failed: libraries that load kernels or make
    handles call that an internal error."""
    if names_shortage(f"{type(error).__name__}: {error}"):
        return True
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _SHORT_BYTES


def outside_graph_pool(device: torch.device, make: Callable[[], T]) -> T:
    """Call ``make`` with its tensors in torch's ordinary memory; its exceptions go through.

    ``torch.compile(mode="reduce-overhead")`` warms up a CUDA graph with all that its thread
    allocates in the graph's own memory, where nothing but results may stay. So ``make`` is called
    on a thread of its own, the same stream current. During a capture it is called as it is: memory
    is the graph's then.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing() or sys.is_finalizing():
        return make()
    stream = torch.cuda.current_stream(device)
    made: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.stream(stream):  # and its device
                made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run, name="cudnngraph-lasting")
    try:
        thread.start()
    except RuntimeError:  # no thread is to be had: the interpreter is about to end
        return make()
    thread.join()
    if failed:
        raise failed.pop()  # kept nowhere, for it keeps the callers' frames
    return made.pop()


def strided_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same strides in memory of its own; torch's clone closes gaps."""
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor.detach()) if 0 not in tensor.stride() else _expanded_copy(tensor)


def _expanded_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of an expanded tensor, expanded again: its repeated elements are stored once."""
    core = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            core = core.narrow(dim, 0, 1)
    return core.clone().as_strided(tensor.shape, tensor.stride())
