"""The cache key: derived from the canonical graph, never written by hand.

A key is a list of named components, so that a miss can say which one differed. Names of graphs,
tensors and nodes are not in it, nor is any debug setting. A value without a canonical form raises
:class:`UnkeyableError`: such a graph is never cached.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import torch

from ..errors import UnkeyableError
from ..policy import SEARCH_FIELDS, Policy
from . import versions
from .spec import ALIGNMENT_BYTES, GraphSpec, TensorSpec, once

_AS_THEY_ARE = frozenset({int, str, bool, type(None)})


def encode(value: Any) -> Any:
    """The canonical JSON form of one value of a component."""
    if type(value) in _AS_THEY_ARE:  # most of a graph
        return value
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UnkeyableError(f"{value!r} is not finite and cannot be part of a cache key")
        return value.hex()
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise UnkeyableError(f"a mapping with keys that are not strings: {value!r}")
        return {name: encode(value[name]) for name in sorted(value)}
    raise UnkeyableError(f"a {type(value).__name__} cannot be part of a cache key: {value!r}")


@dataclass(frozen=True)
class Key:
    """Named components, each in canonical JSON form, and the digest over them all."""

    components: tuple[tuple[str, str], ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names and values, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.components).encode()).hexdigest()

    def __str__(self) -> str:
        return self.digest[:16]


@dataclass(frozen=True)
class Difference:
    """One component in which two keys differ; None where a key has no such component."""

    component: str
    a: str | None
    b: str | None


def _tensor(spec: TensorSpec) -> list[Any]:
    return [spec.shape, spec.stride, spec.dtype]


def graph_key(
    spec: GraphSpec, policy: Policy, *, alignment_bytes: Mapping[str, int] | None = None
) -> Key:
    """The key of a graph under a policy.

    ``policy.allow_tf32`` must be resolved (not None). ``alignment_bytes`` gives the pointer
    alignment promised for an input or output; 16 where nothing is said.
    """
    if policy.allow_tf32 is None:
        raise UnkeyableError("allow_tf32=None follows a switch outside; resolve it before keying")
    ids = spec.canonical_names()
    nodes = [
        [
            node.op,
            [None if name is None else ids[name] for name in node.inputs],
            [None if name is None else ids[name] for name in node.outputs],
            dict(node.attrs),
        ]
        for node in spec.nodes
    ]
    alignment = alignment_bytes or {}
    by_id = {ids[name]: name for name in (*spec.inputs, *spec.outputs)}
    parts: list[tuple[str, Any]] = [
        ("schema", versions.KEY),
        ("ops", nodes),
        ("inputs", {ids[name]: _tensor(spec.tensors[name]) for name in spec.inputs}),
        ("outputs", [[ids[name], *_tensor(spec.tensors[name])] for name in spec.outputs]),
        ("intermediates", {ids[name]: _tensor(spec.tensors[name]) for name in spec.intermediates}),
        ("compute_dtype", spec.compute_dtype),
        (
            "alignment_bytes",
            {key: alignment.get(name, ALIGNMENT_BYTES) for key, name in by_id.items()},
        ),
    ]
    components = tuple((name, json.dumps(encode(value))) for name, value in parts)
    return Key(components + _of_policy(policy))


@lru_cache(maxsize=64)  # the steps of a graph have one
def _of_policy(policy: Policy) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"policy.{f.name}", json.dumps(encode(getattr(policy, f.name))))
        for f in fields(policy)
        if f.name not in SEARCH_FIELDS
    )


_OF_STEPS = Policy(allow_tf32=False)


def step_digest(spec: GraphSpec) -> str:
    """The same for two steps, of one policy, that are equal but for names."""
    return once(spec, "step digest", _step_digest, spec)


def _step_digest(spec: GraphSpec) -> str:
    try:
        return graph_key(spec, _OF_STEPS).digest
    except UnkeyableError:  # the -inf of a converted mask: nothing is like it, now or later
        return uuid.uuid4().hex


def nearest(key: Key, others: Iterable[Key]) -> tuple[Key, tuple[Difference, ...]] | None:
    """The key that differs from ``key`` in the fewest components, and those; None without any."""
    compared = ((other, diff(key, other)) for other in others)
    return min(compared, key=lambda pair: len(pair[1]), default=None)


def diff(a: Key, b: Key) -> tuple[Difference, ...]:
    """Every component in which the two keys differ, in the order of ``a``."""
    first, second = dict(a.components), dict(b.components)
    names = dict.fromkeys((*first, *second))
    return tuple(
        Difference(name, first.get(name), second.get(name))
        for name in names
        if first.get(name) != second.get(name)
    )
