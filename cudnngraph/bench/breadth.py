"""The cases of norms, feed-forward layers, separable convolutions, pixels, AdamW and softmax.

``quick`` shapes are tiny, for a run on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ..graph.builder import Graph
from ..graph.value import Value
from . import cases
from .cases import Case, Eager, Tensors

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Fill = Callable[[torch.Tensor, torch.Generator], object]


@dataclass(frozen=True)
class Filled(Case):
    """A case whose inputs are filled each in its own way (default: as of :class:`Case`).

    ``in_place`` says which outputs are written over which inputs.
    """

    fills: Mapping[str, Fill] = field(default_factory=dict)
    in_place: Mapping[str, str] = field(default_factory=dict)

    def tensors(self, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
        """Inputs, and outputs to write to."""
        spec = self.graph.spec()
        generator = torch.Generator(device).manual_seed(seed)
        made: dict[str, torch.Tensor] = {}
        for name in (*spec.inputs, *spec.outputs):
            declared = spec.tensors[name]
            tensor = made[name] = declared.empty(device)
            if name in self.in_place:
                made[name] = made[self.in_place[name]]
            elif name in self.fills:
                self.fills[name](tensor, generator)
            elif name in spec.inputs:
                tensor.normal_(0.0, _deviation(name, tensor), generator=generator)
        return made


def _deviation(name: str, tensor: torch.Tensor) -> float:
    """Standard deviation of an input; small for a weight, so that its products sum to about 1."""
    wide = name.startswith("w") and tensor.dim() > 1
    return float(tensor[0].numel() ** -0.5) if wide else 1.0


def _between(low: float, high: float) -> Fill:
    return lambda tensor, generator: tensor.uniform_(low, high, generator=generator)


def _copy(t: Tensors) -> torch.Tensor:
    """A device copy of x to y: what reading x and writing y costs."""
    return t["y"].copy_(t["x"])


# -- norms -----------------------------------------------------------------------------------------


def norm(
    kind: str, rows: int, columns: int, *, residual: bool = False, total: bool = False
) -> Case:
    """LayerNorm or RMSNorm in bfloat16; ``total`` also hands out the sum in front of it."""
    if not total:
        made = cases.norm(kind, rows, columns, residual=residual)
        return Case(made.name, "norm", made.graph, made.eager, {"device copy": _copy})
    g = Graph(kind)
    x, z = (g.input(name, (rows, columns), BF16) for name in ("x", "z"))
    w = g.input("w", (columns,), BF16)
    added = x + z
    g.output("y", getattr(g, kind)(added, w))
    g.output("total", added)

    def eager(t: Tensors) -> Any:
        added = t["x"] + t["z"]
        run = F.rms_norm if kind == "rms_norm" else F.layer_norm
        return run(added, (columns,), t["w"], eps=1e-5), added

    name = f"{kind} {rows} {columns} residual and sum"
    return Filled(name, "norm", g, eager, {"device copy": _copy})


def group_norm(n: int, c: int, size: int, groups: int, activation: str | None = None) -> Case:
    """Group norm of a bfloat16 image, and SiLU behind it where asked."""
    g = Graph("group_norm")
    x = g.input("x", (n, c, size, size), BF16)
    w, b = (g.input(name, (c,), BF16) for name in ("w", "b"))
    g.output("y", g.activation(g.group_norm(x, groups, w, b), activation))

    def eager(t: Tensors) -> torch.Tensor:
        y = F.group_norm(t["x"], groups, t["w"], t["b"])
        return F.silu(y) if activation else y

    words = [f"group_norm {n} {c} {size} {size} groups {groups}", activation or ""]
    return Case(" ".join(w for w in words if w), "norm", g, eager, {"device copy": _copy})


# -- feed-forward ----------------------------------------------------------------------------------

_GELUS: Mapping[str, str] = {"gelu": "none", "gelu_tanh": "tanh"}


def linear(m: int, k: int, n: int, activation: str) -> Case:
    """A linear layer in bfloat16 with bias and GELU, beside the linear layer alone."""
    g = Graph("linear")
    x, w = g.input("x", (m, k), BF16), g.input("w", (n, k), BF16)
    y = g.linear(x, w, g.input("b", (n,), BF16))
    g.output("y", g.activation(y, activation))

    def alone(t: Tensors) -> torch.Tensor:
        return F.linear(t["x"], t["w"], t["b"])

    def eager(t: Tensors) -> torch.Tensor:
        return F.gelu(alone(t), approximate=_GELUS[activation])

    name = f"linear {m} {k} {n} bias {activation}"
    return Case(name, "ffn", g, eager, {"F.linear alone": alone})


def gated(kind: str, m: int, k: int, n: int) -> Case:
    """SwiGLU or GeGLU: act(x gate) * (x up) in bfloat16, beside its two products alone."""
    g = Graph(kind)
    x = g.input("x", (m, k), BF16)
    gate, up = (g.input(name, (k, n), BF16, stride=(1, k)) for name in ("w_gate", "w_up"))
    g.output("y", getattr(g, kind)(x, gate, up))
    act: Callable[[torch.Tensor], torch.Tensor] = F.silu if kind == "swiglu" else F.gelu

    def eager(t: Tensors) -> torch.Tensor:
        return act(F.linear(t["x"], t["w_gate"].t())) * F.linear(t["x"], t["w_up"].t())

    def products(t: Tensors) -> torch.Tensor:
        F.linear(t["x"], t["w_gate"].t())
        return F.linear(t["x"], t["w_up"].t())

    return Case(f"{kind} {m} {k} {n}", "ffn", g, eager, {"two F.linear alone": products})


# -- convolution -----------------------------------------------------------------------------------


def separable(n: int, c: int, size: int, k: int, stride: int) -> Case:
    """A block of MobileNet: 3 x 3 of each channel, 1 x 1, both with bias and ReLU6; float16."""
    g = Graph("separable")
    x = g.input("x", (n, c, size, size), F16, layout="channels_last")
    d = g.input("w_depthwise", (c, 1, 3, 3), F16, layout="channels_last")
    p = g.input("w_pointwise", (k, c, 1, 1), F16, layout="channels_last")
    a, b = g.input("a", (c,), F16), g.input("b", (k,), F16)
    acts: dict[str, Any] = {"activation": "relu6", "pointwise_activation": "relu6"}
    g.output("y", g.depthwise_separable(x, d, p, a, b, stride=stride, padding=1, **acts))

    def eager(t: Tensors) -> torch.Tensor:
        y = F.conv2d(t["x"], t["w_depthwise"], t["a"], stride, 1, groups=c)
        return F.relu6(F.conv2d(F.relu6(y), t["w_pointwise"], t["b"]))

    return Case(f"separable {n} {c} {size} {k} stride {stride}", "separable", g, eager)


# -- others ----------------------------------------------------------------------------------------


def pixels(n: int, height: int, width: int) -> Case:
    """uint8 pixels (N, H, W, 3), normalised by channel to float16 channels_last images."""
    g = Graph("pixels")
    x = g.input("x", (n, height, width, 3), torch.uint8)
    scale, shift = (g.input(name, (width, 3), F32) for name in ("scale", "shift"))
    g.output("y", g.normalize_images(x, scale, shift), dtype=F16)

    def eager(t: Tensors) -> torch.Tensor:
        """As torchvision's ToDtype and Normalize do, on the device."""
        std = 1.0 / (255.0 * t["scale"][0]).view(3, 1, 1)
        mean = -(t["shift"][0].view(3, 1, 1) * std)
        y = t["x"].permute(0, 3, 1, 2).float().div(255.0)
        return y.sub(mean).div(std).half()

    def half(t: Tensors) -> torch.Tensor:
        """In float16 throughout, which rounds more often."""
        y = t["x"].permute(0, 3, 1, 2).half()
        scale, shift = (t[name][0].half().view(3, 1, 1) for name in ("scale", "shift"))
        return y.mul_(scale).add_(shift)

    def by_channel(low: float, high: float) -> Fill:
        return lambda tensor, generator: tensor.copy_(
            torch.linspace(low, high, 3, device=tensor.device).expand_as(tensor)
        )

    fills: Mapping[str, Fill] = {
        "x": lambda tensor, generator: tensor.random_(0, 256, generator=generator),
        "scale": by_channel(0.016, 0.018),
        "shift": by_channel(-2.2, -1.8),
    }
    name = f"pixels {n} {height} {width} 3"
    return Filled(name, "others", g, eager, {"float16 throughout": half}, fills=fills)


def adamw(numel: int) -> Case:
    """One step of AdamW on float32, in place; eager is the chain of torch's single-tensor way."""
    g = Graph("adamw")
    given = [g.input(name, (numel,), F32) for name in ("p", "grad", "m", "v")]
    numbers = [g.input(name, (1,), F32) for name in ("lr", "c1", "c2")]
    made = g.adamw(*given, *numbers)
    for name, value in zip(("next_p", "next_m", "next_v"), made, strict=True):
        g.output(name, value)

    def eager(t: Tensors) -> Any:
        p, grad, m, v = (t[name] for name in ("p", "grad", "m", "v"))
        p.mul_(1.0 - t["lr"] * 1e-2)
        m.lerp_(grad, 0.1)
        v.mul_(0.999).addcmul_(grad, grad, value=0.001)
        spread = (v.sqrt() / t["c2"].sqrt()).add_(1e-8)
        p.sub_(m / spread * (t["lr"] / t["c1"]))
        return p, m, v

    def fused(t: Tensors) -> Any:
        p, grad, m, v = (t[name] for name in ("p", "grad", "m", "v"))
        options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 1e-2, "eps": 1e-8}
        flags = {"amsgrad": False, "maximize": False}
        update: Any = torch._fused_adamw_
        step = torch.ones((), device=p.device)
        update([p], [grad], [m], [v], [], [step], **options, **flags)
        return p, m, v

    fills = {
        "v": _between(0.1, 1.0),
        "lr": _between(1e-3, 1e-3 + 1e-9),
        "c1": _between(0.1, 0.2),
        "c2": _between(0.01, 0.02),
    }
    places = {"next_p": "p", "next_m": "m", "next_v": "v"}
    others: Mapping[str, Eager] = {"torch fused": fused}
    return Filled(f"adamw {numel}", "others", g, eager, others, fills=fills, in_place=places)


def softmax(rows: int, columns: int) -> Case:
    """Softmax over the last dim in bfloat16."""
    g = Graph("softmax")
    x: Value = g.input("x", (rows, columns), BF16)
    g.output("y", g.softmax(x, -1))
    name = f"softmax {rows} {columns}"
    return Case(name, "others", g, lambda t: F.softmax(t["x"], -1), {"device copy": _copy})


def breadth_suite(quick: bool = False) -> list[Case]:
    """The cases for the families beside convolution and attention."""
    if quick:
        return [
            norm("rms_norm", 16, 64),
            norm("layer_norm", 16, 64),
            norm("rms_norm", 16, 64, residual=True),
            norm("rms_norm", 16, 64, total=True),
            group_norm(2, 8, 6, 4, "silu"),
            linear(16, 32, 24, "gelu"),
            gated("swiglu", 16, 32, 24),
            gated("geglu", 16, 32, 24),
            separable(2, 8, 8, 16, 2),
            pixels(2, 8, 16),
            adamw(4096),
            softmax(16, 64),
        ]
    return [
        norm("rms_norm", 16384, 4096),
        norm("layer_norm", 16384, 4096),
        norm("rms_norm", 16384, 4096, residual=True),
        norm("rms_norm", 16384, 4096, total=True),
        norm("layer_norm", 16384, 4096, total=True),
        group_norm(8, 320, 64, 32),
        group_norm(8, 320, 64, 32, "silu"),
        linear(8192, 4096, 4096, "gelu"),
        linear(8192, 4096, 4096, "gelu_tanh"),
        gated("swiglu", 8192, 4096, 14336),
        gated("geglu", 8192, 4096, 14336),
        separable(32, 32, 112, 64, 1),
        separable(32, 64, 112, 128, 2),
        separable(32, 128, 56, 128, 1),
        separable(32, 256, 28, 256, 1),
        separable(32, 512, 14, 512, 1),
        separable(32, 512, 14, 1024, 2),
        pixels(64, 224, 224),
        adamw(1 << 26),
        softmax(16384, 4096),
    ]
