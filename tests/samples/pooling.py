"""Pooling and interpolation, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    Layout,
    Shape,
    Tensors,
    at_layout,
    gradient_case,
    grads_of,
    normal,
    table_case,
)

_TORCH_POOLS: Mapping[str, Sequence[Callable[..., torch.Tensor]]] = {
    "max_pool": (F.max_pool1d, F.max_pool2d, F.max_pool3d),
    "avg_pool": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    "adaptive_avg_pool": (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    "adaptive_max_pool": (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    "interpolate": (F.interpolate,) * 3,
}


def _resample_case(
    op: str,
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    at: Layout = None,
    note: str = "",
    backward: bool = False,
    **attrs: Any,
) -> Case:
    """A pool or an interpolation of x, or its gradient; ``attrs`` go by name to both sides."""
    run = _TORCH_POOLS[op][len(shape) - 3]

    def eager(t: Tensors) -> Tensors:
        if not backward:
            return {"y": run(t["x"], **attrs)}
        x = t.get("x", torch.zeros(shape, dtype=t["dy"].dtype, device=t["dy"].device))
        return {"dx": grads_of(lambda x: run(x, **attrs), [x], t["dy"])[0]}

    def build() -> cg.Graph:
        g = cg.Graph(op)
        if not backward:
            g.output("y", getattr(g, op)(g.input("x", shape, dtype, **at_layout(at)), **attrs))
            return g
        out = getattr(cg.Graph(), op)  # its result's shape is that of dy
        dy = g.input("dy", out(out.__self__.input("x", shape, dtype), **attrs).shape, dtype)
        more = {} if "max" in op else {"input_size": shape[2:]}
        x = [g.input("x", shape, dtype, **at_layout(at))] if "max" in op else []
        g.output("dx", getattr(g, f"{op}_backward")(dy, *x, **attrs, **more))
        return g

    if backward:
        return gradient_case(f"{op}_backward_{name}", dtype, build, eager, note=note, terms=64)
    label = f"resample-{op}_{name}-{SHORT[dtype]}"
    return Case(label, "resample", dtype, build, eager, note=note, terms=64)


def resamples() -> Iterator[Case]:
    image, volume, line, last = (2, 16, 12, 9), (2, 4, 5, 6, 8), (2, 16, 30), "channels_last"
    window = {"kernel_size": 3, "stride": 2, "padding": 1}
    for dtype in (F16, BF16, F32):
        for op in ("max_pool", "avg_pool"):
            yield _resample_case(op, "3x3", image, dtype, **window)
            yield _resample_case(op, "3x3_channels_last", image, dtype, last, **window)
        yield _resample_case("adaptive_avg_pool", "of_unequal", image, dtype, last, output_size=5)
        for mode in ("nearest", "bilinear"):
            yield _resample_case(
                "interpolate", f"{mode}_x2", image, dtype, last, scale_factor=2, mode=mode
            )
    for op in ("max_pool", "avg_pool"):
        yield _resample_case(op, "line", line, F16, kernel_size=4)
        yield _resample_case(op, "line_last", line, F16, last, kernel_size=4, padding=2)
        # torch averages volumes of float16 on no CPU.
        deep = F32 if op == "avg_pool" else F16
        yield _resample_case(op, "volume", volume, deep, kernel_size=(1, 2, 3), stride=1)
        yield _resample_case(op, "volume_last", volume, deep, last, **window)
        yield _resample_case(op, "ceil", image, F32, ceil_mode=True, **window)
        yield _resample_case(op, "ceil_leaves_one", image, F32, ceil_mode=True, kernel_size=2)
        yield _resample_case(op, "gaps", image, F16, (2000, 120, 10, 1), "a slice", **window)
        yield _resample_case(op, "no_images", (0, 16, 12, 9), F16, last, "empty", **window)
        yield _resample_case(op, "float64", image, F64, **window)
    yield _resample_case("max_pool", "dilated", image, F16, kernel_size=3, dilation=2, padding=1)
    yield _resample_case("avg_pool", "inside", image, F16, count_include_pad=False, **window)
    yield _resample_case("avg_pool", "one_channel", (2, 1, 12, 9), F16, last, **window)
    for kind in ("avg", "max"):
        op = f"adaptive_{kind}_pool"
        yield _resample_case(op, "of_equal", image, F16, last, output_size=(4, 3))
        yield _resample_case(op, "one", image, F16, last, output_size=1)
        yield _resample_case(op, "some", image, F16, output_size=(None, 4))
        yield _resample_case(op, "line", line, F32, output_size=7)
        yield _resample_case(op, "volume", volume, F32, last, output_size=(2, 4, 3))
        yield _resample_case(op, "larger", image, F64, output_size=(16, 20))
    sized = "interpolate"
    yield _resample_case(sized, "size", image, F16, last, size=(5, 20), mode="bilinear")
    yield _resample_case(
        sized, "corners", image, F16, last, size=(23, 17), mode="bilinear", align_corners=True
    )
    yield _resample_case(sized, "to_one", image, F32, size=1, mode="bilinear", align_corners=True)
    # Coordinates that float32 rounds move the weights by more than float32's bound.
    yield _resample_case(sized, "uneven", image, F16, scale_factor=(1.7, 0.6), mode="bilinear")
    yield _resample_case(sized, "exact", image, F16, last, size=(7, 20), mode="nearest-exact")
    yield _resample_case(sized, "cubic", image, F32, scale_factor=2, mode="bicubic")
    yield _resample_case(sized, "line", line, F16, scale_factor=1.5, mode="linear")
    yield _resample_case(sized, "line_nearest", line, F16, size=47)
    yield _resample_case(sized, "volume", volume, F16, last, scale_factor=2, mode="trilinear")
    yield _resample_case(sized, "volume_nearest", volume, F16, scale_factor=(2, 1, 3))
    yield _resample_case(sized, "gaps", image, F16, (2000, 120, 10, 1), "a slice", size=(5, 20))
    yield _resample_case(sized, "float64", image, F64, scale_factor=2, mode="bilinear")
    # Large enough for matmuls (DeviceRules.resize_by_matmul_min_elements), or of one element.
    for dtype in (F16, BF16):
        for at in (last, None):
            name = "x8" if at is None else "x8_channels_last"
            yield _resample_case(
                sized, name, (1, 21, 32, 32), dtype, at, scale_factor=8, mode="bilinear"
            )
    yield _resample_case(
        sized, "x2_large", (2, 16, 96, 104), F16, last, scale_factor=2, mode="bilinear"
    )
    yield _resample_case(
        *(sized, "corners_large", (1, 16, 33, 33), F16, last),
        size=(257, 257),
        mode="bilinear",
        align_corners=True,
    )
    yield _resample_case(sized, "line_large", (2, 128, 512), F16, scale_factor=8, mode="linear")
    for mode in ("nearest", "bilinear", "bicubic"):
        yield _resample_case(
            sized, f"one_{mode}", (2, 16, 1, 1), F16, last, size=(12, 9), mode=mode
        )
    for dtype, layout in ((F16, last), (F32, None)):
        for name, shape in (("pixel_shuffle", image), ("pixel_unshuffle", (2, 3, 12, 8))):
            yield table_case(
                "resample",
                name,
                {"x": (shape, dtype, layout)},
                lambda g, v, name=name: {"y": getattr(g, name)(v["x"], 2)},
                lambda t, name=name: {"y": getattr(F, name)(t["x"], 2)},
            )
    yield table_case(
        "resample",
        "decoder",
        {"x": ((2, 16, 48, 64), F16, last), "skip": ((2, 8, 192, 256), F16, last)},
        lambda g, v: {
            "y": g.concat([g.interpolate(v["x"], scale_factor=4, mode="bilinear"), v["skip"]], 1)
        },
        lambda t: {
            "y": torch.cat([F.interpolate(t["x"], scale_factor=4, mode="bilinear"), t["skip"]], 1)
        },
        note="enlarged into a slice",
    )
    for dtype in (F16, F32):
        yield table_case(
            "resample",
            "stem",
            {
                "x": ((2, 3, 20, 20), dtype, last),
                "w": ((16, 3, 3, 3), dtype, last),
                "b": ((16,), dtype, None),
            },
            lambda g, v: {
                "y": g.interpolate(
                    g.max_pool(g.conv_bias_act(v["x"], v["w"], v["b"]), 3, 2, 1),
                    scale_factor=2,
                    mode="bilinear",
                )
                * 2.0
            },
            lambda t: {
                "y": F.interpolate(
                    F.max_pool2d(F.relu(F.conv2d(t["x"], t["w"], t["b"])), 3, 2, 1),
                    scale_factor=2,
                    mode="bilinear",
                )
                * 2.0
            },
            {"w": normal(0.2)},
            terms=64,
            note="torch steps between cuDNN's",
        )


def resample_gradients() -> Iterator[Case]:
    image, volume, line, last = (2, 16, 12, 9), (2, 4, 5, 6, 8), (2, 16, 30), "channels_last"
    window = {"kernel_size": 3, "stride": 2, "padding": 1}
    options: dict[str, dict[str, Any]] = {
        "max_pool": window,
        "avg_pool": {**window, "ceil_mode": True},
        "adaptive_avg_pool": {"output_size": 5},
        "adaptive_max_pool": {"output_size": 5},
        "interpolate": {"scale_factor": 1.5},
    }
    for op, attrs in options.items():
        for dtype in (F16, BF16, F32, F64):
            yield _resample_case(op, "image", image, dtype, last, backward=True, **attrs)
        yield _resample_case(op, "line", line, F32, backward=True, **attrs)
        yield _resample_case(op, "volume", volume, F32, backward=True, **attrs)
    for shape, mode in ((line, "linear"), (image, "bilinear"), (volume, "trilinear")):
        for corners in (False, True):
            yield _resample_case(
                "interpolate",
                f"{mode}_corners" if corners else mode,
                shape,
                F16,
                backward=True,
                size=7,
                mode=mode,
                align_corners=corners,
            )
