"""Plans that a sweep found wrong: which are barred, and what selection makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import candidates, env, found_bad, libraries
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.plan import Choice
from cudnngraph.cache import lookup
from cudnngraph.ir.key import graph_key
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select import workers
from cudnngraph.select.workers import Answer
from cudnngraph.sweep import run
from cudnngraph.sweep.run import Results, Task
from plans_cache.findings import Findings
from tests.fakes import H200
from tests.sweeps import OFF, Judge, Stand, accepted, fault, rejected, some

# -- what is barred --------------------------------------------------------------------------------


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
