"""Outcomes of checks, with stand-ins for cuDNN and for the random data."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import cudnngraph as cg
from cudnngraph.backend import candidates
from cudnngraph.backend.candidates import Candidate, Outcome
from cudnngraph.backend.plan import Choice, Verified
from cudnngraph.cache import lookup
from cudnngraph.ir import wire
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.policy import Policy
from cudnngraph.select import guard, verification, worker
from plans_cache.gate import Gate
from tests.fakes import FakePlan

POLICY = cg.Policy(allow_tf32=False, verify="isolated")
CHOICE = Choice(7, ())


def spec() -> GraphSpec:
    g = cg.Graph("g")
    g.output("y", g.relu(g.input("x", (4,), torch.float16)))
    return g.spec()


class Data:
    """Random data; ``short`` times there is no memory for them."""

    short = 0
    made: ClassVar[list[Policy]] = []

    def __init__(self, spec: GraphSpec, policy: Policy, device: torch.device) -> None:
        if Data.short > 0:
            Data.short -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        Data.made.append(policy)
        self.error = 0.0

    def why_wrong(self, plan: Any) -> str | None:
        self.error = 1e-4
        return None


class Proposed:
    """Plans of cuDNN's, that build."""

    ranking: ClassVar[list[Choice]] = [CHOICE]

    def __init__(self, *args: Any, **options: Any) -> None:
        ranked = enumerate(self.ranking)
        self.candidates = [Candidate(n, choice, str(choice)) for n, choice in ranked]

    def build(self, candidate: Candidate, *, launch: bool) -> tuple[Outcome, Any]:
        assert not launch
        return Outcome(candidate, True, "", 0), FakePlan(candidate.choice)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    Data.short, Data.made = 0, []
    monkeypatch.setattr(verification, "StepTrial", Data)
    monkeypatch.setattr(verification, "Proposals", Proposed)
    monkeypatch.setattr(verification, "replay", lambda spec, choice, index: FakePlan(choice))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 80 << 30))


@pytest.mark.parametrize(("short", "error"), [(0, 1e-4), (1, 1e-4), (2, None)])
def test_without_memory_for_the_data_a_plan_is_taken_and_nothing_is_known(
    short: int, error: float | None
) -> None:
    """Tried twice, the second time without the other processes; no error goes to the user."""
    Data.short = short
    found = verification.Checks(spec(), POLICY, 0).first()
    assert found.plan is not None and found.error == error
    Data.short = short
    assert verification.check(spec(), POLICY, CHOICE, 0) == (None, error)


@pytest.mark.parametrize(
    ("text", "free_bytes"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 8 << 30),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", 30 << 20),
    ],
)
def test_what_a_library_says_where_memory_is_short_is_not_held_against_a_plan(
    text: str, free_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(data: Data, plan: Any) -> str | None:
        raise RuntimeError(text)

    monkeypatch.setattr(Data, "why_wrong", fails)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 80 << 30))
    assert verification.check(spec(), POLICY, CHOICE, 0) == (None, None)


@pytest.mark.parametrize("times", [1, 2])
def test_a_plan_that_could_not_be_built_for_want_of_memory_is_built_without_the_others(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "out of memory: err 2 != CUDA_SUCCESS :: shimCuModuleLoadData"
    tried: list[Choice] = []

    class Short(Proposed):
        def build(self, candidate: Candidate, *, launch: bool) -> tuple[Outcome, Any]:
            tried.append(candidate.choice)
            if len(tried) <= times:
                return Outcome(candidate, False, why), None
            return super().build(candidate, launch=launch)

    monkeypatch.setattr(Short, "ranking", [CHOICE, Choice(0, ())])
    monkeypatch.setattr(verification, "Proposals", Short)
    found = verification.Checks(spec(), POLICY, 0).first()
    assert found.plan is not None and found.plan.choice.engine == (7 if times == 1 else 0)
    assert [each.reason for each in found.outcomes] == ([""] if times == 1 else [why, ""])
    assert guard.wrong_of(found.outcomes) == {}


@pytest.mark.parametrize(("short", "error"), [(0, 1e-4), (2, None)])
def test_a_search_does_not_call_right_what_it_could_not_compare(
    short: int, error: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = classmethod(lambda cls, index, error: cls(error, "a GPU", 91900, "1.28.0", "2.13"))
    monkeypatch.setattr(Verified, "here", here)
    monkeypatch.setattr(guard.GpuBench, "__init__", lambda *args: None)
    bench = guard.GuardedBench(POLICY, None, None, None)  # type: ignore[arg-type]
    bench._device = torch.device("cuda", 0)
    monkeypatch.setattr(bench, "_trial", lambda spec: Data(spec, POLICY, bench._device))
    plan: Any = FakePlan(CHOICE)
    plan.verified = None
    Data.short = short
    assert bench.why_wrong(spec(), plan) is None
    assert plan.verified.error == error


def test_an_engine_that_was_wrong_twice_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong plans in the cache count; refusals of a build do not."""
    ranking = [Choice(engine, (("CFG", n),)) for n in range(4) for engine in (4, 5, 6)]
    monkeypatch.setattr(Proposed, "ranking", ranking)
    tried: list[Choice] = []

    class Engines(Proposed):
        def build(self, candidate: Candidate, *, launch: bool) -> tuple[Outcome, Any]:
            tried.append(candidate.choice)
            if candidate.choice.engine == 6:
                return Outcome(candidate, False, "too many registers"), None
            return super().build(candidate, launch=launch)

    monkeypatch.setattr(verification, "Proposals", Engines)
    monkeypatch.setattr(Data, "why_wrong", lambda data, plan: "wrong: 'y' is off by 1")
    known = {ranking[1]: "died of SIGSEGV"}
    found = verification.Checks(spec(), POLICY, 0, rejected=known).first()
    assert [choice.engine for choice in tried] == [4, 6, 4, 5, 6, 6, 6]
    reasons = {each.candidate.choice: each.reason for each in found.outcomes}
    assert reasons[ranking[1]] == "died of SIGSEGV"
    assert reasons[ranking[-3]] == reasons[ranking[-2]] == "2 others of its engine are not right"
    assert set(guard.wrong_of(found.outcomes)) == {ranking[0], ranking[3], ranking[4]}


def test_a_plan_whose_check_fails_by_itself_is_left_out_and_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(data: Data, plan: Any) -> str | None:
        raise ValueError("a mistake of ours\nand a page of details")

    monkeypatch.setattr(Data, "why_wrong", fails)
    found = verification.Checks(spec(), POLICY, 0).first()
    why = "its check fails: ValueError: a mistake of ours"
    assert found.plan is None and [each.reason for each in found.outcomes] == [why]
    assert verification.check(spec(), POLICY, CHOICE, 0) == (why, None)
    monkeypatch.setattr(lookup.Rejected, "id", lambda self, spec, policy: "0" * 32)
    kept = lookup.Rejected(0)
    kept.add(spec(), POLICY, guard.wrong_of(found.outcomes))
    kept.withdraw(spec(), POLICY, CHOICE, why)
    assert kept.of(spec(), POLICY) == {}
    assert [each.getMessage() for each in caplog.records] == [
        f"engine 7 of 'g' is left out: {why}"
    ] * 2


def test_a_check_that_ends_with_the_gpu_lost_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker says that it died then, and of what."""

    def fails(*given: Any) -> str | None:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(Data, "why_wrong", fails)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(RuntimeError, match="misaligned address"):
        verification.check(spec(), POLICY, CHOICE, 0)


def test_a_worker_checks_a_step_anew_under_another_policy() -> None:
    """Its bounds are others with TF32; a sweep asks for both."""
    said: list[Any] = []
    at_work = worker.Worker(0, said.append)
    tf32 = cg.Policy(allow_tf32=True, verify="isolated")
    for policy in (POLICY, tf32, POLICY, tf32):
        checks = at_work._checks_of(spec(), policy, {})
        checks.take({}, Gate(None))
        assert checks.of(CHOICE).error == 1e-4
    assert Data.made == [POLICY, tf32], "once each"
    ranked, tried = [-1, []], [7, []]
    assert [each["trying"] for each in said] == [ranked, tried, ranked, tried, tried, tried]


# -- what was measured fastest ---------------------------------------------------------------------

UNRANKED_CHOICE = Choice(9, (("CFG", 1),))


def engines(found: verification.Found) -> list[tuple[int, bool, str]]:
    return [(o.candidate.choice.engine, o.accepted, o.reason) for o in found.outcomes]


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    ranking = [Choice(engine, ()) for engine in (4, 5, 7)]
    monkeypatch.setattr(Proposed, "ranking", ranking)
    monkeypatch.setattr(verification.env, "capability", lambda index: 90)
    monkeypatch.setattr(candidates, "why_rejected", lambda *args, **options: None)
    return ranking


@pytest.mark.parametrize("ahead", [Choice(5, ()), UNRANKED_CHOICE])
def test_a_choice_is_tried_before_the_ranking_that_may_not_have_it(
    ahead: Choice, ranked: list[Choice]
) -> None:
    told: list[Choice] = []
    found = verification.Checks(spec(), POLICY, 0, tell=told.append).first(ahead)
    assert found.plan is not None and found.plan.choice == ahead
    assert (engines(found), found.error) == ([(ahead.engine, True, "")], 1e-4)
    assert told == [verification.RANKING, ahead], "no other is built"


@pytest.mark.parametrize("ahead", [Choice(5, ()), UNRANKED_CHOICE])
def test_a_choice_that_is_wrong_is_followed_by_the_ranking(
    ahead: Choice, ranked: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def why(data: Data, plan: Any) -> str | None:
        return "wrong: off by 1" if plan.choice == ahead else None

    monkeypatch.setattr(Data, "why_wrong", why)
    found = verification.Checks(spec(), POLICY, 0).first(ahead)
    assert engines(found) == [(ahead.engine, False, "wrong: off by 1"), (4, True, "")]
    assert set(guard.wrong_of(found.outcomes)) == {ahead}


def test_a_choice_that_was_tried_ahead_is_not_tried_again(
    ranked: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Data, "why_wrong", lambda data, plan: "wrong: off by 1")
    found = verification.Checks(spec(), POLICY, 0).first(ranked[1])
    assert [engine for engine, _, _ in engines(found)] == [5, 4, 7] and found.plan is None


def test_a_choice_that_does_not_build_is_followed_by_the_ranking(
    ranked: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(spec: GraphSpec, choice: Choice, index: int) -> Any:
        raise cg.NotSupported(str(choice), ["it has no such knobs"])

    monkeypatch.setattr(verification, "replay", refuse)
    found = verification.Checks(spec(), POLICY, 0).first(UNRANKED_CHOICE)
    assert engines(found) == [(9, False, "it has no such knobs"), (4, True, "")]


def test_a_choice_that_is_barred_or_known_to_be_wrong_is_followed_by_the_ranking(
    ranked: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Choice] = []
    barred = cg.Policy(allow_tf32=False, verify="isolated", exclude_engines=("eng9",))
    found = verification.Checks(spec(), barred, 0, tell=told.append).first(UNRANKED_CHOICE)
    why = "barred by the policy: exclude_engines has 'eng9'"
    assert engines(found) == [(9, False, why), (4, True, "")]

    def known(candidate: Candidate, *args: Any, **options: Any) -> str | None:
        return "it is known to be wrong" if candidate.choice == UNRANKED_CHOICE else None

    monkeypatch.setattr(verification, "why_passed_over", known)
    found = verification.Checks(spec(), POLICY, 0, tell=told.append).first(UNRANKED_CHOICE)
    assert engines(found) == [(9, False, "it is known to be wrong"), (4, True, "")]
    rejected = {UNRANKED_CHOICE: "died of SIGSEGV"}
    checks = verification.Checks(spec(), POLICY, 0, tell=told.append, rejected=rejected)
    assert engines(checks.first(UNRANKED_CHOICE)) == [(4, True, "")]
    assert UNRANKED_CHOICE not in told, "it is not even built"


def test_a_worker_is_told_what_to_begin_with(ranked: list[Choice]) -> None:
    made = worker.Worker(0, lambda message: None)
    task = {
        "task": "first",
        "spec": wire.from_spec(spec()),
        "policy": wire.from_policy(POLICY),
        "gate": None,
        "rejected": [],
        "choices": [],
    }
    for ahead, taken in ((None, ranked[0]), (UNRANKED_CHOICE, UNRANKED_CHOICE)):
        told = None if ahead is None else worker.from_choice(ahead)
        (outcome,) = made.answer({**task, "ahead": told})["outcomes"]
        assert worker.to_candidate(outcome).choice == taken


def test_a_choice_that_needs_too_much_workspace_is_followed_by_the_ranking(
    ranked: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(spec: GraphSpec, choice: Choice, index: int) -> Any:
        return FakePlan(choice, 4096)

    monkeypatch.setattr(verification, "replay", large)
    policy = cg.Policy(allow_tf32=False, verify="isolated", workspace_limit=1024)
    found = verification.Checks(spec(), policy, 0).first(UNRANKED_CHOICE)
    why = "needs 4096 bytes of workspace, over 1024"
    assert engines(found) == [(9, False, why), (4, True, "")]
    assert guard.wrong_of(found.outcomes) == {}, "it is right, and may serve another policy"
