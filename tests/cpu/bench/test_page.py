"""The script that joins several runs of ``cudnngraph bench``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from cudnngraph.bench.measure import Ceilings, Row
from cudnngraph.bench.report import Report, to_json
from tests.scripts import loaded

SCRIPT = Path(__file__).parents[3] / "docs" / "results" / "h200_bench.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(SCRIPT)


def row(suite: str, name: str, us: float) -> Row:
    times = {"plan": us, "eager": 30.0}
    return Row(suite, name, "plan", "gpu", times, 10**9, 10**6, "float16", 9.0, ["a note"])


def report(copy: float, product: float, *rows: Row) -> Report:
    ceilings = Ceilings(copy, {"float16": product})
    return Report("NVIDIA H200", {"torch": "2.11"}, False, False, ceilings, rows, ["left out"])


def test_runs_are_joined_by_suite_and_later_rows_stand(script: ModuleType, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    runs = [
        report(2000.0, 500.0, row("matmul", "m", 20.0), row("conv", "c", 10.0)),
        report(3000.0, 400.0, row("conv", "d", 5.0), row("matmul", "m", 15.0)),
    ]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(to_json(run)))
    script.main([*map(str, files), "--out", str(tmp_path / "page")])
    made = json.loads((tmp_path / "page.json").read_text())
    found = [(each["suite"], each["name"], each["times_us"]["plan"]) for each in made["rows"]]
    assert found == [("conv", "c", 10.0), ("conv", "d", 5.0), ("matmul", "m", 15.0)]
    assert made["ceilings"] == {"copy_gb_s": 3000.0, "matmul_tflop_s": {"float16": 500.0}}
    assert {each["least_us"] for each in made["rows"]} == {2.0}
    assert made["summary"]["matmul"]["eager"]["geomean"] == pytest.approx(2.0)
    assert made["notes"] == ["left out"]
    assert ">m<" in (tmp_path / "page.html").read_text()
    assert "matmul: 2.00 (1)" in (tmp_path / "page.svg").read_text()


def test_runs_of_different_machines_are_not_joined(script: ModuleType) -> None:
    one = report(2000.0, 500.0, row("conv", "c", 10.0))
    other = replace(one, device="NVIDIA B200")
    with pytest.raises(ValueError, match="the runs differ in device"):
        script.joined([to_json(one), to_json(other)])
