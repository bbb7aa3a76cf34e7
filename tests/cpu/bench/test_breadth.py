"""The benchmark of the families beside convolution: its cases are right, its script runs."""

from __future__ import annotations

import json
import math
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.bench.breadth import Filled, breadth_suite
from cudnngraph.bench.cases import Case
from cudnngraph.ops.work import bytes_of, flops_of
from tests import numerics, python

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "docs" / "results" / "h200_breadth.py"
CPU = torch.device("cpu")


@pytest.mark.parametrize("case", breadth_suite(quick=True), ids=lambda case: case.name)
def test_a_case_computes_what_eager_torch_does(case: Case) -> None:
    tensors = case.tensors(CPU)
    want = case.eager({name: tensor.clone() for name, tensor in tensors.items()})
    want = want if isinstance(want, tuple) else (want,)
    exe = case.graph.compile("cpu")
    exe.run(**tensors)
    for name, right in zip(exe.spec.outputs, want, strict=True):
        error = numerics.relative_error(tensors[name], right.double())
        assert error <= 1.5 * numerics.BOUNDS[str(right.dtype).removeprefix("torch.")], name


@pytest.mark.parametrize("case", breadth_suite(quick=True), ids=lambda case: case.name)
def test_the_other_ways_of_a_case_run(case: Case) -> None:
    for name, way in case.others.items():
        tensors = case.tensors(CPU)
        before = {key: tensor.clone() for key, tensor in tensors.items()}
        made = way(tensors)
        assert made is not None, name
        if name == "torch fused":
            right = case.eager(before)
            assert all(m.shape == r.shape for m, r in zip(made, right, strict=True))


def test_inputs_are_the_same_for_a_seed_and_in_place_outputs_are_inputs() -> None:
    (case,) = (case for case in breadth_suite(quick=True) if case.name.startswith("adamw"))
    assert isinstance(case, Filled)
    first, again, other = case.tensors(CPU), case.tensors(CPU), case.tensors(CPU, seed=1)
    assert first["next_p"] is first["p"] and first["next_v"] is first["v"]
    assert torch.equal(first["p"], again["p"]) and not torch.equal(first["p"], other["p"])
    assert float(first["v"].min()) > 0.0


def test_the_full_suite_has_the_shapes_that_are_asked() -> None:
    names = {case.name for case in breadth_suite()}
    asked = {
        *("rms_norm 16384 4096", "layer_norm 16384 4096", "rms_norm 16384 4096 residual"),
        *("linear 8192 4096 4096 bias gelu", "swiglu 8192 4096 14336", "softmax 16384 4096"),
        *("pixels 64 224 224 3", "adamw 67108864", "group_norm 8 320 64 64 groups 32"),
    }
    assert asked <= names and len(names) == len(breadth_suite())
    for case in breadth_suite():
        case.graph.spec()


def test_bytes_and_operations_of_a_graph() -> None:
    g = cg.Graph("g")
    x = g.input("x", (2, 8, 10, 10), torch.float16)
    w, b = g.input("w", (4, 8, 3, 3), torch.float16), g.input("b", (4,), torch.float32)
    g.output("y", g.bias(g.conv(x, w), b))
    assert bytes_of(g.spec()) == 2 * (1600 + 288 + 512) + 4 * 4
    assert flops_of(g.spec()) == 2 * 512 * 72
    g = cg.Graph("g")
    x = g.input("x", (3, 5, 7), torch.float32, stride=(0, 7, 1))
    g.output("y", x @ g.input("w", (7, 4), torch.float32))
    assert bytes_of(g.spec()) == 4 * (35 + 28 + 60)
    assert flops_of(g.spec()) == 2 * 60 * 7
    g = cg.Graph("g")
    q, k, v = (g.input(name, (2, 4, 16, 8), torch.float16) for name in "qkv")
    g.output("o", g.sdpa(q, k, v))
    full = flops_of(g.spec())
    assert full == 4 * 2 * 4 * 16 * 16 * 8
    g = cg.Graph("g")
    q, k, v = (g.input(name, (2, 4, 16, 8), torch.float16) for name in "qkv")
    g.output("o", g.sdpa(q, k, v, is_causal=True))
    assert flops_of(g.spec()) == full // 2


def run(*arguments: str) -> Any:
    return python.run(SCRIPT, *arguments, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_the_script_writes_a_page_and_keeps_its_notes_and_other_rows(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    done = run("--quick", "--suites", "breadth", "--only", "16 64", "--out", str(out))
    assert done.returncode == 0, done.stderr
    text, answer = out.read_text(), json.loads(out.with_suffix(".json").read_text())
    assert "rms_norm 16 64 residual and sum" in text and "## Failed" not in text
    for row in answer["rows"]:
        assert {"eager", "heuristic", "autotuned"} <= set(row["times_us"])
        assert all(us > 0.0 for us in row["times_us"].values())
        assert row["difference_from_eager"]["autotuned"] < 0.02
        assert row["bytes"] > 0 and math.isfinite(row["search_s"])
    assert answer["command"].startswith("python docs/results/h200_breadth.py --quick")
    assert answer["device"] == "CPU" and answer["torch"] == torch.__version__
    out.write_text(text + "\n## Notes\n\nKept.\n")
    done = run("--quick", "--suites", "breadth", "--only", "adamw", "--out", str(out))
    assert done.returncode == 0, done.stderr
    names = [row["name"] for row in json.loads(out.with_suffix(".json").read_text())["rows"]]
    assert "adamw 4096" in names and "softmax 16 64" in names
    assert out.read_text().endswith("\n## Notes\n\nKept.\n")
    assert "| adamw 4096 |" in out.read_text()


def test_numbers_that_are_asked_are_judged() -> None:
    namespace = runpy.run_path(str(SCRIPT))
    rows = {
        "a": {"times_us": {"eager": 10.0, "autotuned": 6.0, "copy": 4.0, "other": 5.0}},
        "b": {"times_us": {"eager": 10.0, "autotuned": 3.0}},
    }
    Asked, judged = namespace["Asked"], namespace["judged"]
    assert judged(Asked("a", "eager", 0.65, ""), rows)["met"] is True
    assert judged(Asked("a", "copy", 1.2, ""), rows)["met"] is False
    assert judged(Asked("a", "best other", 1.5, ""), rows)["measured"] == 1.5
    assert judged(Asked("b", "a", 0.5, ""), rows)["measured"] == 0.5
    assert judged(Asked("c", "eager", 1.0, ""), rows) is None
    assert judged(Asked("b", "copy", 1.0, ""), rows) is None
    suites = namespace["SUITES"]
    names = {case.name for suite in suites for case in namespace["cases_of"](suite, False)}
    there = {name.split()[0] for name in names}  # a suite that is not there has no names
    for each in namespace["ASKED"]:
        if each.case.split()[0] in there:
            assert each.case in names
            assert each.against in {*names, "best other"} or any(
                each.against in {"eager", *case.others}
                for suite in suites
                for case in namespace["cases_of"](suite, False)
                if case.name == each.case
            )
