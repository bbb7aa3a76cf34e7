"""The script that measures products with what stands behind them: all of it but the measuring."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.plan import KERNEL, Choice
from cudnngraph.device import timing
from cudnngraph.errors import NotSupported
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.partition.analysis import CutGraph, compute_nodes
from cudnngraph.runtime.compile import compile as compile_spec
from cudnngraph.select import verification
from cudnngraph.select.decision import StepPlan
from cudnngraph.select.kernels import Kernels
from plans_cache.gate import Gate
from tests import numerics
from tests.scripts import loaded

SCRIPT = Path(__file__).parents[3] / "docs" / "results" / "h200_products.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield loaded(SCRIPT)


@pytest.fixture(scope="module")
def behind(script: ModuleType) -> Mapping[str, Any]:
    """What may stand behind a product."""
    return importlib.import_module("product_ways").BEHIND  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def small(script: ModuleType) -> Callable[[str], Any]:
    return lambda behind: script.Row("small", (6, 16, 8), torch.bfloat16, behind)


EAGER: Mapping[str, Callable[..., Any]] = {
    "nothing": lambda y: y,
    "bias": lambda y, b: y + b,
    "bias, relu": lambda y, b: F.relu(y + b),
    "bias, gelu_tanh": lambda y, b: F.gelu(y + b, approximate="tanh"),
    "bias, gelu": lambda y, b: F.gelu(y + b),
    "bias, gelu, 1.7": lambda y, b: F.gelu(y + b) * 1.7,
    "bias, silu": lambda y, b: F.silu(y + b),
    "bias kept, gelu_tanh": lambda y, b: (y + b, F.gelu(y + b, approximate="tanh")),
    "bias kept, gelu": lambda y, b: (y + b, F.gelu(y + b)),
    "residual": lambda y, r: y + r,
    "bias, residual": lambda y, b, r: y + b + r,
    "bias, residual, relu": lambda y, b, r: F.relu(y + b + r),
    "bias, float32 residual": lambda y, b, r: y + b + r,
    "bias, factor, residual": lambda y, b, f, r: (y + b) * f + r,
    "bias, residual, layer_norm": lambda y, b, r, w, c: (
        y + b + r,
        F.layer_norm(y + b + r, (8,), w, c),
    ),
    "residual, rms_norm": lambda y, r, w: (y + r, F.rms_norm(y + r, (8,), w)),
}
EAGER = {**EAGER, "bias, float32 residual, layer_norm": EAGER["bias, residual, layer_norm"]}


def _given(spec: GraphSpec) -> dict[str, torch.Tensor]:
    """Random data as the graph's inputs lie."""
    torch.manual_seed(0)
    found = {}
    for name in spec.inputs:
        t = spec.tensors[name]
        made = torch.empty_strided(t.shape, t.stride, dtype=t.dtype)
        found[name] = made.copy_(torch.randn(t.shape))
    return found


def _check(spec: GraphSpec, given: dict[str, torch.Tensor], wanted: Any, what: str) -> None:
    made = compile_spec(spec, "cpu")(**given)
    made, wanted = (each if isinstance(each, tuple) else (each,) for each in (made, wanted))
    for one, other in zip(made, wanted, strict=True):
        numerics.check(one, other, given["x"].dtype, what=what)


def test_what_stands_behind_a_product_is_what_its_name_says(
    behind: Mapping[str, Any], small: Callable[[str], Any]
) -> None:
    assert EAGER.keys() == behind.keys()
    for name, eager in EAGER.items():
        spec = small(name).spec()
        given = _given(spec)
        x, w, *others = (each.double() for each in given.values())
        _check(spec, given, eager(x @ w, *others), name)
        residual = spec.tensors.get("residual")
        wide = residual is not None and residual.dtype == torch.float32
        assert wide == ("float32" in name)
        outputs = [spec.tensors[each].dtype for each in spec.outputs]
        assert (outputs[0] == torch.float32) == wide
        assert outputs[1:] in ([], [torch.bfloat16])


def test_what_stands_behind_a_convolution_is_what_its_name_says(script: ModuleType) -> None:
    for name in {row.behind for row in script.ROWS if not row.is_product}:
        row = script.Row("small", (2, 8, 6, 16, 3, 2, 2), torch.float16, name)
        spec = row.spec()
        given = _given(spec)
        x, w, b, *others = (each.double() for each in given.values())
        y = F.conv2d(x, w, None, 2, 1, 1, 2)
        _check(spec, given, EAGER[name](y, b.view(1, -1, 1, 1), *others), name)
        assert row.alone(torch.device("cpu"))().shape == y.shape


def test_torch_alone_is_a_layer_of_the_same_sizes(small: Callable[[str], Any]) -> None:
    for behind in ("nothing", "bias"):
        made = small(behind).alone(torch.device("cpu"))()
        assert made.shape == (6, 8) and made.dtype == torch.bfloat16


class Fake:
    """A plan that a name stands for."""

    workspace_bytes = 0

    def __init__(self, engine: int) -> None:
        self.choice = Choice(engine, ())


class Engines:
    """Takes everything, but for what is told."""

    def __init__(self, no_kernel: bool = False) -> None:
        self._no_kernel = no_kernel

    def first(self, spec: GraphSpec) -> Fake:
        return Fake(0)

    def each(self, spec: GraphSpec, prefix: str) -> Iterator[tuple[str, Fake | str]]:
        yield "eng0*", Fake(0)
        yield "eng4", "does not build"
        raise NotSupported("a graph", ["cuDNN has had enough"])

    def kernel(self, spec: GraphSpec) -> Fake:
        if self._no_kernel:
            raise NotSupported("a kernel", ["no kernel"])
        return Fake(KERNEL)

    def heuristic(self, spec: GraphSpec) -> tuple[tuple[StepPlan, ...], tuple[Any, ...]]:
        raise ZeroDivisionError("a mistake")


def test_each_way_runs_each_op_of_a_row_once_and_in_order(script: ModuleType) -> None:
    seen = set()
    assert len({row.name for row in script.ROWS}) == len(script.ROWS)
    for row in script.ROWS:
        spec = script.legalize(row.spec(), script.POLICY)
        nodes = compute_nodes(spec.nodes)
        for name, way in script.ways(spec, Engines(), {}, lambda at: None):
            seen.add(name)
            if way.chain:
                ran = [node for part, _ in way.chain for node in compute_nodes(part.nodes)]
                assert ran == list(nodes), (row.name, name)
                assert len(way.chain) <= 2 and not way.why
            else:
                assert way.why
    assert seen == {
        *("heuristic", "eng0*", "eng4", "engines", "anchor | kernel", "torch | kernel"),
        *("bias by eng0*", "bias by eng4", "bias by engines", "addmm | kernel"),
    }


def test_a_way_that_fails_says_why_and_no_other_does(
    script: ModuleType, small: Callable[[str], Any]
) -> None:
    spec = script.legalize(small("bias, residual, layer_norm").spec(), script.POLICY)
    told: list[str] = []
    gone = {"torch | kernel": "exit code 1"}
    found = dict(script.ways(spec, Engines(), gone, told.append))
    assert found["heuristic"].why == "ZeroDivisionError: a mistake"
    assert found["eng4"].why == "does not build"
    assert found["engines"].why == "cuDNN has had enough"
    assert found["torch | kernel"].why == "exit code 1"
    assert told == [
        *("heuristic", "engines", "anchor | kernel", "bias by engines", "addmm | kernel")
    ]
    steps = {name: way.steps for name, way in found.items() if way.steps}
    assert steps == {
        "eng0*": "matmul add add (eng0) | layer_norm (kernel)",
        "anchor | kernel": "matmul (eng0) | add add layer_norm (kernel)",
        "bias by eng0*": "matmul add (eng0) | add layer_norm (kernel)",
        "addmm | kernel": "matmul add (torch) | add layer_norm (kernel)",
    }
    found = dict(script.ways(spec, Engines(no_kernel=True), {}, lambda at: None))
    assert not any(way.chain for way in found.values())
    assert found["addmm | kernel"].why == "no kernel"


def test_torch_takes_the_activation_too_where_it_has_it_and_none_that_is_kept_apart(
    script: ModuleType, small: Callable[[str], Any]
) -> None:
    wanted = {
        "bias": "matmul add (torch)",
        "bias, gelu_tanh": "matmul add gelu_tanh (torch)",
        "bias kept, gelu_tanh": "matmul add (torch) | gelu_tanh (kernel)",
        "bias, silu": "matmul add (torch) | silu (kernel)",
    }
    for behind, steps in wanted.items():
        spec = script.legalize(small(behind).spec(), script.POLICY)
        found = dict(script.ways(spec, Engines(), {}, lambda at: None))
        assert found["addmm | kernel"].steps == steps
    spec = script.legalize(small("residual").spec(), script.POLICY)
    assert "addmm | kernel" not in dict(script.ways(spec, Engines(), {}, lambda at: None))


def test_bytes_are_those_of_what_stands_behind(
    script: ModuleType, small: Callable[[str], Any]
) -> None:
    graph = CutGraph(script.legalize(small("bias, float32 residual").spec(), script.POLICY))
    product, bias, rest = script.parts(graph)
    assert [len(each) for each in (product, bias, rest)] == [1, 1, 1]
    assert script.moved_bytes(graph, (*bias, *rest)) == 6 * 8 * (2 + 4 + 4) + 8 * 2
    assert script.moved_bytes(graph, ()) == 0


# -- measuring, without a GPU ----------------------------------------------------------------------


def test_engines_are_tried_until_one_of_their_plans_is_right(
    script: ModuleType, small: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {(7, 1), (0, 3), (5, 9)}
    listed = [(7, 0), (7, 1), (7, 2), (0, 3), (4, 4), (4, 5), (4, 6), (4, 7), (2, 8), (5, 9)]

    class Checks:
        candidates = tuple(
            Candidate(number, Choice(engine, (("TILE", number),)), "", engine != 0)
            for engine, number in listed
        )

        def __init__(self, *given: Any, **options: Any) -> None:
            assert given[1:] == (script.POLICY, 0) and options["gate"] == "the gate"

        def attempt(self, candidate: Candidate) -> tuple[Outcome, Any, float | None]:
            taken = (candidate.choice.engine, candidate.index) in right
            return Outcome(candidate, taken, "wrong"), candidate if taken else None, None

    monkeypatch.setattr(verification, "Checks", Checks)
    monkeypatch.setattr(Kernels, "on", lambda index: Kernels(132))
    told: list[str] = []
    spec = small("bias").spec()
    engines = script.OnGpu("the gate", {"eng2": "exit code 1"}, told.append)
    found = [
        (label, plan if isinstance(plan, str) else plan.index)
        for label, plan in engines.each(spec, "")
    ]
    assert found == [("eng7", 1), ("eng0*", 3), ("eng4", "wrong"), ("eng2", "exit code 1")]
    assert told == ["eng7", "eng7", "eng0", "eng4", "eng4", "eng4"]
    found = list(engines.each(spec, "bias by "))
    assert [label for label, _ in found] == ["eng7", "eng0*", "eng4", "eng2"]
    assert found[-1][1] == "wrong" and told[-1] == "bias by eng2"


def test_what_a_row_takes_is_told_by_the_ways_that_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = next(n for n, row in enumerate(script.ROWS) if row.name.startswith("SD UNet 2 x"))
    monkeypatch.setattr(script, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(script, "OnGpu", lambda *given: Engines(no_kernel=True))
    for name in ("synchronize", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: None)
    ran: list[int] = []

    def measure(calls: Sequence[Callable[[], None]], *given: Any, **options: Any) -> list[float]:
        for call in calls:
            call()
        ran.append(len(calls))
        return [float(at) for at in range(len(calls))]

    monkeypatch.setattr(timing, "measure", measure)
    found = script.measured(number, {"eng0": "hangs"}, Gate(None), names=False)
    assert found["times"] == {"addmm | kernel": 0.0, "torch alone": 1.0} and ran == [2]
    assert found["steps"]["addmm | kernel"] == "matmul add (torch)"
    assert found["refused"]["anchor | kernel"] == "no kernel"
    assert found["moved"] == (2 * 1280 * 2 + 1280) * 2
    at = [line["at"] for line in script.parsed(capsys.readouterr().out)]
    assert at[0] == "heuristic" and at[-2:] == ["addmm | kernel", "measuring"]
    json.dumps(found)


# -- processes -------------------------------------------------------------------------------------

Run = tuple[list[dict[str, Any]], str]


def _told(script: ModuleType, runs: Sequence[Run]) -> tuple[Any, list[Any]]:
    left, asked = list(runs), []

    def run(numbers: Sequence[int], skipped: Mapping[str, str]) -> Run:
        asked.append((list(numbers), dict(skipped)))
        return left.pop(0)

    return script.told([3, 5, 8], float("inf"), run), asked


def _at(number: int, way: str) -> dict[str, Any]:
    return {"number": number, "at": way}


def _done(number: int) -> dict[str, Any]:
    return {"number": number, "done": True}


def test_a_process_that_dies_loses_the_way_that_it_was_at_alone(script: ModuleType) -> None:
    runs = [
        ([_at(3, "heuristic"), _done(3), _at(5, "heuristic"), _at(5, "eng4")], "exit code 1"),
        ([_at(5, "heuristic"), _done(5), _at(8, "heuristic"), _done(8)], ""),
    ]
    found, asked = _told(script, runs)
    assert found == {number: _done(number) for number in (3, 5, 8)}
    assert asked == [([3, 5, 8], {}), ([5, 8], {"eng4": "exit code 1"})]


def test_a_row_that_goes_on_killing_processes_is_left(script: ModuleType) -> None:
    start: Run = ([], "exit code 1: no GPU")
    again: Run = ([_at(5, "measuring")], "hangs")
    found, asked = _told(script, [start, again, again, ([_done(8)], "")])
    assert found == {
        3: {"error": "exit code 1: no GPU, at 'its start'"},
        5: {"error": "hangs, at 'measuring'"},
        8: _done(8),
    }
    assert [numbers for numbers, _ in asked] == [[3, 5, 8], [5, 8], [5, 8], [8]]
    many = [([_at(3, f"eng{n}")], "exit code 1") for n in range(script.MOST_DEATHS + 1)]
    found, asked = _told(script, [*many, ([_done(5), _done(8)], "")])
    assert found[3] == {"error": f"exit code 1, at 'eng{script.MOST_DEATHS}'"} and len(found) == 3
    assert asked[-1] == ([5, 8], {})


def test_nothing_starts_when_the_time_is_up(script: ModuleType) -> None:
    assert script.told([3, 5], 0.0, lambda *asked: pytest.fail("it starts")) == {}


def test_lines_of_others_in_the_output_are_passed_over(script: ModuleType) -> None:
    out = 'a warning\n{"number": 3, "at": "eng4"}\n[1]\n{"number": 3, "do'
    assert list(script.parsed(out)) == [_at(3, "eng4")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_a_process_without_a_gpu_says_so(script: ModuleType, tmp_path: Path) -> None:
    lines, death = script.process([0], {}, time.time() + 60, tmp_path / "gate" / "gpu", False)
    assert lines == [] and death.startswith("exit code 1: ")


# -- the page --------------------------------------------------------------------------------------


def _found() -> dict[str, Any]:
    return {
        "times": {
            "heuristic": 60.0,
            "eng7": 61.0,
            "eng0*": 45.0,
            "anchor | kernel": 55.0,
            "bias by eng0*": 52.0,
            "kernel alone": 10.0,
            "torch alone": 40.0,
        },
        "steps": {"heuristic": "matmul add (eng7) | gelu (kernel)"},
        "refused": {"eng4": "does not build | at all", "addmm | kernel": "x" * 200},
        "names": {},
        "moved": 30_000_000,
    }


def test_a_line_has_what_was_measured_or_why_it_was_not(
    script: ModuleType, small: Callable[[str], Any]
) -> None:
    row = small("bias, gelu")
    assert script.line(row, _found()) == [
        *("small 6 x 16 -> 8 bf16", "bias, gelu", "60.0", "matmul add (eng7); gelu (kernel)"),
        *("7: 61.0, 0*: 45.0, 4: does not build / at all", "55.0", "-", "x" * 80, "0*: 52.0"),
        *("40.0", "10.0", "3000", "0.75", "eng0*"),
    ]
    for found, said in ((None, "not begun"), ({"error": "hangs | so"}, "hangs / so")):
        cells = script.line(row, found)
        assert cells[2] == said and len(cells) == len(script.HEAD)


def test_the_page_has_a_line_for_each_row_and_its_command(script: ModuleType) -> None:
    lines = script.page({1: _found()}, [0, 1], "python script.py --limit 9", "a GPU, cuDNN 91900")
    assert "python script.py --limit 9" in lines and "1 of 2 rows were measured" in lines[8]
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1 and len(table) == 4
    assert "not begun" in table[2] and "| 0.75 | eng0* |" in table[3]


def test_a_run_writes_page_and_numbers_and_keeps_notes(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def process(numbers: Sequence[int], *rest: Any) -> Run:
        return [{"number": number, "done": True, **_found()} for number in numbers], ""

    monkeypatch.setattr(script, "process", process)
    monkeypatch.setattr(script.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(script, "_frontend", lambda: "1.28.0")
    page = tmp_path / "page.md"
    page.write_text("old\n## Notes\nkept by hand\n")
    script.main(["--only", "BERT", "--jobs", "2", "--limit", "60", "--out", str(page)])
    text, data = page.read_text(), json.loads(page.with_suffix(".json").read_text())
    bert = [row.name for row in script.ROWS if row.model == "BERT"]
    assert [row["name"] for row in data["rows"]] == bert and bert
    assert all(row["times"]["heuristic"] == 60.0 for row in data["rows"])
    assert "a GPU" in data["gpu"] and "--only BERT" in data["command"]
    assert text.endswith("\n## Notes\nkept by hand\n") and text.count("\n| BERT") == len(bert)
