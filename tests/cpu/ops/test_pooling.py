"""Pooling by cuDNN's own call: the images and windows that it takes, and fallbacks for the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.backend import legacy_pooling, libraries
from cudnngraph.executor import torch_steps
from cudnngraph.ir.spec import GraphSpec, TensorSpec, channels_last_strides, contiguous_strides
from cudnngraph.rewrite.annotate import BOUNDED, annotate

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
    assert legacy_pooling.takes("max_pool", WINDOW, x, y)
    volume = {name: 3 * value[:1] for name, value in WINDOW.items() if isinstance(value, tuple)}
    x, y = image(2, 8, 6, 6, 6, last=last), image(2, 8, 3, 3, 3, last=last)
    assert legacy_pooling.takes("max_pool", volume, x, y)


def test_slices_of_channels_are_taken() -> None:
    wide = torch.empty(2, 24, 16, 16, dtype=F16).to(memory_format=torch.channels_last)
    assert legacy_pooling.takes("max_pool", WINDOW, like(wide[:, 8:16]), image(2, 8, 8, 8))
    assert legacy_pooling.takes("max_pool", WINDOW, image(2, 8, 32, 32), like(wide[:, 8:16]))


def test_strides_of_extents_of_one_are_those_of_the_layout() -> None:
    x = TensorSpec("x", (1, 8, 16, 1), (7, 1, 8, 3), F16)
    assert legacy_pooling._strides(x) == [[128, 1, 8, 8]]
    assert legacy_pooling._strides(TensorSpec("x", (1, 1, 4, 4), (16, 16, 4, 1), F16)) == [
        [16, 1, 4, 1]
    ]


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
        # Pixels 54 bytes apart, of which 16 are read.
        ({}, TensorSpec("x", (2, 8, 16, 16), (6912, 1, 432, 27), F16), image(2, 8, 8, 8)),
    ],
)
def test_what_it_is_not_for_stays_torchs(
    attrs: dict[str, Any], x: TensorSpec, y: TensorSpec
) -> None:
    assert not legacy_pooling.takes("max_pool", {**WINDOW, **attrs}, x, y)


def test_other_ops_are_not_taken() -> None:
    x, y = image(2, 8, 16, 16), image(2, 8, 8, 8)
    assert not legacy_pooling.takes("avg_pool", {**WINDOW, "count_include_pad": True}, x, y)


def pool_of(build: Any) -> GraphSpec:
    """The marked graph of a max pooling of what ``build`` makes of an image."""
    g = cg.Graph("pool")
    x = build(g, g.input("x", (2, 8, 16, 16), torch.float32))
    g.output("y", g.max_pool(x, 3, stride=2, padding=1))
    return annotate(g.spec(), deterministic=False)


@pytest.mark.parametrize(
    ("build", "bounded"),
    [
        (lambda g, x: x, False),
        (lambda g, x: g.relu(x), True),
        (lambda g, x: g.max_pool(g.relu(x), 3, 1, 1), True),
        (lambda g, x: g.slice(g.sigmoid(x), 1, 0, 4), True),
        (lambda g, x: g.max_pool(x, 3, 1, 1), False),
        (lambda g, x: g.leaky_relu(x, 0.1), False),
        (lambda g, x: g.relu(x) - x, False),
    ],
)
def test_only_images_without_minus_infinity_are_for_cudnn(build: Any, bounded: bool) -> None:
    (*_, node) = pool_of(build).nodes
    assert node.op == "max_pool" and dict(node.attrs).get(BOUNDED, False) is bounded


@pytest.mark.parametrize("does", [True, False, None])
def test_what_cudnn_refuses_is_torchs_again(
    monkeypatch: pytest.MonkeyPatch, does: bool | None
) -> None:
    def stands_in(attrs: Any, x: TensorSpec, y: TensorSpec) -> legacy_pooling.Pooling | None:
        def pool(image: torch.Tensor, out: torch.Tensor) -> bool:
            if does:
                out.fill_(7.0)
            return bool(does)

        return None if does is None else pool

    monkeypatch.setattr(legacy_pooling, "pooling", stands_in)
    x, out = torch.randn(2, 8, 16, 16), torch.empty(2, 8, 8, 8)
    spec = pool_of(lambda g, x: g.relu(x))
    node = spec.nodes[-1]
    rule = torch_steps._rule(node, spec, torch.device("cuda", 0))
    assert rule is not None
    rule([x], dict(node.attrs), out)
    want = torch.full_like(out, 7.0) if does else F.max_pool2d(x, 3, 2, 1)
    assert torch.equal(out, want)


@pytest.mark.parametrize("copies", [(), ("/a/libcudnn.so.9", "/b/libcudnn.so.9")])
def test_where_it_is_not_clear_which_cudnn_made_the_handle_torch_pools(
    monkeypatch: pytest.MonkeyPatch, copies: tuple[str, ...]
) -> None:
    monkeypatch.setattr(legacy_pooling.env, "frontend", lambda: None)
    monkeypatch.setattr(libraries, "loaded_copies", lambda: {libraries.CUDNN: copies})
    legacy_pooling._library.cache_clear()
    try:
        assert legacy_pooling.pooling(WINDOW, image(2, 8, 16, 16), image(2, 8, 8, 8)) is None
    finally:
        legacy_pooling._library.cache_clear()


class Library:
    """Stands in for cuDNN's: every call gives ``status``."""

    def __init__(self, status: int) -> None:
        self.status = status

    def cudnnGetErrorString(self, status: int) -> bytes:
        return b"what cuDNN says"

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.status


def test_windows_that_cudnn_refuses_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy_pooling, "_library", lambda: Library(2000))
    assert legacy_pooling.pooling(WINDOW, image(2, 8, 16, 16), image(2, 8, 8, 8)) is None


def test_what_does_not_begin_at_16_bytes_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy_pooling, "_library", lambda: Library(0))
    pool = legacy_pooling.pooling(WINDOW, image(2, 8, 16, 16), image(2, 8, 8, 8))
    assert pool is not None
    given, out = torch.empty(2 * 8 * 256 + 1, dtype=F16), torch.empty(2, 8, 8, 8, dtype=F16)
    assert not pool(given[1:], out) and not pool(given, out.flatten()[1:])
