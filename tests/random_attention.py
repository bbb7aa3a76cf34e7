"""Random attention: dense with lengths, packed and paged, beside loops over rows in float64.

A case is made by its seed alone. Sequences have any length from 0 on, and what no result may depend
on is NaN: padding, tokens behind the last sequence, pages that no table names. :meth:`Case.right`
attends sequence by sequence, in torch's own functions, which know nothing of the package.

``RANDOM_ATTENTION=3000 pytest tests/cpu/ops/test_random_attention.py`` makes so many;
``RANDOM_FIRST=1234 RANDOM_ATTENTION=1`` that one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph.ops.attention.reference import alibi_slopes
from tests.random_tensors import BF16, F16, F32, F64, Maker

KINDS = ("dense", "packed", "paged")
DTYPES = (F64, F64, F32, F32, F16, BF16)
NAN = math.nan


@dataclass
class Case:
    """Tensors by the names of the builder's operands, and options."""

    kind: str
    dtype: torch.dtype
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    rows: list[int]
    keys: list[int]
    sizes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        told = [
            f"{n}={(tuple(t.shape), t.stride(), str(t.dtype)[6:])}" for n, t in self.tensors.items()
        ]
        told += [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.kind}({', '.join(told)}) rows {self.rows} keys {self.keys}"

    @property
    def trained(self) -> list[str]:
        """What gets a gradient."""
        if self.kind == "paged":
            return []
        names = [n for n in ("q", "k", "v", "sink") if n in self.tensors]
        mask = self.tensors.get("attn_mask")
        return [*names, "attn_mask"] if mask is not None and mask.is_floating_point() else names

    @property
    def terms(self) -> int:
        return 64 * max(1, *(each.numel() for each in self.tensors.values()))

    def graph(self) -> cg.Graph:
        g = cg.Graph(self.kind)
        values = {name: g.input(name, like=tensor) for name, tensor in self.tensors.items()}
        method = {"dense": g.sdpa, "packed": g.sdpa_varlen, "paged": g.sdpa_paged}[self.kind]
        if self.kind == "packed" and "cu_seqlens_kv" not in values:
            values["cu_seqlens_kv"] = values["cu_seqlens_q"]
        made = method(**values, **self.options)
        for name, value in zip(
            ("o", "lse"), made if isinstance(made, tuple) else (made,), strict=False
        ):
            g.output(name, value)
        return g

    # -- by loops ----------------------------------------------------------------------------------

    def right(self, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """o and the lse from float64 tensors; rows that are none are NaN."""
        o, lse = [], []
        for at in range(len(self.rows)):
            q, k, v = self._sequence(given, at)
            made = self._attend(given, at, q, k, v)
            o.append(made[0])
            lse.append(made[1])
        if self.kind == "packed":
            behind = len(self.tensors["q"]) - sum(self.rows)
            o = [*(each.transpose(0, 1) for each in o)]
            lse = [*(each.transpose(0, 1) for each in lse)]
            heads, width = self.tensors["q"].shape[1], self.tensors["v"].shape[2]
            o.append(torch.full((behind, heads, width), NAN, dtype=F64))
            lse.append(torch.full((behind, heads), NAN, dtype=F64))
            results = [torch.cat(o), torch.cat(lse)]
        else:
            longest = self.tensors["q"].shape[2]
            results = [
                torch.stack([_padded(each, longest, 0.0) for each in o]),
                torch.stack([_padded(each, longest, -math.inf) for each in lse]),
            ]
        return results if self.options["return_lse"] else results[:1]

    def _sequence(self, given: Mapping[str, torch.Tensor], at: int) -> list[torch.Tensor]:
        """q, k and v (H, S, D) of one sequence, without what is none of it."""
        rows, keys = self.rows[at], self.keys[at]
        if self.kind == "dense":
            q, k, v = (given[name][at] for name in "qkv")
            return [q[:, :rows], k[:, :keys], v[:, :keys]]
        if self.kind == "packed":
            top, left = sum(self.rows[:at]), sum(self.keys[:at])
            q = given["q"][top : top + rows]
            k, v = (given[name][left : left + keys] for name in "kv")
            return [each.transpose(0, 1) for each in (q, k, v)]
        page, made = self.sizes["page"], [given["q"][at][:, :rows]]
        for name, table in (("k_cache", "page_table"), ("v_cache", "page_table_v")):
            pages = given.get(table, given["page_table"])[at][: -(-keys // page)].tolist()
            cache = given[name]
            whole = [cache[each] for each in pages]
            heads, width = cache.shape[1], cache.shape[3]
            flat = torch.cat(whole, 1) if whole else cache.new_zeros(heads, 0, width)
            made.append(flat[:, :keys])
        return made

    def _attend(
        self,
        given: Mapping[str, torch.Tensor],
        at: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, keys, options = q.shape[1], k.shape[1], self.options
        shared = q.shape[0] // k.shape[0]
        k, v = (each.repeat_interleave(shared, 0) for each in (k, v))
        scale = options.get("scale")
        scores = q @ k.mT * (1.0 / math.sqrt(q.shape[2]) if scale is None else scale)
        cap = options.get("softcap")
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        shift = keys - rows if options["diagonal_alignment"] == "bottom_right" else 0
        away = torch.arange(keys).view(1, -1) - torch.arange(rows).view(-1, 1) - shift
        left, right = options.get("window") or (None, None)
        right = 0 if options.get("is_causal") else right
        keep = torch.ones(rows, keys, dtype=torch.bool)
        keep &= away <= right if right is not None else keep
        keep &= away >= -left if left is not None else keep
        keep = keep.expand(scores.shape)
        mask = given.get("attn_mask")
        if mask is not None:
            full = (len(self.rows), q.shape[0], self.sizes["rows"], self.sizes["keys"])
            mask = mask.expand(full)[at][:, :rows, :keys]
            keep, scores = (
                (keep & mask, scores) if mask.dtype == torch.bool else (keep, scores + mask)
            )
        slopes = given.get("alibi_slopes")
        if options.get("alibi"):
            slopes = torch.tensor(alibi_slopes(q.shape[0]), dtype=F64)
        scores = scores if slopes is None else scores - slopes.view(-1, 1, 1) * away.abs()
        scores = scores.masked_fill(~keep, -math.inf)
        sink = given.get("sink")
        if sink is not None:
            column = sink.view(-1, 1, 1).expand(-1, rows, 1)
            scores = torch.cat([scores, column], 2)
        empty = (~keep).all(2) if keys else torch.ones(q.shape[0], rows, dtype=torch.bool)
        none = torch.isneginf(scores).all(2) if scores.shape[2] else empty
        weights = torch.softmax(scores.masked_fill(none.unsqueeze(2), 0.0), 2)[..., :keys]
        lse = torch.logsumexp(scores.masked_fill(none.unsqueeze(2), 0.0), 2)
        dropped = given.get("dropout_mask")
        if dropped is not None:
            factor = dropped[at][:, :rows, :keys].to(F64) / (1.0 - options["dropout_p"])
            weights = weights * factor
        o = (weights @ v).masked_fill(empty.unsqueeze(2), 0.0)
        return o, lse.masked_fill(none, -math.inf)


def _padded(x: torch.Tensor, longest: int, value: float) -> torch.Tensor:
    """(H, S, ...) with rows of a number behind it."""
    more = torch.full((x.shape[0], longest - x.shape[1], *x.shape[2:]), value, dtype=F64)
    return torch.cat([x, more], 1)


# -- cases -----------------------------------------------------------------------------------------


def _lengths(m: Maker, count: int, most: int) -> list[int]:
    return [m.pick(0, 1, most, m.rng.randint(0, most)) for _ in range(count)]


def _bands(m: Maker) -> dict[str, Any]:
    options: dict[str, Any] = {"return_lse": m.chance(0.5)}
    options["diagonal_alignment"] = m.pick("top_left", "bottom_right")
    if m.chance(0.3):
        options["is_causal"] = True
    if m.chance(0.35):
        options["window"] = (m.pick(None, 0, 1, 3, 50), m.pick(None, 0, 1, 2, 50))
    if m.chance(0.3):
        options["scale"] = m.pick(0.3, 1.0, -0.5)
    return options


def _dense(m: Maker, dtype: torch.dtype, heads: int, shared: int, d: int, d_v: int) -> Case:
    batch, rows, keys = m.pick(1, 2, 3), m.pick(1, 2, 5, 9), m.pick(1, 2, 4, 7, 12)
    stats = F64 if dtype == F64 else F32
    tensors = {
        "q": m.tensor((batch, heads, rows, d), dtype),
        "k": m.tensor((batch, heads // shared, keys, d), dtype),
        "v": m.tensor((batch, heads // shared, keys, d_v), dtype),
    }
    options = _bands(m)
    many, each = [rows] * batch, [keys] * batch
    if m.chance(0.5):
        if m.chance(0.7):
            many = _lengths(m, batch, rows)
            tensors["seq_len_q"] = torch.tensor(many, dtype=torch.int32)
        if m.chance(0.7):
            each = _lengths(m, batch, keys)
            tensors["seq_len_kv"] = torch.tensor(each, dtype=torch.int32)
        for name, lengths in (("q", many), ("k", each), ("v", each)):
            tensors[name] = tensors[name].clone()
            for at, length in enumerate(lengths):
                tensors[name][at, :, length:] = NAN
    if m.chance(0.4):
        full = (batch, heads, rows, keys)
        shape = tuple(m.pick(1, n) for n in full)[m.pick(0, 0, 1, 2) :]
        kind = m.pick(torch.bool, dtype, stats)
        made = m.tensor(shape, F32 if kind == torch.bool else kind)
        tensors["attn_mask"] = made > -0.5 if kind == torch.bool else made
    if m.chance(0.25):
        tensors["sink"] = m.tensor((heads,), stats, plain=True)
    if m.chance(0.2):
        options["alibi"] = True
    elif m.chance(0.2):
        tensors["alibi_slopes"] = m.tensor((heads,), stats, positive=True, plain=True)
    if m.chance(0.2):
        options["softcap"] = m.pick(1.5, 30.0)
    if m.chance(0.25):
        options["dropout_p"] = m.pick(0.25, 0.5)
        shape = (batch, heads, rows, keys)
        tensors["dropout_mask"] = torch.rand(shape, generator=m.numbers) > options["dropout_p"]
    return Case("dense", dtype, tensors, options, many, each, {"rows": rows, "keys": keys})


def _packed(m: Maker, dtype: torch.dtype, heads: int, shared: int, d: int, d_v: int) -> Case:
    batch = m.pick(1, 2, 3, 5)
    rows, most = _lengths(m, batch, 6), m.pick(6, 7, 20)
    same = m.chance(0.5)
    keys = rows if same else _lengths(m, batch, m.pick(1, 6, 9))
    tensors = {}
    for name, lengths, count, width in (
        ("q", rows, heads, d),
        ("k", keys, heads // shared, d),
        ("v", keys, heads // shared, d_v),
    ):
        behind = m.pick(0, 0, 3)
        made = m.tensor((sum(lengths) + behind, count, width), dtype).clone()
        made[sum(lengths) :] = NAN
        tensors[name] = made
    tensors["k"] = tensors["k"][: min(len(tensors["k"]), len(tensors["v"]))]
    tensors["v"] = tensors["v"][: len(tensors["k"])]
    for name, lengths in (("q", rows), ("kv", keys)):
        if name == "kv" and same:
            continue
        starts = torch.tensor([0, *lengths]).cumsum(0)
        tensors[f"cu_seqlens_{name}"] = starts.to(torch.int32)
    options = {**_bands(m), "max_seqlen_q": most, "max_seqlen_kv": m.pick(9, 9, 30)}
    return Case("packed", dtype, tensors, options, rows, keys)


def _paged(m: Maker, dtype: torch.dtype, heads: int, shared: int, d: int, d_v: int) -> Case:
    batch, page, rows = m.pick(1, 2, 3), m.pick(1, 2, 4), m.pick(1, 1, 2, 5)
    slots = m.pick(1, 2, 4)
    keys = _lengths(m, batch, slots * page)
    many = [rows] * batch
    pages = batch * slots + 2
    tensors = {
        "q": m.tensor((batch, heads, rows, d), dtype).clone(),
        "k_cache": m.tensor((pages, heads // shared, page, d), dtype).clone(),
        "v_cache": m.tensor((pages, heads // shared, page, d_v), dtype).clone(),
        "seq_len_kv": torch.tensor(keys, dtype=torch.int32),
    }
    for cache, table in (("k_cache", "page_table"), ("v_cache", "page_table_v")):
        if table == "page_table_v" and m.chance(0.6):
            cache_tables = tensors["page_table"]
        else:
            order = m.rng.sample(range(pages), batch * slots)
            cache_tables = torch.tensor(order, dtype=torch.int32).view(batch, slots).clone()
            tensors[table] = cache_tables
        valid = torch.zeros(pages, page, dtype=torch.bool)
        for at, length in enumerate(keys):
            for key in range(length):
                valid[cache_tables[at, key // page], key % page] = True
        tensors[cache].masked_fill_(~valid.view(pages, 1, page, 1), NAN)
        for at, length in enumerate(keys):  # what a table holds behind is not used
            cache_tables[at, -(-length // page) :] = m.pick(0, -1, -5, pages, 2**31 - 1)
    if m.chance(0.4):
        many = _lengths(m, batch, rows)
        tensors["seq_len_q"] = torch.tensor(many, dtype=torch.int32)
        for at, length in enumerate(many):
            tensors["q"][at, :, length:] = NAN
    return Case("paged", dtype, tensors, _bands(m), many, keys, {"page": page})


def case(seed: int) -> Case:
    """The case of a seed."""
    m = Maker(seed)
    dtype = m.pick(*DTYPES)
    shared, groups = m.pick(1, 1, 2, 3), m.pick(1, 2)
    d = m.pick(1, 2, 4, 8)
    make = {"dense": _dense, "packed": _packed, "paged": _paged}[m.pick(*KINDS)]
    return make(m, dtype, shared * groups, shared, d, m.pick(d, d, 3, 8))
