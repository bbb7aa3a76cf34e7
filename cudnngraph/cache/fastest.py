"""What was measured fastest for a step of any graph, for choices that measure nothing.

A step of this graph may have been measured within another one, by a search on this machine or by
the run that made the seeds. The same step and policy are asked for, so that whatever the policy
bars was barred there too, and the same GPU and cuDNN. Where no seed is of these, one serves that is
of a near environment (:mod:`~cudnngraph.cache.near`). Whether TF32 is allowed is the same for a
step that multiplies no float32, in a graph of which another step does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from plans_cache.record import PlanRecord, digest, entry_id
from plans_cache.store import PlanStore

from ..backend import env
from ..backend.candidates import multiplies_float32
from ..backend.plan import Choice
from ..errors import UnkeyableError
from ..ir.key import graph_key
from ..ir.spec import GraphSpec
from ..policy import Policy
from ..select.decision import StepPlan
from ..select.remembered import fastest
from ..select.worker import from_choice, to_choice
from . import near
from .codec import env_components
from .measured import Measured

BEFORE = "measured fastest for this step on such a GPU: a search before"
SEED = "measured fastest for this step on such a GPU: a seed"
NEAR_SEED = "measured fastest for this step: a seed ({})"


class Fastest:
    """See :data:`~cudnngraph.select.guard.Fastest`: what is kept in the directory, then the seeds
    of ``store``."""

    def __init__(self, store: PlanStore, policy: Policy, device_index: int) -> None:
        self._store = store
        self._policy = policy
        self._index = device_index
        self._kept = {
            allowed: Measured(replace(policy, allow_tf32=allowed), device_index)
            for allowed in (False, True)
        }

    @cached_property
    def _seeds(self) -> list[tuple[str, Mapping[str, Any], str]]:
        """The lists of seeds' steps that may serve here, the nearest first: the digest of the
        environment, the choices, and what is to be said of one."""
        here, found = env_components(env.env_key(self._index)), []
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
        alike = (bool(self._policy.allow_tf32),) if multiplies_float32(spec) else (False, True)
        found = fastest([row for allowed in alike for row in self._kept[allowed].timed(spec)])
        if found is not None:
            return found, BEFORE
        try:
            key = _key(spec, self._policy) if self._seeds else ""
        except UnkeyableError:
            return None
        for environment, choices, said in self._seeds:
            try:
                listed = choices.get(entry_id(key, environment))
                if listed is not None:
                    return to_choice(listed), said
            except (TypeError, ValueError):
                continue  # what is no choice
        return None


def listed_steps(
    record: PlanRecord, steps: tuple[StepPlan, ...], policy: Policy
) -> dict[str, list[object]]:
    """What a list of the steps of seeds says of a record: the choice of cuDNN's for each step that
    was measured, by the step's id."""
    found: dict[str, list[object]] = {}
    for step in steps if near.is_measured(record) else ():
        if step.choice is not None and step.kind == "cudnn" and step.time_us is not None:
            id = entry_id(_key(step.spec, policy), record.env_digest)
            found[id] = from_choice(step.choice)
    return found


def _key(spec: GraphSpec, policy: Policy) -> str:
    """The digest of a step's key, which takes as long whatever else the policy lets steps be.
    Raises :class:`UnkeyableError`."""
    allowed = bool(policy.allow_tf32) and multiplies_float32(spec)
    return graph_key(spec, replace(policy, kernels=None, allow_tf32=allowed)).digest
