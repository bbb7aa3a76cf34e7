"""Reductions of generated kernels on the GPU: long rows at any place, norms of batches."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import cudnngraph as cg
from cudnngraph.executor import reference
from tests import numerics

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def compiled(g: cg.Graph, **options: object) -> cg.Executable:
    made: cg.Executable = g.compile("cuda", kernels=True, **options)  # type: ignore[arg-type]
    assert {step.kind for step in made.steps} == {"kernel"}
    return made


@pytest.mark.parametrize("tune", ["heuristic", "autotune"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("extent", [50257, 50304, 128256])
def test_long_rows_with_nan_and_infinities(extent: int, dtype: torch.dtype, tune: str) -> None:
    torch.manual_seed(0)
    x = 4.0 * torch.randn(300, extent, device="cuda")
    x[1] = -math.inf
    x[2], x[2, 7] = -math.inf, 1.0
    x[3, 9], x[4, 11] = math.inf, math.nan
    x = x.to(dtype)
    classes = torch.randint(extent, (300,), device="cuda")
    g = cg.Graph("rows")
    value, t = g.input("x", like=x), g.input("t", like=classes)
    y = g.log_softmax(value, 1)
    for name, each in (("z", g.nll_loss(y, t, "none")), ("p", g.softmax(value, 1)), ("y", y)):
        g.output(name, each)
    exe = g.compile("cuda", kernels=True, tune=tune, budget_s=2.0)

    def eager(x: torch.Tensor) -> list[torch.Tensor]:
        y = F.log_softmax(x, 1)
        return [F.nll_loss(y, classes, reduction="none"), x.softmax(1), y]

    for made, exact, theirs in zip(exe(x, classes), eager(x.double()), eager(x), strict=True):
        numerics.check(made, exact, dtype, theirs, terms=extent)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("shape", [(16, 256, 28, 28), (8, 64, 56, 56), (32, 2048, 7, 7)])
def test_norms_of_batches_by_new_data_at_each_call(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Of other data at each call, one behind the other and in a CUDA graph."""
    g = cg.Graph("norms")
    dy, x = (g.input(name, shape, dtype, layout="channels_last") for name in ("dy", "x"))
    vectors = [g.input(name, shape[1:2], F32) for name in ("w", "m", "i")]
    for name, made in zip("xwb", g.batch_norm_backward(dy, x, *vectors), strict=True):
        g.output(f"d{name}", made)
    g.output("y", g.batch_norm_train(x, *vectors[:2])[0])
    exe, spec = compiled(g), g.spec()
    given = {
        name: spec.tensors[name].empty("cuda").copy_(torch.rand(spec.tensors[name].shape))
        for name in spec.inputs
    }
    outs = {name: spec.tensors[name].empty("cuda") for name in spec.outputs}
    calls = [exe.bind(**given, **outs), exe.capture(**given, **outs)]
    for number in range(8):
        given["x"].copy_(torch.randn(shape, device="cuda") + number)
        given["dy"].copy_(torch.randn(shape, device="cuda") - number)
        calls[number % 2]()
        inputs = list(given.values())
        exact, theirs = reference.run(spec, inputs, torch.float64), reference.run(spec, inputs)
        for made, want, other in zip(outs.values(), exact, theirs, strict=True):
            numerics.check(made, want, dtype, other, terms=shape[0] * shape[2] * shape[3])
