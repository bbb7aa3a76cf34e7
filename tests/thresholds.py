"""Other thresholds of the GPU for one test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudnngraph.device import rules


def change(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Have every GPU follow these thresholds until the test ends."""
    for capability, measured in list(rules.TABLE.items()):
        monkeypatch.setitem(rules.TABLE, capability, replace(measured, **values))
