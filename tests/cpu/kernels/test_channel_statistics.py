"""Statistics of channels whose spread is small beside their mean, in kernels that write x too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cudnngraph as cg
from cudnngraph.graph.value import Value
from cudnngraph.kernels import patterns
from tests import host_kernels, numerics

SHAPE = (3, 8, 4, 4)
NARROW = (torch.bfloat16, torch.float16)
Norm = Callable[[cg.Graph, Value], tuple[Value, Value]]


def _batch(g: cg.Graph, x: Value) -> tuple[Value, Value]:
    one, zero = (g.input(name, SHAPE[1:2], torch.float32) for name in ("one", "zero"))
    return g.batch_norm_train(x, one, zero)[1:3]


def _batch_of_instances(g: cg.Graph, x: Value) -> tuple[Value, Value]:
    images = (1, SHAPE[0] * SHAPE[1], *SHAPE[2:])
    one, zero = (g.input(name, images[1:2], torch.float32) for name in ("one", "zero"))
    return g.batch_norm_train(g.reshape(x, images), one, zero)[1:3]


def _instance(g: cg.Graph, x: Value) -> tuple[Value, Value]:
    return g.instance_norm(x, return_stats=True)[1:]


def _group(g: cg.Graph, x: Value) -> tuple[Value, Value]:
    shift, inverse = g.group_affine(g.cast(x, torch.float32), SHAPE[1])
    return g.neg(shift), inverse


NORMS: dict[str, tuple[Norm, tuple[int, ...]]] = {
    "batch": (_batch, (0, 2, 3)),
    "batch of instances": (_batch_of_instances, (2, 3)),
    "instance": (_instance, (2, 3)),
    "group of one": (_group, (2, 3)),
}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_they_are_of_what_is_written(name: str, dtype: torch.dtype) -> None:
    """A gradient reads that beside them: of another mean, the sums of a channel do not cancel."""
    norm, dims = NORMS[name]
    g = cg.Graph("norm")
    x = g.add(g.input("a", SHAPE, dtype), g.input("b", SHAPE, dtype))
    for each, value in zip(("x", "mean", "inverse"), (x, *norm(g, x)), strict=True):
        g.output(each, value)
    spec = g.spec()
    given = {"a": torch.randn(SHAPE) / 8, "b": torch.full(SHAPE, 33.0)}
    given |= {"one": torch.ones(64), "zero": torch.zeros(64)}
    inputs = [
        given[each][: form.shape[0]].to(form.dtype)
        for each, form in ((each, spec.tensors[each]) for each in spec.inputs)
    ]
    outs = [spec.tensors[each].empty("cpu") for each in spec.outputs]
    host_kernels.run(patterns.source(spec, patterns.by_rule(spec, 4)), [*inputs, *outs])
    written = outs[0].double()
    wanted = written.mean(dims), (written.var(dims, correction=0) + 1e-5).rsqrt()
    for mine, exact in zip(outs[1:], wanted, strict=True):
        assert mine.dtype == torch.float32
        numerics.check(mine.flatten(), exact.flatten(), torch.float32)
