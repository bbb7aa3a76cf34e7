"""A graph of torch.compile as a CUDA graph: the backend's ``mode="reduce-overhead"``.

A replay writes the memory that the graph was captured with. What the model returns is copied out of
it; what a forward saves for its backward, and gradients, are not. So a call replays the graph only
while nothing that it gave before is alive; else it runs as it is, into memory of its own. In a loop
that lets go of its gradients before each backward every step is a replay.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..runtime.bound import CapturedCall
from .bound import Direct

_torch: Any = torch
_weak: Any = StorageWeakRef
_log = logging.getLogger(__name__)
WARM_UP = 2  # calls that run as they are
MOST_CAPTURES = 4  # of one form, each for other addresses


class Replayed:
    """A graph run on the caller's tensors, by a CUDA graph from its third call on.

    Inputs that lie where they lay at the call before, such as parameters, are read there; others
    are copied into tensors of the graph's. ``copied`` has the places of the results that are copied
    out. Where an input that the graph writes lies elsewhere, it runs as it is.
    """

    def __init__(self, bound: Direct, device: torch.device, copied: Collection[int]) -> None:
        self.bound = bound
        self._device, self._copied = device, frozenset(copied)
        self._calls = self._captures = 0
        self._places: list[int] = []  # where the inputs lay, at the call before
        self._moves: set[int] = set()  # inputs that do not always lie there
        self._captured: CapturedCall | None = None
        self._own: list[Any] = []  # inputs as the graph reads them
        self._made: list[Any] = []
        self._given: list[Any] = []  # of what the last replay gave

    def run(self, tensors: list[torch.Tensor]) -> list[Any]:
        """The results for ``tensors``; see the class."""
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return self.bound.run(tensors)
        if self.bound.effects.calls:  # which may read numbers on the host
            return self.bound.run(tensors)
        if self._calls < WARM_UP or self._captures > MOST_CAPTURES:
            self._calls += 1
            self._note(tensors)
            return self.bound.run(tensors)
        with torch.cuda.device(self._device):
            if not all(each.expired() for each in self._given):
                return self.bound.run(tensors)
            anew = self._note(tensors)
            if not self._moves.isdisjoint(self.bound.written):
                return self.bound.run(tensors)
            if anew or self._captured is None:
                self._capture(tensors)
            if self._captured is None:
                return self.bound.run(tensors)
            moved = sorted(self._moves)
            if moved:
                targets, sources = ([of[at] for at in moved] for of in (self._own, tensors))
                torch._foreach_copy_(targets, sources)
            self._captured()
            return self._results(tensors)

    def _note(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Note where inputs lie; whether one lies elsewhere that did not before."""
        now = [each.data_ptr() for each in tensors]
        last, self._places = self._places, now
        if not last:
            return False
        moved = {at for at, place in enumerate(now) if place != last[at]} - self._moves
        self._moves |= moved
        return bool(moved)

    def _capture(self, tensors: Sequence[torch.Tensor]) -> None:
        self._captured, self._made, self._given = None, [], []
        self._captures += 1
        if self._captures > MOST_CAPTURES:
            _log.warning("inputs of a graph lie elsewhere at every call: it is not captured")
            return
        self._own = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)
            if at in self._moves
            else each
            for at, each in enumerate(tensors)
        ]

        def call() -> None:
            self._made = self.bound.run(list(self._own))

        self._captured = CapturedCall(call, self._device, warm=False)
        self._own = [each if at in self._moves else None for at, each in enumerate(self._own)]

    def _results(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        found: list[Any] = []
        self._given = []
        kinds = self.bound.imported.results[len(self.bound.written) :]
        for at, (kind, made) in enumerate(zip(kinds, self._made, strict=True)):
            if not isinstance(kind, str) and kind[0] in ("input", "value"):
                found.append(tensors[kind[1]] if kind[0] == "input" else made)
            elif not isinstance(kind, str) and kind[0] == "view" and isinstance(kind[1][0], int):
                source, shape, stride, past = kind[1]
                whole = tensors[source]
                found.append(whole.as_strided(shape, stride, whole.storage_offset() + past))
            elif at in self._copied:
                found.append(made.clone())
            else:
                alias = _torch.from_dlpack(
                    _torch.to_dlpack(made)
                )  # the same memory, counted by itself
                self._given.append(_weak(alias.untyped_storage()))
                found.append(alias)
        return found
