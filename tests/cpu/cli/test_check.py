"""`cudnngraph check` without a GPU: what it sweeps and in which order, what it keeps, where it goes
on, and what it bars. Workers are stand-ins."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph import cli, settings
from cudnngraph.backend import candidates, env, found_bad, libraries
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.plan import Choice
from cudnngraph.cache import lookup
from cudnngraph.ir.key import graph_key
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select import processes, workers
from cudnngraph.select.processes import Server, Unusable
from cudnngraph.select.workers import Answer
from cudnngraph.sweep import run
from cudnngraph.sweep.declare import CHAINS, QUICK_SIZES
from cudnngraph.sweep.patterns import samples
from cudnngraph.sweep.run import Results, Task
from plans_cache.findings import Findings
from tests.fakes import H200

STAND_IN = Path(__file__).parents[2] / "workers" / "stand_in_worker.py"
PLACE = {"gpu": "NVIDIA H200", "compute_capability": "9.0", "cudnn": "9.19.0"}
OFF = "wrong: 'y' is off by 0.5, at most 0.002 is right"
Judge = Callable[[Task, Choice], Answer]


def accepted(error: float | None = 1e-4) -> Answer:
    return Answer(outcomes=(Outcome(Candidate(0, Choice(0, ()), ""), True),), error=error)


def rejected(reason: str, *, wrong: bool = False) -> Answer:
    candidate = Candidate(0, Choice(0, ()), "")
    return Answer(outcomes=(Outcome(candidate, False, reason, wrong=wrong),))


def fault(choice: Choice) -> Answer:
    return Answer(faults={choice: f"{workers.LOST} died of SIGSEGV"}, wrong="died")


class Stand:
    """A library of three engines, the second of which has two configurations."""

    most = 2

    def __init__(self, judge: Judge = lambda task, choice: accepted()) -> None:
        self.judge = judge
        self.asked: list[tuple[str, bool, Choice]] = []
        self.listed: list[str] = []

    def candidates(self, task: Task) -> Sequence[Candidate]:
        self.listed.append(task.graph)
        if "pool" in task.pattern:
            raise cg.NotSupported("this graph", ["the frontend has no resampling"])
        choices = [Choice(4, ()), Choice(7, (("TILE", 1),)), Choice(7, (("TILE", 2),))]
        choices.append(Choice(9, ()))
        return [Candidate(n, choice, f"eng{choice.engine}") for n, choice in enumerate(choices)]

    def why_barred(self, task: Task, candidate: Candidate) -> str | None:
        return "known to be wrong: everywhere" if candidate.choice.engine == 9 else None

    def submit(self, task: Task, choice: Choice) -> Future[Answer]:
        self.asked.append((*task.place, choice))
        future: Future[Answer] = Future()
        try:
            future.set_result(self.judge(task, choice))
        except RuntimeError as error:
            future.set_exception(error)
        return future


@pytest.fixture
def store(tmp_path: Path) -> Findings:
    return Findings(tmp_path / "cache", "ab" * 16)


def some(count: int = 4, only: str = "conv 3x3, relu(x + c), float16") -> list[Task]:
    return list(run.tasks(full=True, only=only))[:count]


# -- what is swept ---------------------------------------------------------------------------------


def test_the_order_is_fixed_and_every_graph_has_an_id_of_its_own() -> None:
    first, second = (list(run.tasks(full=False)) for _ in range(2))
    assert [each.place for each in first] == [each.place for each in second]
    assert len({each.place for each in first}) == len(first) > 500
    assert all(len(each.digest) == 64 for each in first)


def test_the_quick_graphs_are_among_the_full_ones_and_of_every_family() -> None:
    quick, full = (list(samples(full=full)) for full in (False, True))
    assert {str(each) for each in quick} < {str(each) for each in full}
    assert len({str(each) for each in full}) == len(full) > 10 * len(quick)
    families = {each.pattern.split(",")[0] for each in full}
    # A sample of most families is quick; what is not is like one that is.
    assert families - {each.pattern.split(",")[0] for each in quick} == {
        "conv_wgrad stride 2",
        "matmul transposed",
    }
    for pattern in {each.pattern for each in quick}:
        assert sum(each.pattern == pattern for each in quick) == QUICK_SIZES


def test_what_is_swept_is_odd_and_even_of_one_pixel_and_broadcast_in_every_way() -> None:
    specs = [each.spec for each in run.tasks(full=True, only="conv 3x3, ")]
    outs = {spec.tensors[spec.outputs[0]].shape for spec in specs}
    assert {shape[1] % 2 for shape in outs} == {0, 1}
    assert any(shape[2:] == (1, 1) for shape in outs)
    assert {t.dtype for s in specs for t in s.tensors.values()} >= {
        torch.float16,
        torch.bfloat16,
        torch.float32,
    }
    names = {each.pattern for each in samples(full=True, only="conv 3x3, ")}
    for chain in CHAINS:
        assert any(f", {chain}" in name for name in names), chain
    for way in ("1,w,1,1", "w,w,1,1", "w,1,w,w", "1,1,1,1", "w,w,w,w"):
        assert any(f"relu(x + v) [{way}]" in name for name in names), way


def test_float32_products_are_swept_with_and_without_tf32() -> None:
    float32 = list(run.tasks(full=False, only="matmul, x, float32"))
    assert [each.allow_tf32 for each in float32] == [False, True] * QUICK_SIZES
    assert all(each.graph.endswith(", TF32") == each.allow_tf32 for each in float32)
    assert not any(each.allow_tf32 for each in run.tasks(full=False, only="conv 3x3, x, float16"))


def test_what_is_never_one_plan_is_swept_in_its_parts() -> None:
    parts = [each for each in run.tasks(full=False, only="sdpa_varlen") if not each.why_none]
    assert any([node.op for node in each.spec.nodes] == ["sdpa_varlen"] for each in parts)


def test_a_steps_id_is_that_of_a_compiled_graphs_step() -> None:
    """The bar reaches what `compile` asks for: the same graph, declared in other words."""
    g = cg.Graph("mine")
    picture = g.input("picture", (2, 64, 16, 16), torch.float16, layout="channels_last")
    kernel = g.input("kernel", (64, 64, 3, 3), torch.float16, layout="channels_last")
    shift = g.input("shift", (1, 64, 1, 1), torch.float16, layout="channels_last")
    g.output("made", g.relu(g.conv(picture, kernel, padding=1) + shift), layout="channels_last")
    asked: list[GraphSpec] = []

    def build(part: GraphSpec) -> Any:
        asked.append(part)
        raise cg.NotSupported("this graph", ["no"])

    from cudnngraph.ir.canonical import canonical
    from cudnngraph.select.heuristic import heuristic

    heuristic(canonical(g.spec()), cg.Policy(allow_tf32=False), build)
    swept = {each.digest for each in some(5, "conv 3x3, relu(x + c), float16, channels_last")}
    assert run.step_digest(asked[0]) in swept


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "row"),
    [
        (accepted(), {"status": "right", "error": 1e-4}),
        (accepted(None), {"status": "out of memory", "reason": "no memory to compare its results"}),
        (
            rejected(OFF, wrong=True),
            {"status": "wrong", "reason": OFF, "error": 0.5, "bound": 0.002},
        ),
        (
            rejected("writes over its inputs", wrong=True),
            {"status": "wrong", "reason": "writes over its inputs"},
        ),
        (
            fault(Choice(4, ())),
            {"status": "fault", "reason": "the process that tried it died of SIGSEGV"},
        ),
        (Answer(refused=("not here",)), {"status": "refused", "reason": "not here"}),
        (rejected("no engine"), {"status": "refused", "reason": "no engine"}),
        (
            rejected("known to be wrong: engine 8"),
            {"status": "barred", "reason": "known to be wrong: engine 8"},
        ),
        (
            rejected("[cudnn_frontend] Deselecting execution plan"),
            {"status": "barred", "reason": "[cudnn_frontend] Deselecting execution plan"},
        ),
        (
            rejected("its check fails: TypeError: None", wrong=True),
            {"status": "failed", "reason": "its check fails: TypeError: None"},
        ),
        (
            rejected("CUDNN_STATUS_ALLOC_FAILED"),
            {"status": "out of memory", "reason": "CUDNN_STATUS_ALLOC_FAILED"},
        ),
    ],
)
def test_what_a_worker_says_is_a_status(answer: Answer, row: dict[str, Any]) -> None:
    future: Future[Answer] = Future()
    future.set_result(answer)
    assert run.judged(future) == row


def test_a_worker_that_fails_is_no_plans_fault_and_no_workers_end_the_sweep() -> None:
    future: Future[Answer] = Future()
    future.set_exception(RuntimeError("a worker failed: OutOfMemoryError: 80 GiB"))
    assert run.judged(future)["status"] == "out of memory"
    future = Future()
    future.set_exception(RuntimeError("a worker failed: TypeError: None"))
    assert run.judged(future)["status"] == "failed"
    future = Future()
    future.set_exception(Unusable("the GPU is busy"))
    with pytest.raises(Unusable):
        run.judged(future)


def test_every_candidate_of_every_graph_has_one_result_in_order(store: Findings) -> None:
    todo, library, results = [*some(2), *some(1, "max_pool")], Stand(), Results()
    told: list[tuple[int, int]] = []
    assert run.run(todo, library, store, results, tell=lambda *done: told.append(done))
    assert library.listed == [each.graph for each in todo]
    choices = [choice for _, _, choice in library.asked[:3]]
    assert choices == [Choice(4, ()), Choice(7, (("TILE", 1),)), Choice(7, (("TILE", 2),))]
    assert results.counts() == {
        "right": 6,
        "wrong": 0,
        "fault": 0,
        "refused": 0,
        "out of memory": 0,
        "barred": 2,
        "failed": 0,
    }
    assert results.done[todo[2].place]["refused"] == ["the frontend has no resampling"]
    assert told[0] == (0, 3) and told[-1] == (3, 3) and told == sorted(told)
    again = Results.of(store.results())
    assert again.plans == results.plans and again.done == results.done


def test_a_second_call_asks_for_nothing_that_is_known(store: Findings) -> None:
    todo = some()
    run.run(todo, Stand(), store, Results())
    library = Stand()
    assert run.run(todo, library, store, Results.of(store.results()))
    assert library.asked == [] and library.listed == []


def test_it_goes_on_after_a_kill_at_any_byte(tmp_path: Path) -> None:
    """The file is cut anywhere: what is lost is asked for again, nothing else, and all is there."""
    todo = some(2)
    whole = Findings(tmp_path / "whole", "ab" * 16)
    run.run(todo, Stand(), whole, Results())
    text = whole.results_path.read_bytes()
    wanted = Results.of(whole.results())
    for cut in range(0, len(text), 7):
        store = Findings(tmp_path / str(cut), "ab" * 16)
        store.add({"environment": PLACE})
        store.results_path.write_bytes(text[:cut])
        kept = Results.of(store.results())
        known = {(*place, choice) for place, rows in kept.plans.items() for choice in rows}
        library = Stand()
        assert run.run(todo, library, store, kept)
        assert not known & set(library.asked), "nothing is tried twice"
        again = Results.of(store.results())
        assert again.plans == wanted.plans and again.done == wanted.done, cut


@pytest.mark.parametrize(
    "damage",
    [
        b"\x00\xff\xfe garbage\n",
        b"[1, 2]\n",
        b'{"step": 5, "tf32": true, "status": "right"}\n',
        b'{"step": "a", "tf32": false, "status": "right", "engine": "x", "knobs": 3}\n',
        b'{"step": "a", "tf32": false, "status": "odd", "engine": 1, "knobs": []}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_damaged_file_is_no_error(store: Findings, damage: bytes) -> None:
    todo = some(1)
    run.run(todo, Stand(), store, Results())
    text = store.results_path.read_bytes()
    store.results_path.write_bytes(damage + text[:50] + b"\n" + damage + text)
    results = Results.of(store.results())
    assert results.counts()["right"] == 3 and len(results.done) == 1


def test_files_of_others_and_no_folders_are_no_results(store: Findings) -> None:
    assert store.results() == [] and store.known_bad() is None
    store.add({"environment": PLACE})
    store.results_path.unlink()
    store.results_path.symlink_to("/dev/zero")
    store.path.write_text("not JSON")
    assert store.results() == [] and store.known_bad() is None


def test_it_stops_at_its_deadline_and_goes_on(store: Findings) -> None:
    todo, results, library = some(5), Results(), Stand()
    assert not run.run(todo, library, store, results, deadline=0.0)
    assert 0 < len(library.asked) < 15
    assert run.run(todo, Stand(), store, results)
    assert results.counts()["right"] == 15


def test_an_interrupt_keeps_what_is_there_and_drops_what_was_asked(store: Findings) -> None:
    todo, results = some(5), Results()
    open_: list[Future[Answer]] = []

    class Slow(Stand):
        def submit(self, task: Task, choice: Choice) -> Future[Answer]:
            if len(self.asked) < 4:
                return super().submit(task, choice)
            self.asked.append((*task.place, choice))
            open_.append(Future())
            if len(self.asked) == 7:
                raise KeyboardInterrupt
            return open_[-1]

    with pytest.raises(KeyboardInterrupt):
        run.run(todo, Slow(), store, results)
    assert [each.cancelled() for each in open_] == [True, True, False], "the last was never had"
    library = Stand()
    assert run.run(todo, library, store, results)
    assert results.counts()["right"] == 15


def test_workers_that_die_or_hang_are_the_candidates_result(
    store: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By processes: one that aborts, one that hangs, one that is right."""
    monkeypatch.setattr(processes, "LIMIT_S", 1.0)
    monkeypatch.setattr(workers, "IDLE_S", 1.0)
    told = json.dumps({"4": "aborts", "7": "hangs", "9": "is right", "11": OFF})

    class ByProcesses(run.OnGpu):
        def candidates(self, task: Task) -> Sequence[Candidate]:
            return [Candidate(n, Choice(n, ()), f"eng{n}") for n in (4, 7, 9, 11)]

        def why_barred(self, task: Task, candidate: Candidate) -> str | None:
            return None

    log = str(tmp_path / "log")
    server = Server(lambda file: [sys.executable, str(STAND_IN), told, log, str(file)])
    library = ByProcesses(0, server)
    results = Results()
    (task,) = some(1)
    assert run.run([task], library, store, results)
    rows = {choice.engine: row for choice, row in results.plans[task.place].items()}
    assert {engine: row["status"] for engine, row in rows.items()} == {
        4: "fault",
        7: "fault",
        9: "right",
        11: "wrong",
    }
    assert rows[4]["reason"] == "the process that tried it died of SIGABRT"
    assert rows[7]["reason"] == "the process that tried it hangs, or takes more than 1 s"


def test_the_workers_of_a_sweep_take_every_engine_and_ask_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cudnngraph.select import worker
    from cudnngraph.sweep import worker as sweeper

    monkeypatch.setattr(found_bad, "_sweeping", False)
    monkeypatch.setattr(candidates, "_offers_every", False)
    seen: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        worker, "load", lambda: seen.append((found_bad._sweeping, candidates._offers_every))
    )
    sweeper.load()
    assert seen == [(True, True)]


# -- what is barred --------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Findings]:
    """The findings of an H200 in a cache directory of their own."""
    monkeypatch.setattr(env, "env_key", lambda index: H200)
    monkeypatch.setattr(env, "cudnn_version", lambda: 91900)
    monkeypatch.setattr(found_bad, "_driver", lambda: "580.65.06")
    with settings.override(cache_dir=tmp_path / "cache"):
        yield found_bad.findings(0)


def swept(here: Findings, todo: Sequence[Task], judge: Judge) -> Results:
    results = Results()
    run.run(todo, Stand(judge), here, results)
    run.write_known_bad(here, results, found_bad.environment(0), mode="quick", complete=True)
    return results


def why(spec: GraphSpec, choice: Choice, tf32: bool = False) -> str | None:
    return found_bad.why_found_bad(spec, choice, 0, allow_tf32=tf32)


def test_exactly_what_was_wrong_is_barred(here: Findings) -> None:
    todo = some(5)
    bad = Choice(7, (("TILE", 2),))

    def judge(task: Task, choice: Choice) -> Answer:
        wrong = task is todo[1] and choice == bad
        return rejected(OFF, wrong=True) if wrong else accepted()

    assert why(todo[1].spec, bad) is None
    swept(here, todo, judge)
    for tf32 in (False, True):
        assert why(todo[1].spec, bad, tf32) == f"known bad on this GPU: {OFF}"
        assert why(todo[1].spec, Choice(7, (("TILE", 1),)), tf32) is None
        assert why(todo[0].spec, bad, tf32) is None


def test_an_engine_that_is_right_for_no_size_is_barred_for_the_pattern(here: Findings) -> None:
    todo = some(5, "conv 3x3, relu(x + c), float16, channels_last")

    def judge(task: Task, choice: Choice) -> Answer:
        return fault(choice) if choice.engine == 7 else accepted()

    swept(here, todo, judge)
    g = cg.Graph("another_size")
    x = g.input("x", (7, 40, 30, 30), torch.float16, layout="channels_last")
    w = g.input("w", (24, 40, 3, 3), torch.float16, layout="channels_last")
    c = g.input("c", (1, 24, 1, 1), torch.float16, layout="channels_last")
    g.output("y", g.relu(g.conv(x, w, padding=1) + c), layout="channels_last")
    said = why(g.spec(), Choice(7, (("TILE", 5),)))
    assert said is not None
    assert said.startswith("known bad on this GPU: engine 7 is right for none of ")
    assert said.endswith(f"sizes of this pattern: {workers.LOST} died of SIGSEGV")
    assert why(g.spec(), Choice(4, ())) is None
    other = some(1, "conv 3x3, silu(x + c), float16, channels_last")[0]
    assert why(other.spec, Choice(7, ())) is None


@pytest.mark.parametrize("right", [0, 3])
def test_one_size_that_is_right_leaves_the_engine_to_the_pattern(
    here: Findings, right: int
) -> None:
    todo = some(5, "conv 3x3, relu(x + c), float16, channels_last")

    def judge(task: Task, choice: Choice) -> Answer:
        fine = choice.engine != 7 or (task is todo[right] and choice.knobs == (("TILE", 1),))
        return accepted() if fine else rejected(OFF, wrong=True)

    results = swept(here, todo, judge)
    signatures = {results.done[task.place]["signature"] for task in todo}
    steps, patterns = run.barred_by(results)
    assert len(steps) == 9 and len(signatures) == 1 and patterns == []


def test_fewer_sizes_than_three_bar_no_pattern(here: Findings) -> None:
    todo = some(2, "conv 3x3, relu(x + c), float16, channels_last")
    results = swept(here, todo, lambda task, choice: rejected(OFF, wrong=True))
    steps, patterns = run.barred_by(results)
    assert len(steps) == 6 and patterns == []


def test_what_is_wrong_in_float32_alone_may_be_used_with_tf32(here: Findings) -> None:
    todo = list(run.tasks(full=True, only="matmul, x, float32"))[:10]

    def judge(task: Task, choice: Choice) -> Answer:
        bad = choice.engine == 7 or (choice.engine == 4 and not task.allow_tf32)
        return rejected(OFF, wrong=True) if bad else accepted()

    swept(here, todo, judge)
    for task in todo:
        assert why(task.spec, Choice(4, ()), tf32=False)
        assert why(task.spec, Choice(4, ()), tf32=True) is None
        assert why(task.spec, Choice(7, (("TILE", 1),)), tf32=True)


def test_patterns_tell_kernels_strides_and_layouts_apart_and_not_sizes() -> None:
    def signature(only: str) -> list[str]:
        return [found_bad.pattern(each.spec) for each in run.tasks(full=True, only=only)]

    kinds = ("conv 1x1", "conv 3x3", "conv 3x3 stride 2", "conv 3x3 dilation 2", "conv 2 groups")
    firsts = [signature(f"{kind}, relu(x + c), float16, channels_last")[0] for kind in kinds]
    firsts.append(signature("conv 3x3, relu(x + c), float16, contiguous")[0])
    firsts.append(signature("conv 3x3, relu(x + c), bfloat16, channels_last")[0])
    assert len(set(firsts)) == len(firsts)
    assert len(set(signature("conv 3x3, relu(x + c), float16, channels_last"))) == 1
    ways = [
        signature(f"conv 3x3, relu(x + v) [{way}], float16, ch")[0]
        for way in ("1,w,1,1", "w,w,1,1")
    ]
    assert len(set(ways)) == 2


def test_another_driver_gpu_or_release_is_another_file(
    here: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {here.path}
    monkeypatch.setattr(found_bad, "_driver", lambda: "590.10")
    paths.add(found_bad.findings(0).path)
    for change in (
        {"gpu_name": "NVIDIA B200"},
        {"cudnn_version": 92600},
        {"frontend_version": "1.32.0"},
        {"compute_capability": (10, 0)},
    ):
        other = replace(H200, **change)
        monkeypatch.setattr(env, "env_key", lambda index, other=other: other)
        paths.add(found_bad.findings(0).path)
    assert len(paths) == 6


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:18:59 UTC\n",
            "580.65.06",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\n",
            "570.86.10",
        ),
        ("nothing of the kind", "13.0"),
    ],
)
def test_the_drivers_version_is_its_kernel_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, driver: str
) -> None:
    monkeypatch.setattr(found_bad, "_KERNEL_MODULE", tmp_path / "version")
    (tmp_path / "version").write_text(text)
    library = libraries.Library("libcuda.so.1", "/usr/lib/libcuda.so.1", None, "13.0")
    monkeypatch.setattr(libraries, "load_driver", lambda: library)
    assert found_bad._driver.__wrapped__() == driver


def test_the_file_is_read_again_when_it_changes_and_damage_bars_nothing(here: Findings) -> None:
    (task,) = some(1)
    swept(here, [task], lambda task, choice: rejected(OFF, wrong=True))
    assert why(task.spec, Choice(4, ()))
    for text in ("", "[]", '{"schema": 99}', '{"schema": 1, "steps": [1, {}], "patterns": 7}'):
        here.path.write_text(text)
        assert why(task.spec, Choice(4, ())) is None, text
    swept(here, [task], lambda task, choice: rejected(OFF, wrong=True))
    assert why(task.spec, Choice(4, ()))


def test_a_process_of_a_sweep_bars_nothing(here: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = some(1)
    swept(here, [task], lambda task, choice: rejected(OFF, wrong=True))
    monkeypatch.setattr(found_bad, "_sweeping", True)
    assert why(task.spec, Choice(4, ())) is None


# -- what selection makes of it --------------------------------------------------------------------


class FakeProposals(candidates.Proposals):
    """cuDNN's list without cuDNN: engine 4, then engine 5. What is passed over is not built."""

    def __init__(
        self, spec: GraphSpec, policy: cg.Policy, index: int, *, more: bool = False
    ) -> None:
        self.spec, self._policy, self._device_index = spec, policy, index
        self.candidates = [Candidate(n, Choice(n, ()), f"eng{n}") for n in (4, 5)]

        class Graph:
            def build_plan_at_index(self, index: int) -> None: ...
            def get_workspace_size_plan_at_index(self, index: int) -> int:
                return 0

        class Lowered:
            graph = Graph()

        class Frontend:
            cudnnGraphNotSupportedError = cg.NotSupported

        self._lowered, self._frontend = Lowered(), Frontend()  # type: ignore[assignment]


def test_what_is_barred_is_passed_over_by_selection_with_its_reason(
    here: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = some(1)
    swept(here, [task], lambda task, choice: rejected(OFF, wrong=True))
    monkeypatch.setattr(candidates, "_plan_of", lambda lowered, index, choice, device: choice)
    monkeypatch.setattr(candidates, "_why_no_launch", lambda plan, spec: None)
    proposals = FakeProposals(task.spec, cg.Policy(allow_tf32=False), 0)
    outcomes = [proposals.build(each) for each in proposals.candidates]
    assert [(each.accepted, each.reason) for each, _ in outcomes] == [
        (False, f"known bad on this GPU: {OFF}"),
        (True, ""),
    ]
    assert [made for _, made in outcomes] == [None, Choice(5, ())]


def test_explain_names_what_is_barred_and_the_next_plan_is_taken(
    here: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cudnngraph.ir.canonical import canonical
    from cudnngraph.select.heuristic import heuristic
    from tests.fakes import FakePlan

    (task,) = some(1)
    swept(here, [task], lambda task, choice: rejected(OFF, wrong=True))
    monkeypatch.setattr(candidates, "Proposals", FakeProposals)
    monkeypatch.setattr(
        candidates, "_plan_of", lambda lowered, index, choice, device: FakePlan(choice)
    )
    monkeypatch.setattr(candidates, "_why_no_launch", lambda plan, spec: None)
    policy = cg.Policy(allow_tf32=False)
    chosen = heuristic(
        canonical(task.spec), policy, lambda part: candidates.build_first(part, policy, 0)
    )
    (step,) = chosen.steps
    assert step.choice == Choice(5, ())
    said = {each.subject: each.reason for each in step.decisions}
    assert said["engine 4"] == f"known bad on this GPU: {OFF}"


def test_a_record_of_what_is_barred_now_is_stale(here: Findings, tmp_path: Path) -> None:
    from cudnngraph.cache.codec import StaleRecord, to_record
    from cudnngraph.ir.canonical import canonical
    from cudnngraph.select.heuristic import heuristic
    from tests.fakes import FakePlan

    (task,) = some(1)
    spec = canonical(task.spec)
    policy = cg.Policy(allow_tf32=False, tune="heuristic", verify="off")
    bad = FakePlan(Choice(4, ()))
    outcome = Outcome(Candidate(0, bad.choice, "eng4"), True)
    chosen = heuristic(spec, policy, lambda part: (bad, (outcome,)))  # type: ignore[arg-type,return-value]
    record = to_record(spec, graph_key(spec, policy), H200, policy, chosen)
    swept(here, [task], lambda task, choice: rejected(OFF, wrong=True))
    with pytest.raises(StaleRecord, match=r"known bad on this GPU: wrong: 'y' is off by 0\.5"):
        lookup._restore(record, None, "disk", spec, policy, 0)


# -- the command -----------------------------------------------------------------------------------


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
