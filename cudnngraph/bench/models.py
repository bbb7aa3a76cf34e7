"""Whole models in plain torch, to be fused, measured and shown; their weights are random.

``resnet50`` and ``deeplab_resnet50`` have the layers of torchvision's models of those names.
``WHOLE`` lists what is measured, ``TORCHVISION`` what is where torchvision can be imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn


def _conv_norm(c: int, k: int, kernel: int = 1, **options: Any) -> list[nn.Module]:
    return [nn.Conv2d(c, k, kernel, bias=False, **options), nn.BatchNorm2d(k)]


# -- ResNet ----------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each with a batch norm, and what came in added to them."""

    def __init__(self, c: int, width: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        k = 4 * width
        self.body = nn.Sequential(
            *_conv_norm(c, width),
            nn.ReLU(),
            *_conv_norm(width, width, 3, stride=stride, padding=dilation, dilation=dilation),
            nn.ReLU(),
            *_conv_norm(width, k),
        )
        self.shortcut = (
            nn.Identity()
            if c == k and stride == 1
            else nn.Sequential(*_conv_norm(c, k, stride=stride))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → (N, 4 width, H / stride, W / stride)."""
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Images (N, 3, H, W) → scores (N, classes). ``blocks`` per stage; ``width`` of the first."""

    def __init__(
        self,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        classes: int = 1000,
        *,
        dilated: bool = False,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_conv_norm(3, width, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages, c, dilation = [], width, 1
        for number, count in enumerate(blocks):
            inner, stride, first = width << number, 1 if number == 0 else 2, dilation
            if dilated and number >= 2:
                stride, dilation = 1, 2 * dilation
            stage = [Bottleneck(c, inner, stride, first)]
            c = 4 * inner
            stage += [Bottleneck(c, inner, dilation=dilation) for _ in range(count - 1)]
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.channels = c
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Images → (N, 4 * 8 * width, H / 32, W / 32); H / 8 where dilated."""
        return cast(torch.Tensor, self.stages(self.stem(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (N, 3, H, W) → scores (N, classes)."""
        return cast(torch.Tensor, self.head(self.features(x)))


def resnet50() -> nn.Module:
    """ResNet-50."""
    return ResNet()


# -- DeepLab ---------------------------------------------------------------------------------------


class Pyramid(nn.Module):
    """Atrous spatial pyramid pooling: convolutions of several reaches side by side."""

    def __init__(self, c: int, k: int, rates: Sequence[int] = (12, 24, 36)) -> None:
        super().__init__()
        branches = [nn.Sequential(*_conv_norm(c, k), nn.ReLU())]
        for rate in rates:
            wide = _conv_norm(c, k, 3, padding=rate, dilation=rate)
            branches.append(nn.Sequential(*wide, nn.ReLU()))
        self.branches = nn.ModuleList(branches)
        self.whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), *_conv_norm(c, k), nn.ReLU())
        joined = k * (len(branches) + 1)
        self.project = nn.Sequential(*_conv_norm(joined, k), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → (N, K, H, W)."""
        size = x.shape[2:]
        whole = F.interpolate(self.whole(x), size=size, mode="bilinear", align_corners=False)
        parts = [*(branch(x) for branch in self.branches), whole]
        return cast(torch.Tensor, self.project(torch.cat(parts, 1)))


class DeepLab(nn.Module):
    """DeepLabV3: a dilated ResNet, the pyramid, a classifier, upsampled to the image's size."""

    def __init__(self, backbone: ResNet, k: int = 256, classes: int = 21) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Sequential(
            Pyramid(backbone.channels, k),
            *_conv_norm(k, k, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(k, classes, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (N, 3, H, W) → scores (N, classes, H, W)."""
        y = self.classifier(self.backbone.features(x))
        return F.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=False)


def deeplab_resnet50() -> nn.Module:
    """DeepLabV3 on ResNet-50, 21 classes."""
    return DeepLab(ResNet(dilated=True))


# -- U-Net -----------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Convolutions down, transposed ones up, each level joined with what it was on the way down."""

    def __init__(self, width: int = 64, levels: int = 4, classes: int = 2) -> None:
        super().__init__()

        def pair(c: int, k: int) -> nn.Sequential:
            first, second = (_conv_norm(n, k, 3, padding=1) for n in (c, k))
            return nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU())

        sizes = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList([pair(c, k) for c, k in zip([3, *sizes], sizes, strict=False)])
        turned = list(zip(sizes[:0:-1], sizes[-2::-1], strict=True))
        self.up = nn.ModuleList([nn.ConvTranspose2d(c, k, 2, 2) for c, k in turned])
        self.join = nn.ModuleList([pair(2 * k, k) for _, k in turned])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (N, 3, H, W), H and W multiples of 2 ** levels → scores (N, classes, H, W)."""
        passed = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            passed.append(x)
        for up, join, kept in zip(self.up, self.join, passed[-2::-1], strict=True):
            x = join(torch.cat([kept, up(x)], 1))
        return cast(torch.Tensor, self.head(x))


# -- latent diffusion ------------------------------------------------------------------------------


class Residual(nn.Module):
    """Twice a group norm, SiLU and a 3x3 convolution, and what came in added."""

    def __init__(self, c: int, k: int, groups: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.GroupNorm(groups, c, eps=1e-6), nn.SiLU(), nn.Conv2d(c, k, 3, padding=1)),
            *(nn.GroupNorm(groups, k, eps=1e-6), nn.SiLU(), nn.Conv2d(k, k, 3, padding=1)),
        )
        self.shortcut = nn.Identity() if c == k else nn.Conv2d(c, k, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → (N, K, H, W)."""
        return cast(torch.Tensor, self.shortcut(x) + self.body(x))


class PixelAttention(nn.Module):
    """Attention of every pixel to every other, behind a group norm, and what came in added."""

    def __init__(self, c: int, heads: int, groups: int = 32) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(groups, c, eps=1e-6)
        self.qkv, self.out = nn.Linear(c, 3 * c), nn.Linear(c, c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → the same."""
        n, c, h, w = x.shape
        rows = self.norm(x).flatten(2).transpose(1, 2)
        qkv = self.qkv(rows).view(n, h * w, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, h * w, c)
        return x + cast(torch.Tensor, self.out(o)).transpose(1, 2).reshape(n, c, h, w)


class LatentDecoder(nn.Module):
    """Latents (N, 4, H, W) → images (N, 3, 8 H, 8 W), as latent diffusion's decoders are built:
    residual blocks from wide to narrow, attention at the smallest size (here of several heads),
    nearest neighbours between.
    """

    def __init__(
        self, widths: Sequence[int] = (512, 512, 256, 128), blocks: int = 3, heads: int = 4
    ) -> None:
        super().__init__()
        c = widths[0]
        parts: list[nn.Module] = [
            *(nn.Conv2d(4, c, 3, padding=1), Residual(c, c), PixelAttention(c, heads)),
            Residual(c, c),
        ]
        for level, width in enumerate(widths):
            for _ in range(blocks):
                parts.append(Residual(c, width))
                c = width
            if level + 1 < len(widths):
                parts += [nn.Upsample(scale_factor=2), nn.Conv2d(c, c, 3, padding=1)]
        parts += [nn.GroupNorm(32, c, eps=1e-6), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1)]
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Latents (N, 4, H, W) → images (N, 3, 8 H, 8 W)."""
        return cast(torch.Tensor, self.parts(x))


# -- transformers ----------------------------------------------------------------------------------


class Layer(nn.Module):
    """A transformer's layer, norms first."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, width) → the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(o.transpose(1, 2).reshape(batch, length, width))
        return x + cast(torch.Tensor, self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Tokens (B, S) → scores (B, S, tokens), by layers of causal attention."""

    def __init__(
        self, tokens: int = 50304, width: int = 768, layers: int = 12, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        heads = max(1, width // 64)
        self.layers = nn.Sequential(*(Layer(width, heads, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (B, S) int64 → scores (B, S, tokens)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.layers(self.tokens(tokens) + self.places(places))
        return cast(torch.Tensor, self.head(self.norm(x)))


class ViT(nn.Module):
    """Images (N, 3, side, side) → scores: patches as tokens, a class token, attention."""

    def __init__(
        self,
        side: int = 224,
        patch: int = 16,
        width: int = 768,
        layers: int = 12,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        heads = max(1, width // 64)
        self.layers = nn.Sequential(*(Layer(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (N, 3, side, side) → scores (N, classes)."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return cast(torch.Tensor, self.head(self.norm(self.layers(x))[:, 0]))


class ConvNeXtBlock(nn.Module):
    """A depthwise 7x7, a norm over the channels, and two linear layers, scaled and added."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(c, c, 7, padding=3, groups=c)
        self.norm = nn.LayerNorm(c, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c))
        self.scale = nn.Parameter(torch.full((c, 1, 1), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → the same."""
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.scale * self.mlp(self.norm(y)).permute(0, 3, 1, 2)
        return x + cast(torch.Tensor, y)


class ConvNeXt(nn.Module):
    """Images (N, 3, H, W) → scores, by stages of blocks with a strided convolution before each."""

    def __init__(
        self,
        widths: Sequence[int] = (96, 192, 384, 768),
        blocks: Sequence[int] = (3, 3, 9, 3),
        classes: int = 1000,
    ) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        c = 3
        for place, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            step = 4 if place == 0 else 2
            parts += [
                nn.Conv2d(c, width, step, step),
                *(ConvNeXtBlock(width) for _ in range(count)),
            ]
            c = width
        self.stages = nn.Sequential(*parts)
        self.norm, self.head = nn.LayerNorm(c), nn.Linear(c, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (N, 3, H, W) → scores (N, classes)."""
        return cast(torch.Tensor, self.head(self.norm(self.stages(x).mean((2, 3)))))


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model, for inference, with numbers as a trained one has some in its batch and group
    norms, and in weights that begin as zeros."""
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: torch.Tensor | None, low: float, high: float) -> None:
        assert tensor is not None
        with torch.no_grad():
            tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))

    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            fill(module.running_mean, -0.2, 0.2)
            fill(module.running_var, 0.7, 1.3)
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)) and module.affine:
            fill(module.weight, 0.7, 1.3)
            fill(module.bias, -0.2, 0.2)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            fill(parameter, -0.05, 0.05)
    return model.eval()


# -- what is measured ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """A model to measure: how it is made, and the shape of its input, which is images, or whole
    numbers below ``tokens``."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0

    def example(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """An input."""
        if self.tokens:
            return torch.randint(self.tokens, self.shape, device=device)
        x = torch.randn(self.shape, device=device).to(dtype)
        return x.contiguous(memory_format=torch.channels_last)


def of_torchvision(name: str) -> nn.Module:
    """torchvision's model of that name, with random weights; of segmentation the main result."""
    vision: Any = importlib.import_module("torchvision.models")
    if hasattr(vision.segmentation, name):
        made = getattr(vision.segmentation, name)(weights=None, weights_backbone=None)
        return _Main(made)
    return cast(nn.Module, getattr(vision, name)(weights=None))


class _Main(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (N, 3, H, W) → scores (N, classes, H, W)."""
        return cast(torch.Tensor, self.model(x)["out"])


def has_torchvision() -> bool:
    """Whether torchvision can be imported, with its models."""
    try:
        importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError):
        return False
    return True


WHOLE = (
    Whole("ResNet-50 batch 32, 224", resnet50, (32, 3, 224, 224)),
    Whole("ResNet-50 batch 1, 224", resnet50, (1, 3, 224, 224)),
    Whole("DeepLabV3-ResNet-50 batch 4, 512", deeplab_resnet50, (4, 3, 512, 512)),
    Whole("U-Net batch 8, 256", UNet, (8, 3, 256, 256)),
    Whole("Latent decoder batch 1, 64 to 512", LatentDecoder, (1, 4, 64, 64)),
    Whole("GPT 12 x 768 batch 8, 512", GPT, (8, 512), tokens=50304),
)
TORCHVISION = tuple(
    Whole(f"torchvision {name} batch {shape[0]}, {shape[2]}", partial(of_torchvision, name), shape)
    for name, shape in (
        ("resnet18", (32, 3, 224, 224)),
        ("resnet50", (32, 3, 224, 224)),
        ("deeplabv3_resnet50", (4, 3, 512, 512)),
        ("fcn_resnet50", (4, 3, 512, 512)),
        ("convnext_tiny", (32, 3, 224, 224)),
        ("vit_b_16", (32, 3, 224, 224)),
        ("swin_t", (32, 3, 224, 224)),
        ("swin_v2_t", (32, 3, 256, 256)),
        ("maxvit_t", (32, 3, 224, 224)),
    )
)
