"""Attention against torch: the variants over one shape, decoding, and packed sequences.

:func:`attention_suite` is what is measured; the functions that make its cases take any size. The
other ways are torch's backends where they can do the same, and its compiled ``flex_attention``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..graph.builder import Graph
from ..graph.value import Value
from ..ops.attention.reference import alibi_slopes
from .cases import Case, Eager, Tensors

BF16 = torch.bfloat16
_BACKENDS = {
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _through(run: Eager, *names: str) -> dict[str, Eager]:
    """``run`` through each of torch's backends, or those of ``names``."""

    def one(backend: SDPBackend) -> Eager:
        def through(t: Tensors) -> torch.Tensor:
            with sdpa_kernel(backend):
                return run(t)

        return through

    return {name: one(_BACKENDS[name]) for name in names or _BACKENDS}


def _flex(
    length: int,
    mask: Callable[..., torch.Tensor] | None = None,
    score: Callable[..., torch.Tensor] | None = None,
) -> dict[str, Eager]:
    """torch's flex_attention, compiled when it is first called."""
    from torch.nn.attention import flex_attention as flex

    @cache
    def compiled() -> Any:
        return torch.compile(flex.flex_attention, dynamic=False)

    @cache
    def blocks(device: torch.device) -> Any:
        if mask is None:
            return None
        return flex.create_block_mask(mask, None, None, length, length, device=device)

    def run(t: Tensors) -> torch.Tensor:
        block_mask = blocks(t["q"].device)
        out: torch.Tensor = compiled()(
            t["q"], t["k"], t["v"], score_mod=score, block_mask=block_mask
        )
        return out

    return {"torch flex_attention": run}


def _graph(
    b: int, h: int, s: int, d: int, *, kv_heads: int | None = None, keys: int | None = None
) -> tuple[Graph, list[Any]]:
    g = Graph("attention")
    kv, n = kv_heads or h, keys or s
    q = g.input("q", (b, h, s, d), BF16)
    return g, [q, *(g.input(name, (b, kv, n, d), BF16) for name in "kv")]


def _case(
    label: str,
    g: Graph,
    o: Value,
    eager: Eager,
    others: Mapping[str, Eager],
    given: Mapping[str, torch.Tensor] | None = None,
) -> Case:
    g.output("o", o)
    return Case(f"attention {label}", "attention", g, eager, others, given=given or {})


def _causal(batch: Any, head: Any, row: Any, key: Any) -> Any:
    return key <= row


def variants(b: int, h: int, s: int, d: int) -> list[Case]:
    """Attention of one shape in its variants."""
    size = f"B{b} H{h} S{s} D{d}"
    cases = []

    def plain(t: Tensors) -> torch.Tensor:
        return F.scaled_dot_product_attention(t["q"], t["k"], t["v"])

    def causal(t: Tensors) -> torch.Tensor:
        return F.scaled_dot_product_attention(t["q"], t["k"], t["v"], is_causal=True)

    def masked(make: Callable[[torch.device], torch.Tensor]) -> Eager:
        made = cache(make)
        return lambda t: F.scaled_dot_product_attention(
            t["q"], t["k"], t["v"], attn_mask=made(t["q"].device)
        )

    g, data = _graph(b, h, s, d)
    cases.append(_case(f"{size} full", g, g.sdpa(*data), plain, _through(plain)))
    g, data = _graph(b, h, s, d)
    cases.append(
        _case(f"{size} causal", g, g.sdpa(*data, is_causal=True), causal, _through(causal))
    )
    g, data = _graph(b, h, s, d)
    right = g.sdpa(*data, is_causal=True, diagonal_alignment="bottom_right")
    cases.append(_case(f"{size} causal bottom right", g, right, causal, _through(causal)))

    width = min(256, s // 2)

    def band(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return (key <= row) & (row - key < width)

    def band_mask(device: torch.device) -> torch.Tensor:
        pairs = torch.ones(s, s, dtype=torch.bool, device=device)
        return pairs.tril().triu(1 - width)

    windowed = masked(band_mask)
    g, data = _graph(b, h, s, d)
    o = g.sdpa(*data, window=(width - 1, 0))
    others = _through(windowed, "torch efficient", "torch cuDNN") | _flex(s, band)
    cases.append(_case(f"{size} causal window {width}", g, o, windowed, others))

    @cache
    def slopes(device: torch.device) -> torch.Tensor:
        return torch.tensor(alibi_slopes(h), device=device)

    def distances(device: torch.device) -> torch.Tensor:
        place = torch.arange(s, device=device)
        away = (place - place.view(-1, 1)) * slopes(device).view(-1, 1, 1)
        return away.masked_fill(place > place.view(-1, 1), -math.inf).to(BF16)

    def falls(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
        return score + slopes(score.device)[head] * (key - row)

    biased = masked(distances)
    others = _through(biased, "torch efficient", "torch cuDNN") | _flex(s, _causal, falls)
    g, data = _graph(b, h, s, d)
    o = g.sdpa(*data, is_causal=True, alibi=True)
    cases.append(_case(f"{size} causal ALiBi", g, o, biased, others))
    g, data = _graph(b, h, s, d)
    given = {"slopes": torch.tensor(alibi_slopes(h))}
    o = g.sdpa(*data, is_causal=True, alibi_slopes=g.input("slopes", (h,), torch.float32))
    cases.append(_case(f"{size} causal given slopes", g, o, biased, others, given))

    def capped(t: Tensors) -> torch.Tensor:
        scores = t["q"] @ t["k"].transpose(-1, -2) * d**-0.5
        weights = torch.softmax(20.0 * torch.tanh(scores.float() / 20.0), -1)
        return weights.to(BF16) @ t["v"]

    def cap(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
        return 20.0 * torch.tanh(score / 20.0)

    g, data = _graph(b, h, s, d)
    o = g.sdpa(*data, softcap=20.0)
    cases.append(_case(f"{size} softcap", g, o, capped, _flex(s, score=cap)))

    def added(t: Tensors) -> torch.Tensor:
        return F.scaled_dot_product_attention(t["q"], t["k"], t["v"], attn_mask=t["bias"])

    g, data = _graph(b, h, s, d)
    o = g.sdpa(data[0], data[1], data[2], g.input("bias", (b, h, s, s), BF16))
    others = _through(added, "torch efficient", "torch cuDNN")
    cases.append(_case(f"{size} additive bias", g, o, added, others))

    lengths = torch.tensor([s - place * s // (2 * b) for place in range(b)], dtype=torch.int32)

    def padding(device: torch.device) -> torch.Tensor:
        return torch.arange(s, device=device) < lengths.to(device).view(-1, 1, 1, 1)

    padded = masked(padding)
    others = _through(padded, "torch efficient", "torch cuDNN")
    for label, finite in (("padding", False), ("finite padding", True)):
        g, data = _graph(b, h, s, d)
        ends = g.input("lengths", (b,), torch.int32)
        o = g.sdpa(*data, seq_len_kv=ends, finite_padding=finite)
        cases.append(_case(f"{size} {label}", g, o, padded, others, {"lengths": lengths}))

    def dropped(t: Tensors) -> torch.Tensor:
        return F.scaled_dot_product_attention(t["q"], t["k"], t["v"], dropout_p=0.1)

    g, data = _graph(b, h, s, d)
    seeds: dict[str, Any] = {
        f"dropout_{of}": g.input(of, (1,), torch.int64) for of in ("seed", "offset")
    }
    o = g.sdpa(*data, dropout_p=0.1, **seeds)
    given = {"seed": torch.tensor([7]), "offset": torch.tensor([0])}
    cases.append(_case(f"{size} dropout", g, o, dropped, _through(dropped), given))

    def sunk(t: Tensors) -> torch.Tensor:
        scores = (t["q"] @ t["k"].transpose(-1, -2)).float() * d**-0.5
        column = t["sink"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1].to(BF16) @ t["v"]

    g, data = _graph(b, h, s, d)
    o = g.sdpa(*data, sink=g.input("sink", (h,), torch.float32))
    cases.append(_case(f"{size} sink", g, o, sunk, {}))

    g = Graph("attention")
    stride = (s * h * d, d, h * d, 1)
    data = [g.input(name, (b, h, s, d), BF16, stride=stride) for name in "qkv"]
    cases.append(_case(f"{size} BSHD", g, g.sdpa(*data), plain, _through(plain)))
    return cases


def packed(h: int, d: int, lengths: tuple[int, ...], *, finite: bool = False) -> Case:
    """Causal attention within packed sequences; torch's way is its flash attention's own."""
    g, total, longest = Graph("attention"), sum(lengths), max(lengths)
    q, k, v = (g.input(name, (total, h, d), BF16) for name in "qkv")
    ends = g.input("ends", (len(lengths) + 1,), torch.int32)
    o = g.sdpa_varlen(
        *(q, k, v, ends, ends), longest, longest, is_causal=True, finite_padding=finite
    )
    where = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    def eager(t: Tensors) -> torch.Tensor:
        done = []
        for each in zip(*(torch.split(t[name], list(lengths)) for name in "qkv"), strict=True):
            q, k, v = (part.transpose(0, 1)[None] for part in each)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            done.append(o[0].transpose(0, 1))
        return torch.cat(done)

    def flash(t: Tensors) -> torch.Tensor:
        made = torch.ops.aten._flash_attention_forward(
            t["q"], t["k"], t["v"], t["ends"], t["ends"], longest, longest, 0.0, True, False
        )
        out: torch.Tensor = made[0]
        return out

    label = f"packed {len(lengths)}x{min(lengths)}-{longest} H{h} D{d} causal"
    label += " finite padding" if finite else ""
    return _case(label, g, o, eager, {"torch flash": flash}, {"ends": where})


def decode(b: int, h: int, kv_heads: int, keys: int, d: int, *, page: int | None = None) -> Case:
    """One new token behind a full cache of keys: padded, or in pages in any order.

    torch has no pages; beside them stand gathering the pages, and its backends on a cache that
    lies in one piece.
    """
    size = f"decode B{b} H{h}/{kv_heads} 1x{keys} D{d}"
    lengths = torch.full((b,), keys, dtype=torch.int32)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads != h)

    if page is None:
        g, data = _graph(b, h, 1, d, kv_heads=kv_heads, keys=keys)
        o = g.sdpa(*data, seq_len_kv=g.input("lengths", (b,), torch.int32))

        def plain(t: Tensors) -> torch.Tensor:
            return attend(t["q"], t["k"], t["v"])

        return _case(f"{size} padded", g, o, plain, _through(plain), {"lengths": lengths})

    g, many = Graph("attention"), keys // page
    q = g.input("q", (b, h, 1, d), BF16)
    k, v = (g.input(f"{n}_cache", (b * many, kv_heads, page, d), BF16) for n in "kv")
    table = g.input("table", (b, many), torch.int32)
    o = g.sdpa_paged(q, k, v, table, g.input("lengths", (b,), torch.int32))
    order = torch.randperm(b * many, generator=torch.Generator().manual_seed(0)).view(b, many)

    def gathered(t: Tensors) -> tuple[torch.Tensor, ...]:
        pages = t["table"].long()
        return tuple(t[f"{n}_cache"][pages].transpose(1, 2).flatten(2, 3) for n in "kv")

    def eager(t: Tensors) -> torch.Tensor:
        return attend(t["q"], *gathered(t))

    pieces: dict[int, tuple[torch.Tensor, ...]] = {}

    def in_one_piece(t: Tensors) -> torch.Tensor:
        place = t["k_cache"].data_ptr()
        if place not in pieces:
            pieces[place] = gathered(t)
        return attend(t["q"], *pieces[place])

    others = {
        f"{name}, no pages": run
        for name, run in _through(in_one_piece, "torch cuDNN", "torch flash").items()
    }
    given = {"lengths": lengths, "table": order.to(torch.int32)}
    return _case(f"{size} pages of {page}", g, o, eager, others, given)


def attention_suite() -> list[Case]:
    """The cases that attention is measured on."""
    g, data = _graph(4, 32, 4096, 128)

    def causal(t: Tensors) -> torch.Tensor:
        return F.scaled_dot_product_attention(t["q"], t["k"], t["v"], is_causal=True)

    o = g.sdpa(*data, is_causal=True)
    lengths = (2048, 512, 1024, 256, 1536, 2048, 768, 1024)
    return [
        *variants(2, 16, 2048, 128),
        _case("B4 H32 S4096 D128 causal", g, o, causal, _through(causal)),
        packed(16, 128, lengths),
        packed(16, 128, lengths, finite=True),
        decode(8, 32, 8, 8192, 128),
        decode(8, 32, 8, 8192, 128, page=16),
        decode(8, 32, 8, 8192, 128, page=64),
    ]
