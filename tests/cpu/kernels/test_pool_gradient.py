"""Kernels of gradients of max pools by patches, run on the CPU against torch's in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.errors import GraphError, NotSupported
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns, pool_gradient
from cudnngraph.kernels.pool_gradient import Patches
from cudnngraph.kernels.tape import Refused
from tests import host_kernels, numerics

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPE = (2, 8, 9, 14)


def pool(
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = BF16,
    layout: str = "channels_last",
    behind: bool = True,
    **attrs: Any,
) -> GraphSpec:
    """The gradient of a max pool; of a relu before it, with ``behind``."""
    attrs = {"kernel_size": 3, "stride": 2, "padding": 1, **attrs}
    g = cg.Graph("forward")
    y = g.max_pool(g.input("x", shape, dtype, layout=layout), **attrs)
    g = cg.Graph("gradient")
    dy = g.input("dy", y.shape, dtype, layout=layout)
    x = g.input("x", shape, dtype, layout=layout)
    dx = g.max_pool_backward(dy, x, **attrs)
    g.output("dx", g.relu_backward(dx, x) if behind else dx)
    return g.spec()


def tied(spec: GraphSpec, seed: int = 0, special: bool = False) -> list[torch.Tensor]:
    """Inputs of few values: zeros of both signs; NaN and infinities too, if they are wanted."""
    made = torch.Generator().manual_seed(seed)
    dy, x = (spec.tensors[name].empty("cpu") for name in spec.inputs)
    dy.copy_(torch.randn(dy.shape, generator=made))
    x.copy_(torch.randn(x.shape, generator=made).mul(2).round())
    some = torch.rand(x.shape, generator=made)
    x[some < 0.3] = -0.0
    x[some > 0.6] = 0.0
    if special:
        for low, value in ((0.9, float("nan")), (0.8, float("-inf")), (0.75, float("inf"))):
            x[(some > low) & (some < low + 0.06)] = value
        x[0] = float("-inf")
        x[0, :, 3, 4] = -1.0
    return [dy, x]


def by_torch(spec: GraphSpec, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Torch's own gradient, in float64."""
    node = next(node for node in spec.nodes if node.op == "max_pool_backward")
    attrs = dict(node.attrs)
    there = x.double().contiguous().requires_grad_()
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    y = F.max_pool2d(there, **{name: attrs[name] for name in names})
    (dx,) = torch.autograd.grad(y, there, dy.double().contiguous())
    if any(node.op == "relu_backward" for node in spec.nodes):
        dx = torch.where(x.double() > 0, dx, 0.0)
    return dx


def check(spec: GraphSpec, patches: Patches, inputs: list[torch.Tensor]) -> None:
    """Run a region by a schedule, and compare it with torch."""
    source = patterns.source(spec, patterns.choice_of(patches))
    out = spec.tensors["dx"].empty("cpu").fill_(7)
    host_kernels.run(source, [*inputs, out])
    want = by_torch(spec, *inputs)
    bound = numerics.bound(inputs[0].dtype, out.dtype)
    assert numerics.relative_error(out, want) <= bound, (patches, source.text[-6000:])
    # Where torch finds no maximum there is exactly none.
    assert torch.equal(out == 0, want == 0), patches


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("special", [False, True], ids=["ties", "nan"])
def test_ties_are_torchs(layout: str, dtype: torch.dtype, special: bool) -> None:
    spec = pool(dtype=dtype, layout=layout, behind=not special)
    for patches in pool_gradient.patches(spec, 4)[:3]:
        check(spec, patches, tied(spec, special=special))


@pytest.mark.parametrize("seed", range(12))
def test_windows_of_many_kinds(seed: int) -> None:
    rng = random.Random(seed)
    attrs: dict[str, Any] = {}
    while True:
        kernel = (rng.randint(1, 5), rng.randint(1, 4))
        attrs = {
            "kernel_size": kernel,
            "stride": (rng.randint(1, 3), rng.randint(1, 4)),
            "padding": tuple(rng.randint(0, size // 2) for size in kernel),
            "dilation": (rng.randint(1, 2), rng.randint(1, 2)),
            "ceil_mode": rng.random() < 0.5,
        }
        shape = (
            rng.randint(1, 2),
            rng.choice([1, 3, 4, 8]),
            rng.randint(7, 12),
            rng.randint(7, 15),
        )
        layout, dtype = rng.choice(["channels_last", "contiguous"]), rng.choice([BF16, F16, F32])
        try:
            spec = pool(shape, dtype, layout, rng.random() < 0.5, **attrs)
            every = pool_gradient.patches(spec, 4)
            break
        except (GraphError, Refused):
            continue
    check(spec, every[0], tied(spec, seed))
    check(spec, every[-1], tied(spec, seed, special=True) if len(spec.nodes) == 1 else tied(spec))


def test_a_gradient_that_is_computed_too() -> None:
    g = cg.Graph("computed")
    small, large = (2, 8, 5, 6), (2, 8, 9, 12)
    dy = g.input("dy", small, BF16, layout="channels_last")
    x = g.input("x", large, BF16, layout="channels_last")
    scale = g.input("s", (1, 8, 1, 1), BF16)
    dx = g.max_pool_backward(g.mul(dy, scale), x, kernel_size=3, stride=2, padding=1)
    g.output("dx", dx)
    spec = g.spec()
    patches = pool_gradient.patches(spec, 4)[0]
    inputs = [spec.tensors[name].empty("cpu").normal_() for name in spec.inputs]
    out = spec.tensors["dx"].empty("cpu").fill_(7)
    host_kernels.run(patterns.source(spec, patterns.choice_of(patches)), [*inputs, out])
    there = inputs[1].double().requires_grad_()
    y = F.max_pool2d(there, 3, 2, 1)
    (want,) = torch.autograd.grad(y, there, inputs[0].double() * inputs[2].double())
    assert numerics.relative_error(out, want) <= numerics.bound(BF16, out.dtype)


def test_by_rule_an_image_has_patches_and_reads_each_element_about_once() -> None:
    spec = pool((64, 64, 112, 112))
    patches = patterns.schedule_of(patterns.by_rule(spec, 132))
    assert isinstance(patches, Patches)
    region = pool_gradient.region_of(spec)
    down, right = region.side(0, patches.patch_high), region.side(1, patches.patch_wide)
    read = len(down.places) * len(right.places)
    assert read <= 2.5 * patches.patch_high * patches.patch_wide


def test_what_no_patch_is_of_is_left_to_rows() -> None:
    g = cg.Graph("adaptive")
    dy = g.input("dy", (2, 8, 3, 4), BF16, layout="channels_last")
    x = g.input("x", (2, 8, 9, 14), BF16, layout="channels_last")
    g.output("dx", g.adaptive_max_pool_backward(dy, x, output_size=(3, 4)))
    with pytest.raises(Refused, match="not those of a pool"):
        pool_gradient.region_of(g.spec())
    assert not isinstance(patterns.schedule_of(patterns.by_rule(g.spec(), 4)), Patches)


@pytest.mark.parametrize("patches", [Patches(3, 4, 4), Patches(2, 3, 4), Patches(2, 4, 512)])
def test_a_schedule_of_another_region_is_refused(patches: Patches) -> None:
    with pytest.raises(NotSupported, match=r"lanes|multiple|many elements"):
        patterns.source(pool(), patterns.choice_of(patches))
