"""Rules for ops that put elements elsewhere: rolls, shuffles, padding by the image's own pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...graph.value import Value
from ...ir.spec import is_channels_last, is_contiguous
from ...ops.base import FLOATS
from ..aten_ops import packets
from .base import Arguments, Rule, Skip, spread
from .shape import MOST_FILLED, between, part

if TYPE_CHECKING:
    from ..convert import Importer


def _roll(c: Importer, a: Arguments) -> Value:
    x, shifts, dims = c.value(a["self"]), spread(a["shifts"], 1), a.get("dims") or ()
    dims = spread(dims, 1)
    if len(shifts) != len(dims):
        raise Skip  # of all elements in a row
    rank = len(x.shape)
    moved = [
        (dim % rank, shift % max(1, x.shape[dim])) for dim, shift in zip(dims, shifts, strict=True)
    ]
    if len({dim for dim, shift in moved if shift}) > 1 and not c.kernels:
        raise Skip  # torch's own copies once
    for dim, shift in moved:
        if shift:
            size = x.shape[dim]
            behind, before = part(c, x, dim, size - shift, size), part(c, x, dim, 0, size - shift)
            x = c.g.concat([behind, before], dim)
    return x


def _rot90(c: Importer, a: Arguments) -> Value:
    x, turns, (first, second) = c.value(a["self"]), a["k"] % 4, a["dims"]
    rank = len(x.shape)
    flipped = ((), (second,), (first, second), (first,))[turns]
    if flipped:
        dims = [dim % rank for dim in flipped]
        x = c.g.aten([x], "aten.flip.default", (("tensor", 0), ("list", *dims)))
    return c.g.transpose(x, first, second) if turns % 2 else x


def _channel_shuffle(c: Importer, a: Arguments) -> Value:
    x, groups = c.value(a["self"]), int(a["groups"])
    n, channels, *pixels = x.shape
    apart = groups, channels // groups
    if is_channels_last(x.shape, x.stride) and not is_contiguous(x.shape, x.stride):
        rank = len(x.shape)
        rows = c.g.reshape(c.g.permute(x, (0, *range(2, rank), 1)), (n, *pixels, *apart))
        y = c.g.reshape(c.g.transpose(rows, -1, -2), (n, *pixels, channels))
        return c.g.permute(y, (0, rank - 1, *range(1, rank - 1)))
    y = c.g.transpose(c.g.reshape(x, (n, *apart, *pixels)), 1, 2)
    return c.g.reshape(y, x.shape)


def _pixel_shuffle(c: Importer, a: Arguments) -> Value:
    return c.g.pixel_shuffle(c.value(a["self"]), int(a["upscale_factor"]))


def _pixel_unshuffle(c: Importer, a: Arguments) -> Value:
    return c.g.pixel_unshuffle(c.value(a["self"]), int(a["downscale_factor"]))


# -- elements put at one place of each row ---------------------------------------------------------


def _scatter(c: Importer, a: Arguments) -> Any:
    """What is put into a tensor that is the same number throughout is put into that number."""
    filled = getattr(c.node.args[0], "target", None)
    x = a["self"]
    if getattr(filled, "overloadpacket", None) not in _FILLED or not isinstance(x, torch.Tensor):
        raise Skip
    if not x.numel() or not c.kernels or "reduce" in a:
        raise Skip
    return scattered(c, str(c.node.target), x, list(a.values())[1:])


def scattered(c: Importer, name: str, x: torch.Tensor, rest: Sequence[Any]) -> Value:
    """An op that writes into one number repeated, with the arguments behind that."""
    number = x.flatten()[0].clone()
    wide = c.g.expand(c.constant(number, "filled"), tuple(x.shape))
    made: Value = c.left_to_torch(name, [wide, *rest], {}, c.node, image=False)
    return made


_FILLED = packets("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones")
_FILLED |= packets("full", "full_like", "new_full")


# -- padding --------------------------------------------------------------------------------------


def _padded(name: str) -> Rule:
    """The rule of torch's op ``name``, which a generated kernel reads an image by."""

    def rule(c: Importer, a: Arguments) -> Value:
        x, pads = c.value(a["self"]), list(a["padding"])
        if not any(_padded_dims(c, x, a)):
            return x
        made: Value = c.g.aten([x], f"aten.{name}.default", (("tensor", 0), ("list", *pads)))
        return made

    return rule


def _padded_dims(c: Importer, x: Value, a: Arguments) -> Iterator[tuple[int, int, int]]:
    """The dims that are padded, with how many elements before and behind: last first."""
    pads = list(a["padding"])
    if not c.kernels or x.dtype not in FLOATS or min(pads) < 0:
        raise Skip
    for place in range(len(pads) // 2):
        before, behind = pads[2 * place : 2 * place + 2]
        if before or behind:
            yield len(x.shape) - 1 - place, before, behind


def _reflection_backward(c: Importer, a: Arguments) -> Value:
    """What lies within, and what lies outside from where it was taken."""
    dy, image = c.value(a["grad_output"]), c.value(a["self"]).shape
    for dim, before, behind in _padded_dims(c, dy, a):
        size, end = image[dim], before + image[dim]
        dx = part(c, dy, dim, before, end)
        if before:
            first = _turned(c, part(c, dy, dim, 0, before), dim)
            dx = c.g.add(dx, between(c, first, dim, 1, size - 1 - before, 0.0))
        if behind:
            last = _turned(c, part(c, dy, dim, end, end + behind), dim)
            dx = c.g.add(dx, between(c, last, dim, size - 1 - behind, 1, 0.0))
        dy = dx
    return dy


def _turned(c: Importer, x: Value, dim: int) -> Value:
    made: Value = c.g.aten([x], "aten.flip.default", (("tensor", 0), ("list", dim)))
    return made


def _replication_backward(c: Importer, a: Arguments) -> Value:
    dy, image = c.value(a["grad_output"]), c.value(a["self"]).shape
    for dim, before, behind in _padded_dims(c, dy, a):
        size = image[dim]
        dx = part(c, dy, dim, before, before + size)
        if before:
            total = c.g.reduction(part(c, dy, dim, 0, before), dim, "sum", True)
            dx = c.g.add(dx, between(c, total, dim, 0, size - 1, 0.0))
        if behind:
            outside = part(c, dy, dim, before + size, before + size + behind)
            total = c.g.reduction(outside, dim, "sum", True)
            dx = c.g.add(dx, between(c, total, dim, size - 1, 0, 0.0))
        dy = dx
    return dy


def _joined(c: Importer, parts: Sequence[Value], dim: int) -> Value:
    return c.g.concat(parts, dim) if len(parts) > 1 else parts[0]


def _slice_scatter(c: Importer, a: Arguments) -> Value:
    """A tensor with another in the place of a slice; of every n-th element, with a dim of its own
    for those between."""
    x, source = c.value(a["self"]), c.value(a["src"])
    dim = a["dim"] % len(x.shape)
    size, before, behind = x.shape[dim], x.shape[:dim], x.shape[dim + 1 :]
    taken = range(*slice(a["start"], a["end"], a["step"]).indices(size))
    if source.dtype != x.dtype or not taken:
        raise Skip
    if taken.step == 1:
        return _put(c, x, source, dim, taken.start)
    if size % taken.step or len(taken) != size // taken.step:
        raise Skip
    apart = c.g.reshape(x, (*before, len(taken), taken.step, *behind))
    source = c.g.reshape(source, (*before, len(taken), 1, *behind))
    return c.g.reshape(_put(c, apart, source, dim + 1, taken.start), x.shape)


def _select_scatter(c: Importer, a: Arguments) -> Value:
    x, source = c.value(a["self"]), c.value(a["src"])
    dim = a["dim"] % len(x.shape)
    if source.dtype != x.dtype:
        raise Skip
    source = c.g.reshape(source, (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    return _put(c, x, source, dim, a["index"] % x.shape[dim])


def _put(c: Importer, x: Value, source: Value, dim: int, start: int) -> Value:
    """x with another tensor in the place of a part of it."""
    size, parts, end = x.shape[dim], [source], start + source.shape[dim]
    if start:
        parts = [part(c, x, dim, 0, start), *parts]
    if end < size:
        parts = [*parts, part(c, x, dim, end, size)]
    return _joined(c, parts, dim)


def _triangle(upper: bool) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        x = c.value(a["self"])
        if x.dtype not in FLOATS or x.shape[-1] * x.shape[-2] > MOST_FILLED:
            raise Skip
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=c.device)
        kept = mask.triu(a["diagonal"]) if upper else mask.tril(a["diagonal"])
        return c.g.where(c.constant(kept, "triangle"), x, 0.0)

    return rule


RULES: dict[str, Rule] = {
    **dict.fromkeys(("scatter", "scatter_add"), _scatter),
    "roll": _roll,
    "rot90": _rot90,
    "channel_shuffle": _channel_shuffle,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    **{
        name: _padded(name)
        for rank in (1, 2, 3)
        for name in (f"reflection_pad{rank}d", f"replication_pad{rank}d")
    },
    **{f"reflection_pad{rank}d_backward": _reflection_backward for rank in (1, 2, 3)},
    **{f"replication_pad{rank}d_backward": _replication_backward for rank in (1, 2, 3)},
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "tril": _triangle(False),
    "triu": _triangle(True),
}
