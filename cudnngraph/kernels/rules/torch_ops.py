"""Torch's own ops in kernels: what moves elements, casts, comparisons of whole numbers, functions.

An element is picked at a place that is computed. A place that an index names is checked: one
outside of the tensor reads nothing, and gives NaN, or 0 of whole numbers, where torch's kernels
abort.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch

from ...ir.spec import Node, TensorSpec, numel
from ...ops import aten
from ...ops.meta import bind_arguments
from ..scalars import MEMORY, REGISTER, number
from ..tape import (
    Pick,
    Place,
    Refused,
    Value,
    common,
    mapped,
    reshape,
    sliced,
)
from . import row_places, running_sums
from .given import INTS, MOST_PLACES, Given, TorchRule, operand, whole
from .pointwise import Operands
from .softmax import log_softmax_along, softmax_along
from .whole_numbers import (
    clamp,
    floor_divide,
    inverted,
    logical_not,
    magnitude,
    negative,
    of_two,
    remainder,
)


def aten_op(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """An op of torch's own, by its overload. Raises Refused for one without a rule."""
    name = node.attr("overload")
    rule = RULES.get(name)
    if rule is None:
        raise Refused(f"no kernel is generated for {name}")
    if result.dtype not in REGISTER:
        raise Refused(f"no kernel writes {str(result.dtype).removeprefix('torch.')}")
    device = torch.device("cpu")
    args = [aten.decode(value, operands, device) for value in node.attr("args")]
    kwargs = {key: aten.decode(value, operands, device) for key, value in node.attr("kwargs")}
    made = rule(bind_arguments(aten.overload(name), args, kwargs), result)
    several = made if isinstance(made, tuple) else (made,)
    if several[0].type != REGISTER[result.dtype]:
        raise Refused(f"{name} of {several[0].type} that makes {REGISTER[result.dtype]}")
    return several


# -- places that are computed ----------------------------------------------------------------------


def _at(x: Value, at: Value, dim: int, none: str | None = None) -> Value:
    """The elements of x at whole numbers along a dim, which all others are broadcast to.

    ``none`` is C++ for what stands where there is no element; None if there always is one.
    """
    extent = x.shape[dim]
    if at.type not in INTS or extent >= MOST_PLACES:
        raise Refused("places that no int counts")
    wide = tuple(1 if n == dim else each for n, each in enumerate(x.shape))
    shape = common(wide, at.shape)
    found = Pick(shape, (x, at), dim, type=x.type)
    if none is None:
        return found
    inside = f"< {extent}ull"
    return mapped(lambda a, t: f"((u64){t} {inside} ? {a} : {none})", found, at, type=x.type)


def _moved(x: Value, dim: int, extent: int, code: Callable[[str], str]) -> tuple[Value, Value]:
    """x and the places of its elements along a dim, of C++ for those of the result."""
    shape = tuple(extent if n == dim else 1 for n in range(len(x.shape)))
    return x, mapped(code, Place(shape, dim, type="int"), type="int")


def _nothing(x: Value) -> str:
    """C++ for what an index outside gives."""
    return {"float": number(math.nan), "bool": "false"}.get(x.type, "0")


def _wrapped(at: Value, extent: int) -> Value:
    """Places, of which negative ones count from the end."""
    return mapped(lambda t: f"({t} < 0 ? {t} + {extent} : {t})", at, type=at.type)


def _embedding(given: Given, result: TensorSpec) -> Value:
    weight, index = given["weight"], whole(given["indices"])
    rows = _at(weight, reshape(index, (numel(index.shape), 1)), 0, _nothing(weight))
    return reshape(rows, result.shape)


def _index_select(given: Given, result: TensorSpec) -> Value:
    x, index = given["self"], whole(given["index"])
    rank = len(x.shape)
    if not rank:
        raise Refused("an index into a number")
    dim = given["dim"] % rank
    shape = tuple(numel(index.shape) if n == dim else 1 for n in range(rank))
    return _at(x, reshape(index, shape), dim, _nothing(x))


def _gather(given: Given, result: TensorSpec) -> Value:
    x, index = given["self"], whole(given["index"])
    if not x.shape:
        raise Refused("an index into a number")
    dim = given["dim"] % len(x.shape)
    for n, extent in enumerate(index.shape):  # those in front, where the index has fewer
        if n != dim and extent != x.shape[n]:
            x = sliced(x, n, 0, tuple(extent if d == n else e for d, e in enumerate(x.shape)), 1)
    return _at(x, index, dim, _nothing(x))


def _index(given: Given, result: TensorSpec) -> Value:
    """x at indices of dims that follow each other: one index of these dims as one."""
    x, indices = given["self"], given["indices"]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if not dims or dims != list(range(dims[0], dims[-1] + 1)):
        raise Refused("indices of dims that do not follow each other")
    first, last, extents = dims[0], dims[-1] + 1, [x.shape[dim] for dim in dims]
    at: Value | None = None
    inside: Value | None = None
    for dim, extent in zip(dims, extents, strict=True):
        own = _wrapped(whole(indices[dim]), extent)
        there = mapped(lambda t, n=extent: f"((u64){t} < {n}ull)", own, type="bool")
        if at is None or inside is None:
            at, inside = own, there
            continue
        step = lambda a, b, n=extent: f"((i64){a} * {n} + {b})"  # noqa: E731
        at = mapped(step, at, own, type="i64")
        inside = mapped(lambda a, b: f"({a} && {b})", inside, there, type="bool")
    assert at is not None and inside is not None
    checked = mapped(lambda t, ok: f"({ok} ? (i64){t} : -1ll)", at, inside, type="i64")
    count, rest = numel(checked.shape), x.shape[last:]
    rows = reshape(x, (*x.shape[:first], math.prod(extents), *rest))
    line = reshape(checked, (*[1] * first, count, *[1] * len(rest)))
    return reshape(_at(rows, line, first, _nothing(x)), result.shape)


def _constant_pad(given: Given, result: TensorSpec) -> Value:
    pads, value = given["pad"], given["value"]
    x: Value = given["self"]
    kinds = {"float": lambda: number(float(value)), "bool": lambda: str(bool(value)).lower()}
    none = kinds.get(x.type, lambda: f"{int(value)}ll")()
    for n, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        dim = len(x.shape) - 1 - n
        if before or after:
            code = _less(before)
            x = _at(*_moved(x, dim, x.shape[dim] + before + after, code), dim, none)
    return x


def _less(by: int) -> Callable[[str], str]:
    return lambda i: f"({i} - {by})" if by >= 0 else f"({i} + {-by})"


def _reflected(before: int, size: int) -> Callable[[str], str]:
    j, last = _less(before), 2 * (size - 1)

    def code(i: str) -> str:
        return f"({j(i)} < 0 ? -{j(i)} : {j(i)} < {size} ? {j(i)} : {last} - {j(i)})"

    return code


def _nearest(before: int, size: int) -> Callable[[str], str]:
    j = _less(before)
    return lambda i: f"({j(i)} < 0 ? 0 : {j(i)} < {size} ? {j(i)} : {size - 1})"


def _padded(place: Callable[[int, int], Callable[[str], str]]) -> TorchRule:
    """Padding by elements of x."""

    def rule(given: Given, result: TensorSpec) -> Value:
        pads = given["padding"]
        x: Value = given["self"]
        for n, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
            dim = len(x.shape) - 1 - n
            size = x.shape[dim]
            x = _at(*_moved(x, dim, size + before + after, place(before, size)), dim)
        return x

    return rule


def _flip(given: Given, result: TensorSpec) -> Value:
    x: Value = given["self"]
    for dim in {each % max(1, len(x.shape)) for each in given["dims"]}:
        x = _at(*_moved(x, dim, x.shape[dim], _counted_back(x.shape[dim])), dim)
    return x


def _counted_back(size: int) -> Callable[[str], str]:
    return lambda i: f"({size - 1} - {i})"


def _roll(given: Given, result: TensorSpec) -> Value:
    x, dims = given["self"], given["dims"]
    shape = x.shape
    if not dims:
        x, dims = reshape(x, (numel(shape),)), [0]
    for by, dim in zip(given["shifts"], dims, strict=True):
        size = x.shape[dim]
        code = _turned(by % size, size)
        x = _at(*_moved(x, dim % len(x.shape), size, code), dim % len(x.shape))
    return reshape(x, shape)


def _turned(by: int, size: int) -> Callable[[str], str]:
    return lambda i: f"({i} < {by} ? {i} + {size - by} : {i} - {by})"


# -- single elements -------------------------------------------------------------------------------


def _cast(given: Given, result: TensorSpec) -> Value:
    return converted(given["self"], given.get("dtype"))


def converted(x: Value, dtype: torch.dtype | None) -> Value:
    """x as torch casts it, rounded to 16 bits if that is what it is cast to."""
    if dtype is None:
        return x
    kind, to = x.type, REGISTER.get(dtype)
    if to is None or (dtype.itemsize == 1 and dtype.is_floating_point):
        raise Refused(f"a cast to {str(dtype).removeprefix('torch.')}")
    code = "({})"
    if dtype in (torch.float16, torch.bfloat16):
        code = f"rounded<{MEMORY[dtype]}>((float){{}})"
    elif dtype == torch.bool:
        code = "({} != 0)"
    elif dtype == torch.int8:
        code = "(int)(i8)(int){}"
    elif dtype == torch.uint8:
        code = "(int)(u8)(i64){}"
    elif to != kind:
        code = f"({to}){{}}"
    return mapped(code.format, x, type=to)


def _same(given: Given, result: TensorSpec) -> Value:
    x: Value = given["self"]
    return x


def _function(name: str) -> TorchRule:
    return lambda given, result: mapped(lambda a: f"{name}((float){a})", given["self"])


def _of_floats(code: Callable[..., str], *names: str, made: str = "float") -> TorchRule:
    """An op of floats by C++ for its operands, which may be numbers."""

    def rule(given: Given, result: TensorSpec) -> Value:
        operands = [operand(given[name], "float") for name in names]
        return mapped(code, *operands, type=made)

    return rule


def _between(a: str, b: str, t: str) -> str:
    """lerp, from the nearer end, as torch has it."""
    near = f"{a} + {t} * ({b} - {a})"
    return f"(fabsf({t}) < 0.5f ? {near} : {b} - ({b} - {a}) * (1.0f - {t}))"


def _remainder(a: str, b: str) -> str:
    """What is left of a division that is rounded down: of the sign of the divisor."""
    left = f"fmodf({a}, {b})"
    return f"({left} != 0.0f && ({left} < 0.0f) != ({b} < 0.0f) ? {left} + {b} : {left})"


def _left(given: Given, result: TensorSpec) -> Value | tuple[Value, ...]:
    """remainder by a number, of floats and of whole numbers."""
    if given["self"].type == "float":
        return _of_floats(_remainder, "self", "other")(given, result)
    return remainder(given, result)


def _sinc(x: str) -> str:
    turned = f"({number(math.pi)} * {x})"
    return f"({x} == 0.0f ? 1.0f : sinf({turned}) / {turned})"


def _step(a: str, b: str) -> str:
    return f"({a} == 0.0f ? {b} : (float)({a} > 0.0f))"


def _scaled(form: str) -> TorchRule:
    """self and a product of ``by``, the value, with the others: by a form, multiplied from the left
    as in torch, so that nothing overflows that does not there."""

    def rule(given: Given, result: TensorSpec) -> Value | tuple[Value, ...]:
        by = number(float(given.get("value", 1)))
        names = ("self", "tensor1", "tensor2")
        code = partial(form.format, by=by)
        return _of_floats(lambda x, a, b: f"({x} + {code(a=a, b=b)})", *names)(given, result)

    return rule


def _along(made: Callable[[Value, int], Value]) -> TorchRule:
    def rule(given: Given, result: TensorSpec) -> Value:
        x = given["self"]
        if x.type != "float" or not x.shape:
            raise Refused("a softmax of no rows of floats")
        return made(x, given["dim"] % len(x.shape))

    return rule


def _where(given: Given, result: TensorSpec) -> Value:
    condition, x, y = given["condition"], given["self"], given["other"]
    if condition.type != "bool":
        raise Refused("a condition that is no bool")
    like = REGISTER[result.dtype]
    operands = (condition, operand(x, like), operand(y, like))
    return mapped(lambda c, a, b: f"({c} ? {a} : {b})", *operands, type=like)


def _masked_fill(given: Given, result: TensorSpec) -> Value:
    x = given["self"]
    if given["mask"].type != "bool":
        raise Refused("a mask that is no bool")
    operands = (given["mask"], operand(given["value"], x.type), x)
    return mapped(lambda m, v, a: f"({m} ? {v} : {a})", *operands, type=x.type)


#: CUDA's functions of a float that are torch's.
_FUNCTIONS = {
    **{name: f"{name}f" for name in ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh")},
    **{name: f"{name}f" for name in ("asinh", "acosh", "atanh", "expm1", "exp2", "log1p", "log2")},
    **{name: f"{name}f" for name in ("log10", "erfc", "floor", "ceil", "trunc")},
    "round": "rintf",  # halves to even numbers
}
_OF_ONE: Mapping[str, Callable[[str], str]] = {
    "frac": lambda x: f"({x} - truncf({x}))",
    "deg2rad": lambda x: f"({x} * {number(math.pi / 180)})",
    "rad2deg": lambda x: f"({x} * {number(180 / math.pi)})",
    "sinc": _sinc,
    "sign": lambda x: f"(float)((0.0f < {x}) - ({x} < 0.0f))",
}
_TESTS: Mapping[str, Callable[[str], str]] = {
    "isnan": lambda x: f"({x} != {x})",
    "isinf": lambda x: f"(fabsf({x}) > 0x1.fffffep127f)",
    "isfinite": lambda x: f"(fabsf({x}) <= 0x1.fffffep127f)",
    "signbit": lambda x: f"(copysignf(1.0f, {x}) < 0.0f)",
}
_OF_PAIRS: Mapping[str, Callable[[str, str], str]] = {
    "atan2.default": lambda a, b: f"atan2f({a}, {b})",
    "hypot.default": lambda a, b: f"hypotf({a}, {b})",
    "copysign.Tensor": lambda a, b: f"copysignf({a}, {b})",
    "fmax.default": lambda a, b: f"fmaxf({a}, {b})",
    "fmin.default": lambda a, b: f"fminf({a}, {b})",
    "fmod.Tensor": lambda a, b: f"fmodf({a}, {b})",
    "fmod.Scalar": lambda a, b: f"fmodf({a}, {b})",
    "remainder.Tensor": _remainder,
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGICAL = {"logical_and": "&&", "logical_or": "||", "logical_xor": "!="}
_BITWISE = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}

RULES: Mapping[str, TorchRule] = {
    **row_places.RULES,
    **running_sums.RULES,
    "aten.embedding.default": _embedding,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.index.Tensor": _index,
    "aten.constant_pad_nd.default": _constant_pad,
    **{f"aten.reflection_pad{n}d.default": _padded(_reflected) for n in (1, 2, 3)},
    **{f"aten.replication_pad{n}d.default": _padded(_nearest) for n in (1, 2, 3)},
    "aten.flip.default": _flip,
    "aten.roll.default": _roll,
    "aten._to_copy.default": _cast,
    "aten.clone.default": _same,
    "aten.alias.default": _same,
    **{f"aten.{name}.default": _function(cudas) for name, cudas in _FUNCTIONS.items()},
    **{f"aten.{name}.default": _of_floats(code, "self") for name, code in _OF_ONE.items()},
    **{
        f"aten.{name}.default": _of_floats(code, "self", made="bool")
        for name, code in _TESTS.items()
    },
    **{f"aten.{name}": _of_floats(code, "self", "other") for name, code in _OF_PAIRS.items()},
    "aten.remainder.Scalar": _left,
    "aten.heaviside.default": _of_floats(_step, "self", "values"),
    "aten.lerp.Tensor": _of_floats(_between, "self", "end", "weight"),
    "aten.lerp.Scalar": _of_floats(_between, "self", "end", "weight"),
    "aten.addcmul.default": _scaled("{by} * {a} * {b}"),
    "aten.addcdiv.default": _scaled("{by} * ({a} / {b})"),
    "aten._softmax.default": _along(softmax_along),
    "aten._log_softmax.default": _along(log_softmax_along),
    "aten.floor_divide.default": floor_divide,
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.clamp.default": clamp,
    "aten.where.self": _where,
    "aten.where.ScalarSelf": _where,
    "aten.where.ScalarOther": _where,
    "aten.logical_not.default": logical_not,
    "aten.bitwise_not.default": inverted,
    "aten.neg.default": negative,
    "aten.abs.default": magnitude,
    **{f"aten.{name}.default": of_two(sign, "bool") for name, sign in _LOGICAL.items()},
    **{
        f"aten.{name}.{kind}": of_two(sign, "bool", *INTS, wraps=kind == "Scalar")
        for name, sign in _BITWISE.items()
        for kind in ("Tensor", "Scalar")
    },
    **{
        f"aten.{name}.{kind}": of_two(sign, "float", "bool", *INTS, made="bool")
        for name, sign in _COMPARISONS.items()
        for kind in ("Tensor", "Scalar")
    },
    **{
        f"aten.{name}.Tensor": of_two(sign, "bool", *INTS)
        for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"))
    },
}
