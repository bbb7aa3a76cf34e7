"""Pointwise ops, reductions and expansion, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
    Declare,
    Eager,
    Fill,
    Inputs,
    Layout,
    Shape,
    Tensors,
    at_layout,
    gradient_case,
    grads_of,
    normal,
    small_whole,
    table_case,
    uniform,
)


def _of_images(dtype: torch.dtype, vectors: torch.dtype, layout: Layout) -> Case:
    """A scale and a bias of its own for each image, as diffusion models condition on a step."""

    def build() -> cg.Graph:
        g = cg.Graph("of_images")
        x = g.input("x", (2, 16, 6, 10), dtype, **at_layout(layout))
        s, b = (g.input(key, (2, 16, 1, 1), vectors) for key in ("s", "b"))
        g.output("y", g.bias(g.scale(x, s), b).silu())
        return g

    def eager(t: Tensors) -> Tensors:
        wide = torch.promote_types(t["x"].dtype, t["s"].dtype)
        return {"y": F.silu(t["x"].to(wide) * t["s"] + t["b"]).to(t["x"].dtype)}

    name = f"{'nchw' if layout is None else 'nhwc'}_{SHORT[vectors]}_vectors"
    return Case(f"pointwise-of_images_{name}-{SHORT[dtype]}", "pointwise", dtype, build, eager)


def _pointwise_case(
    name: str,
    inputs: Inputs,
    declare: Declare,
    eager: Eager,
    fills: Mapping[str, Fill] | None = None,
    note: str = "",
    **placed: Any,
) -> Case:
    return table_case("pointwise", name, inputs, declare, eager, fills, note, **placed)


def _unary_tail(g: cg.Graph, v: dict[str, cg.Value]) -> dict[str, cg.Value]:
    x = v["x"]
    return {
        "roots": x.sqrt() + x.rsqrt() + x.reciprocal(),
        "logs": g.sub(x.log(), x.neg().exp()),
        "error": g.mul(x.erf(), g.abs(x)),
    }


def pointwise() -> Iterator[Case]:
    image = (2, 16, 6, 10)
    for layout in (None, "channels_last"):
        yield _of_images(F16, F32, layout)
        yield _of_images(BF16, BF16, layout)
        yield _of_images(F64, F64, layout)
    for dtype in (F16, BF16, F32):
        x = {"x": (image, dtype, "channels_last")}
        both: Inputs = {**x, "y": (image, dtype, "channels_last")}
        matrix: Inputs = {"x": ((24, 64), dtype, None), "y": ((24, 64), dtype, None)}
        yield _pointwise_case(
            "arithmetic",
            both,
            lambda g, v: {"z": (v["x"] + v["y"]) * v["x"] - v["y"] / 3.0 + 0.5},
            lambda t: {"z": (t["x"] + t["y"]) * t["x"] - t["y"] / 3.0 + 0.5},
        )
        yield _pointwise_case(
            "divide_pow",
            matrix,
            lambda g, v: {"z": v["x"] / v["y"] + v["y"] ** 2.0, "p": g.pow(v["y"], v["x"])},
            lambda t: {"z": t["x"] / t["y"] + t["y"] ** 2.0, "p": torch.pow(t["y"], t["x"])},
            {"y": uniform(0.5, 2.0)},
        )
        yield _pointwise_case(
            "unary",
            {"x": (image, dtype, None)},
            _unary_tail,
            lambda t: {
                "roots": t["x"].sqrt() + t["x"].rsqrt() + t["x"].reciprocal(),
                "logs": t["x"].log() - t["x"].neg().exp(),
                "error": t["x"].erf() * t["x"].abs(),
            },
            {"x": uniform(0.25, 3.0)},
        )
        yield _pointwise_case(
            "compare_where",
            both,
            lambda g, v: {"z": g.where(v["x"] > v["y"], v["x"], 2.0 * v["y"])},
            lambda t: {"z": torch.where(t["x"] > t["y"], t["x"], 2.0 * t["y"])},
        )
        yield _pointwise_case(
            "min_max_clamp",
            matrix,
            # No 16-bit number is the bound: at it, torch's gradient is another from 2.14 on.
            lambda g, v: {"z": g.clamp(g.maximum(v["x"], v["y"]), None, 0.5001).minimum(v["y"])},
            lambda t: {
                "z": torch.minimum(torch.clamp(torch.maximum(t["x"], t["y"]), max=0.5001), t["y"])
            },
        )
        yield _pointwise_case(
            "broadcast",
            {
                **x,
                "row": ((10,), dtype, None),
                "channel": ((16, 1, 1), dtype, None),
                "column": ((2, 1, 6, 1), dtype, None),
            },
            lambda g, v: {"z": (v["x"] + v["row"]) * v["channel"] - v["column"]},
            lambda t: {"z": (t["x"] + t["row"]) * t["channel"] - t["column"]},
            note="operands of lower rank",
        )
        yield _pointwise_case(
            "bias_act",
            {**x, "b": ((16,), dtype, None)},
            lambda g, v: {"z": v["x"].bias(v["b"]).gelu()},
            lambda t: {"z": F.gelu(t["x"] + t["b"].view(-1, 1, 1))},
            note="an epilogue alone",
        )
    whole = small_whole(-3, 4)
    logic: Inputs = {"x": ((8, 64), F16, None), "y": ((8, 64), F16, None)}
    yield _pointwise_case(
        "comparisons",
        logic,
        lambda g, v: {
            "eq": g.eq(v["x"], v["y"]),
            "ne": g.ne(v["x"], v["y"]),
            "lt": v["x"] < v["y"],
            "le": v["x"] <= v["y"],
            "gt": v["x"] > 1.0,
            "ge": v["x"] >= v["y"],
        },
        lambda t: {
            "eq": t["x"] == t["y"],
            "ne": t["x"] != t["y"],
            "lt": t["x"] < t["y"],
            "le": t["x"] <= t["y"],
            "gt": t["x"] > 1.0,
            "ge": t["x"] >= t["y"],
        },
        {"x": whole, "y": whole},
        note="outputs of bools",
    )
    yield _pointwise_case(
        "logic",
        logic,
        lambda g, v: {
            "z": g.where(
                g.logical_or(
                    g.logical_and(v["x"] > 0.0, v["y"] > 0.0), g.logical_not(v["x"] <= 1.0)
                ),
                v["x"],
                v["y"],
            )
        },
        lambda t: {
            "z": torch.where(((t["x"] > 0.0) & (t["y"] > 0.0)) | ~(t["x"] <= 1.0), t["x"], t["y"])
        },
        {"x": whole, "y": whole},
    )
    yield _pointwise_case(
        "select_over_nan",
        {"x": ((8, 64), F32, None), "c": ((8, 64), torch.bool, None)},
        lambda g, v: {"z": g.where(v["c"], v["x"].log(), 0.0)},
        lambda t: {"z": torch.where(t["c"], t["x"].log(), 0.0)},
        {
            "x": lambda gen, shape: torch.linspace(-1.0, 3.0, 512, dtype=F64).reshape(shape),
            "c": lambda gen, shape: (torch.linspace(-1.0, 3.0, 512) > 0).reshape(shape),
        },
        note="pytorch#103963: what is not selected may be NaN",
    )
    yield _pointwise_case(
        "mixed_dtypes",
        {"x": (image, F16, "channels_last"), "y": (image, F32, "channels_last")},
        lambda g, v: {"z": v["x"] * v["y"] + v["x"]},
        lambda t: {"z": t["x"] * t["y"] + t["x"]},
        note="float32 beside 16-bit data gives float32",
    )
    for dtype in (F16, F32):
        yield _pointwise_case(
            "to_channels_last",
            {"x": (image, dtype, None)},
            lambda g, v: {"z": g.identity(v["x"])},
            lambda t: {"z": t["x"]},
            layout="channels_last",
            note="a change of layout",
        )
    yield _pointwise_case(
        "convert",
        {"x": (image, F32, None)},
        lambda g, v: {"z": g.identity(v["x"])},
        lambda t: {"z": t["x"].to(F16)} if t["x"].dtype == F32 else {"z": t["x"]},
        result=F16,
        note="a change of dtype",
    )
    yield _pointwise_case(
        "vector",
        {"x": ((64,), F16, None), "y": ((64,), F16, None)},
        lambda g, v: {"z": g.silu(v["x"]) * v["y"]},
        lambda t: {"z": F.silu(t["x"]) * t["y"]},
        note="rank 1",
    )
    yield _pointwise_case(
        "expanded",
        {"x": ((8, 16, 32), F16, (0, 32, 1)), "y": ((8, 16, 32), F16, None)},
        lambda g, v: {"z": v["x"] + v["y"]},
        lambda t: {"z": t["x"] + t["y"]},
        note="stride 0",
    )
    yield _pointwise_case(
        "everything",
        {"x": ((4, 32), F64, None), "y": ((4, 32), F64, None)},
        lambda g, v: {"z": g.softplus(v["x"], beta=1.5) * v["y"].tanh() - v["x"].elu(0.3)},
        lambda t: {"z": F.softplus(t["x"], 1.5) * t["y"].tanh() - F.elu(t["x"], 0.3)},
    )


_REDUCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
}


def _reduction_case(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    dims: Shape | None,
    mode: str = "sum",
    keepdim: bool | Shape = False,
    layout: Layout = "channels_last",
    y_dtype: torch.dtype | None = None,
    note: str = "",
) -> Case:
    def build() -> cg.Graph:
        g = cg.Graph("reduction")
        x = g.input("x", shape, dtype, **at_layout(layout))
        g.output("y", g.reduction(x, dims, mode, keepdim), dtype=y_dtype)
        return g

    def eager(t: Tensors) -> Tensors:
        every = tuple(range(len(shape))) if dims is None else dims
        kept = keepdim if isinstance(keepdim, bool) else True
        y = _REDUCTIONS[mode](t["x"], every, keepdim=kept)
        if not isinstance(keepdim, bool):
            y = y.squeeze([dim for dim in every if dim not in keepdim])
        return {"y": y if y_dtype is None or y.dtype == F64 else y.to(y_dtype)}

    terms = math.prod(shape[dim] for dim in (range(len(shape)) if dims is None else dims))
    return gradient_case(
        f"{mode}_{name}", dtype, build, eager, {"x": normal(1.0, 0.5)}, note=note, terms=terms
    )


def reductions() -> Iterator[Case]:
    image = (4, 16, 6, 10)
    for mode in ("sum", "mean", "max", "min"):
        yield _reduction_case("channels", image, F32, (0, 2, 3), mode)
        yield _reduction_case("channels", image, F16, (0, 2, 3), mode, y_dtype=F32)
        yield _reduction_case("everything", image, F32, None, mode)
    for dtype in (F16, BF16, F32, F64):
        yield _reduction_case("kept", image, dtype, (0, 2, 3), keepdim=True)
    yield _reduction_case("over_channels", image, F32, (1,), keepdim=True)
    yield _reduction_case("pool", image, F32, (2, 3), "mean", note="dims between others")
    yield _reduction_case("contiguous", image, F32, (0, 2, 3), layout=None)
    yield _reduction_case("rows", (48, 64), F32, (1,), layout=None)
    yield _reduction_case("columns", (48, 64), F32, (-2,), layout=None)
    yield _reduction_case("some_kept", (3, 4, 8, 16), F32, (0, 1, 2), keepdim=(2,), layout=None)
    yield _reduction_case("1d", (300,), F32, (0,), "mean", layout=None)

    def fused() -> cg.Graph:
        g = cg.Graph("bias_gradient")
        dy, y = (g.input(name, image, F16, layout="channels_last") for name in ("dy", "y"))
        g.output("db", g.reduction(g.relu_backward(dy, y), (0, 2, 3)), dtype=F32)
        return g

    yield gradient_case(
        "sum_behind_relu_backward",
        F16,
        fused,
        lambda t: {"db": torch.where(t["y"] > 0, t["dy"].to(t["dy"].dtype), 0).sum((0, 2, 3))},
        terms=240,
        note="a bias's gradient",
    )


def expands() -> Iterator[Case]:
    image = (2, 16, 6, 10)
    forms: dict[str, tuple[Shape, Shape | None]] = {
        "channels": ((16,), (1,)),
        "column": ((2, 1, 1, 1), None),
    }
    for dtype in (F16, F32):
        for name, (shape, dims) in forms.items():

            def build(
                dtype: torch.dtype = dtype, shape: Shape = shape, dims: Shape | None = dims
            ) -> cg.Graph:
                g = cg.Graph("expand")
                x = g.input("x", image, dtype, layout="channels_last")
                g.output("y", x * g.expand(g.input("b", shape, dtype), image, dims))
                return g

            yield gradient_case(
                f"expand_{name}",
                dtype,
                build,
                lambda t: {"y": t["x"] * (t["b"].view(-1, 1, 1) if t["b"].dim() == 1 else t["b"])},
            )

    def alone() -> cg.Graph:
        g = cg.Graph("expand")
        g.output("y", g.expand(g.input("x", (3, 8), F32), (3, 5, 8), (0, 2)))
        return g

    yield gradient_case(
        "expand_alone", F32, alone, lambda t: {"y": t["x"].unsqueeze(1).expand(3, 5, 8)}
    )


def activation_gradients() -> Iterator[Case]:
    image = (2, 16, 6, 10)
    kinds: dict[str, tuple[Callable[..., torch.Tensor], dict[str, float]]] = {
        "relu": (F.relu, {}),
        "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), {"negative_slope": 0.2}),
        "gelu": (F.gelu, {}),
        "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), {}),
        "silu": (F.silu, {}),
    }
    for name, (function, attrs) in kinds.items():
        for dtype in (F16, BF16, F32, F64):

            def build(
                name: str = name, attrs: dict[str, float] = attrs, dtype: torch.dtype = dtype
            ) -> cg.Graph:
                g = cg.Graph("activation")
                dy, x = (g.input(key, image, dtype, layout="channels_last") for key in ("dy", "x"))
                method = "relu" if "relu" in name else name
                g.output("dx", getattr(g, f"{method}_backward")(dy, x, **attrs))
                return g

            def eager(t: Tensors, function: Callable[..., torch.Tensor] = function) -> Tensors:
                return {"dx": grads_of(function, [t["x"]], t["dy"])[0]}

            yield gradient_case(f"{name}_backward", dtype, build, eager)
