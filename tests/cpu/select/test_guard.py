"""Plans that pass their check, by a stand-in for the workers: what is taken, what is left out, what
the next process does not try, and what a record says."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.plan import KERNEL, Choice, Verified
from cudnngraph.cache import codec, lookup
from cudnngraph.cache.state import STATE
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.select import guard, heuristic, processes, verification, workers
from cudnngraph.select.effort import BUILDING, Effort
from cudnngraph.select.processes import Server
from cudnngraph.select.workers import Answer, Workers
from tests.fakes import H200, FakePlan, World
from tests.lookups import again, compiled

STAND_IN = Path(__file__).parents[2] / "workers" / "stand_in_worker.py"
POLICY = cg.Policy(allow_tf32=False, tune="heuristic", verify="isolated")
CHECKED = Verified(1e-4, "a GPU", 91900, "1.28.0", "2.13")


def graph(channels: int = 8) -> cg.Graph:
    g = cg.Graph("g")
    x = g.input("x", (2, channels, 6, 6), torch.float16)
    w = g.input("w", (8, channels, 3, 3), torch.float16)
    g.output("y", g.relu(g.conv(x, w, padding=1)))
    return g


def spec(name: str = "g") -> GraphSpec:
    g = cg.Graph(name)
    g.output("y", g.relu(g.input("x", (4,), torch.float16)))
    return g.spec()


class Memory:
    """Choices that are not to be tried again, in memory."""

    def __init__(self) -> None:
        self.rejected: dict[Choice, str] = {}
        self.gate = None

    def of(self, spec: GraphSpec, policy: cg.Policy) -> Mapping[Choice, str]:
        return dict(self.rejected)

    def add(self, spec: GraphSpec, policy: cg.Policy, rejected: Mapping[Choice, str]) -> None:
        self.rejected.update(rejected)


class Behaves:
    """Workers that behave as told, and what they tried."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = folder / "log"
        self.log.touch()
        self.behaviours: dict[str, str] = {"7": "is right"}
        monkeypatch.setattr(processes, "LIMIT_S", 1.0)
        monkeypatch.setattr(workers, "IDLE_S", 1.0)
        monkeypatch.setattr(workers, "_pools", {})
        monkeypatch.setattr(guard, "_in_process", "")
        monkeypatch.setattr(guard, "load", self.load)
        monkeypatch.setattr(guard.handles, "handle", lambda index: None)
        monkeypatch.setattr(Verified, "here", classmethod(lambda cls, index, error: CHECKED))

    def load(self, blob: bytes, choice: Choice, index: int) -> FakePlan:
        assert blob == f"plan {choice.engine}".encode()
        return FakePlan(choice)

    def start(self, **behaviours: str) -> None:
        """From now on, in a new process: engine 4 as ``e4="aborts"``."""
        self.behaviours = {name.removeprefix("e"): does for name, does in behaviours.items()}
        told = json.dumps(self.behaviours)

        def command(file: int) -> Sequence[str]:
            return [sys.executable, str(STAND_IN), told, str(self.log), str(file)]

        workers._pools[0] = Workers(0, 2, Server(command))

    @property
    def tried(self) -> list[int]:
        return [int(line.split()[1]) for line in self.log.read_text().splitlines()]


@pytest.fixture
def behaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Behaves:
    return Behaves(tmp_path, monkeypatch)


def test_what_ends_a_process_or_is_wrong_is_left_out_and_not_tried_again(
    behaves: Behaves,
) -> None:
    kept = Memory()
    behaves.start(e4="aborts", e5="wrong: off by 0.5", e6="hangs", e7="is right")
    plan, outcomes = guard.Builder(POLICY, 0, kept)(spec())
    assert plan.choice.engine == 7 and plan.verified == CHECKED
    assert plan.blob == b"plan 7", "a search replays it from there"
    assert [(each.candidate.choice.engine, each.accepted) for each in outcomes][-1] == (7, True)
    assert kept.rejected == {
        Choice(4, ()): "the process that tried it died of SIGABRT",
        Choice(5, ()): "wrong: off by 0.5",
        Choice(6, ()): "the process that tried it hangs, or takes more than 1 s",
    }
    assert set(behaves.tried) == {4, 5, 6, 7}
    assert behaves.tried.count(4) == behaves.tried.count(6) == 1, "what ends a process, once"
    before = len(behaves.tried)
    behaves.start(e4="aborts", e5="wrong: off by 0.5", e6="hangs", e7="is right")
    again, _ = guard.Builder(POLICY, 0, kept)(spec())
    assert again.choice.engine == 7 and behaves.tried[before:] == [7]


WHY = "measured fastest for this step on such a GPU: a seed"


def test_what_was_measured_fastest_is_tried_first_and_says_so(behaves: Behaves) -> None:
    """Also where it is built ahead of its use; the step is asked about once."""
    behaves.start(e4="is right", e7="is right")
    asked: list[str] = []

    def fastest(part: GraphSpec) -> tuple[Choice, str]:
        asked.append(part.name)
        return Choice(7, ()), WHY

    build = guard.Builder(POLICY, 0, Memory(), fastest)
    build.expect([spec()])
    plan, outcomes = build(spec())
    assert (plan.choice, plan.verified) == (Choice(7, ()), CHECKED)
    assert [(each.accepted, each.reason) for each in outcomes] == [(True, WHY)]
    assert (behaves.tried, asked) == ([7], ["g"])
    assert build(spec("an_equal_one"))[1] == outcomes and len(asked) == 1


@pytest.mark.parametrize(
    ("does", "kept_why"),
    [
        ("wrong: off by 0.5", "wrong: off by 0.5"),
        ("aborts", "the process that tried it died of SIGABRT"),
        ("hangs", "the process that tried it hangs, or takes more than 1 s"),
        ("does not launch", None),
    ],
)
def test_where_the_fastest_does_not_pass_the_ranking_follows(
    does: str, kept_why: str | None, behaves: Behaves
) -> None:
    behaves.start(e4="is right", e7=does, e9="is right")
    kept = Memory()
    build = guard.Builder(POLICY, 0, kept, lambda part: (Choice(7, ()), WHY))
    plan, outcomes = build(spec())
    assert plan.choice == Choice(4, ()) and WHY not in {each.reason for each in outcomes}
    assert kept.rejected == ({} if kept_why is None else {Choice(7, ()): kept_why})
    assert set(behaves.tried) == {7, 4}


def test_the_first_of_the_ranking_is_the_fastest_too(behaves: Behaves) -> None:
    behaves.start(e4="is right", e7="is right")
    _, outcomes = guard.Builder(POLICY, 0, Memory(), lambda part: (Choice(4, ()), WHY))(spec())
    assert [(each.candidate.choice.engine, each.reason) for each in outcomes] == [(4, WHY)]


def test_where_nothing_passes_each_reason_is_said_once_and_the_graph_is_cut(
    behaves: Behaves,
) -> None:
    kept = Memory()
    behaves.start(e4="aborts", e5="wrong: off by 2")
    build = guard.Builder(POLICY, 0, kept)
    for _ in range(2):
        with pytest.raises(cg.NotSupported) as refused:
            build(spec())
        assert refused.value.reasons[0] == "2 candidates, none allowed, buildable and right"
        assert "wrong: off by 2" in refused.value.reasons
    assert behaves.tried.count(5) == 1, "of equal steps, one"


def test_what_is_expected_is_built_ahead_and_asked_for_once(behaves: Behaves) -> None:
    behaves.start(e7="is right")
    build = guard.Builder(POLICY, 0, Memory())
    parts = [spec(), spec("an_equal_one")]
    build.expect(parts)
    assert build(parts[0])[0].choice == build(parts[1])[0].choice == Choice(7, ())
    assert behaves.tried == [7]


def test_a_search_tells_what_it_will_ask_for() -> None:
    """All steps of a cut at once, none that is not to be one plan."""
    asked: list[list[str]] = []

    def build(part: GraphSpec) -> Any:
        if len(part.nodes) > 1:
            raise cg.NotSupported("this graph", ["too large"])
        choice = Choice(1, ())
        return FakePlan(choice), (Outcome(Candidate(0, choice, "eng1"), True),)

    builds = heuristic.Builds(build, lambda parts: asked.append([p.name for p in parts]))
    heuristic.choose(graph().spec(), POLICY, builds)
    assert [sorted(each) for each in asked if each] == [["conv", "relu"]]


def no_right(*args: Any, **options: Any) -> Any:
    raise PermissionError("no right to")


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (None, None, "busy or unavailable"),
        ((processes.subprocess, "Popen"), no_right, "no process can be started: no right to"),
        ((processes.socket, "socketpair"), no_right, "no worker can be talked to: no right to"),
        ((sys, "executable"), None, "sys.executable does not say where Python is"),
    ],
)
def test_without_workers_plans_are_checked_here_with_one_warning(
    place: tuple[Any, str] | None,
    value: Any,
    why: str,
    behaves: Behaves,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Here:
        """A stand-in for :class:`verification.Checks`: one wrong plan, then one that is taken."""

        def __init__(self, *args: Any, rejected: Mapping[Choice, str]) -> None:
            assert rejected == {}

        def first(self, ahead: Choice | None) -> verification.Found:
            assert ahead is None
            bad, choice = (Candidate(n, Choice(n, ()), f"eng{n}") for n in (3, 9))
            outcomes = (Outcome(bad, False, "wrong: off by 1", wrong=True), Outcome(choice, True))
            return verification.Found(FakePlan(Choice(9, ())), outcomes, 1e-5)  # type: ignore[arg-type]

    monkeypatch.setattr(verification, "Checks", Here)
    behaves.start(start="unusable")
    if place is not None:
        workers._pools[0] = Workers(0, 2, Server())
        monkeypatch.setattr(*place, value)
    kept = Memory()
    build = guard.Builder(POLICY, 0, kept)
    plan, _ = build(spec())
    assert plan.choice.engine == 9 and plan.verified == CHECKED
    assert kept.rejected == {Choice(3, ()): "wrong: off by 1"}
    assert guard.how(POLICY) == "inprocess"
    kept.rejected.clear()
    guard.Builder(POLICY, 0, kept)(spec())
    warned = [
        each.getMessage() for each in caplog.records if each.name == "cudnngraph.select.guard"
    ]
    assert len(warned) == 1 and why in warned[0]


@pytest.mark.parametrize("verify", ["inprocess", "off", "isolated"])
def test_the_policy_says_how(verify: Any, behaves: Behaves) -> None:
    assert guard.how(cg.Policy(verify=verify)) == verify


def test_a_choice_that_was_made_before_is_checked(behaves: Behaves) -> None:
    behaves.start(e4="wrong: off by 0.5", e7="is right", e8="is killed")
    kept = Memory()
    assert guard.check(spec(), POLICY, Choice(7, ()), 0, kept) == (None, CHECKED)
    for engine, why in ((4, "wrong: off by 0.5"), (8, "the process that tried it died of SIGKILL")):
        assert guard.check(spec(), POLICY, Choice(engine, ()), 0, kept) == (why, None)
        assert kept.rejected[Choice(engine, ())] == why
    tried = behaves.tried
    assert guard.check(spec(), POLICY, Choice(4, ()), 0, kept)[0] == "wrong: off by 0.5"
    assert behaves.tried == tried, "it is known"


# How a plan misbehaves, and the reason that is kept for it.
MISBEHAVES = {
    "wrong: 'y' is off by 0.1": "wrong: 'y' is off by 0.1",
    "wrong: writes outside of its output 'y'": "wrong: writes outside of its output 'y'",
    "hangs": f"{workers.LOST} hangs, or takes more than 1 s",
    "aborts": f"{workers.LOST} died of SIGABRT",
    "is killed": f"{workers.LOST} died of SIGKILL",
    "exits": f"{workers.LOST} ended with exit code 3",
    "faults": f"{workers.LOST} CUDA error: misaligned address",
}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of compute capability 9.0, on which no engine is passed over."""
    monkeypatch.setattr(guard, "why_passed_over", lambda *args, **options: None)
    monkeypatch.setattr(guard.env, "capability", lambda index: 90)


@pytest.mark.parametrize("does", MISBEHAVES)
@pytest.mark.usefixtures("hopper")
def test_a_search_goes_on_without_a_plan_that_misbehaves(
    does: str, behaves: Behaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "Proposals", None)  # cuDNN is not asked in this process
    kept = Memory()
    policy = cg.Policy(allow_tf32=False, tune="autotune", verify="isolated")

    def searched() -> list[tuple[int, bool, str]]:
        behaves.start(e4=does, e7="is right", e9="is right")
        search = guard._Isolated(spec(), policy, 0, kept)
        found = [search.build(each) for each in search.candidates]
        search.close()
        assert [plan is not None for _, plan in found] == [o.accepted for o, _ in found]
        return [(o.candidate.choice.engine, o.accepted, o.reason) for o, _ in found]

    reason = MISBEHAVES[does]
    assert searched() == [(4, False, reason), (7, True, ""), (9, True, "")]
    assert kept.rejected == {Choice(4, ()): reason}
    assert behaves.tried.count(4) == 1
    assert searched() == [(4, False, reason), (7, True, ""), (9, True, "")]
    assert behaves.tried.count(4) == 1, "not tried again"


def bench(policy: cg.Policy, kept: Memory) -> guard.GuardedBench:
    """A bench without a stream of a GPU."""
    made: Any = guard.GuardedBench.__new__(guard.GuardedBench)
    made._policy, made._device = policy, torch.device("cuda", 0)
    made._kept, made._isolated, made._ranked, made._passed = kept, {}, {}, {}
    made.effort = Effort()
    return made  # type: ignore[no-any-return]


@pytest.mark.usefixtures("hopper")
def test_rankings_are_asked_for_at_a_time_and_once(
    behaves: Behaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaves.start(e4="is right", e7="is right")
    asked: list[str] = []
    ranking = guard.ranking

    def counted(part: GraphSpec, *rest: Any) -> Any:
        asked.append(part.name)
        return ranking(part, *rest)

    monkeypatch.setattr(guard, "ranking", counted)
    search, one = bench(POLICY, Memory()), spec()
    other = graph().spec()
    search.expect([one, other, spec("another_name")])
    assert asked == ["g", "g"]
    for each in (one, other, one):
        engines = [found.choice.engine for found in search.proposals(each).candidates]
        assert engines == [4, 7]
    assert len(asked) == 3, "the third time none was asked for ahead"
    search.expect([one])
    search.close()
    assert len(asked) == 3


@pytest.mark.usefixtures("hopper")
def test_what_is_ranked_already_is_built_without_asking_again(
    behaves: Behaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "ranking", None)
    behaves.start(e4="is right", e7="is right", e9="is right")
    known = [Candidate(5, Choice(9, ()), "eng9"), Candidate(6, Choice(4, ()), "eng4")]
    search = bench(POLICY, Memory()).proposals(spec(), known)
    assert search.candidates == known
    outcome, plan = search.build(known[0])
    assert outcome.accepted and plan is not None and plan.choice == Choice(9, ())
    kept = Memory()
    kept.rejected[verification.RANKING] = "it died"
    with pytest.raises(cg.NotSupported, match="cuDNN's ranking of its engines"):
        bench(POLICY, kept).proposals(spec(), known)


@pytest.mark.usefixtures("hopper")
def test_few_plans_are_built_before_a_search_goes_on_with_a_step(behaves: Behaves) -> None:
    """A step whose first plan cannot win takes no worker's time for more."""
    behaves.start(**{f"e{engine}": "is right" for engine in range(1, 10)})
    search = guard._Isolated(spec(), POLICY, 0, Memory())
    first = dict(search._ahead)
    assert len(first) == guard.FIRST
    for future in first.values():
        future.result(10.0)
    outcome, plan = search.build(search.candidates[0])
    assert outcome.accepted and plan is not None
    assert len(search._ahead) == guard.FIRST - 1, "the first plan alone asks for no more"
    search.ahead(6)
    assert len(search._ahead) == 6
    for future in search._ahead.values():
        future.result(10.0)
    assert sorted(behaves.tried) == list(range(1, 7 + guard.FIRST))
    search.ahead(6)
    assert len(search._ahead) == 6, "so many are there"


@pytest.mark.usefixtures("hopper")
def test_what_is_built_ahead_is_there_without_a_wait(behaves: Behaves) -> None:
    """A wait lets go of the GPU, without which no worker could check a plan."""
    behaves.start(**{f"e{engine}": "is right" for engine in range(1, 10)})
    effort, waits = Effort(), []
    effort.let_go = lambda: waits.append(1)
    kept = Memory()
    kept.rejected[Choice(5, ())] = "it died"
    search = guard._Isolated(spec(), POLICY, 0, kept, effort=effort)
    ranked = len(waits)
    choices = [each.choice for each in search.candidates]
    search._ahead[choices[0]].result(10.0)
    assert search.ready(choices[0]) and not search.ready(choices[1])
    assert search.ready(Choice(5, ())), "it is refused at once"
    assert search.build(search.candidates[0])[1] is not None and len(waits) == ranked
    assert search.build(search.candidates[1])[1] is not None and len(waits) == ranked + 1
    assert effort.seconds[BUILDING] > 0.0


@pytest.mark.usefixtures("hopper")
def test_a_plan_that_is_waited_for_is_built_before_those_built_ahead(behaves: Behaves) -> None:
    behaves.start(**{f"e{engine}": "is right" for engine in range(1, 10)})
    search = guard._Isolated(spec(), POLICY, 0, Memory())
    last = search.candidates[8]
    asked: list[tuple[int, bool]] = []
    submit = search._ask

    def ask(choices: Sequence[Choice], *, urgent: bool) -> None:
        asked.extend((choice.engine, urgent) for choice in choices)
        if not urgent:  # no worker comes to it
            search._ahead.update({choice: Future() for choice in choices})
        else:
            submit(choices, urgent=urgent)

    search._ask = ask  # type: ignore[method-assign]
    search.ahead(9)
    assert (last.choice.engine, False) in asked and not search.ready(last.choice)
    outcome, plan = search.build(last)
    assert outcome.accepted and plan is not None
    assert asked[-1] == (last.choice.engine, True)


@pytest.mark.usefixtures("hopper")
def test_what_was_to_be_built_ahead_can_be_asked_for_later(behaves: Behaves) -> None:
    behaves.start(**{f"e{engine}": "is right" for engine in range(1, 10)})
    search = guard._Isolated(spec(), POLICY, 0, Memory())
    search.ahead(8)
    search.close()
    search.ahead(8)
    for candidate in search.candidates:
        outcome, plan = search.build(candidate)
        assert outcome.accepted and plan is not None


@pytest.mark.parametrize("does", ["aborts", "hangs", "is killed"])
@pytest.mark.parametrize("tune", ["heuristic", "autotune"])
def test_a_ranking_that_ends_a_process_refuses_the_step_and_no_process_asks_again(
    tune: str, does: str, behaves: Behaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is refused is cut. This process never asks, by no workers either."""

    def asked(*args: Any, **options: Any) -> Any:
        raise AssertionError("cuDNN is asked in this process")

    monkeypatch.setattr(guard, "Proposals", asked)
    monkeypatch.setattr(verification, "Proposals", asked)
    kept = Memory()
    why = f"cuDNN's ranking of its engines: {MISBEHAVES[does]}"

    def refused(policy: cg.Policy) -> list[str]:
        with pytest.raises(cg.NotSupported) as refusal:
            if tune == "heuristic":
                guard.Builder(policy, 0, kept)(spec())
            else:
                bench(policy, kept).proposals(spec())
        return list(refusal.value.reasons)

    isolated = cg.Policy(allow_tf32=False, tune=tune, verify="isolated")
    for _ in range(2):
        behaves.start(ranking=does, e7="is right")
        assert refused(isolated) == [why]
        assert kept.rejected == {verification.RANKING: MISBEHAVES[does]}
        assert behaves.tried == [-1], "once"
    assert refused(cg.Policy(allow_tf32=False, tune=tune, verify="inprocess")) == [why]


# -- records ---------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path / "cache")
    made.install(monkeypatch)
    monkeypatch.setattr(STATE, "rejections", {})
    return made


def says(wrong: str | None, asked: list[Choice]) -> Any:
    """Workers that give one answer about every choice."""

    class Answers:
        def check(
            self, spec: GraphSpec, policy: cg.Policy, choice: Choice, *, gate: Path | None
        ) -> Future[Answer]:
            asked.append(choice)
            future: Future[Answer] = Future()
            future.set_result(Answer(wrong=wrong, error=1e-4))
            return future

    return lambda index: Answers()


def test_a_record_that_nobody_has_checked_is_checked_when_it_is_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Choice] = []
    monkeypatch.setattr(workers, "on", says(None, asked))
    monkeypatch.setattr(Verified, "here", classmethod(lambda cls, index, error: CHECKED))
    first = compiled(verify="off")
    assert [step.verified for step in first.steps] == [None]
    assert "not checked: verify='off'" in first.explain()
    assert [step.verified for step in again(verify="off").steps] == [None] and not asked
    checked = again(verify="isolated")
    assert [step.verified for step in checked.steps] == [CHECKED] and len(asked) == 1
    assert "checked on a GPU, cuDNN 91900: off by 1.0e-04" in checked.explain()
    assert [step.verified for step in again(verify="isolated").steps] == [CHECKED]
    assert len(asked) == 1, "once"
    assert len(world.built) == 1


def test_a_record_whose_plan_does_not_pass_serves_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Choice] = []
    compiled(verify="off")
    monkeypatch.setattr(workers, "on", says("wrong: off by 0.5", asked))
    with pytest.raises(cg.PlanNotCached, match="wrong: off by"):
        again(verify="isolated", tune="cached")
    cg.cache_clear()
    with pytest.raises(cg.PlanNotCached, match="wrong: off by"):
        again(verify="isolated", tune="cached")
    assert len(asked) == 1, "it is known"


def test_a_record_of_another_frontend_serves_once_its_plans_are_checked_with_this_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Choice] = []

    def here(cls: type, index: int, error: float) -> Verified:
        return Verified(error, "a GPU", 91900, world.environment.frontend_version, "2.13")

    def use(frontend: str) -> Verified:
        world.environment = replace(H200, frontend_version=frontend)
        exe = again(verify="isolated")
        assert exe.steps[0].choice == first.steps[0].choice
        (found,) = [step.verified for step in exe.steps]
        assert found is not None
        return found

    monkeypatch.setattr(workers, "on", says(None, asked))
    monkeypatch.setattr(Verified, "here", classmethod(here))
    first = compiled(verify="off")
    assert use("1.28.0").also == ()
    assert use("1.32.0").also == ("1.28.0",)
    assert len(asked) == 2
    assert use("1.28.0") == use("1.32.0"), "both are known"
    assert use("1.30.0").also == ("1.32.0", "1.28.0")
    assert (len(asked), len(world.built), len(world.files("json"))) == (3, 1, 1)


def test_a_record_whose_plan_is_wrong_with_this_frontend_is_made_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Choice] = []
    monkeypatch.setattr(workers, "on", says(None, asked))
    monkeypatch.setattr(Verified, "here", classmethod(lambda cls, index, error: CHECKED))
    compiled(verify="off")
    again(verify="isolated")
    world.environment = replace(H200, frontend_version="1.32.0")
    monkeypatch.setattr(workers, "on", says("wrong: off by 0.5", asked))
    with pytest.raises(cg.PlanNotCached, match="wrong: off by"):
        again(verify="isolated", tune="cached")
    assert len(asked) == 2


def test_a_generated_kernel_is_checked_once_for_all_frontends() -> None:
    assert CHECKED.holds_for(Choice(KERNEL, ()), "1.32.0")
    assert not CHECKED.holds_for(Choice(7, ()), "1.32.0")


@pytest.mark.parametrize("does", MISBEHAVES)
def test_a_record_whose_plan_misbehaves_is_made_anew(
    does: str, world: World, behaves: Behaves
) -> None:
    first = compiled(verify="off").steps[0].choice
    assert first is not None
    behaves.start(**{str(first.engine): does, "61": "is right"})
    with pytest.raises(cg.PlanNotCached) as refused:
        again(verify="isolated", tune="cached")
    assert MISBEHAVES[does] in str(refused.value)
    assert behaves.tried == [first.engine]
    STATE.rejections.clear()  # as a new process
    behaves.start(**{str(first.engine): does, "61": "is right"})
    second = again(verify="isolated")
    assert [step.choice.engine for step in second.steps if step.choice] == [61]
    assert [step.verified for step in second.steps] == [CHECKED]
    assert behaves.tried == [first.engine, 61], "not tried again"
    assert again(verify="isolated", tune="cached").steps == second.steps
    assert behaves.tried == [first.engine, 61], "nor what has passed"


def test_torch_steps_alone_ask_nothing_of_cudnn(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not be installed for them."""

    def missing(index: int) -> Any:
        raise cg.BackendUnavailable("cuDNN is not installed")

    monkeypatch.setattr(lookup.env, "env_key", missing)
    g = cg.Graph("g")
    g.output("y", g.relu(g.input("x", (2, 3), torch.float64)))
    assert [step.choice for step in g.compile("cuda:0").steps] == [None]


WHOLE = {"error": 1.0, "gpu": "a GPU", "cudnn": 1, "frontend": "1", "torch": "2"}
SAID = [None, 7, {}, {"error": "x"}, {"error": 1.0, "gpu": 3}]


@pytest.mark.parametrize("said", [*SAID, {**WHOLE, "also": 7}, {**WHOLE, "also": ["1", 2]}])
def test_a_check_that_a_record_cannot_say_counts_as_none(said: Any) -> None:
    assert codec._verified(said) is None


class Asked:
    """Workers that answer when they are told to, and what they were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checks: list[tuple[str, Choice, bool]] = []
        self.futures: list[Future[Answer]] = []
        monkeypatch.setattr(workers, "on", lambda index: self)
        monkeypatch.setattr(guard, "replay", lambda spec, choice, index: FakePlan(choice))
        monkeypatch.setattr(Verified, "here", classmethod(lambda cls, index, error: CHECKED))

    def check(
        self, spec: GraphSpec, policy: cg.Policy, choice: Choice, *, gate: Any, urgent: bool
    ) -> Future[Answer]:
        self.checks.append((spec.name, choice, urgent))
        self.futures.append(Future())
        return self.futures[-1]


def test_kernels_that_are_expected_are_built_behind_all_else_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, kept = Asked(monkeypatch), Memory()
    kernel, other, bad = (
        Choice(KERNEL, ()),
        Choice(KERNEL, (("A", 1),)),
        Choice(KERNEL, (("A", 2),)),
    )
    kept.rejected[bad] = "wrong: off by 2"
    build = guard.Builder(POLICY, 0, kept)
    parts = [(spec(), kernel), (spec("an_equal_one"), kernel), (spec(), bad), (spec(), other)]
    build.expect_kernels(parts)
    assert [(choice, urgent) for _, choice, urgent in asked.checks] == [
        (kernel, False),
        (other, False),
    ]
    asked.futures[0].set_result(Answer())
    made = build.kernels(parts[:3])
    assert [getattr(each, "choice", each) for each in made] == [kernel, kernel, "wrong: off by 2"]
    assert len(asked.checks) == 2, "nothing is asked for twice"
    build.cancel()
    assert asked.futures[1].cancelled() and not asked.futures[0].cancelled()


@pytest.mark.parametrize("verify", ["inprocess", "off"])
def test_without_workers_nothing_is_built_ahead(
    verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    build = guard.Builder(cg.Policy(verify=verify, allow_tf32=False), 0, Memory())
    build.expect([spec()])
    build.expect_kernels([(spec(), Choice(KERNEL, ()))])
    assert not asked.checks
