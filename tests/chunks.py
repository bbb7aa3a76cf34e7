"""Cheap properties of many cases, several cases an item: an item of pytest costs milliseconds."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Sequence

import pytest

from tests.samples import Case

SIZE = 32  # cases an item


def each_case(
    cases: Sequence[Case], size: int = SIZE
) -> Callable[[Callable[[Case], None]], Callable[[Sequence[Case]], None]]:
    """Run a test that takes a case alone for every case, ``size`` cases an item.

    Every case of an item runs, and a failure names all that failed. An item's id is that of its
    first case. ``CUDNNGRAPH_TEST_CASE=regex`` runs those cases alone whose ids match.
    """
    cases = [
        case for case in cases if re.search(os.environ.get("CUDNNGRAPH_TEST_CASE", ""), case.id)
    ]
    chunks = [cases[first : first + size] for first in range(0, len(cases), size)]

    def decorate(test: Callable[[Case], None]) -> Callable[[Sequence[Case]], None]:
        @pytest.mark.parametrize("chunk", chunks, ids=lambda chunk: f"{chunk[0].id}..")
        def run(chunk: Sequence[Case]) -> None:
            check(test, chunk)

        # Not functools.wraps: pytest would follow it to the arguments of the test.
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorate


def check(test: Callable[[Case], None], chunk: Sequence[Case]) -> None:
    """Run a test for every case; fail with the ids and tracebacks of all cases that failed."""
    failed, skipped = [], []
    for case in chunk:
        try:
            test(case)
        except pytest.skip.Exception as skip:
            skipped.append(str(skip))
        except (Exception, pytest.fail.Exception):
            failed.append(f"{case.id}:\n{traceback.format_exc()}")
    if failed:
        pytest.fail(f"{len(failed)} of {len(chunk)} cases\n" + "\n".join(failed), pytrace=False)
    if len(skipped) == len(chunk):
        pytest.skip(skipped[0])
