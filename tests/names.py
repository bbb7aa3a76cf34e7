"""Graphs whose users took the names that rewrites make, and how such graphs are made of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec, Node, TensorSpec, taken_names
from tests.samples import enumerate_cases

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Rewrite = Callable[[GraphSpec], GraphSpec]


def _sample(start: str) -> GraphSpec:
    return next(case for case in enumerate_cases() if case.id.startswith(start)).build().spec()


def _halves() -> GraphSpec:
    """Convolutions of the halves of an image's channels."""
    g = cg.Graph("halves")
    x = g.relu(g.input("x", (2, 32, 6, 6), F16, layout="channels_last"))
    for at in range(2):
        w = g.input(f"w{at}", (16, 16, 3, 3), F16, layout="channels_last")
        part = g.slice(x, 1, 16 * at, 16 * at + 16, name=f"part{at}")
        g.output(f"y{at}", g.conv(part, w, padding=1))
    return g.spec()


def _projected() -> GraphSpec:
    """A bias, an activation and a residual behind views of a product."""
    g = cg.Graph("projected")
    rows, batch, width = 6, 4, 16
    x, w = g.input("x", (rows * batch, width), F16), g.input("w", (width, width), F16)
    y = g.reshape(g.matmul(x, w), (rows, batch, width)) + g.input("b", (width,), F16)
    r = g.input("r", (batch, rows, width), F16, stride=(width, batch * width, 1))
    g.output("y", g.gelu_tanh(g.transpose(y, 0, 1)) + r)
    return g.spec()


def _resized() -> GraphSpec:
    """The gradient of a bilinear resizing by 16."""
    g = cg.Graph("resized")
    dy = g.input("dy", (2, 3, 96, 80), BF16)
    g.output("dx", g.interpolate_backward(dy, size=(96, 80), mode="bilinear", input_size=(6, 5)))
    return g.spec()


def _joined_heads() -> GraphSpec:
    """Values by heads, shown as rows and concatenated."""
    g = cg.Graph("heads")
    shown = []
    for number, count in enumerate((4, 2, 2)):
        x = g.input(f"x{number}", (6, 2, count, 8), F32)
        y = g.permute((x * 2.0).tanh(), (1, 0, 2, 3))
        shown.append(g.reshape(y, (2, 6, count * 8)))
    g.output("z", g.concat(shown, 2).relu())
    return g.spec()


def _split_heads() -> GraphSpec:
    """Attention whose heads lie beside the batch, as torch's own module has them, of rows that a
    norm makes."""
    g = cg.Graph("split_heads")
    s, b, e = 6, 4, 16
    x, w = g.input("x", (b, s, e), F16), g.input("w", (e, 3 * e), F16)
    normed = g.layer_norm(g.transpose(x, 0, 1), g.input("scale", (e,), F16), eps=1e-5)
    packed = g.reshape(g.matmul(g.reshape(normed, (s * b, e)), w), (s, b, 3 * e))
    heads = []
    for part in range(3):
        q = g.slice(packed, 2, part * e, (part + 1) * e)
        q = g.transpose(g.reshape(q, (s, b * 2, e // 2)), 0, 1)
        heads.append(g.reshape(q, (b * 2, 1, s, e // 2)))
    o = g.permute(g.reshape(g.sdpa(*heads), (b, 2, s, e // 2)), (2, 0, 1, 3))
    o = g.reshape(o, (s * b, e))
    last = g.matmul(o, g.input("p", (e, e), F16))
    g.output("y", g.transpose(g.reshape(last, (s, b, e)), 0, 1) + x)
    return g.spec()


def convolutions() -> GraphSpec:
    """Two convolutions of rows of pixels, for :func:`cudnngraph.rewrite.channels_last`."""
    g = cg.Graph("convolutions")
    x, w = g.input("x", (2, 16, 6, 6), F16), g.input("w", (16, 16, 3, 3), F16)
    g.output("y", g.conv(g.relu(g.conv(x, w, padding=1)), w, padding=1))
    return g.spec()


def _few_scores() -> GraphSpec:
    """Attention over the channels of an image, which is two products."""
    g = cg.Graph("few_scores")
    form = {"shape": (2, 3, 6, 20), "dtype": F16, "stride": (360, 120, 1, 6)}
    q, k, v = (g.input(name, **form) for name in "qkv")
    g.output("y", g.sdpa(q, k, v))
    return g.spec()


def _odd_mask() -> GraphSpec:
    """Attention of many scores with a mask of odd rows."""
    g = cg.Graph("odd_mask")
    q, k, v = (g.input(name, (2, 4, 33, 64), F16) for name in "qkv")
    g.output("y", g.sdpa(q, k, v, attn_mask=g.input("bias", (1, 1, 33, 33), F16)))
    return g.spec()


def _squeezed() -> GraphSpec:
    """A mean of an image that a product reads, and that is a result."""
    g = cg.Graph("squeezed")
    x = g.input("x", (2, 8, 4, 4), F16)
    mean = g.reduction(x, (2, 3), "mean", keepdim=True)
    g.output("y", g.matmul(g.reshape(mean, (2, 8)), g.input("w", (8, 6), F16)))
    return g.spec()


#: By a word for each: a graph, and the endings of names that rewrites make in it.
GRAPHS: dict[str, tuple[Callable[[], GraphSpec], tuple[str, ...]]] = {
    "slices of convolutions": (_halves, ("_dense",)),
    "views of products": (_projected, ("_early",)),
    "gradients of resizing": (_resized, ("_wide", "_dim3", "_dim2", "_narrow")),
    "concatenated heads": (_joined_heads, ("_early0", "_view0")),
    "heads as torch splits them": (_split_heads, ("_rows", "_heads", "_shown0", "_read0")),
    "attention as products": (_few_scores, ("_scale", "_scaled", "_keys", "_scores", "_weights")),
    "odd rows of masks": (_odd_mask, ("_mask_aligned",)),
    "16-bit means": (_squeezed, ("_16",)),
    "boolean masks": (
        lambda: _sample("sdpa-mask_bool-fp16"),
        ("_mask", "_mask_numbers", "_mask_keep", "_mask_drop"),
    ),
    "dropout masks": (
        lambda: _sample("sdpa-dropout-fp16"),
        ("_dropout_mask", "_dropout_mask_numbers", "_dropout_mask_keep", "_dropout_mask_drop"),
    ),
    "rows of 20": (lambda: _sample("sdpa-d_20-fp16"), ("_q_rows", "_rows", "_part")),
    "gradients of rows of 20": (
        lambda: _sample("gradients-attention_d_20-fp16"),
        ("_do_rows", "_rows", "_part"),
    ),
    "batches of heads": (lambda: _sample("matmul-heads_of_a_sequence-bf16"), ("_batches",)),
    "means of images": (
        lambda: _sample("resample-adaptive_avg_pool_one-fp16"),
        ("_wide", "_narrow"),
    ),
    "packed sequences": (lambda: _sample("sdpa_varlen-causal-fp16"), ("_offsets",)),
    "gradients of packed sequences": (
        lambda: _sample("gradients-packed_attention_packed-fp16"),
        ("_q_alike", "_k_alike", "_v_alike"),
    ),
}


def with_names_taken(spec: GraphSpec, rewrite: Rewrite) -> GraphSpec:
    """``spec`` with an input and a node of each name that ``rewrite`` makes in it.

    Each such input is a vector of two, and the node behind it gives its magnitudes as a result.
    """
    names = sorted(taken_names(rewrite(spec)) - taken_names(spec))
    tensors, nodes = dict(spec.tensors), list(spec.nodes)
    for name in names:
        result = f"magnitude_of_{name}"
        tensors |= {each: TensorSpec(each, (2,), (1,), F32) for each in (name, result)}
        nodes.append(Node("abs", name, (name,), (result,)))
    return replace(
        spec,
        tensors=tensors,
        nodes=tuple(nodes),
        inputs=(*spec.inputs, *names),
        outputs=(*spec.outputs, *(f"magnitude_of_{name}" for name in names)),
    )
