"""`cudnngraph tune` without a GPU: what it asks for, runs, shares out, and says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import cli, settings
from cudnngraph.backend import env
from cudnngraph.backend.deviceless import targets
from cudnngraph.cli import tune
from cudnngraph.policy import Policy
from cudnngraph.select import workers
from plans_cache import PlanStore
from tests.workers import cache_example

Cli = Callable[..., tuple[int, str, str]]
SOURCE = """
import cudnngraph as cg

def relu(name: str, size: int) -> cg.Graph:
    g = cg.Graph(name)
    g.output("y", g.input("x", (size,), __import__("torch").float16).relu())
    return g

graphs = [relu(f"g{n}", 8 * (n + 1)) for n in range(5)]
g0, g1, g2, g3, g4 = graphs
frozen = relu("frozen", 64).spec()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Any:
    """The cache directory."""
    with settings.override(cache_dir=tmp_path / "plans"):
        yield tmp_path / "plans"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as torch says there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "graphs.py"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs ``tune``: exit code, output, errors; those of processes that it starts too."""

    def call(*argv: object) -> tuple[int, str, str]:
        code = cli.main(["tune", *map(str, argv)])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Policy]]:
    """Graphs that would be compiled: names, devices, policies. Graphs named g3 are refused."""
    seen: list[tuple[str, str, Policy]] = []

    def compile(spec: cg.GraphSpec, device: str, *, policy: Policy) -> Any:
        seen.append((spec.name, device, policy))
        if spec.name == "g3":
            raise cg.NotSupported("this graph", ["no engine"])
        return MADE

    monkeypatch.setattr(tune, "compile_spec", compile)
    return seen


EVERY_GRAPH = "nothing new was tuned: every graph has a tuned plan in the cache"
MADE = SimpleNamespace(tier="built")


def manifest(path: Path, *rows: Any) -> Path:
    file = path / "fleet.json"
    file.write_text(json.dumps({"graphs": list(rows)}))
    return file


# -- calls that make no sense ----------------------------------------------------------------------

KNOWN = ", ".join(targets()) + "\n"
SECONDS = "expected a number of seconds above 0, and --graphs or a manifest\n"
NO_SCRIPT = "error: --target is for --graphs and manifests: it runs no script\n"
ONE_OF = "error: expected one of SCRIPT, MANIFEST.json, -m MODULE and --graphs\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], ONE_OF),
        (["--graphs", "a.py", "script.py"], ONE_OF),
        (["--graphs", "a.py", "-m", "module"], ONE_OF),
        (["--graphs", "a.py", "fleet.json"], ONE_OF),
        (["--jobs", "0", "script.py"], "error: --jobs 0; expected 1 or more\n"),
        (["--jobs", "-2", "--graphs", "a.py"], "error: --jobs -2; expected 1 or more\n"),
        (
            ["--jobs", "2", "script.py"],
            "error: --jobs is for --graphs and manifests: a script is one process\n",
        ),
        (
            ["--jobs", "2", "-m", "module"],
            "error: --jobs is for --graphs and manifests: a script is one process\n",
        ),
        (["--json", "script.py"], "error: --json is for --target\n"),
        (["--target", "a100", "script.py"], "error: --target a100; known: " + KNOWN),
        (["--target", "", "--graphs", "a.py"], "error: --target ; known: " + KNOWN),
        (
            ["--target", "nvidia-h200", "--jobs", "2", "--graphs", "a.py"],
            "error: --jobs is for a GPU that is here: --target measures nothing\n",
        ),
        (
            ["--target", "nvidia-h200", "--budget", "9", "--graphs", "a.py"],
            "error: --budget is for a GPU that is here: --target measures nothing\n",
        ),
        (["--budget", "9", "script.py"], f"error: --budget 9; {SECONDS}"),
        (["--budget", "9", "-m", "module"], f"error: --budget 9; {SECONDS}"),
        (["--budget", "0", "--graphs", "a.py"], f"error: --budget 0; {SECONDS}"),
        (["--budget", "nan", "fleet.json"], f"error: --budget nan; {SECONDS}"),
        (["--budget", "soon", "script.py"], "argument --budget: invalid float value: 'soon'\n"),
        (["--target", "nvidia-h200", "script.py"], NO_SCRIPT),
        (["--target", "nvidia-h200", "-m", "module"], NO_SCRIPT),
        (["--target", "nvidia-h200"], ONE_OF),
        (["--jobs", "two", "script.py"], "argument --jobs: invalid int value: 'two'\n"),
        (["-m"], "argument -m: expected one argument\n"),
        (["fleet.json", "--steps", "10"], "error: unrecognized arguments: --steps 10\n"),
        (
            ["--", "fleet.json", "--steps", "10"],
            "error: fleet.json is a manifest, which takes no arguments\n",
        ),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("gpu")
def test_a_call_that_makes_no_sense_is_told_so(run: Cli, argv: Sequence[str], said: str) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.endswith(said)


def test_without_a_gpu_there_is_nothing_to_measure_on(
    run: Cli, source: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = "error: torch sees no CUDA device, there is nothing to measure on\n"
    for argv in (["--graphs", source], [source], ["-m", "platform"]):
        assert run(*argv) == (1, "", said)
    assert not folder.exists()


# -- manifests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "is no manifest: Expecting value: line 1 column 1 (char 0)"),
        pytest.param("[" * 200_000, "is no manifest: maximum recursion depth exceeded", id="deep"),
        ("[]", 'is no manifest: expected {"graphs": [{"file": "FILE:NAME"}]}'),
        ("{}", 'is no manifest: expected {"graphs": [{"file": "FILE:NAME"}]}'),
        ('{"graphs": []}', 'is no manifest: expected {"graphs": [{"file": "FILE:NAME"}]}'),
        ('{"graphs": {"file": "a.py"}}', "is no manifest: expected"),
        ('{"graphs": [{"file": "a.py"}, "b.py"]}', ': graph 2 has no "file"'),
        ('{"graphs": [{"policy": {}}]}', ': graph 1 has no "file"'),
        ('{"graphs": [{"file": 3}]}', ': graph 1 has no "file"'),
        ('{"graphs": [{"file": "a.py", "tune": 1}]}', ": graph 1 has an unknown field 'tune'"),
        ('{"graphs": [{"file": "a.py", "policy": 1}]}', ": graph 1 has a policy that is no object"),
        (
            '{"graphs": [{"file": "a.py", "policy": {"colour": "red"}}]}',
            ": graph 1: unknown option colour; a policy has tune, allow_tf32, ",
        ),
        (
            '{"graphs": [{"file": "a.py", "policy": {"workspace_limit": -1}}]}',
            ": graph 1: workspace_limit=-1; expected a number of bytes >= 0, or None",
        ),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_what_is_wrong_with_a_manifest_is_said(
    run: Cli, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "fleet.json"
    file.write_text(text)
    code, out, err = run(file)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {file}{'' if said[0] == ':' else ' '}{said}")


@pytest.mark.usefixtures("gpu")
def test_a_manifest_that_is_not_there_is_named(run: Cli, tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "fleet.json")
    assert code == 2
    assert f"error: {tmp_path / 'fleet.json'} is no manifest: [Errno 2] No such file" in err


@pytest.mark.usefixtures("gpu", "source")
def test_a_manifest_gives_each_graph_its_policy_and_files_lie_beside_it(
    run: Cli, tmp_path: Path, compiled: list[tuple[str, str, Policy]]
) -> None:
    options = {"allow_tf32": True, "exclude_engines": ["eng8"], "budget_s": 2.5, "tune": "cached"}
    file = manifest(
        tmp_path, {"file": "graphs.py:g1"}, {"file": "graphs.py:frozen", "policy": options}
    )
    code, out, err = run(file)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == EVERY_GRAPH
    tuned = Policy(tune="autotune", allow_tf32=True, exclude_engines=("eng8",), budget_s=2.5)
    assert compiled == [("g1", "cuda", Policy(tune="autotune")), ("frozen", "cuda", tuned)]


# -- declared graphs -------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
def test_every_graph_of_a_file_is_tuned_and_one_that_fails_stops_no_other(
    run: Cli, source: Path, compiled: list[tuple[str, str, Policy]]
) -> None:
    code, _, err = run("--graphs", source)
    assert code == 1
    assert err.startswith("error: graph 'g3': ")
    assert "no engine" in err
    assert [name for name, *_ in compiled] == ["g0", "g1", "g2", "g3", "g4", "frozen"]
    assert {policy.tune for *_, policy in compiled} == {"autotune"}


@pytest.mark.usefixtures("gpu")
def test_graphs_may_be_named_several_times(
    run: Cli, source: Path, compiled: list[tuple[str, str, Policy]]
) -> None:
    assert run("--graphs", f"{source}:g4", "--graphs", f"{source}:g0")[0] == 0
    assert [name for name, *_ in compiled] == ["g4", "g0"]


@pytest.mark.usefixtures("gpu", "compiled")
def test_a_file_that_has_no_such_graph_is_named(run: Cli, source: Path) -> None:
    assert run("--graphs", f"{source}:nothing") == (
        1,
        "nothing new was tuned\n",
        f"error: {source} defines no 'nothing'\n",
    )
    code, _, err = run("--graphs", "nowhere.py")
    assert (code, err) == (1, "error: there is no file nowhere.py\n")


@pytest.mark.usefixtures("gpu")
def test_a_file_that_cannot_be_loaded_stops_no_other(
    run: Cli, source: Path, compiled: list[tuple[str, str, Policy]]
) -> None:
    code, _, err = run("--graphs", "nowhere.py", "--graphs", f"{source}:g0")
    assert (code, err) == (1, "error: there is no file nowhere.py\n")
    assert [name for name, *_ in compiled] == ["g0"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("jobs", [1, 2, 3, 7])
def test_the_shares_of_processes_are_all_graphs_and_no_graph_twice(
    run: Cli, source: Path, compiled: list[tuple[str, str, Policy]], jobs: int
) -> None:
    shares = []
    for number in range(jobs):
        compiled.clear()
        code, out, _ = run("--graphs", source, f"--share={number}/{jobs}")
        names = [name for name, *_ in compiled]
        assert code == ("g3" in names)
        told = [line.split("'")[1] for line in out.splitlines()]
        assert told == [name for name in names if name != "g3"], "the table is the parent's"
        shares.append(names)
    assert sorted(name for share in shares for name in share) == [
        *("frozen", "g0", "g1", "g2", "g3", "g4")
    ]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


class Process:
    """A process of --jobs that is none."""

    def __init__(self, code: int) -> None:
        self.code = code

    def wait(self) -> int:
        return self.code


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ["graphs", "manifest"])
def test_jobs_are_processes_that_get_a_share_each(
    run: Cli,
    source: Path,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    compiled: list[tuple[str, str, Policy]],
) -> None:
    started: list[list[str]] = []

    def start(command: list[str]) -> Process:
        started.append(command)
        return Process(len(started) == 2)

    monkeypatch.setattr(tune.subprocess, "Popen", start)
    monkeypatch.setattr(workers, "_beside", 1)
    file = manifest(tmp_path, {"file": "graphs.py"})
    given = [file] if kind == "manifest" else ["--graphs", source, "--graphs", f"{source}:g0"]
    code, out, _ = run("--jobs", 3, "--budget", 60, *given)
    assert code == 1, "one of them failed"
    assert out.startswith("nothing new was tuned")
    assert compiled == []
    what = [str(file)] if kind == "manifest" else [f"--graphs={source}", f"--graphs={source}:g0"]
    what.append("--budget=60.0")
    assert started == [
        [sys.executable, "-m", "cudnngraph", "tune", f"--share={number}/3", *what]
        for number in range(3)
    ]
    for command in started:  # each is a call that the command understands
        assert cli.main(command[3:]) in (0, 1)
        assert workers._beside == 3, "which share the processors"
    names = {"g0", "g1", "g2", "g3", "g4", "frozen"}
    assert {name for name, *_ in compiled} == names
    assert len(compiled) == len(names) + (kind == "graphs")


@pytest.mark.usefixtures("gpu")
def test_no_graph_is_begun_once_the_budget_is_spent(
    run: Cli, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(float(second) for second in range(100))  # it is looked at twice for each graph
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=clock.__next__, time=time.time))
    begun: list[str] = []

    def compile(spec: cg.GraphSpec, device: str, *, policy: Policy) -> Any:
        begun.append(spec.name)
        return SimpleNamespace(tier="disk, serialized" if spec.name == "g1" else "built")

    monkeypatch.setattr(tune, "compile_spec", compile)
    code, out, err = run("--graphs", source, "--budget", 7)
    assert (code, err, begun) == (0, "", ["g0", "g1"])
    assert out.splitlines()[:-1] == [
        "1 of 6: 'g0': tuned, 1.0 s",
        "2 of 6: 'g1': disk, serialized, 1.0 s",
        "the budget is spent, 4 graphs are left to the next call",
    ]


# -- a GPU that is not here ------------------------------------------------------------------------


def test_without_the_library_there_is_nothing_to_list(
    run: Cli, source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def frontend() -> Any:
        raise cg.BackendUnavailable(f"no library; {env.how_to_get_cudnn()}")

    monkeypatch.setattr(env, "frontend", frontend)
    monkeypatch.setattr(tune, "candidates", None)
    code, out, err = run("--target", "nvidia-h200", "--graphs", source)
    assert (code, out) == (1, "")
    assert err == f"error: no library; {env.how_to_get_cudnn()}\n"
    assert "install" in err and not folder.exists()


def test_a_listing_is_of_every_graph_under_its_policy_and_measures_nothing(
    run: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, Policy]] = []

    class Listing:
        gpu_name, kept = "a GPU", 2

        def __init__(self, name: str) -> None:
            self.name = name

        def to_dict(self) -> dict[str, Any]:
            return {"graph": self.name}

        def __str__(self) -> str:
            return f"candidates of {self.name}"

    def candidates(graph: cg.GraphSpec, target: str, *, policy: Policy) -> Listing:
        asked.append((graph.name, target, policy))
        if graph.name == "g3":
            raise cg.NotSupported("this graph", ["no engine"])
        return Listing(graph.name)

    monkeypatch.setattr(env, "frontend", lambda: None)
    monkeypatch.setattr(tune, "candidates", candidates)
    monkeypatch.setattr(tune, "compile_spec", None)
    code, out, err = run("--target", "nvidia-h100", "--graphs", source)
    assert code == 1 and err.startswith("error: graph 'g3': ")
    assert [(name, target) for name, target, _ in asked] == [
        (name, "nvidia-h100") for name in ("g0", "g1", "g2", "g3", "g4", "frozen")
    ]
    assert {policy.tune for *_, policy in asked} == {"autotune"}
    assert out.splitlines()[0] == "candidates of g0"
    assert out.splitlines()[-1] == "rankings that are kept for a GPU: 10"
    rows = {"file": "graphs.py:g1", "policy": {"allow_tf32": True}}, {"file": "graphs.py:g0"}
    code, out, err = run(manifest(tmp_path, *rows), "--target=nvidia-h200", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"schema": 1, "graphs": [{"graph": "g1"}, {"graph": "g0"}]}
    assert [policy.allow_tf32 for *_, policy in asked[-2:]] == [True, None]


# -- scripts ---------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
print(json.dumps([os.environ.get("CUDNNGRAPH_TUNE"), sys.argv[1:], __name__]))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_a_script_runs_with_its_arguments_and_the_setting_and_gives_its_code(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_module: bool, code: int
) -> None:
    script = tmp_path / "train_it.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDNNGRAPH_TUNE", "cached")
    what = ["-m", "train_it"] if as_module else [script]
    got, out, err = run(*what, code, "--graphs", "x", "-m")
    first, *rest = out.splitlines()
    assert (got, err) == (code, "")
    assert json.loads(first) == ["autotune", [str(code), "--graphs", "x", "-m"], "__main__"]
    why = "" if code else ": every graph has a tuned plan in the cache"
    assert rest == [f"nothing new was tuned{why}"]


def python(*words: str, folder: Path) -> list[object]:
    """Return the name and the arguments that a script or module sees if python itself runs it."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    seen: list[object] = json.loads(done.stdout)
    return seen


REPORT = "import json, sys; print(json.dumps([__name__, *sys.argv[1:]]))\n"
ARGUMENTS: list[list[str]] = [
    [],
    ["--steps", "10"],
    ["--", "--steps", "10"],
    ["--steps=10", "--", "x"],
    ["x", "--", "y"],
    ["--graphs", "x", "--jobs", "4", "-m", "other"],
    ["-h", "--version", "--share=0/1"],
    ["--sh", "-", "--", "--", "fleet.json"],
]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("what", [["-m", "package.train"], ["-mpackage.train"], ["train.py"]])
@pytest.mark.parametrize("before", [[], ["--jobs", "1"], ["--job=1"]], ids=" ".join)
def test_a_script_sees_the_arguments_that_python_would_give_it(
    what: list[str],
    before: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "package").mkdir()
    for name in ("package/__init__.py", "package/train.py", "train.py"):
        (tmp_path / name).write_text("" if "init" in name else REPORT)
    monkeypatch.chdir(tmp_path)
    called: list[list[str]] = []
    monkeypatch.setattr(tune.subprocess, "run", lambda command, **_: called.append(command) or DONE)
    for arguments in ARGUMENTS:
        assert cli.main(["tune", *before, *what, *arguments]) == 0
        assert capfd.readouterr().err == ""
    monkeypatch.undo()
    separate = ["-m", "package.train"] if what[0].startswith("-m") else what
    assert called == [[sys.executable, *separate, *arguments] for arguments in ARGUMENTS]
    for command, arguments in list(zip(called, ARGUMENTS, strict=True))[1:4]:
        assert python(*command[1:], folder=tmp_path) == ["__main__", *arguments]
        assert python(*what, *arguments, folder=tmp_path) == ["__main__", *arguments]


DONE = subprocess.CompletedProcess([], 0)


@pytest.mark.usefixtures("gpu")
def test_behind_two_dashes_is_a_script_whatever_it_is_called(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(REPORT)
    monkeypatch.chdir(tmp_path)
    code, out, err = run("--", "train.py", "--steps", "10")
    assert (code, err) == (0, "")
    assert json.loads(out.splitlines()[0]) == ["__main__", "--steps", "10"]
    assert tune.divide(["--", "-m", "--steps"]) == (["--", "-m"], ["--steps"])
    assert tune.divide(["-", "--steps"]) == (["-"], ["--steps"])


@pytest.mark.usefixtures("gpu", "source")
def test_options_may_stand_behind_a_manifest(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the README has it: there is no script that they could be of."""
    started: list[list[str]] = []
    monkeypatch.setattr(
        tune.subprocess, "Popen", lambda command: started.append(command) or Process(0)
    )
    file = manifest(tmp_path, {"file": "graphs.py"})
    assert run(file, "--jobs", 3)[0] == 0
    assert len(started) == 3


def test_every_option_with_a_value_is_known_where_the_call_is_divided() -> None:
    (action,) = (each for each in cli.build_parser()._actions if isinstance(each.choices, dict))
    options = action.choices["tune"]._actions  # type: ignore[union-attr, call-overload, index]
    found = {name for each in options if each.nargs is None for name in each.option_strings}
    assert found - {"-m"} == set(tune._WITH_VALUE)


# -- what was found --------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
def test_the_table_has_the_tuned_entries_that_are_new(
    run: Cli, source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By age; what was there before, and what was made without measuring, is not in it."""
    ahead = time.time() + 60

    def compile(spec: cg.GraphSpec, device: str, *, policy: Policy) -> Any:
        made = cache_example.records(ahead)
        store = PlanStore(folder, seeds=None)
        created = {"tuned": ahead + 2, "cut": ahead + 1, "old": ahead - 3600, "sdpa": ahead}
        for name, when in created.items():
            method = "heuristic" if name == "sdpa" else "autotune"
            changed = {**made[name].policy, "tune": method}
            store.put(replace(made[name], created=when, policy=changed))
        return MADE

    monkeypatch.setattr(tune, "compile_spec", compile)
    code, out, err = run("--graphs", f"{source}:g0")
    assert (code, err) == (0, "")
    first, *table = out.rstrip().splitlines()
    assert re.fullmatch(r"1 of 1: 'g0': tuned, \d+\.\d s", first)
    head, *rows = [re.split(r" {2,}", line) for line in table]
    assert head == ["graph", "steps", "time", "plans tried"]
    assert [row[1] for row in rows] == ["conv | bias gelu", "conv bias relu"]
    assert rows[0][0].startswith("conv → bias → gelu: f32[2, 3, 8, 8]")
    assert rows[0][2:] == ["0"]
    assert rows[1][2:] == ["10.0 µs", "3"]


@pytest.mark.usefixtures("gpu")
def test_a_torch_step_is_marked_in_the_table(
    run: Cli, source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile(spec: cg.GraphSpec, device: str, *, policy: Policy) -> Any:
        made = cache_example.records(time.time())["torch"]
        changed = {**made.policy, "tune": "autotune"}
        PlanStore(folder, seeds=None).put(replace(made, created=time.time(), policy=changed))
        return MADE

    monkeypatch.setattr(tune, "compile_spec", compile)
    code, out, _ = run("--graphs", f"{source}:g0")
    assert code == 0
    assert "  sdpa (torch)  " in out
