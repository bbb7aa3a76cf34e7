"""A model's graph, run: with every tensor bound, or on the caller's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from ..backend import handles
from ..device.allocation import strided_copy
from ..ir.spec import ALIGNMENT_BYTES, GraphSpec, TensorSpec, is_dense
from ..runtime.bound import CapturedCall
from ..runtime.executable import Executable
from .convert import Imported
from .effects import NO_EFFECTS, Effects
from .written import write

MAX_SHAPES = 8


class _StreamOrder:
    """Lets runs that share tensors wait for one another, whatever stream each is on."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._last = torch.cuda.current_stream(device)
        self._met = {self._last.cuda_stream}

    def follow(self, tensors: Iterable[Any]) -> None:
        """Let the current stream, if it is another, wait for the one of the last run; where it is
        new, ``tensors`` are known to be in use on it when they are freed."""
        raw = handles.raw_stream(self._index)
        if raw == self._last.cuda_stream or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self._index)
        stream.wait_stream(self._last)
        if raw not in self._met:
            self._met.add(raw)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    tensor.record_stream(stream)
        self._last = stream


class Bound:
    """A graph with every tensor bound: call it with nothing, as often as wanted.

    ``inputs`` are the tensors that a run reads, in the order of the model's tensors, None where
    nothing depends on one; ``results`` are what it makes: tensors that every run writes anew, or
    that never change, and values. ``tensors`` are all that are bound, by their names in the graph;
    ``graph`` is the CUDA graph, if it was captured.
    """

    def __init__(
        self,
        imported: Imported,
        executable: Executable | None,
        device: torch.device,
        *,
        capture: bool = False,
    ) -> None:
        self.imported = imported
        self.executable = executable
        self.inputs: list[torch.Tensor | None] = [None] * len(imported.inputs)
        self.written: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._gapped: set[str] = set()  # results
        self.graph: Any = None
        self.compared = False  # with eager
        self._call: Callable[[], None] = _nothing
        self._turns = _StreamOrder(device) if device.type == "cuda" else None
        if executable is None or imported.spec is None:
            return
        tensors = imported.spec.tensors
        given = {name: _aligned(tensor) for name, tensor in imported.constants.items()}
        made, self.inputs = input_tensors(imported, device)
        given |= made
        for name in imported.spec.outputs:
            self.written[name] = given[name] = tensors[name].empty(device)
            if not is_dense(tensors[name].shape, tensors[name].stride):
                self._gapped.add(name)
        self.tensors = given
        self._call = executable.bind(**given)
        if capture:
            captured = CapturedCall(self._call, device)
            self._call, self.graph = captured, captured.graph

    def __call__(self) -> None:
        self._call()

    def run(
        self,
        tensors: Sequence[Any],
        *,
        reuse: bool = False,
        sizes: Mapping[int, Mapping[int, int]] = MappingProxyType({}),
    ) -> list[Any]:
        """The results for ``tensors``; with ``reuse`` those that the next run overwrites.

        A number stands for a tensor without dims. ``sizes`` are those that results are cut to, by
        result and dim.
        """
        if self._turns is not None:
            kept = (each[1] for each in self.imported.results if not isinstance(each, str))
            self._turns.follow(chain(self.tensors.values(), kept))
        fill(self.inputs, tensors)
        self()
        results = assembled(
            self.imported,
            tensors,
            lambda name: self._result(name, reuse or bool(sizes)),
            self.written,
        )
        for place, result in enumerate(results) if sizes else ():
            if isinstance(result, torch.Tensor):
                results[place] = self._cut(place, result, sizes.get(place, {}), reuse)
        return results

    @property
    def routes(self) -> bool:
        """See :func:`routes`."""
        return self.imported.spec is not None and routes(self.imported.spec)

    def _cut(
        self, place: int, result: torch.Tensor, sizes: Mapping[int, int], reuse: bool
    ) -> torch.Tensor:
        """A result cut to sizes by dim; the caller's own unless it may be written over."""
        kind = self.imported.results[place]
        is_output = isinstance(kind, str) or kind[0] == "expand"
        result = cut_to(result, sizes)
        return result.clone() if is_output and not reuse else result

    def _result(self, name: str, reuse: bool) -> torch.Tensor:
        made = self.written[name]
        copied = strided_copy if name in self._gapped else torch.clone
        return made if reuse else copied(made)


def cut_to(result: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """The first elements of a result, as many as ``sizes`` say by dim."""
    for dim, size in sizes.items():
        result = result.narrow(dim, 0, size)
    return result


class Direct:
    """A graph that reads the caller's tensors and writes new ones: it holds constants alone.

    Its first results are new values of the tensors at the places ``written``, its last ones what
    ``effects`` read. Those of the numbers ``exchanged`` become the memory of their tensors.
    """

    def __init__(
        self,
        imported: Imported,
        executable: Executable | None,
        written: Sequence[int] = (),
        effects: Effects = NO_EFFECTS,
        exchanged: frozenset[int] = frozenset(),
    ) -> None:
        self.imported = imported
        self.executable = executable
        self.effects = effects
        self.exchanged = exchanged
        self.written = tuple(written)
        self.compared = False  # with eager
        self._inputs: list[tuple[int, TensorSpec] | torch.Tensor] = []  # by place, or constants
        self._behind = _read_behind(imported)
        if executable is None or imported.spec is None:
            return
        places = {name: at for at, name in enumerate(imported.inputs) if name is not None}
        for name in executable.spec.inputs:
            tensor = executable.spec.tensors[name]
            held = imported.constants.get(name)
            self._inputs.append((places[name], tensor) if held is None else _aligned(held))

    def run(self, tensors: list[Any]) -> list[Any]:
        """Write what is written, and return the other results; see :meth:`results`."""
        targets = [tensors[at] for at in self.written]
        results = self.results(tensors)
        return self.write(targets, results)

    def write(self, targets: Sequence[torch.Tensor], results: list[Any]) -> list[Any]:
        """Write the first results into tensors when effects have run, and return the others."""
        results = self.effects.split(results)
        write(targets, results[: len(targets)], self.exchanged)
        return results[len(targets) :]

    def results(self, tensors: list[Any]) -> list[Any]:
        """All results for ``tensors``, each a tensor of its own. The list is emptied, and each
        tensor let go when it is read no more."""
        made: dict[str, torch.Tensor] = {}
        if self.executable is not None:
            given = [
                each if isinstance(each, torch.Tensor) else _laid(tensors[each[0]], each[1])
                for each in self._inputs
            ]
            kept = {at: tensors[at] for at in self._behind}
            tensors.clear()
            outputs = self.executable.stepwise(given)
            made = dict(zip(self.executable.spec.outputs, outputs, strict=True))
        else:
            kept = dict(enumerate(tensors))
            tensors.clear()
        seen: set[str] = set()

        def output(name: str) -> torch.Tensor:
            first = name not in seen
            seen.add(name)
            return made[name] if first else strided_copy(made[name])

        return assembled(self.imported, kept, output, made)


def _read_behind(imported: Imported) -> frozenset[int]:
    """The places of tensors that are read when the graph has run, or shown by a result."""
    found: set[int] = set()
    for result in imported.results:
        if isinstance(result, str):
            continue
        kind, value = result
        place = value[0] if kind in ("view", "count") else value
        if kind != "value" and type(place) is int:
            found.add(place)
    return frozenset(found)


def _laid(tensor: torch.Tensor, form: TensorSpec) -> torch.Tensor:
    """A tensor with the strides of a form: itself if it has them."""
    if tensor.stride() == form.stride:
        return tensor
    return form.empty(tensor.device).copy_(tensor)


def routes(spec: GraphSpec) -> bool:
    """Whether whole numbers that are computed of floats say what is computed with what, as the
    choice of an expert does: where two floats are near each other, a rounding decides."""
    read = {name for node in spec.nodes for name in node.operands}
    kinds = {name: tensor.dtype for name, tensor in spec.tensors.items()}
    return any(
        kinds[name] in (torch.int32, torch.int64) and name in read
        for node in spec.nodes
        if any(kinds[operand].is_floating_point for operand in node.operands)
        for name in node.results
    )


def input_tensors(
    imported: Imported, device: torch.device
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor | None]]:
    """Tensors for the graph's inputs that are no constants, by name, and by the place of the
    model's tensor that is to be written into each, as :func:`fill` does it."""
    made: dict[str, torch.Tensor] = {}
    places: list[torch.Tensor | None] = [None] * len(imported.inputs)
    for place, name in enumerate(imported.inputs):
        if name is not None and imported.spec is not None:
            made[name] = imported.spec.tensors[name].empty(device).zero_()
            packed = imported.packed.get(name)
            places[place] = packed.image(made[name]) if packed else made[name]
    return made, places


def fill(places: Sequence[torch.Tensor | None], tensors: Sequence[Any]) -> None:
    """Write the model's tensors, or numbers, into those of a graph."""
    for mine, given in zip(places, tensors, strict=True):
        if isinstance(given, torch.Tensor) and mine is not None:
            mine.copy_(given)
        elif mine is not None:
            mine.fill_(given)


def assembled(
    imported: Imported,
    tensors: Mapping[int, Any] | Sequence[Any],
    output: Callable[[str], torch.Tensor],
    made: Mapping[str, torch.Tensor],
) -> list[Any]:
    """The results of a model in order, from the tensors it was given and the graph's outputs: each
    a tensor of its own by ``output``, or ``made`` where it is shown; on the CPU if the model has it
    there."""
    counted = _counted(imported, tensors)
    results: list[Any] = []
    for result in imported.results:
        kind: str
        value: Any
        kind, value = ("output", result) if isinstance(result, str) else result
        if kind == "output":
            results.append(output(value))
        elif kind == "expand":
            results.append(output(value[0]).expand(value[1]))
        elif kind in ("view", "shared"):
            source, shape, stride, past = value
            whole = tensors[source] if isinstance(source, int) else made[source]
            form = shape, stride, whole.storage_offset() + past
            results.append(whole.as_strided(*form) if kind == "view" else as_laid(whole, *form))
        elif kind == "count":
            results.append(counted[value])
        else:
            value = tensors[value] if kind == "input" else value
            results.append(value.clone() if kind == "copy" else value)
    for place in imported.elsewhere:
        results[place] = results[place].cpu()
    return results


def as_laid(
    whole: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor that shows the memory of another, of which it is no view."""
    shown = torch.empty(0, dtype=whole.dtype, device=whole.device)
    return shown.set_(whole.untyped_storage(), offset, tuple(shape), tuple(stride))


def _counted(
    imported: Imported, tensors: Mapping[int, Any] | Sequence[Any]
) -> dict[tuple[int, int], torch.Tensor]:
    """Tensors of whole numbers with what is added to them, by place and number: one launch for all
    to which the same is added."""
    kinds = (each for each in imported.results if not isinstance(each, str))
    counts = [value for kind, value in kinds if kind == "count"]
    made: dict[tuple[int, int], torch.Tensor] = {}
    for number in dict.fromkeys(number for _, number in counts):
        pairs = [pair for pair in counts if pair[1] == number]
        sums = torch._foreach_add([tensors[place] for place, _ in pairs], number)
        made.update(zip(pairs, sums, strict=True))
    return made


def _nothing() -> None:
    pass


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it begins at an address that plans do not take."""
    if tensor.data_ptr() % ALIGNMENT_BYTES == 0 or tensor.device.type == "cpu":
        return tensor
    return strided_copy(tensor)
