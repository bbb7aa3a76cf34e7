"""Is an entry of the cache what it says: its record, its blob, its graph, and what its plans give.

The graph is built again from the key's components, and has to have that key. On a GPU of the
entry's environment each cuDNN step is replayed on random data and compared with the reference
executor in float64.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cudnngraph import reference
from cudnngraph.backend import env
from cudnngraph.backend.plan import replay
from cudnngraph.cli.entries import DTYPES, Stored, clean, parsed, tensor
from cudnngraph.dropped import attention, draws, explicit, recovered
from cudnngraph.errors import CudnnGraphError
from cudnngraph.ir import GraphSpec, Node, TensorSpec
from cudnngraph.key import graph_key
from cudnngraph.ops import OPS
from cudnngraph.policy import Policy
from cudnngraph.recorded import StaleRecord, env_components, steps_of
from cudnngraph.runtime import canonical
from cudnngraph.select import StepPlan
from cudnngraph.trial import (
    launcher,
    multiplies_fp8,
    random_inputs,
    relative_error,
    strided,
    tolerance,
)
from plans_cache import PlanRecord, PlanStore

RunStep = Callable[[StepPlan, Sequence[torch.Tensor]], Sequence[torch.Tensor]]

MAX_TENSOR_BYTES = 1 << 30


@dataclass(frozen=True)
class Verdict:
    """What became of one check: "ok", "none" (nothing to check), "skipped" or "failed"."""

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
    try:
        spec = graph_of(record)
        return OK, steps_of(record, spec)
    except StaleRecord as error:
        return Verdict("failed", f"stale: {error}"), ()
    except (Malformed, CudnnGraphError) as error:
        return Verdict("failed", str(error)), ()
    except Exception as error:  # of rules that never saw a graph nobody checked
        return Verdict("failed", f"not a graph: {type(error).__name__}: {error}"), ()


def check_plans(record: PlanRecord, steps: Sequence[StepPlan], run_step: RunStep) -> Verdict:
    """Whether ``run_step`` gives for each cuDNN step what the reference executor gives."""
    replayed = [step for step in steps if step.choice is not None]
    if not replayed:
        return Verdict("none")
    tf32 = dict(record.key).get("policy.allow_tf32") == "true"
    worst = 0.0
    for number, step in enumerate(steps, 1):
        if step.choice is None:
            continue
        large = [t for t in step.spec.tensors.values() if _bytes(t) > MAX_TENSOR_BYTES]
        if large:
            return Verdict("skipped", f"step {number} has a tensor over {MAX_TENSOR_BYTES} bytes")
        inputs = random_inputs(step.spec, torch.device("cpu"))
        try:
            spec, given = step.spec, inputs
            if draws(spec) and attention(spec) is not None:
                keep = recovered(spec, inputs, partial(run_step, step))
                spec, given = explicit(spec, inputs, keep)
            outputs = run_step(step, inputs)
        except (CudnnGraphError, RuntimeError) as error:
            return Verdict("failed", f"step {number} does not run: {_first_line(str(error))}")
        wanted = reference.run(spec, given, torch.float64)
        for name, out, ref in zip(step.spec.outputs, outputs, wanted, strict=True):
            error_ = relative_error(out, ref)
            bound = tolerance(out.dtype, tf32=tf32, fp8=multiplies_fp8(step.spec))
            worst = max(worst, error_)
            if not error_ <= bound:
                return Verdict(
                    "failed",
                    f"step {number}: '{name}' is off by {error_:.2g}, at most {bound:.2g} is right",
                )
    return Verdict("ok", f"off by {worst:.1e}")


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


def on_gpu(device_index: int) -> RunStep:
    """Runs steps by their (engine, knobs) on that device."""
    device = torch.device("cuda", device_index)

    def run(step: StepPlan, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert step.choice is not None
        spec = step.spec
        with torch.cuda.device(device):
            plan = replay(spec, step.choice, device_index)
            given = [
                strided(spec.tensors[name], value, device)
                for name, value in zip(spec.inputs, inputs, strict=True)
            ]
            outputs = []
            for declared in (spec.tensors[name] for name in spec.outputs):
                outputs.append(
                    torch.empty_strided(
                        declared.shape, declared.stride, dtype=declared.dtype, device=device
                    )
                )
            block = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device=device)
            launcher(plan, (*given, *outputs), block, device)()
            torch.cuda.synchronize(device)
            return [each.cpu() for each in outputs]

    return run
