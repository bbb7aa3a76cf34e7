"""Gradients of reductions over dims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...graph.value import Value
from ..context import Context, Gradients, GradRule, NoGradient


def _reduction(ctx: Context) -> Gradients:
    g, x, node = ctx.g, ctx.spec("x"), ctx.node
    dims, mode, keep = node.attr("dims"), node.attr("mode"), node.attr("keepdim")
    kept = dims if keep is True else keep or ()
    left = [dim for dim in range(len(x.shape)) if dim not in dims or dim in kept]
    full = [1 if dim in dims else n for dim, n in enumerate(x.shape)]

    def spread(value: Value, shape: Sequence[int]) -> Value:
        return ctx.build.wide(g.expand(value, shape, left)) if dims else value

    def total() -> Value:
        count = math.prod(x.shape[dim] for dim in dims)
        return spread(ctx.dy if mode == "sum" else ctx.dy * (1.0 / count), x.shape)

    def extreme() -> Value:
        """As torch's amax: shared evenly by the elements with the largest value, or |value|.

        It is NaN where one of the elements is, since then none equals the largest.
        """
        data = ctx["x"]
        value = ctx.build.wide(g.abs(data)) if mode == "amax" else data
        best = g.eq(value, g.reduction(value, dims, mode, keepdim=True))
        ones = ctx.build.wide(g.where(best, 1.0, 0.0))
        dy = spread(ctx.dy, full) if full != list(ctx.dy.shape) else ctx.dy
        share = ctx.build.wide(dy / g.reduction(ones, dims, "sum", keepdim=True))
        rest = ctx.build.wide(share - share)  # 0, but NaN of a quotient by 0
        if mode == "amax":
            share = g.where(g.lt(data, 0.0), -share, share)
            share = g.where(g.eq(data, 0.0), rest, share)
        return g.where(best, share, rest)

    return {"x": total if mode in ("sum", "mean") else extreme}


RULES: Mapping[str, GradRule | NoGradient] = {
    "reduction": _reduction,
}
