"""Plans that are not to be tried again, kept from process to process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plans_cache.rejections import MOST, Rejections

ID, OTHER = "a" * 64, "b" * 64
FAULTS = {(4, (("TILE", 3),)): "died of SIGABRT", (7, ()): "wrong: off by 0.5"}


def test_what_one_process_rejects_another_does_not_try(tmp_path: Path) -> None:
    Rejections(tmp_path / "cache").add(ID, FAULTS)
    again = Rejections(tmp_path / "cache")
    assert again.of(ID) == FAULTS
    assert again.of(OTHER) == {}
    again.add(ID, {(9, ()): "hangs"})
    assert Rejections(tmp_path / "cache").of(ID) == {**FAULTS, (9, ()): "hangs"}


def test_without_a_directory_they_stay_in_memory() -> None:
    kept = Rejections(None)
    kept.add(ID, FAULTS)
    assert kept.of(ID) == FAULTS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        '{"a": 1}',
        "[1, null, []]",
        '[{"engine": "4", "knobs": [], "reason": "x"}]',
        '[{"engine": 4, "knobs": [["a"]], "reason": "x"}]',
        '[{"engine": true, "knobs": [], "reason": "x"}]',
        '[{"engine": 4, "knobs": [["a", "1"]], "reason": "x"}]',
        '[{"engine": 4, "knobs": [], "reason": 1}]',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_rejects_nothing(tmp_path: Path, text: str) -> None:
    kept = Rejections(tmp_path)
    kept.add(ID, FAULTS)
    (tmp_path / "rejected" / f"{ID}.json").write_text(text)
    assert Rejections(tmp_path).of(ID) == {}
    kept.add(ID, {(9, ()): "hangs"})  # and is written anew
    assert Rejections(tmp_path).of(ID) == {**FAULTS, (9, ()): "hangs"}


def test_a_folder_that_others_may_write_to_is_not_read(tmp_path: Path) -> None:
    Rejections(tmp_path).add(ID, FAULTS)
    os.chmod(tmp_path, 0o777)
    assert Rejections(tmp_path).of(ID) == {}


def test_a_step_keeps_the_last_of_very_many(tmp_path: Path) -> None:
    kept = Rejections(tmp_path)
    kept.add(ID, {(engine, ()): "wrong" for engine in range(2 * MOST)})
    entries = json.loads((tmp_path / "rejected" / f"{ID}.json").read_text())
    assert [entry["engine"] for entry in entries] == list(range(MOST, 2 * MOST))


def test_an_id_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no id"):
        Rejections(tmp_path).of("../../etc/passwd")


ADDS = """
import sys
from pathlib import Path
from plans_cache.rejections import Rejections
first = int(sys.argv[2])
for engine in range(first, first + 40):
    Rejections(Path(sys.argv[1])).add("a" * 64, {(engine, ()): "hangs"})
"""


def test_what_two_processes_reject_at_a_time_is_all_kept(tmp_path: Path) -> None:
    at_work = [
        subprocess.Popen([sys.executable, "-c", ADDS, str(tmp_path), str(first)])
        for first in (0, 100)
    ]
    assert [process.wait(60) for process in at_work] == [0, 0]
    wanted = {(engine, ()) for first in (0, 100) for engine in range(first, first + 40)}
    assert set(Rejections(tmp_path).of(ID)) == wanted
