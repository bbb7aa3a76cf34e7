"""Models that the tests of several tiers use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.bench import models


class Attends(nn.Module):
    """torch's attention, whose projections add their bias behind a reshape."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, width) → (B, S, width)."""
        for _ in range(2):
            y = self.norm(x)
            x = self.attention(y, y, y, need_weights=False)[0] + x
        return x


class WritesAttention(nn.Module):
    """Causal attention written out, and torch's with the weights asked for and not taken."""

    def __init__(self, width: int = 64, heads: int = 2, length: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.register_buffer("lower", torch.ones(length, length).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, length, width) → (B, length, width)."""
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        weights = F.softmax(scores.masked_fill(self.lower == 0, float("-inf")), dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        y = self.second(x)
        return x + self.attention(y, y, y)[0]


class Windows(nn.Module):
    """Attention within windows of a sequence, some of whose tokens are hidden by a mask that each
    window has of its own, made on the way, as a Swin transformer does; ``mix`` changes it."""

    def __init__(self, mix: str = "", width: int = 32, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.heads = mix, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(heads, 5, 5))
        self.register_buffer("keep", torch.ones(5, 5).triu(-1).bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 10, width) → (B, 10, width): two windows of five."""
        width, h = x.shape[-1], self.heads
        x = F.pad(x, (0, 0, 0, -x.shape[1] % 5)).view(-1, 5, width)
        q, k, v = self.qkv(x).view(-1, 5, 3, h, width // h).permute(2, 0, 3, 1, 4)
        scores = (q * (width // h) ** -0.5) @ k.transpose(-2, -1)
        if self.mix != "hidden too":
            scores = scores + self.bias.unsqueeze(0)
        region = x.new_zeros(10)
        region[7:] = 1
        region = region.view(2, 5)
        apart = region.unsqueeze(1) - region.unsqueeze(2)
        mask = apart.masked_fill(apart != 0, -100.0)
        if self.mix == "of the input":
            mask = mask + 0.0 * x[:2, :, :1]
        mask = mask.view(1, 2, 1, 5, 5)
        images = scores.shape[0] // 2
        if self.mix == "images last":
            scores = scores.view(2, images, h, 5, 5) + mask.transpose(0, 1)
        elif self.mix == "no images":
            scores = scores.view(images, 2, h, 5, 5) + mask[0]
        elif self.mix == "twice":
            scores = scores.view(images, 2, h, 5, 5)
            scores = scores + mask * scores
        else:
            scores = mask + scores.view(images, 2, h, 5, 5)
        scores = scores.view(-1, h, 5, 5)
        if self.mix == "hidden too":
            scores = scores.masked_fill(~self.keep, -float("inf"))
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(-1, 10, width))


class _Conditioned(nn.Module):
    """A residual block whose images have an embedding of the time step added, a number for each
    channel of each image, as scale and shift of its second norm where ``scale``."""

    def __init__(self, c: int, k: int, wide: int, scale: bool) -> None:
        super().__init__()
        self.scale = scale
        self.first, self.conv = nn.GroupNorm(8, c), nn.Conv2d(c, k, 3, padding=1)
        self.embed = nn.Linear(wide, 2 * k if scale else k)
        self.second, self.last = nn.GroupNorm(8, k), nn.Conv2d(k, k, 3, padding=1)
        self.shortcut = nn.Conv2d(c, k, 1) if c != k else nn.Identity()

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        h = self.conv(F.silu(self.first(x)))
        e = self.embed(F.silu(embedding))[:, :, None, None]
        if self.scale:
            factor, shift = e.chunk(2, dim=1)
            h = self.second(h) * (1 + factor) + shift
        else:
            h = self.second(h + e)
        return self.shortcut(x) + self.last(F.silu(h))


class _Attended(nn.Module):
    """Pixels that attend to each other and to a context."""

    def __init__(self, c: int, context: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(c) for _ in range(3)])
        self.q = nn.ModuleList([nn.Linear(c, c, bias=False) for _ in range(2)])
        self.kv = nn.ModuleList([nn.Linear(wide, 2 * c, bias=False) for wide in (c, context)])
        self.out = nn.ModuleList([nn.Linear(c, c) for _ in range(2)])
        self.up, self.down = nn.Linear(c, 8 * c), nn.Linear(4 * c, c)

    def _attend(self, place: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        k, v = self.kv[place](y).chunk(2, dim=-1)
        o = F.scaled_dot_product_attention(heads(self.q[place](x)), heads(k), heads(v))
        return self.out[place](o.transpose(1, 2).flatten(-2))

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(n, h * w, c)
        y = self.norms[0](rows)
        rows = rows + self._attend(0, y, y)
        rows = rows + self._attend(1, self.norms[1](rows), context)
        value, gate = self.up(self.norms[2](rows)).chunk(2, dim=-1)
        rows = rows + self.down(value * F.gelu(gate))
        return rows.reshape(n, h, w, c).permute(0, 3, 1, 2)


class DiffusionUNet(nn.Module):
    """Images, time steps and a context → images, as a latent diffusion model's noise is found."""

    def __init__(self, c: int = 32, context: int = 24) -> None:
        super().__init__()
        self.width = c
        self.time = nn.Sequential(nn.Linear(c, 4 * c), nn.SiLU(), nn.Linear(4 * c, 4 * c))
        self.enter = nn.Conv2d(4, c, 3, padding=1)
        self.down = _Conditioned(c, c, 4 * c, scale=False)
        self.smaller = nn.Conv2d(c, c, 3, stride=2, padding=1)
        self.middle = _Conditioned(c, 2 * c, 4 * c, scale=True)
        self.attend = _Attended(2 * c, context)
        self.larger = nn.Conv2d(2 * c, c, 3, padding=1)
        self.up = _Conditioned(2 * c, c, 4 * c, scale=False)
        self.norm, self.leave = nn.GroupNorm(8, c), nn.Conv2d(c, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """(N, 4, H, W), (N,), (N, S, width) → (N, 4, H, W)."""
        steps = torch.arange(self.width // 2, device=x.device, dtype=torch.float32)
        angles = t[:, None].float() * torch.exp(-9.21 * steps / (self.width // 2))
        embedding = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype))
        one = self.down(self.enter(x), embedding)
        two = self.attend(self.middle(self.smaller(one), embedding), context)
        back = self.larger(F.interpolate(two, scale_factor=2.0, mode="nearest"))
        return self.leave(F.silu(self.norm(self.up(torch.cat([back, one], dim=1), embedding))))


def turned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of copies that lie as torch's kernels want them, of operands that do not."""
    data = [t.transpose(2, 3).contiguous() for t in (q, k, v)]
    return F.scaled_dot_product_attention(*data)


def packed_training(tokens: int = 64, heads: int = 4, width: int = 64) -> cg.Graph:
    """Packed attention and its gradient on the thirds of one buffer that the graph makes."""
    g = cg.Graph("packed")
    x = g.input("x", (tokens, 3, heads, width), torch.float16)
    ends = g.input("ends", (5,), torch.int32)
    do = g.input("do", (tokens, heads, width), torch.float16)
    buffer = g.tanh(x)
    qkv = [g.reshape(g.slice(buffer, 1, at, at + 1), (tokens, heads, width)) for at in range(3)]
    o, lse = g.sdpa_varlen(*qkv, ends, ends, 32, 32, return_lse=True, finite_padding=True)
    g.output("o", o)
    gradients = g.sdpa_varlen_backward(do, *qkv, o, lse, ends, ends, 32, 32)
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        g.output(name, gradient)
    return g


class Of(nn.Module):
    """A function as a module, with parameters to use."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def image(*shape: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=gen)


NETS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet": lambda: (models.ResNet((1, 2), 16, 10), image(2, 3, 64, 64)),
    "deeplab": lambda: (
        models.DeepLab(models.ResNet((1, 1, 1), 8, dilated=True), 16, 5),
        image(1, 3, 64, 64),
    ),
    "unet": lambda: (models.UNet(8, 3), image(1, 3, 32, 32)),
    "decoder": lambda: (models.LatentDecoder((64, 64), 1, heads=1), image(2, 4, 8, 8)),
    "gpt": lambda: (models.GPT(31, 64, 2, 16), torch.arange(24).view(2, 12)),
    "vit": lambda: (models.ViT(16, 8, 64, 2, 10), image(2, 3, 16, 16)),
    "convnext": lambda: (models.ConvNeXt((8, 16), (1, 1), 10), image(2, 3, 32, 32)),
}


class ChannelAttention(nn.Module):
    """Attention of tokens (B, S, C) over their channels: by cosines and a temperature for each
    head as XCiT and EdgeNeXt have it, else as DaViT has it; by torch's attention if ``fused``."""

    def __init__(self, heads: int, width: int, *, cosines: bool, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.width, self.cosines, self.fused = heads, width, cosines, fused
        self.temperature = nn.Parameter(torch.linspace(0.5, 4.0, heads).view(heads, 1, 1))
        features = heads * width
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, self.width)
        q, k, v = qkv.permute(2, 0, 3, 4, 1).unbind(0)
        if self.cosines:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        else:
            q = q * tokens**-0.5
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        else:
            scores = q @ k.transpose(-2, -1)
            y = (scores * self.temperature if self.cosines else scores).softmax(-1) @ v
        z: torch.Tensor = self.out(y.permute(0, 3, 1, 2).reshape(x.shape))
        return z


def _variances() -> list[float]:
    """Variances in float16 by which norms scale by a number that rounds up far in float16."""
    found = []
    for number in range(640, 1024):  # of 1024: the scale is between 1 and 1.27
        scale = (number / 1024) ** -0.5
        if float(torch.tensor(scale).half()) > scale * (1.0 + 3.3e-4):
            found.append(number / 1024)
    return found


class Drifting(nn.Module):
    """Convolutions by one, whose weights all round up if they take their norms in."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        found = _variances()
        for place in range(depth):
            conv = nn.Conv2d(8, 8, 1, bias=False)
            conv.weight.data = torch.eye(8)[..., None, None]
            norm = nn.BatchNorm2d(8, eps=1e-12)
            picked = [found[(7 * place + n) % len(found)] for n in range(8)]
            norm.running_var = torch.tensor(picked)
            layers += [conv, norm]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 8, H, W) → the same."""
        y: torch.Tensor = self.layers(x)
        return y


def drifting(depth: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Drifting(depth).half().eval(), torch.rand(2, 8, 6, 6).half() + 0.5
