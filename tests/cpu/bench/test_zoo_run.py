"""The processes of ``cudnngraph bench zoo``: models that fail, hang or die, and going on after."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cudnngraph.bench.zoo import run
from cudnngraph.bench.zoo.one import Job
from cudnngraph.bench.zoo.registry import ZOO, chosen
from cudnngraph.bench.zoo.results import Results, loaded, warm_start
from cudnngraph.bench.zoo.run import Options, Zoo
from cudnngraph.cli import main
from tests.small_zoo import HANGING, RIGHT

#: Small ones of each library, run where it is installed; the command runs them all.
PER_LIBRARY = ("YOLO-like detector", "MobileNetV3-L", "R3D-18", "T5-base encoder", "DiT-XL*")


# -- real processes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The exit code and the results of one call on models most of which are broken."""
    file = tmp_path_factory.mktemp("zoo") / "broken.json"
    words = ["--registry", "tests.small_zoo:BROKEN", "--device", "cpu", "--json", str(file)]
    return main(["bench", "zoo", *words]), file


def test_a_model_that_is_broken_has_a_reason_and_ends_no_run(broken: tuple[int, Path]) -> None:
    code, file = broken
    rows = loaded(file).rows
    assert code == 1
    assert [(name, row["status"]) for name, row in rows.items()] == [
        *(("first", "done"), ("wrong", "failed"), ("dies", "failed"), ("vanishes", "failed")),
        *(("draws", "failed"), ("raises", "failed"), ("missing", "missing"), ("second", "done")),
    ]
    reasons = {name: row.get("error", "") for name, row in rows.items()}
    assert reasons["wrong"].startswith("WrongResult: Wrong: result 0 is off by 0.5, at most")
    assert reasons["dies"] == "first result: the process ended with exit code 3"
    assert reasons["vanishes"].startswith("Untelling: result 0 ")
    assert reasons["draws"] == "CannotImport: result 0 is another in a second call"
    assert reasons["raises"] == "ValueError: no configuration has\nthis name"
    assert reasons["missing"] == "no_such_library is not installed"
    assert rows["dies"]["ways"]["eager"]["errors"], "what does not end its process has numbers"


def test_a_model_that_is_right_has_its_errors_and_what_ran_it(broken: tuple[int, Path]) -> None:
    row = loaded(broken[1]).rows["first"]
    assert row["wide"] == "float64" and row["parameters"] == 276 and row["dtype"] == "float32"
    ours = row["ways"]["heuristic"]
    ((error, own),) = ours["errors"]
    assert 0 <= error < 1e-6 and own == row["ways"]["eager"]["errors"][0][0]
    assert ours["steps"] == {"reference": 1} and "us" not in ours, "no time of the reference"


def test_a_call_goes_on_where_one_was(
    broken: tuple[int, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[str] = []

    class Watched(Fake):
        def __init__(self, job: Job, file: Path, environment: Mapping[str, str]) -> None:
            begun.append(job.entry)
            super().__init__(job, file, environment)

    monkeypatch.setattr(run, "Process", Watched)
    file = tmp_path / "again.json"
    file.write_text(broken[1].read_text())
    words = ["bench", "zoo", "--registry", "tests.small_zoo:BROKEN", "--device", "cpu"]
    assert main([*words, "--json", str(file)]) == 1
    assert begun == [], "what is done or has failed is left alone"
    assert main([*words, "--resume", str(broken[1]), "--retry"]) == 0
    assert begun == ["wrong", "dies", "vanishes", "draws", "raises"]
    begun.clear()
    assert main([*words, "--json", str(file), "--again", "--models", "first,se*"]) == 0
    assert begun == ["first", "second"]
    data = json.loads(file.read_text())
    assert [len(data["rows"]), len(data["runs"])] == [8, 3]


def test_a_model_starts_cold_and_warm_and_is_timed(tmp_path: Path) -> None:
    """By a name of the CPU for which ways are measured, as they are on a GPU."""
    zoo = made(tmp_path, device="cpu:0")
    assert zoo.run(RIGHT[:1])
    row = zoo.results.rows["first"]
    assert row["status"] == "done" and list(row["ways"]) == ["eager", "heuristic"]
    eager, ours = row["ways"].values()
    assert ours["cold_s"] > 0 and ours["filled"] and ours["loads"] and "cold_s" not in eager
    assert 0 < eager["us"] < 1e6 and 0 < ours["us"] < 1e6
    assert warm_start(ours) == ours["first_s"] and warm_start(eager) is None


def test_a_model_that_hangs_is_ended_at_the_limit(tmp_path: Path) -> None:
    start = time.monotonic()
    zoo = made(tmp_path, limit_s=20.0, registry="tests.small_zoo:HANGING")
    assert zoo.run(HANGING)
    rows = zoo.results.rows
    assert rows["hangs"]["error"] == "build: takes more than 20 s"
    assert rows["hangs"]["status"] == "failed" and rows["first"]["status"] == "done"
    assert time.monotonic() - start < 200


def test_models_get_ready_side_by_side_and_are_timed_one_after_the_other(tmp_path: Path) -> None:
    """Each waits once it is ready, so that no other works while one starts warm and is timed."""
    zoo = made(tmp_path, device="cpu:0", ways=("eager", "heuristic"), jobs=2)
    assert zoo.run(RIGHT)
    for row in zoo.results.rows.values():
        beside = {name: way["warm_beside"] for name, way in row["ways"].items()}
        assert row["status"] == "done" and beside == {"eager": 2, "heuristic": 1}
        assert list(row["ways"]) == ["eager", "heuristic"], "timed in their order"
        assert all(way["us"] > 0 for way in row["ways"].values())


def test_the_budget_ends_a_model_without_calling_it_failed(tmp_path: Path) -> None:
    zoo = made(tmp_path, budget_s=4.0, registry="tests.small_zoo:HANGING")
    assert not zoo.run(HANGING)
    assert zoo.results.rows == {}, "there is nothing to go on from"


@pytest.mark.parametrize("pattern", PER_LIBRARY)
def test_tiny_models_of_the_zoo_are_right(pattern: str, tmp_path: Path) -> None:
    (entry,) = chosen(ZOO, [pattern])
    if importlib.util.find_spec(entry.library) is None:
        pytest.skip(f"{entry.library} is not installed")
    file = tmp_path / "zoo.json"
    words = ["--tiny", "--device", "cpu", "--models", pattern, "--json", str(file)]
    assert main(["bench", "zoo", *words]) == 0
    row = loaded(file).rows[entry.name]
    assert (row["status"], row["wide"]) == ("done", "float64"), row.get("error")
    assert row["ways"]["heuristic"]["errors"]


# -- in what order, with processes that only say they ran ------------------------------------------

WAYS = ("eager", "reduce-overhead", "max-autotune", "heuristic", "autotuned")


class Fake:
    """A process that ends at once: a cold start of 10 s, times of 100 µs."""

    bad: ClassVar[Mapping[tuple[str, str, str], dict[str, Any]]] = {}
    log: ClassVar[list[tuple[str, str, tuple[str, ...]]]] = []

    def __init__(self, job: Job, file: Path, environment: Mapping[str, str]) -> None:
        self.job, self.late, self.environment = job, False, environment
        self.begun, self.gone = time.monotonic(), 0

    def until_ready(self, limit_s: float) -> None:
        Fake.log.append(("ready", self.job.entry, self.job.ways))

    def go(self) -> None:
        self.gone += 1
        if self.job.kind == "timed" and self.gone == 1:
            return
        Fake.log.append((self.job.kind, self.job.entry, self.job.ways))
        if self.job.kind == "cold" and "heuristic" not in self.job.ways:
            folder = Path(self.environment["TORCHINDUCTOR_CACHE_DIR"])
            folder.mkdir(parents=True)
            (folder / f"of {self.job.ways[0]}").touch()

    def wait(self, limit_s: float) -> dict[str, Any]:
        kind, entry = self.job.kind, self.job.entry
        key = "cold_s" if kind == "cold" else "us"
        ways = {name: {key: 10.0 if kind == "cold" else 100.0} for name in self.job.ways}
        for name in self.job.ways:
            if (kind, entry, name) in self.bad:
                ways.pop(name)
                return {"ways": ways if kind == "cold" else {}, **self.bad[kind, entry, name]}
        return {"ways": ways, "stage": "", "wide": "float64", "parameters": 1}

    def end(self) -> None:
        self.job_ended = True


def made(folder: Path, registry: str = "tests.small_zoo:RIGHT", **options: Any) -> Zoo:
    given = {"ways": ("eager", "heuristic"), "device": "cpu", "tiny": True, **options}
    return Zoo(Options(registry, caches=folder, **given), Results("a device", True, [{}]))


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setattr(run, "Process", Fake)
    monkeypatch.setattr(Fake, "bad", {})
    monkeypatch.setattr(Fake, "log", [])
    return Fake


def test_cold_starts_come_first_and_those_that_measure_run_alone(
    tmp_path: Path, faked: type[Fake]
) -> None:
    zoo = made(tmp_path, device="cuda", ways=WAYS, jobs=2)
    assert zoo.run(RIGHT)
    kinds = [(kind, ways[0] if kind == "cold" else "all") for kind, _, ways in faked.log]
    quiet = [("cold", "heuristic"), ("cold", "reduce-overhead")]
    assert sorted(kinds[:4]) == sorted(quiet * 2)
    alone = [("cold", "max-autotune"), ("cold", "autotuned")]
    ready = [("ready", "all")] * 2
    assert kinds[4:] == [*alone, *alone, *ready, ("timed", "all"), ("timed", "all")]
    row = zoo.results.rows["first"]
    assert row["status"] == "done" and row["wide"] == "float64"
    found = {name: (way.get("beside"), way["filled"]) for name, way in row["ways"].items()}
    assert found == {
        "eager": (None, False),
        "reduce-overhead": (2, True),
        "max-autotune": (1, True),
        "heuristic": (2, True),
        "autotuned": (1, True),
    }
    merged = {file.name for file in (tmp_path / "first" / "inductor" / "all").iterdir()}
    assert merged == {"of reduce-overhead", "of max-autotune", "of autotuned"}


def test_a_way_that_fails_to_start_is_not_timed(tmp_path: Path, faked: type[Fake]) -> None:
    faked.bad = {("cold", "first", "max-autotune"): {"error": "no memory"}}
    zoo = made(tmp_path, device="cuda", ways=WAYS)
    assert zoo.run(RIGHT[:1])
    row = zoo.results.rows["first"]
    assert faked.log[-1] == ("timed", "first", tuple(w for w in WAYS if w != "max-autotune"))
    assert row["status"] == "done", "the others, and all of ours, have times"
    assert row["ways"]["max-autotune"]["error"] == "no memory"


def test_a_way_that_ends_the_timing_is_left_out_of_the_next(
    tmp_path: Path, faked: type[Fake]
) -> None:
    guilty = {"error": "first result: takes more than 9 s", "guilty": "reduce-overhead"}
    faked.bad = {("timed", "first", "reduce-overhead"): guilty}
    zoo = made(tmp_path, device="cuda", ways=WAYS)
    assert zoo.run(RIGHT[:1])
    row = zoo.results.rows["first"]
    assert row["status"] == "done" and row["ways"]["heuristic"]["us"] == 100.0
    assert row["ways"]["reduce-overhead"]["error"] == guilty["error"]
    assert "us" not in row["ways"]["reduce-overhead"]


@pytest.mark.parametrize(
    ("error", "guilty"),
    [
        ("OutOfMemoryError: tried to allocate 4 GiB", ""),
        ("OutOfMemoryError: tried to allocate 4 GiB", "eager"),
        ("BackendUnavailable: cuDNN gives no handle", ""),
    ],
)
def test_a_model_without_memory_beside_others_is_timed_once_more_alone(
    error: str, guilty: str, tmp_path: Path, faked: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = {"error": error, "guilty": guilty}
    faked.bad = {("timed", "second", "eager"): fails}
    ended: list[str] = []
    waits = Fake.wait

    def wait(self: Fake, limit_s: float) -> dict[str, Any]:
        if self.job.kind == "timed":
            ended.append(self.job.entry)
            faked.bad = {} if len(ended) > 2 else faked.bad  # when no other is there
        return waits(self, limit_s)

    monkeypatch.setattr(Fake, "wait", wait)
    zoo = made(tmp_path, device="cuda", ways=("eager", "heuristic"), jobs=2)
    assert zoo.run(RIGHT)
    row = zoo.results.rows["second"]
    assert row["status"] == "done" and "error" not in row
    assert row["ways"]["eager"]["us"] == 100.0 and ended == ["first", "second", *ended[2:]]


def test_a_model_without_any_way_of_ours_is_not_timed(tmp_path: Path, faked: type[Fake]) -> None:
    faked.bad = {("cold", "first", "heuristic"): {"error": "CannotImport: x"}}
    zoo = made(tmp_path, device="cuda", ways=("eager", "reduce-overhead", "heuristic"))
    assert zoo.run(RIGHT)
    assert [kind for kind, entry, _ in faked.log if entry == "first"] == ["cold", "cold"]
    row = zoo.results.rows["first"]
    assert (row["status"], row["error"]) == ("failed", "CannotImport: x")
    assert zoo.results.rows["second"]["status"] == "done"


def test_further_ways_measure_a_model_with_all_that_it_had(
    tmp_path: Path, faked: type[Fake]
) -> None:
    first = made(tmp_path, device="cuda", ways=("eager", "heuristic"))
    assert first.run(RIGHT[:1])
    faked.log.clear()
    second = made(tmp_path, device="cuda", ways=("autotuned",))
    second.results = first.results
    assert second.run(RIGHT[:1])
    asked = ("eager", "heuristic", "autotuned")
    assert faked.log == [
        ("cold", "first", ("autotuned",)),
        ("ready", "first", asked),
        ("timed", "first", asked),
    ], "the cold start that is known is not done again"
    faked.log.clear()
    assert second.run(RIGHT[:1]) and faked.log == []


def test_a_model_that_is_not_finished_keeps_the_row_it_had(
    tmp_path: Path, faked: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo = made(tmp_path, device="cuda", ways=("eager", "heuristic"))
    assert zoo.run(RIGHT[:1])
    before = zoo.results.rows["first"]
    again = made(tmp_path, device="cuda", ways=("eager", "heuristic", "autotuned"))
    again.results = zoo.results

    def interrupted(self: Fake, limit_s: float) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Fake, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        again.run(RIGHT[:1])
    assert again.results.rows["first"] == before


def test_a_process_finds_the_package_that_started_it(tmp_path: Path) -> None:
    job = Job("timed", "no.such:ZOO", "x", ("eager",), "cpu", True, str(tmp_path / "found.json"))
    job.write(tmp_path / "job.json")
    process = run.Process(job, tmp_path / "job.json", {"CUDA_VISIBLE_DEVICES": ""})
    process.go()
    found = process.wait(120.0)
    assert found["error"].startswith("ValueError: no.such:ZOO is no list of entries")
    with pytest.raises(ProcessLookupError):
        os.killpg(process._process.pid, 0)
