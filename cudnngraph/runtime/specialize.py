"""Graphs written as functions, compiled once for every set of shapes that they are called with."""

# mypy: disable-error-code="no-any-return"
# What a graph returns is known when it runs.
from __future__ import annotations

import inspect
import marshal
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Generic, Protocol, overload

import torch

from ..arguments import NotPlain, is_a, plain, unreadable, without_memory
from ..device import tf32
from ..errors import BindError, FeatureMissing, GraphError, PolicyError, Problem
from ..graph.builder import Graph
from ..graph.value import Value
from ..ir.spec import dense_strides, memory_order
from ..policy import Policy, PolicyOptions
from ..runtime.trainable import Trainable
from ..runtime.transforms import Transformed
from ..settings import overridden
from .compile import resolve_policy
from .copies import Itself
from .executable import Executable, Over, R, transforming
from .results import result_class

if TYPE_CHECKING:
    from typing_extensions import Unpack

EXECUTABLES_KEPT = 1024
STATICS_KEPT = 1024
_WITHOUT_REFERENCES = 2  # marshal's version, whose bytes are the same for equal options

Build = Callable[..., "Value | tuple[Value, ...] | None"]


class Static:
    """Keyword arguments of a function of a graph, made once: the object stands for them in keys."""

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Hashable]) -> None:
        self.values = values


def _fixed(value: Any) -> Hashable:
    """Lists as tuples, so that an option can be part of a combination."""
    return tuple(_fixed(v) for v in value) if isinstance(value, (list, tuple)) else value


def _plain(option: Any) -> Any:
    try:
        return plain(option)
    except NotPlain as reason:
        raise TypeError(f"an option {reason}") from None


@lru_cache(STATICS_KEPT, typed=True)
def _static(make: Callable[..., dict[str, Any]], written: bytes, *options: Any) -> Static:
    """``written`` are the options too: within a tuple True equals 1, and -0.0 equals 0.0."""
    return Static(make(*options))


def _written(options: tuple[Any, ...]) -> bytes:
    try:
        return marshal.dumps(options, _WITHOUT_REFERENCES)
    except ValueError:  # there is a dtype in it
        return repr(options).encode()


def intern_static(make: Callable[..., dict[str, Any]], *options: Any) -> Static:
    """``make(*options)``, made once for options that are equal and of the same types."""
    if torch.compiler.is_compiling():
        return Static(make(*[_fixed(option) for option in options]))
    try:
        return _static(make, marshal.dumps(options, _WITHOUT_REFERENCES), *options)
    except Exception:  # there is a list in it, or what cannot be part of a key
        fixed = tuple(_fixed(_plain(option)) for option in options)
        return _static(make, _written(fixed), *fixed)


class LastCall:
    """Memo of the last call from one place, such as a module. A copy starts empty."""

    __slots__ = ("asked", "last")

    def __init__(self) -> None:
        self.asked: tuple[Any, Any, Static] | None = None
        self.last: tuple[Any, ...] | None = None

    def static_of(self, make: Callable[..., dict[str, Any]], *options: Any) -> Static:
        """:func:`intern_static`, at once where the options are those of the last call."""
        if torch.compiler.is_compiling():
            return intern_static(make, *options)
        asked = self.asked
        if asked is None or asked[0] is not make or asked[1] != options:
            asked = self.asked = make, options, intern_static(make, *options)
        return asked[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return LastCall, ()

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
        if options is not static or wanted is not policy or state != _ambient_state():
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
        state = _ambient_state()
        if state is not None:
            there = [at for at, tensor in enumerate(tensors) if tensor is not None]
            absent = [at for at, tensor in enumerate(tensors) if tensor is None]
            self.last = static, policy, state, there, absent, executable


def _ambient_state() -> tuple[Hashable, ...] | None:
    """The global state that a call depends on; None if that takes a closer look."""
    if torch._C._is_any_autocast_enabled() or transforming():
        return None
    return (torch.are_deterministic_algorithms_enabled(), *tf32.switches(), overridden())


class Specialized(Itself, Generic[R]):
    """A function of a graph and values, called with tensors; see :func:`specialize`.

    Keeps one :class:`~cudnngraph.Executable` for each combination of shapes, strides, dtypes and
    devices of the tensors and of the other arguments; the oldest go when there are over
    :data:`EXECUTABLES_KEPT`. May be used from several threads.
    """

    def __init__(
        self,
        build: Build,
        policy: Policy | None,
        options: dict[str, Any],
        batched: Sequence[str] = (),
    ) -> None:
        """``batched`` are the parameters with a batch as their first dim, each image of which the
        function takes by itself; the first parameter is one of them."""
        try:
            parameters = list(inspect.signature(build).parameters)
        except Exception:
            problem = Problem("specialize", f"build {is_a(build)}", "a function of a graph")
            raise GraphError("specialize", [problem]) from None
        if not (policy is None or isinstance(policy, Policy)):
            raise PolicyError(f"policy {is_a(policy)}; expected a cudnngraph.Policy or None")
        self._build = build
        self._policy = policy
        self._options = options
        self._batched = frozenset(batched)
        self._transformed: dict[Hashable, Transformed] = {}
        self._names = parameters[1:]
        given = (policy or Policy()).allow_tf32 if "allow_tf32" not in options else True
        self._follows_tf32 = given is None
        self._executables: dict[Hashable, Executable | Trainable] = {}
        self._lock = threading.Lock()
        self.__name__ = getattr(build, "__name__", "graph")
        self.__doc__ = build.__doc__

    def __call__(self, *tensors: torch.Tensor | None, **static: Hashable) -> R:
        """Run on ``tensors``, in the order of the function's parameters; allocate the outputs.

        Returns what the function returned, as tensors: one, or a named tuple.
        """
        if transforming():
            return self._transform(tensors, _part(static), static)
        return self.lookup(*tensors, **static).call([t for t in tensors if t is not None])

    def lookup(self, *tensors: torch.Tensor | None, **static: Hashable) -> Executable | Trainable:
        """The executable for tensors like these, compiled on the first such call.

        Raises :class:`GraphError` where the graph does not fit them.
        """
        return self._find(tensors, _part(static), static)

    def call(self, tensors: Sequence[torch.Tensor | None], static: Static, over: Over = ()) -> Any:
        """Like a call, with keyword arguments that are looked up by their identity.

        ``over`` as of :meth:`Executable.call`, of the tensors that are there.
        """
        if transforming():
            if over:
                check_in_place(self.__name__)
            return self._transform(tensors, static, static.values)
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
        key = self._key(tensors, part)
        try:
            found = self._executables.get(key)
        except Exception:
            _check_options(self.__name__, static)
            raise
        return found if found is not None else self._compile(key, tensors, static)

    def _key(self, tensors: Sequence[torch.Tensor | None], part: Hashable) -> Hashable:
        parts: list[Hashable] = [part]
        float32 = False
        try:
            for tensor in tensors:
                if tensor is None:
                    parts.append(None)
                    continue
                dtype = tensor.dtype
                float32 = float32 or dtype is torch.float32
                parts += (tensor.shape, tensor.stride(), dtype, tensor.device)
        except Exception:
            self._check(tensors)
            raise
        if float32 and self._follows_tf32:
            parts += tf32.switches()
        special = overridden()
        if special is not None:
            parts += (special.backend, special.tune, special.check)
        return tuple(parts)

    def _check(self, tensors: Sequence[Any]) -> torch.device:
        """The device of the tensors. Raises :class:`BindError` where they have not one of these
        that is a CPU or a GPU, or one is no dense tensor of torch's own.

        A key has the devices, so tensors of another key are checked anew, and those of one that is
        known need not be.
        """
        given = [(n, t) for n, t in zip(self._names, tensors, strict=False) if t is not None]
        wrong = [p for name, tensor in given for p in unreadable(f"tensor '{name}'", tensor)]
        wrong = wrong or [
            Problem(f"tensor '{name}'", f"is on {tensor.device}", "a CPU or a CUDA device")
            for name, tensor in given
            if tensor.device.type not in ("cpu", "cuda")
        ]
        if not given:
            wrong = [Problem("call", "has no tensor", "at least one")]
        if wrong:
            raise BindError(self.__name__, wrong)
        first = given[0][0]
        device: torch.device = given[0][1].device
        wrong = [
            Problem(
                f"tensor '{name}'",
                f"is on {tensor.device}",
                f"{device}, where '{first}' is",
                f"{name}.to('{device}')",
            )
            for name, tensor in given
            if tensor.device != device
        ]
        wrong = wrong or [p for n, tensor in given for p in without_memory(f"tensor '{n}'", tensor)]
        if wrong:
            raise BindError(self.__name__, wrong)
        return device

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
        device = self._check(tensors)
        graph = self.graph(*tensors, **static)
        executable: Executable | Trainable = graph.compile(
            device, policy=self._policy, **self._options
        )
        with self._lock:
            while len(self._executables) >= EXECUTABLES_KEPT:
                del self._executables[next(iter(self._executables))]
            return self._executables.setdefault(key, executable)

    def _transform(
        self,
        tensors: Sequence[torch.Tensor | None],
        part: Hashable,
        static: dict[str, Hashable],
    ) -> Any:
        """A call within a function transform of torch."""
        key = self._key(tensors, part)
        _check_options(self.__name__, static)
        made = self._transformed.get(key)
        if made is None:
            device = self._check(tensors)
            made = self._as_transformed(self.graph(*tensors, **static), device, tensors, static)
            with self._lock:
                while len(self._transformed) >= EXECUTABLES_KEPT:
                    del self._transformed[next(iter(self._transformed))]
                made = self._transformed.setdefault(key, made)
        results = made([tensor for tensor in tensors if tensor is not None])
        if len(results) == 1:
            return results[0]
        return result_class(f"{self.__name__}_result", made.spec.outputs)(*results)

    def _as_transformed(
        self,
        graph: Graph,
        device: torch.device,
        tensors: Sequence[torch.Tensor | None],
        static: dict[str, Hashable],
    ) -> Transformed:
        forms = [
            None if tensor is None else (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
            for tensor in tensors
        ]

        @cache
        def wider(many: int) -> Transformed | None:
            like = self.wider(forms, many)
            if like is None:
                return None
            try:
                found = self.graph(*like, **static)
                found.spec()
            except GraphError:  # the first dim is no batch here
                return None
            return self._as_transformed(found, device, like, static)

        trains = bool(self._options.get("training"))
        spec, policy = graph.spec(), self._policy_for(graph)
        return Transformed(spec, device, policy, trains=trains, wider=wider)

    def _policy_for(self, graph: Graph) -> Policy:
        own = ("training", "check")
        options = {name: v for name, v in self._options.items() if name not in own}
        return resolve_policy(self._policy, options, graph.spec())

    def wider(self, forms: Sequence[Any], many: int) -> list[torch.Tensor | None] | None:
        """Tensors on ``meta`` of these shapes, strides and dtypes for a batch ``many`` times as
        long; None for a function without a batch."""
        if not self._batched or not forms or forms[0] is None or not forms[0][0]:
            return None
        rank, batch = len(forms[0][0]), forms[0][0][0]
        made: list[torch.Tensor | None] = []
        for name, form in zip(self._names, forms, strict=False):
            if form is None:
                made.append(None)
                continue
            shape, stride, dtype = form
            # A tensor of fewer dims broadcasts, or says the lengths of each sequence.
            whole = len(shape) == (1 if name.startswith("seq_len") else rank)
            if name in self._batched and whole and shape[0] == batch:
                order = memory_order(shape, stride)
                shape = (many * batch, *shape[1:])
                stride = dense_strides(shape, order)
            made.append(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
        return made

    def __len__(self) -> int:
        """Return the number of executables kept."""
        return len(self._executables)

    def clear(self) -> None:
        """Forget the executables; plans stay in the cache."""
        with self._lock:
            self._executables.clear()
            self._transformed.clear()

    def __repr__(self) -> str:
        return f"<specialized {self.__name__}, {len(self)} executable(s)>"


def check_in_place(name: str) -> None:
    """Raise :class:`FeatureMissing` where running statistics cannot be updated in place."""
    if transforming():
        raise FeatureMissing(
            f"{name} updates running statistics in place, which no function transform of torch "
            "allows; call eval(), or leave them out (track_running_stats=False)"
        )


def _check_options(name: str, static: Mapping[str, Any]) -> None:
    """Raise :class:`GraphError` where a keyword argument cannot be part of a key."""
    problems = []
    for option, value in static.items():
        try:
            hash(value)
        except Exception:
            reason = f"{is_a(value)}, which has no hash"
            problems.append(Problem(f"option '{option}'", reason, "a number, a text, a tuple"))
    if problems:
        raise GraphError(name, problems)


def _part(static: dict[str, Hashable]) -> Hashable:
    """Return the keyword arguments as a part of a key."""
    if not static:
        return None
    return tuple([(name, type(value), value) for name, value in sorted(static.items())])


if TYPE_CHECKING:

    class _Options(PolicyOptions, total=False):
        training: bool
        check: bool | None

    class _Specializer(Protocol):
        """:func:`specialize` whose options are given."""

        @overload
        def __call__(self, build: Callable[..., Value], /) -> Specialized[torch.Tensor]: ...
        @overload
        def __call__(
            self, build: Callable[..., tuple[Value, ...]], /
        ) -> Specialized[tuple[torch.Tensor, ...]]: ...
        @overload
        def __call__(self, build: Build, /) -> Specialized: ...


@overload
def specialize(
    build: Callable[..., Value], *, policy: Policy | None = None, **options: Unpack[_Options]
) -> Specialized[torch.Tensor]: ...
@overload
def specialize(
    build: Callable[..., tuple[Value, ...]],
    *,
    policy: Policy | None = None,
    **options: Unpack[_Options],
) -> Specialized[tuple[torch.Tensor, ...]]: ...
@overload
def specialize(
    build: Build, *, policy: Policy | None = None, **options: Unpack[_Options]
) -> Specialized: ...
@overload
def specialize(
    build: None = None, *, policy: Policy | None = None, **options: Unpack[_Options]
) -> _Specializer: ...
def specialize(
    build: Build | None = None, *, policy: Policy | None = None, **options: Any
) -> Specialized | Callable[[Build], Specialized]:
    """Make a function that builds a graph callable with tensors.

    ``build(graph, *values, **static)`` gets a :class:`~cudnngraph.Graph` and one
    :class:`~cudnngraph.Value` for each tensor of the call, and returns the result, or a tuple of
    them, or None where it has declared the graph's outputs itself. It runs once for every new
    combination of shapes, strides, dtypes and devices; finding the executable again takes about
    2 µs. Keyword arguments of the call are handed through and belong to the combination.
    ``training=True`` makes calls that torch autograd differentiates, ``check=True`` with it
    compares their first results and gradients as :meth:`Graph.compile` does. Fields of
    :class:`~cudnngraph.Policy` may be given as keywords:

        @cg.specialize(tune="autotune")
        def block(g, x, w, b):
            return g.relu(g.bias(g.conv(x, w, padding=1), b))

        y = block(x, w, b)
    """
    if build is not None:
        return Specialized(build, policy, options)
    return lambda function: Specialized(function, policy, options)
