"""Generate one Python function that makes an executable's call, with everything fixed inlined.

A plan takes about 5 µs to launch. Loops over tensors and steps would take as long again, to find
the same shapes, strides and offsets at every call. The generated code has them as literals, as a
namedtuple's code has its fields. It serves programs of plans only: a torch step needs tensors, not
addresses.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..backend import handles
from ..backend.plan import Plan
from ..ir.spec import ALIGNMENT_BYTES, GraphSpec, TensorSpec

Call = Callable[[Sequence[Any]], "list[torch.Tensor] | None"]
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
Place = tuple[int, int]  # see Steps.behind


class Steps:
    """The steps of a program for the generated code: plans, and where their tensors lie.

    ``places`` numbers the tensors by name: the graph's, of which the program has the one numbered
    ``order[n]`` at place n (None: at place n), then those between the steps. ``behind`` says where
    the latter lie: (place, or -1 for the scratch memory; bytes behind its start). ``planned`` has
    for each step its graph, its plan and the offset of its own scratch memory.
    """

    def __init__(
        self,
        places: dict[str, int],
        behind: Sequence[Place],
        order: Sequence[int] | None,
        planned: Sequence[tuple[GraphSpec, Plan, int]],
        scratch_bytes: int,
    ) -> None:
        self.behind = behind
        self.planned = planned
        self.scratch_bytes = scratch_bytes
        self._places = places
        self._bound = len(places) - len(behind)
        self._order = order

    def address(self, name: str) -> str:
        """The code for the address of a tensor."""
        return self._at(self._places[name])

    def _at(self, place: int) -> str:
        if place < self._bound:
            return f"a{place if self._order is None else self._order[place]}"
        root, past = self.behind[place - self._bound]
        return f"{'base' if root < 0 else self._at(root)} + {past}"


def build_call(
    steps: Steps,
    inputs: Sequence[Form],
    outputs: Sequence[Form],
    over: Sequence[tuple[int, int]],
    device: torch.device,
    slots: Any,
    *,
    checked: bool,
) -> Call | None:
    """Return a function of the inputs that runs ``steps`` once and returns the outputs, or None if
    it cannot be generated. It is for this thread.

    Outputs are new tensors, except those that ``over`` writes into an input. The function returns
    None, without side effects, if the fast path does not apply: a tensor differs from its
    declaration (skipped if ``checked``), an address is not a multiple of ``ALIGNMENT_BYTES``,
    memory holds the negatives of a tensor's numbers, another device is current, the workspace in
    ``slots`` (by device and stream) is too small, or a CUDA graph is being captured.
    """
    index, many, empty = device.index, len(inputs), _fast_empty()
    names: dict[str, Any] = {
        **_here(index),
        "empty": torch.empty_strided,
        "device": device,
        "slots": slots,
    }
    code = [f"{', '.join(f't{at}' for at in range(many))}, = tensors"]
    for at, (shape, stride, dtype) in enumerate((*inputs, *outputs)):
        names |= {f"shape{at}": torch.Size(shape), f"stride{at}": stride, f"dtype{at}": dtype}
        names[f"size{at}"] = tuple(shape)
    if not checked:
        code[:0] = [f"if len(tensors) != {many}: return None"]
        code += [
            f"if getattr(t{at}, 'dtype', None) is not dtype{at} or t{at}.shape != shape{at} "
            f"or t{at}.stride() != stride{at} or t{at}.device != device: return None"
            for at in range(many)
        ]
    code += [f"a{at} = t{at}.data_ptr()" for at in range(many)]
    together, below = " | ".join(f"a{at}" for at in range(many)), ALIGNMENT_BYTES - 1
    code += [
        f"if ({together}) & {below} or {_negated(range(many))}: return None",
        f"if current() != {index} or capturing(): return None",
        f"stream = stream_of({index})",
        "base = 0",
    ]
    if steps.scratch_bytes:
        code += [
            f"slot = slots.get(({index}, stream))",
            f"if slot is None or slot.size_bytes < {steps.scratch_bytes}: return None",
            "base = slot.block.data_ptr()",
        ]
    places = dict(over)
    form = "empty(shape{0}, stride{0}, dtype=dtype{0}, device=device)"
    if empty is not None:
        names["empty"], form = empty, "empty(size{0}, stride{0}, dtype{0})"
    for at in range(many, many + len(outputs)):
        if at - many in places:
            code.append(f"t{at}, a{at} = t{places[at - many]}, a{places[at - many]}")
        else:
            code += [
                f"t{at} = {form.format(at)}",
                f"a{at} = t{at}.data_ptr()",
            ]
    code.append(f"if stream != entry.stream: follow({index})")
    for number, (spec, plan, offset) in enumerate(steps.planned):
        pack = [steps.address(name) for name in (*spec.inputs, *spec.outputs)]
        launched = _launched(number, plan, pack, f"base + {offset}", names)
        if launched is None:
            return None
        code += launched
    results = ", ".join(f"t{at}" for at in range(many, many + len(outputs)))
    made: Call = _function("tensors", [*code, f"return [{results}]"], names)
    return made


def _negated(places: Iterable[int]) -> str:
    """The code for whether the memory of any of these tensors holds the negatives of its numbers:
    a plan reads memory."""
    return " or ".join(f"t{at}.is_neg()" for at in places)


def _launched(
    number: int, plan: Plan, addresses: Sequence[str], scratch: str, names: dict[str, Any]
) -> list[str] | None:
    """The code that launches a plan, at addresses that are code; None where it cannot be."""
    if plan.native is None:
        return None
    launch, place = plan.native
    pack: list[str | int] = list(addresses)
    for position, past in plan.added:
        pack.append(past if position is None else f"{pack[position]} + {past}")
    pointers = array("Q", [each if isinstance(each, int) else 0 for each in pack])
    names |= {f"p{number}": pointers, f"launch{number}": launch}
    code = [f"p{number}[{at}] = {each}" for at, each in enumerate(pack) if type(each) is str]
    address, count = pointers.buffer_info()
    return [*code, f"launch{number}({address}, {count}, {scratch}, handle, {place})"]


@dataclass(frozen=True)
class Allocated:
    """A tensor to allocate: its place, its form, and those that lie in it: bytes past its start."""

    place: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    inside: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Turn:
    """A step of :func:`build_stepwise`: the places let go before it, what is allocated, the place
    of its workspace, and for a torch step the tensors that lie in others (place, that one's,
    elements past it, form). Tensors are by place: inputs, outputs, those between."""

    drops: tuple[int, ...]
    makes: tuple[Allocated, ...]
    workspace: int | None
    views: tuple[tuple[int, int, int, TensorSpec], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def build_stepwise(
    turns: Sequence[tuple[Turn, Plan | None, Any]],
    inside: Sequence[tuple[int, Sequence[tuple[int, int]]]],
    given: Sequence[int],
    results: Sequence[int],
    block: int,
    device: torch.device,
) -> Call | None:
    """Return a function of a list of inputs, which it empties, that returns the outputs.

    ``turns`` has for each step what it needs, its plan, and for a torch step what runs it on lists
    of inputs and outputs. ``inside`` are tensors that lie in inputs. The n-th of the list has the
    place ``given[n]``, the n-th output ``results[n]``; ``block`` is that of a tensor of bytes. The
    function returns None, without side effects, where :func:`build_call`'s does. None where it
    cannot be generated.
    """
    index, empty = device.index, _fast_empty()
    names: dict[str, Any] = {**_here(index), "empty": torch.empty_strided, "device": device}
    form = "empty(size{0}, stride{0}, dtype=dtype{0}, device=device)"
    if empty is not None:
        names["empty"], form = empty, "empty(size{0}, stride{0}, dtype{0})"
    together = " | ".join(f"a{at}" for at in given)
    code = [
        f"{', '.join(f't{at}' for at in given)}, = tensors",
        *(f"a{at} = t{at}.data_ptr()" for at in given),
        f"if ({together}) & {ALIGNMENT_BYTES - 1} or {_negated(given)} or current() != {index} "
        "or capturing(): return None",
        "tensors.clear()",
        f"if stream_of({index}) != entry.stream: follow({index})",
        *(f"a{at} = a{root} + {past}" for root, lie in inside for at, past in lie),
    ]
    for number, (turn, plan, run) in enumerate(turns):
        code += [f"t{at} = None" for at in turn.drops]
        for made in turn.makes:
            at = made.place
            names |= {f"size{at}": made.size, f"stride{at}": made.stride, f"dtype{at}": made.dtype}
            code += [f"t{at} = {form.format(at)}", f"a{at} = t{at}.data_ptr()"]
            code += [f"a{other} = a{at} + {past}" for other, past in made.inside]
        if plan is not None:
            pack = [f"a{at}" for at in (*turn.inputs, *turn.outputs)]
            scratch = "0" if turn.workspace is None else f"a{turn.workspace}"
            launched = _launched(number, plan, pack, scratch, names)
            if launched is None:
                return None
            code += launched
            continue
        shown = {}
        for at, root, past, spec in turn.views:
            names |= {f"shape{at}": spec.shape, f"lies{at}": spec.stride, f"kind{at}": spec.dtype}
            start = str(past) if root == block else f"t{root}.storage_offset() + {past}"
            whole = f"t{root}.view(kind{at})" if root == block else f"t{root}"
            shown[at] = f"{whole}.as_strided(shape{at}, lies{at}, {start})"
        lists = [
            ", ".join(shown.get(at, f"t{at}") for at in places)
            for places in (turn.inputs, turn.outputs)
        ]
        names[f"run{number}"] = run
        code.append(f"run{number}([{lists[0]}], [{lists[1]}])")
    made_last = ", ".join(f"t{at}" for at in results)
    made_call: Call = _function("tensors", [*code, f"return [{made_last}]"], names)
    return made_call


@dataclass(frozen=True)
class PlanLaunch:
    """The launch of a plan on fixed tensors: their addresses (of :meth:`Plan.pointers`) and that of
    its scratch memory, which ``block`` keeps alive. Called with a handle."""

    plan: Plan
    pointers: Any
    scratch: int
    block: torch.Tensor | None = None

    def __call__(self, handle: Any) -> None:
        self.plan.execute(self.pointers, self.scratch, handle)


def build_launch(
    launches: Sequence[PlanLaunch], index: int, stream: int, scratch: bool
) -> Callable[[], bool] | None:
    """A function of nothing for a row of launches; for this thread and ``stream``.

    It returns False, and has done nothing, where another stream or device is current, or a CUDA
    graph is being captured, which is to have a ``scratch`` memory of its own. None where it cannot
    be written.
    """
    names, code, handle = _here(index), [], False
    for number, each in enumerate(launches):
        bound = each.plan.bound(each.pointers, each.scratch, stream)
        if bound is not None:
            names[f"launch{number}"] = bound
            code.append(f"launch{number}()")
            continue
        handle = True
        if each.plan.native is None:
            return None
        launch, place = each.plan.native
        names |= {f"p{number}": each.pointers, f"launch{number}": launch}
        address, count = each.pointers.buffer_info()
        code.append(f"launch{number}({address}, {count}, {each.scratch}, handle, {place})")
    elsewhere = f"current() != {index} or stream_of({index}) != {stream}"
    if handle or scratch:
        elsewhere += " or capturing()"
    before = [f"if {elsewhere}: return False"]
    if handle:
        before.append(f"if entry.stream != {stream}: follow({index})")
    made: Callable[[], bool] = _function("", [*before, *code, "return True"], names)
    return made


def _here(index: int) -> dict[str, Any]:
    """Return the names that the code uses of torch, and this thread's handle for a device."""
    entry = handles.thread_handle(index)
    return {
        "current": torch._C._cuda_getDevice,
        "capturing": torch._C._cuda_isCurrentStreamCapturing,
        "stream_of": torch._C._cuda_getCurrentRawStream,
        "follow": handles.handle_on_current_stream,
        "entry": entry,
        "handle": entry.handle.backend_handle,
    }


def _function(arguments: str, code: Sequence[str], names: dict[str, Any]) -> Any:
    """The function that has these lines, among these names."""
    body = "\n    ".join(code)
    exec(f"def call({arguments}):\n    {body}\n", names)
    return names["call"]


@cache
def _fast_empty() -> Any | None:
    """torch's own short way to an empty tensor on the current GPU, of a size, strides and a dtype,
    which its compiler uses; None where it is not as known. In half the time of the public one."""
    try:
        guards: Any = torch._C._dynamo.guards
        made: Any = guards._empty_strided_cuda
        probe = made((2, 3), (1, 2), torch.float16)
        fits = (tuple(probe.shape), probe.stride(), probe.dtype) == ((2, 3), (1, 2), torch.float16)
    except Exception:
        return None
    return made if fits and probe.is_cuda else None
