"""Hostile arguments to every public callable: a named error or a right result, and never a crash.

``HOSTILE_CALLS=20000 pytest tests/cpu/test_hostile.py`` makes more calls, ``HOSTILE_SEED`` others.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cudnngraph as cg
from cudnngraph import functional, nn
from tests import hostile

ROOT = Path(__file__).resolve().parents[2]
CALLS = int(os.environ.get("HOSTILE_CALLS", "2000"))
SEED = int(os.environ.get("HOSTILE_SEED", "0"))
TARGETS = hostile.targets()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_good_arguments_are_good(target: hostile.Target) -> None:
    function, good, use = target.make()
    if target.name == "explain":
        with pytest.raises(cg.NotSupported, match="known targets"):
            function(**good)
        return
    use(function(**good))


def test_every_public_callable_is_a_target() -> None:
    named = {target.name for target in TARGETS}
    assert {f"Graph.{name}" for name in hostile.builder_methods()} <= named
    assert {f"functional.{name}" for name in functional.__all__} <= named
    modules = {n for n in nn.__all__ if inspect.isclass(getattr(nn, n)) and n.startswith("Fused")}
    assert {f"nn.{name}{way}" for name in modules for way in ("", ".forward")} <= named
    # Errors, and what the package makes and hands out: no caller makes one.
    made = {
        *("BoundCall", "CacheStats", "CapturedCall", "CapturedStep", "Explanation", "Fused"),
        *("Gradient", "GraphSpec", "MissInfo", "Problem", "Specialized", "TensorSpec", "Value"),
    }
    others = {
        name
        for name in cg.__all__
        if callable(getattr(cg, name))
        and name not in made | modules
        and not (inspect.isclass(getattr(cg, name)) and issubclass(getattr(cg, name), Exception))
        and (inspect.isclass(getattr(cg, name)) or inspect.signature(getattr(cg, name)).parameters)
    }
    assert others <= named


def test_hostile_arguments_end_in_a_named_error_or_a_result() -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.hostile", str(CALLS), str(SEED)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = ran.stdout.strip().splitlines() or ["none"]
    assert ran.returncode == 0, f"ended with {ran.returncode} in {lines[-1]}\n{ran.stderr[-3000:]}"
    report = json.loads(lines[-1])
    assert report["wrong"] == [], f"{len(report['wrong'])} of {CALLS}"
    assert report["targets"] == len(TARGETS)
    assert report["refused"] > CALLS / 2
    assert report["ran"] > CALLS / 50
