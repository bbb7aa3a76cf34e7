"""The plans that cuDNN has for a lowered graph: list them, rule some out, build one.

A candidate is named by its choice. :func:`replay` builds a choice that was made before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..device.allocation import for_want_of_memory
from ..device.rules import rules
from ..errors import NotSupported
from ..ir.spec import GraphSpec, numel
from ..ops.base import LOW_PRECISION
from ..ops.table import OPS
from ..policy import Policy
from . import env, handles, tiles
from .found_bad import why_found_bad
from .known_bad import why_bad
from .lowering.driver import Lowered, first_line, lower
from .plan import Choice, Plan, refuse_during_capture

PYTHON_ENGINES_FROM = (
    10_000  # ids of the frontend's own engines, which need toolchains of their own
)
UNNAMED_KNOB = "NOT_SET"  # how the frontend reads a knob that it has no name for


@dataclass(frozen=True)
class Candidate:
    """One plan of cuDNN's own ranking: its place in the list, its choice and the library's tag.

    ``runtime_compiled`` plans are compiled on this machine; the others come with the library.
    ``why`` says why it stands before those that cuDNN ranks before it; empty where it does not.
    ``slower`` is the time that its tile is predicted to take, as a multiple of the fastest one's in
    the list; 0.0 where nothing is predicted.
    """

    index: int
    choice: Choice
    tag: str
    runtime_compiled: bool = True
    why: str = ""
    slower: float = 0.0


#: Why a plan stands before cuDNN's first one.
PREDICTED = "its tile is predicted to take {:.2f} of the time of cuDNN's first"
FASTER = "it was faster than cuDNN's first for most gradients of its kind that were measured"
UNRANKED = -1  #: the index of a candidate that another graph's choice names
UNCHECKED = "its check fails: "  #: how the reason starts where that is no fault of the plan


@dataclass(frozen=True)
class Outcome:
    """The outcome for a candidate: accepted, or rejected with the reason.

    ``wrong``: it was run, and is not to be tried again.
    """

    candidate: Candidate
    accepted: bool
    reason: str = ""
    workspace_bytes: int | None = None
    wrong: bool = False


def propose(
    lowered: Lowered, frontend: Any, *, more: bool = False, every: bool = False
) -> list[Candidate]:
    """cuDNN's ranking for a graph, best first, the same (engine, knobs) once.

    ``more`` asks a second ranking too (mode B), whose plans follow those of the first. ``every``
    has the library's other engines follow, each as it is without knobs. Raises
    :class:`NotSupported` with one line per distinct reason.
    """
    kinds = frontend.heur_mode
    modes = [kinds.A, kinds.B, kinds.FALLBACK] if more else [kinds.A, kinds.FALLBACK]
    graph = lowered.graph
    try:
        graph.create_execution_plans(modes)
    except (frontend.cudnnGraphNotSupportedError, RuntimeError) as error:
        raise NotSupported("this graph", readable_reasons(str(error)), str(error)) from None
    except ImportError as error:  # from 1.29 on engines of its own are asked, and need cuda-python
        reason = f"the frontend cannot rank it: {error}"
        raise NotSupported("this graph", [reason], str(error)) from None
    found: dict[Choice, Candidate] = {}
    for index in range(graph.get_execution_plan_count()):
        engine, knobs = graph.get_engine_and_knobs_at_index(index)
        if not 0 <= engine < PYTHON_ENGINES_FROM:
            continue
        choice = Choice(
            int(engine),
            tuple(sorted((knob.name, int(value)) for knob, value in (knobs or {}).items())),
        )
        if choice not in found:
            found[choice] = _candidate(graph, index, choice, frontend)
    if not found:
        raise NotSupported("this graph", ["the heuristics propose no engine of the library"])
    if every:
        found |= _unranked(graph, {choice.engine for choice in found}, frontend)
    return list(found.values())


#: A quirk of cuDNN (9.19 to 9.28): the engines of convolutions that have no tensor cores, which its
#: ranking has first for 16-bit images of single pixels and, say, 150 channels. In 9.19 they are the
#: only ones that fuse anything behind windows longer than 32.
_PLAIN_ENGINES = frozenset({0, 11, 35})
_ONLY_PLAIN = "only engines without tensor cores fuse it; the convolution alone has others"


def tensor_cores_first(candidates: Sequence[Candidate], spec: GraphSpec) -> list[Candidate]:
    """The ranking for ``spec`` with plans without tensor cores last, if it is a large enough
    convolution of 16-bit data by one group of weights.

    Raises :class:`NotSupported` if there are no others because of the ops beside the convolution.
    """
    nodes = [node for node in spec.nodes if OPS[node.op].has("convolution")]
    if len(nodes) != 1 or nodes[0].op != "conv" or nodes[0].attr("groups") > 1:
        return list(candidates)
    weight = spec.tensors[nodes[0].operands[1]]
    channels, products = weight.shape[0], numel(weight.shape[1:])
    limits = rules()
    large = channels >= limits.tensor_cores_min_results
    large &= products >= limits.tensor_cores_min_products
    if weight.dtype not in LOW_PRECISION or not large:
        return list(candidates)
    if len(spec.nodes) > 1 and all(each.choice.engine in _PLAIN_ENGINES for each in candidates):
        raise NotSupported("this graph", [_ONLY_PLAIN])
    return sorted(candidates, key=lambda each: each.choice.engine in _PLAIN_ENGINES)


def fastest_tile_first(
    candidates: Sequence[Candidate], spec: GraphSpec, capability: int, sms: int
) -> list[Candidate]:
    """The ranking for ``spec`` on GPUs of ``capability`` (90 for 9.0) with ``sms`` multiprocessors,
    that plan first which :mod:`~cudnngraph.backend.tiles` predicts to take less than cuDNN's first,
    or, of a gradient of a weight, that which was faster for most that were measured.
    """
    model = tiles.model_for(env.cudnn_version(), capability)
    if model is None:
        return list(candidates)
    work = tiles.work_of(spec)
    if work is None:
        place = model.gradient_first(spec, [each.choice for each in candidates])
        return _in_front(candidates, place, FASTER) if place else list(candidates)
    choices = [each.choice for each in candidates]
    us = [model.us(work, choice, sms) for choice in choices]
    least = min((each for each in us if each), default=0.0)
    told = [
        each if not time else replace(each, slower=round(time / least, 3))
        for each, time in zip(candidates, us, strict=True)
    ]
    better = model.best(choices, us)
    if better is None:
        return told
    place, share = better
    return _in_front(told, place, PREDICTED.format(share))


def _in_front(candidates: Sequence[Candidate], place: int, why: str) -> list[Candidate]:
    """The ranking with the plan at a place in front of all others, and the reason."""
    first = replace(candidates[place], why=why)
    return [first, *candidates[:place], *candidates[place + 1 :]]


def _unranked(graph: Any, ranked: set[int], frontend: Any) -> dict[Choice, Candidate]:
    """The engines that the library lists for a graph and its heuristics leave out."""
    refused = (frontend.cudnnGraphNotSupportedError, RuntimeError)
    found: dict[Choice, Candidate] = {}
    for engine in range(int(graph.get_engine_count())):
        if engine in ranked:
            continue
        try:
            graph.create_execution_plan(engine, {})
        except refused:
            continue  # of another kind of graph, or of another GPU
        index = graph.get_execution_plan_count() - 1
        choice = Choice(engine, ())
        found[choice] = _candidate(graph, index, choice, frontend)
    return found


def _candidate(graph: Any, index: int, choice: Choice, frontend: Any) -> Candidate:
    notes = graph.get_behavior_notes_for_plan_at_index(index)
    compiled = frontend.behavior_note.RUNTIME_COMPILATION in notes
    return Candidate(index, choice, str(graph.get_plan_name_at_index(index)), compiled)


def readable_reasons(message: str) -> list[str]:
    """One line per distinct reason out of the library's page of them.

    The page holds, for each engine tried, a JSON line with its id and lines
    ``Warning: STATUS; Reason: condition``: the condition that failed, then the calls that it was
    passed up through. Engines made for another GPU come last.
    """
    engines: dict[tuple[str, str], list[int]] = {}
    engine: int | None = None
    told = False  # the engine at hand has given its reason; what follows are the callers
    for line in message.splitlines():
        text = line.strip()
        if text.startswith("{") and "engineId" in text:
            try:
                engine = int(json.loads(text)["engineId"])
            except (ValueError, KeyError, TypeError):
                engine = None
            told = False
        elif "Reason:" in text and not told:
            head, reason = text.split("Reason:", 1)
            status = re.search(r"CUDNN_STATUS_NOT_SUPPORTED_(\w+)", head)
            kind = status.group(1).lower().replace("_", " ") if status else ""
            ids = engines.setdefault((kind, reason.strip().split(" at: ")[0]), [])
            if engine is not None and engine not in ids:
                ids.append(engine)
            told = engine is not None
    if not engines:
        return [first_line(message)]
    ranked = sorted(engines.items(), key=lambda entry: entry[0][0] == "arch mismatch")
    return [
        (f"{kind}: " if kind else "")
        + reason
        + (f" [engines {', '.join(map(str, ids))}]" if ids else "")
        for (kind, reason), ids in ranked
    ]


_NORMS = ("layer_norm", "rms_norm")  # a quirk of cuDNN: the weight is in no product


def multiplies_float32(spec: GraphSpec) -> bool:
    """Whether an anchor reads float32. 16-bit data loses nothing in tensor cores, and pointwise
    engines and sums carry the same notes without rounding anything."""
    return any(
        spec.tensors[name].dtype == torch.float32
        for node in spec.nodes
        if not OPS[node.op].pointwise and not OPS[node.op].has("adds_up")
        for name in node.operands[: 1 if node.op in _NORMS else 2]
    )


def restrict(lowered: Lowered, spec: GraphSpec, policy: Policy, frontend: Any) -> None:
    """Bar the plans that the policy rules out. Call after :func:`propose`."""
    notes = frontend.numerical_note
    barred = []
    if not policy.allow_tf32 and multiplies_float32(spec):
        # On float32 data a plan with tensor cores rounds to TF32 (10 bits of mantissa).
        barred += [notes.TENSOR_CORE, notes.DOWN_CONVERT_INPUTS, notes.REDUCED_PRECISION_REDUCTION]
        barred += [notes.FFT, notes.WINOGRAD]
    if policy.deterministic:
        barred.append(notes.NONDETERMINISTIC)
    if barred:
        lowered.graph.deselect_numeric_notes(barred)
    if policy.workspace_limit is not None:
        lowered.graph.deselect_workspace_greater_than(policy.workspace_limit)


def _why_no_launch(plan: Plan, spec: GraphSpec) -> str | None:
    """Launch a plan once on memory of its own: some build and then fail to launch (9.19).

    Inputs are zero, so that lengths are valid. A plan is given the benefit of the doubt where there
    is no memory to try it.
    """
    device = torch.device("cuda", plan.device_index)
    try:
        tensors = [
            torch.zeros(max(1, tensor.extent), dtype=tensor.dtype, device=device)
            for tensor in (spec.tensors[name] for name in (*spec.inputs, *spec.outputs))
        ]
        block = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None
    handle = handles.handle_on_current_stream(plan.device_index)
    try:
        pointers = plan.pointers([tensor.data_ptr() for tensor in tensors])
        plan.execute(pointers, block.data_ptr(), handle)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        if for_want_of_memory(error, device):
            return None
        return f"does not launch: {first_line(str(error))}"
    return None


_offers_every = False


def offer_every_engine() -> None:
    """In this process ``more`` of :class:`Proposals` has every engine follow: it is of a sweep."""
    global _offers_every
    _offers_every = True


class Proposals:
    """cuDNN's candidates for ``spec``, to be built one by one; ``more`` and ``every`` as for
    :func:`propose`.

    Raises :class:`NotSupported` with one line per distinct reason when there is none.
    """

    def __init__(
        self,
        spec: GraphSpec,
        policy: Policy,
        device_index: int,
        *,
        more: bool = False,
        every: bool = False,
    ) -> None:
        refuse_during_capture()
        self.spec = spec
        self._policy = policy
        self._device_index = device_index
        self._frontend = env.frontend()
        self._lowered = lower(spec, self._frontend, handle=handles.handle(device_index))
        every = every or (more and _offers_every)
        ranked = propose(self._lowered, self._frontend, more=more, every=every)
        gpu = env.device_identity(device_index)
        self.candidates = fastest_tile_first(
            tensor_cores_first(ranked, spec), spec, env.capability(device_index), gpu.sm_count
        )
        restrict(self._lowered, spec, policy, self._frontend)

    def build(self, candidate: Candidate, *, launch: bool = True) -> tuple[Outcome, Plan | None]:
        """Build one, and with ``launch`` launch it once, on zeros; there is a plan when the outcome
        is accepted."""
        choice, graph = candidate.choice, self._lowered.graph
        capability = env.capability(self._device_index)
        why = why_passed_over(
            candidate, self.spec, self._policy, capability, device_index=self._device_index
        )
        if why is None and candidate.index == UNRANKED:
            why = "cuDNN does not propose it here"
        if why is not None:
            return Outcome(candidate, False, why), None
        try:
            graph.build_plan_at_index(candidate.index)
            need = int(graph.get_workspace_size_plan_at_index(candidate.index))
        except (self._frontend.cudnnGraphNotSupportedError, RuntimeError) as error:
            why = first_line(str(error))
            if for_want_of_memory(error, torch.device("cuda", self._device_index)):
                why = f"out of memory: {why}"
            return Outcome(candidate, False, why), None
        limit = self._policy.workspace_limit
        if limit is not None and need > limit:
            reason = f"needs {need} bytes of workspace, over {limit}"
            return Outcome(candidate, False, reason, need), None
        plan = _plan_of(self._lowered, candidate.index, choice, self._device_index)
        failure = _why_no_launch(plan, self.spec) if launch else None
        if failure is not None:
            return Outcome(candidate, False, failure, need), None
        return Outcome(candidate, True, "", need), plan


def why_passed_over(
    candidate: Candidate,
    spec: GraphSpec,
    policy: Policy,
    capability: int,
    *,
    device_index: int | None = None,
) -> str | None:
    """Why a candidate is not even built: the policy bars it, or it is known to be wrong.

    Findings on one GPU count if ``device_index`` names it.
    """
    return why_excluded(candidate, policy) or why_rejected(
        spec,
        candidate.choice,
        capability,
        allow_tf32=bool(policy.allow_tf32),
        device_index=device_index,
    )


def why_rejected(
    spec: GraphSpec,
    choice: Choice,
    capability: int,
    *,
    allow_tf32: bool,
    device_index: int | None = None,
) -> str | None:
    """Why a choice must not be used for ``spec``: it is known to be wrong, or was found so here.

    Findings on one GPU count if ``device_index`` names it.
    """
    version = env.cudnn_version()
    why = why_bad(spec, choice.engine, version, capability=capability, allow_tf32=allow_tf32)
    if why is None and device_index is not None:
        why = why_found_bad(spec, choice, device_index, allow_tf32=allow_tf32)
    return why


def why_excluded(candidate: Candidate, policy: Policy) -> str | None:
    """The reason why the policy's ``exclude_engines`` rules a candidate out, or None."""
    names = (f"eng{candidate.choice.engine}", candidate.tag)
    for excluded in policy.exclude_engines:
        if excluded == names[0] or names[1] == excluded or names[1].startswith(f"{excluded}_"):
            return f"barred by the policy: exclude_engines has '{excluded}'"
    return None


def build_first(
    spec: GraphSpec, policy: Policy, device_index: int, ahead: Choice | None = None
) -> tuple[Plan, tuple[Outcome, ...]]:
    """The first plan of cuDNN's ranking that the policy allows and that builds; of its plans
    ``ahead`` is tried before all others.

    Raises :class:`NotSupported` with every candidate's reason when none does.
    """
    proposals = Proposals(spec, policy, device_index)
    outcomes: list[Outcome] = []
    for candidate in sorted(proposals.candidates, key=lambda each: each.choice != ahead):
        outcome, plan = proposals.build(candidate)
        outcomes.append(outcome)
        if plan is not None:
            return plan, tuple(outcomes)
    reasons = dict.fromkeys(outcome.reason for outcome in outcomes)
    raise NotSupported(
        f"graph '{spec.name}'",
        [f"{len(outcomes)} candidates, none allowed and buildable", *reasons],
    )


def replay(spec: GraphSpec, choice: Choice, device_index: int) -> Plan:
    """Build exactly ``choice`` for ``spec``; :class:`NotSupported` when it does not build."""
    refuse_during_capture()
    frontend = env.frontend()
    lowered = lower(spec, frontend, handle=handles.handle(device_index))
    unsupported = (frontend.cudnnGraphNotSupportedError, RuntimeError, AttributeError)
    try:
        if any(name == UNNAMED_KNOB for name, _ in choice.knobs):
            index = _find(lowered, frontend, choice)
        else:
            knobs = {getattr(frontend.knob_type, name): value for name, value in choice.knobs}
            lowered.graph.create_execution_plan(choice.engine, knobs)
            index = lowered.graph.get_execution_plan_count() - 1
        lowered.graph.build_plan_at_index(index)
    except unsupported as error:
        raise NotSupported(
            f"{choice} for graph '{spec.name}'", [first_line(str(error))], str(error)
        ) from None
    return _plan_of(lowered, index, choice, device_index)


def _find(lowered: Lowered, frontend: Any, choice: Choice) -> int:
    """The place in cuDNN's ranking of a choice that cannot be asked for by its knobs."""
    for candidate in propose(lowered, frontend, more=True):
        if candidate.choice == choice:
            return candidate.index
    raise NotSupported(str(choice), ["the heuristics do not propose it (any more)"])


def _plan_of(lowered: Lowered, index: int, choice: Choice, device_index: int) -> Plan:
    return Plan(lowered.graph, index, choice, device_index, lowered.uids, lowered.extras)
