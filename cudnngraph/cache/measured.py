"""Measurements of steps in one environment, kept in the store's directory for later searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch

from plans_cache.record import digest, entry_id

from .. import settings
from ..backend import env
from ..backend.env import EnvKey
from ..errors import UnkeyableError
from ..ir import versions
from ..ir.key import graph_key
from ..ir.spec import GraphSpec
from ..kernels import kernel
from ..policy import Policy
from ..select.remembered import RANKING
from .state import STATE


class Measured:
    """See :class:`~cudnngraph.select.remembered.Memo`. ``device`` is a GPU of this machine, or
    the environment of one that is described.

    A ranking depends on the library, the frontend and the rules of lowering; so it may be asked for
    elsewhere. A time depends on more: on torch, whose steps are timed too, and on the generator of
    kernels.
    """

    def __init__(self, policy: Policy, device: int | EnvKey) -> None:
        self._policy = replace(policy, kernels=None)  # a step takes as long whatever others may be
        self._device = device
        self._kept = STATE.measurements_of(settings.current().cache_dir)

    @cached_property
    def _ranked_in(self) -> dict[str, Any]:
        key = self._device if isinstance(self._device, EnvKey) else env.env_key(self._device)
        return {**asdict(key), "lowering": versions.LOWERING}

    @cached_property
    def _rankings(self) -> str:
        return _digest(self._ranked_in)

    @cached_property
    def _times(self) -> str:
        others = {"torch": torch.__version__, "generator": kernel.generator()}
        return _digest({**self._ranked_in, **others})

    def of(self, spec: GraphSpec) -> Sequence[Mapping[str, Any]]:
        """The rows of a step."""
        ids = [self._id(spec, place) for place in (self._rankings, self._times)]
        return [row for id in ids if id is not None for row in self._kept.of(id)]

    def add(self, spec: GraphSpec, row: dict[str, Any]) -> bool:
        """One more row of a step; whether it is on disk."""
        id = self._id(spec, self._rankings if row["what"] == RANKING else self._times)
        return id is not None and self._kept.add(id, row)

    def timed(self, spec: GraphSpec) -> Sequence[Mapping[str, Any]]:
        """The rows of a step but for cuDNN's ranking."""
        id = None if self._kept.empty else self._id(spec, self._times)
        return () if id is None else self._kept.of(id)

    def _id(self, spec: GraphSpec, place: str) -> str | None:
        """The id of a step; None if it has no key."""
        try:
            return entry_id(graph_key(spec, self._policy).digest, place)
        except UnkeyableError:
            return None


def _digest(components: Mapping[str, Any]) -> str:
    return digest(tuple((name, str(value)) for name, value in components.items()))
