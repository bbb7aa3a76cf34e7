"""Plan selection: which steps run a graph, which plan each step uses, and why.

``heuristic`` measures nothing: it takes the whole graph as one plan where cuDNN has one and no rule
advises against it, and goes down the cuts of :mod:`~cudnngraph.partition.cuts` else, to a torch
step for an op that cuDNN cannot run at all. (:mod:`~cudnngraph.select.search` measures.) Every step
keeps its decisions. Nothing here touches the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..backend.plan import Choice, Outcome, Plan, Verified
from ..errors import NotSupported
from ..ir.spec import GraphSpec, Node
from ..ops.attention.checks import ATTENTION
from ..ops.base import QUANTIZED
from ..partition.cuts import Graph, Group, cuts, is_anchor, on_numbers, piece, regions, work
from ..policy import Policy
from ..rewrite.passes import marked, prepared
from .dropout_probe import draws

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Decision:
    """A candidate for a step, and what became of it. ``choice`` is None for what is no plan."""

    subject: str
    accepted: bool
    reason: str
    choice: Choice | None = None
    workspace_bytes: int | None = None
    time_us: float | None = None


@dataclass(frozen=True)
class StepPlan:
    """One step: a subgraph and the plan that runs it; ``choice`` is None for a torch step.

    ``time_us`` is what was measured of it, None where nothing was; ``verified`` that the plan was
    right on random data, None where it was not run on any.
    """

    spec: GraphSpec
    choice: Choice | None
    workspace_bytes: int
    decisions: tuple[Decision, ...]
    time_us: float | None = None
    verified: Verified | None = None


@dataclass(frozen=True)
class Selection:
    """The steps in order, and for each cuDNN step the plan as this thread built it."""

    steps: tuple[StepPlan, ...]
    built: tuple[Plan | None, ...]


# AdamW as one plan: as fast as with its numbers apart on 2^24 elements, 3.8 times slower on 2^26.
NUMBERS_APART = 3
ELEMENTS_APART = 1 << 25

FREE = Decision("a view", True, "the operand's memory, seen in another way: nothing runs")

Build = Callable[[GraphSpec], "tuple[Plan, tuple[Outcome, ...]]"]


def torch_only(spec: GraphSpec) -> str | None:
    """Why a graph is not shown to cuDNN at all, or None."""
    tensors = spec.tensors.values()
    if any(tensor.numel == 0 for tensor in tensors):
        return "a tensor is empty"
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return "cuDNN graphs have no float64"
    large = [tensor for tensor in tensors if max(tensor.numel, tensor.extent) > INT32_MAX]
    if large:
        return f"'{large[0].name}' spans {large[0].extent} elements, over 2^31 - 1"
    return None


def why_apart(spec: GraphSpec) -> str | None:
    """Why a graph should not be one plan although cuDNN may take it, or None.

    Rules from measurements on an H200 with cuDNN 9.19; the numbers are in
    ``docs/results/h200-selection.md``.
    """
    nodes = work(spec.nodes)
    anchors = [node for node in nodes if is_anchor(node, spec.tensors)]
    if anchors and spec.tensors[anchors[0].operands[0]].dtype in QUANTIZED:
        anchors = [node for node in anchors if not _is_total_amax(spec, node)] or anchors
    if len(anchors) > 1:
        names = " and ".join(dict.fromkeys(node.op for node in anchors))
        return f"{len(anchors)} anchors ({names}) in one plan are refused, or slow"
    if not anchors or len(nodes) == 1:
        return _why_computed_once(spec, nodes)
    (anchor,) = anchors
    if anchor.op in ATTENTION:
        computed = {name for node in nodes if node is not anchor for name in node.results}
        if computed & set(anchor.operands):
            return "attention reads tensors, not results of the same plan"
        if draws(spec):
            return "what attention drops by a seed can be told of its own result alone"
    data = spec.tensors[anchor.operands[0]].dtype
    if any(spec.tensors[name].dtype != data for name in spec.outputs):
        return None  # apart, the anchor would have to hand on float32, which few engines write
    if _depthwise(spec, anchor):
        return "an epilogue makes a depthwise convolution many times slower"
    if anchor.op == "conv_transpose":
        kernel = spec.tensors[anchor.operands[1]].shape[2:]
        if any(r > s > 1 for r, s in zip(kernel, anchor.attr("stride"), strict=True)):
            return "an epilogue slows a strided transposed convolution whose taps overlap"
    return None


def _why_computed_once(spec: GraphSpec, nodes: Sequence[Node]) -> str | None:
    """Why what pointwise ops compute of numbers and vectors should be a plan of its own."""
    count = len(on_numbers(spec, nodes))
    many = max(spec.tensors[node.results[0]].numel for node in nodes)
    if not NUMBERS_APART <= count < len(nodes) or many < ELEMENTS_APART:
        return None
    return f"{count} ops on numbers would run for each of {many} elements"


def _is_total_amax(spec: GraphSpec, node: Node) -> bool:
    """The largest |x| of a whole tensor, which cuDNN takes along behind a product."""
    if node.op != "reduction" or node.attr("mode") != "amax":
        return False
    return spec.tensors[node.results[0]].numel == 1


def _depthwise(spec: GraphSpec, node: Node) -> bool:
    if node.op not in ("conv", "conv_transpose"):
        return False
    groups = int(node.attr("groups"))
    return groups > 1 and groups == spec.tensors[node.operands[0]].shape[1]


def _nothing_ahead(parts: Iterable[GraphSpec]) -> None:
    """Every step is built when it is asked for."""


def heuristic(
    spec: GraphSpec,
    policy: Policy,
    build: Build,
    expect: Callable[[Iterable[GraphSpec]], None] = _nothing_ahead,
) -> Selection:
    """Choose without measuring. ``build(spec)`` gives the first plan that the policy allows;
    ``expect(specs)`` is told what will be asked of it soon, so that it can build several at a time.

    Raises :class:`NotSupported` when cuDNN refuses and ``policy.fallback`` is "error".
    """
    reason = torch_only(spec)
    if reason is not None:
        step = StepPlan(spec, None, 0, (Decision(f"'{spec.name}' with cuDNN", False, reason),))
        return Selection((step,), (None,))
    spec = marked(spec, policy.deterministic)
    if policy.fallback == "error":
        plan, outcomes = build(spec)
        return Selection((_planned(spec, plan, outcomes, ()),), (plan,))
    steps: list[StepPlan] = []
    built: list[Plan | None] = []

    def attempt(part: GraphSpec) -> tuple[tuple[Plan, tuple[Outcome, ...]] | None, list[Decision]]:
        why = why_apart(part)
        if why is None:
            try:
                return build(part), []
            except NotSupported as refusal:
                reasons = refusal.reasons
        else:
            reasons = (why,)
        return None, [Decision(f"'{part.name}' as one plan", False, reason) for reason in reasons]

    def resolve(graph: Graph, nodes: Group, earlier: tuple[Decision, ...]) -> None:
        part = piece(graph, nodes)
        if len(nodes) == 1 and graph.is_free(nodes[0]):
            steps.append(StepPlan(part, None, 0, (*earlier, FREE)))
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

    def ahead(graph: Graph, groups: Iterable[Group]) -> None:
        whole = (
            piece(graph, group)
            for group in groups
            if not (len(group) == 1 and graph.is_free(group[0]))
        )
        expect(part for part in whole if why_apart(part) is None)

    graph = Graph(prepared(spec))
    parts = regions(graph)
    ahead(graph, parts)
    whole = [Decision(f"'{spec.name}' as one plan", False, "it is cut at each anchor")]
    for number, group in enumerate(parts):
        resolve(graph, group, tuple(whole) if number == 0 else ())
    if not parts:
        resolve(graph, work(graph.spec.nodes), ())
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
