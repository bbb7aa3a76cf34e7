"""The graphs that ``cudnngraph check`` sweeps: the patterns that cuDNN has plans for, in a handful
of sizes each.

A pattern is an anchor (a convolution, product, norm, attention, or none), what stands behind it,
a dtype and a layout. Its sizes are even and odd, down to one pixel or one row. Operands are
broadcast in every way that models have. The order is fixed; the quick graphs are among the full
ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..graph.builder import Graph
from ..graph.value import Value
from .convolutions import convolutions
from .declare import (
    BF16,
    CHAINS,
    CONTIGUOUS,
    E4,
    E5,
    EPILOGUES,
    F16,
    F32,
    FEW_CHAINS,
    FEW_EPILOGUES,
    I8,
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

_PRODUCTS: tuple[Shape, ...] = (
    (64, 64, 64),
    (33, 17, 5),
    (1, 64, 48),
    (128, 320, 64),
    (256, 40, 1),
)
_ROWS: tuple[Shape, ...] = ((64, 768), (33, 77), (1, 512), (96, 32), (5, 4096))
_HEADS: tuple[Shape, ...] = (  # batch, heads, rows, keys, depth
    (2, 4, 128, 128, 64),
    (1, 3, 77, 77, 40),
    (2, 2, 1, 64, 128),
    (2, 2, 33, 100, 64),
    (1, 8, 256, 192, 128),
)


def samples(*, full: bool, only: str | None = None) -> Iterator[Sample]:
    """The graphs in the order in which they are swept.

    ``only`` leaves those whose pattern has it in its name.
    """
    for family in (convolutions, _products, _norms, _attention, _pointwise, _quantized, _others):
        for each in family():
            if (full or each.quick) and (only is None or only.lower() in each.pattern.lower()):
                yield each


def _products() -> Iterator[Sample]:
    for kind, rank in (("matmul", 2), ("matmul transposed", 2), ("matmul batch", 3)):
        for name, chain, way, quick in chains(rank, WAYS[rank]):
            few = kind == "matmul transposed"
            if few and name.partition(" [")[0] not in (*FEW_CHAINS, *FEW_EPILOGUES):
                continue
            for dtype in (F16, BF16, F32):
                for number, size in enumerate(_PRODUCTS):

                    def build(
                        kind: str = kind,
                        chain: tuple[Op, str] = chain,
                        way: str = way,
                        dtype: torch.dtype = dtype,
                        size: Shape = size,
                    ) -> Graph:
                        d = Declaring(dtype, CONTIGUOUS)
                        rows, terms, columns = size
                        more = (3,) if kind == "matmul batch" else ()
                        x = d.given("x", (*more, rows, terms))
                        if kind == "matmul transposed":
                            w = d.graph.input("w", (terms, columns), dtype, stride=(1, terms))
                        else:
                            w = d.given("w", (*more, terms, columns))
                        return d.ended(d.graph.matmul(x, w), chain, way, flat=True)

                    yield Sample(
                        f"{kind}, {name}, {short(dtype)}",
                        sizes(*size),
                        quick and dtype in (F16, F32) and not few and number < QUICK_SIZES,
                        build,
                    )


def _norms() -> Iterator[Sample]:
    behind = {name: CHAINS[name] for name in ("x", "relu(x)")} | {"x + z": EPILOGUES["x + z"]}
    for op in ("layer_norm", "rms_norm"):
        for name, chain in behind.items():
            for dtype in (F16, BF16, F32):
                for number, size in enumerate(_ROWS):

                    def build(
                        op: str = op,
                        chain: tuple[Op, str] = chain,
                        dtype: torch.dtype = dtype,
                        size: Shape = size,
                    ) -> Graph:
                        d = Declaring(dtype, CONTIGUOUS)
                        x, w = d.given("x", size), d.given("w", size[-1:])
                        if op == "layer_norm":
                            y = d.graph.layer_norm(x, w, d.given("b", size[-1:]))
                        else:
                            y = d.graph.rms_norm(x, w)
                        return d.ended(y, chain, flat=True)

                    quick = dtype in (F16, F32) and name != "relu(x)" and number < QUICK_SIZES
                    yield Sample(f"{op}, {name}, {short(dtype)}", sizes(*size), quick, build)
        yield from _norm_gradients(op)
    for op in (
        "batch_norm_train",
        "batch_norm_backward",
        "batch_norm",
        "instance_norm",
        "group_norm",
    ):
        for name, chain in behind.items() if op != "batch_norm_backward" else [("x", CHAINS["x"])]:
            for dtype in (F16, BF16, F32):
                for layout in (LAST, CONTIGUOUS):
                    for number, images in enumerate(IMAGES):

                        def of_images(
                            op: str = op,
                            chain: tuple[Op, str] = chain,
                            dtype: torch.dtype = dtype,
                            layout: str = layout,
                            images: tuple[int, int, Shape] = images,
                        ) -> Graph:
                            return _image_norm(Declaring(dtype, layout), op, chain, images)

                        yield Sample(
                            f"{op}, {name}, {short(dtype)}, {layout}",
                            f"{images[0]} channels, {sizes(*images[2])}",
                            name == "x"
                            and (dtype, layout) in QUICK_PLACES
                            and number < QUICK_SIZES,
                            of_images,
                        )


def _norm_gradients(op: str) -> Iterator[Sample]:
    for dtype in (F16, BF16, F32):
        for number, size in enumerate(_ROWS):

            def build(dtype: torch.dtype = dtype, size: Shape = size) -> Graph:
                d = Declaring(dtype, CONTIGUOUS)
                dy, x, w = d.given("dy", size), d.given("x", size), d.given("w", size[-1:])
                stats = (size[0], 1)
                inv_std = d.given("inv_std", stats, F32)
                if op == "layer_norm":
                    mean = d.given("mean", stats, F32)
                    made = d.graph.layer_norm_backward(dy, x, w, mean, inv_std)
                else:
                    made = d.graph.rms_norm_backward(dy, x, w, inv_std, bias_grad=False)
                for name, each in zip(("dx", "dw", "db"), made, strict=False):
                    d.graph.output(name, each)
                return d.graph

            quick = dtype == F16 and number < QUICK_SIZES
            yield Sample(f"{op}_backward, {short(dtype)}", sizes(*size), quick, build)


def _image_norm(
    d: Declaring, op: str, chain: tuple[Op, str], size: tuple[int, int, Shape]
) -> Graph:
    channels, _, (images, height, width) = size
    g = d.graph
    x = d.given("x", (images, channels, height, width))
    if op == "batch_norm_backward":
        vectors = [d.given(name, (channels,), F32) for name in ("w", "mean", "inv_std")]
        made = g.batch_norm_backward(d.given("dy", x.shape), x, *vectors)
        for name, each in zip(("dx", "dw", "db"), made, strict=True):
            g.output(name, each, layout=d.layout if len(each.shape) == 4 else CONTIGUOUS)
        return g
    w, b = (d.given(name, (channels,), F32) for name in ("w", "b"))
    if op == "batch_norm_train":
        y = g.batch_norm_train(x, w, b)[0]
    elif op == "batch_norm":
        mean, var = (d.given(name, (channels,), F32) for name in ("mean", "var"))
        y = g.batch_norm(x, mean, var, w, b)
    elif op == "instance_norm":
        y = g.instance_norm(x, w, b)
    else:
        y = g.group_norm(x, 3 if channels % 3 == 0 else 4, w, b)
    return d.ended(y, chain)


_ATTENTION: Mapping[str, Mapping[str, Any]] = {
    "sdpa": {},
    "sdpa, causal": {"is_causal": True},
    "sdpa, causal from the bottom right": {
        "is_causal": True,
        "diagonal_alignment": "bottom_right",
    },
    "sdpa, window": {"is_causal": True, "window": (32, 0)},
    "sdpa, softcap": {"softcap": 20.0},
    "sdpa, alibi": {"alibi": True, "is_causal": True},
    "sdpa, mask": {"mask": "whole"},
    "sdpa, mask of every head and image": {"mask": "repeated"},
    "sdpa, lengths": {"lengths": True, "finite_padding": True},
    "sdpa, lse": {"return_lse": True},
}
_QUICK_ATTENTION = ("sdpa", "sdpa, causal", "sdpa, mask", "sdpa, lengths")


def _attention() -> Iterator[Sample]:
    for kind, options in _ATTENTION.items():
        for dtype in (F16, BF16):
            for number, size in enumerate(_HEADS):

                def forward(
                    options: Mapping[str, Any] = options,
                    dtype: torch.dtype = dtype,
                    size: Shape = size,
                ) -> Graph:
                    d = Declaring(dtype, CONTIGUOUS)
                    q, k, v, _, more = _heads(d, options, size)
                    made = d.graph.sdpa(q, k, v, **more)
                    for name, each in zip(
                        ("o", "lse"), made if isinstance(made, tuple) else (made,), strict=False
                    ):
                        d.graph.output(name, each)
                    return d.graph

                quick = dtype == F16 and kind in _QUICK_ATTENTION and number < QUICK_SIZES
                yield Sample(f"{kind}, {short(dtype)}", sizes(*size), quick, forward)

                def backward(
                    options: Mapping[str, Any] = options,
                    dtype: torch.dtype = dtype,
                    size: Shape = size,
                ) -> Graph:
                    d = Declaring(dtype, CONTIGUOUS)
                    q, k, v, o_shape, more = _heads(d, options, size)
                    do, o = d.given("do", o_shape), d.given("o", o_shape)
                    lse = d.given("lse", o_shape[:3], F32)
                    more.pop("return_lse", None)
                    made = d.graph.sdpa_backward(do, q, k, v, o, lse, **more)
                    for name, each in zip(("dq", "dk", "dv"), made, strict=True):
                        d.graph.output(name, each)
                    return d.graph

                if kind != "sdpa, lse":
                    quick = dtype == F16 and kind == "sdpa, causal" and number < QUICK_SIZES
                    name = kind.replace("sdpa", "sdpa_backward", 1)
                    yield Sample(f"{name}, {short(dtype)}", sizes(*size), quick, backward)
    for dtype in (F16, BF16):
        for number, size in enumerate(_HEADS):

            def packed(dtype: torch.dtype = dtype, size: Shape = size) -> Graph:
                d = Declaring(dtype, CONTIGUOUS)
                batch, heads, rows, keys, depth = size
                q = d.given("q", (batch * rows, heads, depth))
                k, v = (d.given(name, (batch * keys, heads, depth)) for name in "kv")
                ends_q = d.graph.input("ends_q", (batch + 1,), torch.int32)
                ends_kv = d.graph.input("ends_kv", (batch + 1,), torch.int32)
                o = d.graph.sdpa_varlen(q, k, v, ends_q, ends_kv, rows, keys, finite_padding=True)
                d.graph.output("o", o)
                return d.graph

            yield Sample(
                f"sdpa_varlen, {short(dtype)}",
                sizes(*size),
                dtype == F16 and number < QUICK_SIZES,
                packed,
            )


def _heads(
    d: Declaring, options: Mapping[str, Any], size: Shape
) -> tuple[Value, Value, Value, Shape, dict[str, Any]]:
    """q, k, v, the shape of o, and the options of attention."""
    batch, heads, rows, keys, depth = size
    shape = (batch, heads, rows, depth)
    q = d.given("q", shape)
    k, v = (d.given(name, (batch, heads, keys, depth)) for name in "kv")
    more = dict(options)
    mask = more.pop("mask", None)
    if mask is not None:
        whole = (batch, heads) if mask == "whole" else (1, 1)
        more["attn_mask"] = d.given("mask", (*whole, rows, keys))
    if more.pop("lengths", False):
        for name in ("seq_len_q", "seq_len_kv"):
            more[name] = d.graph.input(name, (batch,), torch.int32)
    return q, k, v, shape, more


def _pointwise() -> Iterator[Sample]:
    for name, chain, way, quick in chains(4, WAYS[4]):
        if name == "x":
            continue
        for dtype in (F16, BF16, F32):
            for layout in (LAST, CONTIGUOUS):
                for number, size in enumerate(IMAGES):

                    def build(
                        chain: tuple[Op, str] = chain,
                        way: str = way,
                        dtype: torch.dtype = dtype,
                        layout: str = layout,
                        size: tuple[int, int, Shape] = size,
                    ) -> Graph:
                        d = Declaring(dtype, layout)
                        channels, _, (images, height, width) = size
                        x = d.given("x", (images, channels, height, width))
                        return d.ended(x, chain, way)

                    yield Sample(
                        f"pointwise, {name}, {short(dtype)}, {layout}",
                        f"{size[0]} channels, {sizes(*size[2])}",
                        quick and (dtype, layout) in QUICK_PLACES and number < QUICK_SIZES,
                        build,
                    )


def _quantized() -> Iterator[Sample]:
    for dtype, result in ((I8, I8), (E4, E4), (E5, E4), (I8, None)):
        for number, (channels, made, space) in enumerate(IMAGES):

            def conv(
                dtype: torch.dtype = dtype,
                result: torch.dtype | None = result,
                channels: int = channels,
                made: int = made,
                space: Shape = space,
            ) -> Graph:
                d = Declaring(dtype, LAST)
                images, height, width = space
                x = d.given("x", (images, channels, height, width))
                w = d.given("w", (made, channels, 3, 3), E4 if dtype == E5 else None)
                if result is None:
                    d.graph.output("y", d.graph.conv(x, w, padding=1), layout=LAST)
                    return d.graph
                scale, bias = (d.given(name, (made,), F32) for name in ("scale", "bias"))
                out_scale = d.given("out_scale", (1,), F32)
                y = d.graph.quantized_conv_bias_act(
                    x, w, scale, bias, out_scale=out_scale, dtype=result, padding=1
                )
                d.graph.output("y", y, layout=LAST)
                return d.graph

            kind = "sums" if result is None else "relu(x scale + c) / scale"
            yield Sample(
                f"conv 3x3 quantized, {kind}, {short(dtype)}",
                f"{channels} to {made} channels, {sizes(*space)}",
                number < QUICK_SIZES,
                conv,
            )
    for dtype in (I8, E4, E5):
        for number, size in enumerate(_PRODUCTS):

            def product(dtype: torch.dtype = dtype, size: Shape = size) -> Graph:
                d = Declaring(dtype, CONTIGUOUS)
                rows, terms, columns = size
                second = E4 if dtype == E5 else dtype
                w = d.graph.input("w", (terms, columns), second, stride=(1, terms))
                y = d.graph.matmul(d.given("x", (rows, terms)), w)
                if dtype == I8:
                    y = d.graph.dequantize(y, d.given("scale", (columns,), F32), dim=-1)
                d.graph.output("y", y)
                return d.graph

            yield Sample(
                f"matmul quantized, {short(dtype)}", sizes(*size), number < QUICK_SIZES, product
            )


def _others() -> Iterator[Sample]:
    """Reductions, softmax, pooling and resizing; many of these are torch's alone."""
    made: Mapping[str, Op] = {
        "sum over pixels": lambda g, x: g.reduction(x, (2, 3), "sum", keepdim=True),
        "mean over channels": lambda g, x: g.reduction(x, (1,), "mean", keepdim=True),
        "max over pixels": lambda g, x: g.reduction(x, (2, 3), "max", keepdim=True),
        "amax": lambda g, x: g.reduction(x, None, "amax", keepdim=True),
        "softmax over channels": lambda g, x: g.softmax(x, 1),
        "max_pool": lambda g, x: g.max_pool(x, 3, 2, 1),
        "avg_pool": lambda g, x: g.avg_pool(x, 3, 2, 1),
        "adaptive_avg_pool": lambda g, x: g.adaptive_avg_pool(x, 1),
        "interpolate nearest": lambda g, x: g.interpolate(x, scale_factor=2, mode="nearest"),
        "interpolate bilinear": lambda g, x: g.interpolate(x, scale_factor=2, mode="bilinear"),
    }
    for name, op in made.items():
        for dtype in (F16, BF16, F32):
            for layout in (LAST, CONTIGUOUS):
                for number, size in enumerate(IMAGES):

                    def build(
                        op: Op = op,
                        dtype: torch.dtype = dtype,
                        layout: str = layout,
                        size: tuple[int, int, Shape] = size,
                    ) -> Graph:
                        d = Declaring(dtype, layout)
                        channels, _, (images, height, width) = size
                        return d.ended(
                            op(d.graph, d.given("x", (images, channels, height, width))),
                            CHAINS["x"],
                        )

                    yield Sample(
                        f"{name}, {short(dtype)}, {layout}",
                        f"{size[0]} channels, {sizes(*size[2])}",
                        (dtype, layout) in QUICK_PLACES and number < QUICK_SIZES,
                        build,
                    )
