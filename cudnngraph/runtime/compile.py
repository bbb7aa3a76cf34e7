"""Compile a frozen graph: settle the policy, find or make its program.

An :class:`~cudnngraph.Executable` runs the steps that :mod:`~cudnngraph.select.heuristic` chose.
What is the same for two graphs of one key, the program, is kept in memory and shared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from .. import settings
from ..arguments import NotPlain, checked, is_a, items, shown
from ..backend.candidates import multiplies_float32
from ..backend.plan import refuse_during_capture
from ..cache import lookup
from ..cache.distributed import is_distributed
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
from ..partition.analysis import CutGraph
from ..policy import Policy, with_options
from ..rewrite.passes import legalize
from ..select import cost, workers
from ..select.alternatives import by_measurement
from ..select.config import SEARCHED_SHARE
from ..select.decision import Decision, Hints, Selection, StepPlan
from ..select.effort import Effort
from ..select.guard import Builder, GuardedBench, how
from ..select.heuristic import Builds, Cut, by_torch, choose, reference_only
from ..select.kernels import Kernels
from ..select.progress import progress_bar
from ..select.remembered import RememberedBench, keep_settled
from ..select.ruled import no_slower
from ..select.settled import settled
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
    policy = with_options(policy, options)
    if policy.tune is None:
        policy = replace(policy, tune=settings.current().tune)
    if policy.verify is None:
        policy = replace(policy, verify=settings.current().verify)
    policy = replace(policy, kernels=generates(policy))
    if policy.allow_tf32 is None:
        policy = replace(policy, allow_tf32=_torch_allows_tf32(spec))
    return policy


def _by_reference() -> bool:
    return settings.current().backend == "reference"


def _in_memory(key: Key, device: torch.device, policy: Policy) -> Program | None:
    """The program of a key that this process has, with the lock held."""
    program = PROCESS.programs.get((key.digest, device, _by_reference()))
    return program if program is None or program.tuned or policy.tune != "autotune" else None


def _program(
    spec: GraphSpec, device: torch.device, policy: Policy, key: Key, begun: Begun | None
) -> Program:
    by_reference = _by_reference()
    place = (key.digest, device, by_reference)
    with PROCESS.lock:
        program = _in_memory(key, device, policy)
        if program is not None:
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
                selection, tier = _chosen(spec, device, policy, key, begun)
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
    spec: GraphSpec, device: torch.device, policy: Policy, key: Key, begun: Begun | None
) -> tuple[Selection, str]:
    """The plans for a canonical graph on a GPU, kept or made, and the tier that served them."""

    def build(hints: Hints) -> Selection:
        if policy.tune == "autotune":
            return _searched(spec, device, policy, hints)
        if begun is not None:
            return begun.cut.selection()
        first, given, kernels = _builds(policy, device.index)
        try:
            return choose(legalize(spec, policy), policy, given, kernels)
        finally:
            first.cancel()

    return lookup.selection_for(spec, policy, key, device.index, build)


def _builds(policy: Policy, index: int) -> tuple[Builder, Builds, Kernels | None]:
    """What a choice without measuring builds by, and what has that built."""
    fastest = Fastest(lookup.store(), policy, index)
    first = Builder(policy, index, lookup.Rejected(index), fastest)
    given = first, first.expect, first.kernels, first.expect_kernels, fastest.settled
    return first, Builds(*given), Kernels.on(index) if policy.kernels else None


def _searched(
    spec: GraphSpec, device: torch.device, policy: Policy, hints: Hints, *, brief: bool = False
) -> Selection:
    """The choice by measurement, which goes on with what is known of the steps."""
    kernels = Kernels.on(device.index) if policy.kernels else None
    together = _together.get() or _Together()
    with progress_bar("tuning", after_s=2.0) as tell:
        bench, remembered = together.bench(policy, device)
        effort = together.effort
        left_s = SEARCHED_SHARE * max(0.0, policy.total_s - effort.total_s)
        try:
            floor = cost.measured(remembered, spec).floor_us
            found = by_measurement(
                spec, policy, remembered, tell, kernels, hints, floor, brief=brief, left_s=left_s
            )
            if not brief:
                found = no_slower(found, spec, policy, remembered, kernels, hints)
        finally:
            bench.rest()
        if policy.kernels and not brief:
            legal = legalize(spec, policy, found.instead)
            keep_settled(Measured(policy, device.index), settled(legal, found.steps))
    _log.info("search of '%s', %d steps: %s", spec.name, len(found.steps), effort)
    return found.told(last=[Decision(SEARCH, True, str(effort))])


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


def _place(device: torch.device | str | int | None) -> torch.device:
    """A device that graphs are compiled for, with its number."""
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
    return place


def _keyed(spec: GraphSpec, policy: Policy | None, options: Any) -> tuple[Policy, Key]:
    """The policy that holds for a graph, and the key."""
    resolved = resolve_policy(policy, options, spec)
    return resolved, once(spec, ("key", resolved), graph_key, spec, resolved)


def compile(
    spec: GraphSpec,
    device: torch.device | str | int | None = None,
    *,
    policy: Policy | None = None,
    begun: Begun | None = None,
    **options: Any,
) -> Executable:
    """An :class:`Executable` for ``spec``; see :meth:`cudnngraph.Graph.compile`.

    ``begun`` is what :func:`begin` gave for the same arguments.
    """
    place = _place(device)
    resolved, key = _keyed(spec, policy, options)
    return Executable(spec, place, resolved, key, _program(spec, place, resolved, key, begun))


# -- ahead of compile ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begun:
    """What workers have begun to build for a graph."""

    builder: Builder
    cut: Cut

    def cancel(self) -> None:
        """Build nothing ahead any more."""
        self.builder.cancel()


def is_kept(
    spec: GraphSpec,
    device: torch.device | str | int | None = None,
    *,
    policy: Policy | None = None,
    **options: Any,
) -> bool:
    """Whether :func:`compile` of the same arguments finds plans in memory or on disk, as far as
    that can be told without reading what is kept."""
    place = _place(device)
    if place.type != "cuda" or _by_reference():
        return False
    resolved, key = _keyed(spec, policy, options)
    with PROCESS.lock:
        if _in_memory(key, place, resolved) is not None:
            return True
    with torch.cuda.device(place):
        return lookup.is_kept(key, place.index)


def builds(
    spec: GraphSpec,
    device: torch.device | str | int | None = None,
    *,
    policy: Policy | None = None,
    **options: Any,
) -> bool:
    """Whether :func:`compile` of the same arguments has to build plans, as :func:`is_kept` tells.

    Not among the ranks of ``torch.distributed``, of which one builds and the others wait.
    """
    place = _place(device)
    if place.type != "cuda" or _by_reference() or is_distributed():
        return False
    resolved = resolve_policy(policy, options, spec)
    if resolved.tune == "cached" or torch.cuda.is_current_stream_capturing():
        return False
    with torch.cuda.device(place):
        return by_torch(spec) is None and not is_kept(spec, place, policy=resolved)


def begin(
    spec: GraphSpec,
    device: torch.device | str | int | None = None,
    *,
    policy: Policy | None = None,
    **options: Any,
) -> Begun | None:
    """Have workers build what :func:`compile` of the same arguments is to ask for, while its
    caller does something else.

    None if there is nothing to build, or nothing that is known before something is measured.
    """
    if not builds(spec, device, policy=policy, **options):
        return None
    place = _place(device)
    resolved, key = _keyed(spec, policy, options)
    one_plan = resolved.fallback == "error"
    if resolved.tune != "heuristic" or one_plan or how(resolved) != "isolated":
        return None
    with torch.cuda.device(place):
        if lookup.near_entries(key, place.index):
            return None  # they come first
        first, given, kernels = _builds(resolved, place.index)
        graph = CutGraph(legalize(canonical(spec), resolved))
        cut = Cut(graph, resolved, given, kernels)
        cut.begin()
    return Begun(first, cut)


def start_workers(device: torch.device, policy: Policy | None) -> None:
    """Have workers start if a graph will need them, whichever it is: if nothing is kept so far."""
    if device.type != "cuda" or _by_reference() or is_distributed():
        return
    policy = policy if isinstance(policy, Policy) else Policy()  # what is none is refused later
    tune, verify = policy.tune, policy.verify
    if (tune or settings.current().tune) == "cached" or not lookup.store().is_empty():
        return
    if how(replace(policy, verify=verify or settings.current().verify)) == "isolated":
        index = torch.cuda.current_device() if device.index is None else device.index
        workers.on(index).start()


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

    ``graphs`` are several :class:`~cudnngraph.Graph` or :class:`~cudnngraph.GraphSpec`, compiled
    for ``device`` as by ``Graph.compile``, with its ``policy`` and fields of one as keywords.
    ``progress`` shows a bar; None shows it on a terminal. Returns the counters afterwards. Raises
    :class:`GraphError` for what is no graph or has mistakes, and what ``compile`` raises.
    """
    try:
        given = items(graphs)
    except NotPlain as reason:
        raise GraphError(
            "warm_up", [Problem("graphs", str(reason), "several graphs, as in [graph]")]
        ) from None
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
