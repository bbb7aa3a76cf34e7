"""Entries near a graph that has none: what may differ, in which order they come, and their words.

An entry is near if it was measured and differs in these things alone:

1. the batch: extents of first dims, all by one factor, with the strides and attributes that follow;
2. cuDNN's version within one major version; not under ``deterministic``, since an engine's id may
   stand for another engine there;
3. the GPU, of the same compute capability.

Anything else makes an entry far: other ops, attributes, dtypes, layouts, alignment, policy. Of near
entries those of the same batch come first, then those of this cuDNN, of this GPU, of the nearest
batch, and the newest. Their choices are tried first and checked like any other.

A family is the digest of what may not differ. The store lists its entries by it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from plans_cache.record import Components, PlanRecord
from plans_cache.store import PlanStore

MOST = 3  # near entries that are tried

_TENSORS = ("inputs", "outputs", "intermediates")
_BATCH = "batch"  # stands in a family for an extent that may differ


@dataclass(frozen=True)
class Near:
    """A near entry, and how it differs in words: "batch 8 in place of 1"."""

    record: PlanRecord
    differs: str

    def __str__(self) -> str:
        return f"entry {self.record.id[:12]}" + (f" ({self.differs})" if self.differs else "")


def family(key: Components, env: Components) -> str | None:
    """The digest of what near entries have in common; None for components that are no graph's."""
    try:
        parts = {name: json.loads(value) for name, value in key}
        place = {name: json.loads(value) for name, value in env}
        tensors = _tensors(parts)
        common = [
            sorted(name for name in parts),
            [[name, value] for name, value in key if name not in ("ops", *_TENSORS)],
            [[name, *_without_batch(tensors[name])] for name in sorted(tensors)],
            [row[0] for row in parts["outputs"]],
            sorted(parts["inputs"]),
            [_node(row, tensors) for row in parts["ops"]],
            _not_to_differ(place),
        ]
        if not isinstance(place["gpu_name"], str) or "sm_count" not in place:
            return None
        return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError):
        return None


def _not_to_differ(place: Mapping[str, Any]) -> list[Any]:
    """What near environments have in common."""
    return [place["schema"], place["compute_capability"], int(place["cudnn_version"]) // 10000]


def _tensors(parts: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Shape, strides and dtype of each tensor of a key."""
    rows = {row[0]: row[1:] for row in parts["outputs"]}
    return {**parts["inputs"], **parts["intermediates"], **rows}


def _without_batch(tensor: list[Any]) -> list[Any]:
    shape, stride, dtype = tensor
    return [len(shape), len(stride), shape[1:], stride[1:], dtype]


def _node(row: list[Any], tensors: Mapping[str, list[Any]]) -> list[Any]:
    """A node without the batch in its attributes."""
    op, inputs, outputs, attrs = row
    shapes = [tensors[name][0] for name in (*outputs, *inputs) if name is not None]
    firsts = {tuple([len(shape), *shape[:1]]) for shape in shapes if shape}
    made = {
        name: [_BATCH, *value[1:]]
        if isinstance(value, list)
        and value
        and type(value[0]) is int
        and (len(value), value[0]) in firsts
        else value
        for name, value in attrs.items()
    }
    return [op, inputs, outputs, made]


def near(
    store: PlanStore, key: Components, env: Components, *, leave_out: str = ""
) -> tuple[Near, ...]:
    """The near entries of a graph in an environment, the nearest first, at most :data:`MOST`."""
    own = family(key, env)
    if own is None:
        return ()
    return nearest(key, env, (r for r in store.family(own) if r.id != leave_out))


def nearest(key: Components, env: Components, records: Iterable[PlanRecord]) -> tuple[Near, ...]:
    """Those of ``records`` that are near, the nearest first, at most :data:`MOST`."""
    own = family(key, env)
    found: list[tuple[tuple[Any, ...], Near]] = []
    for record in records:
        # What a record says of its family is not believed.
        if own is None or not is_measured(record) or family(record.key, record.env) != own:
            continue
        batch = _batch(key, record.key)
        if batch is None:
            continue
        apart = apart_by(env, record.env)
        if apart is None or (apart.cudnn and dict(key).get("policy.deterministic") != "false"):
            continue
        mine, theirs = batch
        distance = abs(math.log(theirs / mine))
        order = (mine != theirs, apart.cudnn, apart.gpu, distance, -record.created)
        words = [f"batch {theirs} in place of {mine}"] if mine != theirs else []
        words += apart.words
        found.append((order, Near(record, ", ".join(words))))
    return tuple(each for _, each in sorted(found, key=lambda pair: pair[0])[:MOST])


@dataclass(frozen=True)
class Apart:
    """How an environment that is near differs from this one: by cuDNN's version, by the GPU."""

    cudnn: bool
    gpu: bool
    words: tuple[str, ...]


def apart_by(here: Components, there: Components) -> Apart | None:
    """How an environment differs from this one, None if it is far. Raises for components that are
    no environment's, like :func:`family` for a key's."""
    ours, theirs = ({n: json.loads(v) for n, v in each} for each in (here, there))
    if _not_to_differ(ours) != _not_to_differ(theirs):
        return None
    versions = [int(each["cudnn_version"]) for each in (theirs, ours)]
    cudnn = versions[0] != versions[1]
    gpu = any(ours[name] != theirs[name] for name in ("gpu_name", "sm_count"))
    words = []
    if cudnn:
        words.append(f"cuDNN {_dotted(versions[0])} in place of {_dotted(versions[1])}")
    if gpu:
        words.append(f"{theirs['gpu_name']} in place of {ours['gpu_name']}")
    return Apart(cudnn, gpu, tuple(words))


def is_measured(record: PlanRecord) -> bool:
    """Whether a record's choice was made by measurement."""
    return record.policy.get("tune") == "autotune"


def _dotted(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _batch(wanted: Components, stored: Components) -> tuple[int, int] | None:
    """Extents of the first dim that differs, ours and theirs, if all differ by that factor; (1, 1)
    if none does, None if they differ in another way. Both keys are of one family."""
    ours, theirs = (
        _tensors({name: json.loads(value) for name, value in key}) for key in (wanted, stored)
    )
    found: tuple[int, int] | None = None
    for name, (shape, stride, _) in ours.items():
        other, other_stride, _ = theirs[name]
        if not shape:
            continue
        a, b = shape[0], other[0]
        if type(a) is not int or type(b) is not int or a < 1 or b < 1:
            return None
        if stride[0] != other_stride[0] and a != 1 and b != 1:
            return None  # another layout, or a batch that is shared by one and not by the other
        if a == b:
            continue
        if found is not None and Fraction(a, b) != Fraction(*found):
            return None
        if found is None or a < found[0]:
            found = a, b
    return found or (1, 1)
