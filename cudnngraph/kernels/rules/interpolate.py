"""Interpolation of images in kernels, nearest, linear and cubic, with its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...ir.spec import Node, TensorSpec
from ..scalars import number
from ..tape import Index, Value, View, Window
from .pointwise import Operands
from .window import check_products, window

if TYPE_CHECKING:
    from ..window import Steps


@dataclass(frozen=True)
class Resized:
    """A dim that is resized, as torch's kernels do it: places in float32."""

    size: int
    wanted: int
    mode: str
    corners: bool
    given: float | None

    @property
    def nearest(self) -> bool:
        """Whether each result is one element."""
        return self.mode.startswith("nearest")

    @property
    def cubic(self) -> bool:
        """Whether each result is made of four elements along the dim."""
        return self.mode == "bicubic"

    @property
    def same(self) -> bool:
        """Whether each result is the element at its place."""
        return self.size == self.wanted and float(self.scale) == 1.0

    @property
    def scale(self) -> torch.Tensor:
        """The step from element to element of the result, in float32."""
        if self.corners:
            return _float((self.size - 1) / (self.wanted - 1) if self.wanted > 1 else 0.0)
        if self.given is not None:
            return _float(1.0 / self.given)
        return _float(self.size) / _float(self.wanted)

    def lows(self) -> list[int]:
        """The first element that each of the result is made of."""
        at = torch.arange(self.wanted, dtype=torch.float32, device="cpu")
        if self.nearest:
            places = (at + 0.5 if self.mode == "nearest-exact" else at) * self.scale
        elif self.corners:
            places = at * self.scale
        elif self.cubic:
            places = (at + 0.5) * self.scale - 0.5
        else:
            places = ((at + 0.5) * self.scale - 0.5).clamp_min(0)
        return [min(math.floor(place), self.size - 1) for place in places.tolist()]

    def near(self, low: int) -> set[int]:
        """The elements of which a result is made, the first of which is ``low``."""
        if self.nearest:
            return {low}
        if not self.cubic:
            return {low, min(low + 1, self.size - 1)}
        return {min(max(low + nth - 1, 0), self.size - 1) for nth in range(4)}

    def source(self, at: str) -> str:
        """C++ for the place in the image of an element of the result, before it is rounded."""
        scale = number(float(self.scale))
        if self.mode == "nearest" or self.corners:
            return f"{scale} * (float){at}"
        middle = f"{scale} * ((float){at} + 0.5f)"
        if self.cubic:
            return f"{middle} - 0.5f"
        return middle if self.nearest else f"fmaxf({middle} - 0.5f, 0.0f)"

    def reach(self) -> tuple[int, int]:
        """How far before ``place * wanted / size`` the results begin that an element is part of,
        and how many there may be."""
        first, last = [self.wanted] * self.size, [-1] * self.size
        for at, low in enumerate(self.lows()):
            for place in self.near(
                low
            ):  # what a sum that is rounded otherwise adds has a factor of about 0
                first[place], last[place] = min(first[place], at), max(last[place], at)
        base = [place * self.wanted // self.size for place in range(self.size)]
        used = [place for place in range(self.size) if last[place] >= 0]
        before = max(base[place] - first[place] for place in used)
        return before, max(last[place] - base[place] + before for place in used) + 1


def _float(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _dims(node: Node, image: Sequence[int], wanted: Sequence[int]) -> list[Resized]:
    mode, scales = node.attr("mode"), node.attr("scale_factor") or (None,) * len(image)
    corners = bool(node.attr("align_corners"))
    many = zip(image, wanted, scales, strict=True)
    return [Resized(size, to, mode, corners, scale) for size, to, scale in many]


def interpolate(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """Elements of an image, or sums of neighbours."""
    (x,) = operands
    assert x is not None
    dims = _dims(node, x.shape[2:], result.shape[2:])
    if all(dim.nearest for dim in dims):
        if all(_repeats(dim) for dim in dims):
            return (_repeated(x, dims, result.shape),)

        def nearest(steps: Steps) -> str:
            places = [
                steps.place(f"lesser((u32)({dim.source(at)}), {dim.size - 1}u)")
                for dim, at in zip(dims, steps.at, strict=True)
            ]
            return _copied(steps, places)

        return (window((x,), result.shape, nearest, 1),)

    if node.attr("mode") == "bicubic":
        return (_cubic(x, dims, result.shape),)

    def linear(steps: Steps) -> str:
        total = steps.local("float", "0.0f")
        with ExitStack() as stack:
            lines = [_line(steps, dim, at) for dim, at in zip(dims, steps.at, strict=True)]
            places, factors = [], []
            for dim, (low, part) in zip(dims, lines, strict=True):
                nth = stack.enter_context(steps.loop(2, 2 ** len(dims)))
                places.append(steps.place(f"lesser({low} + {nth}, {dim.size - 1}u)"))
                factors.append(steps.number("float", f"{nth} ? {part} : 1.0f - {part}"))
            steps.lanes(f"{total} += {' * '.join(factors)} * {steps.read(0, places)};")
        return total

    return (window((x,), result.shape, linear, 2 ** len(dims)),)


def _repeats(dim: Resized) -> bool:
    """Whether each element stands as often as the others, side by side."""
    many, rest = divmod(dim.wanted, dim.size)
    return not rest and dim.lows() == [at // many for at in range(dim.wanted)]


def _repeated(x: Value, dims: Sequence[Resized], shape: tuple[int, ...]) -> View:
    def source(index: Index) -> Index | None:
        found = list(index[:2])
        for each, dim in zip(index[2:], dims, strict=True):
            cut = each.cut(dim.wanted // dim.size, dim.size)
            if cut is None:
                return None
            found.append(cut)
        return tuple(found)

    return View(shape, x, source, type=x.type)


def _cubic(x: Value, dims: Sequence[Resized], shape: tuple[int, ...]) -> Window:
    """Sums of 4 by 4 neighbours; those beyond the border are the one at it."""

    def cubic(steps: Steps) -> str:
        total = steps.local("float", "0.0f")
        with ExitStack() as stack:
            lines = [_middle(steps, dim, at) for dim, at in zip(dims, steps.at, strict=True)]
            places, factors = [], []
            for dim, (low, part) in zip(dims, lines, strict=True):
                nth = stack.enter_context(steps.loop(4, 4 ** len(dims)))
                places.append(_neighbour(steps, dim, low, nth))
                factors.append(steps.number("float", f"cubic({part}, {nth})"))
            steps.lanes(f"{total} += {' * '.join(factors)} * {steps.read(0, places)};")
        return total

    def same(steps: Steps) -> str:
        return _copied(steps, steps.at)

    return window((x,), shape, same if all(dim.same for dim in dims) else cubic, 4 ** len(dims))


def _copied(steps: Steps, places: Sequence[str]) -> str:
    made = steps.local("float", "0.0f")
    steps.lanes(f"{made} = {steps.read(0, places)};")
    return made


def _line(steps: Steps, dim: Resized, at: str) -> tuple[str, str]:
    """The first of two neighbours, and the part of the second."""
    source = steps.number("float", dim.source(at))
    low = steps.place(f"lesser((u32){source}, {dim.size - 1}u)")
    return low, steps.number("float", f"{source} - (float){low}")


def _middle(steps: Steps, dim: Resized, at: str) -> tuple[str, str]:
    """The second of four neighbours, and how far behind it the place is."""
    source = steps.number("float", dim.source(at))
    low = steps.number("int", f"(int)floorf({source})")
    return low, steps.number("float", f"{source} - (float){low}")


def _neighbour(steps: Steps, dim: Resized, low: str, nth: str) -> str:
    """The nth of four neighbours, or what is at the border."""
    place = steps.number("int", f"{low} + (int){nth} - 1")
    return steps.place(f"{place} < 0 ? 0u : lesser((u32){place}, {dim.size - 1}u)")


@contextmanager
def _results(steps: Steps, dims: Sequence[Resized]) -> Iterator[tuple[list[str], list[str]]]:
    """A loop over the results that an element is part of, and its factors in them."""
    reads = _reads(dims)
    with ExitStack() as stack:
        found, factors = [], []
        for dim, own in zip(dims, steps.at, strict=True):
            if dim.same:
                found.append(own)
                continue
            before, count = dim.reach()
            nth = stack.enter_context(steps.loop(count, reads))
            at = steps.place(f"{own} * {dim.wanted}u / {dim.size}u - {before}u + {nth}")
            steps.line(f"if ({at} >= {dim.wanted}u) continue;")
            if dim.nearest:
                place = f"lesser((u32)({dim.source(at)}), {dim.size - 1}u)"
                steps.line(f"if ({place} != {own}) continue;")
            elif dim.cubic:
                low, part = _middle(steps, dim, at)
                parts = []
                for nth in (f"{each}u" for each in range(4)):
                    there = _neighbour(steps, dim, low, nth)
                    parts.append(f"({there} == {own} ? cubic({part}, {nth}) : 0.0f)")
                factors.append(steps.number("float", " + ".join(parts)))
            else:
                low, part = _line(steps, dim, at)
                high = steps.place(f"lesser({low} + 1u, {dim.size - 1}u)")
                steps.line(f"if ({low} != {own} && {high} != {own}) continue;")
                parts = [f"({low} == {own} ? 1.0f - {part} : 0.0f)"]
                parts.append(f"({high} == {own} ? {part} : 0.0f)")
                factors.append(steps.number("float", " + ".join(parts)))
            found.append(at)
        yield found, factors


def _reads(dims: Sequence[Resized]) -> int:
    """The results that an element may be part of."""
    return math.prod(1 if dim.same else dim.reach()[1] for dim in dims)


def interpolate_backward(node: Node, operands: Operands, result: TensorSpec) -> tuple[Value, ...]:
    """The sum of the gradients of what an element is part of, each by its factor there."""
    (dy,) = operands
    assert dy is not None
    check_products(result.shape[2:], dy.shape[2:])
    dims = _dims(node, result.shape[2:], dy.shape[2:])

    def write(steps: Steps) -> str:
        total = steps.local("float", "0.0f")
        with _results(steps, dims) as (places, factors):
            product = " * ".join([*factors, steps.read(0, places)])
            steps.lanes(f"{total} += {product};")
        return total

    return (window((dy,), result.shape, write, _reads(dims)),)
