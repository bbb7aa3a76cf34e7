"""The benchmark command on a GPU: every suite on small data, and one row of a table in full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cudnngraph.bench.suites import SUITES
from cudnngraph.cli import main


def test_the_quick_run_measures_every_suite(tmp_path: Path) -> None:
    file, page = tmp_path / "bench.json", tmp_path / "bench.html"
    arguments = ["--quick", "--tune", "heuristic", "--json", str(file), "--html", str(page)]
    assert main(["bench", *arguments]) == 0
    told = json.loads(file.read_text())
    assert not told["reference"] and {row["suite"] for row in told["rows"]} == set(SUITES) - {
        "lowprecision"
    }
    for row in told["rows"]:
        assert len(row["times_us"]) > 1 and row["ours"] in row["times_us"], row["name"]
    assert page.read_text().count("<svg") > 5


@pytest.mark.alone
def test_a_convolution_is_below_the_ceilings_of_the_same_run(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    case = "conv 32 512 7 512 3 1 1 float16 bias relu"
    assert main(["bench", "conv", "--only", case, "--tune", "heuristic", "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    (row,) = told["rows"]
    assert {"heuristic", "eager", "torch.cudnn_convolution_relu"} <= set(row["times_us"])
    us = row["times_us"]["heuristic"]
    assert row["least_us"] < us < 2.0 * row["times_us"]["eager"]
    assert row["flops"] == 2 * 32 * 512 * 7 * 7 * 512 * 9
    assert (
        told["ceilings"]["copy_gb_s"] > 100 and told["ceilings"]["matmul_tflop_s"]["float16"] > 10
    )
