"""Softmax and its gradients, and reductions over dims, in kernels."""

from __future__ import annotations

from ...ir.spec import Node, TensorSpec
from ..tape import Kind, Value, mapped, mean, mul, powers, reduced, reshape, sub, total
from .pointwise import Operands


def softmax(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """exp(x) by its sum, the inverse of which is one number of a row."""
    (x,) = operands
    assert x is not None
    return (softmax_along(x, node.attr("dim") % len(x.shape)),)


def softmax_along(x: Value, dim: int) -> Value:
    """The same of a value."""
    _, made, summed = powers(x, dim)
    return mul(made, mapped(lambda a: f"(1.0f / {a})", summed))


def log_softmax(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """x less the logarithm of the sum of exp(x)."""
    (x,) = operands
    assert x is not None
    return (log_softmax_along(x, node.attr("dim") % len(x.shape)),)


def log_softmax_along(x: Value, dim: int) -> Value:
    """The same of a value."""
    shifted, _, summed = powers(x, dim)
    return sub(shifted, mapped(lambda a: f"logf({a})", summed))


def softmax_backward(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """y (dy - sum(dy y))."""
    dy, y = operands
    assert dy is not None and y is not None
    dim = node.attr("dim") % len(y.shape)
    return (mul(y, sub(dy, reduced("sum", mul(dy, y), (dim,)))),)


def log_softmax_backward(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """dy - exp(y) sum(dy)."""
    dy, y = operands
    assert dy is not None and y is not None
    dim = node.attr("dim") % len(y.shape)
    made = mapped(lambda a: f"power({a})", y)
    return (sub(dy, mul(made, total(dy, (dim,)))),)


def reduction(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """sum, mean, max, min, or the largest magnitude."""
    (x,) = operands
    assert x is not None
    dims, mode = node.attr("dims"), node.attr("mode")
    if mode == "amax":
        x = mapped(lambda a: f"fabsf({a})", x)
    if not dims:
        return (x,)
    if mode == "mean":
        return (reshape(mean(x, dims), result.shape),)
    if mode == "sum":
        return (reshape(total(x, dims), result.shape),)
    kinds: dict[str, Kind] = {"max": "max", "amax": "max", "min": "min"}
    return (reshape(reduced(kinds[mode], x, dims), result.shape),)
