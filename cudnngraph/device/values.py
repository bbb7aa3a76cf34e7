"""Values of thresholds that a search measured in place of the rules': for people, and as stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .import_rules import ANY, Stage
from .rules import DeviceRules, Values


def told(values: Values) -> str:
    """Values in place of the rules', for people."""
    by_name = {each.name: each.metadata for each in fields(DeviceRules)}
    return ", ".join(
        f"{name}={'any' if value == ANY else value} ({by_name[name]['decides']})"
        for name, value in values
    )


def known(data: Any, stages: tuple[Stage, ...]) -> Values:
    """Values as stored data names them; ValueError if a search of these stages tries no such."""
    if not isinstance(data, Mapping):
        raise ValueError("no thresholds by name")
    if not data:
        return ()
    tried = {each.name: each.metadata for each in fields(DeviceRules)}
    found: list[tuple[str, Any]] = []
    for name, value in data.items():
        if name not in tried or tried[name]["stage"] not in stages:
            raise ValueError(f"no threshold '{name}' is measured there")
        plain = tuple(value) if isinstance(value, list) else value
        if not any(type(plain) is type(each) and plain == each for each in tried[name]["others"]):
            raise ValueError(f"{name}={value!r:.40} is no value that is measured")
        found.append((name, plain))
    return tuple(found)
