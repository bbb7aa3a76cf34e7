"""Graphs of one op of torch's own, run by each of its generated kernels on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import cudnngraph as cg
from cudnngraph.executor import reference
from cudnngraph.ir.spec import GraphSpec
from cudnngraph.kernels import patterns
from cudnngraph.kernels.source import Source
from tests import generated, host_kernels

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
I64, I32, I8, U8, BOOL = torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool
X, Y, Z = ("tensor", 0), ("tensor", 1), ("tensor", 2)
Given = tuple[tuple[int, ...], torch.dtype, tuple[int, ...] | None]


def graph(
    name: str,
    args: tuple[Any, ...],
    *inputs: Given,
    kwargs: tuple[tuple[str, Any], ...] = (),
    behind: Callable[[cg.Graph, cg.Value], cg.Value] | None = None,
) -> GraphSpec:
    g = cg.Graph("torch_op")
    values = [
        g.input(f"x{n}", shape, dtype, stride=s) for n, (shape, dtype, s) in enumerate(inputs)
    ]
    made = g.aten(values, name, args, kwargs)
    g.output("y", behind(g, made) if behind else made)
    return g.spec()


def some(shape: tuple[int, ...], dtype: torch.dtype, stride: Any, most: int = 4) -> torch.Tensor:
    values = torch.randint(-4, 5, shape).to(dtype)
    if dtype in (I64, I32):
        values = torch.randint(0, most, shape).to(dtype)
    if dtype == BOOL:
        values = torch.rand(shape) < 0.5
    if stride is None:
        return values
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return torch.zeros(extent, dtype=dtype).as_strided(shape, stride).copy_(values)


def sources_of(spec: GraphSpec) -> list[Source]:
    """The kernels of a graph, which are compiled with the next one that is run."""
    choices = patterns.choices(spec, generated.PROCESSORS)
    return [host_kernels.expect(patterns.source(spec, choice)) for choice in choices]


def run(spec: GraphSpec, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What each kernel of a graph makes, by every schedule."""
    found = []
    for source in sources_of(spec):
        (out,) = (spec.tensors[name].empty("cpu") for name in spec.outputs)
        host_kernels.run(source, [*inputs, out])
        found.append(out)
    return found


def same(spec: GraphSpec, inputs: Sequence[torch.Tensor]) -> None:
    (want,) = reference.run(spec, inputs)
    for out in run(spec, inputs):
        assert out.dtype == want.dtype and torch.equal(out, want), (spec, out, want)
