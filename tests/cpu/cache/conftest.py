"""Fixtures of the tests of the cache: a fake library and an empty directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """See :meth:`World.install`."""
    made = World(tmp_path / "cache")
    made.install(monkeypatch)
    return made
