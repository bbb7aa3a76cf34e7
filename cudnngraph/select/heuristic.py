"""Plan selection: which steps run a graph, which plan each step uses, and why.

``heuristic`` measures nothing. It tries the whole graph as one plan. If cuDNN refuses it, or a rule
advises against it, it tries the finer cuts of :mod:`~cudnngraph.partition.cuts`. An op that cuDNN
cannot run becomes a torch step. (:mod:`~cudnngraph.select.search` measures.) Every step keeps its
decisions. Nothing here touches the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..backend.candidates import Outcome
from ..backend.plan import Choice, Plan
from ..errors import NotSupported
from ..ir.key import step_digest
from ..ir.spec import GraphSpec
from ..kernels.pieces import apart
from ..partition.analysis import CutGraph, Group, compute_nodes
from ..partition.cuts import cuts, subgraph_of
from ..partition.regions import regions
from ..policy import Policy
from ..rewrite.passes import legalize
from . import epilogues
from .decision import ALIAS, NO_KERNELS, Decision, Selection, StepPlan
from .epilogues import Apart
from .kernels import Item, Kernels, arranged
from .rules import why_not_cudnn, why_split
from .settled import NoPlan

Built = tuple[Plan, tuple[Outcome, ...]]
Build = Callable[[GraphSpec], Built]
Settled = Callable[[GraphSpec], "tuple[NoPlan, str] | None"]
Checked = Callable[[Sequence[tuple[GraphSpec, Choice]]], "list[Plan | str]"]

GENERATED = "a generated kernel"
BETWEEN = "a kernel is generated for what lies between plans"
BY_TORCH = "one call of torch's"


@dataclass(frozen=True)
class Builds:
    """What makes the plans of a cut.

    ``plan(spec)`` gives the first plan that the policy allows; ``expect(specs)`` is told what will
    be asked of it soon, so that it can build several at a time. ``checked`` builds generated
    kernels, None for none; ``expect_kernels`` is told which may be asked for. ``settled(spec)``
    tells whether a choice by measurement has no plan for a step, and what that is known from.
    """

    plan: Build
    expect: Callable[[Iterable[GraphSpec]], None] = lambda parts: None
    checked: Checked | None = None
    expect_kernels: Callable[[Iterable[tuple[GraphSpec, Choice]]], None] = lambda parts: None
    settled: Settled = lambda spec: None


class OncePerStep:
    """A build that is asked once for steps that are equal, and remembers refusals."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._known: dict[str, Built | NotSupported] = {}

    def __contains__(self, digest: str) -> bool:
        """Whether a step was asked for, by its digest."""
        return digest in self._known

    def __call__(self, spec: GraphSpec) -> Built:
        """What was built. Raises :class:`NotSupported`."""
        digest = step_digest(spec)
        if digest not in self._known:
            try:
                self._known[digest] = self._build(spec)
            except NotSupported as refusal:
                self._known[digest] = refusal
        found = self._known[digest]
        if isinstance(found, NotSupported):
            raise found
        return found


def by_torch(spec: GraphSpec) -> Selection | None:
    """The whole graph as one torch step if it is not for cuDNN at all, else None."""
    reason = why_not_cudnn(spec)
    if reason is None:
        return None
    step = StepPlan(spec, None, 0, (Decision(f"'{spec.name}' with cuDNN", False, reason),))
    return Selection((step,), (None,))


def heuristic(
    spec: GraphSpec,
    policy: Policy,
    build: Build,
    kernels: Kernels | None = None,
    checked: Checked | None = None,
    settled: Settled = lambda spec: None,
) -> Selection:
    """Choose for a graph as it was declared: :func:`by_torch`, or :func:`choose`."""
    builds = Builds(build, checked=checked, settled=settled)
    return by_torch(spec) or choose(legalize(spec, policy), policy, builds, kernels)


def choose(
    spec: GraphSpec, policy: Policy, builds: Builds, kernels: Kernels | None = None
) -> Selection:
    """Choose for a legalized graph without measuring.

    ``kernels`` says which regions are generated kernels, None for none. Raises
    :class:`NotSupported` when cuDNN refuses and ``policy.fallback`` is "error".
    """
    if policy.fallback == "error":
        plan, outcomes = builds.plan(spec)
        return Selection((_planned(spec, plan, outcomes, ()),), (plan,))
    return Cut(CutGraph(spec), policy, builds, kernels).selection()


class Cut:
    """A graph that is cut until every part is a plan, a kernel or a torch step.

    :meth:`begin` has its parts built by others, :meth:`selection` waits for them.
    """

    def __init__(
        self, graph: CutGraph, policy: Policy, builds: Builds, kernels: Kernels | None
    ) -> None:
        self._graph = graph
        self._torch_too = not policy.deterministic  # torch's products promise no equal bits
        self._builds = builds
        self._kernels = kernels if builds.checked is not None else None
        self._parts: tuple[Group, ...] | None = None
        self._open = True  # ops that a kernel may run are left open
        self._items: list[Item] = []
        self._found: dict[Group, tuple[StepPlan, Plan | None]] = {}
        self._earlier: dict[Group, tuple[Decision, ...]] = {}
        self._ways_apart: dict[Group, Apart | None] = {}

    def begin(self) -> None:
        """Say what will be asked for, as far as it is known before anything is built."""
        if self._parts is None:
            self._parts = regions(self._graph)
            self._ahead(self._parts)
            if self._kernels is not None:
                self._kernels_ahead(self._parts, self._kernels)

    def selection(self) -> Selection:
        """Cut it, and choose for each part."""
        self.begin()
        graph, parts = self._graph, self._parts
        assert parts is not None
        whole = (Decision(f"'{graph.spec.name}' as one plan", False, "it is cut at each anchor"),)
        for number, group in enumerate(parts):
            self._resolve(group, whole if number == 0 else ())
        if not parts:
            whole_graph = compute_nodes(graph.spec.nodes)
            groups = apart(whole_graph, graph.spec.tensors) if self._kernels else [whole_graph]
            for group in groups:
                self._resolve(group, ())
        if self._kernels is not None:
            self._generate(self._kernels)
        steps = [self._found[item.nodes] for item in self._items]
        return Selection(tuple(step for step, _ in steps), tuple(plan for _, plan in steps))

    def _generate(self, kernels: Kernels) -> None:
        """Have kernels for the parts that were left open, those joined that go together; what has
        none that passes is cut as if there were no kernels."""
        assert self._builds.checked is not None
        self._items = arranged(self._graph, self._items, kernels)
        asked = [item for item in self._items if item.open]
        parts = [self._generated(item, kernels) for item in asked]
        self._open = False
        checked = self._builds.checked(parts)
        for item, (part, choice), made in zip(asked, parts, checked, strict=True):
            earlier = self._earlier.get(item.nodes, ())
            if isinstance(made, str):
                refused = Decision(GENERATED, False, made, choice)
                at, rest = self._items.index(item), list(self._items)
                self._items = []
                self._resolve(item.nodes, (*earlier, refused))
                self._items = [*rest[:at], *self._items, *rest[at + 1 :]]
                continue
            taken = Decision(str(choice), True, BETWEEN, choice, made.workspace_bytes)
            step = StepPlan(
                part, choice, made.workspace_bytes, (*earlier, taken), verified=made.verified
            )
            self._found[item.nodes] = step, made

    def _generated(self, item: Item, kernels: Kernels) -> tuple[GraphSpec, Choice]:
        """The kernel for an open item."""
        choice = kernels.choice(self._graph, item.nodes)
        assert isinstance(choice, Choice)
        return subgraph_of(self._graph, item.nodes), choice

    def _resolve(self, nodes: Group, earlier: tuple[Decision, ...]) -> None:
        graph = self._graph
        part = subgraph_of(graph, nodes)
        if len(nodes) == 1 and graph.is_free(nodes[0]):
            self._add(Item(nodes, free=True), StepPlan(part, None, 0, (*earlier, ALIAS)), None)
            return
        if self._is_open(nodes):
            self._items.append(Item(nodes, open=True))
            self._earlier[nodes] = earlier
            return
        way = self._apart(nodes)
        if way is not None:
            refusal = Decision(f"'{part.name}' as one plan", False, way.reason)
            self._resolve_apart(way, (*earlier, refusal))
            return
        found, refused = self._attempt(part)
        if found is not None:
            plan, outcomes = found
            self._add(Item(nodes), _planned(part, plan, outcomes, earlier), plan)
            return
        below = cuts(graph, nodes)
        if not below:
            made = (*earlier, *refused, *self._why_no_kernel(nodes))
            self._add(Item(nodes), StepPlan(part, None, 0, made), None)
            return
        self._ahead(below[0])
        for index, group in enumerate(below[0]):
            self._resolve(group, (*earlier, *refused) if index == 0 else ())

    def _apart(self, nodes: Group) -> Apart | None:
        """How a product is to be parted from what stands behind it, None if it is not."""
        kernels = self._kernels if self._open else None
        if kernels is None or kernels.why_none is not None:
            return None
        if nodes not in self._ways_apart:
            self._ways_apart[nodes] = self._way_apart(nodes, kernels)
        return self._ways_apart[nodes]

    def _way_apart(self, nodes: Group, kernels: Kernels) -> Apart | None:
        part = subgraph_of(self._graph, nodes)
        if why_split(part) is not None:
            return None
        given = self._graph, nodes, kernels
        found = self._builds.settled(part)
        if found is None:
            return epilogues.apart(*given, torch_too=self._torch_too)
        return epilogues.as_settled(*given, *found, torch_too=self._torch_too)

    def _resolve_apart(self, way: Apart, earlier: tuple[Decision, ...]) -> None:
        """Choose for a product and what is apart from it; its step tells what was decided."""
        if way.before:
            self._resolve(way.before, ())
        if way.by_torch:
            part = subgraph_of(self._graph, way.front)
            decisions = (*earlier, Decision("torch", True, BY_TORCH))
            self._add(Item(way.front), StepPlan(part, None, 0, decisions), None)
        else:
            self._resolve(way.front, earlier)
        if way.rest:
            self._resolve(way.rest, ())

    def _add(self, item: Item, step: StepPlan, plan: Plan | None) -> None:
        self._items.append(item)
        self._found[item.nodes] = step, plan

    def _is_open(self, nodes: Group) -> bool:
        """Whether a kernel may run these ops."""
        kernels = self._kernels if self._open else None
        return kernels is not None and isinstance(kernels.choice(self._graph, nodes), Choice)

    def _why_no_kernel(self, nodes: Group) -> tuple[Decision, ...]:
        """The reason why a torch step is no kernel, where kernels are generated."""
        if self._kernels is None:
            return ()
        why = self._kernels.choice(self._graph, nodes)
        if not isinstance(why, str):
            return ()
        return (Decision(NO_KERNELS if self._kernels.why_none else GENERATED, False, why),)

    def _attempt(
        self, part: GraphSpec
    ) -> tuple[tuple[Plan, tuple[Outcome, ...]] | None, list[Decision]]:
        """The part as one plan of cuDNN, or the reasons why there is none."""
        why = why_split(part)
        if why is None:
            try:
                return self._builds.plan(part), []
            except NotSupported as refusal:
                reasons = refusal.reasons
        else:
            reasons = (why,)
        return None, [Decision(f"'{part.name}' as one plan", False, reason) for reason in reasons]

    def _ahead(self, groups: Iterable[Group]) -> None:
        """Say which parts will be asked for."""
        asked: list[GraphSpec] = []
        for group in groups:
            way = self._apart(group)
            while way is not None and not way.by_torch:
                group, way = way.front, self._apart(way.front)
            free = len(group) == 1 and self._graph.is_free(group[0])
            if way is not None or free or self._is_open(group):
                continue
            part = subgraph_of(self._graph, group)
            if why_split(part) is None:
                asked.append(part)
        self._builds.expect(asked)

    def _kernels_ahead(self, parts: Sequence[Group], kernels: Kernels) -> None:
        """Say which kernels will be asked for if cuDNN takes every part that is one plan."""
        items = [item for group in parts for item in self._foreseen(group)]
        found = (item for item in arranged(self._graph, items, kernels) if item.open)
        self._builds.expect_kernels([self._generated(item, kernels) for item in found])

    def _foreseen(self, nodes: Group) -> Iterator[Item]:
        """The steps of a part if cuDNN takes what is one plan."""
        free = len(nodes) == 1 and self._graph.is_free(nodes[0])
        way = None if free or self._is_open(nodes) else self._apart(nodes)
        if way is None:
            yield Item(nodes, open=not free and self._is_open(nodes), free=free)
            return
        if way.before:
            yield from self._foreseen(way.before)
        if way.by_torch:
            yield Item(way.front)
        else:
            yield from self._foreseen(way.front)
        if way.rest:
            yield from self._foreseen(way.rest)


def _planned(
    part: GraphSpec, plan: Plan, outcomes: tuple[Outcome, ...], earlier: tuple[Decision, ...]
) -> StepPlan:
    decided = tuple(
        Decision(
            str(outcome.candidate.choice),
            outcome.accepted,
            outcome.reason or outcome.candidate.why or "first of cuDNN's ranking that builds",
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
