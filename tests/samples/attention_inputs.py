"""Ops that prepare operands of attention: block masks, rotary embeddings, ragged offsets."""

from __future__ import annotations

from collections.abc import Iterator

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
    Eager,
    Layout,
    Shape,
    Tensors,
    exactly,
    table_case,
    uniform,
)


def blocks() -> Iterator[Case]:
    """Attention under a mask of blocks, whole ones and cut ones."""

    def build(dtype: torch.dtype) -> cg.Graph:
        g = cg.Graph("blocks")
        q, k, v = (g.input(name, (2, 4, 80, 64), dtype) for name in "qkv")
        mask = g.block_mask(g.input("blocks", (2, 1, 3, 3), torch.bool), 80, 80, 32)
        g.output("o", g.sdpa(q, k, v, mask))
        return g

    def eager(t: Tensors) -> Tensors:
        mask = t["blocks"].repeat_interleave(32, -2).repeat_interleave(32, -1)[..., :80, :80]
        return {"o": F.scaled_dot_product_attention(t["q"], t["k"], t["v"], mask)}

    fills = {"blocks": exactly([1, 0, 1, 0, 1, 0, 1, 1, 0] * 2)}
    for dtype in (F16, BF16, F32, F64):
        made = lambda dtype=dtype: build(dtype)  # noqa: E731
        yield Case(f"sdpa-block_mask-{SHORT[dtype]}", "sdpa", dtype, made, eager, fills, terms=80)


def rope() -> Iterator[Case]:
    """Columns turned in pairs."""

    def eager(interleaved: bool) -> Eager:
        def run(t: Tensors) -> Tensors:
            x, cos, sin = t["x"], t["cos"], t["sin"]
            a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
            turned = a * cos - b * sin, b * cos + a * sin
            y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
            return {"y": y}

        return run

    bshd = (40 * 4 * 64, 64, 4 * 64, 1)
    forms: list[tuple[str, Shape, Shape, Layout]] = [
        ("positions", (2, 4, 40, 64), (40, 32), None),
        ("batches", (2, 4, 40, 64), (2, 1, 40, 32), None),
        ("bshd", (2, 4, 40, 64), (40, 32), bshd),
        ("tokens", (40, 4, 16), (40, 1, 8), None),
    ]
    for name, shape, table, layout in forms:
        for dtype in (F16, BF16, F32, F64) if name == "positions" else (F16, F64):
            for interleaved in (False, True):
                yield table_case(
                    "rope",
                    f"{name}{'_interleaved' * interleaved}",
                    {"x": (shape, dtype, layout), **{n: (table, dtype, None) for n in _TURNS}},
                    lambda g, v, i=interleaved: {
                        "y": g.rope(v["x"], v["cos"], v["sin"], interleaved=i)
                    },
                    eager(interleaved),
                    {n: uniform(-1.0, 1.0) for n in _TURNS},
                )


_TURNS = ("cos", "sin")


def ragged() -> Iterator[Case]:
    """Offsets of packed sequences, in whole numbers."""

    def eager(t: Tensors) -> Tensors:
        q, kv = t["cu_q"], t["cu_kv"]
        lengths = [F.pad(ends.diff(), (0, 1)) for ends in (q, kv)]
        return {"y": torch.stack([*lengths, q * 24, q, kv * 24])}

    def build() -> cg.Graph:
        g = cg.Graph("ragged")
        q, kv = (g.input(f"cu_{of}", (4,), torch.int32) for of in ("q", "kv"))
        g.output("y", g.ragged_offsets(q, kv, (24, 1), (24,)))
        return g

    fills = {"cu_q": exactly([0, 5, 5, 9]), "cu_kv": exactly([0, 2, 7, 11])}
    yield Case("ragged_offsets-int32", "ragged_offsets", F32, build, eager, fills)
