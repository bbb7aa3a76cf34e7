"""Graphs with one mistake: an op with good operands but for what is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import cudnngraph as cg

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Bad:
    """A graph with one mistake and what the report must contain."""

    id: str
    declare: Callable[[cg.Graph], Any]
    says: tuple[str, ...]


def image(g: cg.Graph, *shape: int, dtype: torch.dtype = F16) -> cg.Value:
    return g.input("x", shape or (2, 16, 8, 8), dtype)


def weight(g: cg.Graph, *shape: int, dtype: torch.dtype = F16) -> cg.Value:
    return g.input("w", shape or (32, 16, 3, 3), dtype)


def conv(
    *says: str,
    x: tuple[int, ...] = (),
    w: tuple[int, ...] = (),
    x_dtype: torch.dtype = F16,
    w_dtype: torch.dtype = F16,
    **options: Any,
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A convolution named 'c1' that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        given = image(g, *x, dtype=x_dtype), weight(g, *w, dtype=w_dtype)
        g.output("y", g.conv(*given, name="c1", **options))

    return declare, ("conv 'c1'", *says)


def transposed(
    *says: str, w: tuple[int, ...] = (16, 24, 3, 3), **options: Any
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A transposed convolution named 't1' that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        g.output("y", g.conv_transpose(image(g), weight(g, *w), name="t1", **options))

    return declare, ("conv_transpose 't1'", *says)


def pointwise(
    apply: Callable[[cg.Graph, cg.Value], Any], *says: str, dtype: torch.dtype = F16
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """An op on x (2, 16, 8, 8)."""
    return lambda g: g.output("y", apply(g, image(g, dtype=dtype))), says


def channel(
    op: str,
    shape: tuple[int, ...],
    *says: str,
    dtype: torch.dtype = F16,
    x_dtype: torch.dtype = F16,
    x: tuple[int, ...] = (),
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A per-channel op on x with the vector 'p'."""

    def declare(g: cg.Graph) -> None:
        given = image(g, *x, dtype=x_dtype)
        g.output("y", getattr(g, op)(given, g.input("p", shape, dtype), name="p1"))

    return declare, (f"{op} 'p1'", *says)


def norm(*says: str, **options: Any) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A batch norm named 'n1' on 16 channels; ``mean`` and ``var`` are shapes."""

    def declare(g: cg.Graph) -> None:
        shapes = {"mean": (16,), "var": (16,)} | {
            name: options.pop(name) for name in ("mean", "var") if name in options
        }
        given = [
            None if shape is None else g.input(name, shape, F32) for name, shape in shapes.items()
        ]
        g.output("y", g.batch_norm(image(g), *given, name="n1", **options))

    return declare, ("batch_norm 'n1'", *says)


def product(
    *says: str,
    x: tuple[int, ...] = (4, 24, 64),
    y: tuple[int, ...] = (64, 40),
    dtype: torch.dtype = F16,
    y_dtype: torch.dtype | None = None,
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A matrix product named 'm1' that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        given = g.input("x", x, dtype), g.input("y", y, y_dtype or dtype)
        g.output("z", g.matmul(*given, name="m1"))

    return declare, ("matmul 'm1'", *says)


def grouped(
    *says: str,
    x: tuple[int, ...] = (40, 24),
    y: tuple[int, ...] = (4, 24, 16),
    ends: tuple[int, ...] = (4,),
    dtypes: tuple[torch.dtype, ...] = (F16, F16, torch.int32),
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A product of groups of rows named 'g1' that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        shapes = {"x": x, "y": y, "ends": ends}
        given = [
            g.input(name, shape, dtype)
            for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
        ]
        g.output("z", g.grouped_matmul(*given, name="g1"))

    return declare, ("grouped_matmul 'g1'", *says)


def trailing(
    op: str,
    *says: str,
    w: tuple[int, ...] = (64,),
    b: tuple[int, ...] | None = None,
    dtype: torch.dtype = F16,
    w_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A norm named 'n1' of x (4, 24, 64) that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        given = [g.input("x", (4, 24, 64), dtype), g.input("w", w, w_dtype or dtype)]
        given += [] if b is None else [g.input("b", b, w_dtype or dtype)]
        result = getattr(g, op)(*given, name="n1", **options)
        g.output("y", result[0] if isinstance(result, tuple) else result)

    return declare, (f"{op} 'n1'", *says)


def attention(
    *says: str,
    q: tuple[int, ...] = (2, 4, 32, 64),
    k: tuple[int, ...] = (2, 4, 48, 64),
    v: tuple[int, ...] = (2, 4, 48, 64),
    dtype: torch.dtype = F16,
    v_dtype: torch.dtype | None = None,
    mask: tuple[tuple[int, ...], torch.dtype] | None = None,
    lengths: tuple[tuple[int, ...], torch.dtype] | None = None,
    inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
    **options: Any,
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """An attention named 'a1' that is wrong somehow. ``inputs`` are further ones by keyword."""

    def declare(g: cg.Graph) -> None:
        given = [
            g.input("q", q, dtype),
            g.input("k", k, dtype),
            g.input("v", v, v_dtype or dtype),
        ]
        extra = dict(options)
        if mask is not None:
            extra["attn_mask"] = g.input("mask", *mask)
        if lengths is not None:
            extra["seq_len_kv"] = g.input("lengths", *lengths)
        extra |= {key: g.input(key, *form) for key, form in (inputs or {}).items()}
        result = g.sdpa(*given, name="a1", **extra)
        g.output("y", result[0] if isinstance(result, tuple) else result)

    return declare, ("sdpa 'a1'", *says)


def packed(
    *says: str,
    shapes: tuple[tuple[int, ...], ...] = ((96, 8, 64), (80, 2, 64), (80, 2, 64)),
    ends: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (((4,), torch.int32),) * 2,
    longest: tuple[Any, Any] = (40, 32),
    **options: Any,
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """Packed attention named 'p1' that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        data = [g.input(name, shape, F16) for name, shape in zip("qkv", shapes, strict=True)]
        where = [g.input(f"ends_{n}", *form) for n, form in zip(("q", "kv"), ends, strict=True)]
        g.output("o", g.sdpa_varlen(*data, *where, *longest, name="p1", **options))

    return declare, ("sdpa_varlen 'p1'", *says)


def paged(
    *says: str,
    q: tuple[int, ...] = (2, 8, 1, 64),
    k: tuple[int, ...] = (12, 2, 16, 64),
    v: tuple[int, ...] = (12, 2, 16, 64),
    table: tuple[tuple[int, ...], torch.dtype] = ((2, 4), torch.int32),
    lengths: tuple[tuple[int, ...], torch.dtype] = ((2,), torch.int32),
    **options: Any,
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """Paged attention named 'p1' that is wrong somehow."""

    def declare(g: cg.Graph) -> None:
        data = [g.input("q", q, F16), g.input("k", k, F16), g.input("v", v, F16)]
        where = [g.input("table", *table), g.input("lengths", *lengths)]
        g.output("o", g.sdpa_paged(*data, *where, name="p1", **options))

    return declare, ("sdpa_paged 'p1'", *says)


def whole(
    declare: Callable[[cg.Graph], Any], *says: str
) -> tuple[Callable[[cg.Graph], Any], tuple[str, ...]]:
    """A mistake in the graph around the ops."""
    return declare, says


def output_of(g: cg.Graph, **options: Any) -> None:
    g.output("y", g.relu(image(g)), **options)


def relu_of(g: cg.Graph, **options: Any) -> None:
    g.output("y", g.relu(g.input("x", **options)))
