"""Tell two entries of the cache apart, component by component, in words."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from plans_cache import PlanRecord

from ..explain.text import clean
from ..ir.key import Difference, Key, diff
from .records import Stored, json_text, tensor

Row = tuple[str, str, str]  # component, here, there
_TENSORS = ("inputs", "outputs", "intermediates")
_LONGEST = 100


def whole_key(record: PlanRecord) -> Key:
    """The components of graph and environment in one key."""
    return with_env(Key(record.key), record.env)


def with_env(key: Key, env: Iterable[tuple[str, str]]) -> Key:
    """``key`` and the components of an environment, as ``env.…``, in one key."""
    return Key((*key.components, *((f"env.{name}", value) for name, value in env)))


def nearest(key: Key, entries: Iterable[Stored], *, env: bool) -> tuple[Stored, int] | None:
    """The entry that differs from ``key`` in the fewest components, and in how many.

    Among equals the one with fewest rows in :func:`rows`, then the newest. Without ``env`` the
    components of the environment are left out.
    """

    def distance(entry: Stored) -> tuple[int, int, float]:
        other = whole_key(entry.record) if env else Key(entry.record.key)
        found = diff(key, other)
        return len(found), len(rows(found)), -entry.record.created

    best = min(entries, key=distance, default=None)
    return None if best is None else (best, distance(best)[0])


def rows(differences: Iterable[Difference]) -> list[Row]:
    """One row for each thing that differs: a node's attribute, a tensor's type, a setting."""
    found: list[Row] = []
    for each in differences:
        a, b = _value(each.a), _value(each.b)
        if each.component == "ops" and _is_nodes(a) and _is_nodes(b):
            found += _ops(a, b)
        elif each.component in _TENSORS:
            found += _by_name(each.component, _tensors(a), _tensors(b))
        elif isinstance(a, Mapping) and isinstance(b, Mapping):
            found += _by_name(each.component, _texts(a), _texts(b))
        else:
            found.append((each.component, _text(a), _text(b)))
    return [(clean(name), here, there) for name, here, there in found]


class _Absent:
    """Stands for a component that a key does not have."""


def _value(text: str | None) -> Any:
    if text is None:
        return _Absent()
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _text(value: Any) -> str:
    """A value of a key for people: floats out of their hexadecimal form, and not too long."""
    if isinstance(value, _Absent):
        return "-"
    if isinstance(value, str):
        text = value.removeprefix("torch.")
        if re.fullmatch(r"-?0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4}", value):
            with suppress(OverflowError):
                text = repr(float.fromhex(value))
    else:
        text = json_text(value)
    text = clean(text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in values.items()}


def _tensors(value: Any) -> dict[str, str]:
    """Tensors by their number in the graph: a mapping of descriptions, or rows that begin so."""
    if isinstance(value, list):
        value = {str(row[0]): row[1:] for row in value if isinstance(row, list) and row}
    if not isinstance(value, Mapping):
        return {}
    types = {name: tensor(name, described) for name, described in value.items()}
    return {name: _text(value[name]) if kind is None else str(kind) for name, kind in types.items()}


def _by_name(component: str, a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Row]:
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) != b.get(name):
            yield f"{component} {name}", a.get(name, "-"), b.get(name, "-")


def _is_nodes(value: Any) -> bool:
    """Whether a value is a list of [op, inputs, outputs, attributes]."""
    return isinstance(value, list) and all(
        isinstance(node, list)
        and len(node) == 4
        and isinstance(node[0], str)
        and isinstance(node[3], Mapping)
        for node in value
    )


def _call(node: list[Any]) -> str:
    operands = node[1] if isinstance(node[1], list) else [node[1]]
    return _text(f"{node[0]}({', '.join(str(name) for name in operands)})")


def _ops(a: list[Any], b: list[Any]) -> Iterator[Row]:
    """Nodes that stand in one graph alone, and what differs within those that pair up."""
    matcher = difflib.SequenceMatcher(
        None, [node[0] for node in a], [node[0] for node in b], autojunk=False
    )
    for kind, a0, a1, b0, b1 in matcher.get_opcodes():
        if kind != "equal":
            mine, theirs = a[a0:a1], b[b0:b1]
            for place in range(max(len(mine), len(theirs))):
                here = _call(mine[place]) if place < len(mine) else "-"
                there = _call(theirs[place]) if place < len(theirs) else "-"
                yield f"op {min(a0, b0) + place}", here, there
            continue
        for place, (mine, theirs) in enumerate(zip(a[a0:a1], b[b0:b1], strict=True), a0):
            name = f"op {place} {mine[0]}"
            for port, here, there in (("reads", mine[1], theirs[1]), ("makes", mine[2], theirs[2])):
                if here != there:
                    yield f"{name} {port}", _text(here), _text(there)
            yield from _by_name(name, _texts(mine[3]), _texts(theirs[3]))
