"""Numbers among the arguments of a model that change from call to call, such as time steps.

A number is part of the form of a call when it is first met. If it is another one in a later call
that is the same otherwise, it becomes an input of the graph: a tensor without dims. If the model
does not take it so, or gives other results then, each number has a form of its own, and the log
says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable
from numbers import Integral
from typing import Any

from .calls import Call
from .form import Form

_log = logging.getLogger(__name__)
_LARGEST = 3.4e38  # of float32, about


class Numbers:
    """What is known of numbers that change, by the kind of call."""

    def __init__(self) -> None:
        self._inputs: dict[Hashable, frozenset[int]] = {}
        self._structures: set[str] = set()  # of the calls that have such inputs
        self._fixed: dict[Hashable, set[int]] = {}  # parts of the form for good, by kind or pattern

    def inputs(self, call: Call) -> frozenset[int]:
        """The places of the numbers that are inputs of the graph for this call."""
        if call.structure not in self._structures:
            return frozenset()
        found = {at for at in self._inputs.get(call.kind, ()) if _fits(call.numbers[at])}
        return frozenset(found.difference(self._fixed.get(call.pattern, ())))

    def take(self, call: Call, inputs: frozenset[int]) -> None:
        """Let numbers be inputs from now on."""
        self._inputs[call.kind] = inputs | self._inputs.get(call.kind, frozenset())
        self._structures.add(call.structure)

    def fix(self, call: Call, place: int) -> bool:
        """Let a number be a part of the form for good; return whether that is new.

        It is so for tensors of these sizes only, if the number is an input for others.
        """
        kind = call.kind
        scope = call.pattern if place in self._inputs.get(kind, ()) else kind
        known = self._fixed.setdefault(scope, set())
        new = place not in known
        known.add(place)
        return new

    def changed(self, call: Call, forms: Iterable[Form]) -> list[int]:
        """The places of numbers that differ from those of a form of the same pattern, and may
        become inputs."""
        pattern, found = call.pattern, dict[int, None]()
        for form in forms:
            if form.pattern == pattern:
                pairs = ((at, x, form.numbers[at]) for at, x in call.numbers.items())
                found.update((at, None) for at, a, b in pairs if repr(a) != repr(b))
        fixed = self._fixed.get(call.kind, set()) | self._fixed.get(pattern, set())
        return [at for at in found if at not in fixed and _fits(call.numbers[at])]


def _fits(number: Any) -> bool:
    """Whether a tensor can hold a number: as an int64, or as a float32."""
    if isinstance(number, Integral):
        return -(2**63) <= int(number) < 2**63
    return not math.isfinite(number) or abs(float(number)) <= _LARGEST


def warn_of(model: str, name: str, number: Any, reason: str, count: int) -> None:
    """Say in the log that each value of a number has a form of its own."""
    _log.warning(
        "%s: argument '%s' (now %r) changes from call to call and cannot be an input of the graph, "
        "so each value of it is compiled: %d forms so far (%s); call with few values, or let the "
        "model take a tensor there",
        model,
        name,
        number,
        count,
        reason,
    )
