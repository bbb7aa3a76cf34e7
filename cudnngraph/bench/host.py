"""Calls whose cost to the host is measured: every way to run a block, and torch's own beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import functional
from ..graph.builder import Graph
from ..nn import FusedConvBlock

Call = Callable[[], object]
LAST = torch.channels_last

# Of the calls of `inference`, what each stands beside.
BESIDE: Mapping[str, str] = {
    "bound": "torch: functional",
    "exe(...)": "torch: functional",
    "exe.run(...)": "torch: functional",
    "functional": "torch: functional",
    "functional, out=": "torch: functional",
    "module eval": "torch: modules",
    "module eval, batch norm": "torch: modules, batch norm",
}


def inference(device: torch.device) -> dict[str, Call]:
    """conv + bias + relu on (1, 8, 4, 4), in every way to call it, torch's ways as ``torch: …``."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    x = torch.randn(1, 8, 4, 4, device=device, dtype=dtype).to(memory_format=LAST)
    conv: Any = nn.Conv2d(8, 8, 3, padding=1)
    conv = conv.to(device, dtype).to(memory_format=LAST)
    conv.requires_grad_(False)
    w, b = conv.weight, conv.bias
    g = Graph("conv_bias_relu")
    given = [g.input(name, like=t) for name, t in (("x", x), ("w", w), ("b", b))]
    g.output("y", g.conv_bias_act(*given, padding=1))
    exe = g.compile(device)
    out = exe(x, w, b)
    bound = exe.bind(x, w, b, out)
    plain = FusedConvBlock.from_torch(conv, None, nn.ReLU()).eval()
    bn = nn.BatchNorm2d(8).to(device)
    bn.requires_grad_(False)
    normed = FusedConvBlock.from_torch(conv, bn, nn.ReLU()).eval()
    by_torch, normed_by_torch = nn.Sequential(conv, nn.ReLU()).eval(), normed.to_torch().eval()
    calls: dict[str, Call] = {
        "bound": bound,
        "exe(...)": lambda: exe(x, w, b),
        "exe.run(...)": lambda: exe.run(x, w, b, out),
        "functional": lambda: functional.conv_bias_act(x, w, b, padding=1),
        "functional, out=": lambda: functional.conv_bias_act_into(out, x, w, b, padding=1),
        "module eval": lambda: plain(x),
        "module eval, batch norm": lambda: normed(x),
        "torch: functional": lambda: F.relu(F.conv2d(x, w, b, padding=1)),
        "torch: modules": lambda: by_torch(x),
        "torch: modules, batch norm": lambda: normed_by_torch(x),
    }
    if device.type == "cuda":
        convolution_relu: Any = torch.cudnn_convolution_relu
        pairs = ((1, 1), (1, 1), (1, 1))
        calls["torch.cudnn_convolution_relu"] = lambda: convolution_relu(x, w, b, *pairs, 1)
    return calls


def training(
    device: torch.device, shape: tuple[int, ...], *, norm: bool, backward: bool = True
) -> tuple[Call, Call, nn.Module]:
    """Conv-BN-ReLU, or Conv-ReLU, on ``shape``: ours and torch's call, and torch's module.

    On a GPU in bfloat16 with the norm's parameters in float32, as under autocast. Each call is the
    forward and, where asked, the gradients of the input and of every parameter.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    channels = shape[1]
    x = torch.randn(shape, device=device, dtype=dtype).to(memory_format=LAST).requires_grad_()
    grad = torch.randn(shape, device=device, dtype=dtype).to(memory_format=LAST)
    options: dict[str, Any] = {"bias": not norm, "norm": "batch" if norm else None}
    blocks = []
    for _ in range(2):
        block: Any = FusedConvBlock(channels, channels, 3, padding=1, **options)
        block = block.to(device, dtype).to(memory_format=LAST).train()
        if norm:
            block.norm.float()
        blocks.append(block)

    def step(model: nn.Module) -> Call:
        given = [x, *model.parameters()]
        if backward:
            return lambda: torch.autograd.grad(model(x), given, grad)
        return lambda: model(x)

    theirs = blocks[1].to_torch().train()
    return step(blocks[0]), step(theirs), theirs
