"""Attention of dense, packed and paged tensors."""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import explained
from ..errors import BindError, Problem
from ..policy import Policy
from ..runtime.specialize import intern_static
from .call import cast, needed_out, run_graph, run_into
from .graphs import attention, attention_paged, attention_varlen

Tensor = torch.Tensor


def attention_options(
    is_causal: bool,
    scale: float | None,
    window: Any,
    diagonal_alignment: str,
    dropout_p: float,
    alibi: bool,
    softcap: float | None,
    finite_padding: bool,
    return_lse: bool,
) -> dict[str, Any]:
    """The options of :func:`attention`."""
    return {
        "is_causal": is_causal,
        "scale": scale,
        "window": window,
        "diagonal_alignment": diagonal_alignment,
        "dropout_p": dropout_p,
        "alibi": alibi,
        "softcap": softcap,
        "finite_padding": finite_padding,
        "return_lse": return_lse,
    }


@explained
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    diagonal_alignment: str = "top_left",
    seq_len_q: Tensor | None = None,
    seq_len_kv: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    dropout_offset: Tensor | None = None,
    alibi: bool = False,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    finite_padding: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    policy: Policy | None = None,
) -> Any:
    """F.scaled_dot_product_attention over (B, H, S, D), with a window, lengths, sinks and the lse.

    Keywords are those of :meth:`cudnngraph.Graph.sdpa`; with ``return_lse=True`` the pair (o, lse),
    whose lse has no gradient. A row that may attend to no key gives zeros. Fewer heads of key and
    value than of query are shared in groups, whatever ``enable_gqa`` says. A float mask that
    requires grad gets one, and so does a sink. Seed and offset of a dropout are drawn from torch's
    generator of query's device unless they are given.
    """
    query, key, value, attn_mask = cast(query, key, value, attn_mask)
    if dropout_p and dropout_seed is None and dropout_offset is None:
        drawn = torch.randint(2**63 - 1, (4,), device=query.device)
        dropout_seed, dropout_offset = drawn[:1], drawn[2:3]  # 16 bytes apart, as plans want it
    static = intern_static(
        attention_options,
        *(is_causal, scale, window, diagonal_alignment),
        *(dropout_p, alibi, softcap, finite_padding, return_lse),
    )
    tensors = (
        *(query, key, value, attn_mask, seq_len_q, seq_len_kv),
        *(dropout_seed, dropout_offset, alibi_slopes, sink),
    )
    if out is not None:
        if return_lse:
            problem = Problem("out", "is given with return_lse=True", "one of the two")
            raise BindError("attention", [problem])
        return run_into(attention, policy, out, tensors, static)
    result = run_graph(attention, policy, tensors, static, 2 if return_lse else 1)
    return tuple(result) if return_lse else result


def scaled_dot_product_attention_into(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """:func:`scaled_dot_product_attention` into ``out``, which lies as query does."""
    out = needed_out(out, "scaled_dot_product_attention_into")
    result: Tensor = scaled_dot_product_attention(query, key, value, out=out, **options)
    return result


def _band_options(
    is_causal: bool,
    scale: float | None,
    window: Any,
    diagonal_alignment: str,
    finite_padding: bool,
    return_lse: bool,
    *longest: int,
) -> dict[str, Any]:
    return {
        "is_causal": is_causal,
        "scale": scale,
        "window": window,
        "diagonal_alignment": diagonal_alignment,
        "finite_padding": finite_padding,
        "return_lse": return_lse,
        **dict(zip(("max_seqlen_q", "max_seqlen_kv"), longest, strict=False)),
    }


@explained
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    diagonal_alignment: str = "top_left",
    finite_padding: bool = False,
    return_lse: bool = False,
    policy: Policy | None = None,
) -> Any:
    """Attention within sequences packed one behind the other, (T, H, D).

    Arguments are those of :meth:`cudnngraph.Graph.sdpa_varlen`. The sequences may change from call
    to call; another number of them, of tokens, or another longest one is another graph. One tensor
    for both ``cu_seqlens`` says that those of q and k are the same: torch's flash attention then
    serves causal masks and windows from the top left too.
    """
    query, key, value = cast(query, key, value)
    band = (is_causal, scale, window, diagonal_alignment, finite_padding, return_lse)
    static = intern_static(_band_options, *band, max_seqlen_q, max_seqlen_kv)
    same = cu_seqlens_kv is cu_seqlens_q
    tensors = (query, key, value, cu_seqlens_q, None if same else cu_seqlens_kv)
    result = run_graph(attention_varlen, policy, tensors, static, 2 if return_lse else 1)
    return tuple(result) if return_lse else result


@explained
def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_len_kv: Tensor,
    *,
    seq_len_q: Tensor | None = None,
    page_table_v: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    diagonal_alignment: str = "bottom_right",
    finite_padding: bool = False,
    return_lse: bool = False,
    policy: Policy | None = None,
) -> Any:
    """Attention of (B, H, S_q, D) to keys and values in the pages of a cache, for inference.

    Arguments are those of :meth:`cudnngraph.Graph.sdpa_paged`.
    """
    band = (is_causal, scale, window, diagonal_alignment, finite_padding, return_lse)
    static = intern_static(_band_options, *band)
    tensors = (query, k_cache, v_cache, page_table, seq_len_kv, seq_len_q, page_table_v)
    result = run_graph(attention_paged, policy, tensors, static, 2 if return_lse else 1)
    return tuple(result) if return_lse else result
