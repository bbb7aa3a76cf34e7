"""Planning without a GPU: which plans cuDNN would take for a graph on a described one.

The graph is lowered for the GPU that ``target`` describes and shown to the real cuDNN library,
which needs no GPU to answer. The cuts are those that ``compile`` would make on such a GPU, and so
is the order of the plans; nothing is measured. What was measured of a step before, by a search or
for the seeds that ship, is followed as ``compile`` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from ..arguments import checked
from ..backend import deviceless, env, libraries
from ..backend.candidates import Outcome
from ..backend.deviceless import (
    Listed,
    examine,
    gpu_name,
    propose_for,
    target_capability,
    target_of,
    target_processors,
)
from ..backend.plan import Choice, Plan
from ..backend.tested import dotted
from ..cache import lookup
from ..cache.fastest import Fastest
from ..device.rules import planning_for
from ..errors import NotSupported
from ..graph.builder import Graph
from ..ir.spec import GraphSpec, print_spec
from ..kernels import patterns
from ..kernels.source import own_part
from ..ops.table import is_default
from ..policy import Policy
from ..runtime.compile import resolve_policy
from ..select import heuristic
from ..select.decision import Decision, StepPlan
from ..select.kernels import Kernels

__all__ = ["Explanation", "ListedPlan", "PlannedStep", "explain"]

WITHOUT_DRIVER = (
    "no CUDA driver library (libcuda.so.1) can be loaded here, so runtime-compiled engines "
    "are missing from the lists; any will do, it needs no GPU"
)
_NO_DRIVER = "runtime prerequisite missing"
_SHOWN = 5


@dataclass(frozen=True)
class ListedPlan:
    """One plan that cuDNN proposes for a step, at its ``rank`` (from 1) in cuDNN's own order.

    ``runtime_compiled`` plans are compiled on the GPU's machine (about 0.5 s each), the others come
    with the library. ``workspace_bytes`` is None where the library does not tell. ``allowed`` is
    False where the policy bars the plan or it does not build; ``reason`` says so.
    """

    rank: int
    engine: int
    knobs: tuple[tuple[str, int], ...]
    workspace_bytes: int | None
    runtime_compiled: bool
    allowed: bool
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, numbers and strings, for JSON."""
        return {**asdict(self), "knobs": dict(self.knobs)}

    @property
    def choice(self) -> Choice:
        """The name of the plan: engine and knobs."""
        return Choice(self.engine, self.knobs)


@dataclass(frozen=True)
class PlannedStep:
    """One step of the graph.

    ``runs_on`` is "cuDNN" (by the first plan that is allowed, or that which was ``measured``
    fastest: what that is known from), "kernel" (a generated one, whose CUDA C++ is ``source``),
    "torch" (there is neither), or "unknown": cuDNN could not be asked, since its runtime-compiled
    engines want a CUDA driver library to be there. ``refusals`` say why larger cuts, or this one,
    were refused.
    """

    spec: GraphSpec
    runs_on: str
    plans: tuple[ListedPlan, ...]
    refusals: tuple[Decision, ...]
    source: str = ""
    fastest: Choice | None = None
    measured: str = ""

    @property
    def ops(self) -> tuple[str, ...]:
        """The names of the step's ops, in order."""
        return tuple(node.op for node in self.spec.nodes if node.op != "constant")

    @property
    def first(self) -> ListedPlan | None:
        """The plan that ``compile`` would take, None for a step without one."""
        allowed = [plan for plan in self.plans if plan.allowed]
        return min(allowed, key=lambda plan: plan.choice != self.fastest, default=None)


@dataclass(frozen=True)
class OnTarget:
    """A graph, and the described GPU and versions that something is said of it for. Without a
    ``driver`` runtime-compiled engines are not listed."""

    spec: GraphSpec
    target: str
    gpu_name: str
    policy: Policy
    cudnn_version: int
    frontend_version: str
    driver: bool

    def _place(self) -> dict[str, Any]:
        return {
            "graph": self.spec.name,
            "target": self.target,
            "gpu_name": self.gpu_name,
            "cudnn_version": self.cudnn_version,
            "frontend_version": self.frontend_version,
            "driver": self.driver,
        }


@dataclass(frozen=True)
class Explanation(OnTarget):
    """The steps of a graph on a described GPU, the plans of each; ``str()`` of it is readable."""

    steps: tuple[PlannedStep, ...]

    @property
    def whole(self) -> bool:
        """Whether cuDNN takes the graph as one plan."""
        return len(self.steps) == 1 and self.steps[0].runs_on == "cuDNN"

    def to_dict(self) -> dict[str, Any]:
        """Everything as lists, dicts, numbers and strings, for JSON."""
        return {
            **self._place(),
            "policy": {
                **asdict(self.policy),
                "exclude_engines": list(self.policy.exclude_engines),
            },
            "whole": self.whole,
            "steps": [
                {
                    "ops": list(step.ops),
                    "inputs": {name: str(step.spec.tensors[name]) for name in step.spec.inputs},
                    "outputs": {name: str(step.spec.tensors[name]) for name in step.spec.outputs},
                    "runs_on": step.runs_on,
                    "refusals": [
                        {"subject": refusal.subject, "reason": refusal.reason}
                        for refusal in step.refusals
                    ],
                    "source": step.source,
                    "takes": None if step.first is None else step.first.rank,
                    "measured": step.measured,
                    "plans": [plan.to_dict() for plan in step.plans],
                }
                for step in self.steps
            ],
        }

    def heading(self) -> str:
        """One line that names the graph, the GPU and the library."""
        return (
            f"graph '{self.spec.name}' planned for {self.gpu_name} ({self.target}) by "
            f"cuDNN {dotted(self.cudnn_version)}, frontend {self.frontend_version}"
        )

    def note(self) -> str:
        """Return what limits this answer, or ""."""
        return "" if self.driver else WITHOUT_DRIVER

    def __str__(self) -> str:
        lines = [self.heading(), *([f"note: {self.note()}"] if self.note() else []), ""]
        lines += [print_spec(self.spec, is_default), ""]
        for number, step in enumerate(self.steps, 1):
            lines.append(f"step {number} of {len(self.steps)}: {describe(step)}")
            lines += [f"  {line}" for line in refused(step)]
            lines += [f"  {line}" for line in plan_lines(step.plans, step.first)]
            lines += [f"  {line}" for line in own_part(step.source).splitlines()]
        return "\n".join(lines)


def describe(step: PlannedStep) -> str:
    """One line: the ops, where they run, and by which plan."""
    ops = " → ".join(step.ops)
    if step.runs_on == "unknown":
        known = f"; {step.fastest} was {step.measured}" if step.fastest else ""
        return f"{ops}: not known, it takes a runtime-compiled engine{known}"
    if step.runs_on == "kernel":
        return f"{ops}: a generated kernel"
    if step.first is None:
        return f"{ops}: torch"
    barred = sum(not plan.allowed for plan in step.plans)
    counts = f"{len(step.plans)} plans" + (f", {barred} of them barred" if barred else "")
    why = f", {step.measured}" if step.measured else ""
    return f"{ops}: cuDNN, {counts}; takes number {step.first.rank}{why}"


def refused(step: PlannedStep) -> list[str]:
    """Why cuDNN refused, a line for each reason; engines of other GPUs only if nothing else is."""
    subjects: dict[str, list[str]] = {}
    for refusal in step.refusals:
        subjects.setdefault(refusal.subject, []).append(refusal.reason)
    lines = []
    for subject, reasons in subjects.items():
        lines += [f"{subject} is refused: {reason}" for reason in telling(reasons)]
    return lines


def telling(reasons: Sequence[str]) -> Sequence[str]:
    """The reasons but for those of engines of other GPUs, unless there are no others."""
    own = [reason for reason in reasons if not reason.startswith("arch mismatch")]
    return own or reasons


def workspace(plan: ListedPlan) -> str:
    """The plan's workspace in words."""
    return "unknown" if plan.workspace_bytes is None else f"{plan.workspace_bytes} bytes"


def plan_lines(plans: Sequence[ListedPlan], taken: ListedPlan | None = None) -> list[str]:
    """The plan that is taken and the first few that may be used, and how many others there are."""
    allowed = sorted((plan for plan in plans if plan.allowed), key=lambda plan: plan != taken)
    lines = [
        f"{plan.rank}: {plan.choice}, workspace {workspace(plan)}"
        + (", compiled at run time" if plan.runtime_compiled else "")
        for plan in allowed[:_SHOWN]
    ]
    if len(allowed) > _SHOWN:
        lines.append(f"... and {len(allowed) - _SHOWN} more")
    barred = Counter(plan.reason for plan in plans if not plan.allowed)
    return lines + [f"{count} {reason}" for reason, count in barred.items()]


@dataclass(frozen=True)
class _Proposal:
    """Stands where :func:`select.heuristic` expects a built plan."""

    choice: Choice | None
    workspace_bytes: int
    verified: None = None  # nothing runs here


class _Walk:
    """Proposes plans for the parts that the walk of :mod:`~cudnngraph.select.heuristic` asks
    for."""

    def __init__(
        self,
        target: str,
        policy: Policy,
        driver: bool,
        fastest: Callable[[GraphSpec], tuple[Choice, str] | None] = lambda spec: None,
    ) -> None:
        self._target = target
        self._policy = policy
        self._driver = driver
        self._fastest = fastest
        self._plans: list[tuple[GraphSpec, tuple[Listed, ...]]] = []
        self._unasked: list[tuple[GraphSpec, tuple[str, ...]]] = []
        self._sources: list[tuple[GraphSpec, str]] = []
        self._measured: list[tuple[GraphSpec, tuple[Choice, str]]] = []

    def build(self, part: GraphSpec) -> tuple[Plan, tuple[Outcome, ...]]:
        """The plan that was measured fastest for ``part``, or the first proposed for it, that the
        policy allows, unbuilt."""
        known = self._fastest(part)
        if known is not None:
            self._measured.append((part, known))
        try:
            lowered, candidates = propose_for(part, self._target)
        except NotSupported as refusal:
            if not self._driver and any(_NO_DRIVER in reason for reason in refusal.reasons):
                self._unasked.append((part, refusal.reasons))
                return cast(Plan, _Proposal(None, 0)), ()
            raise
        capability = target_capability(self._target)
        listed = examine(lowered, candidates, part, self._policy, capability, env.frontend())
        self._plans.append((part, listed))
        outcomes, ahead = [], None if known is None else known[0]
        for plan in sorted(listed, key=lambda each: each.candidate.choice != ahead):
            need = plan.workspace_bytes
            outcomes.append(Outcome(plan.candidate, plan.allowed, plan.reason, need))
            if plan.allowed:
                return cast(Plan, _Proposal(plan.candidate.choice, need or 0)), tuple(outcomes)
        raise NotSupported(
            f"graph '{part.name}'",
            [
                f"{len(listed)} candidates, none allowed and buildable",
                *dict.fromkeys(plan.reason for plan in listed),
            ],
        )

    def generate(self, parts: Sequence[tuple[GraphSpec, Choice]]) -> list[Plan | str]:
        """Stands for the kernels of parts, which nothing compiles here."""
        self._sources += [(part, patterns.source(part, choice).text) for part, choice in parts]
        return [cast(Plan, _Proposal(choice, 0)) for _, choice in parts]

    def step(self, chosen: StepPlan) -> PlannedStep:
        """The step that the walk ended with, and all that is known of its plans."""
        part = chosen.spec
        listed = next((plans for spec, plans in self._plans if spec is part), ())
        unasked = next((reasons for spec, reasons in self._unasked if spec is part), None)
        runs_on = {"cudnn": "cuDNN"}.get(chosen.kind, chosen.kind)
        source = next((text for spec, text in self._sources if spec is part), "")
        own = {str(plan.candidate.choice) for plan in listed}
        refusals = [d for d in chosen.decisions if not d.accepted and d.subject not in own]
        if unasked is not None:
            runs_on = "unknown"
            refusals += [Decision(f"'{part.name}' as one plan", False, why) for why in unasked]
        known = next((found for spec, found in self._measured if spec is part), (None, ""))
        if unasked is None and chosen.choice != known[0]:
            known = None, ""
        return PlannedStep(part, runs_on, listed_plans(listed), tuple(refusals), source, *known)


def listed_plans(listed: Sequence[Listed]) -> tuple[ListedPlan, ...]:
    """Plans that were examined, by their rank."""
    return tuple(
        ListedPlan(
            rank,
            plan.candidate.choice.engine,
            plan.candidate.choice.knobs,
            plan.workspace_bytes,
            plan.candidate.runtime_compiled,
            plan.allowed,
            plan.reason,
        )
        for rank, plan in enumerate(listed, 1)
    )


@checked
def explain(
    graph: Graph | GraphSpec,
    target: str = "nvidia-h200",
    *,
    policy: Policy | None = None,
    **options: Any,
) -> Explanation:
    """The plans that cuDNN proposes for ``graph`` on the GPU called ``target``, without having one.

    Needs the cuDNN library and its frontend. Runtime-compiled engines (many fusions, attention)
    also need some CUDA driver library to be loadable; without one those steps are "unknown".
    Fields of :class:`~cudnngraph.Policy` may be given as keywords.

    Raises :class:`BackendUnavailable` without the library or the frontend, :class:`GraphError` for
    mistakes in the graph, :class:`NotSupported` for an unknown target and, with
    ``fallback="error"``, for a graph that cuDNN refuses as one plan.
    """
    target = target_of(target)
    spec = graph.spec() if isinstance(graph, Graph) else graph
    resolved = resolve_policy(policy, options, spec)
    cudnn_version = env.cudnn_version()
    driver = libraries.load_driver().usable
    fastest = Fastest(lookup.store(), resolved, deviceless.env_key(target))
    walk = _Walk(target, resolved, driver, fastest)
    with planning_for(target_capability(target)):
        capability = target_capability(target)
        regions = Kernels(target_processors(target), capability=capability)
        kernels = regions if resolved.kernels else None
        made = walk.build, kernels, walk.generate, fastest.settled
        selection = heuristic.heuristic(spec, resolved, *made)
        steps = tuple(walk.step(step) for step in selection.steps)
    return Explanation(
        spec,
        target,
        gpu_name(target),
        resolved,
        cudnn_version,
        env.frontend_version(),
        driver,
        steps,
    )
