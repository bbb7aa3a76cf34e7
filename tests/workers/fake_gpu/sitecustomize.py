"""A GPU that is not there, for a process that has this folder in its ``PYTHONPATH``.

Searches find made-up plans. Each takes a while to build, and a while to measure with the GPU to
itself; a line of ``FAKE_GPU_LOG`` tells of either: what, the process, when it began and ended. The
first search waits until ``FAKE_GPU_PROCESSES`` of them are there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cudnngraph.cache import lookup
from cudnngraph.runtime import compile as compiling
from tests.fakes import World

BUILD_S, MEASURE_S = 0.1, 0.02

LOG = os.environ.get("FAKE_GPU_LOG")


@contextmanager
def told(what: str, log: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    with open(log, "a") as file:
        file.write(f"{what} {os.getpid()} {begun} {time.monotonic()}\n")


def meet(log: str) -> None:
    """Wait for the other processes, at most a minute."""
    Path(f"{log}.{os.getpid()}").touch()
    place, count = Path(log), int(os.environ["FAKE_GPU_PROCESSES"])
    ends = time.monotonic() + 60.0
    while len(list(place.parent.glob(f"{place.name}.*"))) < count and time.monotonic() < ends:
        time.sleep(0.005)


def install(log: str) -> None:
    patch = pytest.MonkeyPatch()
    world = World(Path(os.environ["CUDNNGRAPH_CACHE_DIR"]))
    world.install(patch)
    patch.setattr(torch.cuda, "current_device", lambda: 0)

    def search(*args: Any, **options: Any) -> Any:
        meet(log)
        with told("build", log):
            time.sleep(BUILD_S)
        with lookup.gpu_lock(0), told("measure", log):
            time.sleep(MEASURE_S)
        return world.autotune(*args, **options)

    patch.setattr(compiling, "by_measurement", search)


if LOG is not None:
    install(LOG)
