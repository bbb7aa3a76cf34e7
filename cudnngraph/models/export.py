"""Models as ATen ops: by a run of our own where that will do, else by torch.export."""

from __future__ import annotations

import inspect
import re
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import CannotImport
from ..runtime.state import Held, check_kept
from . import trace as tracer
from .compiler import WAYS
from .distributions import unvalidated
from .dtypes import Mixed
from .encoders import told_by_masks_alone
from .experts import by_groups
from .mends import ASKING, mend_of
from .quiet import export_quiet
from .transforms import transforms_ended

_TORCH = Path(torch.__file__).parent


class HasGraph(Protocol):
    """A GraphModule, or anything else with a graph, and with what its ``get_attr`` nodes name."""

    graph: torch.fx.Graph


@dataclass(frozen=True)
class Exported:
    """A model as ATen ops: the graph, its constants by placeholder, and how it is called.

    ``placeholders`` are the names of those that stand for the caller's tensors, in the order of
    the tensors among the flattened arguments. ``doubts`` are lines that ask whether numbers are
    finite (:mod:`~cudnngraph.models.finite`).
    """

    module: HasGraph
    constants: Mapping[str, torch.Tensor]
    placeholders: tuple[str, ...]
    out_spec: Any
    doubts: tuple[str, ...] = ()


#: Traces of torch's replace methods of its modules in all threads, so one waits for another.
_one_at_a_time = threading.RLock()


def export(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Exported:
    """``model`` called with ``args`` as a graph of ATen ops, without a gradient.

    Raises :class:`CannotImport` for a model that changes its state or its inputs, and for one
    whose ops depend on the numbers in its tensors. The model is left as it was.
    """
    with _one_at_a_time, by_groups(model), told_by_masks_alone(model), unvalidated():
        return _exported(model, args, kwargs)


def _exported(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Exported:
    held = Held(model)
    try:
        with _exporting():
            traced, asked = _traced(model, args, kwargs or {}, held)
            if traced is None:
                made, changed = by_torch(model, args, kwargs, asked=asked)
            else:
                names = tuple(traced.placeholders)
                doubts = tuple(traced.doubts)
                made = Exported(traced, traced.constants, names, traced.out_spec, doubts)
                changed = [*traced.exchanged, *held.changes()]
    except tracer.Writes as error:
        raise CannotImport(
            f"{type(model).__name__} changes '{held.name(error.tensor)}' in place, {_NO_GRAPH}"
        ) from error
    except tracer.Overlaps as error:
        raise CannotImport(
            f"{type(model).__name__}: {error}, as those of an expanded tensor are; write over a "
            "clone() of it"
        ) from error
    except tracer.Assigns as error:
        raise CannotImport(
            f"{type(model).__name__} assigns to .data of a tensor, which a graph does not "
            f"({last_line(error.line)}); go on with the new value, or write it by copy_()"
        ) from error
    except tracer.Swaps as error:
        raise CannotImport(
            f"{type(model).__name__} swaps tensors (torch.utils.swap_tensors), which a graph does "
            "not; swap them between calls, and call refresh()"
        ) from error
    except Mixed as error:
        raise CannotImport(
            f"{type(model).__name__} {error.said()} ({last_line(error.line)}); cast to one dtype, "
            "or give arguments in the model's"
        ) from error
    except tracer.ForwardMode as error:
        raise CannotImport(
            f"{type(model).__name__} takes forward-mode gradients in its forward (torch.func.jvp, "
            "jacfwd), which a graph does not; take them by torch.func.vjp or jacrev"
        ) from error
    except tracer.Foreign as error:
        what = foreign(model, error.kind, gives=error.gives)
        raise CannotImport(f"{type(model).__name__} {what}") from error
    finally:
        held.restore()
    if changed:
        with _exporting():  # fused models within run as those that they are of
            check_kept(model, args, kwargs or {}, list(dict.fromkeys(changed)))
    return made


def _traced(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], held: Held
) -> tuple[tracer.Traced | None, list[str]]:
    """The first run of a model that will do, what others have changed is put back; and where runs
    have asked for the numbers in a tensor."""
    asked: list[str] = []
    for way in WAYS:
        traced = tracer.trace(model, args, kwargs, way, asked)
        if traced is not None:
            return traced, asked
        held.restore()
    return None, asked


def foreign(model: nn.Module, kind: str, *, gives: bool) -> str:
    """What is to be said of an object that a graph can neither take nor give, and the mend."""
    what = f"returns a {kind}" if gives else f"is given a {kind}"
    mend = "return the tensors in it" if gives else "give the tensors in it"
    if "use_cache" in inspect.signature(model.forward).parameters or "Cache" in kind:
        mend = "call it with use_cache=False, or " + mend
    return (
        f"{what}, which a graph does not: it has tensors, plain values, and tuples, lists and "
        f"dicts of them; {mend}"
    )


#: What is to be said of a model that changes something in place.
_NO_GRAPH = (
    "which a graph does not (a batch norm in training mode, a counter, a cache?); "
    "call model.eval(), or return the new value; "
    'torch.compile(model, backend="cudnngraph") writes it'
)


_exporters: list[int] = []


@contextmanager
def _exporting() -> Iterator[None]:
    _exporters.append(threading.get_ident())
    try:
        yield
    finally:
        _exporters.remove(threading.get_ident())


def is_recording() -> bool:
    """Whether what runs is recorded, here, by torch.export or torch.jit.trace, or as one graph by
    torch.compile: a fused model then runs as the model that it is of."""
    jit: Any = torch.jit
    if torch.compiler.is_dynamo_compiling() and _is_one_graph():
        return True
    return is_exporting() or torch.compiler.is_exporting() or bool(jit.is_tracing())


def _is_one_graph() -> bool:
    """Whether torch.compile makes one graph of what it traces (``fullgraph=True``)."""
    convert: Any = import_module("torch._dynamo.symbolic_convert")
    try:
        return bool(convert.InstructionTranslator.current_tx().one_graph)
    except AttributeError:  # no name of it is public
        return False


# As torch.compiler.assume_constant_result says, which imports torch's compiler.
vars(_is_one_graph)["_dynamo_marked_constant"] = True


def is_exporting() -> bool:
    """Whether this thread is in :func:`export`: what is made of torch's modules calls those then,
    for a graph of their ops can do more than a call of ours in it."""
    return bool(_exporters) and threading.get_ident() in _exporters


@dataclass
class _Changes:
    """Whether a call has changed its arguments, or their shapes in place, and what it has of the
    model's state."""

    arguments: bool = False
    shapes: bool = False
    state: list[str] = field(default_factory=list)


_RESHAPES = (
    "changes the shape of an argument in place (unsqueeze_, squeeze_, t_, transpose_, resize_?), "
    "which a graph does not; write x = x.unsqueeze(0) and the like"
)


_PACKS = (
    "packs sequences (pack_padded_sequence), whose sizes are numbers in a tensor, which a graph "
    "does not; give the layer the padded tensor, and set what lies behind each length to zero"
)


def _packs(error: Exception) -> bool:
    """Whether an error came where a packed sequence was about."""
    packed = torch.nn.utils.rnn.PackedSequence
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(isinstance(each, packed) for f in frames for each in f.f_locals.values())


def _shape(leaf: Any) -> tuple[int, ...] | None:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None


@contextmanager
def _watched(model: nn.Module) -> Iterator[_Changes]:
    """Record the changes that calls of the model make.

    torch.export does not notice changes of lists and dicts, and puts attributes back.
    """
    before: list[Any] = []
    found = _Changes()

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves, form = pytree.tree_flatten((args, kwargs))
        before.append((leaves, list(map(_shape, leaves)), form, Held(model)))

    def compare(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        leaves, shapes, form, held = before.pop()
        found.shapes |= shapes != list(map(_shape, leaves))
        now, now_form = pytree.tree_flatten((args, kwargs))
        if form != now_form or any(a is not b for a, b in zip(now, leaves, strict=True)):
            found.arguments = True
        found.state += held.changes()

    hooks = (
        model.register_forward_pre_hook(note, with_kwargs=True),
        model.register_forward_hook(compare, with_kwargs=True),
    )
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def by_torch(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    asked: Sequence[str] = (),
) -> tuple[Exported, list[str]]:
    """:func:`export`, by torch.export, and the names of the state that a call has changed.

    ``asked`` are lines of runs before, at which the model has asked for the numbers in a tensor.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch.export.graph_signature import InputKind

    name = type(model).__name__
    try:
        quiet = export_quiet()
        with compile_lock, quiet, torch.no_grad(), transforms_ended(), _watched(model) as changes:
            program = torch.export.export(model, tuple(args), dict(kwargs or {}), strict=False)
            program = program.run_decompositions({})
    except Exception as error:
        unlike = _unlike(model, args, kwargs)
        if unlike:
            raise CannotImport(f"{name}.forward does not take these arguments: {unlike}") from error
        if asked or "data-dependent" in str(error):  # torch says where numbers are used
            raise CannotImport(f"{name} {asks(asked[-1] if asked else str(error))}") from error
        if changes.shapes:
            raise CannotImport(f"{name} {_RESHAPES}") from error
        if _packs(error):
            raise CannotImport(f"{name} {_PACKS}") from error
        check_not_scripted(model, error)
        raise CannotImport(f"{name} cannot be exported: {_export_failure(error)}") from error
    if changes.shapes:
        raise CannotImport(f"{name} {_RESHAPES}")
    if changes.arguments:
        raise CannotImport(f"{name} changes its arguments, which a graph does not")
    signature = program.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    changed += getattr(signature, "parameters_to_mutate", {}).values()
    if changed:
        what = ", ".join(f"'{each}'" for each in changed)
        raise CannotImport(f"{name} changes {what} in place, {_NO_GRAPH}")
    constants: dict[str, torch.Tensor] = {}
    placeholders: list[str] = []
    for each in signature.input_specs:
        held = {**program.state_dict, **program.constants}
        if each.kind == InputKind.USER_INPUT:
            if type(each.arg).__name__ == "TensorArgument":
                placeholders.append(each.arg.name)
        elif isinstance(held.get(each.target), torch.Generator):
            raise CannotImport(f"{name} draws random numbers from a generator, which no graph does")
        elif each.target in held:
            constants[each.arg.name] = held[each.target].detach()
        else:
            raise CannotImport(f"{name} takes a {each.kind.name.lower()}, which no graph has")
    made = Exported(
        program.graph_module, constants, tuple(placeholders), program.call_spec.out_spec
    )
    return made, changes.state


def _unlike(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> str:
    """Why ``forward`` cannot be called so, by its parameters; "" if it can, or they are unknown."""
    try:
        parameters = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return ""
    try:
        parameters.bind(*args, **(kwargs or {}))
    except TypeError as error:
        return f"{error}; expected {parameters}"
    return ""


def check_not_scripted(model: nn.Module, cause: Exception | None = None) -> None:
    """Raise :class:`CannotImport` for a model that is or has a module of TorchScript."""
    jit: Any = torch.jit
    for name, part in model.named_modules():
        if isinstance(part, jit.ScriptModule):
            what = f"has a ScriptModule, '{name}'" if name else "is a ScriptModule"
            mend = "use the module that torch.jit was given"
            raise CannotImport(
                f"{type(model).__name__} {what}, which cannot be traced; {mend}"
            ) from cause


def asks(trace: str) -> str:
    """What is to be said of a model whose ops depend on numbers, and the mend."""
    where = last_line(trace)
    at = f" ({where})" if where else ""
    what = "asks for the numbers in a tensor, which a graph does not"
    for op in ASKING:
        if op in where:
            what = f"calls {op}, whose result depends on numbers as no graph's does"
    return f"{what}{at}; {mend_of(where)}"


#: What torch says of a gradient of something that was computed without.
_NO_GRADIENT = "does not require grad and does not have a grad_fn"


def _export_failure(error: Exception) -> str:
    """Why torch.export gave up, in a line, and where."""
    text = str(error)
    if _NO_GRADIENT in text:
        where = last_line("".join(traceback.format_tb(error.__traceback__)))
        return (
            f"it takes gradients where torch records none, as under torch.no_grad() ({where}); "
            "compute what they are of within torch.enable_grad()"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    where = last_line(text)
    return f"{first} ({where})" if where else first


def last_line(trace: str) -> str:
    """The last line of a stack trace that is not torch's own, "" where there is none."""
    found = re.findall(r'File "([^"<]+)", line (\d+), in (\S+)\n\s*(.+)', trace)
    ours = [each for each in found if _TORCH not in Path(each[0]).parents] or found
    if not ours:
        return ""
    path, number, function, code = ours[-1]
    return f"{Path(path).name}:{number} in {function}: {code.strip()}"
