"""Numbers among the arguments of a model that change from call to call, such as time steps.

A number is part of the form of a call when it is first met. If it is another one in a later call
that is the same otherwise, it becomes an input of the graph: a tensor without dims. If the model
does not take it so, or gives other results then, each number has a form of its own, and the log
says so.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from numbers import Integral
from typing import Any

import torch

from .calls import Call
from .form import Form

_log = logging.getLogger(__name__)


class Numbers:
    """What is known of numbers that change, by the kind of call."""

    def __init__(self) -> None:
        self._inputs: dict[Hashable, frozenset[int]] = {}
        self._structures: set[str] = set()  # of the calls that have such inputs
        self._fixed: dict[Hashable, set[int]] = {}

    def inputs(self, call: Call) -> frozenset[int]:
        """The places of the numbers that are inputs of the graph for this call."""
        if call.structure not in self._structures:
            return frozenset()
        return self._inputs.get(call.kind, frozenset())

    def take(self, call: Call, inputs: frozenset[int]) -> None:
        """Let numbers be inputs from now on."""
        self._inputs[call.kind] = inputs
        self._structures.add(call.structure)

    def fix(self, call: Call, place: int) -> bool:
        """Let a number be a part of the form for good; whether that is new."""
        known = self._fixed.setdefault(call.kind, set())
        if place in known:
            return False
        known.add(place)
        self._inputs[call.kind] = self._inputs.get(call.kind, frozenset()) - {place}
        return True

    def changed(self, call: Call, forms: Iterable[Form]) -> list[int]:
        """The places of numbers that differ from those of a form of the same pattern, and may
        become inputs."""
        known, fixed = self.inputs(call), self._fixed.get(call.kind, set())
        pattern, found = call.pattern, dict[int, None]()
        for form in forms:
            if form.pattern == pattern:
                pairs = ((at, x, form.numbers[at]) for at, x in call.numbers.items())
                found.update((at, None) for at, a, b in pairs if repr(a) != repr(b))
        return [
            at for at in found if at not in known and at not in fixed and _fits(call.numbers[at])
        ]


def _fits(number: Any) -> bool:
    return not isinstance(number, Integral) or -(2**63) <= int(number) < 2**63


def as_tensor(number: Any, device: torch.device, *, wide: bool) -> torch.Tensor:
    """A number as a tensor that gives ops of tensors the dtypes that the number gives them.

    That is int64, or float32, or float64 in a model that has it (``wide``).
    """
    if isinstance(number, Integral):
        return torch.tensor(int(number), dtype=torch.int64, device=device)
    dtype = torch.float64 if wide else torch.float32
    return torch.tensor(float(number), dtype=dtype, device=device)


def warn_of(model: str, name: str, call: Call, place: int, reason: str, count: int) -> None:
    """Say in the log that each value of a number has a form of its own."""
    kind = type(call.numbers[place]).__name__
    _log.warning(
        "%s: argument '%s', %s %s, changes from call to call and cannot be an input of the graph, "
        "so each value of it is compiled: %d forms so far (%s); give the same few values, or make "
        "the model take it as a tensor",
        model,
        name,
        f"a{'n' * (kind[0] in 'aeiou')} {kind}",
        repr(call.numbers[place]),
        count,
        reason,
    )
