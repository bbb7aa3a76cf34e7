"""Which poolings cuDNN's own call is for, and what becomes of those that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph import eager
from cudnngraph.backend import pooling
from cudnngraph.ir import TensorSpec, channels_last_strides, contiguous_strides

F16 = torch.float16
WINDOW: dict[str, Any] = {
    "kernel_size": (3, 3),
    "stride": (2, 2),
    "padding": (1, 1),
    "dilation": (1, 1),
    "ceil_mode": False,
}


def image(*shape: int, dtype: torch.dtype = F16, last: bool = True) -> TensorSpec:
    strides = channels_last_strides(shape) if last else contiguous_strides(shape)
    return TensorSpec("x", shape, strides, dtype)


def like(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec("x", tuple(tensor.shape), tensor.stride(), tensor.dtype)


@pytest.mark.parametrize("last", [True, False])
def test_images_of_both_layouts_are_taken(last: bool) -> None:
    x, y = image(2, 8, 16, 16, last=last), image(2, 8, 8, 8, last=last)
    assert pooling.takes("max_pool", WINDOW, x, y)
    volume = {name: 3 * value[:1] for name, value in WINDOW.items() if isinstance(value, tuple)}
    x, y = image(2, 8, 6, 6, 6, last=last), image(2, 8, 3, 3, 3, last=last)
    assert pooling.takes("max_pool", volume, x, y)


def test_slices_of_channels_are_taken() -> None:
    wide = torch.empty(2, 24, 16, 16, dtype=F16).to(memory_format=torch.channels_last)
    assert pooling.takes("max_pool", WINDOW, like(wide[:, 8:16]), image(2, 8, 8, 8))
    assert pooling.takes("max_pool", WINDOW, image(2, 8, 32, 32), like(wide[:, 8:16]))


def test_strides_of_extents_of_one_are_those_of_the_layout() -> None:
    x = TensorSpec("x", (1, 8, 16, 1), (7, 1, 8, 3), F16)
    assert pooling._strides(x) == [[128, 1, 8, 8]]
    assert pooling._strides(TensorSpec("x", (1, 1, 4, 4), (16, 16, 4, 1), F16)) == [[16, 1, 4, 1]]


@pytest.mark.parametrize(
    ("attrs", "x", "y"),
    [
        ({"dilation": (2, 1)}, image(2, 8, 16, 16), image(2, 8, 7, 8)),
        ({}, image(2, 8, 16, 16), image(2, 8, 9, 9)),  # ceil_mode: windows over the end
        ({}, image(2, 8, 16, 16, dtype=torch.float64), image(2, 8, 8, 8, dtype=torch.float64)),
        ({}, image(2, 8, 16, 16), image(2, 8, 8, 8, dtype=torch.float32)),
        ({}, image(0, 8, 16, 16), image(0, 8, 8, 8)),
        ({}, image(2, 8, 16, 16), image(2, 8, 8, 8, last=False)),
        ({}, TensorSpec("x", (2, 8, 16, 16), (0, 1, 128, 8), F16), image(2, 8, 8, 8)),
        ({}, TensorSpec("x", (2, 8, 16, 16), (2048, 256, 1, 16), F16), image(2, 8, 8, 8)),
        ({}, TensorSpec("x", (2, 8, 16, 16), (4096, 2, 256, 16), F16), image(2, 8, 8, 8)),
        ({}, image(2**14, 8, 128, 128), image(2**14, 8, 64, 64)),  # strides are 32 bits wide
    ],
)
def test_what_it_is_not_for_stays_torchs(
    attrs: dict[str, Any], x: TensorSpec, y: TensorSpec
) -> None:
    assert not pooling.takes("max_pool", {**WINDOW, **attrs}, x, y)


def test_other_ops_are_not_taken() -> None:
    x, y = image(2, 8, 16, 16), image(2, 8, 8, 8)
    assert not pooling.takes("avg_pool", {**WINDOW, "count_include_pad": True}, x, y)


@pytest.mark.parametrize("does", [True, False])
def test_what_cudnn_refuses_is_torchs_again(monkeypatch: pytest.MonkeyPatch, does: bool) -> None:
    def stands_in(attrs: Any, x: TensorSpec, y: TensorSpec) -> pooling.Pooling:
        def pool(image: torch.Tensor, out: torch.Tensor) -> bool:
            if does:
                out.fill_(7.0)
            return does

        return pool

    monkeypatch.setattr(pooling, "pooling", stands_in)
    x = torch.randn(2, 8, 16, 16)
    g = cg.Graph("pool")
    g.output("y", g.max_pool(g.input("x", like=x), 3, stride=2, padding=1))
    out = torch.empty(2, 8, 8, 8)
    rule = eager._rule(g.spec().nodes[0], g.spec(), torch.device("cuda", 0))
    assert rule is not None
    rule([x], dict(g.spec().nodes[0].attrs), out)
    want = torch.full_like(out, 7.0) if does else F.max_pool2d(x, 3, 2, 1)
    assert torch.equal(out, want)
