"""What can be learnt of a listed plan without a GPU and without a driver.

cuDNN says of every engine whether it is compiled at run time, and of every configuration how much
workspace it needs. Plans of precompiled engines are built too: that takes microseconds and needs no
driver either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from ..ir.spec import GraphSpec
from ..policy import Policy
from .lowering.driver import Lowered, first_line
from .plan import Candidate, restrict, why_passed_over

_REQUIRES = re.compile(r"Requires (\d+)")
_DESELECTED = "Deselecting execution plan"


@dataclass(frozen=True)
class Listed:
    """A plan that the heuristics propose.

    ``allowed`` is whether the policy lets it be used and, where its engine is precompiled, whether
    it builds; ``reason`` says why not. ``workspace_bytes`` is None where it is not known.
    """

    candidate: Candidate
    runtime_compiled: bool
    workspace_bytes: int | None
    allowed: bool
    reason: str = ""


def gpu_name(target: str) -> str:
    """The name of the GPU that ``target`` describes."""
    text = (resources.files(__package__) / "targets" / f"{target}.json").read_text()
    return str(json.loads(text)["deviceName"])


def examine(
    lowered: Lowered,
    candidates: Sequence[Candidate],
    spec: GraphSpec,
    policy: Policy,
    capability: int,
    frontend: Any,
) -> tuple[Listed, ...]:
    """What is known of each candidate on GPUs of ``capability``, 90 for 9.0.

    Bars every plan of ``lowered``: use it no further.
    """
    graph = lowered.graph
    refused = (frontend.cudnnGraphNotSupportedError, RuntimeError)
    restrict(lowered, spec, replace(policy, workspace_limit=None), frontend)
    compiled = {c.index: _runtime_compiled(graph, c.index, frontend) for c in candidates}
    errors: dict[int, str] = {}
    for candidate in candidates:
        if not compiled[candidate.index]:
            try:
                graph.build_plan_at_index(candidate.index)
            except refused as error:
                errors[candidate.index] = str(error)
    # Under a limit that every plan exceeds, the frontend refuses to build, and names the size.
    graph.deselect_workspace_greater_than(-1)
    listed = []
    for candidate in candidates:
        message = errors.get(candidate.index, "")
        need = None
        try:
            graph.build_plan_at_index(candidate.index)
        except refused as error:
            size = _REQUIRES.search(str(error))
            need = None if size is None else int(size.group(1))
            if _DESELECTED in str(error) and not message:
                message = str(error)
        passed_over = why_passed_over(candidate, spec, policy, capability)
        reason = passed_over or _why_not(message, need, policy)
        listed.append(Listed(candidate, compiled[candidate.index], need, not reason, reason))
    return tuple(listed)


def _runtime_compiled(graph: Any, index: int, frontend: Any) -> bool:
    notes = graph.get_behavior_notes_for_plan_at_index(index)
    return frontend.behavior_note.RUNTIME_COMPILATION in notes


def _why_not(message: str, need: int | None, policy: Policy) -> str:
    if _DESELECTED in message:
        barred = [] if policy.allow_tf32 else ["less exact than float32"]
        barred += ["not deterministic"] if policy.deterministic else []
        return f"barred by the policy: {' or '.join(barred) or 'deselected'}"
    if message:
        return f"does not build: {first_line(message)}"
    limit = policy.workspace_limit
    if limit is not None and need is not None and need > limit:
        return f"barred by the policy: needs {need} bytes of workspace, over {limit}"
    return ""
