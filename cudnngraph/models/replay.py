"""A graph of torch.compile as a CUDA graph: the backend's ``mode="reduce-overhead"``.

A replay writes the memory that the graph was captured with. What the model returns is copied out of
it; what a forward saves for its backward, and gradients, are lent: tensors that show that memory. A
call replays the graph only while nobody has what it lent before; else it runs as it is, into memory
of its own.

A backward is captured right behind its forward and in the same memory: it lets go of what was saved
when it has read it, and writes there. So do gradients, in a loop that lets go of them before each
forward. In one that does so later, before each backward, they are kept apart, or no forward could
be a replay; in one that never does, each backward runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..device.allocation import strided_copy
from ..errors import CaptureError
from ..runtime.bound import CapturedIn, GraphMemory
from .bound import Direct, as_laid

_torch: Any = torch
_weak: Any = StorageWeakRef
_uses = _torch._C._storage_Use_Count
_log = logging.getLogger(__name__)
WARM_UP = 2  # calls that run as they are
MOST_CAPTURES = 8  # of one form, each for other addresses
_LENT = object()


class _Address:
    """Memory of a CUDA graph, for a tensor to show: it keeps the graph, and owns nothing."""

    def __init__(self, address: int, size_bytes: int, memory: GraphMemory) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            **{"data": (address, False), "shape": (size_bytes,), "typestr": "|u1"},
            **{"strides": None, "version": 3},
        }


def _showing(tensor: torch.Tensor, memory: GraphMemory) -> torch.Tensor:
    """A tensor that shows the memory of one, and does not own it."""
    if not tensor.is_cuda:
        raise CaptureError(f"a result of a graph on a GPU is on {tensor.device}")
    address = _Address(tensor.data_ptr(), _end(tensor) - tensor.data_ptr(), memory)
    whole = torch.as_tensor(address, device=tensor.device).untyped_storage()
    shown = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return shown.set_(whole, 0, tensor.shape, tensor.stride())


def _end(tensor: torch.Tensor) -> int:
    """The address behind the last element of a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class _Lent:
    """Results in the memory of a CUDA graph, which anyone may have: those of its capture, which own
    that memory, and later tensors that show it."""

    def __init__(self, made: Sequence[torch.Tensor], memory: GraphMemory) -> None:
        self._made = [_weak(each.untyped_storage()) for each in made]
        self._shown = [_showing(each, memory) for each in made]
        # Held, since Python's own object for a storage counts as a use of it.
        self._storages = [each.untyped_storage() for each in self._shown]
        self._counts = [(each._cdata, _uses(each._cdata)) for each in self._storages]
        self._numbers = {_place_of(each): number for number, each in enumerate(made)}

    def lend(self) -> list[torch.Tensor]:
        """Tensors that show the results."""
        return [each.detach() for each in self._shown]

    def are_out(self) -> bool:
        """Whether anyone has one of the results."""
        if any(not each.expired() for each in self._made):
            return True
        self._made = []
        return any(_uses(at) > least for at, least in self._counts)

    def among(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """The places of the tensors that are results: the number of each."""
        found = ((at, self._numbers.get(_place_of(each))) for at, each in enumerate(tensors))
        return {at: number for at, number in found if number is not None}


class _Lending:
    """The memory of a forward's CUDA graph, and what is lent of it."""

    def __init__(self, memory: GraphMemory, saved: _Lent, *, alone: bool) -> None:
        self.memory = memory
        self.saved = saved
        self.alone = alone  # nothing of it is for the backward
        self.gradients: _Lent | None = None  # of its backward, where they lie there too


class Steps:
    """What a forward and its backward, in all their forms, know of one another."""

    def __init__(self) -> None:
        self.latest: _Lending | None = None  # of a forward's capture
        self.fresh = False  # it: there was no replay yet
        self.wanted = False  # another capture of the forward, for its backward
        self.apart = False  # gradients, which live on when a forward begins
        self.gradients: list[Any] = []  # of the last backward that ran as it is

    def notice(self) -> None:
        """Look for gradients that live on; to be called when a forward begins."""
        self.apart = self.apart or any(not each.expired() for each in self.gradients)


def copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies, with the strides, of tensors that show one memory, and that show one memory."""
    if len(tensors) == 1:
        return [strided_copy(tensors[0])]
    places = [each.data_ptr() for each in tensors]
    first, last = min(places), max(map(_end, tensors))
    count = (last - first) // tensors[0].element_size()
    memory = torch.empty(count, dtype=tensors[0].dtype, device=tensors[0].device)
    made = []
    for each, place in zip(tensors, places, strict=True):
        past = (place - first) // each.element_size()
        made.append(as_laid(memory, each.shape, each.stride(), past))
        core = [slice(1) if step == 0 else slice(None) for step in each.stride()]
        made[-1][tuple(core)].copy_(each[tuple(core)])
    return made


class Replayed:
    """A graph run on the caller's tensors, by a CUDA graph from its third call on.

    Inputs that lie where they lay at the call before, such as parameters, are read there; others
    are copied into tensors of the graph's. ``copied`` has the places of the results that are copied
    out. Where an input that the graph writes lies elsewhere, it runs as it is. A forward and its
    backward, :class:`ReplayedBackward`, have ``steps`` in common.
    """

    def __init__(
        self, bound: Direct, device: torch.device, copied: Collection[int], steps: Steps
    ) -> None:
        self.bound = bound
        self._device, self._copied, self._steps = device, frozenset(copied), steps
        self._kinds = bound.imported.results[len(bound.written) :]
        self._calls = self._captures = 0
        self._places: list[int] = []  # where the inputs lay, at the call before
        self._moves: set[int] = set()  # inputs that do not always lie there
        self._tied: dict[int, tuple[int, int]] = {}  # what the forward lent: number and address
        self._captured: CapturedIn | None = None
        self._own: dict[int, torch.Tensor] = {}  # by place, of the inputs that move
        self._made: list[Any] = []  # results; _LENT where they are
        self._together: list[list[int]] = []  # results that are copied, by whose memory they show
        self._lent: _Lent | None = None
        self._lending: _Lending | None = None  # of the forward

    def run(self, tensors: list[torch.Tensor]) -> list[Any]:
        """The results for ``tensors``, which are let go; see the class."""
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return self.bound.run(tensors)
        if self.bound.effects.calls:  # which may read numbers on the host
            return self.bound.run(tensors)
        with torch.cuda.device(self._device):
            self._begin()
            if self._calls < WARM_UP or self._captures > MOST_CAPTURES:
                self._calls += 1
                self._note(tensors)
                return self._as_it_is(tensors)
            return self._run(tensors)

    def _run(self, tensors: list[torch.Tensor]) -> list[Any]:
        steps, lending = self._steps, self._lending
        if lending is not None and lending.saved.are_out():
            return self._as_it_is(tensors)
        gradients = None if lending is None else lending.gradients
        out = gradients is not None and gradients.are_out()
        if out:
            steps.apart = steps.wanted = True
        anew = self._note(tensors)
        if not self._moves.isdisjoint(self.bound.written):
            return self._as_it_is(tensors)
        wanted = steps.wanted and self._captures < MOST_CAPTURES
        if not (anew or wanted or self._captured is None):
            if out:
                return self._as_it_is(tensors)
            steps.fresh = steps.fresh and steps.latest is not lending
            return self._replay(*self._parted(tensors))
        self._lending = None
        memory = GraphMemory()
        made = self._capture(tensors, memory)
        if made is None:
            return self._as_it_is(tensors)
        assert self._lent is not None
        steps.wanted, steps.fresh = False, True
        lent = {at for at, each in enumerate(self._made) if each is _LENT}
        alone = lent <= self._copied
        steps.latest = self._lending = _Lending(memory, self._lent, alone=alone)
        return made

    def _as_it_is(self, tensors: list[torch.Tensor]) -> list[Any]:
        return self.bound.run(tensors)

    def _begin(self) -> None:
        """Called before each run on a GPU."""
        self._steps.notice()

    def _note(self, tensors: Sequence[torch.Tensor], tied: Collection[int] = ()) -> bool:
        """Note where inputs lie; whether one lies elsewhere that did not before. Those that are
        ``tied`` do not count."""
        now = [each.data_ptr() for each in tensors]
        last, self._places = self._places, now
        if not last:
            return False
        moved = {at for at, place in enumerate(now) if place != last[at]} - self._moves
        moved.difference_update(tied)
        self._moves |= moved
        return bool(moved)

    def _capture(self, tensors: list[torch.Tensor], memory: GraphMemory) -> list[Any] | None:
        """Capture the graph, and replay it. None where that has failed or was done too often: then
        ``tensors`` are there still, None for those that the forward has lent."""
        self._captured, self._own, self._made, self._lent = None, {}, [], None
        self._captures += 1
        if self._captures > MOST_CAPTURES:
            _log.warning("inputs of a graph lie elsewhere at every call: it is not captured")
            return None
        self._own = {
            at: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)
            for at, each in enumerate(tensors)
            if at in self._moves
        }
        given = [self._own.get(at, each) for at, each in enumerate(tensors)]
        others = [None if at in self._tied else each for at, each in enumerate(tensors)]
        moved, shown = self._parted(tensors)
        try:
            lent = self._record(given, shown, memory)
        except RuntimeError as error:
            why = str(error).strip().partition("\n")[0]
            _log.warning("a graph is not captured, and runs as it is: %s", why)
            self._captured, self._lent, self._captures = None, None, MOST_CAPTURES + 1
            tensors.extend(others)  # type: ignore[arg-type]
            return None
        return self._replay(moved, shown, lent)

    def _record(
        self, given: list[torch.Tensor], shown: Collection[int], memory: GraphMemory
    ) -> list[torch.Tensor]:
        """Capture the graph on tensors, which are let go; the results that are lent."""
        bound, results = self.bound, list[Any]()

        def call() -> None:
            results.extend(bound.run(given))

        self._captured = CapturedIn(call, self._device, memory)
        made, lent, memories = list(results), [], dict[tuple[str, int], list[int]]()
        results.clear()  # which what was captured holds
        for at, (kind, each) in enumerate(zip(self._kinds, made, strict=True)):
            inside = isinstance(kind, str) or kind[0] not in ("input", "value")
            if inside and at not in shown and each.numel():
                lent.append(each)
                self._made.append(_LENT)
                if at in self._copied:
                    shares = not isinstance(kind, str) and kind[0] == "shared"
                    whose = ("memory", each.untyped_storage().data_ptr()) if shares else ("own", at)
                    memories.setdefault(whose, []).append(at)
            else:
                self._made.append(None if at in shown else each)
        self._lent, self._together = _Lent(lent, memory), list(memories.values())
        return lent

    def _parted(self, tensors: list[torch.Tensor]) -> tuple[dict[int, Any], dict[int, Any]]:
        """The inputs that move, by place, and the results that are inputs or show one; all others
        are let go."""
        moved = {at: tensors[at] for at in sorted(self._moves)}
        shown: dict[int, torch.Tensor] = {}
        for at, kind in enumerate(self._kinds):
            if isinstance(kind, str):
                continue
            if kind[0] == "input":
                shown[at] = tensors[kind[1]]
            elif kind[0] == "view" and isinstance(kind[1][0], int):
                source, shape, stride, past = kind[1]
                whole = tensors[source]
                shown[at] = whole.as_strided(shape, stride, whole.storage_offset() + past)
        tensors.clear()
        return moved, shown

    def _replay(
        self,
        moved: Mapping[int, torch.Tensor],
        shown: Mapping[int, torch.Tensor],
        first: Sequence[torch.Tensor] | None = None,
    ) -> list[Any]:
        """The results of a replay; ``first`` are those of the capture that are lent."""
        assert self._captured is not None
        assert self._lent is not None
        if moved:
            torch._foreach_copy_([self._own[at] for at in moved], list(moved.values()))
        self._captured()
        lent = iter(self._lent.lend() if first is None else first)
        results: list[Any] = []
        for at, made in enumerate(self._made):
            if at in shown:
                results.append(shown[at])
            elif made is _LENT:
                each = next(lent)
                results.append(each)
            else:
                results.append(made)
        for several in self._together:
            for at, copy in zip(several, copied([results[at] for at in several]), strict=True):
                results[at] = copy
        return results


class ReplayedBackward(Replayed):
    """A backward, which is captured and replayed behind its forward's capture and replays alone."""

    def _begin(self) -> None:
        pass

    def _run(self, tensors: list[torch.Tensor]) -> list[Any]:
        steps, latest = self._steps, self._steps.latest
        lies = (tensors[at].data_ptr() == place for at, (_, place) in self._tied.items())
        if self._captured is None or self._lending is None or self._lent is None or not all(lies):
            tied = {} if latest is None else latest.saved.among(tensors)
            if latest is not None and (latest.alone or (tied and steps.fresh)):
                steps.fresh = False
                return self._run_behind(latest, tied, tensors)
            steps.wanted = steps.wanted or bool(tied) or self._captured is None
            return self._as_it_is(tensors)
        if self._lent.are_out():
            return self._as_it_is(tensors)
        self._note(tensors, self._tied)
        if not self._moves <= self._own.keys():
            if self._lending.alone:
                return self._run_behind(self._lending, {}, tensors)
            steps.wanted = True
            return self._as_it_is(tensors)
        others = [None if at in self._tied else each for at, each in enumerate(tensors)]
        moved, shown = self._parted(tensors)
        saved = self._lending.saved
        if self._lending.gradients is not None and saved.are_out():  # whom a replay would write
            lent = saved.lend()
            again = [
                lent[self._tied[at][0]] if each is None else each for at, each in enumerate(others)
            ]
            return self._as_it_is(again)
        return self._replay(moved, shown)

    def _run_behind(
        self, lending: _Lending, tied: Mapping[int, int], tensors: list[torch.Tensor]
    ) -> list[Any]:
        """Capture and replay it behind its forward's capture, which lent the inputs ``tied``."""
        self._note(tensors)
        self._moves -= tied.keys()
        if not self._moves.isdisjoint(self.bound.written):
            return self._as_it_is(tensors)
        self._tied = {at: (number, tensors[at].data_ptr()) for at, number in tied.items()}
        apart = self._steps.apart or lending.alone
        made = self._capture(tensors, GraphMemory() if apart else lending.memory)
        if made is None:
            lent = lending.saved.lend()
            filled = [lent[tied[at]] if at in tied else each for at, each in enumerate(tensors)]
            return self._as_it_is(filled)
        self._lending, self._steps.wanted, self._steps.gradients = lending, False, []
        if not apart:
            lending.gradients = self._lent
        return made

    def _as_it_is(self, tensors: list[torch.Tensor]) -> list[Any]:
        made = self.bound.run(tensors)
        found = (each for each in made if isinstance(each, torch.Tensor))
        self._steps.gradients = [_weak(each.untyped_storage()) for each in found]
        return made
