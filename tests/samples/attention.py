"""Scaled dot-product attention of dense operands, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import cudnngraph as cg
from tests.samples.case import (
    BF16,
    F16,
    F32,
    F64,
    SHORT,
    Case,
    Fill,
    Shape,
    Tensors,
    exactly,
    gradient_case,
    grads_of,
    uniform,
)


@dataclass(frozen=True)
class Attention:
    """Scaled dot-product attention: q (b, h, s_q, d), k (b, h_kv, s_kv, d), v (b, h_kv, s_kv, d_v).

    ``mask`` is "bool", "data" or "fp32" with ``mask_shape``; ``dead_rows`` first rows of it attend
    to nothing. ``memory`` is "bhsd", "bshd", "packed" or "expanded" (k and v stored for one head).
    ``dropped`` says what tells which weights ``dropout`` drops: a "mask", or a "seed", of which the
    reference alone has this generator. With ``low`` every score is about -120: exp(-lse) is more
    than float32 holds.
    """

    b: int = 2
    h: int = 4
    h_kv: int | None = None
    s_q: int = 64
    s_kv: int | None = None
    d: int = 64
    d_v: int | None = None
    dtype: torch.dtype = F16
    scale: float | None = None
    causal: bool = False
    alignment: str = "top_left"
    window: tuple[int | None, int | None] | None = None
    mask: str | None = None
    mask_shape: Shape = ()
    mask_stride: Shape | None = None
    dead_rows: int = 0
    holes: bool = False  # an additive mask with -inf at about a third of its places
    len_q: tuple[int, ...] | None = None
    len_kv: tuple[int, ...] | None = None
    dirty: bool = False  # q, k and v hold NaN behind the given lengths
    lse: bool = False
    memory: str = "bhsd"
    dropout: float = 0.0
    dropped: str = "mask"
    softcap: float | None = None
    alibi: str | None = None  # "standard" slopes, or "given" ones
    sink: bool = False
    finite: bool = False
    low: bool = False

    @property
    def keys(self) -> int:
        return self.s_q if self.s_kv is None else self.s_kv

    @property
    def q_shape(self) -> Shape:
        return (self.b, self.h, self.s_q, self.d)

    @property
    def k_shape(self) -> Shape:
        return (self.b, self.h_kv or self.h, self.keys, self.d)

    @property
    def v_shape(self) -> Shape:
        return (*self.k_shape[:3], self.d_v or self.d)

    def _stride(self, name: str, shape: Shape) -> Shape | None:
        _, h, s, d = shape
        if self.memory == "bshd":
            return (s * h * d, d, h * d, 1)
        if self.memory == "packed":
            return (s * 3 * h * d, d, 3 * h * d, 1)
        if self.memory == "expanded" and name != "q":
            return (s * d, 0, d, 1)
        return None

    def declare(self, g: cg.Graph) -> tuple[list[cg.Value], dict[str, Any]]:
        """q, k and v, and the keywords of attention."""
        data = [
            g.input(name, shape, self.dtype, stride=self._stride(name, shape))
            for name, shape in (("q", self.q_shape), ("k", self.k_shape), ("v", self.v_shape))
        ]
        options: dict[str, Any] = {
            "is_causal": self.causal,
            "scale": self.scale,
            "diagonal_alignment": self.alignment,
            "window": self.window,
        }
        if self.mask is not None:
            dtype = {"bool": torch.bool, "data": self.dtype, "fp32": F32}[self.mask]
            options["attn_mask"] = g.input("mask", self.mask_shape, dtype, stride=self.mask_stride)
        if self.len_q is not None:
            options["seq_len_q"] = g.input("len_q", (self.b,), torch.int32)
        if self.len_kv is not None:
            options["seq_len_kv"] = g.input("len_kv", (self.b,), torch.int32)
        per_head = F64 if self.dtype == F64 else F32
        options |= {"softcap": self.softcap, "dropout_p": self.dropout}
        options["finite_padding"] = self.finite
        options |= {"alibi": True} if self.alibi == "standard" else {}
        if self.alibi == "given":
            options["alibi_slopes"] = g.input("slopes", (self.h,), per_head)
        if self.dropout and self.dropped == "mask":
            shape = (*self.q_shape[:3], self.keys)
            options["dropout_mask"] = g.input("dropped", shape, torch.bool)
        elif self.dropout:
            options["dropout_seed"] = g.input("seed", (1,), torch.int64)
            options["dropout_offset"] = g.input("offset", (), torch.int64)
        return data, options

    def sinks(self, g: cg.Graph) -> dict[str, Any]:
        """The keyword of attention that its gradient has not."""
        per_head = F64 if self.dtype == F64 else F32
        return {"sink": g.input("sink", (self.h,), per_head)} if self.sink else {}

    def build(self) -> cg.Graph:
        g = cg.Graph("attention")
        data, options = self.declare(g)
        result = g.sdpa(*data, return_lse=self.lse, **options, **self.sinks(g))
        if self.lse:
            g.output("o", result[0])
            g.output("lse", result[1])
        else:
            g.output("o", result)
        return g

    def _kept(self, t: Tensors) -> torch.Tensor | None:
        """Return the mask of (row, key) pairs that may meet, (B, 1, S_q, S_kv); None for all."""
        bounded = self.causal or self.window is not None
        if not bounded and self.len_q is None and self.len_kv is None:
            return None
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        kept = torch.zeros(self.b, 1, self.s_q, self.keys, dtype=torch.bool)
        for batch in range(self.b):
            rows = self.s_q if self.len_q is None else self.len_q[batch]
            keys = self.keys if self.len_kv is None else self.len_kv[batch]
            shift = keys - rows if self.alignment == "bottom_right" else 0
            place = torch.arange(keys)[None, :] - torch.arange(rows)[:, None] - shift
            allowed = torch.ones_like(place, dtype=torch.bool)
            if right is not None:
                allowed &= place <= right
            if left is not None:
                allowed &= place >= -left
            kept[batch, 0, :rows, :keys] = allowed
        return kept.to(t["q"].device)

    def eager(self, t: Tensors) -> Tensors:
        q, k, v = t["q"], t["k"], t["v"]
        if self.dirty:
            q, k, v = (x.nan_to_num(0.0) for x in (q, k, v))
        repeat = q.shape[1] // k.shape[1]
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        kept, given = self._kept(t), t.get("mask")
        if self.dropout or self.softcap or self.alibi or self.sink:
            return self._written_out(q, k, v, t)
        plain = self.causal and self.window is None and self.alignment == "top_left"
        if plain and given is None and self.len_q is None and self.len_kv is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            mask = None if kept is None else torch.zeros_like(kept, dtype=q.dtype)
        else:
            mask = None
            if given is not None:
                mask = given
                if given.dtype == torch.bool:
                    mask = torch.zeros(given.shape, dtype=q.dtype, device=q.device)
                    mask = mask.masked_fill(~given, -torch.inf)
                mask = mask.to(q.dtype)
            if kept is not None:
                mask = torch.zeros((), dtype=q.dtype, device=q.device) if mask is None else mask
                mask = torch.where(kept, mask, -torch.inf)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        dead = None
        if mask is not None:
            if kept is not None:
                mask = torch.where(kept, mask, -torch.inf)
            dead = (mask == -torch.inf).all(-1, keepdim=True)
            out = torch.where(dead, 0.0, out)
        if not self.lse:
            return {"o": out}
        scale = self.d**-0.5 if self.scale is None else self.scale
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, F32)) * scale
        if mask is not None:
            scores = scores + mask
        return {"o": out, "lse": torch.logsumexp(scores, -1)}

    def _written_out(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Tensors
    ) -> Tensors:
        """Attention whose scores are changed one thing after the other."""
        scores = (q @ k.transpose(-1, -2)) * (self.d**-0.5 if self.scale is None else self.scale)
        scores = scores.to(torch.promote_types(q.dtype, F32))
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        given, kept = t.get("mask"), self._kept(t)
        if given is not None:
            scores = (
                scores.masked_fill(~given, -math.inf) if self.mask == "bool" else scores + given
            )
        if self.alibi:
            shift = self.keys - self.s_q if self.alignment == "bottom_right" else 0
            row, key = torch.arange(self.s_q)[:, None] + shift, torch.arange(self.keys)[None, :]
            away = (row - key).abs().to(scores.device, scores.dtype)
            slopes = t.get("slopes", torch.tensor(ALIBI[self.h]).to(scores.device))
            scores = scores - slopes.to(scores.dtype).view(-1, 1, 1) * away
        if kept is not None:
            scores = scores.masked_fill(~kept, -math.inf)
        dead = (scores == -math.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(dead, 0.0)
        if self.sink:
            column = t["sink"].to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        weights = weights.masked_fill(dead, 0.0)
        if self.dropout:
            weights = weights * self._dropped(t) / (1.0 - self.dropout)
        out = {"o": weights.to(v.dtype) @ v}
        if self.lse:
            parts = scores.masked_fill(dead, -math.inf)
            out["lse"] = torch.logsumexp(torch.cat([parts, column], -1) if self.sink else parts, -1)
        return out

    def _dropped(self, t: Tensors) -> torch.Tensor:
        """Return the mask of the weights that dropout keeps."""
        if self.dropped == "mask":
            return t["dropped"]
        shape = (*self.q_shape[:3], self.keys)
        words = philox_words(int(t["seed"]), int(t["offset"]), math.prod(shape))
        return torch.from_numpy(words >= round(self.dropout * 2**32)).view(shape)

    def _masked(self, gen: torch.Generator, shape: Shape) -> torch.Tensor:
        if self.mask == "bool":
            values = (torch.rand(shape, generator=gen) < 0.7).double()
            values[..., 0] = 1.0
        else:
            values = torch.randn(shape, generator=gen, dtype=F64)
            if self.holes:
                closed = torch.rand(shape, generator=gen) < 0.3
                closed[..., 0] = False
                values = values.masked_fill(closed, -math.inf)
        if self.dead_rows:
            values[..., : self.dead_rows, :] = 0.0 if self.mask == "bool" else -math.inf
        return values

    def _data(self, lengths: tuple[int, ...] | None, first: float = 0.0) -> Fill:
        """Standard normal; where scores are low, the first of a row's numbers is ``first``."""

        def fill(gen: torch.Generator, shape: Shape) -> torch.Tensor:
            values = torch.randn(shape, generator=gen, dtype=F64)
            if self.low and first:
                values[..., 0] = first
            if self.dirty and lengths is not None:
                for batch, length in enumerate(lengths):
                    values[batch, :, length:] = math.nan
            return values

        return fill

    @property
    def fills(self) -> dict[str, Fill]:
        scale = self.d**-0.5 if self.scale is None else self.scale
        fills: dict[str, Fill] = {
            "q": self._data(self.len_q, -15.0 / scale),
            "k": self._data(self.len_kv, 8.0),
            "v": self._data(self.len_kv),
            "mask": self._masked,
        }
        if self.len_q is not None:
            fills["len_q"] = exactly(self.len_q)
        if self.len_kv is not None:
            fills["len_kv"] = exactly(self.len_kv)
        fills |= {"slopes": uniform(0.02, 0.4), "seed": exactly([-(2**40) - 5])}
        fills |= {"offset": exactly([2**33 + 8]), "dropped": self._thrown}
        return fills

    def _thrown(self, gen: torch.Generator, shape: Shape) -> torch.Tensor:
        return (torch.rand(shape, generator=gen) >= self.dropout).double()


# The slopes of ALiBi as its authors' code has them, by the number of heads.
ALIBI = {
    4: [0.25, 0.0625, 0.015625, 0.00390625],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625],
}


def philox_words(seed: int, offset: int, count: int) -> np.ndarray:
    """The first word of Philox4x32-10 for counters (i, offset) and key ``seed``, in numpy."""
    low, wide = np.uint64(0xFFFFFFFF), np.uint64(32)
    place = np.arange(count, dtype=np.uint64)
    a, b = place & low, place >> wide
    c, d = (np.full(count, (offset >> shift) & 0xFFFFFFFF, np.uint64) for shift in (0, 32))
    x, y = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (
            (q >> wide) ^ b ^ np.uint64(x),
            q & low,
            (p >> wide) ^ d ^ np.uint64(y),
            p & low,
        )
        x, y = (x + 0x9E3779B9) & 0xFFFFFFFF, (y + 0xBB67AE85) & 0xFFFFFFFF
    return a.astype(np.int64)


def _attention_case(name: str, attention: Attention, note: str = "") -> Case:
    return Case(
        f"sdpa-{name}-{SHORT[attention.dtype]}",
        "sdpa",
        attention.dtype,
        attention.build,
        attention.eager,
        fills=attention.fills,
        packed=("q", "k", "v") if attention.memory == "packed" else (),
        terms=max(attention.d, attention.keys),
        note=note,
        drawn=attention.dropped == "seed",
    )


def _attention_cases() -> list[tuple[str, Attention, str]]:
    a = Attention()
    short, long = replace(a, s_q=32, s_kv=64), replace(a, s_q=64, s_kv=32)
    full = (2, 4, 64, 64)
    right = {"causal": True, "alignment": "bottom_right"}
    low = replace(a, b=1, h=2, low=True)
    tail = "pytorch#196678: half of the last 128 keys, and a low lse"
    return [
        ("plain", a, ""),
        ("scale", replace(a, scale=0.3), "flashinfer#4014: the scale is part of the key"),
        ("causal", replace(a, causal=True), ""),
        ("causal_short_q", replace(short, causal=True), "top left, S_q < S_kv"),
        ("causal_long_q", replace(long, causal=True), "top left, S_q > S_kv"),
        ("bottom_right_square", replace(a, **right), ""),
        ("bottom_right_short_q", replace(short, **right), "ort#29020: S_q < S_kv"),
        (
            "bottom_right_long_q",
            replace(long, **right),
            "S_q > S_kv: the first rows attend to nothing",
        ),
        ("window_left", replace(a, window=(9, 0)), "sliding window"),
        ("window_causal", replace(a, window=(9, None), causal=True), "causal with a window"),
        ("window_both", replace(a, window=(7, 5)), ""),
        ("window_left_only", replace(a, window=(12, None)), ""),
        ("window_right_only", replace(a, window=(None, 6)), ""),
        (
            "window_bottom_right",
            replace(short, window=(9, 0), alignment="bottom_right"),
            "window along the bottom-right diagonal",
        ),
        ("mask_add", replace(a, mask="data", mask_shape=full), ""),
        ("mask_add_fp32", replace(a, mask="fp32", mask_shape=full), "float32 beside 16-bit data"),
        ("mask_add_1hsk", replace(a, mask="data", mask_shape=(1, 4, 64, 64)), "jax#30593"),
        ("mask_add_11sk", replace(a, mask="fp32", mask_shape=(1, 1, 64, 64)), ""),
        ("mask_add_b11k", replace(a, mask="data", mask_shape=(2, 1, 1, 64)), "jax#28974"),
        ("mask_add_sk", replace(a, mask="data", mask_shape=(64, 64)), "a mask of rank 2"),
        (
            "mask_add_expanded",
            replace(a, mask="data", mask_shape=full, mask_stride=(0, 0, 64, 1)),
            "a mask of stride 0",
        ),
        ("mask_add_holes", replace(a, mask="data", mask_shape=full, holes=True), "-inf in places"),
        (
            "mask_add_dead_rows",
            replace(a, mask="data", mask_shape=full, dead_rows=3),
            "pytorch#103963: rows of -inf give zeros",
        ),
        ("mask_add_causal", replace(a, mask="data", mask_shape=full, causal=True), ""),
        ("mask_bool", replace(a, mask="bool", mask_shape=full), "diffusers#14342: not 0 and 1"),
        ("mask_bool_111k", replace(a, mask="bool", mask_shape=(1, 1, 1, 64)), "jax#28974"),
        ("mask_bool_b11k", replace(a, mask="bool", mask_shape=(2, 1, 1, 64)), ""),
        ("mask_bool_1hsk", replace(a, mask="bool", mask_shape=(1, 4, 64, 64)), ""),
        (
            "mask_bool_dead_rows",
            replace(a, mask="bool", mask_shape=full, dead_rows=5, lse=True),
            "pytorch#103963: fully masked rows give zeros and -inf",
        ),
        ("mask_bool_causal", replace(a, mask="bool", mask_shape=(2, 1, 64, 64), causal=True), ""),
        *(
            (
                f"mask_{'add' if kind == 'data' else kind}_s_{s}",
                replace(low, s_q=64, s_kv=s, mask=kind, mask_shape=(1, 1, 64, s)),
                tail,
            )
            for s in (320, 704)
            for kind in ("data", "bool")
        ),
        ("lengths", replace(a, len_q=(64, 40), len_kv=(50, 64)), ""),
        ("lengths_zero", replace(a, len_q=(64, 0), len_kv=(0, 30)), "cudnn-frontend#943"),
        ("length_q_only", replace(a, len_q=(33, 64)), "one of the two lengths"),
        ("length_kv_only", replace(a, len_kv=(64, 17)), "one of the two lengths"),
        ("lengths_causal", replace(a, len_q=(64, 40), len_kv=(64, 40), causal=True), ""),
        (
            "lengths_bottom_right",
            replace(a, len_q=(30, 64), len_kv=(64, 50), **right),
            "ort#29714: the diagonal of each sequence",
        ),
        (
            "lengths_dirty",
            replace(a, len_q=(64, 40), len_kv=(50, 40), dirty=True),
            "pytorch#101967: NaN behind the lengths; select, never multiply by 0",
        ),
        ("lengths_lse", replace(a, len_q=(64, 40), len_kv=(64, 20), lse=True), ""),
        ("lengths_finite", replace(a, len_q=(64, 40), len_kv=(50, 64), finite=True), "a promise"),
        (
            "lengths_finite_causal",
            replace(a, len_q=(64, 40), len_kv=(64, 40), causal=True, finite=True, d=128, lse=True),
            "a promise",
        ),
        (
            "lengths_finite_gqa",
            replace(a, h=8, h_kv=2, len_kv=(50, 64), finite=True),
            "a promise",
        ),
        ("gqa_8_2", replace(a, h=8, h_kv=2), "grouped query heads"),
        ("gqa_causal", replace(a, h=8, h_kv=2, causal=True), ""),
        ("mqa", replace(a, h=4, h_kv=1), "one head of keys"),
        ("gqa_mask", replace(a, h=8, h_kv=2, mask="data", mask_shape=(2, 8, 64, 64)), ""),
        ("d_v_32", replace(a, d_v=32), "d_v < d_qk"),
        ("d_v_128", replace(a, d_v=128), "d_v > d_qk"),
        ("d_128", replace(a, d=128), ""),
        ("d_256", replace(a, d=256, h=2), "pytorch#128348"),
        ("d_20", replace(a, d=20), "head dim not a multiple of 8: TE#341"),
        ("d_72", replace(a, d=72), ""),
        ("s_32", replace(a, s_q=32), "jax#24607"),
        (
            "s_192_mask",
            replace(a, s_q=192, h=2, mask="data", mask_shape=(1, 1, 192, 192)),
            "pytorch#196678",
        ),
        ("s_197", replace(a, s_q=197, h=2), "a length that is no multiple of anything"),
        ("decode", replace(a, s_q=1, s_kv=128), "S_q = 1"),
        ("decode_gqa", replace(a, s_q=1, s_kv=128, h=8, h_kv=2), "cudnn-frontend#1083"),
        ("decode_low", replace(low, s_q=1, s_kv=128), "cudnn-frontend#1072: a low lse"),
        (
            "decode_lengths",
            replace(a, s_q=1, s_kv=128, len_kv=(100, 7)),
            "one new token behind a cache",
        ),
        ("s_q_7_s_kv_50", replace(a, s_q=7, s_kv=50), ""),
        ("bshd", replace(a, memory="bshd"), "permuted views"),
        ("bshd_causal_gqa", replace(a, memory="bshd", h=8, h_kv=2, causal=True), ""),
        ("bshd_lse", replace(a, memory="bshd", lse=True), ""),
        ("packed", replace(a, memory="packed"), "flashinfer#4625: slices of one buffer"),
        ("packed_b3", replace(a, memory="packed", b=3, s_q=40, causal=True), "flashinfer#4625"),
        ("expanded_kv", replace(a, memory="expanded"), "pytorch#175764: k and v of stride 0"),
        ("lse", replace(a, lse=True), ""),
        ("lse_causal", replace(a, lse=True, causal=True), ""),
        (
            "lse_bottom_right_long_q",
            replace(long, **right, lse=True),
            "rows without a key: -inf in lse",
        ),
        ("one_key", replace(a, s_q=5, s_kv=1), "softmax over one key"),
        ("b1_h1", replace(a, b=1, h=1), ""),
        *_changed_scores(a),
    ]


def _changed_scores(a: Attention) -> list[tuple[str, Attention, str]]:
    """Dropout, sinks, ALiBi, and soft caps."""
    short, long = replace(a, s_q=32, s_kv=64), replace(a, s_q=64, s_kv=32)
    full = (2, 4, 64, 64)
    right = {"causal": True, "alignment": "bottom_right"}
    dropped = replace(a, dropout=0.25)
    masked = replace(a, mask="data", mask_shape=full)
    return [
        ("dropout", dropped, ""),
        ("dropout_causal", replace(dropped, causal=True, lse=True), "dropout is not in lse"),
        ("dropout_gqa", replace(dropped, h=8, h_kv=2), ""),
        ("dropout_window", replace(dropped, window=(9, 0)), ""),
        ("dropout_mask_add", replace(masked, dropout=0.1), ""),
        ("dropout_mask_bool", replace(dropped, mask="bool", mask_shape=full), "two boolean masks"),
        ("dropout_lengths", replace(dropped, len_q=(64, 40), len_kv=(50, 64)), ""),
        ("dropout_bottom_right", replace(dropped, s_q=32, s_kv=64, **right), ""),
        ("sink", replace(a, sink=True), ""),
        ("sink_lse", replace(a, sink=True, lse=True, causal=True), "the sink is part of lse"),
        ("sink_window", replace(a, sink=True, window=(9, 0)), "windows with sinks, as gpt-oss"),
        ("sink_gqa", replace(a, sink=True, h=8, h_kv=2, d=128), ""),
        (
            "sink_dead_rows",
            replace(long, sink=True, **right, lse=True),
            "rows without a key: zeros, and the sink in lse",
        ),
        ("sink_lengths", replace(a, sink=True, len_q=(64, 40), len_kv=(50, 64)), ""),
        ("sink_decode", replace(a, sink=True, s_q=1, s_kv=128), "S_q = 1"),
        ("sink_dropout", replace(dropped, sink=True), ""),
        ("alibi", replace(a, alibi="standard", causal=True), ""),
        ("alibi_6", replace(a, alibi="standard", h=6, causal=True), "no power of two of heads"),
        ("alibi_full", replace(a, alibi="standard"), "both ways from the diagonal"),
        ("alibi_bottom_right", replace(short, alibi="standard", **right), ""),
        ("alibi_window", replace(a, alibi="standard", window=(9, 0)), ""),
        ("slopes", replace(a, alibi="given", causal=True), ""),
        ("slopes_full", replace(a, alibi="given"), ""),
        (
            "slopes_right",
            replace(short, alibi="given", alignment="bottom_right"),
            "of the diagonal",
        ),
        ("slopes_bottom_right", replace(short, alibi="given", **right, lse=True), ""),
        ("softcap", replace(a, softcap=0.7), "Gemma 2"),
        ("softcap_causal", replace(a, softcap=0.7, causal=True, lse=True), ""),
        ("softcap_window", replace(a, softcap=0.7, window=(9, 0), h=8, h_kv=2), "Gemma 2"),
        ("softcap_both_sides", replace(a, softcap=0.7, window=(7, 5)), ""),
        ("softcap_mask_add", replace(masked, softcap=0.7), "the mask is added to capped scores"),
        ("softcap_dead_rows", replace(long, softcap=0.7, **right), "rows without a key"),
        ("softcap_lengths", replace(a, softcap=0.7, len_q=(64, 40), len_kv=(50, 64)), ""),
        ("softcap_slopes_sink", replace(a, softcap=0.7, alibi="given", sink=True), ""),
        ("softcap_dropout", replace(dropped, softcap=0.7), ""),
    ]


# Cases of attention that are also run in other dtypes than float16.
_AGAIN: Mapping[torch.dtype, tuple[str, ...]] = {
    BF16: (
        "plain",
        "causal",
        "bottom_right_short_q",
        "window_causal",
        "mask_add",
        "mask_add_fp32",
        "mask_bool",
        "lengths",
        "gqa_8_2",
        "mqa",
        "d_128",
        "d_256",
        "decode",
        "bshd",
        "packed",
        "lse",
        "dropout_causal",
        "sink_lse",
        "alibi",
        "slopes",
        "softcap_causal",
    ),
    F32: (
        "plain",
        "causal",
        "mask_add",
        "mask_bool_dead_rows",
        "lengths",
        "gqa_8_2",
        "d_v_32",
        "s_197",
        "lse",
        *("window_causal", "alibi", "slopes", "softcap", "sink", "dropout"),
    ),
    F64: (
        *("plain", "bottom_right_long_q", "mask_bool_dead_rows", "lengths_lse", "window_both"),
        *("dropout_mask_bool", "sink_dead_rows", "sink_lengths", "alibi_6", "slopes_right"),
        *("softcap_slopes_sink", "softcap_dropout"),
    ),
}


def _seeded() -> Iterator[tuple[str, Attention, str]]:
    """Dropout by a seed: the reference's generator, so for the CPU."""
    note = "which weights are dropped is Philox of the seed, the offset and the place"
    a = Attention(dtype=F64, dropout=0.3, dropped="seed")
    yield "dropout_seed", a, note
    yield "dropout_seed_causal_gqa", replace(a, h=8, h_kv=2, causal=True, lse=True), note


def sdpa() -> Iterator[Case]:
    cases = {name: (attention, note) for name, attention, note in _attention_cases()}
    for name, (attention, note) in cases.items():
        yield _attention_case(name, attention, note)
    for dtype, names in _AGAIN.items():
        for name in names:
            attention, note = cases[name]
            yield _attention_case(name, replace(attention, dtype=dtype), note)
    for name, attention, note in _seeded():
        for dtype in (F64, F32, F16, BF16):
            yield _attention_case(name, replace(attention, dtype=dtype), note)


def _attention_gradient(name: str, attention: Attention, note: str) -> Case:
    """Attention and its gradient in one graph, so that o and lse are those of q, k and v."""
    with_mask = attention.mask in ("data", "fp32")

    def build() -> cg.Graph:
        g = cg.Graph("attention_gradient")
        data, options = attention.declare(g)
        do = g.input("do", (*attention.q_shape[:3], attention.v_shape[3]), attention.dtype)
        o, lse = g.sdpa(*data, return_lse=True, **options, **attention.sinks(g))
        grads = g.sdpa_backward(do, *data, o, lse, mask_grad=with_mask, **options)
        for key, grad in zip(("dq", "dk", "dv", "dmask"), grads, strict=False):
            # Beside 16-bit data the gradient of a float32 mask is no better than 16 bits: o is.
            g.output(key, grad, dtype=attention.dtype)
        return g

    def eager(t: Tensors) -> Tensors:
        names = ["q", "k", "v"] + ["mask"] * with_mask
        grads = grads_of(
            lambda *leaves: attention.eager({**t, **dict(zip(names, leaves, strict=True))})["o"],
            [t[key] for key in names],
            t["do"],
        )
        return {f"d{key}": grad.to(t["q"].dtype) for key, grad in zip(names, grads, strict=True)}

    case = gradient_case(
        f"attention_{name}",
        attention.dtype,
        build,
        eager,
        attention.fills,
        note,
        terms=max(attention.d, attention.keys),
    )
    return replace(case, packed=("q", "k", "v") if attention.memory == "packed" else ())


def attention_gradients() -> Iterator[Case]:
    cases = {name: (attention, note) for name, attention, note in _attention_cases()}
    wanted = [
        "plain",
        "scale",
        "causal",
        "causal_short_q",
        "bottom_right_short_q",
        "bottom_right_long_q",
        "window_causal",
        "window_both",
        "mask_add",
        "mask_add_1hsk",
        "mask_add_b11k",
        "mask_add_sk",
        "mask_add_dead_rows",
        "mask_add_fp32",
        "mask_bool",
        "mask_bool_dead_rows",
        "lengths",
        "lengths_zero",
        "lengths_bottom_right",
        *("lengths_finite", "lengths_finite_causal", "lengths_finite_gqa"),
        "gqa_8_2",
        "mqa",
        "gqa_mask",
        "d_v_32",
        "d_128",
        "d_20",
        "s_192_mask",
        *(f"mask_{kind}_s_{s}" for s in (320, 704) for kind in ("add", "bool")),
        "s_197",
        *("decode", "decode_gqa", "decode_low"),
        "bshd",
        "packed",
        "expanded_kv",
        *("dropout", "dropout_gqa", "dropout_mask_add", "dropout_bottom_right"),
        *("sink", "sink_window", "sink_dead_rows", "alibi", "alibi_full", "slopes_bottom_right"),
        *("softcap", "softcap_window", "softcap_mask_add", "softcap_slopes_sink"),
        "softcap_dropout",
    ]
    for name in wanted:
        yield _attention_gradient(name, *cases[name])
    again = {
        BF16: ("plain", "causal", "mask_add", "gqa_8_2", "lengths"),
        F32: ("plain", "causal", "mask_bool_dead_rows", "gqa_8_2"),
        F64: (
            *("plain", "mask_add_b11k", "mask_add_dead_rows", "lengths_zero", "gqa_mask"),
            *("dropout_gqa", "dropout_lengths", "sink_dead_rows", "softcap_mask_add"),
            *("softcap_slopes_sink", "softcap_dropout", "slopes_right"),
        ),
    }
    for dtype, names in again.items():
        for name in names:
            attention, note = cases[name]
            yield _attention_gradient(name, replace(attention, dtype=dtype), note)
    for name, attention, note in _seeded():
        yield _attention_gradient(name, replace(attention, lse=False), note)
