"""Measurements of steps in this environment, kept in the store's directory for later searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch

from plans_cache.record import digest, entry_id

from .. import settings
from ..backend import env
from ..errors import UnkeyableError
from ..ir import versions
from ..ir.key import graph_key
from ..ir.spec import GraphSpec
from ..kernels import kernel
from ..policy import Policy
from .state import STATE


class Measured:
    """See :class:`~cudnngraph.select.remembered.Memo`.

    A time depends on more than a choice does: on torch, whose steps are timed too, on the frontend,
    on the rules of lowering and on the generator of kernels.
    """

    def __init__(self, policy: Policy, device_index: int) -> None:
        self._policy = replace(policy, kernels=None)  # a step takes as long whatever others may be
        self._index = device_index
        self._kept = STATE.measurements_of(settings.current().cache_dir)

    @cached_property
    def _env(self) -> str:
        whole = {
            **asdict(env.env_key(self._index)),
            "torch": torch.__version__,
            "lowering": versions.LOWERING,
            "generator": kernel.generator(),
        }
        return digest(tuple((name, str(value)) for name, value in whole.items()))

    def of(self, spec: GraphSpec) -> Sequence[Mapping[str, Any]]:
        """The rows of a step."""
        id = self._id(spec)
        return () if id is None else self._kept.of(id)

    def add(self, spec: GraphSpec, row: dict[str, Any]) -> None:
        """One more row of a step."""
        id = self._id(spec)
        if id is not None:
            self._kept.add(id, row)

    def _id(self, spec: GraphSpec) -> str | None:
        """The id of a step; None if it has no key."""
        try:
            return entry_id(graph_key(spec, self._policy).digest, self._env)
        except UnkeyableError:
            return None
