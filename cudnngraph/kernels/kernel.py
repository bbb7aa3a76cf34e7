"""A generated kernel, ready to be launched: built from a region and a schedule, or loaded.

The only importer of ``cuda.bindings.driver``, and that late. A kernel has the face of a plan of
cuDNN: a choice, addresses in an array, a launch on torch's current stream.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ..backend import env
from ..backend.plan import Choice, Plan, refuse_during_capture
from ..errors import NotSupported
from ..ir import versions
from ..ir.spec import GraphSpec
from . import compile as compiler
from . import patterns
from .rows import MOST_THREADS

MOST_CODES = 1024  # that are kept, of some 10 KB each
MOST_BLOCKS = 1 << 31  # of a launch along x, this one not


class Kernel(Plan):
    """A kernel that is loaded on a GPU."""

    def __init__(
        self, code: bytes, head: dict[str, Any], choice: Choice, device_index: int
    ) -> None:
        self.blob = None
        self.verified = None
        self.choice = choice
        self.device_index = device_index
        self.workspace_bytes = int(head["workspace"])
        self.added = ()
        self._code, self._head = code, head
        driver = _driver()
        with torch.cuda.device(device_index):
            torch.cuda.current_stream()  # the context is there from here on
            self._module = _module(driver, code, device_index)
            self._launches = []
            for name, blocks, threads, *asked in head["launches"]:
                error, function = driver.cuModuleGetFunction(self._module, str(name).encode())
                _check(error)
                # It is loaded by this, and not in the middle of a capture.
                most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
                error, least = driver.cuFuncGetAttribute(most, function)
                _check(error)
                _check_launch(int(blocks), int(threads), int(least))
                shared = int(asked[0]) if asked else 0
                if shared:
                    room = (
                        driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    )
                    (error,) = driver.cuFuncSetAttribute(function, room, shared)
                    _check(error)
                self._launches.append((function, int(blocks), int(threads), shared))
        self._call = self._native()
        self.native = (self._call, 0)

    @property
    def text(self) -> str:
        """The digest of its text."""
        return str(self._head.get("text"))

    @property
    def generator(self) -> str:
        """The digest of the program that has generated it."""
        return str(self._head.get("generator", ""))

    def __del__(self) -> None:
        """The module stays: see :func:`_module`."""

    def _native(self) -> Callable[[int, int, int, Any, int], None]:
        """A call by the address of an array of addresses, as plans have it."""
        launch, launches, index = _driver().cuLaunchKernel, self._launches, self.device_index
        stream_of = torch._C._cuda_getCurrentRawStream
        (function, blocks, threads, shared), several = launches[0], len(launches) > 1

        def call(address: int, count: int, workspace: int, handle: Any, place: int) -> None:
            # Where the parameters are: the addresses, and that of the workspace, which few take. Of
            # this call alone: several threads may launch.
            given = array("Q", [address, 0, workspace])
            where, _ = given.buffer_info()
            given[1] = where + 2 * given.itemsize
            stream = stream_of(index)
            (error,) = launch(function, blocks, 1, 1, threads, 1, 1, shared, stream, where, 0)
            if several and not error:
                for each, many, wide, room in launches[1:]:
                    (error,) = launch(each, many, 1, 1, wide, 1, 1, room, stream, where, 0)
                    if error:
                        break
            if error:
                raise RuntimeError(f"a generated kernel was not launched: {error!r}")

        return call

    def bound(self, pointers: Any, workspace: int, stream: int) -> Callable[[], None]:
        """See :class:`Plan`: what the driver is given is put together here, once."""
        driver_call = _driver().cuLaunchKernel
        given = array("Q", [pointers.buffer_info()[0], 0, workspace])
        where, _ = given.buffer_info()
        given[1] = where + 2 * given.itemsize
        calls = [
            partial(driver_call, each, blocks, 1, 1, threads, 1, 1, shared, stream, where, 0)
            for each, blocks, threads, shared in self._launches
        ]
        first, others = calls[0], calls[1:]

        def call(alive: object = (pointers, given)) -> None:
            (error,) = first()
            for each in others:
                if not error:
                    (error,) = each()
            if error:
                raise RuntimeError(f"a generated kernel was not launched: {error!r}")

        return call

    def pointers(self, tensors: Sequence[int]) -> Any:
        """See :class:`Plan`."""
        return array("Q", tensors)

    def execute(self, pointers: Any, workspace: int, handle: Any) -> None:
        """Launch on torch's current stream."""
        address, count = pointers.buffer_info()
        self._call(address, count, workspace, handle, 0)

    def launcher(self, places: Sequence[int]) -> Callable[[Sequence[int], int, Any], None]:
        """See :class:`Plan`."""
        call = self._call
        pick = itemgetter(*places) if len(places) > 1 else lambda each: (each[places[0]],)

        def launch(addresses: Sequence[int], workspace: int, handle: Any) -> None:
            pointers = array("Q", pick(addresses))
            address, count = pointers.buffer_info()
            call(address, count, workspace, handle, 0)

        return launch

    def serialize(self) -> bytes:
        """The device code, with what it is launched with."""
        return json.dumps(self._head).encode() + b"\n" + self._code


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _module(driver: Any, code: bytes, device_index: int) -> Any:
    """The module of a cubin, loaded once for all threads and plans.

    It stays with the context: unloading it would wait for the GPU.
    """
    place = device_index, hashlib.sha256(code).digest()
    with _loading:
        if place not in _modules:
            error, module = driver.cuModuleLoadData(code)
            _check(error)
            _modules[place] = module
        return _modules[place]


def _keep(text: str, capability: int, code: bytes) -> bytes:
    """Keep the code of a text, for the plans that each further thread has of its own."""
    with _loading:
        _codes[text, capability] = code
        while len(_codes) > MOST_CODES:
            _codes.pop(next(iter(_codes)))
    return code


_codes: dict[tuple[str, int], bytes] = {}
_modules: dict[tuple[int, bytes], Any] = {}
_loading = threading.Lock()


def _check_launch(blocks: int, threads: int, most: int = MOST_THREADS) -> None:
    """Raise :class:`NotSupported` for what no GPU launches, or not with what a thread needs."""
    if not 0 < blocks < MOST_BLOCKS or not 0 < threads <= most:
        why = f"{blocks} blocks of {threads} threads, of which the GPU takes {most}"
        raise NotSupported("a generated kernel", [why])


@cache
def generator() -> str:
    """Digest of the program that generates kernels; "" where its files are not to be read."""
    here = Path(__file__).parent
    files = [*sorted(here.rglob("*.py")), here.parent / "device" / "rules.py"]
    try:
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    except OSError:
        return ""


def why_stale(plan: Kernel, spec: GraphSpec, workspace_bytes: int) -> str | None:
    """Why a kernel is not the one that this program generates for a region, or None.

    ``workspace_bytes`` are those that the step has for it.
    """
    if plan.workspace_bytes > workspace_bytes:
        return "a kernel that needs more workspace than was kept for it"
    if plan.generator and plan.generator == generator():
        return None
    try:
        made = patterns.source(spec, plan.choice)
    except NotSupported as error:
        return error.reasons[0]
    return None if _digest(made.text) == plan.text else "a kernel of another version's generator"


def build(spec: GraphSpec, choice: Choice, device_index: int) -> Kernel:
    """Compile and load the kernel of a region. Raises :class:`NotSupported`."""
    refuse_during_capture()
    capability = env.capability(device_index)
    made = patterns.source(spec, choice)
    for each in made.launches:
        _check_launch(each.blocks, each.threads)
    text = _digest(made.text)
    code = _codes.get((text, capability))
    if code is None:
        code = _keep(text, capability, compiler.cubin(made.text, capability))
    head = {
        "kernel": versions.LOWERING,
        "choice": str(choice),
        "text": text,
        "generator": generator(),
        "capability": capability,
        "launches": [astuple(each) for each in made.launches],
        "workspace": made.workspace_bytes,
    }
    return Kernel(code, head, choice, device_index)


def load(blob: bytes, choice: Choice, device_index: int) -> Kernel:
    """A kernel from what :meth:`Kernel.serialize` gave. Raises :class:`NotSupported`."""
    refuse_during_capture()
    try:
        head, code = blob.split(b"\n", 1)
        described = json.loads(head)
        if described["kernel"] != versions.LOWERING or described["choice"] != str(choice):
            raise ValueError("it is another kernel's")
        if described["capability"] != env.capability(device_index):
            raise ValueError("it is for another GPU")
        made = Kernel(code, described, choice, device_index)
        _keep(made.text, described["capability"], code)
        return made
    except (ValueError, KeyError, TypeError) as error:
        raise NotSupported("a compiled kernel", [str(error)]) from None


def processors(device_index: int) -> int:
    """The number of multiprocessors of a GPU."""
    return env.env_key(device_index).sm_count


@cache
def why_none() -> str | None:
    """Why no kernels can be generated here, or None."""
    try:
        compiler.nvrtc()
        _driver()
    except NotSupported as error:
        return error.reasons[0]
    return None


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver

        driver.cuLaunchKernel  # noqa: B018
    except Exception as error:
        raise NotSupported("a generated kernel", [f"cuda-python is missing: {error}"]) from None
    return driver


def _check(error: Any) -> None:
    if error:
        raise NotSupported("a generated kernel", [f"the driver does not load it: {error!r}"])
