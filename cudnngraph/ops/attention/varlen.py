"""Attention on packed sequences of several lengths, and its gradients: inference and rows."""

from __future__ import annotations

from typing import Any

import torch

from ..base import REQUIRED, InferContext, Result, dtype_name, register
from ..checks import flag, is_int, like_order, same_dtype, statistics_dtype, whole_tuple
from .checks import BAND, PADDING, check_heads, has_rank, int32_of, sdpa_band
from .packed import ragged_offsets, sdpa_varlen, sdpa_varlen_backward


def _varlen_checked(call: InferContext, *data: str) -> bool:
    """The checks that both directions of packed attention share."""
    before = len(call.problems)
    same_dtype(call, "q", *data)
    if not all([has_rank(call, port, "T, H, D") for port in ("q", *data)]):
        return False
    k, v = call["k"], call["v"]
    check_heads(call, "k", "v")
    if k.shape[0] != v.shape[0]:
        call.problem(f"v has {v.shape[0]} tokens, k has {k.shape[0]}", "as many of both")
    sdpa_band(call)
    for attr in ("max_seqlen_q", "max_seqlen_kv"):
        value = call.attrs[attr]
        if not is_int(value) or value < 1:
            call.problem(f"{attr}={value!r}", "a whole number >= 1, the longest sequence")
        else:  # which is no longer than all of them
            tokens = call[attr.removeprefix("max_seqlen_").rstrip("v")].shape[0]
            call.attrs[attr] = max(1, min(int(value), tokens))
    given = [call.get(port) for port in ("cu_seqlens_q", "cu_seqlens_kv", "ragged")]
    if given[2] is None:
        if given[0] is None or given[1] is None:
            call.problem("has no cu_seqlens", "cu_seqlens_q and cu_seqlens_kv, (B + 1,) int32")
            return False
        count = given[0].shape[0] if given[0].shape else 0
        if count < 2:
            call.problem(
                f"cu_seqlens_q '{given[0].name}' has shape {given[0].shape}",
                "(B + 1,): 0, then the end of each sequence",
            )
        for port in ("cu_seqlens_q", "cu_seqlens_kv"):
            int32_of(call, port, (count,), "(B + 1,)")
    return len(call.problems) == before


def _sdpa_varlen(call: InferContext) -> list[Result | None] | None:
    want_lse = flag(call, "return_lse")
    if not _varlen_checked(call, "k", "v") or call.problems:
        return None
    q, v = call["q"], call["v"]
    lse = Result(q.shape[:2], statistics_dtype(q), (0, 1)) if want_lse else None
    return [Result((*q.shape[:2], v.shape[2]), q.dtype, like_order(q)), lse]


def _sdpa_varlen_backward(call: InferContext) -> list[Result | None] | None:
    if not _varlen_checked(call, "k", "v", "o", "do"):
        return None
    q, k, v, lse = (call[port] for port in ("q", "k", "v", "lse"))
    shape = (*q.shape[:2], v.shape[2])
    for port in ("o", "do"):
        if call[port].shape != shape:
            call.problem(
                f"{port} '{call[port].name}' has shape {call[port].shape}",
                f"(T_q, H, D_v) = {shape}",
            )
    if lse.shape != q.shape[:2] or lse.dtype != statistics_dtype(q):
        call.problem(
            f"lse '{lse.name}' is {dtype_name(lse.dtype)} {lse.shape}",
            f"{dtype_name(statistics_dtype(q))} (T_q, H) = {q.shape[:2]}",
        )
    if call.problems:
        return None
    return [Result(s.shape, s.dtype, like_order(s)) for s in (q, k, v)]


def _ragged_offsets(call: InferContext) -> list[Result] | None:
    if not all([has_rank(call, port, "B + 1") for port in ("cu_seqlens_q", "cu_seqlens_kv")]):
        return None
    count = call["cu_seqlens_q"].shape[0]
    for port in ("cu_seqlens_q", "cu_seqlens_kv"):
        int32_of(call, port, (count,), "(B + 1,)")
    rows = 2
    for attr in ("widths_q", "widths_kv"):
        widths = whole_tuple(call, attr)
        if widths is None or min(widths, default=1) < 1:
            call.problem(f"{attr}={call.attrs[attr]!r}", "a tuple of whole numbers >= 1")
            return None
        call.attrs[attr] = widths
        rows += len(widths)
    return None if call.problems else [Result((rows, count), torch.int32, (0, 1))]


# cuDNN is never given cu_seqlens_*: rewrite/packed.py puts `ragged` in their place.
_STARTS = "cu_seqlens_q?:tokens_q cu_seqlens_kv?:tokens_q ragged?:starts"
_LONGEST: dict[str, Any] = {"max_seqlen_q": REQUIRED, "max_seqlen_kv": REQUIRED}


register(
    "sdpa_varlen",
    f"q:tokens_q k:tokens_kv v:tokens_kv {_STARTS}",
    _sdpa_varlen,
    sdpa_varlen,
    outputs="o:tokens_q lse:tokens_q",
    **BAND,
    **_LONGEST,
    return_lse=False,
    **PADDING,
    traits="multiplies attention packed",
    stats_flag="return_lse",
)
register(
    "sdpa_varlen_backward",
    f"do:tokens_q q:tokens_q k:tokens_kv v:tokens_kv o:tokens_q lse:tokens_q {_STARTS}",
    _sdpa_varlen_backward,
    sdpa_varlen_backward,
    outputs="dq:tokens_q dk:tokens_kv dv:tokens_kv",
    **BAND,
    **_LONGEST,
    traits="multiplies attention attention_gradient packed",
)
register(
    "ragged_offsets",
    "cu_seqlens_q cu_seqlens_kv",
    _ragged_offsets,
    ragged_offsets,
    widths_q=REQUIRED,
    widths_kv=REQUIRED,
    traits="holds_sizes",
)
