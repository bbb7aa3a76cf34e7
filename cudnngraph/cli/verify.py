"""Is an entry of the cache what it says: its record, its blob, its graph, and what its plans give.

The graph is built again from the key's components, and has to have that key. On a GPU of the
entry's environment the plan of each cuDNN step is run on random data, in a process of its own, and
compared with the reference executor in float64.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from plans_cache import PlanRecord, PlanStore

from .. import settings
from ..backend import env
from ..backend.plan import Choice, Verified
from ..cache.codec import (
    VERIFIED,
    StaleRecord,
    env_components,
    legal_of,
    steps_of,
    verified_body,
)
from ..cache.lookup import Rejected
from ..errors import CudnnGraphError
from ..explain.text import clean
from ..ir.canonical import canonical
from ..ir.key import graph_key, step_digest
from ..ir.spec import GraphSpec, Node, TensorSpec
from ..ops.table import OPS
from ..policy import SEARCH_FIELDS, Policy
from ..select import guard
from ..select.decision import StepPlan
from .records import DTYPES, Stored, parsed, tensor

# What is wrong with the plan of a step, or where it passed: see guard.check.
Check = Callable[[StepPlan], "tuple[str | None, Verified | None]"]

MAX_TENSOR_BYTES = 1 << 30


@dataclass(frozen=True)
class Verdict:
    """Outcome of one check: "ok", "none" (nothing to check), "skipped" or "failed"."""

    status: str
    detail: str = ""


OK = Verdict("ok")


class Malformed(ValueError):
    """A key whose components make up no graph."""


# -- checks ----------------------------------------------------------------------------------------


def check_stored(store: PlanStore, entry: Stored) -> tuple[Verdict, Verdict]:
    """The record as it is kept, and the length and digest of its serialized plans."""
    found = store.check(entry.id)
    if found.record is None:
        return Verdict("failed", found.problem), Verdict("skipped", "its record is not known")
    if found.blob_problem:
        return OK, Verdict("failed", found.blob_problem)
    return OK, Verdict("none") if found.blob is None else OK


def check_graph(record: PlanRecord) -> tuple[Verdict, tuple[StepPlan, ...]]:
    """Whether the key's components are a graph of that key which the steps make up."""
    verdict, _, steps = legal_steps(record)
    return verdict, steps


def legal_steps(record: PlanRecord) -> tuple[Verdict, GraphSpec | None, tuple[StepPlan, ...]]:
    """:func:`check_graph`, with the legal form of the graph; None where the steps do not fit it."""
    try:
        spec = legal_of(record, graph_of(record), policy_of(record))
        return OK, spec, steps_of(record, spec)
    except StaleRecord as error:
        return Verdict("failed", f"stale: {error}"), None, ()
    except (Malformed, CudnnGraphError) as error:
        return Verdict("failed", str(error)), None, ()
    except Exception as error:  # of rules that never saw a graph nobody checked
        return Verdict("failed", f"not a graph: {type(error).__name__}: {error}"), None, ()


def check_plans(
    record: PlanRecord, steps: Sequence[StepPlan], check: Check
) -> tuple[Verdict, PlanRecord | None]:
    """Whether the plan of each cuDNN step passes ``check``, and the record with what that found;
    None where a plan does not pass."""
    if all(step.choice is None for step in steps):
        return Verdict("none"), record
    done: dict[tuple[str, Choice], Verified] = {}
    made = list(record.steps)
    for number, step in enumerate(steps):
        if step.choice is None:
            continue
        where = f"step {number + 1}"
        large = [t for t in step.spec.tensors.values() if _bytes(t) > MAX_TENSOR_BYTES]
        if large:
            return Verdict("skipped", f"{where} has a tensor over {MAX_TENSOR_BYTES} bytes"), record
        like = (step_digest(step.spec), step.choice)
        if like not in done:
            try:
                why, passed = check(step)
            except (CudnnGraphError, RuntimeError) as error:
                return Verdict("failed", f"{where} does not run: {_first_line(str(error))}"), record
            if passed is None:
                return Verdict("failed", f"{where}, {step.choice}: {why}"), None
            done[like] = passed.after(step.verified)
        said = {**made[number].extra, VERIFIED: verified_body(done[like])}
        made[number] = replace(made[number], extra=said)
    errors = [each.error for each in done.values() if each.error is not None]
    told = f"off by {max(errors):.1e}" if errors else "there was no memory to compare results"
    return Verdict("ok", told), replace(record, steps=tuple(made))


def _bytes(spec: TensorSpec) -> int:
    return spec.extent * spec.dtype.itemsize


def _first_line(text: str) -> str:
    return clean(next(iter(text.splitlines()), ""))


# -- the graph of a key ----------------------------------------------------------------------------


def graph_of(record: PlanRecord) -> GraphSpec:
    """The canonical graph that the key's components describe. :class:`Malformed` if they do not."""
    parts = parsed(record.key)
    tensors: dict[str, TensorSpec] = {}
    inputs = _described(parts, "inputs", tensors)
    rows = parts.get("outputs")
    if not isinstance(rows, list) or not all(isinstance(row, list) and row for row in rows):
        raise Malformed("outputs are not a list of tensors")
    outputs = tuple(_add(str(row[0]), row[1:], tensors) for row in rows)
    _described(parts, "intermediates", tensors)
    nodes = parts.get("ops")
    if not isinstance(nodes, list):
        raise Malformed("ops are not a list")
    known = set(inputs)
    made = []
    for place, row in enumerate(nodes):
        node = _node(place, row)
        unknown = [name for name in (*node.operands, *node.results) if name not in tensors]
        late = [name for name in node.operands if name not in known]
        if unknown or late:
            raise Malformed(f"op {place} has a tensor that is not there: {(unknown + late)[0]!r}")
        known.update(node.results)
        made.append(node)
    if not set(outputs) <= known:
        raise Malformed("an output is made by no op")
    dtype = parts.get("compute_dtype")
    if dtype not in DTYPES:
        raise Malformed(f"compute_dtype is {dtype!r:.40}")
    spec = canonical(GraphSpec("graph", tensors, tuple(made), inputs, outputs, DTYPES[dtype]))
    again = dict(graph_key(spec, Policy(allow_tf32=False)).components)
    for name, value in record.key:
        free = name.startswith("policy.") or name == "alignment_bytes"
        if not free and again.get(name) != value:
            raise Malformed(f"the graph that the key describes has another '{clean(name)}'")
    return spec


def _described(parts: Mapping[str, Any], name: str, tensors: dict[str, TensorSpec]) -> Any:
    rows = parts.get(name)
    if not isinstance(rows, Mapping):
        raise Malformed(f"{name} are not an object")
    return tuple(_add(key, rows[key], tensors) for key in rows)


def _add(name: str, described: Any, tensors: dict[str, TensorSpec]) -> str:
    found = tensor(name, described)
    if found is None or any(size < 0 for size in (*found.shape, *found.stride)):
        raise Malformed(f"tensor {name!r:.20} has no shape, strides and dtype")
    if not re.fullmatch("%[0-9]{1,6}", name) or name in tensors:
        raise Malformed(f"tensor {name!r:.20} is no number of its own")
    tensors[name] = found
    return name


def _node(place: int, row: Any) -> Node:
    if not isinstance(row, list) or len(row) != 4 or not isinstance(row[3], Mapping):
        raise Malformed(f"op {place} is not [op, inputs, outputs, attributes]")
    op, inputs, outputs, attrs = row
    if op not in OPS:
        raise Malformed(f"op {place} is {op!r:.40}, which is none")
    for names in (inputs, outputs):
        if not isinstance(names, list) or not all(isinstance(n, (str, type(None))) for n in names):
            raise Malformed(f"op {place} has ports that are no tensors")
    values = tuple((name, _attribute(value)) for name, value in sorted(attrs.items()))
    return Node(op, f"op{place}", tuple(inputs), tuple(outputs), values)


def _attribute(value: Any) -> Any:
    """An attribute out of the form that it has in a key."""
    if isinstance(value, list):
        return tuple(_attribute(item) for item in value)
    if isinstance(value, str):
        if value in DTYPES:
            return DTYPES[value]
        if re.fullmatch(r"-?0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4}", value):
            return float.fromhex(value)
    if isinstance(value, Mapping):
        raise Malformed(f"an attribute is {json.dumps(value):.40}")
    return value


# -- on a GPU --------------------------------------------------------------------------------------


def why_no_gpu() -> str:
    """Why nothing can be replayed here, empty where it can."""
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def is_here(record: PlanRecord, device_index: int) -> bool:
    """Whether the record was made in the environment of that device."""
    return record.env == env_components(env.env_key(device_index))


def policy_of(record: PlanRecord) -> Policy:
    """The policy of a record's key, under which plans are checked whatever the settings say.

    Raises :class:`PolicyError` where the key has one that cannot be.
    """
    parts = parsed(record.key)
    names = [each.name for each in fields(Policy) if each.name not in SEARCH_FIELDS]
    given = {name: parts[f"policy.{name}"] for name in names if f"policy.{name}" in parts}
    how = settings.current().verify
    return Policy(**given, verify="isolated" if how == "off" else how)


def on_gpu(record: PlanRecord, device_index: int) -> Check:
    """Checks the plans of a record on that device; the cache keeps which of them do not pass."""
    kept = Rejected(device_index)

    def check(step: StepPlan) -> tuple[str | None, Verified | None]:
        assert step.choice is not None
        policy = policy_of(record)
        with torch.cuda.device(device_index):
            why, passed = guard.check(step.spec, policy, step.choice, device_index, kept)
        if why is not None:
            kept.withdraw(step.spec, policy, step.choice, why)
        return why, passed

    return check
