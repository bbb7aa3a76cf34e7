"""Gradients of pooling and interpolation."""

from __future__ import annotations

from collections.abc import Mapping

from ..context import Context, Gradients, GradRule, NoGradient, no_double_backward


def _of_image(op: str, *also: str) -> GradRule:
    """A pool or an interpolation, by the op of its gradient: from dy, and from what ``also`` names.

    A max pool saves no indices, which take 8 bytes an element: its gradient pools x again.
    """

    def rule(ctx: Context) -> Gradients:
        attrs = dict(ctx.node.attrs)
        if not also:
            attrs["input_size"] = ctx.spec("x").shape[2:]
        return {"x": lambda: ctx.anchor(op, (ctx.dy, *(ctx[port] for port in also)), **attrs)[0]}

    return rule


def _back_to(op: str) -> GradRule:
    """The gradient of an op that is linear: the op itself."""

    def rule(ctx: Context) -> Gradients:
        attrs = {key: value for key, value in ctx.node.attrs if key != "input_size"}
        return {"dy": lambda: ctx.anchor(op, (ctx.dy,), **attrs)[0]}

    return rule


RULES: Mapping[str, GradRule | NoGradient] = {
    "max_pool": _of_image("max_pool_backward", "x"),
    "max_pool_backward": no_double_backward("max_pool_backward"),
    "avg_pool": _of_image("avg_pool_backward"),
    "avg_pool_backward": _back_to("avg_pool"),
    "adaptive_avg_pool": _of_image("adaptive_avg_pool_backward"),
    "adaptive_avg_pool_backward": _back_to("adaptive_avg_pool"),
    "adaptive_max_pool": _of_image("adaptive_max_pool_backward", "x"),
    "adaptive_max_pool_backward": no_double_backward("adaptive_max_pool_backward"),
    "interpolate": _of_image("interpolate_backward"),
    "interpolate_backward": _back_to("interpolate"),
}
