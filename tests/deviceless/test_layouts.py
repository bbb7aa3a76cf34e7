"""Layouts of whole models as they are planned for an H200, generated kernels among the steps."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from cudnngraph.explain.offline import PlannedStep
from cudnngraph.models import export
from cudnngraph.models.convert import convert
from tests.cpu.rewrite.test_row_strides import Encoder
from tests.models import ChannelAttention

pytestmark = pytest.mark.generated

VIEWS = {"reshape", "transpose", "permute", "slice", "concat"}


def planned(model: nn.Module, *shape: int, channels_last: bool = True) -> list[PlannedStep]:
    """The steps of a model in float16 that run, as it is imported for a GPU."""
    made = export.export(model.half().eval(), (torch.zeros(shape).half(),))
    imported = convert(
        made.module,
        made.constants,
        made.placeholders,
        channels_last=channels_last,
        on_gpu=True,
        kernels=True,
    )
    assert imported.spec is not None
    steps = cg.explain(imported.spec).steps
    return [step for step in steps if step.refusals or not set(step.ops) <= VIEWS]


def kinds(steps: list[PlannedStep]) -> Counter[str]:
    return Counter(f"{' '.join(step.ops)}: {step.runs_on}" for step in steps)


def test_a_residual_stream_behind_convolutions_of_a_signal_lies_in_rows(driver: None) -> None:
    steps = planned(Encoder(2), 2, 4, 6, channels_last=False)
    by_rows = [step for step in steps if {"matmul", "layer_norm"} & set(step.ops)]
    counts = Counter(op for step in by_rows for op in step.ops)
    assert (counts["matmul"], counts["layer_norm"]) == (4, 3)
    for step in by_rows:
        tensors = [step.spec.tensors[name] for name in (*step.spec.inputs, *step.spec.outputs)]
        assert all(form.stride[-1] == 1 for form in tensors if len(form.shape) == 3), step.ops
    assert not any(step.runs_on == "torch" for step in steps)


class Stem(nn.Module):
    """Convolutions with padding behind an image alone, before a pooling that pads too."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv2d(3, 32, 3, 2), nn.Conv2d(32, 32, 3, 2, groups=32), nn.Conv2d(32, 64, 3, 2)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = F.silu(conv(F.pad(x, (0, 1, 0, 1))))
        return F.avg_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2)


def test_zeros_around_images_are_padding_and_copied_in_their_layout(driver: None) -> None:
    steps = planned(Stem(), 2, 3, 64, 64)
    assert kinds(steps) == {
        "conv bias silu: cuDNN": 2,
        "conv bias silu: kernel": 1,
        "cast expand: kernel": 2,  # into their slices of what the pooling reads, as the convolution
        "conv: kernel": 1,  # the pooling
    }
    for step in steps:
        forms = [step.spec.tensors[name] for name in (*step.spec.inputs, *step.spec.outputs)]
        assert all(1 in (f.shape[1], f.stride[1]) for f in forms if len(f.shape) == 4), step.ops


class Tokens(nn.Module):
    """A depthwise convolution between two projections of tokens, as SegFormer has it."""

    def __init__(self, features: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, 2 * features), nn.Linear(2 * features, features)
        self.conv = nn.Conv2d(2 * features, 2 * features, 3, padding=1, groups=2 * features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).transpose(1, 2)
        y = self.conv(y.reshape(*y.shape[:2], 8, 8)).flatten(2).transpose(1, 2)
        z: torch.Tensor = self.down(F.gelu(y))
        return z


def test_the_activation_of_a_convolution_seen_as_tokens_is_part_of_its_kernel(driver: None) -> None:
    steps = planned(Tokens(), 2, 64, 32)
    assert [" ".join(step.ops) for step in steps] == ["matmul add", "conv bias gelu", "matmul add"]
    assert [step.runs_on for step in steps] == ["cuDNN", "kernel", "cuDNN"]


class LinearAttention(nn.Module):
    """Attention without a softmax, its products in float32, as EfficientViT has it."""

    def __init__(self, heads: int = 2, features: int = 16) -> None:
        super().__init__()
        self.heads, self.features = heads, features
        self.qkv = nn.Conv2d(heads * features, 3 * heads * features, 1)
        self.out = nn.Conv2d(heads * features, heads * features, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images, _, high, wide = x.shape
        qkv = self.qkv(x).reshape(images, self.heads, 3 * self.features, high * wide)
        q, k, v = qkv.transpose(-1, -2).chunk(3, -1)
        q, k = F.relu(q).float(), F.relu(k).float()
        v = F.pad(v, (0, 1), value=1.0).float()
        o = q @ (k.transpose(-1, -2) @ v)
        o = (o[..., :-1] / (o[..., -1:] + 1e-6)).to(x.dtype)
        y: torch.Tensor = self.out(o.transpose(-1, -2).reshape(x.shape))
        return y


def test_products_in_float32_of_heads_copy_nothing(driver: None) -> None:
    """torch multiplies batches that are one in memory, and copies others."""
    steps = planned(LinearAttention(), 2, 32, 8, 8)
    products = [step.spec for step in steps if step.ops == ("matmul",)]
    assert len(products) == 2
    for spec in products:
        for form in (spec.tensors[name] for name in (*spec.inputs, *spec.outputs)):
            assert form.dtype == torch.float32
            assert form.stride[0] == form.stride[1] * form.shape[1]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cosines", [False, True])
def test_attention_over_channels_is_products_and_kernels(
    cosines: bool, fused: bool, driver: None
) -> None:
    """196 pixels are no head dim of cuDNN's attention, and lie across those of a head."""
    steps = planned(ChannelAttention(4, 48, cosines=cosines, fused=fused), 8, 196, 192)
    assert {step.runs_on for step in steps} == {"cuDNN", "kernel"}
    found = kinds(steps)
    assert found.total() == 8, found
    assert sum(count for kind, count in found.items() if kind.startswith("matmul")) == 4
    assert sum(count for kind, count in found.items() if "softmax" in kind) == 1


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("width", [36, 196, 320, 512])
def test_attention_of_any_head_dim_has_no_torch_step(
    width: int, across: bool, driver: None
) -> None:
    for length in (48, 2048):
        stride = (4 * length * width, length * width, 1, length) if across else None
        g = cg.Graph("wide")
        shape = (2, 4, length, width)
        q, k, v = (g.input(name, shape, torch.float16, stride=stride) for name in "qkv")
        g.output("y", g.sdpa(q, k, v))
        steps = [step for step in cg.explain(g).steps if not set(step.ops) <= VIEWS - {"slice"}]
        assert {step.runs_on for step in steps} <= {"cuDNN", "kernel"}, [s.ops for s in steps]
        products = any("softmax" in step.ops for step in steps)
        assert products == (length == 48 and (across or width % 8 > 0))
