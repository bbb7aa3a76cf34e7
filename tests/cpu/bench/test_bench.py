"""The benchmark command on a CPU, what it works out of times, and its page and its JSON."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import functools
import json
import math
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.bench import cases, measure, report, suites
from cudnngraph.bench.measure import Ceilings, CeilingsOf, Contest, Row, Task
from cudnngraph.bench.report import Report
from cudnngraph.bench.suites import SUITES, Options
from cudnngraph.cli import bench as command
from cudnngraph.cli import build_parser, main, parse
from cudnngraph.ops.work import bytes_of, flops_of

CPU = torch.device("cpu")
F16, F32 = torch.float16, torch.float32
QUICK = Options(CPU, quick=True)


def row(name: str, ours: float, suite: str = "conv", **theirs: float) -> Row:
    return Row(suite, name, "autotuned", "gpu", {"autotuned": ours, **theirs}, 4_000_000, 20_000)


def made(*rows: Row) -> Report:
    ceilings = Ceilings(1000.0, {"float32": 2.0})
    return Report("a GPU", {"torch": "2"}, False, False, ceilings, rows, ["a note"])


# -- what is worked out ----------------------------------------------------------------------------


def test_work_is_counted_of_the_graph() -> None:
    conv = cases.conv(2, 8, 14, 16, 3, 1, 1, groups=2).graph.spec()
    assert flops_of(conv) == 2 * 2 * 16 * 14 * 14 * (8 // 2) * 9
    assert bytes_of(conv) == 2 * (2 * 8 * 14 * 14 + 16 * 4 * 9 + 16 + 2 * 16 * 14 * 14)
    turned = cases.conv_transpose(2, 7, 16, 8, 4, 2, 1).graph.spec()
    assert flops_of(turned) == 2 * 2 * 16 * 7 * 7 * 8 * 16
    assert flops_of(cases.swiglu(64, 32, 128).graph.spec()) == 2 * (2 * 64 * 32 * 128)
    full = cases.sdpa(1, 2, 64, 32).graph.spec()
    assert flops_of(full) == 2 * flops_of(cases.sdpa(1, 2, 64, 32, causal=True).graph.spec())
    assert flops_of(full) == 4 * 2 * 64 * 64 * 32
    g = cg.Graph("windowed")
    q, k, v = (g.input(name, (1, 2, 64, 32), F16) for name in "qkv")
    g.output("o", g.sdpa(q, k, v, window=(3, 0)))
    assert flops_of(g.spec()) == 4 * 2 * (4 * 64 - 3 - 2 - 1) * 32
    assert flops_of(cases.pointwise_chain(4096).graph.spec()) == 0


def test_the_least_time_is_that_of_the_nearer_ceiling() -> None:
    ceilings = Ceilings(1000.0, {"float16": 100.0})
    assert ceilings.least_us(2_000_000_000, 1000, "float16") == 20.0
    assert ceilings.least_us(2000, 4_000_000, "float16") == 4.0
    assert ceilings.least_us(2000, 4_000_000, "int8") is None
    assert ceilings.least_us(0, 4_000_000, "int8") == 4.0
    assert ceilings.least_us(0, 0, "float16") is None


def test_bytes_that_stay_in_the_cache_have_no_ceiling() -> None:
    ceilings = Ceilings(1000.0, {}, cache_bytes=3_000_000)
    assert ceilings.least_us(0, 4_000_000, "float32") == 1.0
    assert ceilings.least_us(0, 3_000_000, "float32") is None


def test_products_of_float32_are_beside_the_ceiling_of_tf32() -> None:
    ceilings = Ceilings(1000.0, {"float32": 10.0, measure.TF32: 100.0})
    assert ceilings.least_us(2_000_000_000, 1000, "float32") == 20.0


def test_what_a_row_beats_is_no_ceiling() -> None:
    ceilings = Ceilings(1000.0, {"float32": 2.0, "float16": 200.0})
    rows = [row("products", 1.0), replace(row("copied", 1.0), flops=0, moved_bytes=1_100_000)]
    rows.append(replace(row("half", 20.0), dtype="float16", moved_bytes=8000))
    known, told = measure.with_shares(ceilings, rows)
    assert known.beaten == ("float32", "memory")
    assert [each.least_us for each in told] == [None, None, 0.02]
    rows[0] = row("products", 20.0)
    known, told = measure.with_shares(ceilings, [rows[0], rows[2]])
    assert not known.beaten and told[0].least_us == 2.0
    text = "\n".join(
        report.heading(replace(made(*rows), ceilings=replace(known, beaten=("memory",))))
    )
    assert "a row is faster than the ceiling of memory: that is none" in text


def test_a_summary_has_the_geometric_mean_and_the_worst_row() -> None:
    rows = [row("a", 10.0, eager=20.0, other=5.0), row("b", 10.0, eager=5.0)]
    assert report.summary(rows) == [
        ("eager", 2, pytest.approx(1.0), 0.5, "b"),
        ("other", 1, pytest.approx(0.5), 0.5, "a"),
    ]
    assert report.summary_lines(rows)[0] == (
        "1.00 times as fast as eager (geometric mean of 2), at worst 0.50 (b)"
    )


def test_the_cells_of_a_row() -> None:
    one = Row("conv", "a", "ours", "gpu", {"ours": 4.0, "eager": 6.0}, 8_000_000, 4000, "x", 1.0)
    assert report.cells(one) == ("a: ours", "4.0", "2", "1", "25", "eager 1.50", "")
    bare = Row("host", "bound", "bound", "host", {"bound": 4.0}, notes=("n", "m"))
    assert report.cells(bare) == ("bound", "4.0", "", "", "", "", "n; m")


# -- measuring -------------------------------------------------------------------------------------


def test_the_slower_call_takes_longer() -> None:
    small, large = torch.ones(100), torch.ones(2_000_000)
    for clock in ("gpu", "wall", "host"):
        times = measure.times_us([small.neg, large.neg], clock, CPU, quick=True)
        assert 0 < 5 * times[0] < times[1], clock


def test_the_ceilings_of_this_machine_are_of_its_order() -> None:
    ceilings = CeilingsOf(CPU, quick=True)
    assert ceilings.known == Ceilings(0.0, {})
    found = ceilings(F32)
    assert 0.5 < found.copy_gb_s < 5000 and 1e-4 < found.matmul_tflop_s["float32"] < 100
    assert ceilings(torch.int8) == found, "no ceiling of products for integers"


def test_a_baseline_that_fails_is_noted_and_ours_may_not() -> None:
    def fail() -> None:
        raise RuntimeError("no such kernel\nmore")

    x = torch.ones(4)
    ceilings = CeilingsOf(CPU, quick=True)
    task = Task("s", "t", lambda: Contest({"ours": x.neg, "bad": fail}, "ours"))
    found = measure.measured(task, CPU, ceilings, quick=True)
    assert list(found.times_us) == ["ours"] and found.least_us is None
    assert found.notes == ("bad does not run: no such kernel",)
    task = Task("s", "t", lambda: Contest({"ours": fail, "eager": x.neg}, "ours"))
    with pytest.raises(RuntimeError, match="no such kernel"):
        measure.measured(task, CPU, ceilings, quick=True)


@pytest.mark.parametrize("name", ["conv", "transpose", "sdpa", "norm", "matmul"])
def test_contenders_of_a_case_compute_the_same(name: str) -> None:
    """Ours writes into the case's tensors what the eager baseline returns."""
    tasks: list[Any] = list(SUITES[name](QUICK).tasks)
    listed = [case for case in (t.prepare.args[0] for t in tasks) if type(case) is cases.Case]
    assert listed
    for case in listed:
        tensors = case.tensors(CPU)
        case.graph.compile("cpu").bind(**tensors)()
        (out,) = (tensors[key] for key in case.graph.spec().outputs)
        want = case.eager(tensors)
        assert torch.allclose(out.float(), want.float(), rtol=0.05, atol=0.05), case.name


def test_torch_compile_is_a_baseline_where_it_is_asked_for() -> None:
    contest = suites.contest_of(
        cases.norm("rms_norm", 8, 16), Options(CPU, quick=True, compile_modes=("default",))
    )
    assert list(contest.calls) == ["reference", "eager", "torch.compile default"]


def test_torch_compile_compiles_every_row_of_a_function() -> None:
    """torch compiles eight forms of one function, and runs the ninth as it is."""
    compiled: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(inputs[0].shape[0])
        return module.forward

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def contest(size: int) -> Contest:
        x = torch.ones(size)
        fast = torch.compile(double, backend=backend, dynamic=False)
        return Contest({"ours": lambda: double(x), "fast": lambda: fast(x)}, "ours", "wall")

    ceilings = CeilingsOf(CPU, quick=True)
    for size in range(2, 14):
        task = Task("s", str(size), functools.partial(contest, size))
        measure.measured(task, CPU, ceilings, quick=True)
    assert compiled == list(range(2, 14))


def test_off_the_cpu_the_suites_have_the_cases_of_the_tables() -> None:
    large = Options(torch.device("cuda", 0))
    names = {suite: [task.name for task in SUITES[suite](large).tasks] for suite in SUITES}
    assert len(names["conv"]) > 19 and len(names["transpose"]) == 4
    known = {case.name for case in cases.selection_suite()}
    listed = {
        name for suite in ("conv", "transpose", "sdpa", "norm", "matmul") for name in names[suite]
    }
    assert known <= listed


def test_the_fused_model_of_the_suite_computes_what_eager_does() -> None:
    (task,) = SUITES["models"](QUICK).tasks
    calls: Any = task.prepare().calls
    assert list(calls) == ["fused", "eager"]
    assert torch.allclose(calls["fused"](), calls["eager"](), rtol=1e-3, atol=1e-4)


# -- the command -----------------------------------------------------------------------------------


def test_the_quick_run_measures_every_suite_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("bench.json", "bench.html")]
    before = torch.backends.cudnn.benchmark, torch.get_num_threads()
    assert main(["bench", "--quick", "--json", files[0], "--html", files[1]]) == 0
    assert (torch.backends.cudnn.benchmark, torch.get_num_threads()) == before
    out, err = capsys.readouterr()
    assert "error" not in err
    assert "by one thread, say nothing about cuDNN" in out and "\nceilings, measured in" in out
    told = json.loads(Path(files[0]).read_text())
    assert told["reference"] and told["schema"] == report.JSON_SCHEMA
    there = {each["suite"] for each in told["rows"]}
    assert there == set(SUITES) - {"lowprecision"}
    for each in told["rows"]:
        assert each["ours"] in each["times_us"] and len(each["times_us"]) > 1, each["name"]
        assert all(0 < us < math.inf for us in each["times_us"].values())
        assert f"{each['times_us'][each['ours']]:.1f}" in out
    assert told["summary"]["conv"]["eager"]["rows"] >= 3
    page = Path(files[1]).read_text()
    assert page.count("<svg") == len(there) + 1
    assert not re.search(r"<img|<link|\bsrc=|@import|url\((?!#)", page), "it needs no other file"


def test_json_alone_is_printed_to_the_dash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "norm", "--quick", "--only", "rms_norm", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told["rows"]] == [
        "rms_norm 16 64",
        "rms_norm 16 64 residual",
        "rms_norm 16 64 residual and sum",
    ]
    assert told["ceilings"]["copy_gb_s"] > 0


def test_a_failing_row_is_told_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Contest:
        raise ValueError("no such graph")

    x = torch.ones(4)
    tasks = [
        Task("norm", "bad", fail),
        Task("norm", "good", lambda: Contest({"ours": x.neg, "eager": x.abs}, "ours")),
    ]
    monkeypatch.setattr(command, "SUITES", {"norm": lambda options: suites.Suite(tasks)})
    assert main(["bench", "norm", "--quick"]) == 1
    out, err = capsys.readouterr()
    assert "good: ours" in out
    assert err.splitlines()[-1] == "error: norm bad: ValueError: no such graph"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["convs"], 2, "error: no suite convs; there are conv, transpose, sdpa, norm"),
        (["--compile", "fast"], 2, "argument --compile: invalid choice: 'fast'"),
        (["--limit", "-1"], 2, "argument --limit: expected seconds, 0 or more, got '-1'"),
        (["--limit", "nan"], 2, "argument --limit: expected seconds, 0 or more, got 'nan'"),
        (["--limit", "x"], 2, "argument --limit: expected seconds, 0 or more, got 'x'"),
        (["--device", "foo"], 2, "error: --device foo: expected cuda, cuda:1 … or cpu\n"),
        (["--device", ""], 2, "error: --device : expected cuda, cuda:1 … or cpu\n"),
        (["--device", "meta"], 2, "error: --device meta: expected cuda, cuda:1 … or cpu\n"),
        (
            ["norm", "--only", "zz", "--device", "cpu"],
            2,
            "error: there is no row with 'zz' in its name on cpu in norm\n",
        ),
        (["lowprecision", "--device", "cpu"], 2, "error: there is no row on cpu in lowprecision\n"),
        (["--device", "cuda"], 1, "--device cuda and torch sees no CUDA device; leave it out"),
    ],
)
def test_a_wrong_call_is_told(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["bench", *arguments]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("width", [50, 80, 120])
def test_a_narrow_terminal_shows_every_time_and_ratio(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    name = "conv 64 128 56 128 3 1 1 float16 bias residual relu"
    one = row(name, 12345.6, eager=24691.2, compiled=37036.8)
    command._print(made(dataclasses.replace(one, notes=("what else is to be said of it",))))
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    table, below = out.split("└")
    assert max(map(len, table.splitlines()[-4:])) <= width
    assert "12345.6" in table and "eager 2.00" in table and "3.00" in table
    assert "too narrow for GB/s, notes" in below


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test where a call gets as far as measuring."""

    def measure_nothing(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(command, "_measure", measure_nothing)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json", "no/x.json"], "--json no/x.json: there is no folder no"),
        (["--html", "no/x.html"], "--html no/x.html: there is no folder no"),
        (["--json", "."], "--json .: is a folder; give the name of a file"),
        (["--json", ""], "--json .: is a folder; give the name of a file"),
        (["--picture", "x.bmp"], "--picture x.bmp: expected a name that ends in .svg, .png"),
        (["--json", "x", "--html", "./x"], "--json and --html need a file each"),
        (["--html", "-"], "--html -: only --json can be printed; give the name of a file"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    arguments: list[str],
    said: str,
    unmeasured: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "norm", "--quick", *arguments]) == 2
    assert capsys.readouterr() == ("", f"error: {said}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    ["conv norm --quick", "conv --quick norm", "--quick conv --only x norm"],
)
def test_suites_may_stand_on_both_sides_of_an_option(words: str) -> None:
    assert parse(["bench", *words.split()]).suites == ["conv", "norm"]


def test_without_plots_a_page_is_refused_before_anything_is_measured(
    unmeasured: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError('a broken one')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["bench", "norm", "--quick", "--html", str(tmp_path / "x.html")]) == 1
    assert capsys.readouterr().err == (
        "error: the page has plots, which need matplotlib, and it does not load (a broken one); "
        "pip install --force-reinstall matplotlib\n"
    )


def quick_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite of one row that takes no time."""
    x = torch.ones(4)
    tasks = [Task("norm", "good", lambda: Contest({"ours": x.neg, "eager": x.abs}, "ours"))]
    monkeypatch.setattr(command, "SUITES", {"norm": lambda options: suites.Suite(tasks)})


def test_files_are_written_before_the_table_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(report: Report) -> None:
        raise KeyboardInterrupt

    quick_norm(monkeypatch)
    monkeypatch.setattr(command, "_print", stop)
    arguments = command_arguments("norm", "--quick", "--json", str(tmp_path / "x.json"))
    with pytest.raises(KeyboardInterrupt):
        command.run(arguments)
    assert json.loads((tmp_path / "x.json").read_text())["rows"][0]["name"] == "good"


def command_arguments(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", *argv])


def test_a_full_disk_costs_one_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(file: Path, content: str) -> None:
        if file.suffix == ".json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write_text(content)

    quick_norm(monkeypatch)
    monkeypatch.setattr(command.files, "write", write)
    full, html = tmp_path / "x.json", tmp_path / "x.html"
    assert main(["bench", "norm", "--quick", "--json", str(full), "--html", str(html)]) == 1
    out, err = capsys.readouterr()
    assert err == f"error: --json {full} cannot be written: No space left on device\n"
    assert "good: ours" in out and "<svg" in html.read_text()


# -- the page --------------------------------------------------------------------------------------


def test_the_page_draws_a_bar_for_every_ratio_and_a_point_for_every_row() -> None:
    page = report.to_html(made(row("a <b>", 10.0, eager=20.0), row("c", 10.0, eager=5.0)))
    assert "<h2>conv</h2>" in page and "a &lt;b&gt;: autotuned" in page and "a note" in page
    assert "1.00 times as fast as eager" in page
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    assert len(pictures) == 2
    for picture in pictures:
        ElementTree.fromstring(picture)
    bars, roofline = pictures
    assert "over eager" in bars and "times as fast" in bars
    assert "ceiling, float32" in roofline and "operations per byte" in roofline


def test_the_page_is_for_small_and_dark_screens_and_for_readers_of_screens() -> None:
    rows = [row("a", 10.0, eager=20.0), row("b", 10.0, compiled=5.0, eager=5.0)]
    page = report.to_html(made(rows[0], replace(rows[1], suite="norm")))
    assert '<meta name="viewport"' in page and "color-scheme:light dark" in page
    labels = re.findall(r'<figure role="img" aria-label="([^"]+)"', page)
    assert len(labels) == 3 and "2.00 times as fast as eager" in labels[0]
    assert page.count('<th scope="col"><button') == 2 * len(report.COLUMNS), "sorted by a click"
    assert page.count("<thead>") == page.count("<tbody>") == 2


def test_a_baseline_has_one_color_in_every_chart() -> None:
    names = ["eager", "compiled"]
    alone, both = (
        report._bars([row("a", 10.0, **times)], names)
        for times in ({"compiled": 5.0}, {"eager": 20.0, "compiled": 5.0})
    )
    fills = [re.findall(r"fill: (#[0-9a-f]{6})", each) for each in (alone, both)]
    assert "#ff7f0e" in fills[0] and "#1f77b4" not in fills[0]
    assert {"#1f77b4", "#ff7f0e"} <= set(fills[1])


def test_a_picture_of_a_run_that_is_cut_off(tmp_path: Path) -> None:
    """The first row of all is measured; what comes later than the limit is counted in a note."""
    file, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    arguments = ["conv", "norm", "--quick", "--limit", "0", "--json", str(file)]
    assert main(["bench", *arguments, "--picture", str(picture)]) == 0
    told = json.loads(file.read_text())
    assert len(told["rows"]) <= 1
    assert any("rows left out after 0 s" in note for note in told["notes"])
    assert picture.read_text().startswith("<?xml") and "eager torch" in picture.read_text()


def test_without_matplotlib_the_page_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(cg.FeatureMissing, match=r"need matplotlib; pip install matplotlib$"):
        report.to_html(made(row("a", 10.0, eager=20.0)))


def test_json_has_every_time_and_the_summary() -> None:
    told: Any = json.loads(json.dumps(report.to_json(made(row("a", 10.0, eager=20.0)))))
    assert told["rows"][0]["times_us"] == {"autotuned": 10.0, "eager": 20.0}
    assert told["summary"] == {
        "conv": {"eager": {"rows": 1, "geomean": 2.0, "worst": 2.0, "worst_row": "a"}}
    }
