"""The cases of int8 and FP8, each beside the same work in 16 bits.

The other ways of a case: the 16-bit graph, compiled with plan selection when it is first run, on
tensors of its own; and torch's own product of FP8 where it has one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..graph.builder import Graph
from ..ops.quantize import saturated
from . import cases
from .cases import Case, Eager, Tensors

E4M3 = torch.float8_e4m3fn
_LARGEST = {torch.int8: 127.0, E4M3: 448.0, torch.float8_e5m2: 57344.0}


def selected(graph: Graph) -> Eager:
    """A call of another graph on tensors of its own; its plans are selected at the first one."""
    bound: dict[torch.device, tuple[Any, torch.Tensor]] = {}

    def run(t: Tensors) -> torch.Tensor:
        device = next(iter(t.values())).device
        if device not in bound:
            exe = graph.compile(device, tune="autotune")
            tensors = Case("", "", graph, run).tensors(exe.device)
            bound[device] = exe.bind(**tensors), tensors[exe.spec.outputs[0]]
        call, out = bound[device]
        call()
        return out

    return run


def conv(
    dtype: torch.dtype,
    n: int,
    c: int,
    size: int,
    k: int,
    r: int,
    stride: int,
    padding: int,
    *,
    bias: bool = False,
) -> Case:
    """Convolution of 8-bit data, scale, ReLU, rounding to 8 bits, against the same in float16.

    With ``bias`` the scale is one per channel, a bias follows it, and the result has a scale of its
    own; without, one number scales all.
    """
    g, kind = Graph("conv"), str(dtype).removeprefix("torch.").removeprefix("float8_")
    x = g.input("x", (n, c, size, size), dtype, layout="channels_last")
    w = g.input("w", (k, c, r, r), dtype, layout="channels_last")
    s = g.input("s", (k,) if bias else (), torch.float32)
    b = g.input("b", (k,), torch.float32) if bias else None
    s_out = g.input("s_out", (), torch.float32) if bias else None
    g.output(
        "y",
        g.quantized_conv_bias_act(
            x, w, s, b, out_scale=s_out, dtype=dtype, stride=stride, padding=padding
        ),
    )
    spread = 73.0**2 * math.sqrt(c * r * r) if dtype == torch.int8 else 1.0  # of the products' sums
    step = 3.0 / _LARGEST[dtype]
    numbers = {"s": 1.0 / spread, "s_out": step} if bias else {"s": 1.0 / (spread * step)}

    def eager(t: Tensors) -> torch.Tensor:
        """As torch can: in float16, the scale in the weight, which keeps the sums small."""
        factor = t["s"].view(-1, 1, 1, 1) / (1.0 if bias else 1.0 / step)
        weight = (t["w"].float() * factor).half()
        given = t["b"].half() if bias else None
        y = F.relu(F.conv2d(t["x"].half(), weight, given, stride, padding))
        return saturated(y.float() / step, dtype)

    narrow = Graph("conv")
    x = narrow.input("x", (n, c, size, size), torch.float16, layout="channels_last")
    w = narrow.input("w", (k, c, r, r), torch.float16, layout="channels_last")
    y = narrow.scale(
        narrow.conv(x, w, stride=stride, padding=padding), narrow.input("s", (k,), torch.float16)
    )
    if bias:
        y = narrow.bias(y, narrow.input("b", (k,), torch.float16))
    narrow.output("y", narrow.relu(y))
    label = f"conv {n} {c} {size} {k} {r} {stride} {padding} {kind}"
    return Case(
        f"{label} scale{' bias' * bias} relu", kind, g, eager, {"fp16": selected(narrow)}, numbers
    )


def matmul(m: int, k: int, n: int) -> Case:
    """Product of two E4M3 matrices, the second (n, k) in memory, scaled, in bfloat16."""
    g = Graph("matmul")
    x, w = g.input("x", (m, k), E4M3), g.input("w", (k, n), E4M3, stride=(1, k))
    s_x, s_w = (g.input(name, (), torch.float32) for name in ("s_x", "s_w"))
    y = g.dequantize(g.dequantize(g.matmul(x, w), s_x), s_w)
    g.output("y", y, dtype=torch.bfloat16)

    def eager(t: Tensors) -> torch.Tensor:
        return (t["x"].bfloat16() @ t["w"].bfloat16()) * (t["s_x"] * t["s_w"]).bfloat16()

    def scaled(t: Tensors) -> torch.Tensor:
        return torch._scaled_mm(
            t["x"], t["w"], scale_a=t["s_x"], scale_b=t["s_w"], out_dtype=torch.bfloat16
        )

    narrow = Graph("matmul")
    x = narrow.input("x", (m, k), torch.bfloat16)
    narrow.output("y", x @ narrow.input("w", (k, n), torch.bfloat16, stride=(1, k)))
    others = {"bf16": selected(narrow), "torch._scaled_mm": scaled}
    numbers = {"s_x": 0.5, "s_w": 0.5}
    return Case(f"matmul {m} {k} {n} e4m3", "e4m3", g, eager, others, numbers)


def sdpa(b: int, h: int, s: int, d: int, *, causal: bool = False) -> Case:
    """Attention of E4M3 data against bfloat16."""
    g = Graph("sdpa")
    q, k, v = (g.input(name, (b, h, s, d), E4M3) for name in "qkv")
    numbers = {"descale_q": 1.0, "descale_k": 1.0, "descale_v": 1.0}
    numbers |= {"descale_s": 1.0 / 256.0, "scale_s": 256.0, "scale_o": 64.0}
    scales = [g.input(name, (), torch.float32) for name in numbers]
    g.output("o", g.sdpa_fp8(q, k, v, *scales, is_causal=causal)[0])

    def eager(t: Tensors) -> torch.Tensor:
        q, k, v = (t[name].bfloat16() for name in "qkv")
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return saturated(o.float() * t["scale_o"], E4M3)

    others = {"bf16": selected(cases.sdpa(b, h, s, d, causal=causal).graph)}
    name = f"sdpa B{b} H{h} S{s} D{d}" + (" causal" if causal else "") + " e4m3"
    return Case(name, "e4m3", g, eager, others, numbers)


def lowprecision_suite() -> list[Case]:
    """The cases that int8 and FP8 are measured on."""
    return [
        *(
            conv(dtype, *shape, bias=bias)
            for shape in ((32, 128, 28, 128, 3, 1, 1), (32, 256, 56, 256, 3, 1, 1))
            for dtype in (torch.int8, E4M3)
            for bias in (False, True)
        ),
        matmul(8192, 4096, 4096),
        sdpa(2, 16, 2048, 128, causal=True),
        sdpa(2, 16, 2048, 128),
    ]
