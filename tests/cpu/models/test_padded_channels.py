"""Odd channels between convolutions, which an import for a GPU makes multiples of eight.

``RANDOM_GRAPHS=500 RANDOM_FIRST=1000`` tries so many random models, from that seed on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cudnngraph.device.import_rules import ANY
from cudnngraph.device.rules import following
from cudnngraph.models import bound as bindings
from cudnngraph.models import export
from cudnngraph.models.convert import Imported, convert
from cudnngraph.runtime.compile import compile as compile_spec
from tests import numerics
from tests.models import Of, image

COUNT = int(os.environ.get("RANDOM_GRAPHS", "40"))
FIRST = int(os.environ.get("RANDOM_FIRST", "0"))
CPU = torch.device("cpu")


def imported(model: nn.Module, *x: torch.Tensor, least: int = 2) -> Imported:
    """A model as it is imported for a GPU, with so many channels padded at least."""
    made = export.export(model, x)
    with following((("padded_channels_min", least),)):
        return convert(
            made.module, made.constants, made.placeholders, channels_last=True, on_gpu=True
        )


def widths(found: Imported) -> list[int]:
    """The channels that each convolution makes, in order."""
    spec = found.spec
    assert spec is not None
    convolutions = (node for node in spec.nodes if node.op in ("conv", "conv_transpose"))
    return [spec.tensors[node.results[0]].shape[1] for node in convolutions]


def same(model: nn.Module, found: Imported, *x: torch.Tensor) -> None:
    """Assert that an import gives what the model does in float64."""
    assert found.spec is not None
    ours = bindings.Bound(found, compile_spec(found.spec, "cpu"), CPU)
    with torch.no_grad():
        result, want = ours.run(list(x))[0], model.double()(*(each.double() for each in x))
    assert result.shape == want.shape
    numerics.check(result, want, torch.float16, terms=512)


def conv(inputs: int, outputs: int, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, **options)


def parts(*modules: nn.Module) -> dict[str, nn.Module]:
    """Modules by the names a, b, c and so on."""
    return dict(zip("abcd", modules, strict=False))


class Squeezed(nn.Module):
    """Squeeze and excitation around channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = conv(channels, 3, 1), conv(3, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "a chain": (lambda: nn.Sequential(conv(8, 18), nn.ReLU(), conv(18, 16)), [24, 16]),
    "norms": (
        lambda: nn.Sequential(
            *(conv(8, 18, bias=False), nn.BatchNorm2d(18), nn.SiLU(), conv(18, 18)),
            *(nn.MaxPool2d(2), nn.BatchNorm2d(18), nn.GELU(), conv(18, 8)),
        ),
        [24, 24, 8],
    ),
    "depthwise": (
        lambda: nn.Sequential(conv(8, 18), conv(18, 18, groups=18), nn.Hardswish(), conv(18, 8)),
        [24, 24, 8],
    ),
    "squeeze": (lambda: nn.Sequential(conv(8, 20), Squeezed(20), conv(20, 8)), [24, 8, 24, 8]),
    "transposed": (
        lambda: nn.Sequential(
            conv(8, 18), nn.ConvTranspose2d(18, 10, 2, stride=2), nn.PReLU(10), conv(10, 8)
        ),
        [24, 16, 8],
    ),
    "residual": (
        lambda: Of(
            lambda m, x: m.d(F.interpolate(m.b(m.a(x).relu()) + m.c(x), scale_factor=2.0)),
            **parts(conv(8, 18), conv(18, 18), conv(8, 18, 1), conv(18, 8)),
        ),
        [24, 24, 24, 8],
    ),
    "side by side": (
        lambda: Of(
            lambda m, x: m.d(m.c(torch.cat([m.a(x).relu(), x, m.b(x)], 1)).relu()),
            **parts(conv(8, 10), conv(8, 3), nn.BatchNorm2d(21), conv(21, 8)),
        ),
        [16, 8, 8],
    ),
    "frames": (
        lambda: nn.Sequential(
            *(conv(8, 18), nn.ZeroPad2d((0, 1, 2, 3)), conv(18, 20)),
            *(nn.ReflectionPad2d(2), nn.ReLU(), nn.ConstantPad2d(1, 2.0), conv(20, 8)),
        ),
        [24, 24, 8],
    ),
    "scaled by channels": (
        lambda: Of(
            lambda m, x: m.b(m.a(x) * torch.arange(18.0).half().view(18, 1, 1).to(x.dtype)),
            **parts(conv(8, 18), conv(18, 8)),
        ),
        [24, 8],
    ),
    "first and last channels": (  # as ReXNet adds
        lambda: Of(
            lambda m, x: m.d(
                m.c(torch.cat([(y := m.b(z := m.a(x)))[:, :18] + z, y[:, 18:]], 1).relu())
            ),
            **parts(conv(8, 18), conv(18, 29), conv(29, 12), conv(12, 8)),
        ),
        [24, 32, 16, 8],
    ),
    "beside what is whole": (
        lambda: Of(
            lambda m, x: m.c((m.a(x) + m.b(x).softmax(1)).relu()),
            **parts(conv(8, 18), conv(8, 18), conv(18, 8)),
        ),
        [24, 18, 8],
    ),
    "in all as it should be": (  # as Res2Net joins
        lambda: Of(
            lambda m, x: m.c(torch.cat([m.a(x), m.b(x), x[:, :6]], 1)),
            **parts(conv(8, 18), conv(8, 8), conv(32, 8)),
        ),
        [24, 8, 8],
    ),
    # What follows has something that takes the channels as they are.
    "a result": (lambda: nn.Sequential(conv(8, 8), conv(8, 21)), [8, 21]),
    "channels around": (
        lambda: Of(
            lambda m, x: m.b(F.pad(m.a(x), (0, 0, 0, 0, 1, 1))),
            **parts(conv(8, 18), conv(20, 8)),
        ),
        [18, 8],
    ),
    "an infinite frame": (
        lambda: Of(
            lambda m, x: m.b(F.max_pool2d(F.pad(m.a(x), (1, 1, 1, 1), value=-torch.inf), 3)),
            **parts(conv(8, 18), conv(18, 8)),
        ),
        [18, 8],
    ),
    "over channels": (
        lambda: nn.Sequential(conv(8, 18), nn.Softmax2d(), conv(18, 8)),
        [18, 8],
    ),
    "group norm": (
        lambda: nn.Sequential(conv(8, 18), nn.GroupNorm(3, 18), conv(18, 8)),
        [18, 8],
    ),
    "a logarithm": (
        lambda: Of(
            lambda m, x: m.b(torch.log(m.a(x).abs() + 1) + 1 / (m.a(x).abs() + 1)),
            **parts(conv(8, 18), conv(18, 8)),
        ),
        [18, 8],
    ),
    "halves": (
        lambda: Of(
            lambda m, x: m.b(torch.mul(*m.a(x).chunk(2, 1))), **parts(conv(8, 36), conv(18, 8))
        ),
        [40, 8],
    ),
    "one channel": (
        lambda: Of(lambda m, x: m.b(x * torch.sigmoid(m.a(x))), **parts(conv(8, 1), conv(8, 8))),
        [1, 8],
    ),
    "single pixels": (
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(8, 18), conv(18, 8)),
        [24, 8],
    ),
    "groups": (lambda: nn.Sequential(conv(8, 18), conv(18, 8, groups=2)), [18, 8]),
    "joined, and a result": (
        lambda: Of(lambda m, x: torch.cat([m.a(x), x], 1), **parts(conv(8, 18))),
        [24],
    ),
}


def settled(model: nn.Module) -> nn.Module:
    """A model in float16 whose norms do something."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn_like(module.running_mean)  # type: ignore[arg-type]
            module.running_var = torch.rand_like(module.running_var) + 0.5  # type: ignore[arg-type]
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.eval().half()


@pytest.mark.parametrize("name", MODELS)
def test_channels_are_padded_where_nothing_takes_them_as_they_are(name: str) -> None:
    torch.manual_seed(0)
    make, wanted = MODELS[name]
    model, x = settled(make()), image(2, 8, 12, 12).half()
    found = imported(model, x)
    assert widths(found) == wanted
    same(model, found, x)


def test_few_channels_and_float32_stay_as_they_are() -> None:
    model, x = nn.Sequential(conv(8, 9), conv(9, 8)).half(), image(2, 8, 12, 12).half()
    assert widths(imported(model, x, least=11)) == [9, 8] != widths(imported(model, x))
    assert widths(imported(model.float(), x.float())) == [9, 8]


def test_a_stem_has_padded_channels_on_both_sides() -> None:
    """An image of three channels gets a fourth, and its convolution more results."""
    torch.manual_seed(0)
    model, x = nn.Sequential(conv(3, 18, bias=False), conv(18, 8)).half(), image(2, 3, 16, 16)
    found = imported(model, x.half())
    assert widths(found) == [24, 8] and len(found.packed) == 1
    same(model, found, x.half())


def test_weights_that_a_model_shares_are_padded_as_each_use_wants() -> None:
    torch.manual_seed(0)
    shared = conv(18, 18)
    model = Of(
        lambda m, x: torch.cat([m.c(m.b(m.a(x))), m.b(m.a(x).softmax(1))], 1),
        **parts(conv(8, 18), shared, conv(18, 8)),
    ).half()
    x = image(2, 8, 12, 12).half()
    found = imported(model, x)
    assert sorted(widths(found)) == [8, 18, 24, 24]
    same(model, found, x)


# -- random models ---------------------------------------------------------------------------------


class Drawn(nn.Module):
    """A random network of branches, whose images all have one size."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, list[int]]] = []
        channels = [draw.choice([8, 10, 16])]
        self.channels = channels[0]
        for _ in range(draw.randint(4, 14)):
            kind = draw.choice(
                ["conv", "conv", "conv", "norm", "each", "act", "add", "cat", "cut", "odd"]
            )
            of = [draw.randrange(len(channels)) for _ in range(draw.randint(1, 3))]
            width = channels[of[0]]
            layer: nn.Module = nn.Identity()
            if kind == "conv":
                made = draw.choice([6, 8, 10, 12, 18, 20, 21])
                layer, width = conv(width, made, draw.choice([1, 3])), made
            elif kind == "norm":
                layer = nn.BatchNorm2d(width)
            elif kind == "each":
                layer = conv(width, width, groups=width)
            elif kind == "act":
                acts = [nn.ReLU(), nn.SiLU(), nn.Sigmoid(), nn.MaxPool2d(3, 1, 1), nn.Hardtanh()]
                layer = draw.choice([*acts, nn.PReLU(width), Squeezed(width)])
            elif kind == "add":
                of = [of[0], *(at for at in of[1:] if channels[at] == width)]
            elif kind == "cat":
                width = sum(channels[at] for at in of)
            elif kind == "cut":
                start, end = sorted((draw.randrange(width), draw.randrange(width)))
                of, width = [of[0], start, draw.choice([end + 1, width])], 0
                width = of[2] - start
            else:
                layer = draw.choice([nn.Softmax2d(), nn.GroupNorm(1, width), nn.Softsign()])
            self.layers.append(layer)
            self.steps.append((kind, of))
            channels.append(width)
        self.last = conv(channels[-1], 8)
        self.more = draw.random() < 0.2  # whether an image inside is a result too

    def forward(self, x: torch.Tensor) -> Any:
        made = [x]
        for layer, (kind, of) in zip(self.layers, self.steps, strict=True):
            if kind == "cut":
                made.append(made[of[0]][:, of[1] : of[2]])
                continue
            given = [made[at] for at in of]
            if kind == "add":
                made.append(sum(given[1:], given[0]) * 0.5)
            elif kind == "cat":
                made.append(torch.cat(given, 1))
            else:
                made.append(layer(given[0]))
        result = self.last(made[-1])
        return torch.cat([result, made[len(made) // 2]], 1) if self.more else result


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_random_models_compute_the_same(seed: int) -> None:
    torch.manual_seed(seed)
    model = settled(Drawn(seed))
    x = image(2, model.channels, 8, 8).half()
    found = imported(model, x)
    same(model, found, x)


def test_random_models_are_padded() -> None:
    some = 0
    for seed in range(12):
        model = settled(Drawn(seed))
        x = image(2, model.channels, 8, 8).half()
        some += widths(imported(model, x)) != widths(imported(model, x, least=ANY))
    assert some > 6
