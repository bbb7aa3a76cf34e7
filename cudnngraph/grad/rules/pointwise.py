"""Gradients of ops that work element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache

from ...graph.value import Value
from ..context import Context, Gradients, GradRule, NoGradient, no_double_backward

_PIECEWISE_CONSTANT = NoGradient("is constant but for jumps", flat=True)


def _pow(ctx: Context) -> Gradients:
    g, number = ctx.g, ctx.constant("y")

    def base() -> Value:
        if number == 0:
            return ctx.dy * 0.0
        if number is not None:
            less = number - 1.0
            slope = ctx["x"] if less == 1.0 else g.pow(ctx["x"], less)
            return ctx.dy * (slope * number)
        x, y = ctx["x"], ctx["y"]
        return g.where(g.eq(y, 0.0), 0.0, ctx.dy * (y * g.pow(x, y - 1.0)))

    def exponent() -> Value:
        x, y = ctx["x"], ctx["y"]
        nothing = g.logical_and(g.eq(x, 0.0), g.ge(y, 0.0))
        return g.where(nothing, 0.0, ctx.dy * (ctx.result() * g.log(x)))

    return {"x": base, "y": exponent}


def _extremum(better: str) -> GradRule:
    """To the operand that won, half to each where they are equal, all to both where one is NaN."""

    def rule(ctx: Context) -> Gradients:
        g = ctx.g

        def part(mine: str, other: str) -> Value:
            a, b = ctx[mine], ctx[other]
            lost = g.lt(a, b) if better == "maximum" else g.gt(a, b)
            kept = g.where(g.eq(a, b), ctx.dy * 0.5, ctx.dy)
            return g.where(lost, 0.0, kept)

        return {"x": lambda: part("x", "y"), "y": lambda: part("y", "x")}

    return rule


def _div(ctx: Context) -> Gradients:
    @cache
    def dx() -> Value:
        return ctx.dy / ctx["y"]

    return {"x": dx, "y": lambda: -(dx() * ctx.result())}


def _clamp(ctx: Context) -> Gradients:
    """The gradient passes if x is between the bounds; it is 0 at them, as relu's at 0."""

    def dx() -> Value:
        g, low, high = ctx.g, ctx.node.attr("min"), ctx.node.attr("max")
        x = ctx["x"]
        inside = g.gt(x, low) if low is not None else g.lt(x, high)
        if low is not None and high is not None:
            inside = g.logical_and(inside, g.lt(x, high))
        return g.where(inside, ctx.dy, 0.0)

    return {"x": dx}


def _relu(ctx: Context) -> Gradients:
    """dy where y is positive. In front of a batch norm's backward y comes from what that one reads:
    cuDNN has the two as one plan so, for 16-bit data, and y need not be kept."""

    def dx() -> Value:
        norm = ctx.build.producer.get(str(ctx.name("x")))
        if (
            norm is None
            or norm.op != "batch_norm_train"
            or norm.outputs[0] != ctx.name("x")
            or ctx.build.dtypes[str(norm.inputs[0])].itemsize != 2
            or ctx.build.users(str(norm.outputs[0])) > 1
        ):
            return ctx.g.relu_backward(ctx.dy, ctx.result())
        x, weight, bias, *_ = norm.inputs
        _, mean, inv_std, *_ = norm.outputs
        names = (x, mean, inv_std, weight, bias)
        y = ctx.build.apply(
            "batch_norm_apply", [ctx.build.forward(str(name)) for name in names], {}
        )[0]
        return ctx.g.relu_backward(ctx.dy, y)

    return {"x": dx}


def _leaky_relu(ctx: Context) -> Gradients:
    slope = ctx.node.attr("negative_slope")
    # The result has the sign of x unless the slope turns it.
    return {
        "x": lambda: ctx.g.relu_backward(ctx.dy, ctx.result() if slope >= 0 else ctx["x"], slope)
    }


def _elu(ctx: Context) -> Gradients:
    alpha = ctx.node.attr("alpha")

    def dx() -> Value:
        if alpha >= 0:
            y = ctx.result()
            return ctx.g.where(y > 0.0, ctx.dy, ctx.dy * (y + alpha))
        x = ctx["x"]
        return ctx.g.where(x > 0.0, ctx.dy, ctx.dy * (x.exp() * alpha))

    return {"x": dx}


def _abs(ctx: Context) -> Gradients:
    def dx() -> Value:
        x = ctx["x"]
        return ctx.g.where(x > 0.0, ctx.dy, ctx.g.where(x < 0.0, -ctx.dy, 0.0))

    return {"x": dx}


def _from_x(slope: Callable[[Context, Value], Value]) -> GradRule:
    """A unary op: ``slope(ctx, x)`` is the gradient of x."""
    return lambda ctx: {"x": lambda: slope(ctx, ctx["x"])}


def _from_y(slope: Callable[[Context, Value], Value]) -> GradRule:
    """A unary op: ``slope(ctx, y)`` is the gradient of x, from the result y."""
    return lambda ctx: {"x": lambda: slope(ctx, ctx.result())}


def _mish(ctx: Context, x: Value) -> Value:
    share = ctx.g.tanh(ctx.g.softplus(x))
    return ctx.dy * (share + x * ctx.g.sigmoid(x) * (1.0 - share * share))


RULES: Mapping[str, GradRule | NoGradient] = {
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "gelu": _from_x(lambda c, x: c.g.gelu_backward(c.dy, x)),
    "gelu_tanh": _from_x(lambda c, x: c.g.gelu_tanh_backward(c.dy, x)),
    "silu": _from_x(lambda c, x: c.g.silu_backward(c.dy, x)),
    "sigmoid": _from_y(lambda c, y: c.dy * (y - y * y)),
    "tanh": _from_y(lambda c, y: c.dy - c.dy * (y * y)),
    "softplus": _from_x(lambda c, x: c.dy * c.g.sigmoid(x * c.node.attr("beta"))),
    "mish": _from_x(_mish),
    "clamp": _clamp,
    # Linear in dy; y is only asked for its sign.
    "relu_backward": lambda c: {
        "dy": lambda: c.g.relu_backward(c.dy, c["y"], c.node.attr("negative_slope"))
    },
    "gelu_backward": no_double_backward("gelu_backward"),
    "gelu_tanh_backward": no_double_backward("gelu_tanh_backward"),
    "silu_backward": no_double_backward("silu_backward"),
    "identity": lambda c: {"x": lambda: c.dy},
    "cast": lambda c: {"x": lambda: c.dy},
    "to_float": NoGradient("is of whole numbers", flat=True),
    "neg": lambda c: {"x": lambda: -c.dy},
    "abs": _abs,
    "exp": _from_y(lambda c, y: c.dy * y),
    "log": _from_x(lambda c, x: c.dy / x),
    "sqrt": _from_y(lambda c, y: c.dy * 0.5 / y),
    "rsqrt": _from_y(lambda c, y: c.dy * -0.5 * (y * y * y)),
    "reciprocal": _from_y(lambda c, y: -(c.dy * (y * y))),
    "erf": _from_x(lambda c, x: c.dy * ((-(x * x)).exp() * (2.0 / math.sqrt(math.pi)))),
    "add": lambda c: {"x": lambda: c.dy, "y": lambda: c.dy},
    "sub": lambda c: {"x": lambda: c.dy, "y": lambda: -c.dy},
    "mul": lambda c: {"x": lambda: c.dy * c["y"], "y": lambda: c.dy * c["x"]},
    "div": _div,
    "pow": _pow,
    "minimum": _extremum("minimum"),
    "maximum": _extremum("maximum"),
    **{name: _PIECEWISE_CONSTANT for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: _PIECEWISE_CONSTANT for name in ("logical_and", "logical_or", "logical_not")},
    "where": lambda c: {
        "x": lambda: c.g.where(c["condition"], c.dy, 0.0),
        "y": lambda: c.g.where(c["condition"], 0.0, c.dy),
    },
    "constant": NoGradient("is a number", flat=True),
}
