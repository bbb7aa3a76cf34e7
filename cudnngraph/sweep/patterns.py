"""The graphs that ``cudnngraph check`` sweeps: the patterns that cuDNN has plans for, in a handful
of sizes each.

A pattern is an anchor (a convolution, product, norm, attention, or none), what stands behind it,
a dtype and a layout. Its sizes are even and odd, down to one pixel or one row. Operands are
broadcast in every way that models have. The order is fixed; the quick graphs are among the full
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..graph.builder import Graph
from ..graph.value import Value

Op = Callable[..., Value]
Shape = tuple[int, ...]

F16, BF16, F32, I8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
LAST, CONTIGUOUS = "channels_last", "contiguous"

# What stands behind an anchor's result x: v and u are repeated, c is a vector of the last dim or of
# the channels, z is as large as x.
CHAINS: Mapping[str, tuple[Op, str]] = {
    "x": (lambda g, x: x, ""),
    "relu(x)": (lambda g, x: g.relu(x), ""),
    "x + v": (lambda g, x, v: x + v, "v"),
    "v - x": (lambda g, x, v: v - x, "v"),
    "x v": (lambda g, x, v: x * v, "v"),
    "relu(x + v)": (lambda g, x, v: g.relu(x + v), "v"),
    "relu(x v + c)": (lambda g, x, v, c: g.relu(x * v + c), "vc"),
    "silu(x + c + v)": (lambda g, x, v, c: g.silu(x + c + v), "vc"),
    "x (v + 1) + u": (lambda g, x, v, u: x * (v + 1.0) + u, "vu"),
    "x + silu(v)": (lambda g, x, v: x + g.silu(v), "v"),
    "x + v + u": (lambda g, x, v, u: x + v + u, "vu"),
    "relu(x + v) + z": (lambda g, x, v, z: g.relu(x + v) + z, "vz"),
    "gelu(x) v": (lambda g, x, v: g.gelu(x) * v, "v"),
    "where(v > 0, x, x / 2)": (lambda g, x, v: g.where(g.gt(v, 0.0), x, x * 0.5), "v"),
    "maximum(x, v)": (lambda g, x, v: g.maximum(x, v), "v"),
    "x / (|v| + 1)": (lambda g, x, v: x / (g.abs(v) + 1.0), "v"),
}
# The same with operands that are not repeated otherwise than a bias is.
EPILOGUES: Mapping[str, tuple[Op, str]] = {
    "x + c": (lambda g, x, c: x + c, "c"),
    "relu(x + c)": (lambda g, x, c: g.relu(x + c), "c"),
    "leaky_relu(x + c)": (lambda g, x, c: g.leaky_relu(x + c, 0.2), "c"),
    "clamp(x + c, 0, 6)": (lambda g, x, c: g.clamp(x + c, 0.0, 6.0), "c"),
    "elu(x + c)": (lambda g, x, c: g.elu(x + c), "c"),
    "gelu(x + c)": (lambda g, x, c: g.gelu(x + c), "c"),
    "gelu_tanh(x + c)": (lambda g, x, c: g.gelu_tanh(x + c), "c"),
    "silu(x + c)": (lambda g, x, c: g.silu(x + c), "c"),
    "sigmoid(x + c)": (lambda g, x, c: g.sigmoid(x + c), "c"),
    "tanh(x + c)": (lambda g, x, c: g.tanh(x + c), "c"),
    "softplus(x + c)": (lambda g, x, c: g.softplus(x + c), "c"),
    "hardswish(x + c)": (lambda g, x, c: g.hardswish(x + c), "c"),
    "x z": (lambda g, x, z: x * z, "z"),
    "x + z": (lambda g, x, z: x + z, "z"),
    "relu(x + c + z)": (lambda g, x, c, z: g.relu(x + c + z), "cz"),
    "relu(x / 2 + 2 z + c)": (lambda g, x, c, z: g.relu(x * 0.5 + z * 2.0 + c), "cz"),
    "relu(x c + c)": (lambda g, x, c: g.relu(x * c + c), "c"),
}
_QUICK_CHAINS = ("x", "relu(x + v)", "relu(x v + c)")
_QUICK_EPILOGUES = ("relu(x + c)", "leaky_relu(x + c)", "relu(x / 2 + 2 z + c)")

# One letter a dim of the result: "w" whole, "1" repeated.
_WAYS: Mapping[int, tuple[str, ...]] = {
    2: ("1w", "w1", "11", "ww"),
    3: ("11w", "w11", "1w1", "www"),
    4: ("1w11", "ww11", "w1ww", "1111", "wwww"),
    5: ("1w111", "ww111", "w1www", "wwwww"),
}

# In the order in which they are swept; a pattern's first QUICK_SIZES are the quick ones.
QUICK_SIZES = 3
_IMAGES: tuple[tuple[int, int, Shape], ...] = (  # channels in, channels out, images and pixels
    (64, 64, (2, 16, 16)),
    (33, 17, (3, 7, 5)),
    (8, 24, (2, 1, 1)),
    (320, 64, (1, 8, 8)),
    (16, 32, (1, 57, 31)),
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


@dataclass(frozen=True)
class Sample:
    """One graph to sweep.

    ``pattern`` names what it has in common with other sizes; ``quick``: it is one of the small
    spread.
    """

    pattern: str
    size: str
    quick: bool
    build: Callable[[], Graph] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.pattern}, {self.size}"


def samples(*, full: bool, only: str | None = None) -> Iterator[Sample]:
    """The graphs in the order in which they are swept.

    ``only`` leaves those whose pattern has it in its name.
    """
    for family in (_convolutions, _products, _norms, _attention, _pointwise, _quantized, _others):
        for each in family():
            if (full or each.quick) and (only is None or only.lower() in each.pattern.lower()):
                yield each


# -- what the families share -----------------------------------------------------------------------


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(*numbers: int) -> str:
    return "x".join(map(str, numbers))


@dataclass
class _Declaring:
    """A graph being declared: inputs of one dtype in one layout, a chain behind a result."""

    dtype: torch.dtype
    layout: str
    graph: Graph = field(default_factory=lambda: Graph("check"))

    def given(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Value:
        """An input; images lie as the layout says."""
        layout = self.layout if len(shape) in (3, 4, 5) else CONTIGUOUS
        return self.graph.input(name, shape, dtype or self.dtype, layout=layout)

    def ended(self, x: Value, chain: tuple[Op, str], way: str = "", *, flat: bool = False) -> Graph:
        """The graph whose result is the chain behind ``x``."""
        op, more = chain
        vector = (x.shape[-1],) if flat else (1, x.shape[1], *(1,) * (len(x.shape) - 2))
        repeated = tuple(
            n if kind == "w" else 1
            for n, kind in zip(x.shape, way or "w" * len(x.shape), strict=True)
        )
        shapes = {"v": repeated, "u": repeated, "c": vector, "z": x.shape}
        y = op(self.graph, x, *(self.given(name, shapes[name]) for name in more))
        layout = self.layout if len(y.shape) in (3, 4, 5) else CONTIGUOUS
        self.graph.output("y", y, layout=layout)
        return self.graph


def _chains(rank: int, ways: Sequence[str]) -> Iterator[tuple[str, tuple[Op, str], str, bool]]:
    """(name, chain, way to repeat, whether it is quick) of everything behind an anchor."""
    for name, chain in CHAINS.items():
        for way in ways if set(chain[1]) & set("vu") else ("",):
            quick = name in _QUICK_CHAINS and way in ("", *_WAYS[rank][:3])
            yield f"{name} [{','.join(way)}]" if way else name, chain, way, quick
    for name, chain in EPILOGUES.items():
        yield name, chain, "", name in _QUICK_EPILOGUES


# -- families --------------------------------------------------------------------------------------

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
_FEW_CHAINS = ("x", "relu(x)", "relu(x + v)", "relu(x v + c)", "x + silu(v)")
_FEW_EPILOGUES = ("relu(x + c)", "silu(x + c)", "relu(x + c + z)", "relu(x / 2 + 2 z + c)")
_QUICK_PLACES = ((F16, LAST), (F32, CONTIGUOUS))


def _convolved(d: _Declaring, kind: str, size: tuple[int, int, Shape]) -> Value:
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


def _convolutions() -> Iterator[Sample]:
    for kind in _KINDS:
        rank = {"conv 1d": 3, "conv 3d": 5}.get(kind, 4)
        every = kind in _WITH_EVERY_CHAIN
        ways = _WAYS[rank] if every else _WAYS[rank][:2]
        for name, chain, way, quick in _chains(rank, ways):
            if not every and name.partition(" [")[0] not in (*_FEW_CHAINS, *_FEW_EPILOGUES):
                continue
            for dtype in (F16, BF16, F32):
                for layout in (LAST, CONTIGUOUS):
                    for number, size in enumerate(_IMAGES):

                        def build(
                            kind: str = kind,
                            chain: tuple[Op, str] = chain,
                            way: str = way,
                            dtype: torch.dtype = dtype,
                            layout: str = layout,
                            size: tuple[int, int, Shape] = size,
                        ) -> Graph:
                            d = _Declaring(dtype, layout)
                            return d.ended(_convolved(d, kind, size), chain, way)

                        spread = quick and (every or name in ("x", "relu(x + c)"))
                        yield Sample(
                            f"{kind}, {name}, {_short(dtype)}, {layout}",
                            f"{size[0]} to {size[1]} channels, {_sizes(*size[2])}",
                            spread and (dtype, layout) in _QUICK_PLACES and number < QUICK_SIZES,
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
                    for number, size in enumerate(_IMAGES):

                        def build(
                            chain: tuple[Op, str] = chain,
                            stride: int = stride,
                            dtype: torch.dtype = dtype,
                            layout: str = layout,
                            size: tuple[int, int, Shape] = size,
                        ) -> Graph:
                            d = _Declaring(dtype, layout)
                            channels, made, (images, height, width) = size
                            out = ((height - 1) // stride + 1, (width - 1) // stride + 1)
                            dy = d.given("dy", (images, made, *out))
                            x = d.given("x", (images, channels, height, width))
                            dw = d.graph.conv_wgrad(dy, x, kernel=3, padding=1, stride=stride)
                            return d.ended(dw, chain, "1w11")

                        yield Sample(
                            f"conv_wgrad stride {stride}, {name}, {_short(dtype)}, {layout}",
                            f"{size[0]} to {size[1]} channels, {_sizes(*size[2])}",
                            stride == 1
                            and (dtype, layout) in _QUICK_PLACES
                            and number < QUICK_SIZES,
                            build,
                        )


def _two_outputs() -> Iterator[Sample]:
    """What training keeps: the result before its activation too; and another layout's result."""
    for dtype in (F16, BF16, F32):
        for layout, other in ((LAST, CONTIGUOUS), (CONTIGUOUS, LAST)):
            for number, size in enumerate(_IMAGES):

                def both(
                    dtype: torch.dtype = dtype,
                    layout: str = layout,
                    size: tuple[int, int, Shape] = size,
                ) -> Graph:
                    d = _Declaring(dtype, layout)
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
                    d = _Declaring(dtype, layout)
                    y = d.graph.bias(_convolved(d, "conv 3x3", size), d.given("b", (size[1],)))
                    d.graph.output("y", d.graph.relu(y), layout=other)
                    return d.graph

                text = f"{size[0]} to {size[1]} channels, {_sizes(*size[2])}"
                quick = dtype == F16 and number < QUICK_SIZES
                place = f"{_short(dtype)}, {layout}"
                yield Sample(f"conv 3x3, two outputs, {place}", text, quick, both)
                yield Sample(f"conv 3x3, into {other}, {place}", text, quick, across)


def _products() -> Iterator[Sample]:
    for kind, rank in (("matmul", 2), ("matmul transposed", 2), ("matmul batch", 3)):
        for name, chain, way, quick in _chains(rank, _WAYS[rank]):
            few = kind == "matmul transposed"
            if few and name.partition(" [")[0] not in (*_FEW_CHAINS, *_FEW_EPILOGUES):
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
                        d = _Declaring(dtype, CONTIGUOUS)
                        rows, terms, columns = size
                        more = (3,) if kind == "matmul batch" else ()
                        x = d.given("x", (*more, rows, terms))
                        if kind == "matmul transposed":
                            w = d.graph.input("w", (terms, columns), dtype, stride=(1, terms))
                        else:
                            w = d.given("w", (*more, terms, columns))
                        return d.ended(d.graph.matmul(x, w), chain, way, flat=True)

                    yield Sample(
                        f"{kind}, {name}, {_short(dtype)}",
                        _sizes(*size),
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
                        d = _Declaring(dtype, CONTIGUOUS)
                        x, w = d.given("x", size), d.given("w", size[-1:])
                        if op == "layer_norm":
                            y = d.graph.layer_norm(x, w, d.given("b", size[-1:]))
                        else:
                            y = d.graph.rms_norm(x, w)
                        return d.ended(y, chain, flat=True)

                    quick = dtype in (F16, F32) and name != "relu(x)" and number < QUICK_SIZES
                    yield Sample(f"{op}, {name}, {_short(dtype)}", _sizes(*size), quick, build)
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
                    for number, images in enumerate(_IMAGES):

                        def of_images(
                            op: str = op,
                            chain: tuple[Op, str] = chain,
                            dtype: torch.dtype = dtype,
                            layout: str = layout,
                            images: tuple[int, int, Shape] = images,
                        ) -> Graph:
                            return _image_norm(_Declaring(dtype, layout), op, chain, images)

                        yield Sample(
                            f"{op}, {name}, {_short(dtype)}, {layout}",
                            f"{images[0]} channels, {_sizes(*images[2])}",
                            name == "x"
                            and (dtype, layout) in _QUICK_PLACES
                            and number < QUICK_SIZES,
                            of_images,
                        )


def _norm_gradients(op: str) -> Iterator[Sample]:
    for dtype in (F16, BF16, F32):
        for number, size in enumerate(_ROWS):

            def build(dtype: torch.dtype = dtype, size: Shape = size) -> Graph:
                d = _Declaring(dtype, CONTIGUOUS)
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
            yield Sample(f"{op}_backward, {_short(dtype)}", _sizes(*size), quick, build)


def _image_norm(
    d: _Declaring, op: str, chain: tuple[Op, str], size: tuple[int, int, Shape]
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
                    d = _Declaring(dtype, CONTIGUOUS)
                    q, k, v, _, more = _heads(d, options, size)
                    made = d.graph.sdpa(q, k, v, **more)
                    for name, each in zip(
                        ("o", "lse"), made if isinstance(made, tuple) else (made,), strict=False
                    ):
                        d.graph.output(name, each)
                    return d.graph

                quick = dtype == F16 and kind in _QUICK_ATTENTION and number < QUICK_SIZES
                yield Sample(f"{kind}, {_short(dtype)}", _sizes(*size), quick, forward)

                def backward(
                    options: Mapping[str, Any] = options,
                    dtype: torch.dtype = dtype,
                    size: Shape = size,
                ) -> Graph:
                    d = _Declaring(dtype, CONTIGUOUS)
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
                    yield Sample(f"{name}, {_short(dtype)}", _sizes(*size), quick, backward)
    for dtype in (F16, BF16):
        for number, size in enumerate(_HEADS):

            def packed(dtype: torch.dtype = dtype, size: Shape = size) -> Graph:
                d = _Declaring(dtype, CONTIGUOUS)
                batch, heads, rows, keys, depth = size
                q = d.given("q", (batch * rows, heads, depth))
                k, v = (d.given(name, (batch * keys, heads, depth)) for name in "kv")
                ends_q = d.graph.input("ends_q", (batch + 1,), torch.int32)
                ends_kv = d.graph.input("ends_kv", (batch + 1,), torch.int32)
                o = d.graph.sdpa_varlen(q, k, v, ends_q, ends_kv, rows, keys, finite_padding=True)
                d.graph.output("o", o)
                return d.graph

            yield Sample(
                f"sdpa_varlen, {_short(dtype)}",
                _sizes(*size),
                dtype == F16 and number < QUICK_SIZES,
                packed,
            )


def _heads(
    d: _Declaring, options: Mapping[str, Any], size: Shape
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
    for name, chain, way, quick in _chains(4, _WAYS[4]):
        if name == "x":
            continue
        for dtype in (F16, BF16, F32):
            for layout in (LAST, CONTIGUOUS):
                for number, size in enumerate(_IMAGES):

                    def build(
                        chain: tuple[Op, str] = chain,
                        way: str = way,
                        dtype: torch.dtype = dtype,
                        layout: str = layout,
                        size: tuple[int, int, Shape] = size,
                    ) -> Graph:
                        d = _Declaring(dtype, layout)
                        channels, _, (images, height, width) = size
                        x = d.given("x", (images, channels, height, width))
                        return d.ended(x, chain, way)

                    yield Sample(
                        f"pointwise, {name}, {_short(dtype)}, {layout}",
                        f"{size[0]} channels, {_sizes(*size[2])}",
                        quick and (dtype, layout) in _QUICK_PLACES and number < QUICK_SIZES,
                        build,
                    )


def _quantized() -> Iterator[Sample]:
    for dtype, result in ((I8, I8), (E4, E4), (E5, E4), (I8, None)):
        for number, (channels, made, space) in enumerate(_IMAGES):

            def conv(
                dtype: torch.dtype = dtype,
                result: torch.dtype | None = result,
                channels: int = channels,
                made: int = made,
                space: Shape = space,
            ) -> Graph:
                d = _Declaring(dtype, LAST)
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
                f"conv 3x3 quantized, {kind}, {_short(dtype)}",
                f"{channels} to {made} channels, {_sizes(*space)}",
                number < QUICK_SIZES,
                conv,
            )
    for dtype in (I8, E4, E5):
        for number, size in enumerate(_PRODUCTS):

            def product(dtype: torch.dtype = dtype, size: Shape = size) -> Graph:
                d = _Declaring(dtype, CONTIGUOUS)
                rows, terms, columns = size
                second = E4 if dtype == E5 else dtype
                w = d.graph.input("w", (terms, columns), second, stride=(1, terms))
                y = d.graph.matmul(d.given("x", (rows, terms)), w)
                if dtype == I8:
                    y = d.graph.dequantize(y, d.given("scale", (columns,), F32), dim=-1)
                d.graph.output("y", y)
                return d.graph

            yield Sample(
                f"matmul quantized, {_short(dtype)}", _sizes(*size), number < QUICK_SIZES, product
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
                for number, size in enumerate(_IMAGES):

                    def build(
                        op: Op = op,
                        dtype: torch.dtype = dtype,
                        layout: str = layout,
                        size: tuple[int, int, Shape] = size,
                    ) -> Graph:
                        d = _Declaring(dtype, layout)
                        channels, _, (images, height, width) = size
                        return d.ended(
                            op(d.graph, d.given("x", (images, channels, height, width))),
                            CHAINS["x"],
                        )

                    yield Sample(
                        f"{name}, {_short(dtype)}, {layout}",
                        f"{size[0]} channels, {_sizes(*size[2])}",
                        (dtype, layout) in _QUICK_PLACES and number < QUICK_SIZES,
                        build,
                    )
