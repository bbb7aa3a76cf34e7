"""Random module trees for ``replace``: attention, convolutions in 1 to 3 dims, pools, shared parts.

A tree is made by its seed alone. What ``tests/cpu/nn/test_replace_random.py`` has no words for is
here: modules under several names, frozen norms, hooks, attention of every call, other layouts.

``RANDOM_TREES=2000 pytest tests/cpu/nn/test_replace_trees.py`` makes so many;
``RANDOM_FIRST=123 RANDOM_TREES=1`` that one.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 4
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
ACTS: tuple[Any, ...] = (nn.ReLU, nn.SiLU, nn.GELU, nn.ELU, nn.Tanh, nn.Mish, nn.Hardtanh, nn.CELU)


def image(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rows as the pixels of an image. Contiguous: the gradients of torch's own batch norms are
    wrong for some strides of dims of 1."""
    return rows.unflatten(2, like.shape[2:]).contiguous()


class Heads(nn.Module):
    """Attention as a model writes it, over the pixels of x."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, rng.choice((4, 8)))
        self.many = 2
        self.mask = rng.choice((None, None, "bool", "float", "param", "row"))
        self.causal = self.mask is None and rng.random() < 0.4
        self.dropout = rng.choice((0.0, 0.0, 0.3))
        self.scale = rng.choice((None, 0.3))
        self.gqa = self.kv.out_features == 4 and rng.random() < 0.7
        self.way = rng.choice(("words", "places", "torch"))
        self.bias = nn.Parameter(torch.randn(1, 2, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(2).transpose(1, 2)
        q = self.q(rows).unflatten(2, (self.many, -1)).transpose(1, 2)
        wide = self.kv(rows)
        half = wide.shape[2] // 2
        heads = 1 if self.gqa else self.many
        k, v = (each.unflatten(2, (heads, -1)).transpose(1, 2) for each in wide.split(half, 2))
        if not self.gqa and half == 2:
            q = q[..., :1]
        count = rows.shape[1]
        mask: Any = None
        if self.mask == "bool":
            mask = torch.ones(count, count, dtype=torch.bool, device=x.device).tril(1)
        elif self.mask == "float":
            mask = torch.zeros(count, count, dtype=x.dtype, device=x.device)
        elif self.mask == "param":
            mask = self.bias.expand(1, 2, count, count)
        elif self.mask == "row":
            mask = torch.ones(1, count, dtype=torch.bool, device=x.device)
        p = self.dropout if self.training else 0.0
        if self.way == "places":
            o = F.scaled_dot_product_attention(q, k, v, mask, p, self.causal)
        else:
            run: Any = F.scaled_dot_product_attention
            words = {"dropout_p": p, "is_causal": self.causal, "scale": self.scale}
            words["enable_gqa"] = self.gqa
            o = run(q, k, v, attn_mask=mask, **words)
        y = o.transpose(1, 2).flatten(2).transpose(1, 2)
        return image(y.mean(1, keepdim=True) + rows.transpose(1, 2), x)


class Multihead(nn.Module):
    """torch's own module, called in every way."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.first = rng.random() < 0.7
        options: dict[str, Any] = {"batch_first": self.first, "bias": rng.random() < 0.7}
        if rng.random() < 0.15:
            options["add_bias_kv"] = True
        if rng.random() < 0.15:
            options["add_zero_attn"] = True
        self.attend = nn.MultiheadAttention(WIDTH, 2, rng.choice((0.0, 0.3)), **options)
        self.weights = rng.random() < 0.25
        self.mask = rng.choice((None, None, "causal", "padding", "is_causal"))
        self.cross = rng.random() < 0.15

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(2).transpose(1, 2)
        rows = rows if self.first else rows.transpose(0, 1)
        count = x.flatten(2).shape[2]
        words: dict[str, Any] = {"need_weights": self.weights}
        if self.mask in ("causal", "is_causal"):
            made = torch.ones(count, count, dtype=torch.bool, device=x.device)
            words["attn_mask"] = made.triu(1)
            words["is_causal"] = self.mask == "is_causal"
        elif self.mask == "padding":
            made = torch.zeros(x.shape[0], count, dtype=torch.bool, device=x.device)
            words["key_padding_mask"] = made
        other = rows * 0.5 if self.cross else rows
        y = self.attend(rows, other, other, **words)[0]
        y = y if self.first else y.transpose(0, 1)
        return image(y.transpose(1, 2), x)


def conv(rng: random.Random, dims: int, inner: int = WIDTH, outer: int = WIDTH) -> nn.Module:
    kernel = rng.choice((1, 3))
    kind: Any = TRANSPOSED[dims - 1] if rng.random() < 0.2 else CONVS[dims - 1]
    groups = rng.choice((1, 1, 2, WIDTH)) if inner % WIDTH == 0 else 1
    padding: Any = kernel // 2
    if kind in CONVS and rng.random() < 0.2:
        padding = "same"
    return kind(inner, outer, kernel, padding=padding, groups=groups, bias=rng.random() < 0.6)  # type: ignore[no-any-return]


class Tree(nn.Module):
    """Random children in a random order; some stand under two names or are called twice."""

    def __init__(self, rng: random.Random, dims: int, depth: int = 0) -> None:
        super().__init__()
        self.dims = dims
        self.parts = nn.ModuleList()
        self.steps: list[tuple[str, int, int]] = []
        made: list[tuple[str, nn.Module]] = []
        kind = "conv"
        for at in range(rng.randint(3, 9) if depth == 0 else rng.randint(1, 4)):
            likely = {"conv": ("norm", "norm", "act", "add"), "norm": ("act", "add", "act")}
            every = ("conv", "conv", "norm", "act", "pool", "cat", "heads", "multihead", "tree")
            others = (*every, "again", "down", "kwargs", "split", "sized")
            kind = rng.choice(likely.get(kind, others) if rng.random() < 0.6 else others)
            if kind == "add":
                self.steps.append(("add", -1, rng.randint(0, at)))
                continue
            if kind == "again" and made:
                name, part = rng.choice(made)
            else:
                name = kind if kind != "again" else "act"
                part = self._part(name, rng, depth)
                made.append((name, part))
            self.parts.append(part)
            self.steps.append((name, len(self.parts) - 1, rng.randint(0, at)))
        if made and rng.random() < 0.3:
            self.other_name = rng.choice(made)[1]

    def _part(self, kind: str, rng: random.Random, depth: int) -> nn.Module:
        dims = self.dims
        if kind == "norm":
            norm: Any = NORMS[dims - 1]
            made: nn.Module = norm(
                WIDTH, momentum=rng.choice((0.1, None)), affine=rng.random() < 0.8
            )
            return made
        if kind == "act":
            act: nn.Module = rng.choice(ACTS)()
            return act
        if kind == "cat":
            return conv(rng, dims, 2 * WIDTH)
        if kind == "pool":
            pool: Any = POOLS[dims - 1]
            return pool(3, 1, 1)  # type: ignore[no-any-return]
        if kind == "heads":
            return Heads(rng)
        if kind == "multihead":
            return Multihead(rng)
        if kind == "tree" and depth < 2:
            return Tree(rng, dims, depth + 1)
        if kind == "down":
            some: Any = CONVS[dims - 1]
            norms: Any = NORMS[dims - 1]
            parts = {
                "a": some(WIDTH, WIDTH, 3, 1, 1),
                "n": norms(WIDTH),
                "r": nn.ReLU(inplace=True),
            }
            return nn.Sequential(*parts.values()) if rng.random() < 0.5 else nn.ModuleDict(parts)
        return conv(rng, dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for kind, at, other in self.steps:
            y, b = values[-1], values[other]
            if kind == "add":
                values.append(y + b)
                continue
            part: Any = self.parts[at]
            if kind == "cat":
                y = part(torch.cat((y, b), dim=1))
            elif isinstance(part, nn.ModuleDict):
                y = part["r"](part["n"](part["a"](y)))
            elif kind == "kwargs":
                y = part(input=y)
            elif kind == "split":
                y = part(torch.cat(list(y.chunk(2, 1)), 1))
            elif kind == "sized" and isinstance(part, TRANSPOSED):
                y = part(y, output_size=y.shape[2:])
            else:
                y = part(y)
            values.append(y)
        return values[-1]


def prepared(seed: int) -> tuple[nn.Module, torch.Tensor, random.Random]:
    """A tree and what is done to it before it is replaced, with an input."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dims = rng.choice((1, 2, 2, 2, 3))
    tree: nn.Module = Tree(rng, dims).double()
    last = dims == 2 and rng.random() < 0.3
    # Not of dims of 1 if channels_last: torch's grouped convolutions of float64 then have wrong
    # gradients for weights, unless the strides of those dims are the usual ones.
    sizes = tuple(rng.choice((2, 3, 4) if last else (1, 3, 4)) for _ in range(dims))
    x = torch.randn(rng.choice((2, 3) if last else (1, 2, 3)), WIDTH, *sizes, dtype=torch.float64)
    if last:
        tree = tree.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    for module in tree.modules():
        if isinstance(module, NORMS) and rng.random() < 0.2:
            module.requires_grad_(False)
    if rng.random() < 0.15:
        for parameter in tree.parameters():
            parameter.requires_grad_(rng.random() < 0.5)
    return tree, x, rng
