"""Gradients of convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ...graph.value import Value
from ...ir.spec import Node
from ..context import Context, Gradients, GradRule, NoGradient


def _geometry(node: Node) -> dict[str, Any]:
    return {key: node.attr(key) for key in ("stride", "padding", "dilation", "groups")}


def _conv(ctx: Context) -> Gradients:
    options, x, weight = _geometry(ctx.node), ctx.spec("x"), ctx.spec("weight")
    kernel = weight.shape[2:]
    many = zip(
        x.shape[2:],
        ctx.dy.shape[2:],
        kernel,
        *(options[key] for key in ("stride", "padding", "dilation")),
        strict=True,
    )
    # The rows of x behind the last one that the kernel has reached.
    rest = tuple(n - ((out - 1) * s - sum(p) + d * (r - 1) + 1) for n, out, r, s, p, d in many)
    return {
        "x": lambda: ctx.anchor(
            "conv_transpose", (ctx.dy, ctx["weight"]), output_padding=rest, **options
        )[0],
        "weight": lambda: ctx.anchor("conv_wgrad", (ctx.dy, ctx["x"]), kernel=kernel, **options)[0],
    }


def _conv_transpose(ctx: Context) -> Gradients:
    """The convolution that this one is the data gradient of, and its weight's gradient."""
    options = _geometry(ctx.node)
    kernel = ctx.spec("weight").shape[2:]
    padding, cut = [], []
    many = zip(
        ctx.spec("x").shape[2:],
        ctx.dy.shape[2:],
        kernel,
        *(options[key] for key in ("stride", "padding", "dilation")),
        ctx.node.attr("output_padding"),
        strict=True,
    )
    for n, rows, r, stride, (before, after), d, extra in many:
        # Rows that output_padding has added behind the last tap; a stride of them would count.
        after -= extra // stride * stride
        if -after > rows:  # those are all that is left: the padding has cut off every tap
            before, after = (n - 1) * stride + d * (r - 1) + 1, -rows
        cut.append(max(-after, 0))
        padding.append((before, max(after, 0)))
    options["padding"] = tuple(padding)

    @cache
    def dy() -> Value:
        value = ctx.dy
        for dim, rows in enumerate(cut, 2):
            value = ctx.g.slice(value, dim, 0, value.shape[dim] - rows) if rows else value
        return value

    return {
        "x": lambda: ctx.anchor("conv", (dy(), ctx["weight"]), **options)[0],
        "weight": lambda: ctx.anchor("conv_wgrad", (ctx["x"], dy()), kernel=kernel, **options)[0],
    }


def _conv_wgrad(ctx: Context) -> Gradients:
    """Linear in both: the convolution of x, and the transposed one of dy, by the weight's grad."""
    options, x, dy = _geometry(ctx.node), ctx.spec("x"), ctx.spec("dy")
    many = zip(
        x.shape[2:],
        dy.shape[2:],
        ctx.node.attr("kernel"),
        *(options[key] for key in ("stride", "padding", "dilation")),
        strict=True,
    )
    rest = tuple(n - ((out - 1) * s - sum(p) + d * (r - 1) + 1) for n, out, r, s, p, d in many)
    return {
        "dy": lambda: ctx.anchor("conv", (ctx["x"], ctx.dy), **options)[0],
        "x": lambda: ctx.anchor(
            "conv_transpose", (ctx["dy"], ctx.dy), output_padding=rest, **options
        )[0],
    }


RULES: Mapping[str, GradRule | NoGradient] = {
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "conv_wgrad": _conv_wgrad,
}
