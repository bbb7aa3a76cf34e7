"""The choice by measurement among the ways to import a model.

The import follows thresholds too: whether short sequences of attention are one, whose a group norm
is, whether images get a fourth channel. What they decide is done when a search begins. So a model
that is tuned is imported again by each threshold's other value; steps that two imports have in
common are measured once. The record of the first import's graph says which values were taken.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ..cache.distributed import is_distributed
from ..device.rules import Values, following, noting, others
from ..device.values import told
from ..errors import CannotImport, CudnnGraphError, PlanNotCached
from ..ir.spec import GraphSpec
from ..runtime.compile import Begun, begin, compile, searched_briefly, searching_together
from ..runtime.executable import Executable, import_of, note_import
from ..select.alternatives import budget_s, times_apart
from ..select.config import BEGUN_SHARE, MIN_GAIN
from .convert import Imported
from .export import HasGraph

_log = logging.getLogger(__name__)

One = tuple[str, Any]  # a threshold and another value of it
Again = Callable[[], Imported]  # imports a model anew, by the thresholds that hold then
Begins = Callable[[], bool]  # has other processes build plans, and says whether they do
Meanwhile = Callable[[Imported, Begins], Imported]


class Copied:
    """A module with a copy of its graph, which an import changes."""

    def __init__(self, module: HasGraph) -> None:
        self._module = module
        self.graph: torch.fx.Graph = copy.deepcopy(module.graph)
        for old, new in zip(module.graph.nodes, self.graph.nodes, strict=True):
            new.name = old.name  # a copy renames those of Python's own, such as "input"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def compiled(
    again: Again,
    device: torch.device,
    *,
    meanwhile: Meanwhile | None = None,
    **options: Any,
) -> tuple[Imported, Executable[Any] | None, Values]:
    """The import of a model that is to be run, compiled, and the values that it follows.

    ``again`` imports the model; ``options`` are those of
    :func:`~cudnngraph.runtime.compile.compile`. ``meanwhile`` is called with the first import and
    what has other processes build plans of it, and gives that import, or another in its place.
    """
    with searching_together():
        return _compiled(again, device, meanwhile, options)


def _compiled(
    again: Again,
    device: torch.device,
    meanwhile: Meanwhile | None,
    options: Mapping[str, Any],
) -> tuple[Imported, Executable[Any] | None, Values]:
    with noting() as asked:
        imported, begun = _settled(again, device, meanwhile, options)
    start = time.perf_counter()
    try:
        if imported.spec is None:
            return imported, None, ()
        executable = compile(imported.spec, device, begun=begun, **options)
    finally:
        if begun is not None:
            begun.cancel()
    if device.type != "cuda":
        return imported, executable, ()
    values, policy = import_of(executable), executable.policy
    new = executable.tier == "built"  # what is kept without a word of it is not measured again
    if values is None and policy.tune == "autotune" and new and not is_distributed():
        most_s = min(budget_s(imported.spec, policy), BEGUN_SHARE * policy.total_s)
        left_s = most_s - (time.perf_counter() - start)
        found = [one for one in others("import") if one[0] in asked]
        values = _measured(imported.spec, executable, again, found, left_s)
        note_import(executable, values)
    if not values:
        return imported, executable, ()
    if policy.tune != "autotune":
        policy = replace(policy, tune="cached")  # without its record it is not known to be faster
    try:
        other = _imported(again, values)
        if other is not None and other.spec is not None:
            return other, compile(other.spec, device, policy=policy), values
    except PlanNotCached as missing:
        _log.info("imported by the thresholds of the GPU: %s", missing)
    return imported, executable, ()


def _settled(
    again: Again, device: torch.device, meanwhile: Meanwhile | None, options: Mapping[str, Any]
) -> tuple[Imported, Begun | None]:
    """An import that stands, and what others have begun to build of it."""
    imported = again()
    if meanwhile is None or imported.spec is None:
        return imported, None
    spec, begun = imported.spec, None
    with ExitStack() as end:

        def begins() -> bool:
            nonlocal begun
            begun = begin(spec, device, **options)
            if begun is not None:
                end.callback(begun.cancel)
            return begun is not None

        settled = meanwhile(imported, begins)
        if settled is imported:
            end.pop_all()
            return imported, begun
    return settled, None


def _measured(
    spec: GraphSpec, executable: Executable[Any], again: Again, found: Sequence[One], left_s: float
) -> Values:
    """The values by which an import is fastest, tried one at a time while there is time left."""
    deadline = time.perf_counter() + left_s
    best, best_spec = executable.steps, spec
    taken: Values = ()
    for one in found:
        if one[0] in dict(taken):
            continue
        if time.perf_counter() >= deadline:
            break
        values = (*taken, one)
        other = _imported(again, values)
        if other is None or other.spec is None or other.spec == best_spec:
            continue
        steps = searched_briefly(other.spec, executable.device, executable.policy)
        if steps is None:
            continue
        mine, theirs = times_apart(best, steps)
        faster = theirs < MIN_GAIN * mine
        verb = "taken" if faster else "left"
        _log.info("%s: %.1f in place of %.1f us, %s", told((one,)), theirs, mine, verb)
        if faster:
            best, best_spec, taken = steps, other.spec, values
    return taken


def _imported(again: Again, values: Values) -> Imported | None:
    """The import by other values; None where there is none."""
    try:
        with following(values):
            return again()
    except CannotImport as error:
        _log.info("no import by %s: %s", told(values), error)
    except CudnnGraphError as error:
        _log.info("no graph by %s: %s", told(values), error)
    return None
