"""Mistakes in attention, packed and paged attention included."""

from __future__ import annotations

import math

import torch

from tests.mistakes.declare import BF16, F16, F32, attention, packed, paged

ATTENTION = [
    ("sdpa_rank", attention("q 'q' has 3 dims", "(B, H, S, D)", q=(4, 32, 64))),
    ("sdpa_dtypes", attention("v 'v' is bfloat16, q 'q' is float16", v_dtype=BF16)),
    ("sdpa_int", attention("q 'q' is int8", dtype=torch.int8)),
    ("sdpa_batch", attention("k has batch 3, q has 2", k=(3, 4, 48, 64))),
    ("sdpa_kv_heads", attention("v has 2 heads, k has 4", v=(2, 2, 48, 64))),
    (
        "sdpa_groups",
        attention("q has 4 heads", "3 heads of k and v", k=(2, 3, 48, 64), v=(2, 3, 48, 64)),
    ),
    ("sdpa_lengths", attention("v has length 47, k has 48", v=(2, 4, 47, 64))),
    ("sdpa_head_dim", attention("k has head dim 32, q has 64", k=(2, 4, 48, 32))),
    ("sdpa_head_dim_0", attention("head dim 0", q=(2, 4, 32, 0), k=(2, 4, 48, 0))),
    (
        "sdpa_mask_dtype",
        attention("attn_mask 'mask' is int32", "bool (True attends)", mask=((32, 48), torch.int32)),
    ),
    (
        "sdpa_mask_other_16_bit",
        attention("attn_mask 'mask' is bfloat16", "float16 or float32", mask=((32, 48), BF16)),
    ),
    (
        "sdpa_mask_shape",
        attention("'mask' has shape (48, 32)", "(2, 4, 32, 48)", mask=((48, 32), torch.bool)),
    ),
    (
        "sdpa_mask_rank",
        attention("'mask' has shape (1, 1, 1, 32, 48)", mask=((1, 1, 1, 32, 48), torch.bool)),
    ),
    (
        "sdpa_length_dtype",
        attention("seq_len_kv 'lengths' is int64", "int32", lengths=((2,), torch.int64)),
    ),
    (
        "sdpa_length_shape",
        attention("'lengths' has shape (3,)", "(B,) = (2,)", lengths=((3,), torch.int32)),
    ),
    ("sdpa_window_number", attention("window=8 is not a pair", "(left, right)", window=8)),
    ("sdpa_window_negative", attention("window left=-1", ">= 0", window=(-1, 0))),
    ("sdpa_window_float", attention("window right=0.5", "whole number", window=(1, 0.5))),
    (
        "sdpa_alignment",
        attention("diagonal_alignment='bottom_left' is unknown", diagonal_alignment="bottom_left"),
    ),
    ("sdpa_causal_number", attention("is_causal=1 is not a bool", is_causal=1)),
    ("sdpa_lse_text", attention("return_lse='yes' is not a bool", return_lse="yes")),
    ("sdpa_scale_nan", attention("scale=nan is not finite", scale=math.nan)),
    ("sdpa_scale_text", attention("scale='auto' is not a number", scale="auto")),
    ("sdpa_dropout_1", attention("dropout_p=1.0", "from 0 to below 1", dropout_p=1.0)),
    ("sdpa_dropout_text", attention("dropout_p='some' is not a number", dropout_p="some")),
    (
        "sdpa_dropout_alone",
        attention("dropout_p=0.1 without anything that says", "or dropout_mask", dropout_p=0.1),
    ),
    (
        "sdpa_dropout_seed_alone",
        attention(
            "dropout_seed without dropout_offset",
            dropout_p=0.1,
            inputs={"dropout_seed": ((1,), torch.int64)},
        ),
    ),
    (
        "sdpa_dropout_twice",
        attention(
            "dropout_mask beside dropout_seed",
            dropout_p=0.1,
            inputs={
                "dropout_seed": ((1,), torch.int64),
                "dropout_offset": ((), torch.int64),
                "dropout_mask": ((2, 4, 32, 48), torch.bool),
            },
        ),
    ),
    (
        "sdpa_dropout_0_with_a_mask",
        attention(
            "dropout_p=0.0 with a seed or a mask",
            "leave them out",
            inputs={"dropout_mask": ((2, 4, 32, 48), torch.bool)},
        ),
    ),
    (
        "sdpa_dropout_seed_int32",
        attention(
            "dropout_seed 'dropout_seed' is int32 (2,)",
            "one int64, of shape () or (1,)",
            dropout_p=0.1,
            inputs={
                "dropout_seed": ((2,), torch.int32),
                "dropout_offset": ((), torch.int64),
            },
        ),
    ),
    (
        "sdpa_dropout_mask_shape",
        attention(
            "dropout_mask 'dropout_mask' is bool (32, 48)",
            "of shape (B, H, S_q, S_kv) = (2, 4, 32, 48)",
            dropout_p=0.1,
            inputs={"dropout_mask": ((32, 48), torch.bool)},
        ),
    ),
    (
        "sdpa_sink_dtype",
        attention(
            "sink 'sink' is float16 (4,)", "float32 (H,) = (4,)", inputs={"sink": ((4,), F16)}
        ),
    ),
    (
        "sdpa_slopes_shape",
        attention(
            "alibi_slopes 'alibi_slopes' is float32 (2, 4)",
            "float32 (H,) = (4,)",
            inputs={"alibi_slopes": ((2, 4), F32)},
        ),
    ),
    (
        "sdpa_alibi_twice",
        attention(
            "alibi=True beside alibi_slopes", alibi=True, inputs={"alibi_slopes": ((4,), F32)}
        ),
    ),
    ("sdpa_softcap_0", attention("softcap=0.0", "> 0, or None for no cap", softcap=0)),
    (
        "varlen_rank",
        packed(
            "q 'q' has 4 dims", "3: (T, H, D)", shapes=((1, 96, 8, 64), (80, 2, 64), (80, 2, 64))
        ),
    ),
    (
        "varlen_tokens",
        packed("v has 81 tokens, k has 80", shapes=((96, 8, 64), (80, 2, 64), (81, 2, 64))),
    ),
    (
        "varlen_heads",
        packed(
            "q has 8 heads, not a multiple of the 3 heads of k",
            shapes=((96, 8, 64), (80, 3, 64), (80, 3, 64)),
        ),
    ),
    (
        "varlen_head_dim",
        packed("k has head dim 32, q has 64", shapes=((96, 8, 64), (80, 2, 32), (80, 2, 64))),
    ),
    (
        "varlen_ends_dtype",
        packed(
            "cu_seqlens_q 'ends_q' is int64 (4,)",
            "int32 (B + 1,) = (4,)",
            ends=(((4,), torch.int64), ((4,), torch.int32)),
        ),
    ),
    (
        "varlen_ends_differ",
        packed(
            "cu_seqlens_kv 'ends_kv' is int32 (5,)",
            "int32 (B + 1,) = (4,)",
            ends=(((4,), torch.int32), ((5,), torch.int32)),
        ),
    ),
    (
        "varlen_no_sequence",
        packed(
            "cu_seqlens_q 'ends_q' has shape (1,)",
            "0, then the end of each sequence",
            ends=(((1,), torch.int32),) * 2,
        ),
    ),
    ("varlen_longest", packed("max_seqlen_kv=0", "the longest sequence", longest=(40, 0))),
    ("varlen_longest_float", packed("max_seqlen_q=4.5", "whole number", longest=(4.5, 9))),
    ("varlen_window", packed("window=8 is not a pair", window=8)),
    (
        "rope_odd",
        (
            lambda g: g.output(
                "y", g.rope(g.input("x", (2, 7), F16), *(g.input(n, (2, 3), F16) for n in "cs"))
            ),
            ("rope", "x has shape (2, 7), cos (2, 3), sin (2, 3)", "an even D"),
        ),
    ),
    (
        "rope_tensor",
        (
            lambda g: g.output(
                "y", g.rope(g.input("x", (2, 8), F16), torch.ones(2, 4), g.input("s", (2, 4), F16))
            ),
            ("rope", "cos is a Tensor", "declare it with g.input"),
        ),
    ),
    (
        "block_mask_shape",
        (
            lambda g: g.output("y", g.block_mask(g.input("b", (2, 3, 3), torch.bool), 400, 300)),
            ("block_mask", "blocks 'b' is bool (2, 3, 3)", "bool (..., 4, 3)"),
        ),
    ),
    ("paged_rank", paged("k_cache 'k' has 3 dims", "(pages, H_kv, page, D)", k=(12, 2, 64))),
    ("paged_page", paged("v_cache has pages of 8 keys, k_cache of 16", v=(12, 2, 8, 64))),
    (
        "paged_heads",
        paged("q has 8 heads, not a multiple of the 3", k=(12, 3, 16, 64), v=(12, 3, 16, 64)),
    ),
    (
        "paged_table_dtype",
        paged(
            "page_table 'table' is int64 (2, 4)",
            "int32 (B, pages of a sequence) = (2, 4)",
            table=((2, 4), torch.int64),
        ),
    ),
    (
        "paged_table_batch",
        paged("page_table 'table' is int32 (3, 4)", "= (2, 4)", table=((3, 4), torch.int32)),
    ),
    (
        "paged_lengths",
        paged("seq_len_kv 'lengths' is int32 (3,)", "(B,) = (2,)", lengths=((3,), torch.int32)),
    ),
]
