"""Modules of norms, products and blocks on a GPU: against torch autograd at each dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudnngraph as cg
from tests import numerics
from tests.samples import BF16, F16, F32

DTYPES = [F32, F16, BF16]
LAST = torch.channels_last


def separable(**options: Any) -> nn.Module:
    """Smooth, so that no rounding switches a relu in one of the two."""
    smooth = {"activation": "silu", "pointwise_activation": "silu"}
    return cg.FusedDepthwiseSeparable(32, 48, **smooth, **options).to(memory_format=LAST)


# A module, what torch's modules do with its parameters, and the shapes of what it takes.
Module = tuple[Callable[[], nn.Module], Callable[..., Any], tuple[tuple[int, ...], ...]]
MODULES: dict[str, Module] = {
    "layer norm": (lambda: cg.FusedLayerNorm(256), nn.LayerNorm.forward, ((64, 256),)),
    "layer norm of a sum": (
        lambda: cg.FusedLayerNorm(256),
        lambda m, x, z: (nn.LayerNorm.forward(m, x + z), x + z),
        ((4, 32, 256), (4, 32, 256)),
    ),
    "rms norm": (lambda: cg.FusedRMSNorm(256), nn.RMSNorm.forward, ((64, 256),)),
    "rms norm of a sum": (
        lambda: cg.FusedRMSNorm(256),
        lambda m, x, z: (nn.RMSNorm.forward(m, x + z), x + z),
        ((4, 32, 256), (4, 32, 256)),
    ),
    "separable": (
        lambda: separable(norm=None, bias=True),
        lambda m, x: m.to_torch()(x),
        ((4, 32, 14, 12),),
    ),
    "separable by running statistics": (
        lambda: separable(stride=2).eval(),
        lambda m, x: m.to_torch()(x),
        ((4, 32, 14, 12),),
    ),
    "mlp": (
        lambda: cg.FusedMLP(64, 256),
        lambda m, x: m.down_proj(F.gelu(m.up_proj(x))),
        ((4, 32, 64),),
    ),
    "gated mlp": (
        lambda: cg.FusedMLP(64, 256, activation="silu", gated=True, bias=False),
        lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x)),
        ((4, 32, 64),),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_and_its_gradients_are_within_the_policy(name: str, dtype: torch.dtype) -> None:
    make, torchs, shapes = MODULES[name]
    torch.manual_seed(0)
    base = make()
    for parameter in base.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    given = [torch.randn(shape).to(dtype).double() for shape in shapes]
    base = base.to(dtype).double()  # the very numbers that each dtype holds
    grads: list[torch.Tensor] = []

    def results(run: Any, place: str, kind: torch.dtype) -> list[torch.Tensor]:
        model = copy.deepcopy(base).to(place, kind)
        inputs = [x.to(place, kind).requires_grad_() for x in given]
        made = run(model, *inputs)
        outputs = list(made) if isinstance(made, tuple) else [made]
        if not grads:
            grads.extend(torch.randn(y.shape).to(dtype).double() for y in outputs)
        upstream = [grad.to(place, kind) for grad in grads]
        of = [*inputs, *model.parameters()]
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, of, upstream)]

    exact = results(torchs, "cpu", torch.float64)
    theirs = results(torchs, "cuda", dtype)
    ours = results(lambda model, *inputs: model(*inputs), "cuda", dtype)
    for place, (a, b, c) in enumerate(zip(ours, exact, theirs, strict=True)):
        assert a.shape == b.shape and a.dtype == dtype
        error, torch_error = (numerics.relative_error(each, b) for each in (a, c))
        limit = max(
            numerics.TORCH_FACTOR * torch_error, numerics.bound(dtype, terms=given[0].numel())
        )
        assert error <= limit, f"result {place}: {error:.3g} from float64, allowed {limit:.3g}"


def test_adamw_in_place_is_torchs() -> None:
    """Ten steps, params and both averages written over; every element is read before."""
    n = (1 << 20) + 8
    torch.manual_seed(0)
    g = cg.Graph("adamw")
    given = [g.input(name, (n,), F32) for name in ("p", "grad", "m", "v")]
    numbers = [g.input(name, (1,), F32) for name in ("lr", "c1", "c2")]
    for name, value in zip(("p_", "m_", "v_"), g.adamw(*given, *numbers), strict=True):
        g.output(name, value)
    exe = g.compile("cuda")
    assert len(exe.steps) == 1 and exe.steps[0].choice is not None
    theirs = torch.randn(n, device="cuda", dtype=torch.float64, requires_grad=True)
    p = theirs.detach().float()
    theirs.data.copy_(p)
    m, v, grad = (torch.zeros(n, device="cuda") for _ in range(3))
    lr, c1, c2 = (torch.zeros(1, device="cuda") for _ in range(3))
    optimizer = torch.optim.AdamW([theirs], lr=1e-2)
    call = exe.bind(p=p, grad=grad, m=m, v=v, lr=lr, c1=c1, c2=c2, p_=p, m_=m, v_=v)
    for step in range(1, 11):
        grad.normal_()
        theirs.grad = grad.double()
        optimizer.step()
        for tensor, value in ((lr, 1e-2), (c1, 1.0 - 0.9**step), (c2, 1.0 - 0.999**step)):
            tensor.fill_(value)
        call()
    state = optimizer.state[theirs]
    for ours, right in ((p, theirs.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        assert numerics.relative_error(ours, right) < 2e-6


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_pixels_become_images_in_one_plan(dtype: torch.dtype) -> None:
    pixels = torch.randint(0, 256, (4, 64, 96, 3), dtype=torch.uint8, device="cuda")
    mean, std = (
        torch.tensor(v, device="cuda") for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    scale, shift = ((v.expand(96, 3).contiguous()) for v in (1.0 / (255.0 * std), -mean / std))
    g = cg.Graph("pixels")
    x = g.input("x", like=pixels)
    s, b = g.input("s", like=scale), g.input("b", like=shift)
    g.output("y", g.normalize_images(x, s, b), dtype=dtype)
    exe = g.compile("cuda")
    assert [step.choice is None for step in exe.steps if step.spec.nodes[-1].op == "add"] == [False]
    y = exe(x=pixels, s=scale, b=shift)
    want = ((pixels.double() / 255 - mean.double()) / std.double()).permute(0, 3, 1, 2)
    assert y.is_contiguous(memory_format=LAST)
    assert numerics.relative_error(y, want) <= numerics.ROUNDOFF[dtype] * 1.01


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_gelu_behind_a_product_is_gelu_over_its_whole_range(dtype: torch.dtype) -> None:
    """A product with the identity, so that every number of 16 bits is what gelu is of."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cuda").to(torch.int16)
    x = bits.view(dtype).view(1024, 64)
    x = torch.where(x.isfinite(), x, 0)
    w = torch.eye(64, dtype=dtype, device="cuda")
    g = cg.Graph("gelu")
    g.output("y", g.gelu(g.matmul(g.input("x", like=x), g.input("w", like=w))))
    exe = g.compile("cuda")
    assert [step.choice is None for step in exe.steps] == [False]
    wide = x.double()
    want = wide * torch.special.erfc(-wide / 2**0.5) / 2
    error = (exe(x=x, w=w).double() - want).abs()
    rounding = numerics.ROUNDOFF[dtype] * want.abs() + 2.0**-25
    assert float((error - rounding - 2e-6 * wide.abs().clamp_max(20.0)).max()) < 1.1e-5
    strange = torch.tensor([float("inf"), float("nan")], dtype=dtype, device="cuda")
    x[0, :2] = strange  # the product makes NaN of every number in its row
    assert bool(exe(x=x, w=w)[0].isnan().all())


KEPT = {
    "relu": lambda g, x: g.relu(x),
    "leaky_relu": lambda g, x: g.leaky_relu(x, 0.2),
    "steep": lambda g, x: g.leaky_relu(x, 2.0),
    "clamp from 0": lambda g, x: g.clamp(x, 0.0, None),
    "clamp from below 0": lambda g, x: g.clamp(x, -1.5, None),
    "clamp": lambda g, x: g.clamp(x, -0.5, 0.75),
    "clamp above 0": lambda g, x: g.clamp(x, 0.5, 1.5),
    "clamp below 0": lambda g, x: g.clamp(x, -1.5, 0.0),
    "relu6": lambda g, x: g.relu6(2.5 * x),
}


@pytest.mark.parametrize("behind", [False, True], ids=["alone", "product"])
@pytest.mark.parametrize("name", KEPT)
def test_nan_is_kept_and_infinities_are_what_torch_makes_of_them(name: str, behind: bool) -> None:
    """Unlike in cuDNN's larger and smaller of two."""
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([nan, inf, -inf, 1.0, -1.0, 0.0, -2.0, 3.0], device="cuda", dtype=F16)
    x = x.repeat(8).unsqueeze(1).repeat(1, 64)
    w = torch.ones(1, 64, device="cuda", dtype=F16)
    g = cg.Graph("kept")
    given = {"x": x[:, :1].contiguous(), "w": w} if behind else {"x": x}
    values = [g.input(key, like=each) for key, each in given.items()]
    g.output("y", KEPT[name](g, g.matmul(*values) if behind else values[0]))
    exe = g.compile("cuda")
    assert [step.choice is None for step in exe.steps] == [False]
    cpu = g.compile("cpu")(**{key: each.cpu() for key, each in given.items()})
    torch.testing.assert_close(exe(**given).cpu(), cpu, rtol=2e-3, atol=0.0, equal_nan=True)
