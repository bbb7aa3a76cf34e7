"""Ops that work element by element: inference and rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .base import Call, InferRule, Result, dtype_name, register
from .checks import broadcast_shapes, float_operand, like_order, number_attr, same_shape

#: From here on softplus is the identity, as torch has it by default.
SOFTPLUS_THRESHOLD = 20


def _broadcast(call: Call, ports: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
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


def _promoted(call: Call, ports: Sequence[str]) -> torch.dtype | None:
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
    def infer(call: Call) -> list[Result] | None:
        ok = float_operand(call, "x")
        numbers_ = [number_attr(call, attr) for attr in attrs]
        x = call["x"]
        return [Result(x.shape, x.dtype, like_order(x))] if ok and None not in numbers_ else None

    return infer


def _softplus(call: Call) -> Sequence[Result | None] | None:
    result = _unary("beta")(call)
    if result is not None and call.attrs["beta"] <= 0:
        call.problem(f"beta={call.attrs['beta']!r} is not positive", "beta > 0")
        return None
    return result


def _clamp(call: Call) -> list[Result] | None:
    ok = float_operand(call, "x")
    given = [attr for attr in ("min", "max") if call.attrs[attr] is not None]
    if not given:
        call.problem("min and max are both None", "at least one of them")
        return None
    limits = [number_attr(call, attr) for attr in given]
    x = call["x"]
    return [Result(x.shape, x.dtype, like_order(x))] if ok and None not in limits else None


def _binary(call: Call) -> list[Result] | None:
    dtype = _promoted(call, ("x", "y"))
    common = _broadcast(call, ("x", "y"))
    return [Result(common[0], dtype, common[1])] if dtype is not None and common else None


def _comparison(call: Call) -> list[Result] | None:
    dtype = _promoted(call, ("x", "y"))
    common = _broadcast(call, ("x", "y"))
    return [Result(common[0], torch.bool, common[1])] if dtype is not None and common else None


def _bool_operand(call: Call, port: str) -> bool:
    if call[port].dtype == torch.bool:
        return True
    call.problem(
        f"{port} '{call[port].name}' is {dtype_name(call[port].dtype)}", "bool", "compare it first"
    )
    return False


def _logical(*ports: str) -> InferRule:
    def infer(call: Call) -> list[Result] | None:
        ok = all([_bool_operand(call, port) for port in ports])
        common = _broadcast(call, ports)
        return [Result(common[0], torch.bool, common[1])] if ok and common else None

    return infer


def _where(call: Call) -> list[Result] | None:
    ok = _bool_operand(call, "condition")
    dtype = _promoted(call, ("x", "y"))
    common = _broadcast(call, ("condition", "x", "y"))
    return [Result(common[0], dtype, common[1])] if ok and dtype is not None and common else None


def _activation_backward(port: str, *attrs: str) -> InferRule:
    """The gradient dy through an activation whose input or output stands at ``port``."""

    def infer(call: Call) -> list[Result] | None:
        dtype = _promoted(call, ("dy", port))
        same = same_shape(call, port, "dy")
        numbers_ = [number_attr(call, attr) for attr in attrs]
        if dtype is None or not same or None in numbers_:
            return None
        dy = call["dy"]
        return [Result(dy.shape, dtype, like_order(dy))]

    return infer


def _to_float(call: Call) -> list[Result] | None:
    x = call["x"]
    if x.dtype not in (torch.uint8, torch.int8, torch.int32):
        call.problem(f"x '{x.name}' is {dtype_name(x.dtype)}", "uint8, int8 or int32")
        return None
    return [Result(x.shape, torch.float32, like_order(x))]


def _constant(call: Call) -> list[Result] | None:
    return [Result((), torch.float32, ())] if number_attr(call, "value") is not None else None


def _elementwise(name: str, **attrs: Any) -> None:
    register(name, "x", _unary(*attrs), pointwise=True, **attrs)


_elementwise("relu")
_elementwise("leaky_relu", negative_slope=0.01)
_elementwise("elu", alpha=1.0)
_elementwise("gelu")
_elementwise("gelu_tanh")
_elementwise("silu")
_elementwise("sigmoid")
_elementwise("tanh")
register("softplus", "x", _softplus, pointwise=True, beta=1.0)
register("clamp", "x", _clamp, pointwise=True, min=None, max=None)
register(
    "relu_backward",
    "dy y",
    _activation_backward("y", "negative_slope"),
    outputs="dx",
    pointwise=True,
    negative_slope=0.0,
)
for _name in ("gelu", "gelu_tanh", "silu"):
    register(f"{_name}_backward", "dy x", _activation_backward("x"), outputs="dx", pointwise=True)
_elementwise("identity")
register("to_float", "x", _to_float, pointwise=True)
_elementwise("neg")
_elementwise("abs")
_elementwise("exp")
_elementwise("log")
_elementwise("sqrt")
_elementwise("rsqrt")
_elementwise("reciprocal")
_elementwise("erf")
for _name in ("add", "sub", "mul", "div", "pow", "minimum", "maximum"):
    register(_name, "x y", _binary, pointwise=True)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    register(_name, "x y", _comparison, pointwise=True)
register("logical_and", "x y", _logical("x", "y"), pointwise=True)
register("logical_or", "x y", _logical("x", "y"), pointwise=True)
register("logical_not", "x", _logical("x"), pointwise=True)
register("where", "condition x y", _where, pointwise=True)
register("constant", "", _constant, pointwise=True, value=0.0)
