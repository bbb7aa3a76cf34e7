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
