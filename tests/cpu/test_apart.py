"""Processes of their own: what one case does to its process harms no other."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests import apart


def behave(case: Any, skip: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Three marks, of which the second does what the case says."""
    print("no message")
    for mark in ("first", "second", "third"):
        if mark in skip:
            continue
        yield mark, None
        if mark == "second":
            if case == "aborts":
                os.abort()
            elif case == "hangs":
                time.sleep(600)
            elif case == "raises":
                raise ValueError("misaligned\naddress")
            elif case == "exits":
                os._exit(3)
        yield mark, "right"


def test_a_case_that_dies_is_told_and_the_others_go_on() -> None:
    cases = ["is well", "aborts", "raises", "exits", "hangs", "is well"]
    function = f"{__name__ if __name__.startswith('tests.') else 'tests.cpu.test_apart'}:behave"
    said = list(apart.run(function, cases, jobs=3, limit_s=4.0))
    outcomes = {(cases[number], mark): outcome for number, mark, outcome in said}
    assert len(said) == 3 * len(cases)
    for case in cases:
        assert outcomes[case, "first"] == outcomes[case, "third"] == "right"
    assert outcomes["is well", "second"] == "right"
    assert outcomes["aborts", "second"] == {"died": "SIGABRT"}
    assert outcomes["raises", "second"] == {"died": "ValueError: misaligned"}
    assert outcomes["exits", "second"] == {"died": "exit code 3"}
    assert outcomes["hangs", "second"] == {"died": "hangs, or takes more than 4 s"}
    assert {number for number, _, _ in apart.died(said)} == {1, 2, 3, 4}


def test_no_child_outlives_a_caller_that_stops_listening() -> None:
    heard = apart.run("tests.cpu.test_apart:tell_its_process", ["", ""], jobs=2, limit_s=60.0)
    pids = [outcome for _, _, outcome in (next(heard), next(heard))]
    heard.close()
    deadline = time.monotonic() + 5.0
    while any(map(_lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_lives, pids))


def tell_its_process(case: Any, skip: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The id of the process, which then lives on."""
    yield "process", os.getpid()
    time.sleep(600)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # dead, and not yet collected by the system
