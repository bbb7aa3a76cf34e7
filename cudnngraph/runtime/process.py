"""State of the process: programs by key, workspaces, plans that CUDA graphs hold.

``programs``, ``programs_lock`` and ``WORKSPACE`` are new objects in a forked child, so their users
read them from this module each time.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from plans_cache.workspace import WorkspacePool

from ..cache import lookup, stats
from ..cache.stats import CacheStats
from ..device.allocation import lasting
from .checks import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from .program import Program


def _allocate(device: int, stream: int, size_bytes: int) -> torch.Tensor:
    whole = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # so that it can show any dtype
    return torch.empty(whole, dtype=torch.uint8, device=torch.device("cuda", device))


def _allocate_to_keep(device: int, stream: int, size_bytes: int) -> torch.Tensor:
    on = torch.device("cuda", device)
    return lasting(on, partial(_allocate, device, stream, size_bytes))


WORKSPACE: WorkspacePool[torch.Tensor] = WorkspacePool(_allocate_to_keep)

# What CUDA graphs that others make hold pointers into: plans, with their kernels and constants.
# Never let go, for nothing tells when a graph is.
_captured: dict[int, Any] = {}


class _Recording(threading.local):
    """The same for a graph that is made here, on this thread, now: it goes with the graph."""

    held: dict[int, Any] | None = None


recording = _Recording()


def scratch(device: int, stream: int, size_bytes: int, plans: Any) -> torch.Tensor | None:
    """Scratch memory for one run: the pool's, or while a CUDA graph is captured the graph's own.

    torch allocates what is asked for during a capture from memory that belongs to the graph, uses
    it again later in the same graph, and frees it with the graph. The plans are kept.
    """
    if torch.cuda.is_current_stream_capturing():
        held = _captured if recording.held is None else recording.held
        held[id(plans)] = plans
        return _allocate(device, stream, size_bytes) if size_bytes else None
    return WORKSPACE.get(device, stream, size_bytes) if size_bytes else None


programs: OrderedDict[tuple[str, torch.device, bool], Program] = OrderedDict()
programs_lock = threading.Lock()
_abandoned: list[Any] = []


def _after_fork() -> None:
    """A child drops the parent's plans and workspaces without destroying them."""
    global programs, programs_lock, WORKSPACE
    _abandoned.append((programs, WORKSPACE))
    programs, programs_lock = OrderedDict(), threading.Lock()
    WORKSPACE = WorkspacePool(_allocate_to_keep)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def cache_stats() -> CacheStats:
    """How the cache has done in this process: see :class:`~cudnngraph.cache.stats.CacheStats`."""
    counters = stats.COUNTERS
    return CacheStats(
        dict(counters.lookups),
        dict(counters.misses),
        counters.build_ms,
        counters.load_ms,
        len(programs),
        WORKSPACE.held_bytes,
        WORKSPACE.high_water_bytes,
        lookup.store().stats(),
    )


def cache_clear() -> None:
    """Forget the programs, records and workspaces in memory; the disk keeps its entries.

    Executables at hand go on working; plans and workspaces that a CUDA graph has captured stay.
    """
    with programs_lock:
        programs.clear()
    lookup.store().clear_memory()
    WORKSPACE.clear()
