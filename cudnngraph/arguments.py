"""Arguments of public functions, read once and made plain.

What comes from outside may be of any type, and its methods may do anything. What :func:`plain`
returns is made of Python's own numbers, texts, tuples and lists, and of torch's enumerations, so a
check behind it need not fear what it compares, counts or prints.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from functools import wraps
from itertools import islice
from numbers import Integral, Real
from operator import index
from typing import Any, TypeVar

import torch

from .errors import BindError, CudnnGraphError, GraphError, Problem

_READ = 4096  # items of what is neither a tuple nor a list, and may have no end
_ITEMS = 1 << 20  # in all
_DEPTH = 64

_ATOMS = (
    *(type(None), bool, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
)
Function = TypeVar("Function", bound=Callable[..., Any])

_NO_SEQUENCES = (str, bytes, bytearray, Mapping, Set, torch.Tensor, torch.nn.Module)


class NotPlain(Exception):
    """A value that has no plain form; the text finishes a sentence: "is a module"."""


def plain(value: Any, keep: tuple[type, ...] = ()) -> Any:
    """A value of numbers, texts, tuples and lists, equal to the one given; what is of the types
    ``keep`` stays what it is.

    numpy's numbers become Python's, arrays and iterators tuples. Raises :class:`NotPlain`.
    """
    if type(value) in _ATOMS or type(value) in keep:
        return value
    return _plain(value, keep, _DEPTH, [_ITEMS])


def _plain(value: Any, keep: tuple[type, ...], depth: int, left: list[int]) -> Any:
    kind = type(value)
    left[0] -= 1
    if left[0] < 0 or depth < 0:
        raise NotPlain("has too many items" if depth >= 0 else "is nested too deeply")
    if kind in _ATOMS or kind in keep:
        return value
    try:
        if issubclass(kind, keep):
            return value
        if issubclass(kind, str):
            return str.__str__(value)
        if (number := _number(value, kind)) is not None:
            return number
    except NotPlain:
        raise
    except Exception as error:
        raise NotPlain(f"{is_a(value)} that gives no number ({type(error).__name__})") from None
    made = [_plain(item, keep, depth - 1, left) for item in items(value)]
    return made if issubclass(kind, list) else tuple(made)


def _number(value: Any, kind: type) -> bool | int | float | None:
    """A Python number, None for what is none."""
    if issubclass(kind, Integral):
        whole = int.__index__(value if issubclass(kind, int) else index(value))
        if not -(2**63) <= whole < 2**63:
            raise NotPlain("is an int that int64 does not hold")
        return whole
    if issubclass(kind, Real):
        return float.__float__(value) if issubclass(kind, float) else float(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
        return bool(value)
    return None


def items(value: Any) -> list[Any]:
    """Return the elements of a tuple, a list or an iterator. Raises :class:`NotPlain`."""
    kind = type(value)
    if kind in (tuple, list, torch.Size):  # as torch.compile traces it, in torch 2.11 too
        return list(value)
    for own in (tuple, list):
        if issubclass(kind, own):
            return list(own.__iter__(value))
    if issubclass(kind, _NO_SEQUENCES) or not hasattr(kind, "__iter__"):
        raise NotPlain(is_a(value))
    try:
        made = list(islice(iter(value), _READ + 1))
    except Exception as error:
        raise NotPlain(f"{is_a(value)} that cannot be read ({type(error).__name__})") from None
    if len(made) > _READ:
        raise NotPlain(f"{is_a(value)} of more than {_READ} items")
    return made


def is_a(value: Any) -> str:
    """ "is a Tensor": a type's name, as part of a sentence."""
    name = type(value).__name__
    return "is None" if value is None else f"is a{'n' * (name[0] in 'aeiouAEIO')} {name}"


def shown(value: Any) -> str:
    """A value as Python writes it where it is plain, else its type's name."""
    try:
        return repr(plain(value))
    except NotPlain:
        return type(value).__name__


def whole(value: Any) -> bool:
    """Whether a plain value is an int and no bool."""
    return type(value) is int


def real(value: Any) -> bool:
    """Whether a plain value is a number and no bool."""
    return type(value) in (int, float)


def number(value: Any) -> float:
    """A number as a float. Raises :class:`TypeError` for what is none, a text of one too."""
    if torch.compiler.is_compiling():
        return float(value)
    try:
        made = plain(value)
    except NotPlain as reason:
        raise TypeError(f"a number {reason}") from None
    if not real(made):
        raise TypeError(f"{made!r} is not a number")
    return float(made)


def wholes(value: Any) -> bool:
    """Whether a plain value is a row of ints."""
    return isinstance(value, (tuple, list)) and all(map(whole, value))


# An annotation → what its plain values are, and how a text says so.
_KINDS: Mapping[str, tuple[Any, str]] = {
    "int": (whole, "a whole number"),
    "float": (real, "a number"),
    "bool": (lambda value: type(value) is bool, "True or False"),
    "str": (lambda value: type(value) is str, "a str"),
    "Sequence[int]": (wholes, "a tuple of ints"),
    "Sequence[str]": (
        lambda value: isinstance(value, (tuple, list)) and all(type(each) is str for each in value),
        "a list of strings",
    ),
    "tuple[int, ...]": (wholes, "a tuple of ints"),
    "Ints": (lambda value: whole(value) or wholes(value), "an int, or several"),
    "tuple[float, float]": (
        lambda value: (
            isinstance(value, (tuple, list)) and len(value) == 2 and all(map(real, value))
        ),
        "two numbers",
    ),
}
_WORDS: Mapping[str, str] = {
    "Padding": "an int, several, pairs of them, or a text",
    "Any": "numbers, texts, tuples",
    "Sequence[Value]": "a list of values of this graph",
    "Tensor": "a torch.Tensor",
    "Module": "a torch.nn.Module",
    "dtype": "a torch.dtype",
    "Policy": "a cudnngraph.Policy",
    "Tune": "'heuristic', 'autotune' or 'cached'",
    "Fallback": "'partition' or 'error'",
    "Verify": "'isolated', 'inprocess' or 'off'",
    "tuple[str, ...]": "names such as ('eng8',)",
}


def expected(annotation: str) -> str:
    """The words for the values that an annotation allows."""
    kind, *more = annotation.split(" | ")
    said = _KINDS[kind][1] if kind in _KINDS else _WORDS.get(kind, kind)
    return " or ".join([said, *more])


def wrong_kind(where: str, name: str, value: Any, annotation: str) -> list[Problem]:
    """Problems of a plain value for an annotation; empty for the many kinds not checked here."""
    kinds = annotation.split(" | ")
    if any(kind not in _KINDS and kind != "None" for kind in kinds):
        return []
    if any(value is None if kind == "None" else _KINDS[kind][0](value) for kind in kinds):
        return []
    return [Problem(where, f"{name}={value!r}", expected(annotation))]


def neutral(annotation: str) -> Any:
    """A plain value that stands for a wrong one, which has been reported."""
    found: Sequence[tuple[str, Any]] = (
        ("None", None),
        *(("int", 1), ("Ints", 1), ("float", 1.0), ("bool", False), ("str", "")),
        *(("Sequence[int]", ()), ("tuple[float, float]", (0.0, 0.0))),
    )
    kinds = annotation.split(" | ")
    return next((value for kind, value in found if kind in kinds), None)


# -- tensors ---------------------------------------------------------------------------------------

_ARRAY = ("numpy", "ndarray")  # by its name: numpy may not be there
_HAS_MEMORY = torch.Tensor.__torch_dispatch__
# What torch.nn.parameter.is_lazy asks for, which torch.compile does not trace from torch 2.15 on.
LAZY = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)


def unreadable(where: str, tensor: Any) -> list[Problem]:
    """Why a tensor cannot be read by its address, whatever its form and place."""
    if not issubclass(type(tensor), torch.Tensor):
        return [Problem(where, is_a(tensor), "a torch.Tensor", tensor_mend(tensor))]
    if isinstance(tensor, LAZY):
        return [Problem(where, "is not initialized", "one of a shape", "run its module once")]
    if tensor.is_nested:
        mend = "torch.nested.to_padded_tensor"
        return [Problem(where, "is a nested tensor", "a tensor of one shape", mend)]
    if tensor.layout is not torch.strided:
        return [Problem(where, f"has the layout {tensor.layout}", "torch.strided", "to_dense() it")]
    if tensor.is_quantized:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return [Problem(where, f"is {dtype}", "plain numbers", "dequantize() it")]
    return []


def tensor_mend(value: Any) -> str:
    """How a tensor is made of a value that is none; empty where nothing is known of it."""
    kind = type(value)
    return "torch.from_numpy() it" if (kind.__module__, kind.__name__) == _ARRAY else ""


def without_memory(where: str, tensor: torch.Tensor) -> list[Problem]:
    """Whether a tensor is on a GPU by its word alone: one that is traced or faked."""
    if not tensor.is_cuda or type(tensor).__torch_dispatch__ is _HAS_MEMORY:
        return []
    return [Problem(where, is_a(tensor), "a tensor with memory of its own on the GPU")]


# -- functions on tensors --------------------------------------------------------------------------


def explained(function: Function) -> Function:
    """A function that says of arguments of a wrong kind which they are.

    They are looked at when it has failed, so a call that does not fail costs nothing. Raises
    :class:`BindError` with each; what else goes wrong goes through.
    """
    name, own = function.__name__, inspect.signature(function).parameters

    @wraps(function)
    def explains(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except Exception as error:
            known = isinstance(error, CudnnGraphError) and not isinstance(error, BindError)
            problems = [] if known else _wrong_arguments(own, args, named)
            if problems:
                raise BindError(_called(name, own, args), problems) from error
            raise

    return explains  # type: ignore[return-value]


def checked(function: Function) -> Function:
    """A function whose arguments are looked at before it runs, where that takes longer anyway.

    Raises :class:`GraphError` with each that is of a wrong kind; of a constructor also with what
    torch says of those of the right kind.
    """
    name, own = function.__name__, inspect.signature(function).parameters
    placed = [key for key, each in own.items() if each.kind is each.POSITIONAL_OR_KEYWORD]

    @wraps(function)
    def checks(*args: Any, **named: Any) -> Any:
        args = tuple(map(_kept, args))
        named = {key: _kept(value) for key, value in named.items()}
        problems = _wrong_arguments(own, args, named, first=True)
        if problems and _fit(own, args, named):
            raise GraphError(_called(name, own, args), problems)
        known = zip(placed, args, strict=False)
        args = (*[_as_plain(own, key, value) for key, value in known], *args[len(placed) :])
        named = {key: _as_plain(own, key, value) for key, value in named.items()}
        try:
            return function(*args, **named)
        except (CudnnGraphError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if name != "__init__" or not _fit(own, args, named):
                raise
            problem = Problem("arguments", str(error) or type(error).__name__)
            raise GraphError(_called(name, own, args), [problem]) from error

    return checks  # type: ignore[return-value]


def _kept(value: Any) -> Any:
    """The items of an iterator as a list, since a first look would use it up; else the value."""
    if not hasattr(type(value), "__next__"):
        return value
    try:
        return items(value)
    except NotPlain:  # it is named by the check
        return value


def _as_plain(own: Mapping[str, inspect.Parameter], name: str, value: Any) -> Any:
    """A number or a text of another class as Python's own, a row of such as a tuple or a list."""
    if name not in own or own[name].annotation in ("Any", "torch.Tensor | None"):
        return value
    try:
        return plain(value)
    except NotPlain:  # a row of other things
        return value


def _called(name: str, own: Mapping[str, inspect.Parameter], args: Sequence[Any]) -> str:
    return type(args[0]).__name__ if args and "self" in own else name


def _fit(
    own: Mapping[str, inspect.Parameter], args: Sequence[Any], named: Mapping[str, Any]
) -> bool:
    """Whether a signature takes the arguments; Python says so if not."""
    try:
        inspect.Signature(list(own.values())).bind(*args, **named)
    except TypeError:
        return False
    return True


def _wrong_arguments(
    own: Mapping[str, inspect.Parameter],
    args: Sequence[Any],
    named: Mapping[str, Any],
    *,
    first: bool = False,
) -> list[Problem]:
    """Return what is wrong with arguments for the annotations of their parameters."""
    placed = [name for name, each in own.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    found: list[Problem] = []
    for name, value in (*zip(placed, args, strict=False), *named.items()):
        annotation = str(own[name].annotation) if name in own else "Any"
        if name not in ("self", "cls") and not (first and annotation == "Any"):
            found += _wrong(f"argument '{name}'", value, annotation)
    return found


def _wrong(where: str, value: Any, annotation: str) -> list[Problem]:
    kinds = [kind.rsplit(".", 1)[-1] for kind in annotation.split(" | ")]
    classes = {each.__name__ for each in type(value).__mro__}
    if "Tensor" in classes and "Tensor" in kinds:
        return unreadable(where, value)
    if not classes.isdisjoint(kinds) and type(value) not in (bool, int, float, str):
        return []
    if any(kind.startswith(("Iterable[", "Callable[")) for kind in kinds):
        return []
    if value is None and "None" in kinds:
        return []
    if any(kind.startswith("Mapping[") for kind in kinds):
        fits = issubclass(type(value), Mapping)
        return [] if fits else [Problem(where, is_a(value), expected(" | ".join(kinds)))]
    said = expected(" | ".join(kinds))
    try:
        made = plain(value)
    except NotPlain as reason:
        return [Problem(where, str(reason), said)]
    if "Tensor" in kinds and (mend := tensor_mend(value)):
        return [Problem(where, is_a(value), said, mend)]
    # Of what has a form of its own nothing more is known, of a class that no plain value is one.
    others = [kind for kind in kinds if kind not in _CLASSES]
    if any(kind not in (*_KINDS, "None") for kind in others):
        return []
    if any(kind != "None" and _KINDS[kind][0](made) for kind in others):
        return []
    shown = is_a(value) if made is None or not others else f"is {made!r}"
    return [Problem(where, shown, said)]


# Classes that annotations name.
_CLASSES = frozenset(
    {
        *("Tensor", "Module", "Policy", "dtype", "device", "Graph", "GraphSpec", "LayerNorm"),
        *("RMSNorm", "MultiheadAttention", "Sequential"),
    }
)
