"""The tier that needs a GPU is run where one is; that it can be, every machine can tell."""

from __future__ import annotations

from pathlib import Path

from tests import python

ROOT = Path(__file__).parents[2]


def test_the_tests_for_a_gpu_are_collected() -> None:
    """A file that is not stops the whole tier."""
    words = ("pytest", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider")
    done = python.run("-m", *words, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:]
    told = done.stdout.splitlines()
    for path in sorted((ROOT / "tests/gpu").glob("test_*.py")):
        assert any(line.startswith(f"tests/gpu/{path.name}::") for line in told), path.name
