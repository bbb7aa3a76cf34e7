"""Rules for pooling, resizing, and what is read at an index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...device.rules import rules
from ...errors import FeatureMissing
from ...graph.value import Value
from ...ir.spec import (
    is_channels_last,
)
from ...ops import row_sums
from ...ops.base import FLOATS, LOW_PRECISION
from ...ops.resampling import in_padding
from ..aten_ops import UPSAMPLES, packets
from .arrange import scattered
from .base import Arguments, Rule, Skip, first, gives_many, reads, spread
from .shape import MOST_PLACED, in_order

if TYPE_CHECKING:
    from ..convert import Importer


def _max_pool(rank: int) -> Rule:
    def rule(c: Importer, a: Arguments) -> Any:
        x = c.value(a["self"])
        given = [list(a[name]) for name in ("kernel_size", "stride", "padding", "dilation")]
        if len(x.shape) != rank + 2:
            raise Skip
        if gives_many(c.node) and reads(c.node, 1):
            raise Skip  # the indices are wanted too
        kernel, stride, padding, dilation = (spread(each, rank) if each else None for each in given)
        y = c.g.max_pool(
            x, _ints(kernel), stride, _ints(padding), _ints(dilation), bool(a["ceil_mode"])
        )
        return (y, None) if gives_many(c.node) else y

    return rule


def _ints(value: tuple[int, ...] | None) -> tuple[int, ...]:
    assert value is not None
    return value


def _avg_pool(rank: int) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        x = c.value(first(a))
        if a.get("divisor_override") is not None or len(x.shape) != rank + 2:
            raise Skip
        window, padding = spread(a["kernel_size"], rank), spread(a["padding"], rank)
        stride = spread(list(a["stride"]) or window, rank)
        ceil_mode, whole = bool(a["ceil_mode"]), bool(a["count_include_pad"])
        if _averages_by_convolution(c, x, window) and not ceil_mode and (whole or not any(padding)):
            shape = (x.shape[1], 1, *window)
            weight = torch.full(shape, 1 / math.prod(window), dtype=x.dtype, device=c.device)
            held = c.image_weight(weight, x)
            return c.g.conv(x, held, stride=stride, padding=padding, groups=shape[0])
        return c.g.avg_pool(x, window, stride, padding, ceil_mode, whole)

    return rule


def _averages_by_convolution(c: Importer, x: Value, window: Sequence[int]) -> bool:
    """Whether to average 16-bit images by a depthwise convolution
    (:attr:`DeviceRules.average_by_convolution`)."""
    fits = x.spec is not None and is_channels_last(x.shape, x.spec.stride)
    fits = fits and window in rules().average_by_convolution
    return c.on_gpu and fits and x.shape[1] % 8 == 0 and x.dtype in LOW_PRECISION


def _adaptive_mean(rank: int) -> Rule:
    def rule(c: Importer, a: Arguments) -> Any:
        x = c.value(first(a))
        if len(x.shape) != rank + 2:
            raise Skip
        size = spread(a["output_size"], rank)
        if x.dtype in LOW_PRECISION and size == (1,) * rank and not c.kernels:  # as in _reduced
            return c.left_to_torch("aten.mean.dim", [x, list(range(-rank, 0)), True], {}, c.node)
        return c.g.adaptive_avg_pool(x, size)

    return rule


def _max_pool_backward(rank: int) -> Rule:
    """By what was pooled: the indices of the largest elements are found again."""

    def rule(c: Importer, a: Arguments) -> Any:
        x, dy = c.value(a["self"]), c.value(a["grad_output"])
        window, padding, dilation = (
            spread(a[name], rank) for name in ("kernel_size", "padding", "dilation")
        )
        stride = spread(a["stride"] or window, rank)
        many = zip(x.shape[-rank:], dy.shape[-rank:], stride, padding, dilation, strict=True)
        if any(in_padding(*each) for each in many):
            raise FeatureMissing(
                f"{c.name}: {c.node.target}: a window lies in the padding alone, and torch's "
                "gradient would write outside of its result: dilate less, or pad less"
            )
        if len(x.shape) != rank + 2:
            raise Skip
        return c.g.max_pool_backward(dy, x, window, stride, padding, dilation, bool(a["ceil_mode"]))

    return rule


def _adaptive_max(rank: int) -> Rule:
    def rule(c: Importer, a: Arguments) -> tuple[Value, None]:
        x = c.value(a["self"])
        if len(x.shape) != rank + 2 or reads(c.node, 1):
            raise Skip  # the indices are wanted too
        return c.g.adaptive_max_pool(x, spread(a["output_size"], rank)), None

    return rule


def _adaptive_max_backward(rank: int) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        x, dy = c.value(a["self"]), c.value(a["grad_output"])
        if len(x.shape) != rank + 2:
            raise Skip
        return c.g.adaptive_max_pool_backward(dy, x, dy.shape[2:])

    return rule


def _avg_pool_backward(rank: int) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        x, dy = c.value(a["self"]), c.value(a["grad_output"])
        if a["divisor_override"] is not None or len(x.shape) != rank + 2:
            raise Skip
        window = spread(a["kernel_size"], rank)
        stride = spread(list(a["stride"]) or window, rank)
        return c.g.avg_pool_backward(
            dy,
            window,
            stride,
            spread(a["padding"], rank),
            bool(a["ceil_mode"]),
            bool(a["count_include_pad"]),
            input_size=x.shape[2:],
        )

    return rule


def _adaptive_mean_backward(rank: int) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        x, dy = c.value(a["self"]), c.value(a["grad_output"])
        if len(x.shape) != rank + 2:
            raise Skip
        return c.g.adaptive_avg_pool_backward(dy, dy.shape[2:], input_size=x.shape[2:])

    return rule


def _size_or_scales(
    a: Arguments, image: Sequence[int], wanted: Sequence[int]
) -> tuple[Sequence[int] | None, Sequence[float] | None]:
    """What interpolation goes by: sizes, or the scales that give them."""
    scales = a.get("scale_factors")
    if scales is None:
        names = ("scales_d", "scales_h", "scales_w", "scales")
        scales = [a[name] for name in names if a.get(name) is not None]
    if not scales:
        return tuple(wanted), None
    if len(scales) != len(image):
        raise Skip
    made = [int(length * scale) for length, scale in zip(image, scales, strict=True)]
    if made != list(wanted):
        raise Skip
    return None, tuple(scales)


def _upsample_backward(mode: str) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        dy, image = c.value(a["grad_output"]), tuple(a["input_size"])[2:]
        if math.prod(image) == 1 and (c.kernels or dy.dtype not in LOW_PRECISION):
            return c.g.reduction(dy, tuple(range(2, len(dy.shape))), "sum", True)
        size, scales = _size_or_scales(a, image, dy.shape[2:])
        corners = bool(a.get("align_corners", False))
        return c.g.interpolate_backward(dy, size, scales, mode, corners, input_size=image)

    return rule


def _upsample(mode: str) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        x = c.value(first(a))
        seen = tuple(c.node.meta["val"].shape)
        if math.prod(x.shape[2:]) == 1 and mode != "bicubic":
            return c.g.expand(x, seen)
        size, scales = _size_or_scales(a, x.shape[2:], seen[2:])
        return c.g.interpolate(x, size, scales, mode, a.get("align_corners"))

    return rule


_ZEROS = packets("new_zeros", "zeros", "zeros_like")


def _repeats(c: Importer, sizes: Sequence[int], indices: Sequence[Any]) -> tuple[int, ...]:
    """The sizes to which constant indices repeat pixels of images, each as often along a dim.

    That is how torch.compile writes interpolation to the nearest pixel.
    """
    rank = len(sizes) - 2
    given = list(indices)
    if rank not in (1, 2, 3) or len(given) != rank + 2 or given[:2] != [None, None]:
        raise Skip
    made = []
    for size, index in zip(sizes[2:], given[2:], strict=True):
        if not isinstance(index, torch.Tensor) or index.dtype != torch.int64:
            raise Skip
        count = index.numel()
        if not size or count % size or count < size or index.shape.numel() != max(index.shape):
            raise Skip
        wanted = torch.arange(count, device=index.device) // (count // size)
        if not torch.equal(index.flatten(), wanted):
            raise Skip
        made.append(count)
    if tuple(made) != tuple(sizes[2:]):
        return tuple(made)
    raise Skip  # nothing is repeated


def _index(c: Importer, a: Arguments) -> Value:
    x = c.value(a["self"])
    if _picks_all(x.shape, a["indices"]):
        return c.g.reshape(x, tuple(c.node.meta["val"].shape))
    size = _repeats(c, x.shape, a["indices"])
    return c.g.interpolate(x, size)


def _picks_all(shape: Sequence[int], indices: Sequence[Any]) -> bool:
    """Whether constant indices pick all elements in order, as of the mask of a batch's tokens."""
    given = [each for each in indices if each is not None]
    if not given or not all(isinstance(each, torch.Tensor) for each in given):
        return False
    if not 0 < math.prod(shape) <= MOST_PLACED or any(each.is_meta for each in given):
        return False
    picked = [slice(None) if each is None else each.cpu() for each in indices]
    places = torch.arange(math.prod(shape)).view(tuple(shape))[tuple(picked)]
    return places.numel() == math.prod(shape) and in_order(places)


def _masked_number(c: Importer, a: Arguments) -> Value:
    x, (mask,) = c.value(a["self"]), a["indices"]
    number = a["values"]
    if not isinstance(mask, (Value, torch.Tensor)) or mask.dtype != torch.bool:
        raise Skip
    if not isinstance(number, (Value, torch.Tensor)) or math.prod(number.shape) != 1:
        raise Skip
    mask, more = c.value(mask), len(x.shape) - len(mask.shape)
    mask = c.g.reshape(mask, (*mask.shape, *(1,) * more)) if more else mask
    if isinstance(number, torch.Tensor) and x.dtype in FLOATS:
        return c.g.where(mask, float(number), x)
    return c.g.where(mask, c.g.reshape(c.value(number), (1,) * len(x.shape)), x)


def _index_put(c: Importer, a: Arguments) -> Value:
    """The gradient of that, what is added up where nothing was; or a number where a mask holds."""
    if not a["accumulate"] and len(a["indices"]) == 1:
        return _masked_number(c, a)
    dy, seen = c.value(a["values"]), c.node.args[0].meta["val"]
    if not a["accumulate"] or getattr(c.node.args[0].target, "overloadpacket", None) not in _ZEROS:
        raise Skip
    try:
        size = _repeats(c, seen.shape, a["indices"])
    except Skip:
        return _sum_along(c, dy, tuple(seen.shape), a["indices"])
    if dy.shape != (*seen.shape[:2], *size):
        raise Skip
    return c.g.interpolate_backward(dy, size, input_size=tuple(seen.shape[2:]))


def _sum_along(c: Importer, dy: Value, shape: tuple[int, ...], indices: Sequence[Any]) -> Value:
    """What is added up along the one dim that is read at an index: along the first of a table."""
    given = [(at, each) for at, each in enumerate(indices) if each is not None]
    if len(given) == len(shape) == 2:
        return _one_of_each_row(c, dy, shape, *indices)
    if len(given) != 1:
        raise Skip
    ((dim, index),) = given
    index, rank = c.value(index), len(index.shape)
    if dy.shape != (*shape[:dim], *index.shape, *shape[dim + 1 :]):
        raise Skip
    if dim:
        behind = range(dim + rank, len(dy.shape))
        dy = c.g.permute(dy, (*range(dim, dim + rank), *range(dim), *behind))
    made = _sum_rows(c, dy, index, shape[dim], -1)
    return c.g.permute(made, (*range(1, dim + 1), 0, *range(dim + 1, len(shape)))) if dim else made


def _one_of_each_row(
    c: Importer, dy: Value, shape: tuple[int, ...], rows: Any, index: Any
) -> Value:
    """What is put at one index of each row, ``x[arange(n), index]``, where all others are 0."""
    index = c.value(index)
    if not isinstance(rows, torch.Tensor) or tuple(rows.shape) != shape[:1] or not in_order(rows):
        raise Skip
    if dy.shape != shape[:1] or index.shape != shape[:1] or index.dtype != torch.int64:
        raise Skip
    x, places = ("tensor", 0), ("tensor", 1)
    behind = c.g.aten([index], "aten.lt.Scalar", (x, 0))
    moved = c.g.aten([index], "aten.add.Tensor", (x, shape[1]))
    given = [behind, moved, index]
    index = c.g.aten(given, "aten.where.self", (x, places, ("tensor", 2)))
    zeros = torch.zeros(shape, dtype=dy.dtype, device=c.device)
    column = (shape[0], 1)
    rest = [1, c.g.reshape(index, column), c.g.reshape(dy, column)]
    return scattered(c, "aten.scatter.src", zeros, rest)


def _sum_rows(c: Importer, values: Value, index: Value, rows: int, skip: int) -> Value:
    if not c.kernels or values.dtype not in FLOATS or index.dtype not in (torch.int64, torch.int32):
        raise Skip
    args = (("tensor", 0), ("tensor", 1), rows, skip)
    made: Value = c.g.aten([values, index], row_sums.OVERLOAD, args)
    return made


def _embedding_backward(c: Importer, a: Arguments) -> Value:
    if a["scale_grad_by_freq"]:
        raise Skip
    dy, index = c.value(a["grad_output"]), c.value(a["indices"])
    return _sum_rows(c, dy, index, a["num_weights"], a["padding_idx"])


RULES: dict[str, Rule] = {
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _index_put),
    **{f"adaptive_avg_pool{rank}d": _adaptive_mean(rank) for rank in (1, 2, 3)},
    "_adaptive_avg_pool2d": _adaptive_mean(2),
    **{name: _upsample(mode) for name, mode in UPSAMPLES.items()},
    **{f"max_pool{rank}d": _max_pool(rank) for rank in (1, 2, 3)},
    **{f"max_pool{rank}d_with_indices": _max_pool(rank) for rank in (2, 3)},
    **{f"avg_pool{rank}d": _avg_pool(rank) for rank in (1, 2, 3)},
    **{f"max_pool{rank}d_with_indices_backward": _max_pool_backward(rank) for rank in (2, 3)},
    **{f"adaptive_max_pool{rank}d": _adaptive_max(rank) for rank in (2, 3)},
    **{f"adaptive_max_pool{rank}d_backward": _adaptive_max_backward(rank) for rank in (2, 3)},
    **{f"avg_pool{rank}d_backward": _avg_pool_backward(rank) for rank in (2, 3)},
    **{f"_adaptive_avg_pool{rank}d_backward": _adaptive_mean_backward(rank) for rank in (2, 3)},
    **{f"{name}_backward": _upsample_backward(mode) for name, mode in UPSAMPLES.items()},
}
