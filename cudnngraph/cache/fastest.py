"""What was measured fastest for a step of any graph, for choices that measure nothing: which plan,
and whether as one plan, by torch, or its product apart from what stands behind it.

A step of this graph may have been measured within another one, by a search on this machine or by
the run that made the seeds. The same step and policy are asked for, so that whatever the policy
bars was barred there too, and the same GPU and cuDNN. Where no seed is of these, one serves that is
of a near environment (:mod:`~cudnngraph.cache.near`). Whether TF32 is allowed is the same for a
step that multiplies no float32, in a graph of which another step does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from plans_cache.record import PlanRecord, digest, entry_id
from plans_cache.store import PlanStore

from ..backend import env
from ..backend.candidates import multiplies_float32
from ..backend.env import EnvKey
from ..backend.plan import Choice
from ..errors import UnkeyableError
from ..ir.key import graph_key, step_digest
from ..ir.spec import GraphSpec
from ..policy import Policy
from ..select.decision import StepPlan
from ..select.remembered import fastest, settled_way
from ..select.settled import NoPlan, Way, from_way, multiplies, settled, to_way
from . import near
from .codec import env_components
from .measured import Measured

BEFORE = "measured fastest for this step on such a GPU: a search before"
SEED = "measured fastest for this step on such a GPU: a seed"
NEAR_SEED = "measured fastest for this step: a seed ({})"


class Fastest:
    """See :data:`~cudnngraph.select.guard.Fastest`: what is kept in the directory, then the seeds
    of ``store``. ``device`` is a GPU of this machine, or the environment of one that is
    described."""

    def __init__(self, store: PlanStore, policy: Policy, device: int | EnvKey) -> None:
        self._store = store
        self._policy = policy
        self._device = device
        self._settled: dict[str, tuple[NoPlan, str] | None] = {}
        self._kept = {
            allowed: Measured(replace(policy, allow_tf32=allowed), device)
            for allowed in (False, True)
        }

    @cached_property
    def _seeds(self) -> list[tuple[str, Mapping[str, Any], str]]:
        """The lists of seeds' steps that may serve here, the nearest first: the digest of the
        environment, how steps are settled, and what is to be said of that."""
        device, found = self._device, []
        here = env_components(device if isinstance(device, EnvKey) else env.env_key(device))
        for listed in self._store.seed_steps():
            try:
                apart = near.apart_by(here, listed.env)
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
                continue  # no environment
            if apart is None or (apart.cudnn and self._policy.deterministic):
                continue
            said = NEAR_SEED.format(", ".join(apart.words)) if apart.words else SEED
            part = (digest(listed.env), listed.choices, said)
            found.append(((apart.cudnn, apart.gpu, listed.env), part))
        return [part for _, part in sorted(found, key=lambda each: each[0])]

    def __call__(self, spec: GraphSpec) -> tuple[Choice, str] | None:
        """The choice for a step and what it is known from, or None."""
        rows = [row for allowed in self._alike(spec) for row in self._kept[allowed].timed(spec)]
        found = fastest(rows)
        if found is not None:
            return found, BEFORE
        return next(
            ((way, said) for way, said in self._listed(spec) if isinstance(way, Choice)), None
        )

    def settled(self, spec: GraphSpec) -> tuple[NoPlan, str] | None:
        """Whether a choice by measurement has torch run a step, or its product apart, and what that
        is known from. None where it takes a plan, or none was made: the rules decide."""
        if not any(map(multiplies, spec.nodes)):
            return None
        digest = step_digest(spec)
        if digest not in self._settled:
            self._settled[digest] = self._found_settled(spec)
        return self._settled[digest]

    def _found_settled(self, spec: GraphSpec) -> tuple[NoPlan, str] | None:
        rows = [row for allowed in self._alike(spec) for row in self._kept[allowed].timed(spec)]
        way = settled_way(rows)
        way, said = (way, BEFORE) if way is not None else next(self._listed(spec), (None, ""))
        return None if way is None or isinstance(way, Choice) else (way, said)

    def _alike(self, spec: GraphSpec) -> tuple[bool, ...]:
        """What may have been said of TF32 where the step was measured."""
        return (bool(self._policy.allow_tf32),) if multiplies_float32(spec) else (False, True)

    def _listed(self, spec: GraphSpec) -> Iterator[tuple[Way, str]]:
        """What seeds say of a step, the nearest first."""
        try:
            key = _key(spec, self._policy) if self._seeds else ""
        except UnkeyableError:
            return
        for environment, ways, said in self._seeds:
            try:
                listed = ways.get(entry_id(key, environment))
                if listed is not None:
                    yield to_way(listed), said
            except (TypeError, ValueError):
                continue  # what is no way


def listed_steps(
    record: PlanRecord, spec: GraphSpec, steps: Sequence[StepPlan], policy: Policy
) -> dict[str, object]:
    """What a list of the steps of seeds says of a record for the legal graph ``spec``: how each
    step is settled, by the step's id."""
    if not near.is_measured(record):
        return {}
    ways = settled(spec, steps)
    return {entry_id(_key(part, policy), record.env_digest): from_way(way) for part, way in ways}


def _key(spec: GraphSpec, policy: Policy) -> str:
    """The digest of a step's key, which takes as long whatever else the policy lets steps be.
    Raises :class:`UnkeyableError`."""
    allowed = bool(policy.allow_tf32) and multiplies_float32(spec)
    return graph_key(spec, replace(policy, kernels=None, allow_tf32=allowed)).digest
