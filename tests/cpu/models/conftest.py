"""Fixtures of the tests of models: thresholds without a smallest size, quick garbage collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec, Node
from cudnngraph.models import dynamo, report
from tests import thresholds


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of any size are as large ones."""
    thresholds.change(
        monkeypatch,
        group_norm_min_elements_channels_last=0,
        group_norm_min_elements_contiguous=0,
    )


def _imported_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, found: Callable[[GraphSpec], object]
) -> None:
    """Have training import its graphs as for a GPU, and tell each."""
    convert = dynamo.convert

    def for_a_gpu(*args: Any, **given: Any) -> Any:
        made = convert(*args, **{**given, "on_gpu": True, "kernels": True})
        assert made.spec is not None
        found(made.spec)
        return made

    monkeypatch.setattr(dynamo, "convert", for_a_gpu)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphSpec]:
    """All graphs that are imported, as for a GPU."""
    seen: list[GraphSpec] = []
    _imported_for_a_gpu(monkeypatch, seen.append)
    return seen


@pytest.fixture
def convolutions(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """Those of all graphs that are imported as for a GPU."""
    seen: list[Node] = []
    _imported_for_a_gpu(
        monkeypatch, lambda spec: seen.extend(node for node in spec.nodes if "conv" in node.op)
    )
    return seen


@pytest.fixture(scope="module", autouse=True)
def _old_objects_frozen() -> Iterator[None]:
    """Leave what earlier tests made to the end: a worker holds gigabytes of it, and these tests
    collect garbage one by one."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # what it holds would never be collected
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_old_reports(_old_objects_frozen: None) -> None:
    """Have no test find the reports of an earlier one's graphs."""
    if cg.reports():
        torch._dynamo.reset()
        gc.collect()
    if cg.reports():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    report._COMPILED.clear()  # what torch's own compiler was called in is never collected
