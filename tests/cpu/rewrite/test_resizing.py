"""Gradients of resizing by much go through one dim after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.rewrite.resizing import resize_dim_by_dim
from tests import generated, numerics

BF16, F32 = torch.bfloat16, torch.float32
CASES: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((6, 5), (96, 80), {"mode": "bilinear"}),
    ((6, 5), (90, 81), {"mode": "bilinear", "align_corners": True}),
    ((6, 5), (93, 85), {"mode": "bilinear"}),
    ((6, 5), (81, 67), {"mode": "bilinear", "scale_factor": (13.5, 13.5)}),
    ((5, 4), (160, 128), {"mode": "nearest"}),
    ((5, 4), (155, 129), {"mode": "nearest-exact"}),
    ((2, 3, 4), (14, 24, 31), {"mode": "trilinear"}),
    ((1, 4), (9, 200), {"mode": "bilinear"}),
)


def gradient(number: int, dtype: torch.dtype, layout: str) -> cg.Graph:
    """The graph of a gradient from large images to small ones."""
    small, large, attrs = CASES[number]
    g = cg.Graph("gradient")
    dy = g.input("dy", (2, 3, *large), dtype, layout=layout if len(small) == 2 else "contiguous")
    size = {} if "scale_factor" in attrs else {"size": large}
    g.output("dx", g.interpolate_backward(dy, **size, **attrs, input_size=small))
    return g


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_it_is_the_same_gradient(
    number: int, dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = gradient(number, dtype, layout)
    spec: GraphSpec = g.spec()
    seen = resize_dim_by_dim(spec)
    many = [node for node in seen.nodes if node.op == "interpolate_backward"]
    assert len(many) == sum(a != b for a, b in zip(*CASES[number][:2], strict=True))
    assert seen.outputs == spec.outputs
    between = set(seen.tensors) - set(spec.tensors)
    assert {seen.tensors[name].dtype for name in between} == {F32}
    made = generated.install(monkeypatch)
    dy = spec.tensors["dy"].empty("cpu").copy_(torch.randn(spec.tensors["dy"].shape))
    out = g.compile("cpu")(dy=dy)
    assert isinstance(out, torch.Tensor)
    assert sum(node.op == "interpolate_backward" for step in made for node in step.spec.nodes) == (
        len(many)
    )
    (exact,) = reference.run(spec, [dy], torch.float64)
    (theirs,) = reference.run(spec, [dy])
    terms = spec.tensors["dy"].numel // spec.tensors["dx"].numel
    numerics.check(out, exact, dtype, theirs, terms=terms)


@pytest.mark.parametrize(
    ("small", "large", "mode"),
    [((6, 5), (12, 10), "bilinear"), ((6, 5), (6, 800), "bilinear"), ((4, 4), (64, 64), "bicubic")],
)
def test_what_stays_as_it_is(small: tuple[int, ...], large: tuple[int, ...], mode: str) -> None:
    """Small factors, one dim alone, and what no kernel is generated for."""
    g = cg.Graph("gradient")
    dy = g.input("dy", (2, 3, *large), F32)
    g.output("dx", g.interpolate_backward(dy, large, mode=mode, input_size=small))
    spec = g.spec()
    assert resize_dim_by_dim(spec) is spec
