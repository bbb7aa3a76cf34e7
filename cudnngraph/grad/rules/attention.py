"""Gradients of attention, dense and packed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from ...graph.value import Value
from ..context import Context, Gradients, GradRule, NoGradient, no_double_backward


def _sdpa(ctx: Context) -> Gradients:
    node = ctx.node
    keys = (
        *("scale", "is_causal", "diagonal_alignment", "window"),
        *("dropout_p", "alibi", "softcap", "finite_padding"),
    )
    options = {key: node.attr(key) for key in keys}

    def own(port: str) -> Value | None:
        value = ctx.get(port)
        if value is None or not value.dtype.is_floating_point:
            return value
        return ctx.build.narrow(value, ctx.spec(port).dtype)

    @cache
    def lse_() -> Value:
        lse = ctx.result(1)
        if any(ctx.name(p) for p in ("attn_mask", "seq_len_q", "seq_len_kv")) or node.attr(
            "window"
        ) not in (None, (None, 0)):
            # A row without a key has -inf; from a large number its weights come out as exp(-inf).
            lse = ctx.build.wide(ctx.g.where(lse < -1e30, 1e30, lse))
        return lse

    @cache
    def all_() -> list[Value]:
        statistics = torch.float64 if ctx.spec("q").dtype == torch.float64 else torch.float32
        return ctx.anchor(
            "sdpa_backward",
            (ctx.dy, ctx["q"], ctx["k"], ctx["v"], ctx.result()),
            ctx.build.narrow(lse_(), statistics),
            *(own(port) for port in ("attn_mask", "seq_len_q", "seq_len_kv")),
            *(own(f"dropout_{of}") for of in ("seed", "offset", "mask")),
            own("alibi_slopes"),
            mask_grad=ctx.needs("attn_mask"),
            **options,
        )

    def dsink() -> Value:
        """-sum of the sink's weights times the row sums of do * o: its own value is zero."""
        g, shape = ctx.g, ctx.spec("q").shape[:3]
        pull = g.reduction(ctx.dy * ctx.result(), 3)
        weights = (g.expand(ctx["sink"], shape, (1,)) - lse_()).exp()
        # A row that is padding has an lse of -inf, or 1e30, and may hold NaN.
        each = g.where(lse_() > 1e29, 0.0, weights * pull)
        return g.neg(g.reduction(each, (0, 2)))

    ports = ("q", "k", "v", "attn_mask")
    return {
        **{port: lambda place=place: all_()[place] for place, port in enumerate(ports)},  # type: ignore[misc]
        "sink": dsink,
    }


def _sdpa_varlen(ctx: Context) -> Gradients:
    node = ctx.node
    keys = ("scale", "is_causal", "diagonal_alignment", "window", "max_seqlen_q", "max_seqlen_kv")

    @cache
    def all_() -> list[Value]:
        lse = ctx.result(1)  # as for sdpa; a sequence may have no key
        lse = ctx.build.wide(ctx.g.where(lse < -1e30, 1e30, lse))
        statistics = torch.float64 if ctx.spec("q").dtype == torch.float64 else torch.float32
        return ctx.anchor(
            "sdpa_varlen_backward",
            (ctx.dy, ctx["q"], ctx["k"], ctx["v"], ctx.result()),
            ctx.build.narrow(lse, statistics),
            *(ctx.get(port) for port in ("cu_seqlens_q", "cu_seqlens_kv", "ragged")),
            **{key: node.attr(key) for key in keys},
        )

    return {port: lambda place=place: all_()[place] for place, port in enumerate("qkv")}  # type: ignore[misc]


RULES: Mapping[str, GradRule | NoGradient] = {
    "sdpa": _sdpa,
    "sdpa_backward": no_double_backward("sdpa_backward"),
    "sdpa_paged": NoGradient("has no gradient: the cache is for inference"),
    "sdpa_varlen": _sdpa_varlen,
    "sdpa_varlen_backward": no_double_backward("sdpa_varlen_backward"),
    "ragged_offsets": NoGradient("is of whole numbers", flat=True),
    "sdpa_fp8": NoGradient("has no gradient: 8-bit data are constants; sdpa has one"),
}
