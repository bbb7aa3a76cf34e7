"""Trace one module's forward, with its children as calls, and refuse what a trace would get wrong.

torch.fx records what is done with tensors. All else is a constant to it: branches, attributes, the
grad mode. Each is looked at again before each use (a :class:`Guard`), or prevents the trace.
"""

from __future__ import annotations

import dis
import gc
import inspect
import operator
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx import _symbolic_trace

from . import factories

TENSOR, LIST, DEFAULT = "tensor", "list", "default"


class Untraceable(BaseException):
    """A forward that is not traced; the text finishes the sentence "its forward ...".

    No Exception, so that no forward's own ``except`` takes it.
    """


@dataclass(frozen=True)
class Guard:
    """What a trace took as given of one module, by its path from the traced one.

    ``kind`` is "value" (an attribute equals ``value``), "same" (it is that object), "there" (it is
    None or not), "length" (of children), "hooks" (there are none), "class" or "training".
    """

    kind: str
    path: str
    name: str = ""
    value: Any = None


@dataclass(frozen=True)
class Traced:
    """A forward as a graph, for parameters given as ``given`` says, and when that holds."""

    graph: fx.Graph
    given: Mapping[str, str]
    guards: tuple[Guard, ...]
    asked: frozenset[str]  # the parameters whose type the forward looks at
    reads_training: bool


def submodule(root: nn.Module, path: str) -> nn.Module:
    """The module of that path, the root for ""."""
    return root.get_submodule(path)


def trace(
    root: nn.Module, given: Mapping[str, str], training: bool, inlined: Collection[str]
) -> Traced:
    """Trace ``root`` in a mode. ``inlined`` are the paths of the children to trace into.

    Raises :class:`Untraceable`. The modules are left as they were.
    """
    tracer = _Tracer(root, given, inlined)
    running = [submodule(root, path) for path in ("", *inlined)]
    before = _State(root)
    try:
        with _as_if(root, running, training), _watched(tracer), _ambient():
            graph = tracer.trace(root)
    except Exception as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if said.startswith("'len' is"):
            raise Untraceable("takes the length of a tensor or shape") from None
        raise Untraceable(f"cannot be traced: {said}") from None
    finally:
        changed = before.restore()
    if changed:
        raise Untraceable(changed)
    if tracer.problems:
        raise Untraceable(tracer.problems[0])
    return Traced(
        graph,
        dict(given),
        tuple(dict.fromkeys(_guards(tracer, inlined))),
        frozenset(tracer.asked),
        "training" in tracer.names,
    )


def parameters(module: nn.Module) -> list[inspect.Parameter]:
    """The parameters of a module's forward without self. Raises :class:`Untraceable`."""
    try:
        return list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        raise Untraceable("has no signature") from None


def choices(module: nn.Module) -> list[dict[str, str]]:
    """How the parameters of a forward may be given: first those alone that have no default."""
    base = {}
    optional = []
    for each in parameters(module):
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        base[each.name] = TENSOR if each.default is each.empty else DEFAULT
        if each.default is None:
            optional.append(each.name)
    return [base, *({**base, name: TENSOR} for name in optional[:4])]


# -- the tracer ------------------------------------------------------------------------------------


def _of_user(name: str) -> bool:
    """Whether a Python module is the user's, and neither torch's nor Python's nor ours."""
    first = name.partition(".")[0]
    return first not in ("torch", "cudnngraph") and first not in sys.stdlib_module_names


def _line(frame: FrameType | None) -> str:
    """Where the user's code stands, as "file.py:12"."""
    while frame is not None and not _of_user(frame.f_globals.get("__name__", "torch")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "its forward"


class _Proxy(fx.Proxy):
    """A tensor, with the in-place operators that torch.fx would make out-of-place ones."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance looks at
        frame = sys._getframe(1)
        asks = _of_user(frame.f_globals.get("__name__", "torch"))
        if asks or frame.f_code is torch.is_tensor.__code__:
            return cast("_Tracer", self.tracer).type_of(self.node, frame)
        return _Proxy

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __len__(self) -> int:
        raise Untraceable(f"takes the length of a tensor ({_line(sys._getframe(1))})")


def _in_place(name: str) -> Callable[[_Proxy, Any], fx.Proxy]:
    target = getattr(operator, name)

    def method(self: _Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


IN_PLACE = {
    f"i{name}"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
for _name in IN_PLACE:
    setattr(_Proxy, f"__{_name}__", _in_place(f"{_name}"))


class _Tracer(fx.Tracer):
    """torch.fx's, with the children as leaves but for ``inlined``."""

    proxy_buffer_attributes = True

    def __init__(
        self, module: nn.Module, given: Mapping[str, str], inlined: Collection[str]
    ) -> None:
        super().__init__()
        self.module, self.given, self.inlined = module, given, inlined
        self.asked: set[str] = set()
        self.names: set[str] = set()
        self.problems: list[str] = []
        self.selves: dict[int, nn.Module] = {}
        self.ambient: Any = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.inlined

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def type_of(self, node: fx.Node, frame: FrameType) -> type:
        """The type that a parameter is traced with."""
        if node.op != "placeholder":
            raise Untraceable(f"asks for the type of an intermediate result ({_line(frame)})")
        self.asked.add(str(node.target))
        return list if self.given[str(node.target)] == LIST else torch.Tensor

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        self.ambient = _ambient_state()
        named = {}
        for each in parameters(self.module):
            if each.name in self.given:
                tensor = self.given[each.name] != DEFAULT
                proxy = self.create_proxy("placeholder", each.name, (), {}) if tensor else None
                named[each.name] = proxy if tensor else each.default
        only = [
            each.name
            for each in parameters(self.module)
            if each.kind is each.POSITIONAL_ONLY and each.name in named
        ]

        def call(module: nn.Module) -> Any:
            rest = {name: value for name, value in named.items() if name not in only}
            return root_fn(module, *(named[name] for name in only), **rest)

        return call, [self.root]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if self.ambient != _ambient_state():
            self.problems.append(
                f"changes the grad mode, autocast or what attention may use "
                f"({_line(sys._getframe(1))})"
            )
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter):
            known = any(a is each for _, each in self.root.named_buffers())
            if not known and a not in self.tensor_attrs:
                raise Untraceable(f"makes a tensor of constants ({_line(sys._getframe(1))})")
        if type(a) is OrderedDict:
            pairs = [(self.create_arg(key), self.create_arg(value)) for key, value in a.items()]
            return self.create_node("call_function", OrderedDict, (pairs,), {})
        if type(a) is not dict and issubclass(type(a), dict):
            raise Untraceable(f"makes a {type(a).__name__}")
        return super().create_arg(a)

    def to_bool(self, obj: fx.Proxy) -> bool:
        where = _line(sys._getframe(1))
        raise Untraceable(f"branches on a tensor's values, shape or dtype ({where})")

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        raise Untraceable(f"loops over a tensor ({_line(sys._getframe(1))})")

    def keys(self, obj: fx.Proxy) -> Any:
        raise Untraceable(f"unpacks a dict ({_line(sys._getframe(1))})")


# -- what surrounds a trace ------------------------------------------------------------------------


class _Unknown:
    """The ``training`` of a child that only the child itself may ask for."""

    def __bool__(self) -> bool:
        where = _line(sys._getframe(1))
        raise Untraceable(f"asks whether a child trains ({where})")


@contextmanager
def _as_if(root: nn.Module, running: Iterable[nn.Module], training: bool) -> Iterator[None]:
    """Set the mode of the modules that run themselves; no other may be asked for its own."""
    modules = [m for m in root.modules() if not isinstance(m, torch.jit.ScriptModule)]
    flags = [m.__dict__.get("training") for m in modules]
    run = set(map(id, running))
    for module in modules:
        module.__dict__["training"] = training if id(module) in run else _Unknown()
    try:
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.__dict__["training"] = flag


def _ambient_state() -> tuple[Any, ...]:
    flags: Any = torch.backends.cuda
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        flags.flash_sdp_enabled(),
        flags.mem_efficient_sdp_enabled(),
        flags.math_sdp_enabled(),
        flags.cudnn_sdp_enabled(),
    )


@contextmanager
def _ambient() -> Iterator[None]:
    """Autocast and gradients on: whatever turns either off, or on, shows then."""
    before = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    try:
        for kind in before:
            torch.set_autocast_enabled(kind, True)
        with torch.enable_grad(), _calls_of_fx_wrapped(), factories.from_python():
            yield
    finally:
        for kind, enabled in before.items():
            torch.set_autocast_enabled(kind, enabled)


@contextmanager
def _calls_of_fx_wrapped() -> Iterator[None]:
    """Trace into functions that torch.fx.wrap marked: most are an identity in some mode."""
    marked = _symbolic_trace._wrapped_fns_to_patch
    kept = dict(marked)
    marked.clear()
    try:
        yield
    finally:
        marked.update(kept)


# Questions that a trace answers once and for all.
_ASKS = {
    *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_default_dtype"),
    *("is_autocast_cpu_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype"),
    *("get_autocast_cpu_dtype", "is_anomaly_enabled", "_is_any_autocast_enabled"),
}
_WITH = {"BEFORE_WITH", "SETUP_WITH", "SETUP_FINALLY", "PUSH_EXC_INFO"}
_OPAQUE: dict[CodeType, bool] = {}


def _opaque(code: CodeType) -> bool:
    """Whether a function has a with or try statement, which a graph has not."""
    if code not in _OPAQUE:
        _OPAQUE[code] = any(each.opname in _WITH for each in dis.get_instructions(code))
    return _OPAQUE[code]


@contextmanager
def _watched(tracer: _Tracer) -> Iterator[None]:
    """Note the user's functions that run: the names that they use, and what no graph keeps."""
    checkpoint = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__

    users: dict[int, bool] = {}  # by identity: a code object's hash is computed anew each time
    alive: list[CodeType] = []

    def look(frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" and event != "c_call":
            return
        code = frame.f_code
        user = users.get(id(code))
        if user is None:
            alive.append(code)
            user = users[id(code)] = _of_user(frame.f_globals.get("__name__", "torch"))
        if not user:
            if code is checkpoint and event == "call":
                tracer.problems.append("checkpoints activations")
        elif event == "c_call":
            name = getattr(arg, "__name__", "")
            if name in _ASKS and str(getattr(arg, "__module__", "")).startswith("torch"):
                tracer.problems.append(f"calls torch.{name} ({_line(frame)})")
            elif arg is print:
                tracer.problems.append(f"prints ({_line(frame)})")
        else:
            enter(code, frame)

    def enter(code: CodeType, frame: FrameType) -> None:
        if _opaque(code):
            tracer.problems.append(f"has a with or try statement ({_line(frame)})")
        tracer.names.update(code.co_names)
        tracer.names.update(each for each in code.co_consts if isinstance(each, str))
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if issubclass(type(first), nn.Module):
            tracer.selves[id(first)] = cast(nn.Module, first)

    previous, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # a collection calls functions of others, at any line of a forward
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(previous)
        (gc.enable if collects else gc.disable)()


_HELD = ("_parameters", "_buffers", "_modules")
_OWN = frozenset(nn.Module().__dict__)


class _State:
    """The modules' attributes and the generators, to be compared and put back."""

    def __init__(self, root: nn.Module) -> None:
        self.held = [
            (m, dict(m.__dict__), [dict(m.__dict__[name]) for name in _HELD])
            for m in root.modules()
            if not isinstance(m, torch.jit.ScriptModule)
        ]
        self.contents = [
            (value, value.copy())
            for name, value in root.__dict__.items()
            if type(value) in (list, dict, set) and name not in _OWN
        ]
        self.torch_random = torch.get_rng_state()
        self.random = random.getstate()

    def restore(self) -> str:
        """Put all back, and say what had changed."""
        changed = ""
        for module, attributes, held in self.held:
            now = module.__dict__
            for name in {*attributes, *now}:
                if name not in attributes or now.get(name, _Unknown) is not attributes[name]:
                    changed = changed or f"sets {type(module).__name__}.{name}"
            if changed:
                now.clear()
                now.update(attributes)
            for name, kept in zip(_HELD, held, strict=True):
                current = now[name]
                if list(current) != list(kept) or any(
                    current[key] is not kept[key] for key in kept
                ):
                    changed = changed or f"changes {type(module).__name__}.{name}"
                    current.clear()
                    current.update(kept)
        for value, copied in self.contents:
            if len(value) != len(copied) or any(
                a is not b for a, b in zip(value, copied, strict=True)
            ):
                changed = changed or "changes a list or dict of the module"
                value.clear()
                (value.extend if type(value) is list else value.update)(copied)
        if not torch.equal(self.torch_random, torch.get_rng_state()):
            torch.set_rng_state(self.torch_random)
            changed = changed or "draws random numbers outside of its tensors"
        if random.getstate() != self.random:
            random.setstate(self.random)
            changed = changed or "draws Python's random numbers"
        return changed


# -- what a trace took as given --------------------------------------------------------------------

_PLAIN = (type(None), bool, int, float, str)


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _guards(tracer: _Tracer, inlined: Collection[str]) -> Iterator[Guard]:
    paths = {id(module): path for path, module in tracer.module.named_modules()}
    running = {"", *inlined, *(paths[key] for key in tracer.selves if key in paths)}
    for path in sorted(running):
        module = submodule(tracer.module, path)
        yield from _guards_of(module, path, tracer.names)
        if path in inlined:
            yield Guard("class", path, "", type(module))
            yield Guard("hooks", path)
            if "training" in tracer.names:
                yield Guard("training", path)
    holders = {""} | set(inlined)
    for node in tracer.graph.nodes:
        if node.op in ("call_module", "get_attr"):
            parts = str(node.target).split(".")
            holders |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
    for path in sorted(holders):
        yield Guard("length", path, "", len(submodule(tracer.module, path)._modules))


def _guards_of(module: nn.Module, path: str, names: Collection[str]) -> Iterator[Guard]:
    for held in _HELD:
        for name, value in module.__dict__[held].items():
            if name in names:
                yield Guard("there", path, name, value is not None)
    for name, value in module.__dict__.items():
        if name not in names or name in _OWN or isinstance(value, torch.Tensor):
            continue
        if _is_plain(value):
            yield Guard("value", path, name, tuple(value) if type(value) is list else value)
            continue
        yield Guard("same", path, name, _Kept(value))
        for inner, what in getattr(value, "__dict__", {}).items():
            if inner in names and _is_plain(what) and type(what) not in (list, tuple):
                yield Guard("value", path, f"{name}.{inner}", what)


class _Kept:
    """An object, compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
