"""A selection as a plan record, and a record as a selection again.

A record names each step by its nodes in the canonical graph, and its plan by (engine, knobs).
Coming back, the steps are made again from the graph, and have to have the tensors that the record
says; what does not fit is stale.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from plans_cache.record import FAMILY, Candidate, PlanRecord, StepRecord

from ..backend.env import EnvKey
from ..backend.plan import Choice, Plan, Verified
from ..device.import_rules import Stage
from ..device.rules import Values
from ..device.values import known
from ..ir.key import Key, encode
from ..ir.spec import GraphSpec, Node, print_spec
from ..ops.table import is_default
from ..partition.analysis import CutGraph, compute_nodes
from ..partition.cuts import subgraph_of
from ..policy import Policy
from ..rewrite.annotate import INSTEAD, marked, marks
from ..rewrite.channels_last import channels_last, with_dense_images
from ..rewrite.passes import legalize
from ..select.decision import Decision, Selection, StepPlan
from . import near

CHANNELS_LAST = "channels_last"  # of a record: its steps are those of the graph channels last
DENSE = "dense_regions"  # of a record: the nodes of each region that makes its images dense
IMPORTED = "imported"  # of a record: the thresholds by which to import its graph's model
FRONTEND = "frontend"  # of a record's versions: the frontend that made it
VERIFIED = "verified"  # of a step in a record: by what, and how far its results were off


class StaleRecord(ValueError):
    """A record whose steps are not those of the graph as it is cut now."""


def env_components(env: EnvKey) -> tuple[tuple[str, str], ...]:
    """The environment's part of a key, as named components in JSON.

    The frontend's version is left out: a plan is cuDNN's, by engine and knobs, whoever asks for it.
    """
    parts = {name: value for name, value in asdict(env).items() if name != "frontend_version"}
    return tuple((name, json.dumps(encode(value))) for name, value in parts.items())


def summary(spec: GraphSpec) -> str:
    """The graph in one line: its ops, then the types of what goes in and comes out."""
    ops = " → ".join(node.op for node in spec.nodes if node.op != "constant")
    ins = ", ".join(str(spec.tensors[name]) for name in spec.inputs)
    outs = ", ".join(str(spec.tensors[name]) for name in spec.outputs)
    return f"{ops}: {ins} → {outs}"


def _candidate(decision: Decision) -> Candidate:
    choice = decision.choice
    return Candidate(
        decision.subject,
        decision.accepted,
        decision.reason,
        None if choice is None else choice.engine,
        () if choice is None else choice.knobs,
        decision.time_us,
        decision.workspace_bytes,
    )


def _decision(candidate: Candidate) -> Decision:
    choice = None if candidate.engine is None else Choice(candidate.engine, candidate.knobs)
    return Decision(
        candidate.subject,
        candidate.accepted,
        candidate.reason,
        choice,
        candidate.workspace_bytes,
        candidate.time_us,
    )


def _step(step: StepPlan) -> StepRecord:
    spec = step.spec
    return StepRecord(
        nodes=tuple(node.name for node in spec.nodes),
        ops=tuple(node.op for node in spec.nodes),
        inputs=tuple((name, str(spec.tensors[name])) for name in spec.inputs),
        outputs=tuple((name, str(spec.tensors[name])) for name in spec.outputs),
        kind=step.kind,
        engine=None if step.choice is None else step.choice.engine,
        knobs=() if step.choice is None else step.choice.knobs,
        workspace_bytes=step.workspace_bytes,
        time_us=step.time_us,
        candidates=tuple(map(_candidate, step.decisions)),
        extra={
            **({} if step.verified is None else {VERIFIED: verified_body(step.verified)}),
            **_instead(marks(spec)),
        },
    )


def _instead(values: Values) -> dict[str, Any]:
    return {INSTEAD: dict(values)} if values else {}


def to_record(
    spec: GraphSpec, key: Key, env: EnvKey, policy: Policy, selection: Selection
) -> PlanRecord:
    """The record of a selection for the canonical graph ``spec``."""
    return PlanRecord(
        key=key.components,
        env=env_components(env),
        summary=summary(spec),
        graph=print_spec(spec, is_default),
        steps=tuple(map(_step, selection.steps)),
        policy={**asdict(policy), "exclude_engines": list(policy.exclude_engines)},
        versions={
            "cudnngraph_schema": str(env.schema),
            FRONTEND: env.frontend_version,
            "torch": torch.__version__,
        },
        created=time.time(),
        extra={**_variant(selection), **_family(key, env, policy)},
    )


def _family(key: Key, env: EnvKey, policy: Policy) -> dict[str, Any]:
    """The family of a record whose choice was measured: others may begin with that."""
    found = None
    if policy.tune == "autotune":
        found = near.family(key.components, env_components(env))
    return {} if found is None else {FAMILY: found}


def _variant(selection: Selection) -> dict[str, Any]:
    """Return what else a record says of the graph that its steps were cut from."""
    found = _instead(selection.instead)
    if selection.imported is not None:
        found |= imported_body(selection.imported)
    if selection.channels_last:
        found[CHANNELS_LAST] = True
    elif selection.dense:
        found[DENSE] = [list(names) for names in selection.dense]
    return found


def legal_of(record: PlanRecord, spec: GraphSpec, policy: Policy) -> GraphSpec:
    """The legal form of the declared graph that a record's steps were cut from.

    Raises :class:`StaleRecord` for a record that names thresholds which no search tries.
    """
    return legalize(spec, policy, instead_of(record))


def instead_of(record: PlanRecord) -> Values:
    """The thresholds that the rewrites followed in place of the GPU's. Raises
    :class:`StaleRecord`."""
    return _values(record.extra, "graph")


def imported_body(values: Values) -> dict[str, Any]:
    """What a record says of how to import its graph's model."""
    return {IMPORTED: dict(values)}


def imported_of(record: PlanRecord) -> Values | None:
    """The thresholds that the import of a record's model is to follow; None if it does not say.

    Raises :class:`StaleRecord`.
    """
    found = record.extra.get(IMPORTED)
    return None if found is None else _values({INSTEAD: found}, "import")


def _values(extra: Mapping[str, Any], *stages: Stage) -> Values:
    try:
        return known(extra.get(INSTEAD, {}), stages)
    except ValueError as error:
        raise StaleRecord(f"of the record: {error}") from None


def steps_of(record: PlanRecord, spec: GraphSpec, *, resized: bool = False) -> tuple[StepPlan, ...]:
    """The steps of a record for the legalized canonical graph ``spec``.

    ``resized``: the record is of a graph that has other sizes. Raises :class:`StaleRecord` when the
    graph has no such steps.
    """
    left = _places(record, spec)
    constants = {node.name for node in spec.nodes if node.op == "constant"}
    steps: list[StepPlan] = []
    made = set(spec.inputs)
    for number, step in enumerate(record.steps, 1):
        part = _part(number, step, left, constants, resized)
        if not made.issuperset(part.inputs):
            raise StaleRecord(f"step {number} of the record reads what no earlier one makes")
        made |= set(part.outputs)
        choice = None if step.engine is None else Choice(step.engine, step.knobs)
        decisions = tuple(map(_decision, step.candidates))
        verified = None if choice is None else _verified(step.extra.get(VERIFIED))
        steps.append(
            StepPlan(part, choice, step.workspace_bytes, decisions, step.time_us, verified)
        )
    if left:
        raise StaleRecord(f"op '{next(iter(left))}' is in no step of the record")
    return tuple(steps)


_Places = dict[
    str, tuple[CutGraph, Node]
]  # the nodes by name, each with the graph that is cut there


def _places(record: PlanRecord, spec: GraphSpec) -> _Places:
    """The nodes that the steps of a record are made of."""
    whole = CutGraph(channels_last(spec) if is_channels_last(record) else spec)
    found = {node.name: (whole, node) for node in compute_nodes(whole.spec.nodes)}
    for names in dense_regions(record):
        inside = [found.pop(name, None) for name in names]
        if None in inside:
            raise StaleRecord("a region of the record has an op that is not there, or twice")
        region = subgraph_of(whole, [place[1] for place in inside if place is not None])
        graph = CutGraph(with_dense_images(region))
        found |= {node.name: (graph, node) for node in compute_nodes(graph.spec.nodes)}
    return found


def _part(
    number: int, step: StepRecord, left: _Places, constants: Collection[str], resized: bool
) -> GraphSpec:
    """The graph of a step, whose nodes are taken out of ``left``."""
    mine: list[Node] = []
    graphs: dict[int, CutGraph] = {}
    for name in (name for name in step.nodes if name not in constants):
        if name not in left:
            raise StaleRecord(f"step {number} has an op '{name}' that is not there, or twice")
        graph, node = left.pop(name)
        graphs[id(graph)] = graph
        mine.append(node)
    if len(graphs) != 1:
        raise StaleRecord(f"step {number} of the record is in no region, or in two")
    part = subgraph_of(graph, mine)
    if tuple(node.name for node in part.nodes) != step.nodes:
        raise StaleRecord(f"step {number} of the record has other ops than the graph")
    names = (*part.inputs, *part.outputs)
    types = tuple((name, str(part.tensors[name])) for name in names)
    said = (*step.inputs, *step.outputs)
    if tuple(name for name, _ in said) != names or not (resized or types == said):
        raise StaleRecord(f"step {number} has other tensors than in the record")
    return marked(part, _values(step.extra, "cudnn", "torch"))


def is_channels_last(record: PlanRecord) -> bool:
    """Whether the steps are those of the graph with every image channels last."""
    return record.extra.get(CHANNELS_LAST) is True


def dense_regions(record: PlanRecord) -> tuple[tuple[str, ...], ...]:
    """The names of the nodes of each region that makes its images dense."""
    found = record.extra.get(DENSE, [])
    if not isinstance(found, list) or not all(isinstance(names, list) for names in found):
        raise StaleRecord("the regions of the record are no lists of ops")
    if not all(isinstance(name, str) for names in found for name in names):
        raise StaleRecord("the regions of the record name no ops")
    return tuple(map(tuple, found))


def verified_body(verified: Verified) -> dict[str, Any]:
    """A check as a record says it."""
    return {**asdict(verified), "also": list(verified.also)}


def _verified(data: Any) -> Verified | None:
    """Return the check that a record reports, or None if it reports none, or nonsense."""
    try:
        found = Verified(**data)
    except TypeError:
        return None
    if not isinstance(found.also, (list, tuple)):
        return None
    texts = (found.gpu, found.frontend, found.torch, *found.also)
    number = found.error is None or isinstance(found.error, float)
    whole = type(found.cudnn) is int and all(isinstance(text, str) for text in texts)
    return replace(found, also=tuple(found.also)) if number and whole else None


_AGAIN = 1 << 63  # in place of a length: the plan is that of an earlier step, whose place follows


def pack(plans: Sequence[Plan | None]) -> bytes:
    """The serialized plans of a selection, one after the other, each behind its length; a plan that
    an earlier step has is there once."""
    texts: dict[int, bytes] = {}  # by the plans' ids: equal steps share one
    first: dict[bytes, int] = {}
    parts: list[bytes] = []
    for number, plan in enumerate(plans):
        if plan is not None and id(plan) not in texts:
            texts[id(plan)] = plan.serialize()
        part = b"" if plan is None else texts[id(plan)]
        earlier = first.setdefault(part, number)
        again = part and earlier != number
        parts.append((_AGAIN | earlier if again else len(part)).to_bytes(8, "little"))
        parts.append(b"" if again else part)
    return b"".join(parts)


def unpack(blob: bytes, count: int) -> list[bytes]:
    """The parts of what :func:`pack` made of ``count`` plans. Raises ValueError when it is not."""
    parts: list[bytes] = []
    place = 0
    for number in range(count):
        size = int.from_bytes(blob[place : place + 8], "little")
        if len(blob) >= place + 8 and size & _AGAIN and size ^ _AGAIN < number:
            parts.append(parts[size ^ _AGAIN])
            place += 8
            continue
        part = blob[place + 8 : place + 8 + size]
        if len(blob) < place + 8 or len(part) != size:
            raise ValueError("the serialized plans are cut short")
        parts.append(part)
        place += 8 + size
    if place != len(blob):
        raise ValueError("the serialized plans hold more than the record's steps")
    return parts
