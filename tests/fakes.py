"""Plans that are none, for tests of what is done with plans, where there is no GPU."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from cudnngraph.backend.plan import Candidate, Choice, Outcome
from cudnngraph.errors import NotSupported
from cudnngraph.ir import GraphSpec


def choice_for(spec: GraphSpec) -> Choice:
    """The plan that a fake builder finds: the same for the same graph."""
    number = zlib.crc32(str(spec).encode())
    return Choice(number % 60, (("STAGES", number % 5), ("TILE_SIZE", number % 17)))


class FakePlan:
    """What select.py, recorded.py and cache.py see of a plan."""

    def __init__(self, choice: Choice, workspace_bytes: int = 0) -> None:
        self.choice = choice
        self.workspace_bytes = workspace_bytes

    def serialize(self) -> bytes:
        return f"plan of {self.choice}".encode()


def builder(refuse: Callable[[GraphSpec], bool] = lambda spec: False) -> Callable[..., Any]:
    """A ``build`` for :func:`cudnngraph.select.heuristic`, refusing the graphs that are said."""

    def build(spec: GraphSpec) -> Any:
        if refuse(spec):
            raise NotSupported("this graph", [f"no engine for {node.op}" for node in spec.nodes])
        choice = choice_for(spec)
        need = 512 * (choice.engine % 3)
        outcomes = (
            Outcome(Candidate(0, Choice(61, ()), "eng61"), False, "does not launch"),
            Outcome(
                Candidate(1, Choice(choice.engine, (("STAGES", 9),)), "eng"),
                False,
                "needs 4096 bytes of workspace, over 2048",
                4096,
            ),
            Outcome(Candidate(2, choice, "eng"), True, "", need),
        )
        return FakePlan(choice, need), outcomes

    return build
