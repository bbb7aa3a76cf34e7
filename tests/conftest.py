"""Shared by all tiers: a cache directory of the tests' own, tables at the end of the output."""

from __future__ import annotations

import os
import random
import tempfile
import zlib
from collections.abc import Iterator

import pytest

# Workers that share the cores gain nothing by torch's threads, which would spin for each other, in
# the processes that they start neither. Before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before any settings are read, and for the processes that tests start: no test touches the cache
# of whoever runs it. Removed when the process ends.
_CACHE = tempfile.TemporaryDirectory(prefix="cudnngraph-tests-")
os.environ["CUDNNGRAPH_CACHE_DIR"] = _CACHE.name

# What torch.compile and training=True run is compared with eager torch in float64, in all tiers.
# Tests that count or time calls opt out: check=False, or settings.override(check=False).
os.environ.setdefault("CUDNNGRAPH_CHECK", "1")


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Have torch.compile know nothing of earlier tests, nor later ones of this."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed what a test draws by its name: the same data in any order, on any number of workers."""
    import torch

    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as ``record_property("summary", text)``, also under xdist."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, text in getattr(report, "user_properties", ()):
                if name == "summary":
                    terminalreporter.section("recorded by " + report.nodeid.rsplit("/", 1)[-1])
                    terminalreporter.write_line(str(text))
