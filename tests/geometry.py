"""Random geometry of spatial ops: what nobody chose, and what torch makes of it.

A case is made by its number alone, prints as the arguments of its op, says by the documented
formulas whether it is valid (``sizes``: None where not), and computes the result as a user of torch
would. Nothing here knows how the package does it.

The suite runs a few hundred cases of each kind. ``RANDOM_CASES=5000 pytest
tests/cpu/test_random_geometry.py`` runs so many; ``RANDOM_FIRST=1234 RANDOM_CASES=1`` that one.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

F64 = torch.float64
Shape = tuple[int, ...]
Sizes = tuple[int, ...] | None

_CONV = (F.conv1d, F.conv2d, F.conv3d)
_CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
_POOLS = {
    "max_pool": (F.max_pool1d, F.max_pool2d, F.max_pool3d),
    "avg_pool": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    "adaptive_max_pool": (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    "adaptive_avg_pool": (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
}


def numbers(default: int) -> range:
    """The numbers of the cases to run: ``default`` of them, or what the environment asks for."""
    first = int(os.environ.get("RANDOM_FIRST", "0"))
    return range(first, first + int(os.environ.get("RANDOM_CASES", str(default))))


def parts(default: int, count: int = 8) -> list[range]:
    """The same in ``count`` parts, a test each."""
    every = numbers(default)
    size = max(1, math.ceil(len(every) / count))
    return [every[at : at + size] for at in range(0, len(every), size)]


# -- convolutions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """x (N, C, spatial...); weight (K, C/groups, ...), transposed (C, K/groups, ...)."""

    x: Shape
    weight: Shape
    transposed: bool
    stride: Shape
    padding: tuple[tuple[int, int], ...]
    dilation: Shape
    groups: int
    output_padding: Shape
    channels_last: bool

    @property
    def rank(self) -> int:
        return len(self.stride)

    @property
    def options(self) -> dict[str, Any]:
        """The op's keywords."""
        names = ("stride", "padding", "dilation", "groups")
        made = {name: getattr(self, name) for name in names}
        return {**made, "output_padding": self.output_padding} if self.transposed else made

    @property
    def op(self) -> str:
        return "conv_transpose" if self.transposed else "conv"

    def sizes(self) -> Sizes:
        """The shape of the result."""
        many = zip(
            self.x[2:],
            self.weight[2:],
            self.stride,
            self.padding,
            self.dilation,
            self.output_padding,
            strict=True,
        )
        out = []
        for n, k, stride, (before, after), dilation, extra in many:
            reach = dilation * (k - 1) + 1
            if self.transposed:
                if extra >= max(stride, dilation):
                    return None
                out.append((n - 1) * stride - before - after + reach + extra)
            elif reach > n + before + after:
                return None
            else:
                out.append((n + before + after - reach) // stride + 1)
        channels = self.weight[1] * self.groups if self.transposed else self.weight[0]
        return (self.x[0], channels, *out) if all(size > 0 for size in out) else None

    def by_torch(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``F.pad`` and a convolution without padding; transposed, all of it, and then its part.
        torch refuses some operands of no elements, of which all sums are of nothing."""
        shape = self.sizes()
        assert shape is not None
        if 0 in (*x.shape[:2], *weight.shape) or (self.transposed and 0 in x.shape):
            return x.new_zeros(shape) + 0.0 * (x.sum() + weight.sum())
        if not self.transposed:
            padded = F.pad(x, [side for pair in reversed(self.padding) for side in pair])
            geometry = (self.stride, 0, self.dilation, self.groups)
            return _CONV[self.rank - 1](padded, weight, None, *geometry)
        geometry = (self.stride, 0, 0, self.groups, self.dilation)
        y = _CONV_TRANSPOSE[self.rank - 1](x, weight, None, *geometry)
        y = F.pad(y, [side for extra in reversed(self.output_padding) for side in (0, extra)])
        for dim, ((before, _), size) in enumerate(zip(self.padding, shape[2:], strict=True), 2):
            y = y.narrow(dim, before, size)
        return y

    def tensors(self, dtype: torch.dtype = F64) -> tuple[torch.Tensor, torch.Tensor]:
        """x and weight."""
        gen = torch.Generator().manual_seed(0)
        x, weight = (
            torch.randn(s, generator=gen, dtype=F64).to(dtype) for s in (self.x, self.weight)
        )
        if self.channels_last and self.rank > 1:
            form = torch.channels_last if self.rank == 2 else torch.channels_last_3d
            x, weight = x.to(memory_format=form), weight.to(memory_format=form)
        return x, weight


def convolution(number: int) -> Convolution:
    """Small, lopsided, and now and then empty: about one in seven is not valid."""
    r = Random(f"convolution {number}")
    rank, transposed, groups = r.choice((1, 2, 3)), r.random() < 0.5, r.choice((1, 1, 1, 2, 3))
    batch, each_in, each_out = (r.choice((1, 1, 2, 3)) for _ in range(3))
    extents = [r.choice((1, 1, 2, 3, 4, 5, 7)) for _ in range(rank)]
    if r.random() < 0.12:
        what = r.randrange(3 + rank)
        batch, each_in, each_out = (
            0 if what == place else size for place, size in enumerate((batch, each_in, each_out))
        )
        if what > 2:
            extents[what - 3] = 0
    kernel, stride, dilation, padding, extra = [], [], [], [], []
    for n in extents:
        k, s, d = r.choice((1, 1, 2, 3, 4)), r.choice((1, 1, 2, 3, 5)), r.choice((1, 1, 1, 2, 3))
        before, after = (r.choice((0, 0, 1, 2, 3, 6)) for _ in range(2))
        e = r.randrange(max(s, d)) if r.random() < 0.5 else 0
        reach = d * (k - 1) + 1
        if r.random() < 0.9:  # mend what is not valid
            if not transposed:
                before += max(0, reach - n - before - after)
            while transposed and (n - 1) * s - before - after + reach + e < 1 and before + after:
                before, after = (
                    (max(0, before - 1), after) if before > after else (before, after - 1)
                )
        if r.random() < 0.02:
            e += r.choice((1, 2, 5))
        kernel.append(k), stride.append(s), dilation.append(d)
        padding.append((before, after)), extra.append(e)
    c, k = each_in * groups, each_out * groups
    return Convolution(
        (batch, c, *extents),
        (c, each_out, *kernel) if transposed else (k, each_in, *kernel),
        transposed,
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        tuple(extra) if transposed else (0,) * rank,
        r.random() < 0.5,
    )


# -- pooling ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """A pooling of x (N, C, spatial...) by the op of this name; ``options`` are its keywords."""

    op: str
    x: Shape
    options: dict[str, Any]

    @property
    def rank(self) -> int:
        return len(self.x) - 2

    def sizes(self) -> Sizes:
        """The shape of the result: every window holds an element of x, the padding is at most half
        of the kernel, and there is something to pool."""
        wanted = self.options.get("output_size")
        mean = self.op == "adaptive_avg_pool" and set(wanted) == {1}  # of no channel too
        if 0 in self.x[2 if mean else 1 :]:
            return None
        if wanted is not None:
            return (*self.x[:2], *wanted)
        out = []
        for dim, n in enumerate(self.x[2:]):
            names = ("kernel_size", "stride", "padding")
            k, s, p = (self.options[name][dim] for name in names)
            d = self.options["dilation"][dim] if "dilation" in self.options else 1
            reach = d * (k - 1) + 1
            count = (n + 2 * p - reach) // s + 1
            if self.options["ceil_mode"]:  # one may reach over the end, but not begin behind it
                count = -((reach - n - 2 * p) // s) + 1
                count -= (count - 1) * s >= n + p
            taps = [range(s * place - p, s * place - p + reach, d) for place in range(count)]
            if self.op == "avg_pool" and self.rank == 3 and k > n:
                return None  # torch averages no volume smaller than its kernel, padded or not
            if not taps or p > k // 2 or not all(any(0 <= t < n for t in each) for each in taps):
                return None
            out.append(count)
        return (*self.x[:2], *out)

    def by_torch(self, x: torch.Tensor) -> torch.Tensor:
        """torch's function; of no images it is no images."""
        if x.shape[0] == 0:
            shape = self.sizes()
            assert shape is not None
            return x.sum() + x.new_zeros(shape)
        made: torch.Tensor = _POOLS[self.op][self.rank - 1](x, **self.options)
        return made

    def tensor(self) -> torch.Tensor:
        """x, no two of whose elements are equal."""
        gen = torch.Generator().manual_seed(0)
        return torch.randn(self.x, generator=gen, dtype=F64)


def pool(number: int) -> Pool:
    """Small windows, lopsided, dilated over more than there is."""
    r = Random(f"pool {number}")
    rank = r.choice((1, 2, 3))
    op = r.choice(("max_pool", "max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"))
    extents = [r.choice((1, 1, 2, 3, 4, 5, 7, 8)) for _ in range(rank)]
    batch, channels = r.choice((1, 2)), r.choice((1, 2, 3))
    if r.random() < 0.06:
        batch, channels, extents[0] = r.choice(((0, 2, 3), (2, 0, 3), (2, 2, 0)))
    x = (batch, channels, *extents)
    if op.startswith("adaptive"):
        return Pool(op, x, {"output_size": tuple(r.choice((1, 2, 3, 5, 9)) for _ in extents)})
    kernel = tuple(r.choice((1, 2, 2, 3, 4)) for _ in extents)
    options: dict[str, Any] = {
        "kernel_size": kernel,
        "stride": tuple(r.choice((1, 1, 2, 3, 5)) for _ in extents),
        "padding": tuple(r.randint(0, k // 2 + (r.random() < 0.05)) for k in kernel),
        "ceil_mode": r.random() < 0.4,
    }
    if op == "max_pool":
        options["dilation"] = tuple(r.choice((1, 1, 2, 3, 4, 6)) for _ in extents)
    else:
        options["count_include_pad"] = r.random() < 0.5
    return Pool(op, x, options)


# -- interpolation ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interpolation:
    """An interpolation of x (N, C, spatial...), by a size or by factors."""

    x: Shape
    options: dict[str, Any]

    def sizes(self) -> Sizes:
        """The shape of the result."""
        size, scale = self.options["size"], self.options["scale_factor"]
        if size is None:
            size = tuple(int(n * f) for n, f in zip(self.x[2:], scale, strict=True))
        return None if 0 in (*self.x[1:], *size) else (*self.x[:2], *size)

    def by_torch(self, x: torch.Tensor) -> torch.Tensor:
        """``F.interpolate``; of no images it is no images."""
        if x.shape[0] == 0:
            shape = self.sizes()
            assert shape is not None
            return x.sum() + x.new_zeros(shape)
        corners = None if "nearest" in self.options["mode"] else self.options["align_corners"]
        made: torch.Tensor = F.interpolate(x, **{**self.options, "align_corners": corners})
        return made

    def tensor(self) -> torch.Tensor:
        gen = torch.Generator().manual_seed(0)
        return torch.randn(self.x, generator=gen, dtype=F64)


def interpolation(number: int) -> Interpolation:
    """To more and to less, by odd factors, of single pixels too."""
    r = Random(f"interpolation {number}")
    rank = r.choice((1, 2, 3))
    x = (r.choice((1, 2)), r.choice((1, 3)), *(r.choice((1, 1, 2, 3, 5, 8)) for _ in range(rank)))
    if r.random() < 0.06:
        x = (*r.choice(((0, 2), (2, 0))), *x[2:]) if r.random() < 0.7 else (*x[:2], 0, *x[3:])
    mode = r.choice(("nearest", "nearest-exact", _LINEAR[rank], "bicubic"))
    if mode == "bicubic" and rank != 2:
        mode = _LINEAR[rank]
    size = scale = None
    if r.random() < 0.5:
        size = tuple(r.choice((1, 2, 3, 4, 7, 11)) for _ in range(rank))
    else:
        scale = tuple(r.choice((0.3, 0.5, 1.0, 1.5, 2.0, 2.7, 3.0)) for _ in range(rank))
    corners = "nearest" not in mode and r.random() < 0.5
    return Interpolation(
        x, {"size": size, "scale_factor": scale, "mode": mode, "align_corners": corners}
    )
