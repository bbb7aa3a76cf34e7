"""Graphs written as functions, compiled once for every set of shapes that they are called with."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, overload

import torch

from .graph import Graph, Value
from .policy import Policy
from .runtime import Executable, Over
from .settings import overridden
from .training import Trainable

EXECUTABLES_KEPT = 1024
STATICS_KEPT = 1024

Build = Callable[..., "Value | tuple[Value, ...] | None"]


class Static:
    """Keyword arguments of a function of a graph, made once: the object stands for them in keys."""

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Hashable]) -> None:
        self.values = values


def _fixed(value: Any) -> Hashable:
    """Lists as tuples, so that an option can be part of a combination."""
    return tuple(_fixed(v) for v in value) if isinstance(value, (list, tuple)) else value


@lru_cache(STATICS_KEPT, typed=True)
def _static(make: Callable[..., dict[str, Any]], *options: Any) -> Static:
    return Static(make(*options))


def static_of(make: Callable[..., dict[str, Any]], *options: Any) -> Static:
    """``make(*options)``, made once for options that are equal and of the same types."""
    if torch.compiler.is_compiling():
        return Static(make(*[_fixed(option) for option in options]))
    try:
        return _static(make, *options)
    except TypeError:  # there is a list in it
        return _static(make, *[_fixed(option) for option in options])


class Recent:
    """What served the last call from one place, a module say. A copy of it knows nothing."""

    __slots__ = ("asked", "last")

    def __init__(self) -> None:
        self.asked: tuple[Any, Any, Static] | None = None
        self.last: tuple[Any, ...] | None = None

    def static_of(self, make: Callable[..., dict[str, Any]], *options: Any) -> Static:
        """:func:`static_of`, at once where the options are those of the last call."""
        if torch.compiler.is_compiling():
            return static_of(make, *options)
        asked = self.asked
        if asked is None or asked[0] is not make or asked[1] != options:
            asked = self.asked = make, options, static_of(make, *options)
        return asked[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return Recent, ()

    def serve(
        self,
        static: Static,
        policy: Policy | None,
        tensors: Sequence[torch.Tensor | None],
        over: Over = (),
    ) -> Any:
        """The results, if what served the last call serves this one too; None if not."""
        last = self.last
        if last is None or torch.compiler.is_compiling():
            return None
        options, wanted, state, there, absent, executable = last
        if options is not static or wanted is not policy or state != _state():
            return None
        for at in absent:
            if tensors[at] is not None:
                return None
        return executable.again([tensors[at] for at in there], over)

    def remember(
        self,
        static: Static,
        policy: Policy | None,
        tensors: Sequence[torch.Tensor | None],
        executable: Executable | Trainable,
    ) -> None:
        """Note what has served a call that came with these."""
        state = _state()
        if state is not None:
            there = [at for at, tensor in enumerate(tensors) if tensor is not None]
            absent = [at for at, tensor in enumerate(tensors) if tensor is None]
            self.last = static, policy, state, there, absent, executable


def _state() -> tuple[Hashable, ...] | None:
    """What a call depends on besides its arguments; None where it takes a closer look."""
    if torch._C._is_any_autocast_enabled() or torch._C._are_functorch_transforms_active():
        return None
    return (torch.are_deterministic_algorithms_enabled(), *_tf32_switches(), overridden())


class Specialized:
    """A function of a graph and values, called with tensors; see :func:`specialize`.

    Keeps one :class:`~cudnngraph.Executable` for each combination of shapes, strides, dtypes and
    devices of the tensors and of the other arguments; the oldest go when there are over
    :data:`EXECUTABLES_KEPT`. May be used from several threads.
    """

    def __init__(self, build: Build, policy: Policy | None, options: dict[str, Any]) -> None:
        self._build = build
        self._policy = policy
        self._options = options
        self._names = [name for name in inspect.signature(build).parameters][1:]
        given = (policy or Policy()).allow_tf32 if "allow_tf32" not in options else True
        self._follows_tf32 = given is None
        self._executables: dict[Hashable, Executable | Trainable] = {}
        self._lock = threading.Lock()
        self.__name__ = getattr(build, "__name__", "graph")
        self.__doc__ = build.__doc__

    def __call__(self, *tensors: torch.Tensor | None, **static: Hashable) -> Any:
        """Run on ``tensors``, in the order of the function's parameters; allocate the outputs.

        Returns what the function returned, as tensors: one, or a named tuple.
        """
        return self.lookup(*tensors, **static).call([t for t in tensors if t is not None])

    def lookup(self, *tensors: torch.Tensor | None, **static: Hashable) -> Executable | Trainable:
        """The executable for tensors like these, compiled on the first such call.

        Raises :class:`GraphError` where the graph does not fit them.
        """
        part: Hashable = None
        if static:
            part = tuple([(name, type(value), value) for name, value in sorted(static.items())])
        return self._find(tensors, part, static)

    def call(self, tensors: Sequence[torch.Tensor | None], static: Static, over: Over = ()) -> Any:
        """Like a call, with keyword arguments that are looked up by their identity.

        ``over`` as of :meth:`Executable.call`, of the tensors that are there.
        """
        executable = self._find(tensors, static, static.values)
        return executable.call([tensor for tensor in tensors if tensor is not None], over=over)

    def find(
        self, tensors: Sequence[torch.Tensor | None], static: Static
    ) -> Executable | Trainable:
        """Like :meth:`lookup`, with keyword arguments that are looked up by their identity."""
        return self._find(tensors, static, static.values)

    def _find(
        self, tensors: Sequence[torch.Tensor | None], part: Hashable, static: dict[str, Hashable]
    ) -> Executable | Trainable:
        parts: list[Hashable] = [part]
        float32 = False
        for tensor in tensors:
            if tensor is None:
                parts.append(None)
                continue
            dtype = tensor.dtype
            float32 = float32 or dtype is torch.float32
            parts += (tensor.shape, tensor.stride(), dtype, tensor.device)
        if float32 and self._follows_tf32:
            parts += _tf32_switches()
        special = overridden()
        if special is not None:
            parts += (special.backend, special.tune)
        key = tuple(parts)
        found = self._executables.get(key)
        return found if found is not None else self._compile(key, tensors, static)

    def graph(self, *tensors: torch.Tensor | None, **static: Hashable) -> Graph:
        """The graph for tensors like these, not compiled. Of the tensors only the form is read."""
        if len(tensors) > len(self._names):
            most = len(self._names)
            raise TypeError(f"{self.__name__} takes {most} arguments, {len(tensors)} were given")
        graph = Graph(self.__name__ if self.__name__.isidentifier() else "graph")
        values: list[Value | None] = []
        for name, tensor in zip(self._names, tensors, strict=False):
            values.append(None if tensor is None else graph.input(name, like=tensor))
        results = self._build(graph, *values, **static)
        if results is None:  # it has declared its outputs itself
            return graph
        for place, result in enumerate(results if isinstance(results, tuple) else (results,)):
            graph.output(f"out{place}" if isinstance(results, tuple) else "out", result)
        return graph

    def _compile(
        self,
        key: Hashable,
        tensors: Sequence[torch.Tensor | None],
        static: dict[str, Hashable],
    ) -> Executable | Trainable:
        graph = self.graph(*tensors, **static)
        device = next(tensor.device for tensor in tensors if tensor is not None)
        executable: Executable | Trainable = graph.compile(
            device, policy=self._policy, **self._options
        )
        with self._lock:
            while len(self._executables) >= EXECUTABLES_KEPT:
                del self._executables[next(iter(self._executables))]
            return self._executables.setdefault(key, executable)

    def __len__(self) -> int:
        """How many executables are kept."""
        return len(self._executables)

    def clear(self) -> None:
        """Forget the executables; plans stay in the cache."""
        with self._lock:
            self._executables.clear()

    def __repr__(self) -> str:
        return f"<specialized {self.__name__}, {len(self)} executable(s)>"


def _tf32_switches() -> tuple[Hashable, ...]:
    """torch's TF32 switches, the cheap way; the newer per-op ones where those are in use."""
    try:
        return (torch._C._get_cudnn_allow_tf32(), torch._C._get_cublas_allow_tf32())
    except RuntimeError:
        newer: Any = torch.backends
        return (newer.cudnn.conv.fp32_precision, newer.cuda.matmul.fp32_precision)


@overload
def specialize(build: Build) -> Specialized: ...
@overload
def specialize(
    *, policy: Policy | None = None, **options: Any
) -> Callable[[Build], Specialized]: ...
def specialize(
    build: Build | None = None, *, policy: Policy | None = None, **options: Any
) -> Specialized | Callable[[Build], Specialized]:
    """Make a function that builds a graph callable with tensors.

    ``build(graph, *values, **static)`` gets a :class:`~cudnngraph.Graph` and one
    :class:`~cudnngraph.Value` for each tensor of the call, and returns the result, or a tuple of
    them, or None where it has declared the graph's outputs itself. It runs once for every new
    combination of shapes, strides, dtypes and devices; finding the executable again takes about
    2 µs. Keyword arguments of the call are handed through and belong to the combination.
    ``training=True`` makes calls that torch autograd differentiates. Fields of
    :class:`~cudnngraph.Policy` may be given as keywords:

        @cg.specialize(tune="autotune")
        def block(g, x, w, b):
            return g.relu(g.bias(g.conv(x, w, padding=1), b))

        y = block(x, w, b)
    """
    if build is not None:
        return Specialized(build, policy, options)
    return lambda function: Specialized(function, policy, options)
