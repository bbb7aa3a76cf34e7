"""Graphs of which cuDNN's plans are, or were reported to be, wrong: one for each claim.

Each entry of ``known_bad.TABLE`` that this project measured has an example here, which
``tests/cpu/test_known_bad.py`` holds. ``tests/gpu/test_reported.py`` runs every plan of every
example, those that an entry bars among them, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

import cudnngraph as cg
from cudnngraph import reference

F16, BF16, F32, I8, I32 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32
F64 = torch.float64
LAST = "channels_last"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Example:
    """``build`` makes the graphs, which are launched in turn; each is one plan.

    ``fill`` replaces the values of inputs that are not random.
    """

    id: str
    build: Callable[[], tuple[cg.Graph, ...]]
    source: str
    fill: Callable[[Tensors], None] | None = None
    allow_tf32: bool = False
    terms: int = 1


def _one(build: Callable[[], cg.Graph]) -> Callable[[], tuple[cg.Graph, ...]]:
    return lambda: (build(),)


# -- what was seen here ----------------------------------------------------------------------------


def _conv_into_another_layout() -> cg.Graph:
    g = cg.Graph("conv")
    x = g.input("x", (4, 32, 14, 14), F16, layout=LAST)
    w = g.input("w", (64, 32, 3, 3), F16, layout=LAST)
    b = g.input("b", (64,), F16)
    g.output("y", g.conv_bias_act(x, w, b, padding=1, activation="silu"), layout="contiguous")
    return g


def _residual_changed_first() -> cg.Graph:
    g = cg.Graph("residual")
    x = g.input("x", (4, 64, 14, 14), F16, layout=LAST)
    w = g.input("w", (64, 64, 3, 3), F16, layout=LAST)
    z = g.input("z", (4, 64, 14, 14), F16, layout=LAST)
    g.output("y", g.conv_bias_act(x, w, residual=z, padding=1, alpha1=0.5, alpha2=-1.5))
    return g


def _attention_over_padding() -> cg.Graph:
    g = cg.Graph("attention")
    q, k, v = (g.input(name, (3, 4, 128, 64), F16) for name in "qkv")
    g.output("o", g.sdpa(q, k, v, seq_len_kv=g.input("lengths", (3,), I32)))
    return g


def _nan_behind_lengths(tensors: Tensors) -> None:
    lengths = torch.tensor([128, 65, 0], dtype=I32)
    tensors["lengths"].copy_(lengths)
    for name in "kv":
        for batch, length in enumerate(lengths.tolist()):
            tensors[name][batch, :, length:] = float("nan")


def _two_scaled() -> cg.Graph:
    g = cg.Graph("scaled")
    x = g.input("x", (4, 64, 14, 14), F16, layout=LAST)
    w = g.input("w", (64, 64, 3, 3), F16, layout=LAST)
    z = g.input("z", (4, 64, 14, 14), F16, layout=LAST)
    y = g.conv(x, w, padding=1) * 0.5 + z * 2.0
    g.output("y", g.relu(g.bias(y, g.input("b", (64,), F16))))
    return g


def _float32_product() -> cg.Graph:
    g = cg.Graph("product")
    x, w = g.input("x", (256, 128), F32), g.input("w", (128, 192), F32)
    g.output("y", g.relu(x @ w))
    return g


def _product_and_leaky_relu() -> cg.Graph:
    g = cg.Graph("leaky")
    x, w = g.input("x", (256, 128), F16), g.input("w", (128, 192), F16)
    g.output("y", g.leaky_relu(x @ w, 0.2))
    return g


def _scaled_weight_gradient() -> cg.Graph:
    g = cg.Graph("wgrad")
    dy, x = (g.input(name, (4, 32, 14, 14), F16, layout=LAST) for name in ("dy", "x"))
    dw = g.conv_wgrad(dy, x, kernel=3, padding=1)
    g.output("dw", dw * g.input("s", (1, 32, 1, 1), F16), layout=LAST)
    return g


def _int8_sums() -> cg.Graph:
    g = cg.Graph("sums")
    x = g.input("x", (4, 64, 14, 14), I8, layout=LAST)
    w = g.input("w", (64, 64, 3, 3), I8, layout=LAST)
    g.output("y", g.conv(x, w, padding=1), layout=LAST)
    return g


# -- what others reported --------------------------------------------------------------------------


def _product_with_gaps(which: str) -> cg.Graph:
    """A product with an epilogue whose rows of x, of w or of the result have others between."""
    g = cg.Graph(f"gaps_{which}")
    shapes = {"x": (2, 256, 128), "w": (2, 128, 192), "y": (2, 256, 192)}

    def stride(name: str) -> tuple[int, ...]:
        _, rows, columns = shapes[name]
        row = columns + (64 if name == which else 0)
        return (rows * row, row, 1)

    x, w = (g.input(name, shapes[name], F16, stride=stride(name)) for name in "xw")
    y = g.gelu(x @ w + g.input("b", (1, 1, 192), F16))
    g.output("y", y, stride=stride("y"))
    return g


def _depthwise(layout: str, act: bool) -> tuple[cg.Graph, ...]:
    """Depthwise convolutions of the same channels and of images of several sizes."""
    made = []
    for height, width in ((56, 56), (28, 28), (14, 20), (7, 7), (57, 31)):
        g = cg.Graph(f"depthwise_{height}x{width}")
        x = g.input("x", (4, 64, height, width), F16, layout=layout)
        y = g.conv(x, g.input("w", (64, 1, 3, 3), F16, layout=layout), padding=1, groups=64)
        g.output("y", g.relu(y) if act else y, layout=layout)
        made.append(g)
    return tuple(made)


def _attention_backward(s_q: int, s_kv: int, mask: bool) -> cg.Graph:
    g = cg.Graph("attention_backward")
    sizes = {"do": s_q, "q": s_q, "k": s_kv, "v": s_kv, "o": s_q}
    made = {name: g.input(name, (2, 4, size, 64), BF16) for name, size in sizes.items()}
    lse = g.input("lse", (2, 4, s_q), F32)
    bias = g.input("mask", (1, 1, s_q, s_kv), BF16) if mask else None
    for name, grad in zip(
        ("dq", "dk", "dv"), g.sdpa_backward(*made.values(), lse, bias), strict=True
    ):
        g.output(name, grad)
    return g


def _low_scores(tensors: Tensors) -> None:
    """Every score is near -120, so that exp(-lse) is beyond float32's largest number."""
    q, k, v = (tensors[name] for name in "qkv")
    q.mul_(0.1)
    k.mul_(0.1)
    q[..., 0], k[..., 0] = 1.0, -120.0 * q.shape[-1] ** 0.5
    mask = tensors.get("mask")
    if mask is not None:
        mask.zero_()
    g = cg.Graph("forward")
    values = [g.input(n, t.shape, F64) for n, t in (("q", q), ("k", k), ("v", v))]
    o, lse = g.sdpa(*values, return_lse=True)
    g.output("o", o)
    g.output("lse", lse)
    outputs = reference.run(g.spec(), [t.double() for t in (q, k, v)], torch.float64)
    tensors["o"].copy_(outputs[0])
    tensors["lse"].copy_(outputs[1])


def _volume(dtype: torch.dtype) -> cg.Graph:
    g = cg.Graph("volume")
    x = g.input("x", (1, 16, 12, 40, 36), dtype)
    g.output("y", g.conv(x, g.input("w", (16, 16, 1, 3, 3), dtype)))
    return g


_OURS = "seen on an H200 with cuDNN 9.19.0"

EXAMPLES: tuple[Example, ...] = (
    Example("conv_into_another_layout", _one(_conv_into_another_layout), _OURS),
    Example("residual_changed_first", _one(_residual_changed_first), _OURS),
    Example("attention_over_padding", _one(_attention_over_padding), _OURS, _nan_behind_lengths),
    Example("two_scaled", _one(_two_scaled), _OURS),
    Example("float32_product", _one(_float32_product), _OURS),
    Example("product_and_leaky_relu", _one(_product_and_leaky_relu), _OURS),
    Example("scaled_weight_gradient", _one(_scaled_weight_gradient), _OURS),
    Example("int8_sums", _one(_int8_sums), _OURS),
    *(
        Example(
            f"gaps_in_{which}",
            _one(lambda which=which: _product_with_gaps(which)),
            "cudnn-frontend#442",
        )  # type: ignore[misc]
        for which in "xwy"
    ),
    *(
        Example(
            f"depthwise_in_sequence_{layout}_{'relu' if act else 'alone'}",
            lambda layout=layout, act=act: _depthwise(layout, act),  # type: ignore[misc]
            "cudnn-frontend#442",
        )
        for layout in (LAST, "contiguous")
        for act in (False, True)
    ),
    Example(
        "attention_backward_mask_704",
        _one(lambda: _attention_backward(704, 704, mask=True)),
        "pytorch#196678: dq is NaN where S % 128 == 64 beside a mask",
        _low_scores,
    ),
    Example(
        "attention_backward_one_row",
        _one(lambda: _attention_backward(1, 128, mask=False)),
        "cudnn-frontend#1072: dk and dv are NaN where S_q is 1",
        _low_scores,
    ),
    Example("volume_bf16", _one(lambda: _volume(BF16)), "pytorch#163539"),
    Example("volume_tf32", _one(lambda: _volume(F32)), "pytorch#167024", allow_tf32=True),
)

BY_ID: Mapping[str, Example] = {example.id: example for example in EXAMPLES}
