"""Attention of packed sequences and of paged keys and values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.ir.spec import dense_strides
from tests.samples.attention import Attention
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
)


@dataclass(frozen=True)
class Packed:
    """Attention within packed sequences of ``len_q`` tokens of q and ``len_kv`` of k and v.

    ``tail`` tokens follow the last sequence. ``memory`` is "thd", "htd" (heads first) or "packed":
    q, k and v are slices of one buffer.
    """

    len_q: tuple[int, ...] = (40, 64, 3)
    len_kv: tuple[int, ...] | None = None
    h: int = 4
    h_kv: int | None = None
    d: int = 64
    d_v: int | None = None
    dtype: torch.dtype = F16
    causal: bool = False
    alignment: str = "top_left"
    window: tuple[int | None, int | None] | None = None
    lse: bool = False
    memory: str = "thd"
    longest: int = 0  # more than the longest sequence has
    finite: bool = False
    own: bool = False  # keys are of the rows' sequences: one tensor says where both end

    @property
    def keys(self) -> tuple[int, ...]:
        return self.len_q if self.len_kv is None else self.len_kv

    def shapes(self) -> dict[str, Shape]:
        heads, rows, keys = self.h_kv or self.h, sum(self.len_q), sum(self.keys)
        return {
            "q": (rows, self.h, self.d),
            "k": (keys, heads, self.d),
            "v": (keys, heads, self.d_v or self.d),
        }

    def declare(self, g: cg.Graph) -> tuple[list[cg.Value], list[Any], dict[str, Any]]:
        """q, k and v; what says where sequences lie; the keywords."""
        data = []
        for name, (tokens, heads, depth) in self.shapes().items():
            stride = {"htd": (depth, tokens * depth, 1), "packed": (3 * heads * depth, depth, 1)}
            at = stride.get(self.memory)
            data.append(g.input(name, (tokens, heads, depth), self.dtype, stride=at))
        count = (len(self.len_q) + 1,)
        ends = ("q",) if self.own else ("q", "kv")
        where: list[Any] = [g.input(f"cu_{of}", count, torch.int32) for of in ends]
        where *= 3 - len(where)
        where += [max(self.len_q) + self.longest, max(self.keys) + self.longest]
        options = {
            "is_causal": self.causal,
            "diagonal_alignment": self.alignment,
            "window": self.window,
        }
        return data, where, options

    def build(self) -> cg.Graph:
        g = cg.Graph("packed")
        data, where, options = self.declare(g)
        options["finite_padding"] = self.finite
        result = g.sdpa_varlen(*data, *where, return_lse=self.lse, **options)
        for name, value in zip(("o", "lse"), result if self.lse else (result,), strict=False):
            g.output(name, value)
        return g

    def eager(self, t: Tensors) -> Tensors:
        """One sequence after the other."""
        outs, logs = [], []
        starts = [0, 0]
        for rows, keys in zip(self.len_q, self.keys, strict=True):
            q = t["q"][starts[0] : starts[0] + rows]
            k, v = (t[name][starts[1] : starts[1] + keys] for name in "kv")
            one = Attention(
                *(1, self.h, self.h_kv, rows, keys, self.d, self.d_v, self.dtype),
                causal=self.causal,
                alignment=self.alignment,
                window=self.window,
                lse=True,
            )
            many = {n: x.transpose(0, 1)[None] for n, x in (("q", q), ("k", k), ("v", v))}
            if keys == 0:
                outs.append(q.new_zeros(rows, self.h, self.d_v or self.d))
                logs.append(q.new_full((rows, self.h), -math.inf))
            elif rows:
                done = one.eager(many)
                outs.append(done["o"][0].transpose(0, 1))
                logs.append(done["lse"][0].transpose(0, 1))
            starts = [starts[0] + rows, starts[1] + keys]
        made = {"o": torch.cat(outs)}
        return {**made, "lse": torch.cat(logs)} if self.lse else made

    @property
    def fills(self) -> dict[str, Fill]:
        ends = {"cu_q": self.len_q, "cu_kv": self.keys}
        return {name: exactly([0, *accumulate(lengths)]) for name, lengths in ends.items()}


def _packed_cases() -> list[tuple[str, Packed, str]]:
    p = Packed()
    cross = replace(p, len_kv=(50, 70, 8))
    right = {"causal": True, "alignment": "bottom_right"}
    return [
        ("plain", p, ""),
        ("causal", replace(p, causal=True), ""),
        ("cross", cross, "other lengths of k than of q"),
        ("bottom_right", replace(cross, **right, lse=True), "of each sequence"),
        ("window", replace(p, window=(9, 0)), ""),
        ("gqa", replace(p, h=8, h_kv=2, causal=True), ""),
        ("d_128", replace(p, d=128, lse=True), ""),
        ("d_v", replace(p, d_v=32), "two widths of a token"),
        ("packed", replace(p, memory="packed", causal=True), "slices of one buffer"),
        ("heads_first", replace(p, memory="htd"), ""),
        ("longest", replace(p, longest=30), "max_seqlen above the longest sequence"),
        ("finite", replace(p, causal=True, finite=True), "a promise"),
        ("own", replace(p, own=True, causal=True, lse=True), "torch's flash attention on a GPU"),
        ("own_window", replace(p, own=True, window=(9, 3)), ""),
        ("one", replace(p, len_q=(65,), causal=True), "a batch of one"),
        ("ones", replace(p, len_q=(1, 1, 1, 1), len_kv=(20, 7, 33, 64)), "one row each"),
    ]


def packed() -> Iterator[Case]:
    cases = {name: (packed, note) for name, packed, note in _packed_cases()}
    again = {
        BF16: ("causal", "gqa", "bottom_right", "own"),
        F32: ("causal", "cross"),
        F64: ("bottom_right", "packed", "d_v"),
    }
    empty = Packed((40, 0, 16), (30, 20, 0), lse=True)
    for dtype, names in ((F16, tuple(cases)), *again.items()):
        for name in names:
            packed, note = cases[name]
            yield _packed_case(name, replace(packed, dtype=dtype), note)
    note = "a sequence without rows, one without keys"
    yield _packed_case("empty", replace(empty, dtype=F64), note)
    yield _packed_case("empty", empty, note)


def _packed_case(name: str, packed: Packed, note: str) -> Case:
    return Case(
        f"sdpa_varlen-{name}-{SHORT[packed.dtype]}",
        "sdpa_varlen",
        packed.dtype,
        packed.build,
        packed.eager,
        fills=packed.fills,
        terms=max(packed.d, *packed.keys),
        note=note,
    )


@dataclass(frozen=True)
class Paged:
    """Attention of (b, h, s_q, d) to ``len_kv`` keys of each sequence, in pages of a cache.

    ``memory`` is "hpd" for (pages, H, page, D) in memory, "phd" for (pages, page, H, D).
    """

    len_kv: tuple[int, ...] = (50, 7)
    h: int = 8
    h_kv: int = 2
    s_q: int = 1
    d: int = 64
    page: int = 16
    pages: int = 12  # of the whole cache
    columns: int = 4  # of the table
    dtype: torch.dtype = F16
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    len_q: tuple[int, ...] | None = None
    lse: bool = False
    two_tables: bool = False
    memory: str = "hpd"
    finite: bool = False

    def build(self) -> cg.Graph:
        g = cg.Graph("paged")
        batch = len(self.len_kv)
        q = g.input("q", (batch, self.h, self.s_q, self.d), self.dtype)
        shape = (self.pages, self.h_kv, self.page, self.d)
        order = {"hpd": (0, 1, 2, 3), "phd": (0, 2, 1, 3)}[self.memory]
        stride = dense_strides(shape, order)
        cache = [g.input(f"{n}_cache", shape, self.dtype, stride=stride) for n in "kv"]
        table = g.input("table", (batch, self.columns), torch.int32)
        options: dict[str, Any] = {"is_causal": self.causal, "window": self.window}
        options["finite_padding"] = self.finite
        lengths = g.input("len_kv", (batch,), torch.int32)
        if self.two_tables:
            options["page_table_v"] = g.input("table_v", (batch, self.columns), torch.int32)
        if self.len_q is not None:
            options["seq_len_q"] = g.input("len_q", (batch,), torch.int32)
        result = g.sdpa_paged(q, *cache, table, lengths, return_lse=self.lse, **options)
        for name, value in zip(("o", "lse"), result if self.lse else (result,), strict=False):
            g.output(name, value)
        return g

    def eager(self, t: Tensors) -> Tensors:
        """The pages of one sequence after the other, put behind each other."""
        outs, logs = [], []
        for batch, keys in enumerate(self.len_kv):
            rows = self.s_q if self.len_q is None else self.len_q[batch]
            k, v = (
                torch.cat(
                    [t[f"{n}_cache"][page] for page in t[table][batch, : -(-keys // self.page)]], 1
                )
                for n, table in (("k", "table"), ("v", "table_v" if self.two_tables else "table"))
            )
            one = Attention(
                *(1, self.h, self.h_kv, rows, keys, self.d, None, self.dtype),
                causal=self.causal,
                alignment="bottom_right",
                window=self.window,
                lse=True,
            )
            many = {"q": t["q"][batch : batch + 1, :, :rows], "k": k[None, :, :keys]}
            done = one.eager({**many, "v": v[None, :, :keys]})
            rest = self.s_q - rows
            outs.append(F.pad(done["o"], (0, 0, 0, rest)))
            logs.append(F.pad(done["lse"], (0, rest), value=-math.inf))
        made = {"o": torch.cat(outs)}
        return {**made, "lse": torch.cat(logs)} if self.lse else made

    def _table(self, gen: torch.Generator, shape: Shape) -> torch.Tensor:
        """Pages in any order, each once; past the pages of a sequence any number."""
        order = torch.randperm(self.pages, generator=gen).double()
        made = torch.full(shape, float(self.pages - 1), dtype=F64)
        used = 0
        for batch, keys in enumerate(self.len_kv):
            many = -(-keys // self.page)
            made[batch, :many] = order[used : used + many]
            used += many
        return made

    @property
    def fills(self) -> dict[str, Fill]:
        fills = {"table": self._table, "table_v": self._table, "len_kv": exactly(self.len_kv)}
        return fills if self.len_q is None else {**fills, "len_q": exactly(self.len_q)}


def paged() -> Iterator[Case]:
    p = Paged()
    prefill = replace(p, s_q=32, len_kv=(50, 33), causal=True)
    cases = [
        ("decode", p, "one new token behind a cache"),
        ("decode_lse", replace(p, lse=True), ""),
        ("decode_mha", replace(p, h=4, h_kv=4, d=128), ""),
        ("decode_phd", replace(p, memory="phd"), "(pages, page, H, D), as vLLM's caches"),
        ("decode_two_tables", replace(p, two_tables=True), ""),
        ("decode_page_1", replace(p, page=1, pages=70, columns=60), "pages of one key"),
        ("decode_causal", replace(p, causal=True), "the last row sees every key"),
        ("decode_window", replace(p, window=(20, 0)), ""),
        ("prefill", prefill, "several rows behind a cache"),
        ("prefill_lengths", replace(prefill, len_q=(32, 20), lse=True), ""),
        ("prefill_full", replace(prefill, causal=False), ""),
        ("prefill_finite", replace(prefill, finite=True), "a promise"),
    ]
    for name, paged, note in cases:
        yield _paged_case(name, paged, note)
    for dtype, many in {BF16: ("decode", "prefill"), F32: ("decode", "prefill"), F64: None}.items():
        for name, paged, note in cases:
            if many is None or name in many:
                yield _paged_case(name, replace(paged, dtype=dtype), note)


def _paged_case(name: str, paged: Paged, note: str) -> Case:
    return Case(
        f"sdpa_paged-{name}-{SHORT[paged.dtype]}",
        "sdpa_paged",
        paged.dtype,
        paged.build,
        paged.eager,
        fills=paged.fills,
        terms=max(paged.d, *paged.len_kv),
        note=note,
    )


def packed_gradients() -> Iterator[Case]:
    cases = {name: (packed, note) for name, packed, note in _packed_cases()}

    def gradient(name: str, packed: Packed, note: str) -> Case:
        def build() -> cg.Graph:
            g = cg.Graph("packed_gradient")
            data, where, options = packed.declare(g)
            rows, heads, _ = packed.shapes()["q"]
            do = g.input("do", (rows, heads, packed.d_v or packed.d), packed.dtype)
            o, lse = g.sdpa_varlen(*data, *where, return_lse=True, **options)
            grads = g.sdpa_varlen_backward(do, *data, o, lse, *where, **options)
            for key, grad in zip(("dq", "dk", "dv"), grads, strict=True):
                g.output(key, grad)
            return g

        def eager(t: Tensors) -> Tensors:
            grads = grads_of(
                lambda *leaves: packed.eager({**t, **dict(zip("qkv", leaves, strict=True))})["o"],
                [t[key] for key in "qkv"],
                t["do"],
            )
            return {f"d{key}": grad for key, grad in zip("qkv", grads, strict=True)}

        return gradient_case(
            f"packed_attention_{name}",
            packed.dtype,
            build,
            eager,
            packed.fills,
            note,
            terms=max(packed.d, *packed.keys),
        )

    for name in ("plain", "causal", "cross", "gqa", "d_v", "packed", "bottom_right"):
        packed, note = cases[name]
        yield gradient(name, replace(packed, lse=False), note)
    for dtype, names in {BF16: ("causal",), F32: ("causal",), F64: ("gqa", "cross")}.items():
        for name in names:
            packed, note = cases[name]
            yield gradient(name, replace(packed, dtype=dtype), note)
    empty = Packed((40, 0, 16), (30, 20, 0), dtype=F64)
    yield gradient("empty", empty, "a sequence without rows, one without keys")
