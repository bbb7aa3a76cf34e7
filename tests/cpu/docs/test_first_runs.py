"""MKL's first call: made on one element when the package is imported; first runs of the demo."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests import python
from tests.numerics import bound
from tests.scripts import loaded

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "docs" / "results" / "first_runs.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(SCRIPT)


PROBE = """
import json, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tests.scripts import loaded
from pathlib import Path

script = loaded(Path("docs/results/first_runs.py"))
calls = []

class Log(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for each in args:
            if isinstance(each, torch.Tensor):
                what = [str(function), each.numel(), str(each.dtype), str(each.device)]
                calls.append([*what, torch.get_num_threads()])
        return function(*args, **(kwargs or {}))

torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")
before = script.kernels()
with Log():
    import MODULE
print(json.dumps({"calls": calls, "before": before, "after": script.kernels()}))
"""


@pytest.mark.parametrize("module", ["cudnngraph", "cudnngraph.nn", "tests.numerics"])
def test_the_first_computation_of_all_is_a_call_on_one_element(module: str) -> None:
    """Whatever the user's default dtype and device are: bfloat16 would not call MKL."""
    done = python.run("-c", PROBE.replace("MODULE", module), cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["calls"][0][:4] == ["aten.exp.default", 1, "torch.float32", "cpu"]
    if found["before"] is not None:  # an MKL that can be asked
        assert found["before"][0] == -1, "torch alone has not called it"
        assert found["after"][0] != -1


def test_the_demo_is_right_in_new_processes(script: ModuleType) -> None:
    """A few of the runs of which docs/results/first-runs.md has many."""
    found = script.Found()
    for _ in range(2):
        found.add(*script.once())
    assert (found.runs, found.failed, found.said) == (2, 0, [])
    assert len(found.worst) == 4
    assert max(found.worst.values()) <= bound(torch.float32)


TABLE = """
│ sharpen: depthwise conv + clamp  │ cpu    │ reference │     5.54 │      3.25 │    1.1e-07 │
│ attention over patches: sdpa     │ cpu    │ reference │      309 │      55.1 │ {error} │
"""


def test_the_page_counts_failures_and_keeps_the_largest_error(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = TABLE.format(error="   1.3e-07")
    bad = TABLE.format(error="1.4e-05 FAILED")
    runs = [(0, good, ""), (1, bad, "x\nFAILED: attention\n"), (0, good, ""), (1, "", "")]
    out = tmp_path / "page.md"
    assert script.main(["--out", str(out)], runs) == 1
    text = out.read_text(encoding="utf-8")
    assert capsys.readouterr().out == text
    assert "4 runs, each in a new process, one after the other; 2 failed." in text
    assert "| sharpen: depthwise conv + clamp | 1.1e-07 | 0 |" in text
    assert "| attention over patches: sdpa | 1.4e-05 | 1 |" in text
    assert "Failed: FAILED: attention\nFailed: exit code 1\n" in text
    assert script.main([], [(0, good, "")]) == 0


def test_the_page_that_is_kept_is_of_many_runs_without_a_failure() -> None:
    text = SCRIPT.with_name("first-runs.md").read_text(encoding="utf-8")
    count, _, rest = text.partition(" runs, each in a new process, one after the other; ")
    assert int(count.splitlines()[-1]) >= 60
    assert rest.startswith("0 failed.")
    rows = [line.split(" | ") for line in rest.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 4
    assert all(float(error) <= bound(torch.float32) for _, error, _ in rows)
    assert [over for *_, over in rows] == ["0 |"] * 4
