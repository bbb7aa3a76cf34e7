"""The table of features in the README: every sample graph is in it once, and none is left out."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest

from tests import coverage
from tests.samples import enumerate_cases

CASES = enumerate_cases()
TIERS = ("cpu.test_samples", "deviceless.test_lowering", "gpu.test_samples")


@pytest.mark.parametrize("tier", TIERS)
def test_each_tier_has_at_least_500_sample_graphs(tier: str) -> None:
    cases = importlib.import_module(f"tests.{tier}").CASES
    assert len({case.id for case in cases}) == len(cases) >= 500


def test_every_case_is_in_a_row_and_every_row_has_cases() -> None:
    rows = {case.id: coverage.row_of(case.id) for case in CASES}
    assert [id for id, row in rows.items() if row is None] == []
    count = Counter(rows.values())
    assert [row.what for row in coverage.ROWS if not count[row]] == []


def test_every_case_of_a_gradients_op_has_a_place() -> None:
    moved = {case.id: coverage.place(case.id) for case in CASES if case.family == "gradients"}
    assert [id for id, (name, _) in moved.items() if name.startswith("gradients-")] == []
    assert moved["gradients-attention_sink-fp16"] == ("sdpa-sink-fp16", True)
    assert moved["gradients-norm_plain-fp32"] == ("batch_norm_train-plain-fp32", False)
    assert moved["gradients-norm_backward_plain-fp32"] == ("batch_norm_train-plain-fp32", True)
    assert moved["gradients-sum_rows-fp32"] == ("reduction-sum_rows-fp32", False)


def test_the_file_says_of_every_case_what_it_runs_as_and_of_no_other() -> None:
    known = coverage.read()
    for of, cases in coverage.expected().items():
        assert set(known[of]) == cases, coverage.HOW_TO_WRITE
        assert set(known[of].values()) == {"plan", "steps", "both", "torch"}


def test_a_mark_counts_the_cases_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"forward": {}, "gradient": {}}
    for name, kind in (("plain", "plan"), ("causal", "plan"), ("d_20", "torch")):
        known["forward"][f"sdpa-{name}-fp16"] = kind
    known["forward"]["sdpa-plain-fp32"] = "torch"
    known["forward"]["gradients-attention_plain-fp16"] = "steps"  # a forward and a backward
    known["gradient"] |= {"sdpa-plain-fp16": "plan", "sdpa-causal-fp16": "both"}
    monkeypatch.setattr(coverage, "read", lambda: known)
    (line,) = (line for line in coverage.table().splitlines() if "full, causal" in line)
    cells = [cell.strip() for cell in line.split("|")[2:-3]]
    assert cells == ["plan 2, torch 1", "torch 1", "plan 1, both 1", ""]


def test_what_is_written_replaces_the_case_and_drops_cases_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, id = tmp_path / "coverage.json", "sdpa-plain-fp16"
    old = {"cudnn": 1, "forward": {id: "torch", "gone": "plan"}, "gradient": {id: "steps"}}
    path.write_text(json.dumps(old))
    monkeypatch.setattr(coverage, "PATH", path)
    monkeypatch.setattr(coverage, "read", lambda: json.loads(path.read_text()))
    left = [(id, "forward", {"sdpa": "none"}), (id, "gradient", {})]
    coverage.write([(id, "forward", "plan"), ("sdpa-plain-fp64", "forward", "torch")], left, 2)
    assert json.loads(path.read_text()) == {
        "cudnn": 2,
        "forward": {id: "plan"},
        "gradient": {id: "steps"},
        "left": {"forward": {id: {"sdpa": "none"}}, "gradient": {}},
    }
