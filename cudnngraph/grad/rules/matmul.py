"""The gradients of matrix products."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...graph.value import Value
from ..context import Context, Gradients, GradRule, NoGradient, own_order


def _matmul(ctx: Context) -> Gradients:
    """Transposed operands are views; batch dims that broadcast are summed behind the product."""

    def turned(port: str) -> Value:
        rank = len(ctx.spec(port).shape)
        return ctx.build.wide(ctx.g.transpose(ctx[port], rank - 2, rank - 1))

    def dy() -> Value:
        rank = len(ctx.dy.shape)
        return ctx.build.wide(ctx.g.transpose(ctx.dy, rank - 2, rank - 1))

    def dweight() -> Value:
        """The weight's gradient; one product over batch and rows if all batches share it.

        If the columns of the matrix lie in rows, as in a linear layer, the product is made the
        other way round. Its result then lies like the matrix.
        """
        x, y = ctx.spec("x"), ctx.spec("y")
        rank, wide = len(y.shape), ctx.build.wide
        x_, dy_ = ctx["x"], ctx.dy
        if rank == 2 < len(x.shape):
            rows = math.prod(x.shape[:-1])
            x_, dy_ = (wide(ctx.g.reshape(v, (rows, v.shape[-1]))) for v in (x_, dy_))
        last = len(x_.shape) - 1
        order = own_order(y)
        if rank == 2 and order.index(1) < order.index(0):
            product = ctx.anchor("matmul", (wide(ctx.g.transpose(dy_, last - 1, last)), x_))[0]
            return wide(ctx.g.transpose(product, last - 1, last))
        return ctx.anchor("matmul", (wide(ctx.g.transpose(x_, last - 1, last)), dy_))[0]

    return {"x": lambda: ctx.anchor("matmul", (ctx.dy, turned("y")))[0], "y": dweight}


def _grouped_matmul(ctx: Context) -> Gradients:
    """A product of the same groups; the matrices' lies in memory as the matrices do."""
    wide, ends = ctx.build.wide, ctx["ends"]

    def dx() -> Value:
        turned = wide(ctx.g.transpose(ctx["y"], 1, 2))
        return ctx.anchor("grouped_matmul", (ctx.dy, turned), ends)[0]

    def dy() -> Value:
        order = own_order(ctx.spec("y"))
        if order.index(1) < order.index(2):
            return ctx.anchor("grouped_matmul_wgrad", (ctx["x"], ctx.dy), ends)[0]
        turned = ctx.anchor("grouped_matmul_wgrad", (ctx.dy, ctx["x"]), ends)[0]
        return wide(ctx.g.transpose(turned, 1, 2))

    return {"x": dx, "y": dy}


def _grouped_matmul_wgrad(ctx: Context) -> Gradients:
    """Products of the same groups with the matrices of dy."""
    wide, ends = ctx.build.wide, ctx["ends"]
    return {
        "x": lambda: ctx.anchor(
            "grouped_matmul", (ctx["dy"], wide(ctx.g.transpose(ctx.dy, 1, 2))), ends
        )[0],
        "dy": lambda: ctx.anchor("grouped_matmul", (ctx["x"], ctx.dy), ends)[0],
    }


RULES: Mapping[str, GradRule | NoGradient] = {
    "matmul": _matmul,
    "grouped_matmul": _grouped_matmul,
    "grouped_matmul_wgrad": _grouped_matmul_wgrad,
}
