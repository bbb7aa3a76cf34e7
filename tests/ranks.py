"""Two processes that meet in a process group: the workers of ``tests/workers``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_two_ranks(worker: str, tmp_path: Path) -> list[Any]:
    """Return what each of two processes prints in its last line."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "tests/workers" / worker),
                str(rank),
                str(tmp_path / "meet"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env=environ,
        )
        for rank in range(2)
    ]
    told = []
    for process in running:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        told.append(json.loads(out.splitlines()[-1]))
    return told
