"""Views, concatenation, gated MLPs, and ops of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import cudnngraph as cg
from tests.samples.case import (
    ACTIVATIONS,
    BF16,
    F16,
    F32,
    F64,
    Case,
    Inputs,
    Layout,
    Shape,
    Tensors,
    normal,
    small_whole,
    table_case,
)


def _view_case(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    view: Callable[[Any], Any],
    at: Layout = None,
    note: str = "",
) -> Case:
    """``view`` works on graph values and on tensors alike."""
    return table_case(
        "view",
        name,
        {"x": (shape, dtype, at)},
        lambda g, v: {"y": view(v["x"])},
        lambda t: {"y": view(t["x"])},
        note=note,
    )


def _sliced(x: Any, dim: int, start: int, stop: int | None, step: int = 1) -> Any:
    if isinstance(x, cg.Value):
        return x.slice(dim, start, stop, step)
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, stop, step),)]


def _joined(
    name: str,
    shapes: Sequence[Shape],
    dim: int,
    dtype: torch.dtype,
    at: Sequence[Layout] | None = None,
    note: str = "",
) -> Case:
    names = [f"x{place}" for place in range(len(shapes))]
    return table_case(
        "concat",
        name,
        {
            key: (shape, dtype, layout)
            for key, shape, layout in zip(names, shapes, at or [None] * len(names), strict=True)
        },
        lambda g, v: {"y": g.concat([v[key] for key in names], dim)},
        lambda t: {"y": torch.cat([t[key] for key in names], dim)},
        note=note,
    )


def _mlp_case(dtype: torch.dtype, gate: str | None) -> Case:
    """Both layers of a transformer's feed-forward part; SwiGLU and GeGLU have a gate."""
    act = gate or "gelu"
    names = ("up", "gate") if gate else ("up",)
    shapes: Inputs = {
        "x": ((4, 24, 64), dtype, None),
        **{name: ((96, 64), dtype, None) for name in names},
        **{f"{name}_bias": ((96,), dtype, None) for name in names},
        "down": ((40, 96), dtype, None),
        "down_bias": ((40,), dtype, None),
    }

    def declare(g: cg.Graph, v: dict[str, cg.Value]) -> dict[str, cg.Value]:
        more = {key: v[key] for key in ("gate", "gate_bias") if key in v}
        y = g.mlp(v["x"], v["up"], v["up_bias"], v["down"], v["down_bias"], activation=act, **more)
        return {"y": y}

    def eager(t: Tensors) -> Tensors:
        inner = F.linear(t["x"], t["up"], t["up_bias"])
        if gate is None:
            inner = F.gelu(inner)
        else:
            inner = ACTIVATIONS[gate](F.linear(t["x"], t["gate"], t["gate_bias"])) * inner
        return {"y": F.linear(inner, t["down"], t["down_bias"])}

    fills = {name: normal(1.0 / 8.0) for name in ("up", "gate")} | {"down": normal(0.1)}
    name = {None: "mlp", "silu": "mlp_swiglu", "gelu": "mlp_geglu"}[gate]
    return table_case("view", name, shapes, declare, eager, fills, terms=96)


def torchs_own() -> Iterator[Case]:
    """Ops that only torch has, between ops that cuDNN has."""
    image, last = (2, 16, 12, 10), "channels_last"
    x, pair = ("tensor", 0), ("list", 2, 2)
    for dtype in (F16, BF16, F32, F64):
        yield table_case(
            "aten",
            "pad",
            {"x": (image, dtype, last)},
            lambda g, v: {
                "y": g.relu(
                    g.aten(
                        [v["x"] * 2.0],
                        "aten.constant_pad_nd.default",
                        (x, ("list", 1, 2, 0, 3), 0.25),
                    )
                )
            },
            lambda t: {"y": F.relu(F.pad(t["x"] * 2.0, (1, 2, 0, 3), value=0.25))},
        )
        yield table_case(
            "aten",
            "softmax",
            {"x": ((6, 40), dtype, None)},
            lambda g, v: {"y": g.aten([v["x"]], "aten._softmax.default", (x, -1, False))},
            lambda t: {"y": torch.softmax(t["x"], -1)},
        )
    yield table_case(
        "aten",
        "two_results",
        {"x": (image, F16, last)},
        lambda g, v: dict(
            zip(
                ("y", "at"),
                g.aten([v["x"]], "aten.max_pool2d_with_indices.default", (x, pair, pair)),
                strict=True,
            )
        ),
        lambda t: dict(zip(("y", "at"), F.max_pool2d(t["x"], 2, return_indices=True), strict=True)),
    )
    yield table_case(
        "aten",
        "gather",
        {"x": ((5, 8), F16, None), "at": ((3, 4), torch.int64, None)},
        lambda g, v: {
            "y": g.neg(
                g.aten([v["x"], v["at"]], "aten.embedding.default", (("tensor", 0), ("tensor", 1)))
            )
        },
        lambda t: {"y": -F.embedding(t["at"], t["x"])},
        {"at": small_whole(0, 5)},
    )
    for dtype in (F32, BF16):
        yield table_case(
            "aten",
            "sum_rows",
            {"x": ((6, 4, 12), dtype, None), "at": ((6, 4), torch.int64, None)},
            lambda g, v: {
                "y": g.aten(
                    [v["x"], v["at"]],
                    "cudnngraph.sum_rows.default",
                    (("tensor", 0), ("tensor", 1), 5, 2),
                )
            },
            lambda t: {
                "y": torch.zeros(5, 12, dtype=t["x"].dtype)
                .to(t["x"].device)
                .index_add(0, t["at"].flatten(), t["x"].flatten(0, 1))
                * (torch.arange(5, device=t["x"].device) != 2)[:, None]
            },
            {"at": small_whole(0, 5)},
        )
    yield table_case(
        "aten",
        "cast",
        {"z": ((5, 8), F16, None), "x": ((5, 8), F32, None)},
        lambda g, v: {
            "y": g.relu(
                g.aten([v["x"]], "aten._to_copy.default", (x,), (("dtype", ("dtype", "float16")),))
                + v["z"]
            )
        },
        lambda t: {"y": F.relu(t["x"].to(t["z"].dtype) + t["z"])},
    )


def views() -> Iterator[Case]:
    image, last = (2, 16, 6, 10), "channels_last"
    for dtype in (F16, BF16, F32):
        yield _view_case("flatten", image, dtype, lambda x: x.reshape((2, -1)))
        yield _view_case("heads", (2, 24, 64), dtype, lambda x: x.reshape((2, 24, 4, 16)))
        yield _view_case("transpose", (24, 40), dtype, lambda x: x.transpose(0, 1))
        yield _view_case("last_two", (2, 3, 24, 40), dtype, lambda x: x.transpose(-1, -2))
        yield _view_case("to_nhwc", image, dtype, lambda x: x.permute((0, 2, 3, 1)), last)
        yield _view_case("reverse", (3, 5, 7), dtype, lambda x: x.permute((2, 1, 0)))
        yield _view_case("channels", image, dtype, lambda x: _sliced(x, 1, 4, 12))
        yield _view_case("crop", image, dtype, lambda x: _sliced(_sliced(x, 2, 1, -1), 3, 2, -2))
        yield _joined("channels", [(2, 16, 6, 10), (2, 8, 6, 10), (2, 1, 6, 10)], 1, dtype)
        yield _joined(
            "channels_last", [(2, 16, 6, 10), (2, 8, 6, 10)], 1, dtype, (last, last), "stays so"
        )
    yield _view_case("flatten_channels_last", image, F16, lambda x: x.reshape((2, -1)), last)
    yield _view_case(
        "tokens_of_channels_last",
        image,
        F16,
        lambda x: x.reshape((2, 16, 60)).transpose(1, 2),
        last,
        "no element moves: (N, HW, C) in memory",
    )
    yield _view_case("split_a_dim", (24, 10), F16, lambda x: x.reshape((2, 3, 4, 10)), (1, 24))
    yield _view_case("merge_apart", (4, 6), F16, lambda x: x.reshape((24,)), (10, 1), "a copy")
    yield _view_case("ones", (1, 24, 1), F16, lambda x: x.reshape((24, 1, 1, 1)))
    yield _view_case("scalar", (1, 1), F32, lambda x: x.reshape(()))
    yield _view_case("empty", (0, 6), F16, lambda x: x.reshape((3, 0, 2)))
    yield _view_case("expanded", (4, 6), F16, lambda x: x.reshape((2, 2, 6)), (0, 1), "stride 0")
    yield _view_case("same", (4, 6), F64, lambda x: x.reshape((4, 6)).transpose(0, 0))
    yield _view_case("expanded_transpose", (4, 6), F16, lambda x: x.transpose(0, 1), (0, 1))
    yield _view_case("of_slice", (4, 6), F16, lambda x: x.transpose(0, 1), (10, 1), "gaps")
    yield _view_case("every_third", (4, 20), F16, lambda x: _sliced(x, -1, 1, None, 3), None)
    yield _view_case("from_the_end", (20, 4), BF16, lambda x: _sliced(x, 0, -5, 100))
    yield _view_case("nothing", (4, 6), F16, lambda x: _sliced(x, 0, 3, 2), None, "empty")
    yield _view_case("one_channel", image, F32, lambda x: _sliced(x, 1, 3, 4), last)
    yield _view_case("permute_scalar", (), F32, lambda x: x.permute(()))
    yield _view_case("five_dims", (2, 3, 4, 5, 6), F16, lambda x: x.permute((4, -2, 0, 1, 2)))
    yield _joined("rows", [(3, 8), (5, 8)], 0, F16)
    yield _joined("last", [(3, 8), (3, 1), (3, 7)], -1, BF16)
    yield _joined("one", [(3, 8)], 0, F16, note="a list of one")
    yield _joined("ten", [(2, place, 3) for place in range(10)], 1, F32, note="one is empty")
    yield _joined("layouts", [image, image], 1, F16, (last, None), "do not agree")
    yield _joined("float64", [(2, 3), (2, 4)], 1, F64)
    yield _joined(
        "one_channel", [(2, 16, 6, 10), (2, 1, 6, 10)], 1, F16, (last, None), "says no layout"
    )
    yield _joined("slices", [(3, 8), (4, 8)], 0, F16, ((16, 1), (8, 1)))
    yield table_case(
        "view",
        "bools",
        {"x": ((4, 6), F16, None), "y": ((6, 4), F16, None)},
        lambda g, v: {"z": g.concat([(v["x"] > 0.0).transpose(0, 1), v["y"] > 0.0], 1)},
        lambda t: {"z": torch.cat([(t["x"] > 0.0).transpose(0, 1), t["y"] > 0.0], 1)},
        note="bools are moved as well",
    )
    yield table_case(
        "concat",
        "twice",
        {"x": ((4, 6), F16, None)},
        lambda g, v: {"y": g.concat([v["x"], v["x"]])},
        lambda t: {"y": torch.cat([t["x"], t["x"]])},
        note="one tensor twice",
    )
    for dtype in (F16, BF16, F32):
        yield table_case(
            "view",
            "linear",
            {
                "x": ((4, 24, 64), dtype, None),
                "w": ((40, 64), dtype, None),
                "b": ((40,), dtype, None),
            },
            lambda g, v: {"y": g.linear(v["x"], v["w"], v["b"]).gelu()},
            lambda t: {"y": F.gelu(F.linear(t["x"], t["w"], t["b"]))},
            {"w": normal(1.0 / 8.0)},
            terms=64,
        )
        yield table_case(
            "view",
            "norm_of_channels",
            {
                "x": ((2, 16, 6, 10), dtype, "channels_last"),
                "w": ((32, 16, 3, 3), dtype, "channels_last"),
                "gamma": ((32,), dtype, None),
                "beta": ((32,), dtype, None),
            },
            lambda g, v: {
                "y": g.conv(v["x"], v["w"], padding=1)
                .permute((0, 2, 3, 1))
                .layer_norm(v["gamma"], v["beta"], eps=1e-6)
                .permute((0, 3, 1, 2))
            },
            lambda t: {
                "y": F.layer_norm(
                    F.conv2d(t["x"], t["w"], padding=1).permute(0, 2, 3, 1),
                    (32,),
                    t["gamma"],
                    t["beta"],
                    1e-6,
                ).permute(0, 3, 1, 2)
            },
            {"w": normal(1.0 / 12.0)},
            terms=144,
            note="a ConvNeXt stem",
        )
    yield table_case(
        "view",
        "linear_without_bias",
        {"x": ((24, 64), F16, None), "w": ((40, 64), F16, None)},
        lambda g, v: {"y": g.linear(v["x"], v["w"])},
        lambda t: {"y": F.linear(t["x"], t["w"])},
        {"w": normal(1.0 / 8.0)},
        terms=64,
    )
    yield table_case(
        "view",
        "swiglu",
        {
            "x": ((4, 24, 64), BF16, None),
            "gate": ((64, 48), BF16, None),
            "up": ((64, 48), BF16, None),
        },
        lambda g, v: {"y": g.swiglu(v["x"], v["gate"], v["up"])},
        lambda t: {"y": F.silu(t["x"] @ t["gate"]) * (t["x"] @ t["up"])},
        {"gate": normal(1.0 / 8.0), "up": normal(1.0 / 8.0)},
        terms=64,
    )
    for gate in (None, "silu", "gelu"):
        for dtype in (F16, BF16, F32, F64):
            yield _mlp_case(dtype, gate)
