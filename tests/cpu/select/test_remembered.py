"""Measurements that are kept: a search that was stopped goes on, equal parts are measured once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cudnngraph as cg
from cudnngraph.backend import env
from cudnngraph.backend.candidates import UNRANKED, Candidate, Outcome
from cudnngraph.backend.plan import KERNEL, Choice
from cudnngraph.cache.measured import Measured
from cudnngraph.cache.state import STATE
from cudnngraph.ir.key import step_digest
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select.config import FINAL_ROUNDS, QUICK_ROUNDS
from cudnngraph.select.decision import Selection
from cudnngraph.select.remembered import RememberedBench, fastest, is_ranked, keep_ranking
from plans_cache.measurements import Measurements
from tests.fakes import H200
from tests.searches import F16, POLICY, Bench, Offer, block, chain, of, ops, run, table, taken


class Memo:
    """Measurements in memory, as text, as a file would have them."""

    def __init__(self) -> None:
        self.rows: dict[str, list[str]] = {}

    def of(self, spec: GraphSpec) -> list[Any]:
        return [json.loads(row) for row in self.rows.get(step_digest(spec), ())]

    def add(self, spec: GraphSpec, row: dict[str, Any]) -> bool:
        self.rows.setdefault(step_digest(spec), []).append(json.dumps(row))
        return True


def bench() -> Bench:
    """Six plans for every step, of times that are no ties."""

    def offers(spec: GraphSpec) -> list[Offer]:
        size = 10.0 * len(ops(spec))
        return [Offer(size * (1.5 - 0.1 * n), workspace=64 * n) for n in range(6)]

    return Bench(offers)


def measured(of: Bench) -> int:
    return sum(plans for _, plans in of.rounds)


def search(spec: GraphSpec, of: Bench, memo: Memo, policy: cg.Policy = POLICY) -> Selection:
    return run(spec, RememberedBench(of, memo), policy)  # type: ignore[arg-type]


def stripped(selection: Selection) -> list[tuple[str, int | None, float | None]]:
    return [
        (*each, step.time_us) for each, step in zip(taken(selection), selection.steps, strict=True)
    ]


def residual(count: int) -> GraphSpec:
    """Blocks of two convolutions with a sum behind them: equal parts in graphs of other lengths."""
    g = cg.Graph("residual")
    y = g.input("x", (2, 8, 6, 6), F16, layout="channels_last")
    for number in range(count):
        w1, w2 = (
            g.input(f"{name}{number}", (8, 8, 3, 3), F16, layout="channels_last") for name in "vw"
        )
        y = g.relu(g.add(g.conv(g.relu(g.conv(y, w1, padding=1)), w2, padding=1), y))
    g.output("y", y)
    return g.spec()


GRAPHS = [block(), chain(), residual(2)]
IDS = ["block", "chain", "residual"]


@pytest.mark.parametrize("spec", GRAPHS, ids=IDS)
def test_a_memo_changes_no_choice(spec: GraphSpec) -> None:
    assert stripped(search(spec, bench(), Memo())) == stripped(run(spec, bench()))


@pytest.mark.parametrize("spec", GRAPHS, ids=IDS)
def test_what_is_known_is_not_measured_again(spec: GraphSpec) -> None:
    memo = Memo()
    first = search(spec, bench(), memo)
    second = bench()
    assert stripped(search(spec, second, memo)) == stripped(first)
    assert (measured(second), second.chains) == (0, [])
    steps = {step_digest(step.spec) for step in first.steps if step.choice is not None}
    assert len(second.built) == len(steps), "what is taken alone"
    assert len(second.checked) == len(steps), "each is checked by this process"


@pytest.mark.parametrize("spec", GRAPHS, ids=IDS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_search_that_was_killed_goes_on_where_it_was(spec: GraphSpec, share: float) -> None:
    whole = bench()
    wanted = search(spec, whole, Memo())
    memo, killed, left = Memo(), bench(), int(share * len(whole.built))

    def count() -> None:
        if len(killed.built) >= left:
            raise KeyboardInterrupt

    killed.on_build = count
    with pytest.raises(KeyboardInterrupt):
        search(spec, killed, memo)
    resumed = bench()
    assert stripped(search(spec, resumed, memo)) == stripped(wanted)
    assert measured(killed) + measured(resumed) == measured(whole)


def test_another_graph_measures_only_what_differs() -> None:
    memo = Memo()
    search(residual(3), bench(), memo)
    alone, shared = bench(), bench()
    wanted = run(residual(4), alone)
    assert stripped(search(residual(4), shared, memo)) == stripped(wanted)
    assert measured(alone) > 0 and measured(shared) == 0, "it has more of the same regions"
    assert len(shared.chains) <= len(alone.chains)
    partly, whole = bench(), bench()
    run(block(), whole)
    search(block(), partly, memo)
    assert 0 < measured(partly) <= measured(whole)


def test_a_plan_that_was_measured_and_is_wrong_now_is_thrown_out() -> None:
    memo = Memo()
    fine = {"conv bias relu last": [Offer(20.0), Offer(10.0)]}
    assert taken(search(block(), table(fine), memo)) == [("conv bias relu last", 1)]
    wrong = {"conv bias relu last": [Offer(20.0), Offer(10.0, wrong="off by 3")]}
    assert taken(search(block(), table(wrong), memo)) == [("conv bias relu last", 0)]
    refused = {"conv bias relu last": [Offer(20.0), Offer(10.0, refused="is gone")]}
    assert taken(search(block(), table(refused), memo)) == [("conv bias relu last", 0)]


def test_a_first_plan_that_passed_its_check_is_not_built_again_to_be_doubted() -> None:
    offers = {
        "conv bias relu last": [Offer(90.0), Offer(5.0)],
        "conv last": [Offer(20.0)],
        "bias relu last": [Offer(9.0)],
    }
    memo, first, second = Memo(), table(offers), table(offers)
    split = [("conv last", 0), ("bias relu last", 0)]
    assert taken(search(block(), first, memo)) == split
    assert ("conv bias relu last", 0) in first.checked
    assert taken(search(block(), second, memo)) == split
    assert second.built == second.checked == split


def test_a_ranking_keeps_what_its_plans_are_predicted_to_take() -> None:
    memo, at = Memo(), table({"conv bias relu last": [Offer(20.0, slower=1.0), Offer(1.0)]})
    spec = block()
    listed = [Candidate(0, Choice(0, ()), "eng0", slower=1.5), Candidate(1, Choice(1, ()), "eng1")]
    keep_ranking(memo, spec, listed)
    assert RememberedBench(at, memo).proposals(spec).candidates == listed  # type: ignore[arg-type]
    (row,) = memo.of(spec)
    before = row | {"candidates": [each[:3] for each in row["candidates"]]}
    old = Memo()
    old.add(spec, before)
    found = RememberedBench(at, old).proposals(spec).candidates  # type: ignore[arg-type]
    assert found == [replace(each, slower=0.0) for each in listed]


def test_a_ranking_from_elsewhere_is_tried_in_its_order_each_plan_by_its_choice() -> None:
    """Its places in the list are not those of this process, and some of it there is none of."""
    elsewhere = [
        *[Candidate(7, Choice(2, (("TILE", 2),)), "eng2"), Candidate(0, Choice(9, ()), "eng9")],
        Candidate(2, Choice(0, (("TILE", 0),)), "eng0"),
    ]
    memo, at = Memo(), table({"conv bias relu last": [Offer(20.0), Offer(1.0), Offer(10.0)]})
    inner = at.proposals

    def proposals(spec: GraphSpec, known: Any = None) -> Any:
        """As the real ones, whose builds go by the place in the list."""
        found = inner(spec)
        build, listed = found.build, found.candidates

        def by_place(candidate: Candidate) -> Any:
            if candidate.index == UNRANKED:
                return Outcome(candidate, False, "cuDNN does not propose it here"), None
            return build(listed[candidate.index])

        found.build = by_place
        return found

    at.proposals = proposals  # type: ignore[method-assign]
    keep_ranking(memo, block(), elsewhere)
    assert is_ranked(memo, block()) and not is_ranked(memo, chain())
    selection = search(block(), at, memo)
    assert taken(selection) == [("conv bias relu last", 2)]
    mine = [engine for step, engine in at.built if step == "conv bias relu last"]
    assert mine[:2] == [2, 0] and 1 not in mine
    assert of(selection, 9).reason == "cuDNN does not propose it here"


def test_no_failure_is_kept() -> None:
    """There may be memory next time."""
    memo = Memo()
    offers = {"conv bias relu last": [Offer("out of memory"), Offer(30.0)]}
    search(block(), table(offers), memo)
    later = {"conv bias relu last": [Offer(10.0), Offer(30.0)]}
    assert taken(search(block(), table(later), memo)) == [("conv bias relu last", 0)]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"what": 7},
        {"what": "ranking", "candidates": 7},
        {"what": "ranking", "candidates": [[0, [3, [["A", "x"]]], "t"]]},
        {"what": "built", "choice": None, "workspace_bytes": 0},
        {"what": "built", "choice": [0, []], "workspace_bytes": -5},
        {"what": "times", "choices": [None], "rounds": 5, "times": [-1.0]},
        {"what": "times", "choices": [None], "rounds": 5, "times": ["fast"]},
        {"what": "times", "choices": [None, None], "rounds": 5, "times": [1.0]},
        {"what": "times", "choices": [None], "rounds": 5, "times": [float("nan")]},
        {"what": "chains", "chains": {}, "times": None},
    ],
)
def test_rows_that_are_none_count_for_nothing(row: dict[str, Any]) -> None:
    class Damaged(Memo):
        def of(self, spec: GraphSpec) -> list[Any]:
            return [row, *super().of(spec)]

    assert stripped(search(block(), bench(), Damaged())) == stripped(run(block(), bench()))


# -- on disk ---------------------------------------------------------------------------------------


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Search a graph as a new process in an environment; how much was measured."""
    monkeypatch.setenv("CUDNNGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("cudnngraph.settings._from_environ", None)

    def measure(here: env.EnvKey = H200, policy: cg.Policy = POLICY) -> int:
        monkeypatch.setattr(STATE, "measurements", {})
        monkeypatch.setattr(env, "env_key", lambda index: here)
        at = bench()
        run(block(), RememberedBench(at, Measured(policy, 0)), policy)  # type: ignore[arg-type]
        return measured(at)

    return measure


def test_another_process_takes_what_is_on_disk(measure: Callable[..., int]) -> None:
    assert measure() > 0
    assert measure() == 0


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_name": "NVIDIA H100"},
        {"sm_count": 114},
        {"cudnn_version": 92200},
        {"frontend_version": "1.32.0"},
    ],
    ids=str,
)
def test_another_environment_measures_anew(
    change: dict[str, Any], measure: Callable[..., int]
) -> None:
    first = measure()
    assert measure(replace(H200, **change)) == first
    assert measure() == 0


def test_another_policy_measures_anew(measure: Callable[..., int]) -> None:
    first = measure()
    assert measure(policy=replace(POLICY, deterministic=True)) == first


def test_another_generator_of_kernels_measures_anew(
    measure: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measure()
    monkeypatch.setattr("cudnngraph.kernels.kernel.generator", lambda: "another")
    assert measure() == first


def test_a_ranking_for_a_described_gpu_serves_searches_on_it_whatever_torch_is_there(
    measure: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are those of one torch, a ranking is cuDNN's."""
    candidates = [Candidate(0, Choice(0, (("TILE", 0),)), "eng0")]

    def ranked(here: env.EnvKey, torch_version: str) -> bool:
        monkeypatch.setattr(STATE, "measurements", {})
        monkeypatch.setattr(env, "env_key", lambda index: here)
        monkeypatch.setattr("torch.__version__", torch_version)
        return is_ranked(Measured(POLICY, 0), block())

    keep_ranking(Measured(POLICY, H200), block(), candidates)
    assert ranked(H200, "2.11.0+cu130") and ranked(H200, "2.12.0")
    assert not ranked(replace(H200, gpu_name="NVIDIA H100"), "2.11.0+cu130")
    assert not ranked(replace(H200, cudnn_version=92200), "2.11.0+cu130")
    assert not ranked(replace(H200, frontend_version="1.32.0"), "2.11.0+cu130")


ID = "a" * 32


def test_a_line_that_was_cut_spoils_no_other(tmp_path: Path) -> None:
    kept = Measurements(tmp_path / "cache")
    kept.add(ID, {"n": 1})
    (file,) = (tmp_path / "cache" / "parts").iterdir()
    file.write_bytes(file.read_bytes() + b'{"n": 2')
    kept.add(ID, {"n": 3})
    assert Measurements(tmp_path / "cache").of(ID) == [{"n": 1}, {"n": 3}]


def test_a_directory_that_cannot_be_used_keeps_measurements_in_memory(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    kept = Measurements(tmp_path / "cache")
    assert kept.add(ID, {"n": 1}) is False
    assert kept.of(ID) == [{"n": 1}]
    assert Measurements(None).of(ID) == []
    assert Measurements(tmp_path / "fine").add(ID, {"n": 1}) is True


def test_the_oldest_go_until_the_rest_is_small_enough(tmp_path: Path) -> None:
    import os

    kept = Measurements(tmp_path / "cache")
    for number in range(4):
        kept.add(f"{number}" * 32, {"n": number})
        os.utime(tmp_path / "cache" / "parts" / f"{str(number) * 32}.jsonl", (number, number))
    size = len('{"n": 0}\n')
    assert kept.prune(max_total_bytes=2 * size, dry_run=True) == (2, 2 * size)
    assert kept.prune(max_total_bytes=2 * size) == (2, 2 * size)
    assert [bool(kept.of(f"{number}" * 32)) for number in range(4)] == [False, False, True, True]
    assert kept.prune(unused_for_s=6.5, now=9.0) == (1, size)


# -- what was fastest ------------------------------------------------------------------------------


def named(choice: Choice | None) -> Any:
    return None if choice is None else [choice.engine, [list(knob) for knob in choice.knobs]]


def built(choice: Choice, workspace: int = 0, right: bool = True) -> dict[str, Any]:
    row = {"what": "built", "choice": named(choice), "right": right}
    return {**row, "workspace_bytes": workspace}


def times(taken: dict[Choice | None, float], rounds: int = QUICK_ROUNDS) -> dict[str, Any]:
    choices = [named(choice) for choice in taken]
    return {"what": "times", "choices": choices, "rounds": rounds, "times": [*taken.values()]}


A, B, GENERATED = Choice(1, (("CFG", 2),)), Choice(2, ()), Choice(KERNEL, ())
BUILT = [built(A), built(B), built(GENERATED)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], None),
        ([built(A)], None),
        ([times({A: 1.0})], None),  # whether it passed is not known
        ([built(A, right=False), built(B), times({A: 1.0}), times({B: 2.0})], B),
        ([*BUILT, times({A: 2.0}), times({B: 1.0})], B),
        ([*BUILT, times({A: 2.0, B: 3.0, None: 0.5, GENERATED: 0.1})], A),
        ([*BUILT, times({None: 0.5, GENERATED: 0.1})], None),
        ([*BUILT, times({A: 1.0}), times({B: 2.0}), times({A: 2.0, B: 1.5}, FINAL_ROUNDS)], B),
        ([*BUILT, times({A: 2.0, B: 1.5}, FINAL_ROUNDS), times({A: 1.0}), times({B: 2.0})], B),
        ([*BUILT, times({A: 1.0}), times({None: 2.0, GENERATED: 1.5}, FINAL_ROUNDS)], A),
        ([built(A, 64), built(B), times({A: 1.0, B: 1.01}, FINAL_ROUNDS)], B),
        ([built(A, 64), built(B), times({A: 1.0, B: 1.05}, FINAL_ROUNDS)], A),
        ([{"what": "times"}, {}, built(A), times({A: 1.0})], A),
    ],
)
def test_the_fastest_plan_that_passed_is_told(rows: Any, expected: Choice | None) -> None:
    assert fastest(json.loads(json.dumps(rows))) == expected


def test_the_fastest_by_what_a_search_has_left_is_what_it_took() -> None:
    memo = Memo()
    steps = [step for step in search(chain(), bench(), memo).steps if step.choice is not None]
    assert steps
    for step in steps:
        assert fastest(memo.of(step.spec)) == step.choice
