"""One form of the inputs of a fused model, ready to run: its graph, and how its results are cut."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .bound import Bound
from .calls import Call, Pattern

#: The dims of results that have the size of an axis, by result and dim.
Cuts = Mapping[int, Mapping[int, int]]


@dataclass
class Form:
    """A bound graph for calls of one pattern.

    ``numbers`` are those of the call that it was made for, ``inputs`` the places of those that are
    inputs of the graph. ``cuts`` say which results are cut, by how a call is padded.
    """

    bound: Bound
    out_spec: Any
    pattern: Pattern
    numbers: Mapping[int, Any]
    inputs: frozenset[int]
    cuts: dict[Hashable, Cuts] = field(default_factory=dict)
    errors: tuple[tuple[float, float | None], ...] = ()  # of a padded call

    def given(self, call: Call) -> list[Any]:
        """What the graph reads of a call: tensors, as large as it takes them, and numbers."""
        padded = call.padded_leaves()
        return [
            leaf
            for place, leaf in enumerate(padded)
            if isinstance(leaf, torch.Tensor) or place in self.inputs
        ]

    def run(self, call: Call, *, reuse: bool) -> Any:
        """The results of a call, as the model gives them."""
        cuts = self.cuts[call.padding] if call.is_padded else {}
        sizes = {
            result: {dim: call.axes[axis][0] for dim, axis in dims.items()}
            for result, dims in cuts.items()
        }
        results = self.bound.run(self.given(call), reuse=reuse, sizes=sizes)
        return pytree.tree_unflatten(results, self.out_spec)


def difference(old: Form, new: Form, names: Mapping[int, str]) -> str:
    """In what the calls of two forms differ, for a message; ``names`` are of the new one's."""
    if old.pattern[0] != new.pattern[0]:
        return "which arguments are given"
    parts = zip(old.pattern[1], new.pattern[1], strict=True)
    found = [f"'{names[at]}'" for at, (a, b) in enumerate(parts) if a != b]
    found += [
        f"'{names[at]}'" for at, n in new.numbers.items() if repr(old.numbers.get(at)) != repr(n)
    ]
    return ", ".join(dict.fromkeys(found)) or "autocast"
