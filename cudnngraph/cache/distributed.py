"""One choice for all ranks: under ``torch.distributed`` one process decides, the others follow.

Ranks that run different plans for one graph give different bits, take different times, and with
measured selection would search at different lengths. The first rank that asks for a name decides;
its answer goes through the process group's key-value store, so ranks that never ask (pipeline
stages) are not waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

T = TypeVar("T")

WAIT_S = 900.0  # what a rank waits for another one's search
_PREFIX = "cudnngraph/"
_FAILED = b"failed"
_log = logging.getLogger(__name__)


def is_distributed() -> bool:
    """Whether this process is one of several ranks of ``torch.distributed``."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def choose_once(name: str, first: Callable[[], tuple[T, bytes]], other: Callable[[bytes], T]) -> T:
    """Return ``first()`` on the first rank that asks for ``name``, and ``other(text)`` elsewhere.

    ``first`` answers with its value and with text for the other ranks. Where it raises, every rank
    calls its own ``first``; so does a rank that waited :data:`WAIT_S` in vain. The store is asked
    once for each name and process group.
    """
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    key = _PREFIX + name
    if store.add(f"{key}/asked", 1) == 1:
        text = _FAILED
        try:
            value, text = first()
        finally:
            store.set(key, text)
        return value
    try:
        store.wait([key], timedelta(seconds=WAIT_S))
        text = bytes(store.get(key))
    except RuntimeError as error:
        _log.warning("no plan came from the rank that chooses it, %s: %s", name, error)
        text = _FAILED
    return first()[0] if text == _FAILED else other(text)
