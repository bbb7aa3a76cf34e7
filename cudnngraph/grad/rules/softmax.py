"""Gradients of softmax and of the losses behind it."""

from __future__ import annotations

from collections.abc import Mapping

from ..context import Context, Gradients, GradRule, NoGradient, no_double_backward


def _from_result(op: str) -> GradRule:
    """An op whose gradient reads its result."""

    def rule(ctx: Context) -> Gradients:
        attrs = dict(ctx.node.attrs)
        return {"x": lambda: ctx.anchor(op, (ctx.dy, ctx.result()), **attrs)[0]}

    return rule


def _nll_loss(ctx: Context) -> Gradients:
    attrs = {**dict(ctx.node.attrs), "shape": ctx.spec("x").shape}
    return {"x": lambda: ctx.anchor("nll_loss_backward", (ctx.dy,), ctx["target"], **attrs)[0]}


RULES: Mapping[str, GradRule | NoGradient] = {
    "softmax": _from_result("softmax_backward"),
    "softmax_backward": no_double_backward("softmax_backward"),
    "log_softmax": _from_result("log_softmax_backward"),
    "log_softmax_backward": no_double_backward("log_softmax_backward"),
    "nll_loss": _nll_loss,
    "nll_loss_backward": no_double_backward("nll_loss_backward"),
}
