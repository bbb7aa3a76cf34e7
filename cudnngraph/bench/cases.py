"""The cases of the benchmarks: a graph each, and the torch code that a user would write instead.

Shapes are those of published networks and of the tables that this project was started from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from ..graph.builder import Graph
from ..graph.value import Value
from ..ops.base import FP8

Tensors = Mapping[str, torch.Tensor]
Eager = Callable[[Tensors], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A graph, what eager torch does for it, and other ways to do it, by name.

    ``numbers`` are the inputs that hold one number, and which, ``given`` those that hold others
    which are not random.
    """

    name: str
    suite: str
    graph: Graph
    eager: Eager
    others: Mapping[str, Eager] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
        """Random inputs of about unit results, and outputs to write to."""
        spec = self.graph.spec()
        generator = torch.Generator(device).manual_seed(seed)
        made = {}
        for name in (*spec.inputs, *spec.outputs):
            declared = spec.tensors[name]
            tensor = made[name] = declared.empty(device)
            if name in self.numbers:
                tensor.fill_(self.numbers[name])
            elif name in self.given:
                tensor.copy_(self.given[name])
            elif declared.dtype == torch.int8 and name in spec.inputs:
                tensor.random_(-127, 128, generator=generator)
            elif name in spec.inputs:
                fan_in = tensor[0].numel() if name.startswith("w") and tensor.dim() > 1 else 1
                wide = tensor.to(torch.float32) if declared.dtype in FP8 else tensor
                wide.normal_(0.0, fan_in**-0.5, generator=generator)
                if wide is not tensor:
                    tensor.copy_(wide)
        return made


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
}


@cache
def _statistics(device: torch.device, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(channels, device=device), torch.ones(channels, device=device)


def conv(
    n: int,
    c: int,
    size: int,
    k: int,
    r: int,
    stride: int,
    padding: int,
    *,
    dilation: int = 1,
    groups: int = 1,
    dtype: torch.dtype = torch.float16,
    activation: str = "relu",
    residual: bool = False,
    scale: bool = False,
    layout: str = "channels_last",
) -> Case:
    """Convolution, scale where asked, bias, residual where asked, activation."""
    g = Graph("conv")
    x = g.input("x", (n, c, size, size), dtype, layout=layout)
    w = g.input("w", (k, c // groups, r, r), dtype, layout=layout)
    y = g.conv(x, w, stride=stride, padding=padding, dilation=dilation, groups=groups)
    if scale:
        y = g.scale(y, g.input("s", (k,), dtype))
    y = g.bias(y, g.input("b", (k,), dtype))
    if residual:
        out = (size + 2 * padding - dilation * (r - 1) - 1) // stride + 1
        y = y + g.input("z", (n, k, out, out), dtype, layout=layout)
    g.output("y", getattr(g, activation)(y), layout=layout)
    act = _ACTIVATIONS[activation]

    def eager(t: Tensors) -> torch.Tensor:
        bias = None if scale else t["b"]
        y = F.conv2d(t["x"], t["w"], bias, stride, padding, dilation, groups)
        if scale:  # as a batch norm in one kernel: mean 0, variance 1
            y = F.batch_norm(y, *_statistics(t["x"].device, k), t["s"], t["b"], eps=1e-30)
        return act(y + t["z"] if residual else y)

    def fused(t: Tensors) -> torch.Tensor:
        sizes = [(value, value) for value in (stride, padding, dilation)]
        convolution_relu: Any = torch.cudnn_convolution_relu
        return convolution_relu(t["x"], t["w"], t["b"], *sizes, groups)  # type: ignore[no-any-return]

    plain = activation == "relu" and not residual and not scale
    words = [
        f"{n} {c} {size} {k} {r} {stride} {padding}",
        f"d{dilation}" if dilation > 1 else "",
        "depthwise" if groups == c > 1 else f"groups {groups}" if groups > 1 else "",
        str(dtype).removeprefix("torch."),
        "nchw" if layout == "contiguous" else "",
        "scale" if scale else "",
        "bias",
        "residual" if residual else "",
        activation,
    ]
    name = " ".join(word for word in words if word)
    others = {"torch.cudnn_convolution_relu": fused} if plain else {}
    return Case(f"conv {name}", "conv", g, eager, others)


def conv_transpose(
    n: int, size: int, c: int, k: int, r: int, stride: int, padding: int, output_padding: int = 0
) -> Case:
    """Transposed convolution, bias, ReLU; float16, channels last."""
    g = Graph("conv_transpose")
    x = g.input("x", (n, c, size, size), torch.float16, layout="channels_last")
    w = g.input("w", (c, k, r, r), torch.float16, layout="channels_last")
    b = g.input("b", (k,), torch.float16)
    y = g.conv_transpose(x, w, stride=stride, padding=padding, output_padding=output_padding)
    g.output("y", g.relu(g.bias(y, b)))

    def eager(t: Tensors) -> torch.Tensor:
        y = F.conv_transpose2d(t["x"], t["w"], t["b"], stride, padding, output_padding)
        return F.relu(y)

    return Case(f"conv_transpose {n} {c} {size} {k} {r} {stride} {padding}", "transpose", g, eager)


def two_convs() -> Case:
    """Two convolutions of one image, added, ReLU: a block with a projection."""
    g = Graph("two_convs")
    x = g.input("x", (32, 128, 28, 28), torch.float16, layout="channels_last")
    w1 = g.input("w1", (128, 128, 3, 3), torch.float16, layout="channels_last")
    w2 = g.input("w2", (128, 128, 1, 1), torch.float16, layout="channels_last")
    g.output("y", (g.conv(x, w1, padding=1) + g.conv(x, w2)).relu())

    def eager(t: Tensors) -> torch.Tensor:
        return F.relu(F.conv2d(t["x"], t["w1"], padding=1) + F.conv2d(t["x"], t["w2"]))

    return Case("two convolutions added relu", "conv", g, eager)


def conv_norm() -> Case:
    """Convolution, LayerNorm over the channels of each pixel, ReLU."""
    g = Graph("conv_norm")
    x = g.input("x", (32, 128, 28, 28), torch.float16, layout="channels_last")
    w = g.input("w", (128, 128, 3, 3), torch.float16, layout="channels_last")
    gamma, beta = (g.input(name, (128,), torch.float16) for name in ("gamma", "beta"))
    y = g.permute(g.conv(x, w, padding=1), (0, 2, 3, 1))
    y = g.permute(g.layer_norm(y, gamma, beta), (0, 3, 1, 2))
    g.output("y", g.relu(y), layout="channels_last")

    def eager(t: Tensors) -> torch.Tensor:
        y = F.conv2d(t["x"], t["w"], padding=1).permute(0, 2, 3, 1)
        return F.relu(F.layer_norm(y, (128,), t["gamma"], t["beta"]).permute(0, 3, 1, 2))

    return Case("conv layer_norm relu", "conv", g, eager)


def matmul(m: int, k: int, n: int, activation: str) -> Case:
    """A linear layer in bfloat16 with bias and activation; the weight is (n, k) as torch has it."""
    g = Graph("linear")
    x = g.input("x", (m, k), torch.bfloat16)
    w = g.input("w", (k, n), torch.bfloat16, stride=(1, k))
    y = g.matmul(x, w) + g.input("b", (n,), torch.bfloat16)
    g.output("y", getattr(g, activation)(y))

    def eager(t: Tensors) -> torch.Tensor:
        y = F.linear(t["x"], t["w"].t(), t["b"])
        return F.gelu(y, approximate="tanh") if activation == "gelu_tanh" else F.relu(y)

    return Case(f"matmul {m} {k} {n} bias {activation}", "matmul", g, eager)


def swiglu(m: int, k: int, n: int) -> Case:
    """silu(x @ gate) * (x @ up) in bfloat16, weights (n, k) as torch has them."""
    g = Graph("swiglu")
    x = g.input("x", (m, k), torch.bfloat16)
    gate = g.input("w_gate", (k, n), torch.bfloat16, stride=(1, k))
    up = g.input("w_up", (k, n), torch.bfloat16, stride=(1, k))
    g.output("y", g.silu(g.matmul(x, gate)) * g.matmul(x, up))

    def eager(t: Tensors) -> torch.Tensor:
        return F.silu(F.linear(t["x"], t["w_gate"].t())) * F.linear(t["x"], t["w_up"].t())

    return Case(f"swiglu {m} {k} {n}", "matmul", g, eager)


def norm(kind: str, rows: int, columns: int, *, residual: bool = False) -> Case:
    """LayerNorm or RMSNorm over the last dim in bfloat16, with an addition in front where asked."""
    g = Graph(kind)
    x: Value = g.input("x", (rows, columns), torch.bfloat16)
    if residual:
        x = x + g.input("z", (rows, columns), torch.bfloat16)
    w = g.input("w", (columns,), torch.bfloat16)
    if kind == "layer_norm":
        g.output("y", g.layer_norm(x, w, g.input("b", (columns,), torch.bfloat16)))
    else:
        g.output("y", g.rms_norm(x, w))

    def eager(t: Tensors) -> torch.Tensor:
        x = t["x"] + t["z"] if residual else t["x"]
        if kind == "layer_norm":
            return F.layer_norm(x, (columns,), t["w"], t["b"])
        return F.rms_norm(x, (columns,), t["w"], 1e-5)

    label = f"{kind} {rows} {columns}" + (" residual" if residual else "")
    return Case(label, "norm", g, eager)


def pointwise_chain(numel: int) -> Case:
    """Nine pointwise ops on float32."""
    g = Graph("chain")
    x = g.input("x", (numel // 4096, 4096), torch.float32)
    z = g.input("z", (numel // 4096, 4096), torch.float32)
    g.output("y", (((x * z + x).sigmoid() * z - x).tanh() + z).relu() * x + z)

    def eager(t: Tensors) -> torch.Tensor:
        x, z = t["x"], t["z"]
        return F.relu(torch.tanh(torch.sigmoid(x * z + x) * z - x) + z) * x + z

    return Case(f"pointwise chain {numel}", "pointwise", g, eager)


def sdpa(
    b: int,
    h: int,
    s: int,
    d: int,
    *,
    kv_heads: int | None = None,
    keys: int | None = None,
    causal: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Attention; the other way is torch's cuDNN backend, eager is whatever torch takes."""
    g = Graph("sdpa")
    kv, n = kv_heads or h, keys or s
    q = g.input("q", (b, h, s, d), dtype)
    k, v = (g.input(name, (b, kv, n, d), dtype) for name in "kv")
    g.output("o", g.sdpa(q, k, v, is_causal=causal))

    def eager(t: Tensors) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            t["q"], t["k"], t["v"], is_causal=causal, enable_gqa=kv != h
        )

    def through(backend: torch.nn.attention.SDPBackend) -> Eager:
        def run(t: Tensors) -> torch.Tensor:
            with torch.nn.attention.sdpa_kernel(backend):
                return eager(t)

        return run

    backends = torch.nn.attention.SDPBackend
    others = {
        "torch cuDNN": through(backends.CUDNN_ATTENTION),
        "torch flash": through(backends.FLASH_ATTENTION),
    }
    heads = f"{h}/{kv}" if kv != h else f"{h}"
    rows = f"{s}x{n}" if n != s else f"{s}"
    name = f"sdpa B{b} H{heads} S{rows} D{d}" + (" causal" if causal else "")
    return Case(name, "sdpa", g, eager, others)


def selection_suite() -> list[Case]:
    """The cases that plan selection is measured on."""
    f32, bf16 = torch.float32, torch.bfloat16
    return [
        conv(32, 512, 7, 512, 3, 1, 1),
        conv(32, 512, 7, 512, 3, 1, 1, dtype=f32),
        conv(32, 512, 7, 512, 3, 1, 1, dtype=f32, layout="contiguous"),
        conv(32, 64, 56, 64, 3, 1, 1),
        conv(32, 256, 56, 64, 1, 1, 0),
        conv(32, 64, 56, 256, 1, 1, 0, residual=True),
        conv(32, 3, 224, 64, 7, 2, 3),
        conv(32, 8, 224, 64, 7, 2, 3),
        conv(32, 128, 28, 128, 3, 1, 1, activation="silu"),
        conv(32, 128, 28, 128, 3, 1, 1, activation="gelu"),
        conv(32, 128, 28, 128, 3, 1, 1, scale=True),
        conv(32, 128, 28, 128, 3, 1, 1, scale=True, residual=True, dtype=bf16),
        conv(32, 128, 28, 128, 3, 1, 1, groups=128),
        conv(1, 256, 65, 256, 3, 1, 12, dilation=12),
        conv(2, 64, 512, 64, 3, 1, 1),
        conv(32, 128, 28, 128, 3, 1, 1, activation="silu", layout="contiguous"),
        conv(32, 128, 28, 128, 3, 1, 1, groups=32),
        conv_transpose(32, 7, 512, 512, 3, 1, 1),
        conv_transpose(8, 64, 256, 128, 4, 2, 1),
        conv_transpose(8, 64, 256, 128, 2, 2, 0),
        conv_transpose(8, 64, 256, 128, 3, 2, 1, 1),
        two_convs(),
        conv_norm(),
        matmul(8192, 4096, 4096, "gelu_tanh"),
        matmul(8192, 4096, 4096, "relu"),
        swiglu(8192, 4096, 14336),
        norm("layer_norm", 16384, 4096),
        norm("rms_norm", 16384, 4096),
        norm("rms_norm", 16384, 4096, residual=True),
        pointwise_chain(1 << 24),
        sdpa(4, 32, 4096, 128, causal=True),
        sdpa(4, 32, 4096, 128, kv_heads=8),
        sdpa(4, 16, 2048, 64, causal=True),
        sdpa(2, 16, 1024, 256, causal=True),
        sdpa(32, 12, 197, 64, dtype=torch.float16),
    ]
