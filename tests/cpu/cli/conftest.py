"""Fixtures of the tests of commands: an example of a cache, a machine without a GPU, findings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudnngraph import cli, settings
from cudnngraph.backend import env, found_bad
from cudnngraph.cli import records
from plans_cache.findings import Findings
from tests.commands import Cli
from tests.fakes import H200
from tests.workers import cache_example


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Findings]:
    """The findings of an H200 in a cache directory of their own."""
    monkeypatch.setattr(env, "env_key", lambda index: H200)
    monkeypatch.setattr(env, "cudnn_version", lambda: 91900)
    monkeypatch.setattr(found_bad, "_driver", lambda: "580.65.06")
    with settings.override(cache_dir=tmp_path / "cache"):
        yield found_bad.findings(0)


SOURCE = """
from tests.workers.cache_example import conv_bias_relu

same = conv_bias_relu(name="under_another_name")
other = conv_bias_relu(padding=2)
"""


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests are those of a machine without a GPU, wherever they run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "plans"


@pytest.fixture
def ids(folder: Path) -> dict[str, str]:
    """The ids of the example that is made in ``folder``, by name."""
    return cache_example.make(folder)


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs ``plans ACTION`` as if no seeds shipped: exit code, output, errors."""
    monkeypatch.setattr(records, "PACKAGED_SEEDS", folder.with_name("no-seeds"))

    def call(action: str, *argv: object, at: Path | None = None) -> tuple[int, str, str]:
        code = cli.main(["plans", action, "--dir", str(at or folder), *map(str, argv)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "graphs.py"
    file.write_text(SOURCE)
    return file
