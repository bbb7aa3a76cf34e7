"""A property that is tested for several cases at once fails by the name of each that it fails."""

from __future__ import annotations

import os

import pytest

from tests import chunks
from tests.samples import Case, enumerate_cases

CASES = enumerate_cases()[:5]


@chunks.each_case(CASES, size=2)
def test_every_case_is_run(case: Case) -> None:
    assert case in CASES


@pytest.mark.skipif("CUDNNGRAPH_TEST_CASE" in os.environ, reason="single cases are run")
def test_the_items_have_all_cases_in_order() -> None:
    (mark,) = test_every_case_is_run.pytestmark  # type: ignore[attr-defined]
    assert [case for chunk in mark.args[1] for case in chunk] == list(CASES)


def test_all_that_fail_are_named_and_the_others_are_run_too() -> None:
    ran = []

    def fails(case: Case) -> None:
        ran.append(case)
        if case is CASES[2]:
            pytest.fail("by pytest")
        assert case is not CASES[1], "by an assertion"

    with pytest.raises(pytest.fail.Exception, match="2 of 5 cases") as failure:
        chunks.check(fails, CASES)
    said = str(failure.value)
    assert ran == list(CASES)
    assert f"{CASES[1].id}:\n" in said and "by an assertion" in said
    assert f"{CASES[2].id}:\n" in said and "by pytest" in said
    assert f"{CASES[0].id}:\n" not in said


def test_an_item_is_skipped_if_all_its_cases_are() -> None:
    with pytest.raises(pytest.skip.Exception, match="no use"):
        chunks.check(lambda case: pytest.skip("no use"), CASES)
    chunks.check(lambda case: pytest.skip("no use") if case is CASES[0] else None, CASES)
