"""What a search by measurement would build for a graph on a described GPU, and in which order.

The parts are those of the search (:mod:`~cudnngraph.select.listing`), the candidates those of the
real cuDNN library, which needs no GPU to list them. Nothing is built for the GPU, nothing measured:
how many of the candidates a search goes on to depends on the times that it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from ..backend import deviceless, env, libraries
from ..backend.candidates import Candidate
from ..backend.deviceless import Listed
from ..backend.tested import dotted
from ..cache.measured import Measured
from ..device.rules import planning_for
from ..graph.builder import Graph
from ..ir.canonical import canonical
from ..ir.spec import GraphSpec
from ..policy import Policy
from ..rewrite.annotate import marks
from ..runtime.compile import resolve_policy
from ..select.bench import Bench
from ..select.kernels import Kernels
from ..select.listing import parts
from ..select.remembered import is_ranked, keep_ranking
from ..select.rules import why_not_cudnn
from ..select.ways import Part
from .offline import WITHOUT_DRIVER, ListedPlan, OnTarget, listed_plans, plan_lines, telling

_UNTIMED = "nothing is timed here"


@dataclass(frozen=True)
class ListedPart:
    """A part of a graph that a search may run as one step.

    ``plans`` are those of cuDNN's in the order in which they would be tried. ``kernels`` counts the
    schedules of its generated kernel, ``torch`` says whether torch may run it. ``refusals`` say why
    there is no plan. ``thresholds`` are those whose other value the part follows.
    """

    spec: GraphSpec
    plans: tuple[ListedPlan, ...]
    kernels: int
    torch: bool
    refusals: tuple[str, ...]
    thresholds: tuple[tuple[str, Any], ...]

    @property
    def ops(self) -> tuple[str, ...]:
        """The names of the part's ops, in order."""
        return tuple(node.op for node in self.spec.nodes if node.op != "constant")

    def lines(self, max_candidates: int) -> list[str]:
        """What may run the part, in words: a line about all, then one for each of the first."""
        built = sum(plan.allowed for plan in self.plans)
        ways = [f"{built} plans" + (f", {max_candidates} at most" * (built > max_candidates))]
        ways += [f"{self.kernels} schedules of a generated kernel"] if self.kernels else []
        ways += ["torch"] if self.torch else []
        by = "".join(f" ({name}={value})" for name, value in self.thresholds)
        refusals = telling(self.refusals) if not self.plans else ()
        return [
            f"{' → '.join(self.ops)}{by}: {'; '.join(ways)}",
            *(f"  {line}" for line in plan_lines(self.plans)),
            *(f"  refused: {reason}" for reason in refusals),
        ]


@dataclass(frozen=True)
class Candidates(OnTarget):
    """The parts of a graph that a search may build on a described GPU, in the order of a search.

    ``whole_by_torch`` says why the graph is not for cuDNN at all. ``kept`` counts the parts whose
    ranking is in the cache for that GPU, ``unkept`` those whose ranking could not be written there.
    """

    parts: tuple[ListedPart, ...]
    whole_by_torch: str = ""
    kept: int = 0
    unkept: int = 0

    def __str__(self) -> str:
        lines = [
            f"graph '{self.spec.name}' as a search would try it on {self.gpu_name} ({self.target}) "
            f"by cuDNN {dotted(self.cudnn_version)}, frontend {self.frontend_version}"
        ]
        if not self.driver:
            lines.append(f"note: {WITHOUT_DRIVER}; so nothing is kept")
        if self.unkept:
            lines.append(
                "note: rankings that cannot be written to the cache directory, so are not kept: "
                f"{self.unkept}; CUDNNGRAPH_LOG=info says why"
            )
        if self.whole_by_torch:
            lines.append(f"by torch, there is nothing to search: {self.whole_by_torch}")
        for number, part in enumerate(self.parts, 1):
            first, *others = part.lines(self.policy.max_candidates)
            lines += [f"part {number} of {len(self.parts)}: {first}", *others]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as lists, dicts, numbers and strings, for JSON."""
        return {
            **self._place(),
            "max_candidates": self.policy.max_candidates,
            "whole_by_torch": self.whole_by_torch,
            "kept": self.kept,
            "unkept": self.unkept,
            "parts": [
                {
                    "ops": list(part.ops),
                    "thresholds": dict(part.thresholds),
                    "torch": part.torch,
                    "kernels": part.kernels,
                    "refusals": list(part.refusals),
                    "plans": [plan.to_dict() for plan in part.plans],
                }
                for part in self.parts
            ],
        }


class _ListingBench:
    """Lists the candidates of steps on a described GPU; see
    :class:`~cudnngraph.select.bench.Bench`."""

    def __init__(self, target: str, policy: Policy) -> None:
        self._target = target
        self._policy = policy
        self.listed: dict[int, tuple[Sequence[Candidate], tuple[Listed, ...]]] = {}

    def proposals(self, spec: GraphSpec, known: Sequence[Candidate] | None = None) -> Any:
        """cuDNN's candidates, which cannot be built."""
        lowered, candidates = deviceless.propose_for(spec, self._target, more=True)
        capability = deviceless.target_capability(self._target)
        examined = deviceless.examine(
            lowered, candidates, spec, self._policy, capability, env.frontend()
        )
        self.listed[id(spec)] = candidates, examined
        return SimpleNamespace(candidates=candidates)

    def alone(self) -> AbstractContextManager[None]:
        """Nothing is timed."""
        return nullcontext()

    def times_us(self, spec: GraphSpec, plans: Sequence[Any], rounds: int) -> list[float | str]:
        """No times."""
        return [_UNTIMED] * len(plans)


def candidates(
    graph: Graph | GraphSpec, target: str, *, policy: Policy | None = None, **options: Any
) -> Candidates:
    """What a search for ``graph`` would build on the GPU called ``target``.

    cuDNN's rankings are kept in the cache, for a search on such a GPU with the same versions of
    cuDNN and of its frontend to begin with, unless runtime-compiled engines cannot be listed here
    for want of a CUDA driver library.

    Raises :class:`BackendUnavailable` without the library or the frontend, :class:`NotSupported`
    for an unknown target, :class:`GraphError` for mistakes in the graph.
    """
    target = deviceless.target_of(target)
    cudnn_version = env.cudnn_version()
    spec = graph.spec() if isinstance(graph, Graph) else graph
    resolved = resolve_policy(policy, {**options, "tune": "autotune"}, spec)
    driver = libraries.load_driver().usable
    capability = deviceless.target_capability(target)
    found: list[ListedPart] = []
    kept = unkept = 0
    with planning_for(capability):
        why = why_not_cudnn(spec)
        bench = _ListingBench(target, resolved)
        kernels = Kernels(deviceless.target_processors(target), capability=capability)
        memo = Measured(resolved, deviceless.env_key(target))
        for part in parts(canonical(spec), resolved, cast(Bench, bench)) if why is None else ():
            ranked, examined = bench.listed.get(id(part.step.spec), ((), ()))
            found.append(_listed(part, examined, kernels, resolved))
            if ranked and driver:
                spec_of_part = part.step.spec
                there = is_ranked(memo, spec_of_part) or keep_ranking(memo, spec_of_part, ranked)
                kept, unkept = kept + there, unkept + (not there)
    return Candidates(
        spec,
        target,
        deviceless.gpu_name(target),
        resolved,
        cudnn_version,
        env.frontend_version(),
        driver,
        tuple(found),
        why or "",
        kept,
        unkept,
    )


def _listed(part: Part, examined: Sequence[Listed], kernels: Kernels, policy: Policy) -> ListedPart:
    step = part.step
    generated = 0
    if policy.kernels and policy.fallback != "error" and not part.by:
        generated = len(kernels.choices(step.spec)[: policy.max_candidates])
    by_torch = any(way.plan is None for way in step.ways)
    refusals = tuple(dict.fromkeys(lost.reason for lost in step.lost))
    return ListedPart(
        step.spec, listed_plans(examined), generated, by_torch, refusals, marks(step.spec)
    )
