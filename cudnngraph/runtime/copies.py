"""Copies and pickles of what is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..ir.spec import GraphSpec
from ..policy import Policy

if TYPE_CHECKING:
    from typing_extensions import Self


class Itself:
    """A copy is the object itself, so that a module that holds it can be copied."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Compiled(Itself):
    """What was compiled from a graph, which never changes: a pickle holds the graph, and is
    compiled where it is read."""

    spec: GraphSpec
    device: torch.device
    policy: Policy

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.spec, self.device, self.policy, self._checks())

    def _checks(self) -> bool | None:
        """``check`` of :meth:`Graph.compile` with ``training=True``; None without."""
        return None


def _again(spec: GraphSpec, device: torch.device, policy: Policy, check: bool | None) -> Any:
    from .trainable import compile_graph

    training = check is not None
    return compile_graph(spec, device, policy=policy, training=training, check=check, options={})
