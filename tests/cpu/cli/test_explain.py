"""Calls of ``cudnngraph explain`` that make no sense; those that do need the cuDNN library."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudnngraph import cli
from cudnngraph.backend.deviceless import targets


def test_an_unknown_gpu_is_refused_before_the_file_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "graphs.py"
    file.write_text("raise SystemExit('it was run')\n")
    assert cli.main(["explain", str(file), "--target", "A100"]) == 2
    known = ", ".join(targets())
    assert capsys.readouterr().err == f"error: --target A100; known: {known}\n"


@pytest.mark.parametrize("place", ["", " ", ":block"])
def test_an_empty_name_is_called_so(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", place]) == 2
    said = f"error: '{place}' names no file; expected FILE or FILE:NAME\n"
    assert capsys.readouterr().err == said


def test_a_file_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", str(tmp_path / "none.py")]) == 2
    assert capsys.readouterr().err == f"error: there is no file {tmp_path / 'none.py'}\n"
