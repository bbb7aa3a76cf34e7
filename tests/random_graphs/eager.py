"""Cases computed by torch's own functions, in float64 or rounded behind each op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

from tests import numerics
from tests.random_graphs.cases import Case, Given, Step
from tests.random_graphs.ops import F16, F32, F64, OPS, Rounding, Tensor


def sdpa_of_torch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """As a model calls it."""
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=gqa, **options)


class _Rounded(torch.autograd.Function):
    """Rounds a value, and the gradient that comes back through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.rounded = rounded
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.rounded(dy), None


@dataclass(frozen=True)
class Tf32:
    """A way in which tensor cores read float32 operands of matmuls, for which they have 11 bits.

    Kernels round the operands, or leave the lower bits out, which has one sign. ``mixed`` is the
    seed of a choice for each operand; None is the same for all.
    """

    cut: bool = True
    mixed: int | None = None

    def cuts(self, number: int) -> bool:
        """Whether the lower bits of the operand of this number are left out."""
        if self.mixed is None:
            return self.cut
        return Random(f"{self.mixed} {number}").random() < 0.5


class _ReadAsTf32(torch.autograd.Function):
    """A value in TF32's bits, or the gradient that comes back to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: bool, gradient: bool) -> Tensor:
        ctx.cut, ctx.gradient = cut, gradient
        return x.clone() if gradient else _upper_bits(x, cut)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _upper_bits(dy, ctx.cut) if ctx.gradient else dy, None, None


def _read_as_tf32(x: Tensor, cut: bool, gradient: bool) -> Tensor:
    made: Tensor = _ReadAsTf32.apply(x, cut, gradient)  # type: ignore[no-untyped-call]
    return made


def _upper_bits(x: Tensor, cut: bool) -> Tensor:
    bits = x.float().contiguous().view(torch.int32)
    half = 0 if cut else 0xFFF + (bits >> 13 & 1)  # to the nearest, to even if between
    return (bits + half & ~0x1FFF).view(F32).to(F64)


@dataclass
class Eager:
    """A case by torch's functions in float64.

    ``rounding``: "none"; "torch" runs in float32 itself; "nearest" rounds to the dtype of the case
    behind each op; a number is the seed of random relative errors, of what an op of that dtype may
    always be off by; :class:`Tf32` has products read their operands as tensor cores do.
    """

    case: Case
    rounding: str | int | Tf32 = "none"
    doubtful: bool = False  # whether an element is so near a kink that rounding may switch it

    def __post_init__(self) -> None:
        self.coarsest = 0.0  # the unit of an op so far
        self.read = 0  # operands of products so far
        if isinstance(self.rounding, int):
            self.gen = torch.Generator().manual_seed(self.rounding)
        case = self.case
        # A graph that is cut hands 16 bits on, so that only what is one op may be better.
        alone = len(case.steps) == 1
        self.wide = {r.value for r in case.results if alone and r.dtype is not None}

    def rounded(self, x: Tensor, dtype: torch.dtype, unit: float) -> Tensor:
        if self.rounding == "nearest":
            return x.to(dtype).to(F64)
        noise = torch.rand(x.shape, generator=self.gen, dtype=F64) * 2 - 1
        return x * (1.0 + unit * noise)

    def in_tf32(self, step: Step) -> bool:
        return self.case.tf32 and OPS[step.op].family in ("conv", "matmul", "sdpa")

    def unit(self, at: int, step: Step) -> tuple[torch.dtype, float]:
        dtype = F32 if at in self.wide else self.case.dtype
        unit = numerics.floor(self.case.dtype, dtype, terms=step.terms)
        if self.in_tf32(step):
            unit = max(unit, numerics.ROUNDOFF[F16])  # operands of 11 bits, as TF32's are
        return dtype, unit

    def __call__(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        made: list[Tensor] = []
        for at, value in enumerate(self.case.values):
            if isinstance(value, Given):
                made.append(given[value.name])
                if self.rounding == "torch" and made[-1].is_floating_point():
                    made[-1] = made[-1].float()
            else:
                made.append(self.step(at, value, [made[place] for place in value.operands]))
        return [made[result.value] for result in self.case.results]

    def cut(self) -> bool:
        """Whether the next operand is cut off; else it is rounded."""
        assert isinstance(self.rounding, Tf32)
        self.read += 1
        return self.rounding.cuts(self.read)

    def as_read(self, operand: Tensor) -> Tensor:
        """An operand of a product as tensor cores read it."""
        return _read_as_tf32(operand, self.cut(), False) if operand.is_floating_point() else operand

    def step(self, at: int, step: Step, operands: Sequence[Tensor]) -> Tensor:
        """The result of one step."""
        op, (dtype, unit) = OPS[step.op], self.unit(at, step)
        self.coarsest = max(self.coarsest, unit)
        if self.rounding == "none":
            if op.kink is not None:
                far = op.kink(*(o.detach() for o in operands), **step.attrs)
                size = max(float(o.detach().abs().max()) for o in operands)
                near = 16 * self.coarsest * size * math.sqrt(len(self.case.values))
                self.doubtful |= bool((far <= near).any())
            return op.run(*operands, **step.attrs)
        if self.rounding == "torch":
            return op.run(*operands, **step.attrs)
        if isinstance(self.rounding, Tf32):
            if not self.in_tf32(step):
                return op.run(*operands, **step.attrs)
            result = op.run(*map(self.as_read, operands), **step.attrs)
            return _read_as_tf32(result, self.cut(), True)
        if op.inside is None:
            result = op.run(*operands, **step.attrs)
        else:
            inside = _By(self, self.case.dtype, unit, step.terms)
            result = op.inside(inside, *operands, **step.attrs)
        return _By(self, dtype, unit, step.terms)(result)


@dataclass
class _By(Rounding):
    """As :class:`Eager` rounds, for one step."""

    eager: Eager
    dtype: torch.dtype
    unit: float
    terms: int

    def __call__(self, x: Tensor) -> Tensor:
        return self._applied(x, self.dtype, self.unit)

    def fine(self, x: Tensor) -> Tensor:
        return self._applied(x, F32, numerics.floor(F32, F32, terms=self.terms))

    def _applied(self, x: Tensor, dtype: torch.dtype, unit: float) -> Tensor:
        made: Tensor = _Rounded.apply(  # type: ignore[no-untyped-call]
            x, lambda y: self.eager.rounded(y, dtype, unit)
        )
        return made


class Module(torch.nn.Module):
    """A case as a model: its weights are parameters, its data the arguments in order."""

    def __init__(self, case: Case, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.case = case
        for given in case.inputs.values():
            if given.kind == "weight":
                weight = torch.nn.Parameter(tensors[given.name], requires_grad=False)
                self.register_parameter(given.name, weight)

    def forward(self, *data: Tensor) -> tuple[Tensor, ...]:
        rest = list(data)
        made: list[Tensor] = []
        for value in self.case.values:
            if isinstance(value, Step):
                operands = [made[at] for at in value.operands]
                run = sdpa_of_torch if value.op == "sdpa" else OPS[value.op].run
                made.append(run(*operands, **value.attrs))
            elif value.kind == "weight":
                made.append(getattr(self, value.name))
            else:
                made.append(rest.pop(0))
        return tuple(made[result.value] for result in self.case.results)
