"""The choice by rules as a contender of that by measurement, for large graphs.

A search chooses a few steps at a time. What steps do to each other, in caches and side by side, the
whole graph shows: both choices are run whole, in turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..backend.candidates import Candidate, Outcome
from ..backend.plan import Plan
from ..errors import NotSupported
from ..ir.key import step_digest
from ..ir.spec import GraphSpec
from ..partition.analysis import CutGraph
from ..partition.regions import regions
from ..policy import Policy
from ..rewrite.passes import legalize
from .bench import Bench
from .config import IN_CONTEXT_GAIN, QUICK_ROUNDS
from .decision import ALIAS, WHOLE_GRAPH, Decision, Hints, Selection, StepPlan
from .heuristic import Builds, Built, OncePerStep, choose
from .kernels import Kernels
from .search import hinted_first

BY_RULES = "the choice by rules"


def no_slower(
    found: Selection,
    spec: GraphSpec,
    policy: Policy,
    bench: Bench,
    kernels: Kernels | None,
    hints: Hints | None,
) -> Selection:
    """The choice that was found for a graph as it was declared, or that by rules if the whole graph
    takes less time so. A graph that is not searched by regions is left as it is."""
    legal = legalize(spec, policy)
    if policy.fallback == "error" or not regions(CutGraph(legal)):
        return found
    firsts, checked = _Firsts(bench, hints or {}), None if kernels is None else bench.kernels
    builds = Builds(OncePerStep(firsts.build), firsts.expect, checked)
    try:
        ruled = choose(legal, policy, builds, kernels)
    except NotSupported:
        return found
    chosen = [[(step_digest(s.spec), s.choice) for s in each.steps] for each in (found, ruled)]
    if chosen[0] == chosen[1]:
        return found
    chains = [
        [(step.spec, plan) for step, plan in zip(each.steps, each.built, strict=True)]
        for each in (found, ruled)
    ]
    times = bench.chain_times_us(legal, chains, alike=True)
    if times is None:
        return found
    mine, theirs = times
    if theirs >= IN_CONTEXT_GAIN * mine:
        return found.told(Decision(BY_RULES, False, f"{theirs / mine:.3f} times the time, whole"))
    steps = [_timed(step, plan, bench) for step, plan in zip(ruled.steps, ruled.built, strict=True)]
    built = [
        None if step.choice is None else bench.replay(step.spec, step.choice) for step in steps
    ]
    reason = f"what was measured step by step takes {mine / theirs:.3f} times the time, whole"
    searched = [each for each in found.steps[0].decisions if each.subject == WHOLE_GRAPH]
    taken = Selection(tuple(steps), tuple(built))
    return taken.told(Decision(BY_RULES, True, reason), *searched)


class _Firsts:
    """Builds the first plan of a step that builds and passes its check."""

    def __init__(self, bench: Bench, hints: Hints) -> None:
        self._bench = bench
        self._hints = hints

    def expect(self, parts: Iterable[GraphSpec]) -> None:
        """Have first plans built, several at a time, of steps of which nothing is known."""
        specs = {step_digest(spec): spec for spec in parts}
        self._bench.expect(list(specs.values()))
        for spec in specs.values():
            with suppress(NotSupported):
                _, candidates = self._proposed(spec)
                if candidates and not self._bench.ready(spec, candidates[0].choice):
                    self._bench.ahead(spec, 1)

    def _proposed(self, spec: GraphSpec) -> tuple[Any, list[Candidate]]:
        """What may run a step, and in which order it is tried."""
        proposals = self._bench.proposals(spec)
        return proposals, hinted_first(proposals.candidates, self._hints.get(step_digest(spec), {}))

    def build(self, spec: GraphSpec) -> Built:
        """The plan, and what became of the candidates. Raises :class:`NotSupported`."""
        bench = self._bench
        proposals, candidates = self._proposed(spec)
        outcomes: list[Outcome] = []
        for candidate in candidates:
            outcome, plan = proposals.build(candidate)
            if plan is not None:
                right = bench.passed(spec, plan)
                why = None if right else bench.why_wrong(spec, plan)
                if why is None:
                    return plan, (*outcomes, outcome)
                outcome = replace(outcome, accepted=False, reason=why)
            outcomes.append(outcome)
        reasons = dict.fromkeys(outcome.reason for outcome in outcomes)
        raise NotSupported(f"graph '{spec.name}'", list(reasons))


def _timed(step: StepPlan, plan: Plan | None, bench: Bench) -> StepPlan:
    """A step with the time that it takes alone."""
    if ALIAS in step.decisions:
        return replace(step, time_us=0.0)
    (took,) = bench.times_us(step.spec, [plan], QUICK_ROUNDS)
    return step if isinstance(took, str) else replace(step, time_us=took)
