"""The table of all rules: each ATen op with how it is said in a graph of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..aten_ops import packets
from . import (
    activations,
    arithmetic,
    arrange,
    attention,
    complex_products,
    conv,
    experts,
    gradients,
    linear,
    losses,
    norm,
    pointwise,
    pooling,
    reductions,
    shape,
)
from .base import Rule

_PARTS = (
    *(conv, norm, pointwise, activations, linear, attention, shape, reductions, pooling),
    *(gradients, arithmetic, arrange, losses, experts, complex_products),
)

#: ATen op → how it is said here. What has no rule, or whose rule does not apply, stays torch's own.
RULES: Mapping[Any, Rule] = {
    packet: rule for part in _PARTS for name, rule in part.RULES.items() for packet in packets(name)
}

#: Ops of other libraries and of ours that a trace keeps whole, by their full names.
FOREIGN: Mapping[str, Rule] = {**experts.FOREIGN, **norm.FOREIGN, **gradients.FOREIGN}


def rule_of(op: Any) -> Rule | None:
    """How an overload of torch's, or of another library, is said in a graph of ours."""
    return RULES.get(op.overloadpacket) or FOREIGN.get(op._schema.name)
