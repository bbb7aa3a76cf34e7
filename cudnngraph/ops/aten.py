"""Torch's own ops inside a graph: an ATen overload by its name, its arguments as plain values.

An argument is None, a bool, an int, a finite float or a str as it is, or a tuple that begins with
what it stands for: ``("tensor", 0)`` the first operand, ``("list", a, b)``, ``("dtype",
"float16")``, ``("device",)`` that of the operands, ``("layout", "strided")``, ``("memory_format",
"channels_last")``, ``("float", "-inf")``, ``("complex", "0.0", "1.0")``. So it can be part of a
key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from ..ir.spec import Node, TensorSpec
from .base import REQUIRED, InferContext, Result, register
from .checks import like_order
from .meta import as_held, bind_arguments
from .meta import infer as form_of
from .row_sums import OVERLOAD as ROW_SUMS

#: How many results of an op a graph can use, and how many each node has a place for.
RESULTS = 16
_PLACES = 4

#: Overloads that show the bits of a tensor as another dtype.
OF_BITS = (torch.ops.aten.view.dtype, torch.ops.aten.view_copy.dtype)

#: Reshapes that strides may forbid, and what takes any. Kernels of torch's do not always give the
#: strides that torch's trace says.
OF_ANY_STRIDES: Mapping[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}

#: Overloads that read or write a tensor at indices, and what their arguments for both are called;
#: in place of a tensor, how many rows it has.
INDEXING: Mapping[str, tuple[str, str]] = {
    "aten.embedding.default": ("weight", "indices"),
    "aten.index_select.default": ("self", "index"),
    "aten.gather.default": ("self", "index"),
    "aten.index.Tensor": ("self", "indices"),
    "aten.scatter.src": ("self", "index"),
    "aten.scatter.value": ("self", "index"),
    "aten.scatter_add.default": ("self", "index"),
    ROW_SUMS: ("rows", "index"),
}


def overload(name: str) -> Any:
    """The overload called ``name``, as "aten.relu.default"; ValueError where there is none."""
    namespace, _, rest = name.partition(".")
    packet, _, which = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), which)
    except (AttributeError, RuntimeError):
        raise ValueError(f"torch has no op {name!r}") from None


def encode(value: Any, tensor: Callable[[Any], int | None]) -> Any:
    """An argument as a plain value; ``tensor`` gives the place of an operand, None for what is
    none. Raises ValueError for what has no such form.
    """
    place = tensor(value)
    if place is not None:
        return ("tensor", place)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else ("float", str(value))
    if isinstance(value, complex):
        return ("complex", str(value.real), str(value.imag))
    if isinstance(value, (list, tuple, torch.Size)):
        return ("list", *(encode(item, tensor) for item in value))
    if isinstance(value, torch.device):
        return ("device",)
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return (kind.__name__, str(value).removeprefix("torch."))
    raise ValueError(f"an argument of type {type(value).__name__}: {value!r}")


def decode(value: Any, tensors: Sequence[Any], device: torch.device) -> Any:
    """The argument that :func:`encode` made a plain value of."""
    if not isinstance(value, tuple):
        return value
    kind, *rest = value
    if kind == "tensor":
        return tensors[rest[0]]
    if kind == "list":
        return [decode(item, tensors, device) for item in rest]
    if kind == "device":
        return device
    if kind == "float":
        return float(rest[0])
    if kind == "complex":
        return complex(*map(float, rest))
    if kind in ("dtype", "layout", "memory_format"):
        return getattr(torch, rest[0])
    raise ValueError(f"an argument that begins with {kind!r}")


def places(value: Any) -> list[int]:
    """The operands that an argument names."""
    if not isinstance(value, tuple):
        return []
    if value[:1] == ("tensor",):
        return [value[1]]
    return [place for item in value for place in places(item)]


def named_dtypes(value: Any) -> frozenset[torch.dtype]:
    """The dtypes in which an argument says that an op works."""
    if not isinstance(value, tuple):
        return frozenset()
    if value[:1] == ("dtype",) and isinstance(value[1], str):  # no argument of that name
        return frozenset({getattr(torch, value[1])})
    return frozenset[torch.dtype]().union(*map(named_dtypes, value))


def call(
    function: Any, attrs: Mapping[str, Any], tensors: Sequence[Any], **more: Any
) -> tuple[Any, ...]:
    """The results of ``function`` on the arguments of a node and its operands."""
    device = tensors[0].device if tensors else torch.device("cpu")
    args = [decode(value, tensors, device) for value in attrs["args"]]
    kwargs = {name: decode(value, tensors, device) for name, value in attrs["kwargs"]}
    result = function(*args, **kwargs, **more)
    many = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(as_held(each) if isinstance(each, torch.Tensor) else each for each in many)


def run(attrs: Mapping[str, Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a node on its operands; None for what an op leaves undefined."""
    with torch.no_grad():
        return call(overload(attrs["overload"]), attrs, tensors)


def forms(attrs: Mapping[str, Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The same on meta tensors; on fake ones of the CPU, as torch.compile does, if the op has no
    kernel for those."""
    op = overload(attrs["overload"])
    with torch.no_grad():
        try:
            return call(partial(form_of, op), attrs, tensors)
        except NotImplementedError as error:
            try:
                return _on_fakes(op, attrs, tensors)
            except Exception:
                raise error from None


def _on_fakes(op: Any, attrs: Mapping[str, Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def on(device: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    with FakeTensorMode():
        given = [on("cpu", x) for x in tensors]
        if not all(isinstance(x, FakeTensor) for x in given):
            raise NotImplementedError("modes of torch are off here")
        made = call(op, attrs, given)
    if not all(x is None or isinstance(x, torch.Tensor) for x in made):
        raise NotImplementedError("lists of results")
    return tuple(on("meta", x) for x in made)


@lru_cache(maxsize=1024)
def out_variant(name: str) -> tuple[Any, tuple[str, ...]] | None:
    """The overload of the same op that writes into given tensors, and the names of those.

    None for an op without one.
    """
    plain = overload(name)

    def form(schema: Any) -> list[tuple[str, str]]:
        return [(each.name, str(each.type)) for each in schema.arguments if not each.is_out]

    packet = plain.overloadpacket
    for which in packet.overloads():
        other = getattr(packet, which)
        outs = tuple(each.name for each in other._schema.arguments if each.is_out)
        count = len(plain._schema.returns)
        if outs and len(outs) == count and form(other._schema) == form(plain._schema):
            return other, outs
    return None


def indexed(node: Node, tensors: Mapping[str, TensorSpec]) -> dict[str, int]:
    """The operands of a node that are indices, each with the number of elements it is one of."""
    name = str(node.attr("overload"))
    if name not in INDEXING:
        return {}
    given = bind_arguments(overload(name), node.attr("args"), dict(node.attr("kwargs")))
    source, index = (given[each] for each in INDEXING[name])
    rows = isinstance(source, int)
    shape = (source,) if rows else tensors[node.operands[source[1]]].shape
    found: dict[str, int] = {}
    many = index[1:] if index[:1] == ("list",) else [index]
    for dim, each in enumerate(many, start=given.get("dim", 0)):
        if each is not None and shape:
            at = node.operands[each[1]]
            found[at] = min(shape[dim], found.get(at, shape[dim]))
    return found


def _aten_problem(call: InferContext) -> str | None:
    """Return what is wrong with the attributes, or None."""
    name, args, kwargs = (call.attrs[attr] for attr in ("overload", "args", "kwargs"))
    if not isinstance(name, str) or not isinstance(args, tuple) or not isinstance(kwargs, tuple):
        return f"overload={name!r}, args={args!r}, kwargs={kwargs!r} is no name and two tuples"
    try:
        schema = overload(name)._schema
        named = sorted(places((*args, *(value for _, value in kwargs))))
    except (TypeError, ValueError, IndexError) as error:
        return str(error)
    if schema.is_mutable:
        return f"{name} writes over its operands"
    if sorted(set(named)) != list(range(len(call.inputs))):
        return f"args and kwargs name the operands {named}, there are {len(call.inputs)}"
    return None


def _aten(call: InferContext) -> list[Result | None] | None:
    """torch itself is asked, on tensors without memory."""
    wrong = _aten_problem(call)
    if wrong is not None:
        call.problem(
            wrong, "the name of an overload, and its arguments as cudnngraph.ops.aten has them"
        )
        return None
    specs = [call[port] for port in call.inputs]
    like = [spec.empty("meta") for spec in specs]
    try:
        results = forms(call.attrs, like)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        call.problem(f"{call.attrs['overload']} does not take these operands: {lines[0]}")
        return None
    if not 0 < len(results) <= RESULTS or not isinstance(results[0], torch.Tensor):
        call.problem(
            f"{call.attrs['overload']} gives {len(results)} results",
            f"1 to {RESULTS} tensors",
        )
        return None
    made: list[Result | None] = []
    for result in results:
        if not isinstance(result, torch.Tensor):  # undefined, or a number
            made.append(None)
            continue
        seen = TensorSpec("", tuple(result.shape), tuple(result.stride()), result.dtype)
        made.append(Result(seen.shape, seen.dtype, like_order(seen)))
    return made + [None] * (_PLACES - len(made))


register(
    "aten",
    "x*",
    _aten,
    lambda inputs, attrs: run(attrs, inputs),
    outputs=" ".join(("y", *(f"y{n}" for n in range(1, RESULTS)))),
    torch_only=True,
    overload=REQUIRED,
    args=REQUIRED,
    kwargs=(),
    traits="holds_sizes",
)
