"""Shared by all rules: their type, the exception of one that does not apply, small helpers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value
from ...ops.base import LOW_PRECISION

if TYPE_CHECKING:
    from ..convert import Importer

Arguments = Mapping[str, Any]


class Skip(Exception):
    """A rule does not apply to these arguments."""


def gives_many(node: torch.fx.Node) -> bool:
    """Whether an op gives several results."""
    return isinstance(node.meta.get("val"), (tuple, list))


Rule = Callable[["Importer", Arguments], Any]


def spread(value: Any, rank: int) -> tuple[int, ...]:
    many = [value] if isinstance(value, int) else list(value)
    return tuple(many * rank if len(many) == 1 else many)


def first(a: Arguments) -> Any:
    """The operand: it is called self or input."""
    return a["self"] if "self" in a else a["input"]


def reads(node: torch.fx.Node, place: int) -> bool:
    """Whether something reads this one of a node's results."""
    return any(user.args[1] == place for user in node.users)


def cast_to(c: Importer, value: Value, dtype: torch.dtype) -> Value:
    """A value of any dtype as torch casts it, for which a kernel is generated."""
    form = (("dtype", ("dtype", str(dtype).removeprefix("torch."))),)
    made: Value = c.g.aten([value], "aten._to_copy.default", (("tensor", 0),), form)
    return made


def in_kernels(c: Importer, *values: Value) -> bool:
    """Whether one kernel is generated for several ops of these values: torch runs float64, an op at
    a time."""
    return c.kernels and all(value.dtype != torch.float64 for value in values)


def rounds_once(c: Importer, *values: Value) -> None:
    """Skip what torch rounds once and steps of ours would round several times."""
    if not c.kernels and any(value.dtype in LOW_PRECISION for value in values):
        raise Skip
