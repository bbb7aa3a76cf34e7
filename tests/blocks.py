"""Blocks of real models as graphs of their real sizes, to be planned and never run; and what tests
of several tiers run."""

from __future__ import annotations

from typing import Any

import torch

import cudnngraph as cg
from cudnngraph.ir.spec import GraphSpec

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def gpt_block(batch: int = 8, length: int = 1024, width: int = 768) -> cg.Graph:
    """Of a GPT in training, as autocast has it: what is added up is float32, weights are cast, and
    what the backward reads is kept. Without attention."""
    g = cg.Graph("gpt_block")
    rows, inner = batch * length, 4 * width
    total = g.input("total", (batch, length, width), F32)

    def layer(x: cg.Value, name: str, given: int, made: int) -> cg.Value:
        w = g.cast(g.input(f"{name}_w", (made, given), F32), BF16)
        b = g.cast(g.input(f"{name}_b", (made,), F32), BF16)
        y = g.add(g.matmul(g.reshape(x, (rows, given)), g.transpose(w, 0, 1)), b)
        return g.reshape(y, (batch, length, made))

    def norm(x: cg.Value, name: str) -> cg.Value:
        w, b = (g.input(f"{name}_{part}", (width,), F32) for part in "wb")
        y, mean, inv_std = g.layer_norm(x, w, b, return_stats=True)
        g.output(f"{name}_mean", mean)
        g.output(f"{name}_inv_std", inv_std)
        y = g.cast(y, BF16)
        g.output(f"{name}_y", y, dtype=BF16)
        return y

    attended = g.input("attended", (batch, length, width), BF16)
    total = g.add(total, layer(attended, "out", width, width))
    g.output("middle", total)
    up = layer(norm(total, "norm2"), "up", width, inner)
    g.output("up", up, dtype=BF16)
    active = g.gelu_tanh(up)
    g.output("active", active, dtype=BF16)
    total = g.add(total, layer(active, "down", inner, width))
    g.output("end", total)
    qkv = layer(norm(total, "next_norm1"), "qkv", width, 3 * width)
    g.output("qkv", qkv, dtype=BF16)
    return g


def unet_block(
    batch: int = 2, length: int = 4096, width: int = 320, dtype: torch.dtype = F16
) -> cg.Graph:
    """A transformer block of Stable Diffusion's UNet, with a product in the place of
    its second attention."""
    g = cg.Graph("unet_block")
    shape = (batch, length, width)

    def layer(x: cg.Value, name: str, given: int, made: int) -> cg.Value:
        w = g.transpose(g.input(f"{name}_w", (made, given), dtype), 0, 1)
        return g.add(g.matmul(x, w), g.input(f"{name}_b", (made,), dtype))

    def norm(x: cg.Value, name: str) -> cg.Value:
        return g.layer_norm(x, *(g.input(f"{name}_{part}", (width,), dtype) for part in "wb"))

    total, attended = (g.input(name, shape, dtype) for name in ("total", "attended"))
    total = g.add(layer(attended, "out1", width, width), total)
    x = norm(total, "norm2")
    attended = g.matmul(x, g.input("attention_w", (width, width), dtype))
    total = g.add(layer(attended, "out2", width, width), total)
    x = norm(total, "norm3")
    both = layer(x, "up", width, 8 * width)
    gate = g.gelu(g.slice(both, 2, 4 * width, 8 * width))
    y = layer(g.mul(g.slice(both, 2, 0, 4 * width), gate), "down", 4 * width, width)
    g.output("y", g.add(y, total))
    return g


def convnext_block(batch: int = 64, size: int = 56, width: int = 96) -> cg.Graph:
    """Of a ConvNeXt in bfloat16, behind its depthwise convolution; rows are pixels."""
    g = cg.Graph("convnext_block")
    shape = (batch, size, size, width)
    x, skip = (g.input(name, shape, BF16) for name in ("x", "skip"))
    y = g.layer_norm(x, *(g.input(f"norm_{part}", (width,), BF16) for part in "wb"))
    for name, given, made in (("up", width, 4 * width), ("down", 4 * width, width)):
        w = g.transpose(g.input(f"{name}_w", (made, given), BF16), 0, 1)
        y = g.add(g.matmul(y, w), g.input(f"{name}_b", (made,), BF16))
        y = g.gelu(y) if name == "up" else g.mul(y, g.input("factor", (width,), BF16))
    g.output("y", g.add(y, skip))
    return g


def depthwise(
    shape: tuple[int, int, int, int] = (2, 16, 19, 21),
    kernel: tuple[int, int] = (7, 7),
    dtype: torch.dtype = torch.bfloat16,
    *,
    transposed: bool = False,
    behind: bool = True,
    **options: Any,
) -> GraphSpec:
    """A depthwise convolution, or the gradient of one, with what stands behind it."""
    g = cg.Graph("depthwise")
    last: Any = {"layout": "channels_last"}
    x = g.input("x", shape, dtype, **last)
    w = g.input("w", (shape[1], 1, *kernel), dtype, **last)
    options = {"padding": (kernel[0] // 2, kernel[1] // 2), "groups": shape[1], **options}
    y = g.conv_transpose(x, w, **options) if transposed else g.conv(x, w, **options)
    if behind:
        y = g.silu(g.bias(y, g.input("b", (shape[1],), dtype)))
        assert y.spec is not None
        y = g.add(y, g.input("r", y.spec.shape, dtype, **last))
    g.output("y", y, dtype=dtype, **last)
    return g.spec()
