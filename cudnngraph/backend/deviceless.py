"""Examine a listed plan without a GPU and without a driver.

cuDNN says of every engine whether it is compiled at run time, and of every configuration how much
workspace it needs. Plans of precompiled engines are built too: that takes microseconds and needs no
driver either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from ..errors import BackendUnavailable, NotSupported
from ..ir import versions
from ..ir.spec import GraphSpec
from ..policy import Policy
from . import env
from .candidates import (
    Candidate,
    fastest_tile_first,
    propose,
    restrict,
    tensor_cores_first,
    why_passed_over,
)
from .env import EnvKey
from .lowering.driver import Lowered, first_line, lower
from .tested import dotted

_REQUIRES = re.compile(r"Requires (\d+)")
_DESELECTED = "Deselecting execution plan"


@dataclass(frozen=True)
class Listed:
    """A plan that the heuristics propose.

    ``allowed`` is whether the policy lets it be used and, where its engine is precompiled, whether
    it builds; ``reason`` says why not. ``workspace_bytes`` is None where it is not known.
    """

    candidate: Candidate
    workspace_bytes: int | None
    allowed: bool
    reason: str = ""


def gpu_name(target: str) -> str:
    """The name of the GPU that ``target`` describes."""
    return str(json.loads(_target_text(target))["deviceName"])


def examine(
    lowered: Lowered,
    candidates: Sequence[Candidate],
    spec: GraphSpec,
    policy: Policy,
    capability: int,
    frontend: Any,
) -> tuple[Listed, ...]:
    """Examine each candidate for GPUs of ``capability``, 90 for 9.0.

    Bars every plan of ``lowered``: use it no further.
    """
    graph = lowered.graph
    refused = (frontend.cudnnGraphNotSupportedError, RuntimeError)
    restrict(lowered, spec, replace(policy, workspace_limit=None), frontend)
    errors: dict[int, str] = {}
    for candidate in candidates:
        if not candidate.runtime_compiled:
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
        listed.append(Listed(candidate, need, not reason, reason))
    return tuple(listed)


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


# -- targets ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def targets() -> tuple[str, ...]:
    """Names of the GPUs that can be planned for without having one.

    cuDNN wrote the description of the H200 on one. That of the H100 (SXM) is the same but for
    NVIDIA's numbers of its memory and cache.
    """
    folder = resources.files(__package__) / "targets"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir()))


def target_of(name: str) -> str:
    """The target of a name as people write it: "H200" is "nvidia-h200".

    Raises :class:`NotSupported` for a GPU that is not described.
    """
    found = re.sub(r"[\s_]+", "-", name.strip().lower())
    found = found if found.startswith("nvidia-") else f"nvidia-{found}"
    if found not in targets():
        subject = f"target '{name}'"
        known = f"known targets: {', '.join(targets())}"
        raise NotSupported(subject, [known], heading=f"{subject} is not known")
    return found


def propose_for(
    spec: GraphSpec, target: str, *, more: bool = False
) -> tuple[Lowered, list[Candidate]]:
    """cuDNN's ranking on the described GPU ``target``; needs the library, no device, no driver.

    Runtime-fused engines are listed only where some ``libcuda.so.1`` can be loaded. ``more`` asks
    the second ranking too, as a search does.
    """
    target = target_of(target)
    lowered = lower_for(spec, target)
    ranked = tensor_cores_first(propose(lowered, env.frontend(), more=more), spec)
    capability, sms = target_capability(target), target_processors(target)
    return lowered, fastest_tile_first(ranked, spec, capability, sms)


def lower_for(spec: GraphSpec, target: str) -> Lowered:
    """The frontend's graph for ``spec`` on the described GPU ``target``."""
    frontend = env.frontend()
    try:
        described = frontend.create_device_properties(_target_text(target))
    except (frontend.cudnnGraphNotSupportedError, RuntimeError) as error:
        version = dotted(env.cudnn_version())
        raise BackendUnavailable(
            f"cuDNN {version} does not take the description of '{target}' "
            f"({first_line(str(error))}); from 9.28 on it needs a CUDA driver library "
            "(libcuda.so.1) for it, also without a GPU: install NVIDIA's driver, or an older cuDNN"
        ) from error
    return lower(spec, frontend, device_property=described, sm_version=target_capability(target))


def target_capability(target: str) -> int:
    """Compute capability of the described GPU ``target``: 90 for 9.0."""
    return int(json.loads(_target_text(target))["deviceVer"]) // 10


def target_processors(target: str) -> int:
    """The number of multiprocessors of the described GPU ``target``."""
    return int(json.loads(_target_text(target))["multiProcessorCount"])


def env_key(target: str) -> EnvKey:
    """The environment that the described GPU ``target`` is with the versions loaded here."""
    return EnvKey(
        cudnn_version=env.cudnn_version(),
        frontend_version=env.frontend_version(),
        gpu_name=gpu_name(target),
        compute_capability=divmod(target_capability(target), 10),
        sm_count=target_processors(target),
        schema=versions.ENVIRONMENT,
    )


def _target_text(target: str) -> str:
    return (resources.files(__package__) / "targets" / f"{target}.json").read_text()
