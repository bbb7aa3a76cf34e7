"""Tensors of random numbers, layouts and dtypes for random calls, by a seeded generator."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests import numerics
from tests.random_graphs.judging import NO_DIGITS, NO_DIGITS_FACTOR

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LAYOUTS = ("contiguous", "contiguous", "last", "permuted", "sliced", "stepped", "expanded")


def laid(values: torch.Tensor, layout: str, dim: int) -> torch.Tensor:
    """The same numbers in another layout, NaN between them; an expanded one repeats its first."""
    rank = values.dim()
    if rank == 0 or layout == "contiguous":
        return values.contiguous()
    if layout in ("last", "permuted"):
        order = (0, *range(2, rank), 1) if layout == "last" else (*range(dim, rank), *range(dim))
        order = order[:rank] if rank > 1 else (0,)
        back = [order.index(place) for place in range(rank)]
        return values.permute(order).contiguous().permute(back)
    if layout == "expanded":
        return values.narrow(dim, 0, min(1, values.shape[dim])).contiguous().expand(values.shape)
    wide = list(values.shape)
    wide[dim] = wide[dim] * 2 if layout == "stepped" else wide[dim] + 3
    nothing = math.nan if values.is_floating_point() else 0
    memory = torch.full(wide, nothing, dtype=values.dtype)
    if layout == "stepped":
        part = memory[(slice(None),) * dim + (slice(None, None, 2),)]
    else:
        part = memory.narrow(dim, 1, values.shape[dim])
    return part.copy_(values)


class Maker:
    """Numbers and tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, *values: Any) -> Any:
        return self.rng.choice(values)

    def tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        positive: bool = False,
        plain: bool = False,
    ) -> torch.Tensor:
        """Normal numbers; with ``plain`` contiguous ones."""
        values = torch.randn(tuple(shape), generator=self.numbers, dtype=F64)
        values = (values.abs() + 0.5 if positive else values).to(dtype)
        layout = "contiguous" if plain else self.rng.choice(LAYOUTS)
        return laid(values, layout, self.rng.randrange(len(shape)) if shape else 0)


def widened(value: Any) -> Any:
    """A copy in float64 that autograd knows nothing of; other values as they are."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().contiguous()
    return value


def told(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a call gives, or raises."""
    try:
        return function(), None
    except Exception as error:
        return None, error


class _Rounded(torch.autograd.Function):
    """A value times random numbers about 1, and so the gradient that comes back through it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: Any) -> torch.Tensor:
        ctx.way = way
        return way.noisy(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return ctx.way.noisy(dy), None


_SLOPED = (torch.tanh, torch.sigmoid)


class _RoundedSlope(torch.autograd.Function):
    """tanh or sigmoid, whose gradient reads the result, rounded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Any, way: Any) -> torch.Tensor:
        y: torch.Tensor = way.noisy(function(x))
        ctx.save_for_backward(y)
        ctx.way, ctx.tanh = way, function is torch.tanh
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return ctx.way.noisy(dy * (1 - y * y if ctx.tanh else y * (1 - y))), None, None


class Roundings(TorchFunctionMode):
    """torch in float64 whose functions are each off by up to ``unit`` of their results."""

    def __init__(self, seed: int, unit: float) -> None:
        super().__init__()
        self.unit, self.numbers = unit, torch.Generator().manual_seed(seed)

    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.numbers, dtype=F64) * 2 - 1
        return x * (1.0 + self.unit * noise)

    def rounded(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.dtype != F64:
            return x
        return _Rounded.apply(x, self)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _SLOPED:
            return _RoundedSlope.apply(args[0], function, self)  # type: ignore[no-untyped-call]
        made = function(*args, **(kwargs or {}))
        return self.rounded(made) if torch.overrides.resolve_name(function) else made


def off(
    ours: torch.Tensor,
    exact: torch.Tensor,
    yards: Sequence[torch.Tensor],
    dtype: torch.dtype,
    terms: int,
    size: float = 0.0,
) -> str:
    """How a result is farther from float64 than its dtype allows, and than torch that rounds is by
    ``RANDOM_FACTOR``, or where torch has no digits, by ``NO_DIGITS_FACTOR``; "" for no farther.

    ``size`` is that of what cancels where the exact result is 0.
    """
    if ours.shape != exact.shape:
        return f"shape {tuple(ours.shape)}, torch's is {tuple(exact.shape)}"
    if not ours.is_floating_point():
        return "" if torch.equal(ours, exact.to(ours.dtype)) else "is another"
    error = numerics.relative_error(ours, exact)
    allowed = numerics.bound(dtype, None if ours.dtype == dtype else ours.dtype, terms=terms)
    allowed *= numerics.RANDOM_FACTOR if dtype == F64 else 1.0
    if error <= allowed:
        return ""
    if size and not exact.any() and float(ours.double().norm()) <= allowed * size:
        return ""
    theirs = max((numerics.relative_error(each, exact) for each in yards), default=0.0)
    if error <= numerics.RANDOM_FACTOR * theirs:
        return ""
    if theirs > NO_DIGITS:
        wide = exact.double()
        most = max(float((each.double() - wide).norm()) for each in yards)
        if float((ours.double() - wide).norm()) <= NO_DIGITS_FACTOR * most:
            return ""
    return f"off by {error:.3g}, torch by {theirs:.3g}"
