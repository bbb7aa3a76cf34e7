"""Small models of many architectures, in plain torch, to be trained by the tests.

Those that are benchmarked too are in :mod:`cudnngraph.bench.models`; here they are narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.bench import models

Tensor = torch.Tensor


def _conv_norm(c: int, k: int, kernel: int, act: nn.Module | None = None, **options: int) -> list:
    padding = options.pop("padding", kernel // 2)
    conv = nn.Conv2d(c, k, kernel, padding=padding, bias=False, **options)
    return [conv, nn.BatchNorm2d(k), *([] if act is None else [act])]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norms, and what came in added."""

    def __init__(self, c: int, k: int, stride: int = 1) -> None:
        super().__init__()
        first = _conv_norm(c, k, 3, nn.ReLU(inplace=True), stride=stride)
        self.body = nn.Sequential(*first, *_conv_norm(k, k, 3))
        changes = c != k or stride > 1
        self.shortcut = nn.Sequential(*_conv_norm(c, k, 1, stride=stride) if changes else [])

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet18() -> nn.Module:
    """As ResNet-18: basic blocks, an average over all pixels, a linear layer."""
    return nn.Sequential(
        *(*_conv_norm(3, 8, 7, nn.ReLU(), stride=2), nn.MaxPool2d(3, 2, 1)),
        *(BasicBlock(8, 8), BasicBlock(8, 16, 2), BasicBlock(16, 24, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)),
    )


class Frozen(nn.Module):
    """A model that is trained with its batch norms as they are, as detectors are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        return y


class SqueezeExcite(nn.Module):
    """Channels weighted by what a small network makes of their means."""

    def __init__(self, c: int, reduced: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, reduced, 1), act, nn.Conv2d(reduced, c, 1), gate
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.net(x)


class InvertedResidual(nn.Module):
    """1x1 to more channels, depthwise, squeeze and excite, 1x1 to fewer."""

    def __init__(
        self, c: int, k: int, stride: int, act: Callable[[], nn.Module], gate: nn.Module
    ) -> None:
        super().__init__()
        wide = 3 * c
        self.body = nn.Sequential(
            *_conv_norm(c, wide, 1, act()),
            *_conv_norm(wide, wide, 3, act(), stride=stride, groups=wide),
            SqueezeExcite(wide, max(1, c // 4), act(), gate),
            *_conv_norm(wide, k, 1),
        )
        self.adds = stride == 1 and c == k

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.adds else y


def efficientnet() -> nn.Module:
    """As EfficientNet: SiLU."""
    sizes = [(8, 8, 1), (8, 12, 2), (12, 12, 1)]
    return nn.Sequential(
        *_conv_norm(3, 8, 3, nn.SiLU(), stride=2),
        *(InvertedResidual(c, k, s, nn.SiLU, nn.Sigmoid()) for c, k, s in sizes),
        *(*_conv_norm(12, 32, 1, nn.SiLU()), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Dropout(0.0), nn.Linear(32, 10)),
    )


def mobilenet() -> nn.Module:
    """As MobileNetV3: hardswish and hardsigmoid."""
    sizes = [(8, 8, 1), (8, 12, 2)]
    return nn.Sequential(
        *_conv_norm(3, 8, 3, nn.Hardswish(), stride=2),
        *(InvertedResidual(c, k, s, nn.Hardswish, nn.Hardsigmoid()) for c, k, s in sizes),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 16), nn.Hardswish()),
        nn.Linear(16, 10),
    )


class DenseNet(nn.Module):
    """Layers that read all before them, concatenated; norms first."""

    def __init__(self, growth: int = 6, layers: int = 3) -> None:
        super().__init__()
        c = 8
        self.stem = nn.Sequential(*_conv_norm(3, c, 7, nn.ReLU(), stride=2), nn.MaxPool2d(3, 2, 1))
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(
                nn.Sequential(
                    *(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, 12, 1, bias=False)),
                    *(nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, growth, 3, padding=1)),
                )
            )
            c += growth
        self.transition = nn.Sequential(
            nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, 12, 1, bias=False), nn.AvgPool2d(2)
        )
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.stem(x)]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1)))
        x = F.relu(self.transition(torch.cat(parts, 1)))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


class Inception(nn.Module):
    """Convolutions of several forms and both poolings side by side."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        act = nn.ReLU
        self.stem = nn.Sequential(*_conv_norm(3, c, 3, act(), stride=2, padding=0))
        self.one = nn.Sequential(*_conv_norm(c, 6, 1, act()))
        factored = [
            nn.Conv2d(6, 6, (1, 3), padding=(0, 1)),
            nn.Conv2d(6, 6, (3, 1), padding=(1, 0)),
        ]
        self.factored = nn.Sequential(*_conv_norm(c, 6, 1, act()), *factored)
        self.averaged = nn.Sequential(nn.AvgPool2d(3, 1, 1), *_conv_norm(c, 6, 1, act()))
        self.uncounted = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.reduced = nn.Sequential(*_conv_norm(18 + c, 12, 3, act(), stride=2))
        self.head = nn.Conv2d(12 + 18 + c, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([self.one(x), self.factored(x), self.averaged(x), self.uncounted(x)], 1)
        x = torch.cat([self.reduced(x), F.max_pool2d(x, 3, 2, 1)], 1)
        return self.head(F.adaptive_max_pool2d(x, 2)).mean((2, 3))


class TimedBlock(nn.Module):
    """A residual block of a diffusion UNet: group norms, and an embedding of the time added."""

    def __init__(self, c: int, k: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, c), nn.GroupNorm(4, k)
        self.conv1, self.conv2 = nn.Conv2d(c, k, 3, padding=1), nn.Conv2d(k, k, 3, padding=1)
        self.time = nn.Linear(time, k)
        self.shortcut = nn.Conv2d(c, k, 1) if c != k else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class Diffusion(nn.Module):
    """As a diffusion UNet: down, attention in the middle, up with what was on the way down."""

    def __init__(self, c: int = 8, time: int = 16) -> None:
        super().__init__()
        self.places = nn.Buffer(torch.linspace(0, 4, time // 2).exp())
        self.time = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.first, self.down = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, c, 3, 2, 1)
        self.block1, self.block2 = TimedBlock(c, c, time), TimedBlock(c, 2 * c, time)
        self.attention = models.PixelAttention(2 * c, 2, groups=4)
        self.up, self.block3 = nn.Conv2d(2 * c, c, 3, padding=1), TimedBlock(2 * c, c, time)
        self.last = nn.Sequential(nn.GroupNorm(4, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        angles = step[:, None] * self.places
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.block1(self.first(x), time)
        y = self.attention(self.block2(self.down(x), time))
        y = self.up(F.interpolate(y, scale_factor=2.0, mode="nearest"))
        return self.last(self.block3(torch.cat([y, x], 1), time))


class RMSNorm(nn.Module):
    """x over the root of its mean square, as language models write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat([-two, one], -1) * sin


class Rotary(nn.Module):
    """Causal attention of rotary embeddings, ``heads`` of queries for ``groups`` of keys, a gated
    MLP; as Llama's layers where there are fewer groups, with torch's norm or a written one."""

    def __init__(self, width: int, heads: int, groups: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = norm(width), norm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.wide = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.narrow = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(b, s, self.heads, self.size).transpose(1, 2)
        k, v = (p(y).view(b, s, self.groups, self.size).transpose(1, 2) for p in (self.k, self.v))
        half = torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size
        angles = torch.outer(torch.arange(s, device=x.device), 100.0**-half)
        cos, sin = (torch.cat([f, f], -1).to(q.dtype) for f in (angles.cos(), angles.sin()))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        if self.groups != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(b, s, width))
        y = self.norm2(x)
        return x + self.narrow(F.silu(self.gate(y)) * self.wide(y))


def decoder(groups: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    """Tokens → scores, by rotary layers."""
    layers = [Rotary(16, 4, groups, norm) for _ in range(2)]
    return nn.Sequential(nn.Embedding(31, 16), *layers, norm(16), nn.Linear(16, 31, bias=False))


class BERT(nn.Module):
    """Tokens and which of them count → scores: norms last, attention written out, a mask."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(31, width, padding_idx=0), nn.Embedding(12, width)
        self.heads, self.norm0 = heads, nn.LayerNorm(width, eps=1e-12)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        b, s = tokens.shape
        x = self.norm0(self.tokens(tokens) + self.places(torch.arange(s, device=tokens.device)))
        q, k, v = (
            p(x).view(b, s, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores + (1.0 - counts[:, None, None, :].to(scores.dtype)) * -1e4
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1)
        x = self.norm1(x + self.out(y))
        x = self.norm2(x + self.mlp(x))
        return self.head(torch.tanh(self.pool(x[:, 0])))


class SwinBlock(nn.Module):
    """Attention within windows of an image that is rolled, positions relative."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(0.5 * torch.randn((2 * window - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None, :] + window - 1
        self.index = nn.Buffer(apart[0] * (2 * window - 1) + apart[1])
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        n, size = self.window, self.window**2
        y = self.norm1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = y.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, size, c)
        q, k, v = self.qkv(y).view(-1, size, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5
        scores = scores + self.table[self.index].permute(2, 0, 1).unsqueeze(0)
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, size, c))
        y = y.view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    """Images → scores by shifted windows, and patches merged between."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Sequential(SwinBlock(width, 2, 4, 0), SwinBlock(width, 2, 4, 2))
        self.norm = nn.LayerNorm(4 * width)
        self.merge = nn.Linear(4 * width, 2 * width, bias=False)
        self.second = SwinBlock(2 * width, 2, 4, 0)
        self.last, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.patches(x).permute(0, 2, 3, 1))
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        x = self.second(self.merge(self.norm(torch.cat(parts, -1))))
        return self.head(self.last(x).mean((1, 2)))


class Mixer(nn.Module):
    """Linear layers along patches and along channels in turn."""

    def __init__(self, width: int = 16, patches: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(5)])
        sizes = [patches, width, patches, width]
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n)) for n in sizes]
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for place, mlp in enumerate(self.mlps):
            y = self.norms[place](x)
            x = x + (mlp(y) if place % 2 else mlp(y.transpose(1, 2)).transpose(1, 2))
        return self.head(self.norms[4](x).mean(1))


def autoencoder() -> nn.Module:
    """Convolutions down, transposed ones up; leaky ReLU, ELU, tanh; a norm without weights."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 12, 4, 2, 1)),
        *(
            nn.BatchNorm2d(12, affine=False),
            nn.ELU(),
            nn.ConvTranspose2d(12, 8, 4, 2, 1, bias=False),
        ),
        *(nn.BatchNorm2d(8), nn.Softplus(), nn.ConvTranspose2d(8, 3, 3, 2, 1, 1), nn.Tanh()),
    )


class Wave(nn.Module):
    """As WaveNet: dilated convolutions of one dim, gated, their skips summed; weights normed."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm
        self.first = nn.Conv1d(2, c, 1)
        dilations = (1, 2, 4)
        self.gated = nn.ModuleList([normed(nn.Conv1d(c, 2 * c, 2, dilation=d)) for d in dilations])
        self.out = nn.ModuleList([nn.Conv1d(c, 2 * c, 1) for _ in dilations])
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(c, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total = torch.zeros_like(x)
        for gated, out in zip(self.gated, self.out, strict=True):
            a, b = gated(F.pad(x, (gated.dilation[0], 0))).chunk(2, 1)
            kept, skipped = out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x, total = x + kept, total + skipped
        return self.head(total)


def volumes() -> nn.Module:
    """Convolutions of three dims, instance and batch norms, poolings."""
    return nn.Sequential(
        *(nn.Conv3d(2, 6, 3, padding=1, bias=False), nn.BatchNorm3d(6), nn.ReLU()),
        *(nn.MaxPool3d(2), nn.Conv3d(6, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True)),
        *(nn.GELU(), nn.AvgPool3d(2), nn.Conv3d(8, 8, 1, groups=2), nn.AdaptiveAvgPool3d(1)),
        *(nn.Flatten(), nn.Linear(8, 5)),
    )


class Segments(nn.Module):
    """As DeepLabV3: dilated branches, one of the whole image resized, an upsampled result."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.DeepLab(models.ResNet((1, 1), 4, dilated=True), 8, 4)
        del self.model.backbone.head
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), labels)


class Classified(nn.Module):
    """A language model and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.model(tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


class Encoder(nn.Module):
    """torch's own encoder layer, norms first, over what convolutions make of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.ReLU6())
        self.layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=True, norm_first=True, activation=F.gelu
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.stem(x).flatten(2).transpose(1, 2))


@dataclass(frozen=True)
class Architecture:
    """A model's maker, and the forms of its inputs: ints below the number, 0 for floats."""

    make: Callable[[], nn.Module]
    shapes: Sequence[tuple[tuple[int, ...], int]]

    @property
    def has_images(self) -> bool:
        """Whether an input has a layout to choose."""
        return any(len(shape) in (4, 5) for shape, _ in self.shapes)

    def built(self) -> nn.Module:
        """The model, with numbers that a trained one may have."""
        torch.manual_seed(0)
        return models.randomized(self.make()).train()

    def inputs(self, seed: int = 1) -> list[Tensor]:
        """Random inputs."""
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randint(below, shape, generator=generator)
            if below
            else torch.randn(shape, generator=generator)
            for shape, below in self.shapes
        ]


_IMAGES, _TOKENS = [((2, 3, 32, 32), 0)], [((2, 11), 31)]

ARCHITECTURES: dict[str, Architecture] = {
    "ResNet-18": Architecture(resnet18, [((4, 3, 32, 32), 0)]),
    "frozen norms": Architecture(lambda: Frozen(resnet18()), [((4, 3, 32, 32), 0)]),
    "ResNet-50": Architecture(lambda: models.ResNet((1, 1), 8, 10), [((4, 3, 32, 32), 0)]),
    "ConvNeXt": Architecture(lambda: models.ConvNeXt((8, 12), (1, 1), 10), _IMAGES),
    "EfficientNet": Architecture(efficientnet, [((4, 3, 32, 32), 0)]),
    "MobileNet": Architecture(mobilenet, [((4, 3, 32, 32), 0)]),
    "DenseNet": Architecture(DenseNet, [((4, 3, 32, 32), 0)]),
    "Inception": Architecture(Inception, [((4, 3, 33, 33), 0)]),
    "DeepLab": Architecture(Segments, [((2, 3, 32, 32), 0), ((2, 32, 32), 4)]),
    "U-Net": Architecture(lambda: models.UNet(4, 2, 3), [((2, 3, 16, 16), 0)]),
    "diffusion": Architecture(Diffusion, [((2, 3, 8, 8), 0), ((2,), 0)]),
    "autoencoder": Architecture(autoencoder, [((2, 3, 16, 16), 0)]),
    "volumes": Architecture(volumes, [((2, 2, 8, 8, 8), 0)]),
    "ViT": Architecture(lambda: models.ViT(32, 8, 64, 1, 10), _IMAGES),
    "Swin": Architecture(Swin, _IMAGES),
    "MLP-Mixer": Architecture(Mixer, _IMAGES),
    "encoder": Architecture(Encoder, _IMAGES),
    "GPT": Architecture(lambda: Classified(models.GPT(31, 64, 1, 12)), _TOKENS),
    "rotary": Architecture(lambda: Classified(decoder(4, nn.RMSNorm)), _TOKENS),
    "Llama": Architecture(lambda: Classified(decoder(2, RMSNorm)), _TOKENS),
    "BERT": Architecture(BERT, [((3, 9), 31), ((3, 9), 2)]),
    "WaveNet": Architecture(Wave, [((2, 2, 20), 0)]),
}
