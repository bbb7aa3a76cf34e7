"""Gradients of norms, and of the ops that take one number per channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch

from ...graph.value import Value
from ..context import Context, Gradients, GradRule, NoGradient, no_double_backward


def _batch_norm_train(ctx: Context) -> Gradients:
    @cache
    def all_() -> list[Value]:
        weight = ctx.build.narrow(ctx["weight"], ctx.spec("weight").dtype)
        kind = torch.float64 if ctx.spec("x").dtype == torch.float64 else torch.float32
        mean, inv_std = (ctx.build.narrow(ctx.result(place), kind) for place in (1, 2))
        return ctx.anchor("batch_norm_backward", (ctx.dy, ctx["x"]), weight, mean, inv_std)

    def like(port: str, place: int) -> Value:
        """The weight's gradient has the weight's shape; the bias may have the other one."""
        return _revector(ctx, all_()[place], ctx.spec(port).shape)

    return {
        "x": lambda: all_()[0],
        "weight": lambda: all_()[1],
        "bias": lambda: like("bias", 2),
    }


def _revector(ctx: Context, value: Value, shape: Sequence[int]) -> Value:
    """A vector between its two forms, (C,) and (1, C, 1, ...)."""
    if value.shape == tuple(shape):
        return value
    if len(shape) > 1:
        return ctx.build.wide(ctx.g.expand(value, shape, (1,)))
    dims = [dim for dim in range(len(value.shape)) if dim != 1]
    return ctx.build.wide(ctx.g.reduction(value, dims))


def _batch_norm(ctx: Context) -> Gradients:
    g, eps = ctx.g, ctx.node.attr("eps")
    affine = ctx.name("weight") is not None

    def inverse(value: Value) -> Value:
        return g.rsqrt(value + eps)

    @cache
    def dx() -> Value:
        factor = inverse(ctx.column("running_var"))
        return ctx.dy * (factor * ctx.column("weight") if affine else factor)

    @cache
    def centred() -> Value:
        return ctx.dy * (ctx["x"] - ctx.column("running_mean"))

    def vector(port: str, like: str) -> Value:
        return _revector(ctx, ctx[port], ctx.spec(like).shape)

    def dvar() -> Value:
        inv = inverse(ctx["running_var"])
        slope = inv * inv * inv * -0.5
        total = ctx.per_channel(centred(), "running_var")
        return total * (slope * vector("weight", "running_var") if affine else slope)

    return {
        "x": dx,
        "running_mean": lambda: -ctx.per_channel(dx(), "running_mean"),
        "running_var": dvar,
        "weight": lambda: (
            ctx.per_channel(centred(), "weight") * inverse(vector("running_var", "weight"))
        ),
        "bias": lambda: ctx.per_channel(ctx.dy, "bias"),
    }


def _instance_norm(ctx: Context) -> Gradients:
    @cache
    def all_() -> list[Value]:
        weight = None
        if ctx.name("weight") is not None:
            weight = ctx.build.narrow(ctx["weight"], ctx.spec("weight").dtype)
        kind = torch.float64 if ctx.spec("x").dtype == torch.float64 else torch.float32
        mean, inv_std = (ctx.build.narrow(ctx.result(place), kind) for place in (1, 2))
        return ctx.anchor("instance_norm_backward", (ctx.dy, ctx["x"]), mean, inv_std, weight)

    def bias() -> Value:
        """A sum of dy alone, where nothing else is needed."""
        if any(ctx.needs(port) for port in ("x", "weight")):
            return _revector(ctx, all_()[2], ctx.spec("bias").shape)
        return ctx.per_channel(ctx.dy, "bias")

    return {"x": lambda: all_()[0], "weight": lambda: all_()[1], "bias": bias}


def _trailing_norm(op: str, statistics: int) -> GradRule:
    """A norm over trailing dims, by the op that gives all its gradients."""

    def rule(ctx: Context) -> Gradients:
        with_bias = ctx.name("bias") is not None and ctx.needs("bias")

        @cache
        def all_() -> list[Value]:
            weight = ctx.build.narrow(ctx["weight"], ctx.spec("weight").dtype)
            kind = torch.float64 if ctx.spec("x").dtype == torch.float64 else torch.float32
            given = [ctx.build.narrow(ctx.result(1 + n), kind) for n in range(statistics)]
            return ctx.anchor(op, (ctx.dy, ctx["x"]), weight, *given, bias_grad=with_bias)

        def alone(port: str, place: int) -> Value:
            """The bias's gradient is a sum of dy alone, where nothing else is needed."""
            if any(ctx.needs(other) for other in ("x", "weight")):
                return all_()[place]
            return ctx.fit(ctx.dy, ctx.spec(port).shape)

        return {
            "x": lambda: all_()[0],
            "weight": lambda: all_()[1],
            "bias": lambda: alone("bias", 2),
        }

    return rule


def _normalize(ctx: Context) -> Gradients:
    """Along the row nothing but what goes beyond its own direction; all of it below eps."""

    def dx() -> Value:
        g, x, floor = ctx.g, ctx["x"], ctx.node.attr("eps") ** 2
        rows = (len(x.shape) - 1,)
        squares = ctx.build.wide(g.reduction(x * x, rows, "sum", keepdim=True))
        inverse = g.rsqrt(squares + g.relu(floor - squares))  # cuDNN's maximum loses NaN
        y = x * inverse
        along = ctx.build.wide(g.reduction(ctx.dy * y, rows, "sum", keepdim=True))
        return (ctx.dy - y * g.where(squares > floor, along, 0.0)) * inverse

    return {"x": dx}


def _batch_norm_apply(ctx: Context) -> Gradients:
    @cache
    def centred() -> Value:
        return ctx["x"] - ctx.column("mean")

    def dx() -> Value:
        return ctx.dy * (ctx.column("inv_std") * ctx.column("weight"))

    return {
        "x": dx,
        "mean": lambda: -ctx.per_channel(dx(), "mean"),
        "inv_std": lambda: ctx.per_channel(ctx.dy * centred() * ctx.column("weight"), "inv_std"),
        "weight": lambda: ctx.per_channel(ctx.dy * centred() * ctx.column("inv_std"), "weight"),
        "bias": lambda: ctx.per_channel(ctx.dy, "bias"),
    }


RULES: Mapping[str, GradRule | NoGradient] = {
    "batch_norm_train": _batch_norm_train,
    "batch_norm_backward": no_double_backward("batch_norm_backward"),
    "batch_norm": _batch_norm,
    "batch_norm_apply": _batch_norm_apply,
    "instance_norm": _instance_norm,
    "instance_norm_backward": no_double_backward("instance_norm_backward"),
    "group_affine": NoGradient("has no gradient: it is for inference; group_norm has one"),
    "layer_norm": _trailing_norm("layer_norm_backward", 2),
    "layer_norm_backward": no_double_backward("layer_norm_backward"),
    "rms_norm": _trailing_norm("rms_norm_backward", 1),
    "rms_norm_backward": no_double_backward("rms_norm_backward"),
    "normalize": _normalize,
    "bias": lambda c: {"x": lambda: c.dy, "bias": lambda: c.per_channel(c.dy, "bias")},
    "scale": lambda c: {
        "x": lambda: c.g.scale(c.dy, c["scale"]),
        "scale": lambda: c.per_channel(c.dy * c["x"], "scale"),
    },
}
