"""Execution plans: what names one, execute it, serialize it, load it.

A choice is (engine, knobs), never an index: indices shift between graphs and versions. A built plan
belongs to the thread that built it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from ..device.allocation import outside_graph_pool
from ..errors import CaptureError, NotSupported
from ..ir import versions
from . import env, handles
from .lowering.context import Alias, Constant, Extra
from .lowering.driver import first_line

_SEEN = 8  # versions of the frontend that a check remembers
KERNEL = 1_000_000  # the engine's id of generated kernels: cuDNN counts its own from 0


@dataclass(frozen=True)
class Choice:
    """The name of a plan for a given graph: the engine's id and the value of each knob.

    A generated kernel is a plan too: its engine is :data:`KERNEL`, its knobs are its schedule.
    """

    engine: int
    knobs: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        knobs = " ".join(f"{name}={value}" for name, value in self.knobs)
        engine = "kernel" if self.engine == KERNEL else f"engine {self.engine}"
        return engine + (f" ({knobs})" if knobs else "")


@dataclass(frozen=True)
class Verified:
    """Proof that a plan ran on random data and was right: its error, the GPU and the versions.

    ``error`` is the largest relative one; None if there was no memory to compare results. ``also``
    are other versions of the frontend, with which the plan passed before.
    """

    error: float | None
    gpu: str
    cudnn: int
    frontend: str
    torch: str
    also: tuple[str, ...] = ()

    @classmethod
    def here(cls, device_index: int, error: float | None) -> Verified:
        """On this GPU, by what is loaded."""
        name = env.device_identity(device_index).name
        return cls(error, name, env.cudnn_version(), env.frontend_version(), torch.__version__)

    def holds_for(self, choice: Choice, frontend: str) -> bool:
        """Whether the plan passed with that version of the frontend, which builds a plan's graph.

        A generated kernel has nothing of the frontend.
        """
        return choice.engine == KERNEL or frontend in (self.frontend, *self.also)

    def after(self, earlier: Verified | None) -> Verified:
        """This check of a plan, with the frontends of an earlier one in the same environment."""
        if earlier is None:
            return self
        seen = dict.fromkeys((earlier.frontend, *earlier.also))
        return replace(self, also=tuple(each for each in seen if each != self.frontend)[:_SEEN])


class Plan:
    """A built plan: ready to execute in the thread that built it.

    ``index`` is its place in the graph's list of plans; None for a plan that was loaded, of which
    its graph has no other. ``added`` says what stands behind the addresses of the graph's tensors
    at a launch: (None, an address), or (the place of a tensor, bytes past it).
    """

    def __init__(
        self,
        graph: Any,
        index: int | None,
        choice: Choice,
        device_index: int,
        uids: Sequence[int],
        extras: Sequence[Extra],
    ) -> None:
        self._graph = graph
        self.blob: bytes | None = None  # as a worker serialized it, where that is kept
        self.verified: Verified | None = None
        self.choice = choice
        self.device_index = device_index
        self.workspace_bytes = int(
            graph.get_workspace_size()
            if index is None
            else graph.get_workspace_size_plan_at_index(index)
        )
        self._index = index
        self._extras = tuple(extras)
        self._uids = (*uids, *(extra.uid for extra in extras))
        device = torch.device("cuda", device_index)
        fixed = [extra for extra in extras if isinstance(extra, Constant)]
        self._constants = {extra.uid: extra.tensor("cpu") for extra in fixed if extra.on_host}
        there = [extra for extra in fixed if not extra.on_host]
        if there:
            self._constants |= outside_graph_pool(
                device, lambda: {extra.uid: extra.tensor(device) for extra in there}
            )
            torch.cuda.current_stream(device).synchronize()  # any stream may read them from now on
        self.added = tuple(
            (extra.position, extra.offset_bytes)
            if isinstance(extra, Alias)
            else (None, self._constants[extra.uid].data_ptr())
            for extra in extras
        )
        self.native = _native_call(graph, index, self._uids)

    def __del__(self) -> None:
        handles.let_go(self._graph)

    def pointers(self, tensors: Sequence[int]) -> Any:
        """An array of pointers: inputs, outputs, then what the plan adds to them."""
        made = array("Q", tensors)
        for position, address in self.added:
            made.append(address if position is None else tensors[position] + address)
        return made

    def execute(self, pointers: Any, workspace: int, handle: Any) -> None:
        """Launch on the handle's stream. ``pointers`` comes from :meth:`pointers`."""
        if self.native is not None:
            call, place = self.native
            call(*pointers.buffer_info(), workspace, handle.backend_handle, place)
            return
        pack = dict(zip(self._uids, pointers, strict=True))
        if self._index is None:
            self._graph.execute(pack, workspace, handle)
        else:
            self._graph.execute_plan_at_index(pack, workspace, self._index, handle)

    def bound(self, pointers: Any, workspace: int, stream: int) -> Callable[[], None] | None:
        """A call of nothing that launches on these addresses and this stream, where that is
        shorter than :meth:`execute`."""
        return None

    def launcher(self, places: Sequence[int]) -> Callable[[Sequence[int], int, Any], None]:
        """A call that launches with the addresses at ``places`` of a list (inputs, then outputs),
        a workspace and a handle: :meth:`execute` for one that is launched often."""
        pick, native = itemgetter(*places), self.native
        if native is None or len(places) < 2 or any(at is not None for at, _ in self.added):
            return lambda addresses, workspace, handle: self.execute(
                self.pointers([addresses[at] for at in places]), workspace, handle
            )
        fast, index = native
        constants = tuple(constant for _, constant in self.added)

        def launch(addresses: Sequence[int], workspace: int, handle: Any) -> None:
            pointers = array("Q", pick(addresses) + constants)
            address, count = pointers.buffer_info()
            fast(address, count, workspace, handle.backend_handle, index)

        return launch

    def serialize(self) -> bytes:
        """The plan with its compiled code, for :func:`load`. The plan built last on its graph."""
        if self.blob is not None:
            return self.blob
        head = {
            "lowering": versions.LOWERING,
            "frontend": env.frontend_version(),
            "choice": str(self.choice),
            "uids": len(self._uids) - len(self._extras),
            "aliases": [
                [e.uid, e.position, e.offset_bytes] for e in self._extras if isinstance(e, Alias)
            ],
            "constants": [
                [
                    e.uid,
                    e.numel,
                    float(e.value).hex(),
                    str(e.dtype).removeprefix("torch."),
                    e.on_host,
                ]
                for e in self._extras
                if isinstance(e, Constant)
            ],
        }
        return json.dumps(head).encode() + b"\n" + bytes(self._graph.serialize())


def load(blob: bytes, choice: Choice, device_index: int) -> Plan:
    """A plan from what :meth:`Plan.serialize` gave. The blob holds device code: trust its source.

    Raises :class:`NotSupported` when it cannot be loaded here, is another engine's, of a graph
    that was lowered by other rules, or another version's of the frontend.
    """
    refuse_during_capture()
    frontend = env.frontend()
    try:
        head, body = blob.split(b"\n", 1)
        described = json.loads(head)
        if described.get("lowering") != versions.LOWERING:
            raise ValueError("its graph was lowered by other rules than this program's")
        if described.get("frontend") != env.frontend_version():
            raise ValueError(f"frontend {described.get('frontend')} has written it")
        handle = handles.handle(device_index)
        if described["choice"] != str(choice):  # the frontend cannot say: asking it crashes
            raise ValueError(f"it holds {described['choice']}")
        extras: list[Extra] = [
            Constant(int(uid), int(count), float.fromhex(value), getattr(torch, dtype), bool(host))
            for uid, count, value, dtype, host in described["constants"]
        ]
        extras += [Alias(*map(int, alias)) for alias in described["aliases"]]
        extras.sort(key=lambda extra: extra.uid)
        uids = tuple(range(1, int(described["uids"]) + 1))
        graph = frontend.pygraph(handle=handle)
        graph.deserialize(bytearray(body))  # bytes are refused, a list of them is slower to read
        return Plan(graph, None, choice, device_index, uids, extras)
    except (frontend.cudnnGraphNotSupportedError, RuntimeError, ValueError, KeyError) as error:
        raise NotSupported("a serialized plan", [first_line(str(error))], str(error)) from None
    except (TypeError, AttributeError) as error:
        raise NotSupported("a serialized plan", [f"malformed: {error}"], str(error)) from None


def _native_call(graph: Any, index: int | None, uids: Sequence[int]) -> tuple[Any, int] | None:
    """The binding's call by addresses, when it is there and orders tensors as we do, else None.

    It takes the address of an array of addresses, their count, the workspace's address, the handle,
    and the plan's place, which comes with it.
    """
    native = getattr(graph, "_lowered_graph", None)
    call = getattr(native, "_execute_with_raw_ptrs", None)
    if native is None or call is None:
        return None
    try:
        # Positions in the frontend's own list and in the native one are told apart by the entry.
        place = -1 if index is None else int(graph._plans[index].cpp_index)
        native._prepare_variant_pack_template()
        if list(native._get_variant_pack_uids_sorted()) != list(uids):
            return None
    except Exception:
        return None
    return call, place


def refuse_during_capture() -> None:
    """Raise :class:`CaptureError` while the current stream is being captured."""
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "a plan would have to be built while a CUDA graph is being captured; call the "
            "executable once on this thread before the capture"
        )
