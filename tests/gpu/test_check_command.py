"""`cudnngraph check` on a GPU: a few graphs by every engine, by workers; what is wrong is barred,
and a second call asks for nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import cudnngraph as cg
from cudnngraph import cli, settings
from cudnngraph.backend import found_bad
from cudnngraph.backend.plan import Choice
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.select.processes import Server
from cudnngraph.sweep import run
from cudnngraph.sweep.run import Results

ONLY = "conv 1x1, relu(x + c), float16, channels_last"
# A worker that lets through what cudnngraph refuses: engines 4 and 7 read it from a wrong address.
LETS_THROUGH = """
import sys
from cudnngraph.backend.lowering import driver
driver.check_beside_convolutions = lambda ctx: None
from cudnngraph.select import forkserver
from cudnngraph.sweep import worker
forkserver.serve(int(sys.argv[1]), worker.load)
"""


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, of the workers too."""
    monkeypatch.setenv("CUDNNGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(settings, "_from_environ", None)
    cg.cache_clear()
    yield
    cg.cache_clear()


def report(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    capsys.readouterr()
    code = cli.main(["check", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_a_few_graphs_by_every_engine(capsys: pytest.CaptureFixture[str]) -> None:
    code, first = report(capsys, "--only", ONLY)
    assert first["complete"] is True and first["graphs"]["all"] == 3  # type: ignore[index]
    counts = first["counts"]
    assert isinstance(counts, dict) and counts["right"] > 0 and counts["failed"] == 0
    assert code == (0 if first["right"] else 1)
    assert first["environment"]["gpu"] == torch.cuda.get_device_name()  # type: ignore[index]
    results = found_bad.findings(0).results_path.read_bytes()
    again, second = report(capsys, "--only", ONLY)
    assert (again, second["counts"], second["wrong"]) == (code, counts, first["wrong"])
    assert found_bad.findings(0).results_path.read_bytes() == results, "nothing was asked again"


def test_engines_that_the_ranking_leaves_out_are_built_too() -> None:
    (task, *_) = run.tasks(full=False, only="conv 3x3, x, float32, contiguous")
    library = run.OnGpu(0)
    others = [each for each in library.candidates(task) if each.choice.knobs == ()]
    rows = [run.judged(library.submit(task, each.choice)) for each in others]
    assert others and all("do not propose" not in row.get("reason", "") for row in rows)


def _lets_through(file: int) -> Sequence[str]:
    return [sys.executable, "-c", LETS_THROUGH, str(file)]


def test_what_is_wrong_here_is_found_and_barred(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number for each channel of each image: wrong by engines 4 and 7 of cuDNN 9.19."""
    from cudnngraph.backend import env
    from cudnngraph.backend.lowering import driver

    if env.cudnn_version() != 91900 or env.capability(0) != 90:
        pytest.skip("seen with cuDNN 9.19.0 on GPUs of compute capability 9.0")
    monkeypatch.setattr(driver, "check_beside_convolutions", lambda ctx: None)
    todo = list(run.tasks(full=False, only="conv 3x3, relu(x + v) [w,w,1,1], float16"))[:1]
    store, results = found_bad.findings(0), Results()
    assert run.run(todo, run.OnGpu(0, Server(_lets_through)), store, results)
    bad = results.bad()
    assert bad, results.counts()
    run.write_known_bad(store, results, found_bad.environment(0))
    choice = Choice(bad[0]["engine"], tuple((name, value) for name, value in bad[0]["knobs"]))
    said = found_bad.why_found_bad(todo[0].spec, choice, 0, allow_tf32=False)
    assert said is not None and said.startswith("known bad on this GPU: ")


def test_a_plan_that_is_barred_is_passed_over_and_explained() -> None:
    (task, *_) = run.tasks(full=False, only=ONLY)
    policy = cg.Policy(allow_tf32=False, tune="heuristic")
    first = compile_spec(task.spec, "cuda", policy=policy)
    (step,) = first._program.steps
    assert step.choice is not None
    results = Results()
    results.take(
        {
            "step": task.digest,
            "tf32": False,
            "engine": step.choice.engine,
            "knobs": [list(knob) for knob in step.choice.knobs],
            "status": "wrong",
            "reason": "wrong: said by a test",
        }
    )
    run.write_known_bad(found_bad.findings(0), results, found_bad.environment(0))
    cg.cache_clear()
    second = compile_spec(task.spec, "cuda", policy=policy)
    (other,) = second._program.steps
    assert other.choice != step.choice
    assert "known bad on this GPU: wrong: said by a test" in str(second.explain())
