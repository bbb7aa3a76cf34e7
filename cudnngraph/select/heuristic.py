"""Plan selection: which steps run a graph, which plan each step uses, and why.

``heuristic`` measures nothing. It tries the whole graph as one plan. If cuDNN refuses it, or a rule
advises against it, it tries the finer cuts of :mod:`~cudnngraph.partition.cuts`. An op that cuDNN
cannot run becomes a torch step. (:mod:`~cudnngraph.select.search` measures.) Every step keeps its
decisions. Nothing here touches the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..backend.candidates import Outcome
from ..backend.plan import Plan
from ..errors import NotSupported
from ..ir.spec import GraphSpec
from ..partition.analysis import CutGraph, Group, compute_nodes
from ..partition.cuts import cuts, subgraph_of
from ..partition.regions import regions
from ..policy import Policy
from ..rewrite.passes import legalize
from .decision import ALIAS, Decision, Selection, StepPlan
from .rules import why_not_cudnn, why_split

Build = Callable[[GraphSpec], "tuple[Plan, tuple[Outcome, ...]]"]


def _nothing_ahead(parts: Iterable[GraphSpec]) -> None:
    """Every step is built when it is asked for."""


def by_torch(spec: GraphSpec) -> Selection | None:
    """The whole graph as one torch step if it is not for cuDNN at all, else None."""
    reason = why_not_cudnn(spec)
    if reason is None:
        return None
    step = StepPlan(spec, None, 0, (Decision(f"'{spec.name}' with cuDNN", False, reason),))
    return Selection((step,), (None,))


def heuristic(spec: GraphSpec, policy: Policy, build: Build) -> Selection:
    """Choose for a graph as it was declared: :func:`by_torch`, or :func:`choose`."""
    return by_torch(spec) or choose(legalize(spec, policy), policy, build)


def choose(
    spec: GraphSpec,
    policy: Policy,
    build: Build,
    expect: Callable[[Iterable[GraphSpec]], None] = _nothing_ahead,
) -> Selection:
    """Choose for a legalized graph without measuring.

    ``build(spec)`` gives the first plan that the policy allows; ``expect(specs)`` is told what will
    be asked of it soon, so that it can build several at a time. Raises :class:`NotSupported` when
    cuDNN refuses and ``policy.fallback`` is "error".
    """
    if policy.fallback == "error":
        plan, outcomes = build(spec)
        return Selection((_planned(spec, plan, outcomes, ()),), (plan,))
    steps: list[StepPlan] = []
    built: list[Plan | None] = []

    def attempt(part: GraphSpec) -> tuple[tuple[Plan, tuple[Outcome, ...]] | None, list[Decision]]:
        why = why_split(part)
        if why is None:
            try:
                return build(part), []
            except NotSupported as refusal:
                reasons = refusal.reasons
        else:
            reasons = (why,)
        return None, [Decision(f"'{part.name}' as one plan", False, reason) for reason in reasons]

    def resolve(graph: CutGraph, nodes: Group, earlier: tuple[Decision, ...]) -> None:
        part = subgraph_of(graph, nodes)
        if len(nodes) == 1 and graph.is_free(nodes[0]):
            steps.append(StepPlan(part, None, 0, (*earlier, ALIAS)))
            built.append(None)
            return
        found, refused = attempt(part)
        if found is not None:
            plan, outcomes = found
            steps.append(_planned(part, plan, outcomes, earlier))
            built.append(plan)
            return
        below = cuts(graph, nodes)
        if below:
            ahead(graph, below[0])
        if not below:
            steps.append(StepPlan(part, None, 0, (*earlier, *refused)))
            built.append(None)
        for index, group in enumerate(below[0] if below else ()):
            resolve(graph, group, (*earlier, *refused) if index == 0 else ())

    def ahead(graph: CutGraph, groups: Iterable[Group]) -> None:
        whole = (
            subgraph_of(graph, group)
            for group in groups
            if not (len(group) == 1 and graph.is_free(group[0]))
        )
        expect(part for part in whole if why_split(part) is None)

    graph = CutGraph(spec)
    parts = regions(graph)
    ahead(graph, parts)
    whole = [Decision(f"'{spec.name}' as one plan", False, "it is cut at each anchor")]
    for number, group in enumerate(parts):
        resolve(graph, group, tuple(whole) if number == 0 else ())
    if not parts:
        resolve(graph, compute_nodes(graph.spec.nodes), ())
    return Selection(tuple(steps), tuple(built))


def _planned(
    part: GraphSpec, plan: Plan, outcomes: tuple[Outcome, ...], earlier: tuple[Decision, ...]
) -> StepPlan:
    decided = tuple(
        Decision(
            str(outcome.candidate.choice),
            outcome.accepted,
            outcome.reason or "first of cuDNN's ranking that builds",
            outcome.candidate.choice,
            outcome.workspace_bytes,
        )
        for outcome in outcomes
    )
    return StepPlan(
        part,
        plan.choice,
        plan.workspace_bytes,
        (*earlier, *decided),
        verified=plan.verified,
    )


def reference_only(spec: GraphSpec, reason: str) -> Selection:
    """The whole graph as one step of the reference executor."""
    return Selection(
        (StepPlan(spec, None, 0, (Decision("the reference executor", True, reason),)),), (None,)
    )
