"""Fixtures of the tests of commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cudnngraph import settings
from cudnngraph.backend import env, found_bad
from plans_cache.findings import Findings
from tests.fakes import H200


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Findings]:
    """The findings of an H200 in a cache directory of their own."""
    monkeypatch.setattr(env, "env_key", lambda index: H200)
    monkeypatch.setattr(env, "cudnn_version", lambda: 91900)
    monkeypatch.setattr(found_bad, "_driver", lambda: "580.65.06")
    with settings.override(cache_dir=tmp_path / "cache"):
        yield found_bad.findings(0)
