"""Fixtures of the tests of models: thresholds without a smallest size, quick garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests import thresholds


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of any size are as large ones."""
    thresholds.change(
        monkeypatch,
        group_norm_min_elements_channels_last=0,
        group_norm_min_elements_contiguous=0,
    )


@pytest.fixture(scope="module", autouse=True)
def _old_objects_frozen() -> Iterator[None]:
    """Leave what earlier tests made to the end: a worker holds gigabytes of it, and these tests
    collect garbage one by one."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
