"""Cases: inputs, steps on numbered values, and results; read by the graph builder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import cudnngraph as cg
from tests.random_graphs.ops import F32, OPS, Shape, Tensor


@dataclass(frozen=True)
class Given:
    """An input: numbers of about the size ``size``, bools where the dtype says so."""

    name: str
    shape: Shape
    dtype: torch.dtype
    kind: str
    layout: str
    dim: int
    size: float = 1.0
    positive: bool = False

    def tensor(self, seed: int) -> Tensor:
        """On the CPU. What lies between its elements is NaN."""
        gen = torch.Generator().manual_seed(1000 * seed + int(self.name[1:]))
        if self.dtype == torch.bool:
            return torch.rand(self.shape, generator=gen) < 0.7
        values = torch.randn(self.shape, generator=gen, dtype=F32) * self.size
        if self.positive:
            values = values.abs() + 0.5
        values = values.to(self.dtype)
        rank, dim = len(self.shape), self.dim
        if self.layout == "channels_last" and rank >= 3:
            order = (0, *range(2, rank), 1)
            back = [order.index(place) for place in range(rank)]
            return values.permute(order).contiguous().permute(back)
        if self.layout == "permuted":
            order = (*range(dim, rank), *range(dim))
            back = [order.index(place) for place in range(rank)]
            return values.permute(order).contiguous().permute(back)
        if self.layout == "sliced":
            wide = list(self.shape)
            wide[dim] += 3
            memory = torch.full(wide, math.nan, dtype=self.dtype)
            part = memory.narrow(dim, 1, self.shape[dim])
            return part.copy_(values)
        if self.layout == "stepped":
            wide = list(self.shape)
            wide[dim] *= 2
            memory = torch.full(wide, math.nan, dtype=self.dtype)
            part = memory[(slice(None),) * dim + (slice(None, None, 2),)]
            return part.copy_(values)
        if self.layout == "expanded":
            return values.narrow(dim, 0, 1).contiguous().expand(self.shape)
        return values.contiguous()


@dataclass(frozen=True)
class Step:
    """An op of the table on values by their numbers."""

    op: str
    operands: tuple[int, ...]
    attrs: Mapping[str, Any]
    shape: Shape
    terms: int = 1


@dataclass(frozen=True)
class Result:
    """An output: a value, and the dtype and layout it is declared in, if any."""

    value: int
    dtype: torch.dtype | None = None
    layout: str | None = None


@dataclass
class Case:
    """Values are numbered: the inputs first, as they came, and the steps' results."""

    seed: int
    dtype: torch.dtype
    trained: bool
    fused: bool = False
    tf32: bool = False
    values: list[Given | Step] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def inputs(self) -> dict[int, Given]:
        return {at: v for at, v in enumerate(self.values) if isinstance(v, Given)}

    @property
    def steps(self) -> dict[int, Step]:
        return {at: v for at, v in enumerate(self.values) if isinstance(v, Step)}

    @property
    def families(self) -> set[str]:
        return {OPS[step.op].family for step in self.steps.values()}

    @property
    def terms(self) -> int:
        """The longest sum behind an element; a gradient may sum over all of a value."""
        longest = max((step.terms for step in self.steps.values()), default=1)
        if self.trained:
            longest = max(longest, *(math.prod(value.shape) for value in self.values))
        return longest

    def __str__(self) -> str:
        short = str(self.dtype).removeprefix("torch.")
        way = "trained" if self.trained else "fused" if self.fused else "forward"
        lines = [f"seed {self.seed}, {short}, {way}{', TF32' if self.tf32 else ''}"]
        for at, value in enumerate(self.values):
            if isinstance(value, Given):
                kind = str(value.dtype).removeprefix("torch.")
                lines.append(f"  {at}: {value.name} {value.shape} {kind} {value.layout}")
            else:
                attrs = "".join(f", {k}={v}" for k, v in value.attrs.items())
                operands = ", ".join(map(str, value.operands))
                lines.append(f"  {at}: {value.op}({operands}{attrs}) -> {value.shape}")
        return "\n".join([*lines, f"  results {[r.value for r in self.results]}"])

    def tensors(self) -> dict[str, Tensor]:
        return {given.name: given.tensor(self.seed) for given in self.inputs.values()}

    def graph(self, tensors: Mapping[str, Tensor]) -> cg.Graph:
        """Declared for inputs with the strides of ``tensors``."""
        g = cg.Graph(f"random_{self.seed}")
        made: list[Any] = []
        for value in self.values:
            if isinstance(value, Given):
                made.append(g.input(value.name, like=tensors[value.name]))
            else:
                operands = [made[at] for at in value.operands]
                made.append(OPS[value.op].build(g, *operands, **value.attrs))
        for place, result in enumerate(self.results):
            kept: dict[str, Any] = {"dtype": result.dtype} if result.dtype else {}
            kept |= {"layout": result.layout} if result.layout else {}
            g.output(f"y{place}", made[result.value], **kept)
        return g


def widened(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
