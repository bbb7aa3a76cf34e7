"""Matmuls with epilogues, and products of groups of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import cudnngraph as cg
from tests.samples.case import (
    BF16,
    F16,
    F32,
    F64,
    Case,
    Declare,
    Eager,
    Inputs,
    Layout,
    Shape,
    Tensors,
    exactly,
    gradient_case,
    normal,
    table_case,
)


def _product_case(
    name: str,
    x: Shape,
    y: Shape,
    dtype: torch.dtype,
    x_at: Layout = None,
    y_at: Layout = None,
    more: Inputs | None = None,
    declare: Declare = lambda g, v: {"z": v["x"] @ v["y"]},
    eager: Eager = lambda t: {"z": t["x"] @ t["y"]},
    note: str = "",
    **placed: Any,
) -> Case:
    inputs = {"x": (x, dtype, x_at), "y": (y, dtype, y_at), **(more or {})}
    fills = {"y": normal(1.0 / math.sqrt(max(1, x[-1])))}
    return table_case("matmul", name, inputs, declare, eager, fills, note, terms=x[-1], **placed)


def matmul() -> Iterator[Case]:
    for dtype in (F16, BF16, F32):
        yield _product_case("plain", (64, 32), (32, 48), dtype)
        yield _product_case("odd_sizes", (63, 31), (31, 47), dtype)
        yield _product_case(
            "of_a_linear_layer", (64, 32), (32, 48), dtype, y_at=(1, 32), note="(N, K) in memory"
        )
        yield _product_case("transposed_x", (64, 32), (32, 48), dtype, x_at=(1, 64))
        yield _product_case("batch", (3, 40, 32), (3, 32, 48), dtype)
        yield _product_case(
            "rows_of_a_sequence", (4, 24, 64), (64, 40), dtype, note="two dims of rows fold"
        )
        yield _product_case("two_batch_dims", (2, 3, 40, 32), (2, 3, 32, 24), dtype)
        yield _product_case(
            "bias_gelu",
            (4, 24, 64),
            (64, 40),
            dtype,
            more={"b": ((40,), dtype, None)},
            declare=lambda g, v: {"z": (v["x"] @ v["y"] + v["b"]).gelu()},
            eager=lambda t: {"z": F.gelu(t["x"] @ t["y"] + t["b"])},
        )
    for slope in (0.2, -0.3, 2.0):
        for dtype, result in ((F16, None), (BF16, None), (F16, F32)):
            yield _product_case(
                f"leaky_relu_{slope}{'_float32' * (result is not None)}",
                (96, 64),
                (64, 128),
                dtype,
                declare=lambda g, v, slope=slope: {"z": g.leaky_relu(v["x"] @ v["y"], slope)},  # type: ignore[misc]
                eager=lambda t, slope=slope: {"z": F.leaky_relu(t["x"] @ t["y"], slope)},  # type: ignore[misc]
                result=result,
            )
    yield _product_case(
        "gelu_float32",
        (96, 64),
        (64, 128),
        F16,
        declare=lambda g, v: {"z": (v["x"] @ v["y"]).gelu()},
        eager=lambda t: {"z": F.gelu(t["x"] @ t["y"])},
        result=F32,
    )
    yield _product_case("plain", (6, 8), (8, 5), F64)
    yield _product_case("batch_broadcast", (2, 1, 5, 8), (3, 8, 5), F64)
    yield _product_case(
        "batch_of_y", (40, 32), (3, 32, 48), F16, note="every product with the same x"
    )
    yield _product_case("y_per_batch_1", (3, 40, 32), (1, 32, 48), BF16)
    yield _product_case("broadcast_both_ways", (2, 1, 40, 32), (1, 3, 32, 24), F16)
    yield _product_case(
        "expanded_x", (3, 40, 32), (3, 32, 48), F16, x_at=(0, 32, 1), note="stride 0"
    )
    yield _product_case(
        "heads_of_a_sequence",
        (2, 4, 24, 32),
        (2, 4, 32, 24),
        BF16,
        x_at=(3072, 32, 128, 1),
        y_at=(3072, 32, 1, 128),
        note="q k^T of (B, S, H, D) in memory: the batch dims do not merge",
    )
    yield _product_case("slice_of_columns", (64, 32), (32, 48), F16, x_at=(80, 1))
    yield _product_case("slice_of_a_sequence", (4, 24, 64), (64, 40), F16, x_at=(3072, 64, 1))
    yield _product_case("one_row", (1, 64), (64, 48), F16)
    yield _product_case("one_row_apart", (1, 64), (64, 48), F16, x_at=(1, 40))
    yield _product_case("one_column", (40, 64), (64, 1), BF16)
    yield _product_case("outer", (40, 1), (1, 48), F16, note="K = 1")
    yield _product_case("no_terms", (5, 0), (0, 7), F16, note="K = 0 gives zeros")
    yield _product_case("no_rows", (0, 8), (8, 7), F16)
    yield _product_case("long", (16, 4096), (4096, 16), F32)
    yield _product_case(
        "square",
        (48, 48),
        (1, 48),
        F16,
        declare=lambda g, v: {"z": v["x"] @ v["x"] + v["y"]},
        eager=lambda t: {"z": t["x"] @ t["x"] + t["y"]},
        note="one tensor as both operands",
    )
    yield _product_case("column_major", (64, 32), (32, 48), F16, stride=(1, 64))
    yield _product_case(
        "column_major_relu",
        (64, 32),
        (32, 48),
        BF16,
        declare=lambda g, v: {"z": (v["x"] @ v["y"]).relu()},
        eager=lambda t: {"z": F.relu(t["x"] @ t["y"])},
        stride=(1, 64),
    )
    yield _product_case("float32_result", (64, 32), (32, 48), BF16, result=F32)
    yield _product_case(
        "residual",
        (4, 24, 64),
        (64, 40),
        BF16,
        more={"b": ((40,), F32, None), "r": ((4, 24, 40), BF16, None)},
        declare=lambda g, v: {"z": v["r"] + (v["x"] @ v["y"] + v["b"])},
        eager=lambda t: {"z": t["r"] + (t["x"] @ t["y"] + t["b"]).to(t["r"].dtype)},
        note="a float32 bias beside 16-bit data",
        result=BF16,
    )
    yield _product_case(
        "residual_of_a_sequence",
        (4, 24, 64),
        (64, 40),
        F16,
        more={"r": ((24, 40), F16, None)},
        declare=lambda g, v: {"z": v["x"] @ v["y"] + v["r"]},
        eager=lambda t: {"z": t["x"] @ t["y"] + t["r"]},
        note="positions, the same for every sequence: the rows cannot fold",
    )
    yield _product_case(
        "after_relu",
        (64, 32),
        (32, 48),
        F16,
        declare=lambda g, v: {"z": v["x"].relu() @ v["y"]},
        eager=lambda t: {"z": F.relu(t["x"]) @ t["y"]},
        note="a pointwise op before the product",
    )
    yield _product_case(
        "bias_per_column",
        (64, 32),
        (32, 48),
        F16,
        more={"b": ((48,), F16, None)},
        declare=lambda g, v: {"z": (v["x"] @ v["y"]).bias(v["b"]).silu()},
        eager=lambda t: {"z": F.silu(t["x"] @ t["y"] + t["b"])},
        note="the columns are the channels of (N, C)",
    )
    yield _product_case(
        "two_products",
        (64, 32),
        (32, 48),
        F16,
        more={"u": ((32, 48), F16, None)},
        declare=lambda g, v: {"z": (v["x"] @ v["y"]).silu() * (v["x"] @ v["u"])},
        eager=lambda t: {"z": F.silu(t["x"] @ t["y"]) * (t["x"] @ t["u"])},
        note="SwiGLU",
    )


# -- groups of rows --------------------------------------------------------------------------------


def _by_group(t: Tensors, one: Callable[[int, slice], torch.Tensor]) -> list[torch.Tensor]:
    """What each group of rows gives, the empty ones too."""
    ends = [0, *t["ends"].tolist()]
    pairs = itertools.pairwise(ends)
    return [one(group, slice(start, end)) for group, (start, end) in enumerate(pairs)]


def _grouped_eager(t: Tensors) -> Tensors:
    made = _by_group(t, lambda group, rows: t["x"][rows] @ t["y"][group])
    left = t["x"].shape[0] - sum(len(rows) for rows in made)
    return {"z": F.pad(torch.cat(made), (0, 0, 0, left))}


def _grouped_case(
    name: str,
    ends: Sequence[int],
    dtype: torch.dtype,
    sizes: tuple[int, int, int] = (40, 24, 16),
    y_at: Layout = None,
    note: str = "",
    **more: Any,
) -> Case:
    rows, columns, made = sizes
    inputs: Inputs = {
        "x": ((rows, columns), dtype, None),
        "y": ((len(ends), columns, made), dtype, y_at),
        "ends": ((len(ends),), torch.int32, None),
        **more.pop("others", {}),
    }
    return table_case(
        "grouped_matmul",
        name,
        inputs,
        more.pop("declare", lambda g, v: {"z": g.grouped_matmul(v["x"], v["y"], v["ends"])}),
        more.pop("eager", _grouped_eager),
        {"y": normal(1.0 / math.sqrt(columns)), "ends": exactly(ends)},
        note,
        terms=columns,
    )


def _swiglu_declared(g: cg.Graph, v: dict[str, cg.Value]) -> dict[str, cg.Value]:
    inner = g.grouped_matmul(v["x"], v["y"], v["ends"])
    opened = g.silu(g.slice(inner, 1, 0, 8)) * g.slice(inner, 1, 8, 16)
    return {"z": g.grouped_matmul(opened, v["down"], v["ends"])}


def _swiglu_eager(t: Tensors) -> Tensors:
    gate, up = _grouped_eager(t)["z"].chunk(2, 1)
    return _grouped_eager({**t, "x": F.silu(gate) * up, "y": t["down"]})


def grouped() -> Iterator[Case]:
    for dtype in (F16, BF16, F32):
        yield _grouped_case("plain", (9, 16, 31, 40), dtype)
        yield _grouped_case(
            "of_linear_layers",
            (9, 16, 31, 40),
            dtype,
            y_at=(384, 1, 24),
            note="(G, N, K) in memory",
        )
        yield _grouped_case("empty_groups", (0, 9, 9, 40, 40), dtype)
        yield _grouped_case("odd_sizes", (3, 7, 9), dtype, (9, 13, 7))
    yield _grouped_case("plain", (4, 6, 11), F64, (11, 5, 3))
    yield _grouped_case("rows_left", (9, 16, 20), BF16, note="rows behind the last end are zeros")
    yield _grouped_case("one_row", (0, 1, 1), BF16, (1, 24, 16), note="one token that is decoded")
    yield _grouped_case("one_group", (40,), F16)
    yield _grouped_case("no_rows", (0, 0), F16, (0, 24, 16))
    yield _grouped_case(
        "swiglu",
        (9, 16, 31, 40),
        BF16,
        others={"down": ((4, 8, 24), BF16, None)},
        declare=_swiglu_declared,
        eager=_swiglu_eager,
        note="experts: both products, and the gate between them",
    )
    for dtype in (F16, BF16, F32):
        yield _grouped_wgrad_case(dtype)


def _grouped_wgrad_case(dtype: torch.dtype) -> Case:
    def build() -> cg.Graph:
        g = cg.Graph("grouped_wgrad")
        x, dy = g.input("x", (40, 24), dtype), g.input("dy", (40, 16), dtype)
        g.output("dw", g.grouped_matmul_wgrad(x, dy, g.input("ends", (5,), torch.int32)))
        return g

    def eager(t: Tensors) -> Tensors:
        made = _by_group(t, lambda group, rows: t["x"][rows].t() @ t["dy"][rows])
        return {"dw": torch.stack(made)}

    fills = {"ends": exactly((0, 9, 16, 16, 40))}
    return gradient_case("grouped_wgrad", dtype, build, eager, fills, terms=24)
