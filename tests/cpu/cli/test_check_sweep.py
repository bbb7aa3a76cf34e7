"""Sweeps of `cudnngraph check`: what they run and in which order, what they keep, where they go on.

Workers are stand-ins.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import candidates, found_bad
from cudnngraph.backend.candidates import Candidate
from cudnngraph.backend.plan import Choice
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select import processes, workers
from cudnngraph.select.processes import Server, Unusable
from cudnngraph.select.workers import Answer
from cudnngraph.sweep import run
from cudnngraph.sweep.declare import CHAINS, QUICK_SIZES
from cudnngraph.sweep.patterns import samples
from cudnngraph.sweep.run import Results, Task
from plans_cache.findings import Findings
from tests.sweeps import OFF, Stand, accepted, fault, rejected, some

STAND_IN = Path(__file__).parents[2] / "workers" / "stand_in_worker.py"
PLACE = {"gpu": "NVIDIA H200", "compute_capability": "9.0", "cudnn": "9.19.0"}


@pytest.fixture
def store(tmp_path: Path) -> Findings:
    return Findings(tmp_path / "cache", "ab" * 16)


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
