"""The script that measures whole models runs, on small ones, and writes its page."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.scripts import loaded

SCRIPT = Path(__file__).parents[3] / "docs" / "results" / "h200_models.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(SCRIPT)


def test_a_quick_run_writes_rows_and_keeps_notes_and_other_rows(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "ROUNDS", 2)
    monkeypatch.setattr(script, "SAMPLE_MS", 1.0)
    page = tmp_path / "page.md"
    page.write_text("old\n## Notes\nkept by hand\n")
    assert script.main(["--quick", "--only", "U-Net", "--out", str(page)]) == 0
    assert script.main(["--quick", "--only", "small GPT", "--out", str(page)]) == 0
    data = json.loads(page.with_suffix(".json").read_text())
    assert [row["name"] for row in data["rows"]] == ["small U-Net", "small GPT"]
    text = page.read_text()
    assert text.endswith("\n## Notes\nkept by hand\n")
    for row in data["rows"]:
        assert row["times_us"]["fused"] > 0 and row["times_us"]["eager"] > 0
        assert all(error < 1e-5 for error, _ in row["errors"])
        line, parity = (each for each in text.splitlines() if each.startswith(f"| {row['name']} |"))
        assert f"| {row['times_us']['fused'] / 1e3:.3f} |" in line
        assert parity.endswith(" | 100.000% | 100.000% |")


def test_the_share_of_equal_classes_is_counted(script: ModuleType) -> None:
    net = nn.Identity()
    x = torch.tensor([[[1.0, 5.0], [2.0, 3.0]]])  # (1, 2 classes, 2 pixels)
    ours = x.clone()
    assert script.agreement(net, x, ours) == {"fused": 1.0, "torch": 1.0}
    ours[0, :, 1] = torch.tensor([0.0, 1.0])
    assert script.agreement(net, x, ours) == {"fused": 0.5, "torch": 1.0}


def test_the_table_of_steps_puts_equal_ones_together(script: ModuleType) -> None:
    step = {"ops": "conv bias", "input": "a", "output": "b", "runs_on": "cuDNN", "us": 10.0}
    row = {
        "name": "net",
        "times_us": {"fused": 100.0, "torch.compile": 120.0, "eager": 300.0},
        "asked": 1.1,
        "steps": [step, dict(step), {**step, "ops": "max_pool", "runs_on": "torch", "us": 5.0}],
        "plans_us": 20.0,
        "torch_us": 5.0,
        "gaps_us": 75.0,
        "counts": {"cuDNN": 2, "torch": 1},
        "fuse_s": 7.0,
        "again_s": 0.1,
        "tier": "built",
    }
    assert script.text_of(row) == "| net | 0.300 | - | 0.120 | - | 0.100 | 1.20 | 1.10 |"
    assert script.glue_of(row).endswith("| 80.0% | 7 | 0.1 |")
    assert script.glue_of({**row, "tier": "disk"}).endswith("| 80.0% | - | 0.1 |"), (
        "found, not tuned"
    )
    assert "| conv bias | a | b | cuDNN | 2 | 10.0 | 20.0% |" in script.steps_of(row)
