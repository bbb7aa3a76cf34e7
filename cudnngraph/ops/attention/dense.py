"""Attention on padded, FP8 or paged operands, and its gradients: inference and rows."""

from __future__ import annotations

from typing import Any

import torch

from ..base import FLOATS, FP8, InferContext, Result, dtype_name, register
from ..checks import flag, like_order, same_dtype, statistics_dtype
from .checks import (
    BAND,
    PADDING,
    check_heads,
    has_rank,
    int32_of,
    per_head,
    sdpa_band,
    sdpa_checked,
    sdpa_lengths,
    sdpa_shapes,
)
from .reference import sdpa, sdpa_backward, sdpa_fp8, sdpa_paged


def _sdpa(call: InferContext) -> list[Result | None] | None:
    want_lse = flag(call, "return_lse")
    if not sdpa_checked(call, "k", "v"):
        return None
    per_head(call, "sink")
    if call.problems:
        return None
    q, v = call["q"], call["v"]
    shape = (*q.shape[:3], v.shape[3])
    lse = Result(q.shape[:3], statistics_dtype(q), (0, 1, 2)) if want_lse else None
    return [Result(shape, q.dtype, like_order(q)), lse]


FP8_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


def _sdpa_fp8_operands(call: InferContext) -> None:
    """Data of one FP8 dtype, which is that of the result; scales of one float32 each."""
    q = call["q"]
    for port in ("q", "k", "v"):
        spec = call[port]
        if spec.dtype not in FP8:
            call.problem(
                f"{port} '{spec.name}' is {dtype_name(spec.dtype)}",
                "float8_e4m3fn or float8_e5m2",
                "quantize it, or use sdpa",
            )
        elif spec.dtype != q.dtype and q.dtype in FP8:
            call.problem(
                f"{port} '{spec.name}' is {dtype_name(spec.dtype)}, q '{q.name}' is "
                f"{dtype_name(q.dtype)}",
                "one dtype",
            )
    for port in FP8_SCALES:
        spec = call[port]
        if spec.dtype != torch.float32 or spec.shape not in ((), (1,)):
            call.problem(
                f"{port} '{spec.name}' is {dtype_name(spec.dtype)} {spec.shape}",
                "float32 () or (1,): one number",
            )
    given = call.attrs["dtype"]
    name = dtype_name(given) if isinstance(given, torch.dtype) else given
    if name not in (None, dtype_name(q.dtype)):
        call.problem(f"dtype={given!r}", f"None or torch.{dtype_name(q.dtype)}, that of q")
    call.attrs["dtype"] = dtype_name(q.dtype)


def _sdpa_fp8(call: InferContext) -> list[Result | None] | None:
    want_lse = flag(call, "return_lse")
    _sdpa_fp8_operands(call)
    if not sdpa_shapes(call):
        return None
    sdpa_lengths(call)
    sdpa_band(call)
    if call.problems:
        return None
    q, v = call["q"], call["v"]
    shape = (*q.shape[:3], v.shape[3])
    lse = Result(q.shape[:3], torch.float32, (0, 1, 2)) if want_lse else None
    largest = Result((), torch.float32, ())
    return [Result(shape, q.dtype, like_order(q)), lse, largest, largest]


def _sdpa_backward(call: InferContext) -> list[Result | None] | None:
    want_mask = flag(call, "mask_grad")
    if not sdpa_checked(call, "k", "v", "o", "do"):
        return None
    q, v, lse, mask = call["q"], call["v"], call["lse"], call.get("attn_mask")
    shape = (*q.shape[:3], v.shape[3])
    for port in ("o", "do"):
        if call[port].shape != shape:
            call.problem(
                f"{port} '{call[port].name}' has shape {call[port].shape}",
                f"(B, H, S_q, D_v) = {shape}",
            )
    if lse.shape != q.shape[:3] or lse.dtype != statistics_dtype(q):
        call.problem(
            f"lse '{lse.name}' is {dtype_name(lse.dtype)} {lse.shape}",
            f"{dtype_name(statistics_dtype(q))} (B, H, S_q) = {q.shape[:3]}",
        )
    if want_mask and (mask is None or mask.dtype not in FLOATS):
        call.problem(
            "mask_grad=True without an additive mask", "attn_mask of a floating dtype", "leave it"
        )
    if call.problems:
        return None
    like = [Result(s.shape, s.dtype, like_order(s)) for s in (q, call["k"], v)]
    if not want_mask or mask is None:
        return [*like, None]
    return [*like, Result(mask.shape, mask.dtype, like_order(mask))]


def _sdpa_paged(call: InferContext) -> list[Result | None] | None:
    want_lse = flag(call, "return_lse")
    same_dtype(call, "q", "k_cache", "v_cache")
    paged = "pages, H_kv, page, D"
    ranks = [has_rank(call, "q", "B, H, S_q, D"), has_rank(call, "page_table", "B, pages")]
    ranks += [has_rank(call, port, paged) for port in ("k_cache", "v_cache")]
    if not all(ranks):
        return None
    q, k, v, table = (call[port] for port in ("q", "k_cache", "v_cache", "page_table"))
    check_heads(call, "k_cache", "v_cache")
    sdpa_band(call)
    if k.shape[2] != v.shape[2] or k.shape[2] == 0:
        call.problem(
            f"v_cache has pages of {v.shape[2]} keys, k_cache of {k.shape[2]}", "equal pages, >= 1"
        )
    for port in ("page_table", "page_table_v"):
        int32_of(call, port, (q.shape[0], table.shape[1]), "(B, pages of a sequence)")
    for port in ("seq_len_q", "seq_len_kv"):
        int32_of(call, port, (q.shape[0],), "(B,)")
    if call.problems:
        return None
    lse = Result(q.shape[:3], statistics_dtype(q), (0, 1, 2)) if want_lse else None
    return [Result((*q.shape[:3], v.shape[3]), q.dtype, like_order(q)), lse]


_SCORES: dict[str, Any] = {"dropout_p": 0.0, "alibi": False, "softcap": None}

_DROPOUT = "dropout_seed?:scalar dropout_offset?:scalar dropout_mask?"
_LENGTHS = "seq_len_q?:lengths seq_len_kv?:lengths"


register(
    "sdpa",
    f"q k v attn_mask? {_LENGTHS} {_DROPOUT} alibi_slopes?:heads sink?:heads",
    _sdpa,
    sdpa,
    outputs="o lse:row_stats",
    **BAND,
    return_lse=False,
    **_SCORES,
    **PADDING,
    traits="multiplies attention",
    stats_flag="return_lse",
    no_grad_ports="alibi_slopes dropout_mask",
)
register(
    "sdpa_paged",
    "q k_cache v_cache page_table:pages seq_len_kv:lengths seq_len_q?:lengths page_table_v?:pages",
    _sdpa_paged,
    sdpa_paged,
    outputs="o lse:row_stats",
    **{**BAND, "diagonal_alignment": "bottom_right"},
    return_lse=False,
    **PADDING,
    traits="multiplies attention paged",
)
register(
    "sdpa_fp8",
    f"q k v {' '.join(FP8_SCALES)} {_LENGTHS}",
    _sdpa_fp8,
    sdpa_fp8,
    outputs="o lse:row_stats amax_s amax_o",
    dtype=None,
    scale=None,
    is_causal=False,
    diagonal_alignment="top_left",
    window=None,
    return_lse=False,
    traits="multiplies attention",
)
register(
    "sdpa_backward",
    f"do q k v o lse:row_stats attn_mask? {_LENGTHS} {_DROPOUT} alibi_slopes?:heads",
    _sdpa_backward,
    sdpa_backward,
    outputs="dq dk dv dmask",
    **BAND,
    mask_grad=False,
    **_SCORES,
    **PADDING,
    traits="multiplies attention attention_gradient",
)
