"""State of the process: programs by key, workspaces, plans that CUDA graphs hold."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from plans_cache.workspace import WorkspacePool

from ..cache import lookup
from ..cache.state import STATE
from ..cache.stats import CacheStats
from ..device.allocation import outside_graph_pool
from ..ir.spec import ALIGNMENT_BYTES, round_up

if TYPE_CHECKING:
    from .program import Program


def _allocate(device: int, stream: int, size_bytes: int) -> torch.Tensor:
    whole = round_up(size_bytes, ALIGNMENT_BYTES)  # so that it can show any dtype
    return torch.empty(whole, dtype=torch.uint8, device=torch.device("cuda", device))


def _allocate_to_keep(device: int, stream: int, size_bytes: int) -> torch.Tensor:
    on = torch.device("cuda", device)
    return outside_graph_pool(on, partial(_allocate, device, stream, size_bytes))


class _Recording(threading.local):
    """Objects that the CUDA graph captured on this thread holds; they are freed with it."""

    held: dict[int, Any] | None = None


class Process:
    """Programs by key, workspaces, and what CUDA graphs hold.

    ``captured`` has what CUDA graphs that others make hold pointers into: plans, with their kernels
    and constants. It is never let go, for nothing tells when a graph is.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of the programs
        self.programs: OrderedDict[tuple[str, torch.device, bool], Program] = OrderedDict()
        self.workspace: WorkspacePool[torch.Tensor] = WorkspacePool(_allocate_to_keep)
        self.captured: dict[int, Any] = {}
        self.recording = _Recording()
        self._abandoned: list[Any] = []

    def scratch(self, device: int, stream: int, size_bytes: int, plans: Any) -> torch.Tensor | None:
        """Scratch memory for one run: the pool's, or while a CUDA graph is captured the graph's
        own.

        torch allocates what is asked for during a capture from memory that belongs to the graph,
        uses it again later in the same graph, and frees it with the graph. The plans are kept.
        """
        if torch.cuda.is_current_stream_capturing():
            self.hold(plans)
            return _allocate(device, stream, size_bytes) if size_bytes else None
        return self.workspace.get(device, stream, size_bytes) if size_bytes else None

    def hold(self, plans: Any) -> None:
        """Keep plans for the CUDA graph that is being captured on this thread."""
        held = self.captured if self.recording.held is None else self.recording.held
        held[id(plans)] = plans

    def after_fork(self) -> None:
        """In a child: drop the parent's plans and workspaces without destroying them."""
        self._abandoned.append((self.programs, self.workspace))
        self.lock, self.programs = threading.Lock(), OrderedDict()
        self.workspace = WorkspacePool(_allocate_to_keep)


PROCESS = Process()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PROCESS.after_fork)


def cache_stats() -> CacheStats:
    """Return the counters of the cache: see :class:`~cudnngraph.cache.stats.CacheStats`."""
    counters = STATE.counters
    return CacheStats(
        dict(counters.lookups),
        dict(counters.misses),
        counters.build_ms,
        counters.load_ms,
        len(PROCESS.programs),
        PROCESS.workspace.held_bytes,
        PROCESS.workspace.high_water_bytes,
        lookup.store().stats(),
    )


def cache_clear() -> None:
    """Forget the programs, records and workspaces in memory; the disk keeps its entries.

    Executables at hand go on working; plans and workspaces that a CUDA graph has captured stay.
    """
    with PROCESS.lock:
        PROCESS.programs.clear()
    lookup.store().clear_memory()
    PROCESS.workspace.clear()
