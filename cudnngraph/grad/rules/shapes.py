"""Gradients of ops that change the shape alone, and of concatenation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...graph.core import scalar
from ...graph.value import Value
from ...ops.table import OPS
from ..context import Context, Gradients, GradRule, NoGradient


def _permuted(ctx: Context) -> Gradients:
    dims = ctx.node.attr("dims")
    back = tuple(dims.index(dim) for dim in range(len(dims)))
    return {"x": lambda: ctx.g.permute(ctx.dy, back)}


def _zeros(ctx: Context, shape: Sequence[int]) -> Value:
    return ctx.build.wide(ctx.g.expand(scalar(ctx.g, 0.0), shape, ()))


def _slice(ctx: Context) -> Gradients:
    """dy with zeros where nothing was taken."""
    dim, start, step = (ctx.node.attr(key) for key in ("dim", "start", "step"))
    size = ctx.spec("x").shape[dim]

    def dx() -> Value:
        g, value = ctx.g, ctx.dy
        shape = list(value.shape)
        if step > 1:  # zeros between the elements: a dim of its own, merged again
            apart = [*shape[: dim + 1], 1, *shape[dim + 1 :]]
            gaps = [*shape[: dim + 1], step - 1, *shape[dim + 1 :]]
            value = ctx.build.wide(g.reshape(value, apart))
            value = ctx.build.wide(g.concat([value, _zeros(ctx, gaps)], dim + 1))
            shape[dim] *= step
            value = ctx.build.wide(g.reshape(value, shape))
            if shape[dim] > size - start:
                value = ctx.build.wide(g.slice(value, dim, 0, size - start))
                shape[dim] = size - start
        many = ((start, True), (size - start - shape[dim], False))
        for rows, before in many:
            if rows:
                zeros = _zeros(ctx, [*shape[:dim], rows, *shape[dim + 1 :]])
                parts = [zeros, value] if before else [value, zeros]
                value = ctx.build.wide(g.concat(parts, dim))
        return value

    return {"x": dx}


def _concat(ctx: Context) -> Gradients:
    dim, rules, start = ctx.node.attr("dim"), {}, 0
    for port in OPS["concat"].ports_of(len(ctx.node.inputs)):
        stop = start + ctx.spec(port).shape[dim]
        rules[port] = lambda start=start, stop=stop: ctx.g.slice(ctx.dy, dim, start, stop)
        start = stop
    return rules


def _expand(ctx: Context) -> Gradients:
    x, dims = ctx.spec("x"), ctx.node.attr("dims")
    shape = ctx.node.attr("shape")
    repeated = [d for d, n in zip(dims, x.shape, strict=True) if n == 1 and shape[d] != 1]
    over = [dim for dim in range(len(shape)) if dim not in dims] + repeated
    return {"x": lambda: ctx.g.reduction(ctx.dy, over, keepdim=repeated) if over else ctx.dy}


RULES: Mapping[str, GradRule | NoGradient] = {
    "reshape": lambda c: {"x": lambda: c.g.reshape(c.dy, c.spec("x").shape)},
    "transpose": lambda c: {
        "x": lambda: c.g.transpose(c.dy, c.node.attr("dim0"), c.node.attr("dim1"))
    },
    "permute": _permuted,
    "slice": _slice,
    "concat": _concat,
    "expand": _expand,
}
