"""`cudnngraph check` without a GPU: its report, its exit codes, and how it goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from cudnngraph import cli
from cudnngraph.backend.plan import Choice
from cudnngraph.select.processes import Unusable
from cudnngraph.select.workers import Answer
from cudnngraph.sweep import run
from cudnngraph.sweep.run import Task
from plans_cache.findings import Findings
from tests.sweeps import OFF, Stand, accepted, fault, rejected


@pytest.fixture
def gpu(here: Findings, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As far as torch says there is one, with :class:`Stand` in the place of cuDNN."""
    world: dict[str, Any] = {"judge": lambda task, choice: accepted(), "stands": []}

    def library(index: int) -> Stand:
        world["stands"].append(Stand(world["judge"]))
        return world["stands"][-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(run, "OnGpu", library)
    return world


ONLY = ("--only", "conv 3x3, relu(x + c), float16")


def test_a_machine_that_is_right(
    gpu: dict[str, Any], here: Findings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *ONLY]) == 0
    out = capsys.readouterr().out
    assert out == (
        "3 graphs on gpu NVIDIA H200, compute_capability 9.0, cudnn 9.19.0, frontend 1.28.0, "
        "driver 580.65.06\nplans: 9 right, 3 barred\n"
    )
    known = here.known_bad()
    assert known["complete"] is True and known["counts"]["right"] == 9
    assert known["environment"]["driver"] == "580.65.06"


def test_what_is_wrong_is_shown_and_barred_and_is_the_exit_code(
    gpu: dict[str, Any], here: Findings, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu["judge"] = lambda task, choice: (
        rejected(OFF, wrong=True) if choice.engine == 4 else accepted()
    )
    assert cli.main(["check", *ONLY]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["status", "engine", "graph", "what", "is", "wrong"]
    assert lines[1].startswith("wrong   4       conv 3x3, relu(x + c), float16, channels_last, 64 ")
    assert lines[1].endswith(OFF)
    assert lines[-2] == "plans: 6 right, 3 wrong, 3 barred"
    assert lines[-1] == (
        "barred on this GPU from now on: 3 plans, and 1 times an engine for a whole pattern "
        f"({here.path})"
    )
    assert cli.main(["check", *ONLY]) == 1, "so it is the second time, when nothing is tried"
    assert gpu["stands"][1].asked == []
    gpu["judge"] = lambda task, choice: accepted()
    assert cli.main(["check", *ONLY, "--again"]) == 0
    assert here.known_bad()["steps"] == here.known_bad()["patterns"] == []


def test_the_report_in_json(
    gpu: dict[str, Any], here: Findings, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Choice(7, (("TILE", 2),))
    gpu["judge"] = lambda task, choice: (
        rejected(OFF, wrong=True)
        if choice == bad and "2x16x16" in task.graph
        else fault(choice)
        if choice.engine == 4 and "3x7x5" in task.graph
        else accepted()
    )
    assert cli.main(["check", *ONLY, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        *("schema", "environment", "mode", "only", "complete", "right", "seconds", "graphs"),
        *("counts", "wrong", "known_bad"),
    }
    assert report["schema"] == 1 and report["mode"] == "quick" and report["only"] == ONLY[1]
    assert report["environment"]["gpu"] == "NVIDIA H200"
    assert report["complete"] is True and report["right"] is False
    assert report["graphs"] == {"all": 3, "checked": 3, "refused": 0}
    assert report["counts"] == {
        "right": 7,
        "wrong": 1,
        "fault": 1,
        "refused": 0,
        "out of memory": 0,
        "barred": 3,
        "failed": 0,
    }
    first, second = report["wrong"]
    assert (
        set(first)
        == set(second)
        == {
            *("graph", "pattern", "step", "engine", "knobs", "allow_tf32", "status", "reason"),
            *("error", "bound"),
        }
    )
    assert (first["engine"], first["knobs"], first["status"]) == (7, {"TILE": 2}, "wrong")
    assert (first["error"], first["bound"], first["allow_tf32"]) == (0.5, 0.002, False)
    assert first["pattern"] == "conv 3x3, relu(x + c), float16, channels_last"
    assert (second["engine"], second["status"], second["error"]) == (4, "fault", None)
    assert report["known_bad"] == {"file": str(here.path), "plans": 2, "patterns": 0}


def test_an_interrupt_says_how_to_go_on_and_the_same_call_does(
    gpu: dict[str, Any], here: Findings, capsys: pytest.CaptureFixture[str]
) -> None:
    count = 0

    def judge(task: Task, choice: Choice) -> Answer:
        nonlocal count
        count += 1
        if count == 30:
            raise KeyboardInterrupt
        return rejected(OFF, wrong=True) if count == 1 else accepted()

    gpu["judge"] = judge
    assert cli.main(["check", "--full", *ONLY]) == 130
    error = capsys.readouterr().err
    assert "interrupted: 7 of 10 graphs are checked; `cudnngraph check --full --only " in error
    assert error.endswith("'conv 3x3, relu(x + c), float16'` goes on from there\n")
    known = here.known_bad()
    assert known["complete"] is False and len(known["steps"]) == 1, "what is known is barred"
    assert cli.main(["check", "--full", *ONLY]) == 1
    assert here.known_bad()["counts"]["right"] == 29
    first, second = gpu["stands"]
    assert not set(first.asked[:21]) & set(second.asked)


def test_a_limit_stops_and_says_so(gpu: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--full", *ONLY, "--limit", "1e-9"]) == 0
    out = capsys.readouterr().out
    assert "stopped after 1e-09 s: 0 of 10 graphs are checked; `cudnngraph check --full" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--limit", "0"], "--limit 0; expected seconds over 0"),
        (["--limit", "nan"], "--limit nan; expected seconds over 0"),
        (["--only", "nothing"], "--only 'nothing': no quick pattern has that in its name"),
        (["--quick", "--full"], "not allowed with argument"),
        (["--limit", "soon"], "invalid float value"),
    ],
)
def test_calls_that_make_no_sense(
    gpu: dict[str, Any], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(["check", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_a_gpu_there_is_nothing_to_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["check"]) == 1
    assert capsys.readouterr().err == (
        "error: torch sees no CUDA device, there is nothing to check\n"
    )


def test_no_workers_are_an_error_and_what_was_found_is_kept(
    gpu: dict[str, Any], here: Findings, capsys: pytest.CaptureFixture[str]
) -> None:
    def judge(task: Task, choice: Choice) -> Answer:
        if "3x7x5" in task.graph:
            raise Unusable("a worker does not start: the GPU is busy")
        return accepted()

    gpu["judge"] = judge
    assert cli.main(["check", *ONLY]) == 1
    assert "a worker does not start: the GPU is busy" in capsys.readouterr().err
    assert here.known_bad()["complete"] is False and here.known_bad()["counts"]["right"] == 3
