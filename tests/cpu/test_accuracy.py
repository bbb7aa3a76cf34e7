"""float32 is as accurate as torch's own: the accuracy table on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import accuracy


@pytest.fixture(scope="module")
def rows() -> dict[str, accuracy.Row]:
    return {row.name: row for row in accuracy.measure("cpu")}


def test_the_table_goes_into_the_summary(
    rows: dict[str, accuracy.Row], record_property: Callable[[str, object], None]
) -> None:
    text = accuracy.render(list(rows.values()), "cpu")
    record_property("summary", text)
    assert [line.split("  ")[0] for line in text.splitlines()[2:]] == list(rows)


@pytest.mark.parametrize("name", [claim.name for claim in accuracy.CLAIMS])
def test_float32_stays_within_its_bound_of_float64(
    name: str, rows: dict[str, accuracy.Row]
) -> None:
    row = rows[name]
    assert row.ours <= row.bound, f"{name}: {row.ours:.3g} > {row.bound:.3g}"


@pytest.mark.parametrize("name", [claim.name for claim in accuracy.CLAIMS])
def test_float32_is_no_farther_from_float64_than_torch(
    name: str, rows: dict[str, accuracy.Row]
) -> None:
    row = rows[name]
    assert row.ours <= row.limit_by_torch, f"{name}: {row.ours:.3g}, torch {row.torchs:.3g}"
