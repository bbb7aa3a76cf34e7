"""Rules for reductions, pooling and resizing."""

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
from .base import Arguments, Rule, Skip, cast_to, first, gives_many, reads, spread
from .contraction import contracted
from .shape import MOST_PLACED, in_order

if TYPE_CHECKING:
    from ..convert import Importer


def _reduced(mode: str) -> Rule:
    def rule(c: Importer, a: Arguments) -> Value:
        x, dtype = c.value(a["self"]), a.get("dtype")
        if mode == "sum" and x.dtype == torch.bool:
            return _count(c, a, x)
        if dtype not in (None, x.dtype):
            if not c.kernels or dtype not in FLOATS:
                raise Skip
            x = c.g.cast(x, dtype)
        dims = a.get("dim")
        dims = None if dims is None or dims == [] else tuple(spread(dims, 1))
        if mode == "sum" and dims is not None:
            product = contracted(c, dims, keepdim=bool(a.get("keepdim", False)))
            if product is not None:
                return product
        if x.dtype in LOW_PRECISION:  # of which a reduction of ours is float32
            if mode == "mean" and c.kernels and _of_images(x, dims):
                y = c.g.adaptive_avg_pool(x, (1,) * (len(x.shape) - 2))
                return y if a.get("keepdim", False) else c.g.reshape(y, x.shape[:2])
            if c.kernels:
                return c.g.cast(c.g.reduction(x, dims, mode, bool(a.get("keepdim"))), x.dtype)
            raise Skip  # torch's own returns 16 bits of 16 bits, in one kernel
        return c.g.reduction(x, dims, mode, bool(a.get("keepdim", False)))

    return rule


MOST_COUNTED = 1 << 24  # that float32 counts


def _count(c: Importer, a: Arguments, x: Value) -> Value:
    """How many of bools are true."""
    made = c.node.meta["val"]
    if not c.kernels or math.prod(x.shape) > MOST_COUNTED * max(1, made.numel()):
        raise Skip
    dims = a.get("dim")
    dims = None if dims is None or dims == [] else tuple(spread(dims, 1))
    ones = _ones(c, x)
    return cast_to(c, c.g.reduction(ones, dims, "sum", bool(a.get("keepdim", False))), made.dtype)


def _ones(c: Importer, x: Value) -> Value:
    """1.0 where a bool is true, else 0.0."""
    return c.g.where(x, c.constant(torch.ones((), device=c.device), "one"), 0.0)


def _largest(mode: str) -> Rule:
    """The largest or least along a dim, if nobody reads where they are."""

    def rule(c: Importer, a: Arguments) -> Any:
        if not gives_many(c.node):  # of all elements
            return _reduced(mode)(c, a)
        if reads(c.node, 1):
            raise Skip
        return _reduced(mode)(c, a), None

    return rule


def _least_and_largest(c: Importer, a: Arguments) -> tuple[Value, Value]:
    return _reduced("min")(c, a), _reduced("max")(c, a)


def _truth(mode: str) -> Rule:
    """Whether any element is true, or all are: the largest or least of ones and zeros."""

    def rule(c: Importer, a: Arguments) -> Value:
        x, dims = c.value(a["self"]), a.get("dim")
        if not c.kernels or 0 in x.shape or not (x.dtype in FLOATS or x.dtype == torch.bool):
            raise Skip
        if x.dtype != torch.bool:
            x = c.g.ne(x, 0.0)
        dims = None if dims is None or dims == [] else tuple(spread(dims, 1))
        found = c.g.reduction(_ones(c, x), dims, mode, bool(a.get("keepdim", False)))
        return c.g.gt(found, 0.5)

    return rule


def _wide(c: Importer, a: Arguments) -> tuple[Value, tuple[int, ...] | None]:
    """The operand of a reduction in the dtype that torch computes it in, and its dims, None for
    all."""
    x, dims = c.value(a["self"]), a.get("dim")
    given = a.get("dtype") or x.dtype
    if x.dtype not in FLOATS or given not in FLOATS:
        raise Skip
    wide = torch.float32 if given in LOW_PRECISION else given
    if x.dtype != wide:
        if not c.kernels:
            raise Skip  # torch's own is one kernel, which rounds once
        x = c.g.cast(x, wide)
    return x, None if dims is None or dims == [] else tuple(spread(dims, 1))


def _narrowed(c: Importer, a: Arguments, y: Value) -> Value:
    """A result in the dtype that is asked for, or that of the operand."""
    dtype = a.get("dtype") or c.value(a["self"]).dtype
    return y if y.dtype == dtype else c.g.cast(y, dtype)


def _vector_norm(c: Importer, a: Arguments) -> Value:
    """The norm of order 1, 2 or infinity."""
    order = a["ord"] if "ord" in a else a.get("p")
    x, dims = _wide(c, a)
    keepdim = bool(a.get("keepdim", False))
    if order in (2, None):
        y = c.g.sqrt(c.g.reduction(c.g.mul(x, x), dims, "sum", keepdim))
    elif order in (1, math.inf):
        y = c.g.reduction(c.g.abs(x), dims, "sum" if order == 1 else "max", keepdim)
    else:
        raise Skip
    return _narrowed(c, a, y)


def _spread_of(root: bool) -> Rule:
    """The variance, or its root: the squares of what is off the mean, n - correction of them."""

    def rule(c: Importer, a: Arguments) -> Value:
        x, dims = _wide(c, a)
        if not c.kernels or "unbiased" in a:
            raise Skip  # torch's own is one kernel; or another overload, which torch takes apart
        correction = a.get("correction", 1)
        over = range(len(x.shape)) if dims is None else dims
        terms = math.prod(x.shape[dim] for dim in over) - (1 if correction is None else correction)
        if terms <= 0:
            raise Skip  # no number, as torch has it
        off = c.g.sub(x, c.g.reduction(x, dims, "mean", True))
        squares = c.g.reduction(c.g.mul(off, off), dims, "sum", bool(a.get("keepdim", False)))
        y = c.g.mul(squares, 1.0 / terms)
        return _narrowed(c, a, c.g.sqrt(y) if root else y)

    return rule


def _spread_and_mean(root: bool) -> Rule:
    def rule(c: Importer, a: Arguments) -> tuple[Value, Value]:
        return _spread_of(root)(c, a), _reduced("mean")(c, a)

    return rule


def _logsumexp(c: Importer, a: Arguments) -> Value:
    """m + log(sum(exp(x - m))) with the maximum m of x, 0 in place of one that is infinite."""
    x, dims = _wide(c, a)
    if dims is None or 0 in x.shape or not c.kernels:
        raise Skip
    most = c.g.reduction(x, dims, "max", True)
    infinite = torch.full((), math.inf, dtype=x.dtype, device=c.device)
    finite = c.g.lt(c.g.abs(most), c.constant(infinite, "infinite"))
    most = c.g.where(finite, most, 0.0)
    total = c.g.reduction(c.g.exp(c.g.sub(x, most)), dims, "sum", True)
    y = c.g.add(c.g.log(total), most)
    return _narrowed(c, a, c.g.reshape(y, tuple(c.node.meta["val"].shape)))


def _of_images(x: Value, dims: Sequence[int] | None) -> bool:
    """Whether dims are all those behind the channels, of one to three."""
    rank = len(x.shape)
    return rank in (3, 4, 5) and {dim % rank for dim in dims or ()} == set(range(2, rank))


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
    "mean": _reduced("mean"),
    "sum": _reduced("sum"),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _vector_norm),
    "var": _spread_of(root=False),
    "std": _spread_of(root=True),
    "var_mean": _spread_and_mean(root=False),
    "std_mean": _spread_and_mean(root=True),
    "aminmax": _least_and_largest,
    "any": _truth("max"),
    "all": _truth("min"),
    **dict.fromkeys(("logsumexp", "special_logsumexp"), _logsumexp),
    "amax": _reduced("max"),
    "max": _largest("max"),
    "min": _largest("min"),
    "amin": _reduced("min"),
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
