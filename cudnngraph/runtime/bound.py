"""Calls with their tensors bound, and the same recorded in a CUDA graph."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..backend import handles
from ..errors import CaptureError
from . import fast_call
from .process import PROCESS
from .program import Launch, Program


class _ByStream(threading.local):
    """Launches that one thread has prepared, by stream, and the memory they point into."""

    def __init__(self) -> None:
        self.by_stream: dict[int, tuple[list[Launch], torch.Tensor | None]] = {}
        self.short: Callable[[], bool] | None = None  # for the stream seen last, of plans alone


class BoundCall:
    """An executable with its tensors bound: ``call()`` launches, nothing is checked or looked up.

    Runs on the current stream of the device; may be captured in a CUDA graph after one call on the
    same thread.
    """

    def __init__(self, program: Program, tensors: Mapping[str, torch.Tensor]) -> None:
        self._program = program
        self._tensors = dict(tensors)
        self._index = program.device.index
        cpu = program.device.type == "cpu"  # no streams, no handles: ready once and for all
        self._on_cpu = program.launches(self._tensors, 0) if cpu else None
        self._ready = _ByStream()

    def __call__(self) -> None:
        short = self._ready.short
        if short is not None and short():
            return
        if self._on_cpu is not None:
            for launch in self._on_cpu:
                launch(None)
            return
        index = self._index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self._launch(index)
        else:
            self._launch(index)

    def _launch(self, index: int) -> None:
        stream = handles.raw_stream(index)
        ready = self._ready.by_stream.get(stream)
        if torch.cuda.is_current_stream_capturing():  # in the graph's memory, which goes with it
            self._program.play(self._program.launches(self._tensors, stream))
            return
        if ready is None:
            launches = self._program.launches(self._tensors, stream)
            # The block is kept with the pointers into it, so a pool that grows leaves it alive.
            block = PROCESS.workspace.get(index, stream, self._program.scratch_bytes)
            handle = handles.handle_on_current_stream(index) if self._program.uses_cudnn else None
            watched = self._program.ran_first([partial(launch, handle) for launch in launches])
            ready = self._ready.by_stream[stream] = (launches, block)
            fixed = [launch for launch in launches if isinstance(launch, fast_call.PlanLaunch)]
            self._ready.short = None
            if len(fixed) == len(launches):
                scratch = self._program.scratch_bytes > 0
                self._ready.short = fast_call.build_launch(fixed, index, stream, scratch)
            if watched:
                return
        handle = handles.handle_on_current_stream(index) if self._program.uses_cudnn else None
        for launch in ready[0]:
            launch(handle)


class GraphMemory:
    """Memory that CUDA graphs have in common, for those that are captured and replayed in turn.

    What one has let go of by its end, the next may write. It lives as long as the graphs do.
    """

    def __init__(self) -> None:
        make: Any = torch.cuda.Stream
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.stream: Any = make()  # what is freed is given again on the stream that asked for it
        self.calls: list[CapturedCall] = []


class CapturedCall:
    """``call`` recorded in a CUDA graph: ``captured()`` replays it on the current stream.

    It is called once before it is recorded, unless it has been: ``warm=False``.

    ``graph`` is the ``torch.cuda.CUDAGraph``, None on a CPU, where a replay is a call. What the
    graph points into lives as long as this.
    """

    def __init__(
        self, call: Callable[[], object], device: torch.device, *, warm: bool = True
    ) -> None:
        self._start(call, device, warm=warm)

    def _start(
        self,
        call: Callable[[], object],
        device: torch.device,
        *,
        warm: bool,
        memory: GraphMemory | None = None,
    ) -> None:
        self.graph: Any = None
        self._call, self._held, self._warm = call, dict[int, Any](), warm
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._record(GraphMemory() if memory is None else memory)

    def _record(self, memory: GraphMemory) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "a CUDA graph is being captured, and another would have to be captured in it; call "
                "what bind() gives"
            )
        if self._warm:
            self._call()  # plans are built and handles made before the capture
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        where = {"pool": memory.pool, "stream": memory.stream}
        _reset_cublas_workspaces()
        PROCESS.recording.held = self._held
        collects = gc.isenabled()
        gc.disable()  # a CUDA graph that is garbage would take this one with it
        try:
            with torch.cuda.graph(graph, **where, capture_error_mode="thread_local"):
                self._call()
        except BaseException:
            _reset_generator()
            raise
        finally:
            PROCESS.recording.held = None
            _reset_cublas_workspaces()
            if collects:
                gc.enable()
        self.graph = graph

    def __del__(self) -> None:
        handles.let_go(self.graph)

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self._call()


class CapturedIn(CapturedCall):
    """A call that has been called, recorded in memory that several have in common, which keeps
    it."""

    def __init__(
        self, call: Callable[[], object], device: torch.device, memory: GraphMemory
    ) -> None:
        self._start(call, device, warm=False, memory=memory)
        memory.calls.append(self)


def _reset_generator() -> None:
    """Have torch's generator draw again outside of CUDA graphs: a capture that has failed leaves it
    as it is within one."""
    generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


def _reset_cublas_workspaces() -> None:
    """Make cuBLAS allocate its workspaces again, before a capture and after it.

    torch keeps one workspace for each stream. A CUDA graph that recorded a workspace it does not
    own keeps writing to it after torch has freed or reused it. torch.compile frees them around
    each capture of its own.
    """
    torch._C._cuda_clearCublasWorkspaces()
