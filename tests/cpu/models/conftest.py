"""Fixtures of the tests of models: thresholds without a smallest size."""

from __future__ import annotations

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
