"""Moves of files change neither keys, nor steps, nor gradients, nor public names (tests/golden)."""

from __future__ import annotations

import pytest

from tests import golden
from tests.samples import enumerate_cases

CASES = enumerate_cases()
SIZE = 80


@pytest.mark.parametrize("first", range(0, len(CASES), SIZE))
def test_keys_steps_and_gradients_of_samples_are_as_they_were(first: int) -> None:
    kept = golden.SAMPLES.read_text().splitlines()
    assert len(kept) == len(CASES)
    made = [golden.line(case) for case in CASES[first : first + SIZE]]
    assert made == kept[first : first + SIZE]


def test_public_names_and_signatures_are_all_there() -> None:
    """More may be added to them: then ``python -m tests.golden`` writes them anew."""
    assert list(golden.api()) == golden.API.read_text().splitlines()
