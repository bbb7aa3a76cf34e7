"""Convolutions to sweep: forward with every chain, gradients of weights, and two outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..graph.builder import Graph
from ..graph.value import Value
from .declare import (
    BF16,
    CONTIGUOUS,
    F16,
    F32,
    FEW_CHAINS,
    FEW_EPILOGUES,
    IMAGES,
    LAST,
    QUICK_PLACES,
    QUICK_SIZES,
    WAYS,
    Declaring,
    Op,
    Sample,
    Shape,
    chains,
    short,
    sizes,
)

_KINDS: Mapping[str, Mapping[str, Any]] = {
    "conv 1x1": {"kernel": 1},
    "conv 3x3": {"kernel": 3, "padding": 1},
    "conv 3x3 stride 2": {"kernel": 3, "padding": 1, "stride": 2},
    "conv 3x3 dilation 2": {"kernel": 3, "padding": 2, "dilation": 2},
    "conv 2 groups": {"kernel": 3, "padding": 1, "groups": 2},
    "depthwise": {"kernel": 3, "padding": 1, "groups": 0},
    "conv 1d": {"kernel": 3, "padding": 1},
    "conv 3d": {"kernel": 3, "padding": 1},
    "conv_transpose": {"kernel": 2, "stride": 2},
    "conv_transpose 3x3": {"kernel": 3, "padding": 1},
}
_WITH_EVERY_CHAIN = ("conv 1x1", "conv 3x3", "conv_transpose")


def _convolved(d: Declaring, kind: str, size: tuple[int, int, Shape]) -> Value:
    channels, made, (images, height, width) = size
    options = dict(_KINDS[kind])
    kernel = options.pop("kernel")
    groups = options.get("groups", 1)
    if groups == 0:
        made = options["groups"] = groups = channels
    elif groups > 1:
        channels, made = channels + channels % groups, made + made % groups
    space: Shape = (height, width)
    if kind == "conv 1d":
        space = (height * width,)
    elif kind == "conv 3d":
        space = (3, height, width)
    x = d.given("x", (images, channels, *space))
    kernels = (kernel,) * len(space)
    if kind.startswith("conv_transpose"):
        weight = d.given("w", (channels, made // groups, *kernels))
        return d.graph.conv_transpose(x, weight, **options)
    return d.graph.conv(x, d.given("w", (made, channels // groups, *kernels)), **options)


def convolutions() -> Iterator[Sample]:
    for kind in _KINDS:
        rank = {"conv 1d": 3, "conv 3d": 5}.get(kind, 4)
        every = kind in _WITH_EVERY_CHAIN
        ways = WAYS[rank] if every else WAYS[rank][:2]
        for name, chain, way, quick in chains(rank, ways):
            if not every and name.partition(" [")[0] not in (*FEW_CHAINS, *FEW_EPILOGUES):
                continue
            for dtype in (F16, BF16, F32):
                for layout in (LAST, CONTIGUOUS):
                    for number, size in enumerate(IMAGES):

                        def build(
                            kind: str = kind,
                            chain: tuple[Op, str] = chain,
                            way: str = way,
                            dtype: torch.dtype = dtype,
                            layout: str = layout,
                            size: tuple[int, int, Shape] = size,
                        ) -> Graph:
                            d = Declaring(dtype, layout)
                            return d.ended(_convolved(d, kind, size), chain, way)

                        spread = quick and (every or name in ("x", "relu(x + c)"))
                        yield Sample(
                            f"{kind}, {name}, {short(dtype)}, {layout}",
                            f"{size[0]} to {size[1]} channels, {sizes(*size[2])}",
                            spread and (dtype, layout) in QUICK_PLACES and number < QUICK_SIZES,
                            build,
                        )
    yield from _weight_gradients()
    yield from _two_outputs()


def _weight_gradients() -> Iterator[Sample]:
    behind: Mapping[str, tuple[Op, str]] = {
        "dw": (lambda g, x: x, ""),
        "dw v": (lambda g, x, v: x * v, "v"),
        "dw + z": (lambda g, x, z: x + z, "z"),
    }
    for name, chain in behind.items():
        for stride in (1, 2):
            for dtype in (F16, BF16, F32):
                for layout in (LAST, CONTIGUOUS):
                    for number, size in enumerate(IMAGES):

                        def build(
                            chain: tuple[Op, str] = chain,
                            stride: int = stride,
                            dtype: torch.dtype = dtype,
                            layout: str = layout,
                            size: tuple[int, int, Shape] = size,
                        ) -> Graph:
                            d = Declaring(dtype, layout)
                            channels, made, (images, height, width) = size
                            out = ((height - 1) // stride + 1, (width - 1) // stride + 1)
                            dy = d.given("dy", (images, made, *out))
                            x = d.given("x", (images, channels, height, width))
                            dw = d.graph.conv_wgrad(dy, x, kernel=3, padding=1, stride=stride)
                            return d.ended(dw, chain, "1w11")

                        yield Sample(
                            f"conv_wgrad stride {stride}, {name}, {short(dtype)}, {layout}",
                            f"{size[0]} to {size[1]} channels, {sizes(*size[2])}",
                            stride == 1
                            and (dtype, layout) in QUICK_PLACES
                            and number < QUICK_SIZES,
                            build,
                        )


def _two_outputs() -> Iterator[Sample]:
    """Samples of two outputs: the result before its activation too, or in two layouts."""
    for dtype in (F16, BF16, F32):
        for layout, other in ((LAST, CONTIGUOUS), (CONTIGUOUS, LAST)):
            for number, size in enumerate(IMAGES):

                def both(
                    dtype: torch.dtype = dtype,
                    layout: str = layout,
                    size: tuple[int, int, Shape] = size,
                ) -> Graph:
                    d = Declaring(dtype, layout)
                    y = d.graph.bias(_convolved(d, "conv 3x3", size), d.given("b", (size[1],)))
                    d.graph.output("before", y, layout=layout)
                    d.graph.output("y", d.graph.silu(y), layout=layout)
                    return d.graph

                def across(
                    dtype: torch.dtype = dtype,
                    layout: str = layout,
                    other: str = other,
                    size: tuple[int, int, Shape] = size,
                ) -> Graph:
                    d = Declaring(dtype, layout)
                    y = d.graph.bias(_convolved(d, "conv 3x3", size), d.given("b", (size[1],)))
                    d.graph.output("y", d.graph.relu(y), layout=other)
                    return d.graph

                text = f"{size[0]} to {size[1]} channels, {sizes(*size[2])}"
                quick = dtype == F16 and number < QUICK_SIZES
                place = f"{short(dtype)}, {layout}"
                yield Sample(f"conv 3x3, two outputs, {place}", text, quick, both)
                yield Sample(f"conv 3x3, into {other}, {place}", text, quick, across)
