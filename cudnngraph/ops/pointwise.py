"""Ops that work element by element: rows, inference and reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..arguments import shown
from .base import (
    FLOATS,
    REQUIRED,
    InferContext,
    InferRule,
    Result,
    Rule,
    Tensors,
    dtype_name,
    register,
)
from .checks import broadcast_shapes, float_operand, like_order, number_attr, same_shape
from .operands import need

#: From here on softplus is the identity, as torch has it by default.
SOFTPLUS_THRESHOLD = 20


def _broadcast(
    call: InferContext, ports: Sequence[str]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Common shape and memory order of operands that broadcast as torch does."""
    specs = [call[port] for port in ports]
    try:
        shape = broadcast_shapes([spec.shape for spec in specs])
    except ValueError:
        listed = ", ".join(f"{port} '{call[port].name}' {call[port].shape}" for port in ports)
        call.problem(
            f"shapes do not broadcast: {listed}", "equal sizes, or 1, from the last dim back"
        )
        return None
    for spec in specs:
        if spec.shape == shape:
            return shape, like_order(spec)
    return shape, tuple(range(len(shape)))


def _promoted(call: InferContext, ports: Sequence[str]) -> torch.dtype | None:
    """float32 beside a 16-bit dtype gives float32; no other mix has a rule.

    As in torch, values that have dims decide; where there is none, those of no dims; where there is
    none of these either, Python numbers.
    """
    if not all([float_operand(call, port) for port in ports]):
        return None
    given = [port for port in ports if port not in call.numbers] or list(ports)
    solid = [port for port in given if call[port].shape != ()] or given
    dtypes = dict.fromkeys(call[port].dtype for port in solid)
    if len(dtypes) == 1:
        return next(iter(dtypes))
    if len(dtypes) == 2 and torch.float32 in dtypes and torch.float64 not in dtypes:
        return torch.float32
    listed = ", ".join(
        f"{port} '{call[port].name}' {dtype_name(call[port].dtype)}" for port in solid
    )
    call.problem(
        f"dtypes do not mix: {listed}",
        "one dtype, or float32 beside one 16-bit dtype",
        "convert one",
    )
    return None


def _unary(*attrs: str) -> InferRule:
    def infer(call: InferContext) -> list[Result] | None:
        ok = float_operand(call, "x")
        numbers_ = [number_attr(call, attr) for attr in attrs]
        x = call["x"]
        return [Result(x.shape, x.dtype, like_order(x))] if ok and None not in numbers_ else None

    return infer


def _softplus(call: InferContext) -> Sequence[Result | None] | None:
    result = _unary("beta")(call)
    if result is not None and call.attrs["beta"] <= 0:
        call.problem(f"beta={call.attrs['beta']!r} is not positive", "beta > 0")
        return None
    return result


def _clamp(call: InferContext) -> list[Result] | None:
    ok = float_operand(call, "x")
    given = [attr for attr in ("min", "max") if call.attrs[attr] is not None]
    if not given:
        call.problem("min and max are both None", "at least one of them")
        return None
    limits = [number_attr(call, attr) for attr in given]
    x = call["x"]
    return [Result(x.shape, x.dtype, like_order(x))] if ok and None not in limits else None


def _binary(call: InferContext) -> list[Result] | None:
    dtype = _promoted(call, ("x", "y"))
    common = _broadcast(call, ("x", "y"))
    return [Result(common[0], dtype, common[1])] if dtype is not None and common else None


def _comparison(call: InferContext) -> list[Result] | None:
    dtype = _promoted(call, ("x", "y"))
    common = _broadcast(call, ("x", "y"))
    return [Result(common[0], torch.bool, common[1])] if dtype is not None and common else None


def _bool_operand(call: InferContext, port: str) -> bool:
    if call[port].dtype == torch.bool:
        return True
    call.problem(
        f"{port} '{call[port].name}' is {dtype_name(call[port].dtype)}", "bool", "compare it first"
    )
    return False


def _logical(*ports: str) -> InferRule:
    def infer(call: InferContext) -> list[Result] | None:
        ok = all([_bool_operand(call, port) for port in ports])
        common = _broadcast(call, ports)
        return [Result(common[0], torch.bool, common[1])] if ok and common else None

    return infer


def _where(call: InferContext) -> list[Result] | None:
    ok = _bool_operand(call, "condition")
    dtype = _promoted(call, ("x", "y"))
    common = _broadcast(call, ("condition", "x", "y"))
    return [Result(common[0], dtype, common[1])] if ok and dtype is not None and common else None


def _activation_backward(port: str, *attrs: str) -> InferRule:
    """The gradient dy through an activation whose input or output stands at ``port``."""

    def infer(call: InferContext) -> list[Result] | None:
        dtype = _promoted(call, ("dy", port))
        same = same_shape(call, port, "dy")
        numbers_ = [number_attr(call, attr) for attr in attrs]
        if dtype is None or not same or None in numbers_:
            return None
        dy = call["dy"]
        return [Result(dy.shape, dtype, like_order(dy))]

    return infer


def _to_float(call: InferContext) -> list[Result] | None:
    x = call["x"]
    if x.dtype not in (torch.uint8, torch.int8, torch.int32):
        call.problem(f"x '{x.name}' is {dtype_name(x.dtype)}", "uint8, int8 or int32")
        return None
    return [Result(x.shape, torch.float32, like_order(x))]


def _cast(call: InferContext) -> list[Result] | None:
    x, given = call["x"], call.attrs["dtype"]
    kinds = {dtype_name(dtype): dtype for dtype in FLOATS}
    name = dtype_name(given) if isinstance(given, torch.dtype) else given
    dtype = kinds.get(name) if isinstance(name, str) else None
    if dtype is None:
        call.problem(f"dtype={shown(given)}", " or ".join(f"torch.{kind}" for kind in kinds))
    if not float_operand(call, "x") or dtype is None:
        return None
    call.attrs["dtype"] = name
    return [Result(x.shape, dtype, like_order(x))]


def _constant(call: InferContext) -> list[Result] | None:
    return [Result((), torch.float32, ())] if number_attr(call, "value") is not None else None


def _run_relu_backward(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    dy, y = need(inputs[0]), need(inputs[1])
    slope = attrs["negative_slope"]
    return torch.where(y > 0, dy, slope * dy) if slope else torch.where(y <= 0, 0.0, dy)


def _run_gelu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    normal = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return dy * (0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))) + x * normal)


def _run_gelu_tanh_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    slope = math.sqrt(2.0 / math.pi)
    tanh = torch.tanh(slope * (x + 0.044715 * x * x * x))
    inner = slope * (1.0 + 3.0 * 0.044715 * x * x)
    return dy * 0.5 * (1.0 + tanh + x * (1.0 - tanh * tanh) * inner)


def _run_silu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(x)
    return dy * gate * (1.0 + x * (1.0 - gate))


def _run_unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Rule:
    return lambda inputs, attrs: function(need(inputs[0]))


def _run_binary(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Rule:
    return lambda inputs, attrs: function(need(inputs[0]), need(inputs[1]))


def _elementwise(
    name: str,
    reference: Rule,
    *,
    traits: str = "",
    positive_port: str | None = None,
    **attrs: Any,
) -> None:
    register(
        name,
        "x",
        _unary(*attrs),
        reference,
        pointwise=True,
        traits=traits,
        positive_port=positive_port,
        **attrs,
    )


_elementwise(
    "relu",
    _run_unary(F.relu),
    traits="fp16_safe bounded_below keeps_positive row_by_row sinks_views",
)
_elementwise(
    "leaky_relu",
    lambda inputs, attrs: F.leaky_relu(need(inputs[0]), attrs["negative_slope"]),
    negative_slope=0.01,
    traits="fp16_safe row_by_row",
)
_elementwise(
    "elu",
    lambda inputs, attrs: F.elu(need(inputs[0]), attrs["alpha"]),
    alpha=1.0,
    traits="fp16_safe",
)
_elementwise("gelu", _run_unary(F.gelu), traits="fp16_safe row_by_row sinks_views")
_elementwise(
    "gelu_tanh",
    _run_unary(lambda x: F.gelu(x, approximate="tanh")),
    traits="fp16_safe row_by_row sinks_views",
)
_elementwise("silu", _run_unary(F.silu), traits="fp16_safe row_by_row sinks_views")
_elementwise(
    "sigmoid",
    _run_unary(torch.sigmoid),
    traits="fp16_safe bounded_below makes_positive row_by_row sinks_views",
)
_elementwise(
    "tanh", _run_unary(torch.tanh), traits="fp16_safe bounded_below row_by_row sinks_views"
)
_elementwise("mish", _run_unary(F.mish), traits="fp16_safe row_by_row sinks_views")
register(
    "softplus",
    "x",
    _softplus,
    lambda inputs, attrs: F.softplus(need(inputs[0]), attrs["beta"]),
    pointwise=True,
    beta=1.0,
    traits="makes_positive",
)
register(
    "clamp",
    "x",
    _clamp,
    lambda inputs, attrs: torch.clamp(need(inputs[0]), attrs["min"], attrs["max"]),
    pointwise=True,
    min=None,
    max=None,
    traits="fp16_safe keeps_positive row_by_row",
)
register(
    "relu_backward",
    "dy y",
    _activation_backward("y", "negative_slope"),
    _run_relu_backward,
    outputs="dx",
    pointwise=True,
    negative_slope=0.0,
    traits="activation_gradient fp16_safe",
)
for _name, _slope in (
    ("gelu", _run_gelu_backward),
    ("gelu_tanh", _run_gelu_tanh_backward),
    ("silu", _run_silu_backward),
):
    register(
        f"{_name}_backward",
        "dy x",
        _activation_backward("x"),
        _run_binary(_slope),
        outputs="dx",
        pointwise=True,
        traits="activation_gradient fp16_safe",
    )
_elementwise("identity", _run_unary(lambda x: x), traits="fp16_safe keeps_positive")
register(
    "cast",
    "x",
    _cast,
    _run_unary(lambda x: x),
    pointwise=True,
    dtype=REQUIRED,
    traits="fp16_safe keeps_positive row_by_row sinks_views",
)
register(
    "to_float",
    "x",
    _to_float,
    _run_unary(lambda x: x.to(torch.float32)),
    pointwise=True,
    traits="keeps_positive",
)
_elementwise("neg", _run_unary(torch.neg), traits="fp16_safe row_by_row")
_elementwise("abs", _run_unary(torch.abs), traits="fp16_safe bounded_below row_by_row")
_elementwise("exp", _run_unary(torch.exp), traits="bounded_below makes_positive")
_elementwise("log", _run_unary(torch.log), positive_port="x")
_elementwise("sqrt", _run_unary(torch.sqrt), traits="makes_positive", positive_port="x")
_elementwise("rsqrt", _run_unary(torch.rsqrt), traits="makes_positive", positive_port="x")
_elementwise("reciprocal", _run_unary(torch.reciprocal), traits="makes_positive", positive_port="x")
_elementwise("erf", _run_unary(torch.erf))
for _name, _traits, _positive in (
    ("add", "fp16_safe keeps_positive row_by_row sinks_views", None),
    ("sub", "fp16_safe row_by_row sinks_views", None),
    ("mul", "fp16_safe keeps_positive row_by_row sinks_views", None),
    ("div", "keeps_positive row_by_row", "y"),
    ("pow", "makes_positive", "x"),
    ("minimum", "fp16_safe keeps_positive row_by_row", None),
    ("maximum", "fp16_safe keeps_positive row_by_row", None),
):
    register(
        _name,
        "x y",
        _binary,
        _run_binary(getattr(torch, _name)),
        pointwise=True,
        traits=_traits,
        positive_port=_positive,
    )
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    register(_name, "x y", _comparison, _run_binary(getattr(torch, _name)), pointwise=True)
register("logical_and", "x y", _logical("x", "y"), _run_binary(torch.logical_and), pointwise=True)
register("logical_or", "x y", _logical("x", "y"), _run_binary(torch.logical_or), pointwise=True)
register("logical_not", "x", _logical("x"), _run_unary(torch.logical_not), pointwise=True)
register(
    "where",
    "condition x y",
    _where,
    lambda inputs, attrs: torch.where(need(inputs[0]), need(inputs[1]), need(inputs[2])),
    pointwise=True,
    traits="fp16_safe keeps_positive",
)
register(
    "constant",
    "",
    _constant,
    lambda inputs, attrs: torch.tensor(attrs["value"], dtype=torch.float64, device="cpu"),
    pointwise=True,
    value=0.0,
    traits="own_data",
)
