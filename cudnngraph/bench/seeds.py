"""Graphs whose measured plans ship as seeds: layers of usual models, by batch and 16-bit dtype.

On a GPU, these commands make the seeds of that GPU. The first one ends by itself, and goes on where
it was if it is called again; a graph that has its plan is not measured again, nor one that a seed
serves unless these are left out::

    export CUDNNGRAPH_CACHE_DIR=seeds-cache CUDNNGRAPH_SEEDS=0
    cudnngraph tune --graphs cudnngraph/bench/seeds.py --jobs 4 --budget 360
    cudnngraph plans export --seeds plans_cache/seeds

Convolutions are those of ResNet-50 with their epilogues; linear layers, attention and norms those
of BERT, ViT and GPT-2 in their base sizes. Each graph is declared as the function of
:mod:`cudnngraph.functional` declares it, since a seed serves the very graph alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cudnngraph.graph.builder import Graph

#: The first one comes first for all layers: the search of another batch begins with its plans.
BATCHES = (8, 1, 32)
DTYPES = (torch.float16, torch.bfloat16)

# Channels in and out, image side, kernel, stride, and how it ends. Images are 224 x 224 at first.
CONVOLUTIONS = (
    (3, 64, 224, 7, 2, "relu"),
    (64, 64, 56, 1, 1, "relu"),
    (256, 64, 56, 1, 1, "relu"),
    (64, 64, 56, 3, 1, "relu"),
    (64, 256, 56, 1, 1, "residual"),
    (64, 256, 56, 1, 1, "bias"),
    (256, 128, 56, 1, 1, "relu"),
    (128, 128, 56, 3, 2, "relu"),
    (128, 512, 28, 1, 1, "residual"),
    (256, 512, 56, 1, 2, "bias"),
    (512, 128, 28, 1, 1, "relu"),
    (128, 128, 28, 3, 1, "relu"),
    (512, 256, 28, 1, 1, "relu"),
    (256, 256, 28, 3, 2, "relu"),
    (256, 1024, 14, 1, 1, "residual"),
    (512, 1024, 28, 1, 2, "bias"),
    (1024, 256, 14, 1, 1, "relu"),
    (256, 256, 14, 3, 1, "relu"),
    (1024, 512, 14, 1, 1, "relu"),
    (512, 512, 14, 3, 2, "relu"),
    (512, 2048, 7, 1, 1, "residual"),
    (1024, 2048, 14, 1, 2, "bias"),
    (2048, 512, 7, 1, 1, "relu"),
    (512, 512, 7, 3, 1, "relu"),
)
# Rows of an example, features in and out, and how it ends.
LINEAR = tuple(
    (rows, *layer)
    for rows in (128, 197, 384)
    for layer in ((768, 768, "bias"), (768, 2304, "bias"), (768, 3072, "gelu"), (3072, 768, "bias"))
)
# Heads, queries, values of a head, causal.
ATTENTION = (
    (12, 128, 64, False),
    (12, 197, 64, False),
    (12, 384, 64, False),
    (12, 1024, 64, True),
    (32, 2048, 128, True),
)
# Rows of an example, features, kind.
NORMS = tuple(
    (rows, features, kind)
    for rows, features in ((128, 768), (197, 768), (384, 768), (2048, 4096))
    for kind in ("layer_norm", "rms_norm")
)


def graphs() -> Iterator[Graph]:
    """Every graph, for each batch and dtype: all layers in one batch before those in the next."""
    kinds: tuple[tuple[str, Callable[..., None], Sequence[tuple[Any, ...]]], ...] = (
        ("conv", _convolution, CONVOLUTIONS),
        ("linear", _linear, LINEAR),
        ("attention", _attention, ATTENTION),
        ("norm", _norm, NORMS),
    )
    for batch in BATCHES:
        for kind, add, layers in kinds:
            for layer in layers:
                for dtype in DTYPES:
                    words = [kind, batch, dtype, *layer]
                    g = Graph("_".join(str(word).removeprefix("torch.") for word in words))
                    add(g, batch, dtype, *layer)
                    yield g


def _convolution(
    g: Graph,
    batch: int,
    dtype: torch.dtype,
    c: int,
    k: int,
    side: int,
    kernel: int,
    stride: int,
    end: str,
) -> None:
    x = g.input("x", (batch, c, side, side), dtype, layout="channels_last")
    w = g.input("w", (k, c, kernel, kernel), dtype, layout="channels_last")
    b = g.input("b", (k,), dtype)
    residual = None
    if end == "residual":
        out = (side - 1) // stride + 1
        residual = g.input("r", (batch, k, out, out), dtype, layout="channels_last")
    act = None if end == "bias" else "relu"
    y = g.conv_bias_act(
        x, w, b, activation=act, residual=residual, stride=stride, padding=kernel // 2
    )
    g.output("y", y)


def _linear(
    g: Graph, batch: int, dtype: torch.dtype, rows: int, features: int, out: int, end: str
) -> None:
    x = g.input("x", (batch, rows, features), dtype)
    w, b = g.input("w", (out, features), dtype), g.input("b", (out,), dtype)
    y = g.linear(x, w, b)
    g.output("y", g.gelu(y) if end == "gelu" else y)


def _attention(
    g: Graph, batch: int, dtype: torch.dtype, heads: int, length: int, width: int, causal: bool
) -> None:
    q, k, v = (g.input(name, (batch, heads, length, width), dtype) for name in "qkv")
    g.output("o", g.sdpa(q, k, v, is_causal=causal))


def _norm(g: Graph, batch: int, dtype: torch.dtype, rows: int, features: int, kind: str) -> None:
    x, w = g.input("x", (batch, rows, features), dtype), g.input("w", (features,), dtype)
    if kind == "rms_norm":
        g.output("y", g.rms_norm(x, w, eps=1e-6))
    else:
        g.output("y", g.layer_norm(x, w, g.input("b", (features,), dtype), eps=1e-5))


if __name__ == "__cudnngraph_explain__":  # run by `cudnngraph tune --graphs` or `explain`
    globals().update({graph.name: graph for graph in graphs()})
