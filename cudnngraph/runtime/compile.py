"""Compile a frozen graph: settle the policy, find or make its program.

An :class:`~cudnngraph.Executable` runs the steps that :mod:`~cudnngraph.select.heuristic` chose.
What is the same for two graphs of one key, the program, is kept in memory and shared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from functools import partial
from typing import Any, Protocol

import torch

from .. import settings
from ..arguments import NotPlain, checked, is_a, items, shown
from ..backend.candidates import multiplies_float32
from ..backend.plan import refuse_during_capture
from ..cache import lookup
from ..cache.fastest import Fastest
from ..cache.measured import Measured
from ..cache.state import STATE
from ..cache.stats import CacheStats
from ..device import tf32
from ..errors import BackendUnavailable, GraphError, NotSupported, PolicyError, Problem
from ..ir.canonical import canonical
from ..ir.key import Key, graph_key
from ..ir.spec import GraphSpec, once
from ..ops.table import OPS
from ..policy import Policy
from ..rewrite.passes import legalize
from ..select import cost
from ..select.alternatives import by_measurement
from ..select.decision import Decision, Hints, Selection, StepPlan
from ..select.effort import Effort
from ..select.guard import Builder, GuardedBench, how
from ..select.heuristic import by_torch, choose, reference_only
from ..select.kernels import Kernels
from ..select.progress import progress_bar
from ..select.remembered import RememberedBench
from .executable import Executable
from .first_launch import FirstRun
from .process import PROCESS, cache_stats
from .program import Program

_log = logging.getLogger(__name__)

_PROGRAMS_KEPT = 1024
SEARCH = "the search"  # the subject of the decision that says what it took


class _Together:
    """Searches for one model: the bench that they share, and what they have spent."""

    def __init__(self) -> None:
        self._benches: dict[tuple[Policy, torch.device], tuple[GuardedBench, RememberedBench]] = {}
        self.effort = Effort()

    def bench(self, policy: Policy, device: torch.device) -> tuple[GuardedBench, RememberedBench]:
        """The bench of a GPU, which has what the searches before have built."""
        if not self._benches:
            self.effort = Effort()  # the time of the first search begins
        place = policy, device
        if place not in self._benches:
            index = device.index
            kept = lookup.Rejected(index)
            bench = GuardedBench(policy, device, kept, partial(lookup.gpu_lock, index), self.effort)
            self._benches[place] = bench, RememberedBench(bench, Measured(policy, index))
        return self._benches[place]


_together: ContextVar[_Together | None] = ContextVar("together", default=None)


@contextmanager
def searching_together() -> Iterator[None]:
    """Let the searches within share what they build, and the time of one model."""
    token = _together.set(_Together())
    try:
        yield
    finally:
        _together.reset(token)


def _torch_allows_tf32(spec: GraphSpec) -> bool:
    """torch's own switches: cuDNN's for convolutions (on by default), matmul's for the rest (off).

    A graph with both may use TF32 where both allow it; one that multiplies no float32 has no use
    for it, and keys alike whatever the switches say.
    """
    rows = [OPS[node.op] for node in spec.nodes] if multiplies_float32(spec) else []
    allowed = []
    if any(row.has("convolution") for row in rows):
        allowed.append(tf32.in_convolutions())
    if any(row.name == "matmul" or row.has("grouped") or row.has("attention") for row in rows):
        allowed.append(tf32.in_matmuls())
    return bool(allowed) and all(allowed)


def generates(policy: Policy | None) -> bool:
    """Whether kernels are generated under a policy, which may leave it to the settings."""
    if not isinstance(policy, Policy) or policy.kernels is None:  # what is none is refused later
        return settings.current().kernels
    return policy.kernels


def resolve_policy(policy: Policy | None, options: Mapping[str, Any], spec: GraphSpec) -> Policy:
    """The policy with keyword options applied; what it leaves open is read from the settings, and
    from torch's TF32 switches for ``spec``."""
    known = [field.name for field in fields(Policy)]
    if not (policy is None or isinstance(policy, Policy)):
        raise PolicyError(f"policy {is_a(policy)}; expected a cudnngraph.Policy or None")
    unknown = [name for name in options if name not in known]
    if unknown:
        raise PolicyError(f"unknown option {', '.join(unknown)}; a policy has {', '.join(known)}")
    policy = replace(policy or Policy(), **options)
    if policy.tune is None:
        policy = replace(policy, tune=settings.current().tune)
    if policy.verify is None:
        policy = replace(policy, verify=settings.current().verify)
    policy = replace(policy, kernels=generates(policy))
    if policy.allow_tf32 is None:
        policy = replace(policy, allow_tf32=_torch_allows_tf32(spec))
    return policy


def _program(spec: GraphSpec, device: torch.device, policy: Policy, key: Key) -> Program:
    by_reference = settings.current().backend == "reference"
    place = (key.digest, device, by_reference)
    with PROCESS.lock:
        program = PROCESS.programs.get(place)
        if program is not None and (program.tuned or policy.tune != "autotune"):
            PROCESS.programs.move_to_end(place)
            STATE.counters.served("memory")
            return program
    spec = canonical(spec)
    tier = "reference"
    if device.type == "cpu":
        selection = reference_only(spec, "the tensors are on the CPU")
    elif by_reference:
        selection = reference_only(spec, "CUDNNGRAPH_BACKEND=reference")
    else:
        refuse_during_capture()
        with torch.cuda.device(device):
            whole = by_torch(spec)
            if whole is not None:
                selection, tier = whole, "torch"
            else:
                selection, tier = _chosen(spec, device, policy, key)
    if tier in ("reference", "torch"):
        STATE.counters.served(tier)
    first: FirstRun | None = None
    if tier == "built" and how(policy) != "off":
        first = FirstRun(selection.steps, policy, device, lookup.Rejected(device.index))
    program = Program(spec, device, selection, policy, tier, first)
    with PROCESS.lock:
        PROCESS.programs[place] = program
        while len(PROCESS.programs) > _PROGRAMS_KEPT:
            PROCESS.programs.popitem(last=False)
    return program


def _chosen(
    spec: GraphSpec, device: torch.device, policy: Policy, key: Key
) -> tuple[Selection, str]:
    """The plans for a canonical graph on a GPU, kept or made, and the tier that served them."""
    index = device.index
    kept = lookup.Rejected(index)

    def build(hints: Hints) -> Selection:
        kernels = Kernels.on(index) if policy.kernels else None
        if policy.tune == "autotune":
            return _searched(spec, device, policy, hints)
        first = Builder(policy, index, kept, Fastest(lookup.store(), policy, index))
        legal = legalize(spec, policy)
        return choose(legal, policy, first, first.expect, kernels, first.kernels)

    return lookup.selection_for(spec, policy, key, index, build)


def _searched(
    spec: GraphSpec, device: torch.device, policy: Policy, hints: Hints, *, brief: bool = False
) -> Selection:
    """The choice by measurement, which goes on with what is known of the steps."""
    kernels = Kernels.on(device.index) if policy.kernels else None
    together = _together.get() or _Together()
    with progress_bar("tuning", after_s=2.0) as tell:
        bench, remembered = together.bench(policy, device)
        effort = together.effort
        left_s = max(0.0, policy.total_s - effort.total_s)
        try:
            floor = cost.measured(remembered, spec).floor_us
            found = by_measurement(
                spec, policy, remembered, tell, kernels, hints, floor, brief=brief, left_s=left_s
            )
        finally:
            bench.rest()
    _log.info("search of '%s', %d steps: %s", spec.name, len(found.steps), effort)
    first, *others = found.steps
    spent = Decision(SEARCH, True, str(effort))
    first = replace(first, decisions=(*first.decisions, spent))
    return replace(found, steps=(first, *others))


def searched_briefly(
    spec: GraphSpec, device: torch.device, policy: Policy
) -> tuple[StepPlan, ...] | None:
    """The steps that a short search of a graph takes, with their times; None without any.

    Only what it measures is kept. ``policy`` must be resolved.
    """
    spec = canonical(spec)
    with torch.cuda.device(device):
        if by_torch(spec) is not None:
            return None
        try:
            return _searched(spec, device, policy, {}, brief=True).steps
        except NotSupported:
            return None


def default_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def device_of(device: torch.device | str | int | None) -> torch.device:
    """A device as torch understands one, None for the default. Raises :class:`PolicyError`."""
    if device is None:
        return default_device()
    try:
        return torch.device(device)
    except Exception:
        raise PolicyError(f"device={shown(device)}; expected a CPU or a CUDA device") from None


def compile(
    spec: GraphSpec,
    device: torch.device | str | int | None = None,
    *,
    policy: Policy | None = None,
    **options: Any,
) -> Executable:
    """An :class:`Executable` for ``spec``; see :meth:`cudnngraph.Graph.compile`."""
    place = device_of(device)
    if place.type not in ("cpu", "cuda"):
        raise PolicyError(f"device='{place}'; expected a CPU or a CUDA device")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(
            f"device='{place}' and torch sees no CUDA device; compile(device='cpu') runs on the "
            "reference executor, `cudnngraph doctor` says what is missing"
        )
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    resolved = resolve_policy(policy, options, spec)
    key = once(spec, ("key", resolved), graph_key, spec, resolved)
    return Executable(spec, place, resolved, key, _program(spec, place, resolved, key))


class Declared(Protocol):
    """A graph under construction: :class:`cudnngraph.Graph`."""

    def spec(self) -> GraphSpec:
        """The frozen graph."""


@checked
def warm_up(
    graphs: Iterable[Declared | GraphSpec],
    device: torch.device | str | int | None = None,
    *,
    policy: Policy | None = None,
    progress: bool | None = None,
    **options: Any,
) -> CacheStats:
    """Compile every graph ahead of its first use, so that no request has to wait for it.

    ``progress`` shows a bar; None shows it on a terminal. Returns the counters afterwards.
    """
    try:
        given = items(graphs)
    except NotPlain as reason:
        raise GraphError("warm_up", [Problem("graphs", str(reason), "several graphs")]) from None
    wrong = [
        Problem(f"graph {at}", is_a(graph), "a Graph or a GraphSpec")
        for at, graph in enumerate(given)
        if not isinstance(graph, GraphSpec) and not callable(getattr(type(graph), "spec", None))
    ]
    if wrong:
        raise GraphError("warm_up", wrong)
    specs = [graph if isinstance(graph, GraphSpec) else graph.spec() for graph in given]
    with progress_bar("compiling", show=progress) as tell:
        for done, spec in enumerate(specs):
            tell(done, len(specs))
            compile(spec, device, policy=policy, **options)
        tell(len(specs), len(specs))
    return cache_stats()
