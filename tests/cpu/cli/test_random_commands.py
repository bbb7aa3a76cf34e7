"""Random calls of the console script end with a documented exit code, and never in a traceback.

``tests/random_commands.py`` says how to make many more, or one.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from cudnngraph import cli, settings
from tests.random_commands import Call
from tests.workers import cache_example

FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
COUNT = int(os.environ.get("RANDOM_COMMANDS", "150"))
PART = 50


def one(seed: int, example: Path, folder: Path) -> str:
    """What is wrong with the call of a seed, "" for nothing."""
    folder.mkdir()
    call = Call(seed, example, folder)
    before = Path.cwd()
    os.chdir(folder)
    try:
        with settings.override(cache_dir=folder / "own"), pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", call.width)
            wrong = call.run()
    finally:
        os.chdir(before)
    return f"{call}\n{wrong}" if wrong else ""


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, PART))
def test_random_calls_end_in_a_documented_way(first: int, tmp_path: Path) -> None:
    cache_example.make(tmp_path / "example")
    seeds = range(first, min(first + PART, FIRST + COUNT))
    told = {seed: one(seed, tmp_path / "example", tmp_path / str(seed)) for seed in seeds}
    wrong = [f"seed {seed}: {what}" for seed, what in told.items() if what]
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("errors", ["strict", "surrogateescape", "surrogatepass"])
def test_an_ascii_terminal_shows_what_it_can(
    errors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's output is by "surrogateescape" in the C locale; an arrow raised there."""
    ids = cache_example.make(tmp_path)
    printed = io.BytesIO()
    output = io.TextIOWrapper(printed, "ascii", errors=errors, write_through=True)
    monkeypatch.setattr(sys, "stdout", output)
    assert cli.main(["plan-dump", "--dir", str(tmp_path), "--full", ids["tuned"]]) == 0
    assert b"conv ? bias ? relu" in printed.getvalue()
