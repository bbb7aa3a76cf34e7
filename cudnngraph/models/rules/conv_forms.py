"""Convolutions that run faster as other ops: by constant weights, and those of groups by any."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...device.rules import rules
from ...graph.value import Value, set_stride
from ...ir.spec import channels_last_strides, dense_strides, is_channels_last, is_contiguous
from ...ops.base import LOW_PRECISION
from ..channels import RANKS
from .shape import between

if TYPE_CHECKING:
    from ..convert import Importer

Options = dict[str, Any]


EIGHT = 8  # 16-bit numbers that engines with tensor cores move at a time


def has_rows_of_pixels(c: Importer, x: Value, weight: Value | torch.Tensor) -> bool:
    """Whether a convolution reads 16-bit images on a GPU in which the channels of a pixel lie side
    by side, a multiple of eight of them."""
    if not (c.on_gpu and c.kernels) or len(x.shape) < 4 or x.spec is None:
        return False
    if x.dtype not in LOW_PRECISION or weight.dtype != x.dtype or x.shape[1] % EIGHT:
        return False
    return is_channels_last(x.shape, x.spec.stride)


def by_other_ops(
    c: Importer, x: Value, weight: torch.Tensor, bias: torch.Tensor | None, options: Options
) -> Value | None:
    """The convolution of x (N, C, *spatial) as a product or as dense convolutions, with its bias;
    None where it is best one convolution."""
    if not c.on_gpu or x.dtype not in LOW_PRECISION or c.packed(x) or x.spec is None:
        return None
    if options["groups"] == 1:
        whole = _whole(c, x, weight, bias, options)
        return _long(c, x, weight, bias, options) if whole is None else whole
    if weight.shape[1] == 1 and len(x.shape) == 3:
        return _depthwise(c, x, weight, bias, options) if c.kernels else None
    long = _long(c, x, weight, bias, options)
    return _dense(c, x, weight, bias, options) if long is None else long


def by_channels(c: Importer, x: Value, weight: torch.Tensor) -> bool:
    """Whether a convolution of sequences x (N, C, L) is to have channels the fastest dim, which its
    engines want: they copy others, before and behind. A depthwise one is no such engine's."""
    if not c.on_gpu or x.dtype not in LOW_PRECISION or len(x.shape) != 3 or x.spec is None:
        return False
    return not weight.shape[1] == 1 < x.shape[1]


def laid_out(c: Importer, x: Value, weight: torch.Tensor) -> Value:
    """What a convolution reads, as it wants it."""
    if x.spec is None or not by_channels(c, x, weight):
        return x
    if is_channels_last(x.shape, x.spec.stride):
        return x
    made = c.g.identity(x)
    set_stride(made, channels_last_strides(x.shape))
    return made


def _whole(
    c: Importer, x: Value, weight: torch.Tensor, bias: torch.Tensor | None, options: Options
) -> Value | None:
    """One whose window is the whole image: a product of images and weights."""
    window = tuple(weight.shape[2:])
    if options["padding"] not in ("valid", (0,) * len(window)):
        return None
    if x.shape[2:] != window or math.prod(window) == 1:
        return None
    stride = () if x.spec is None else x.spec.stride
    order = (0, *range(2, len(x.shape)), 1)
    if is_channels_last(x.shape, stride):
        x, weight = c.g.permute(x, order), weight.permute(order)
    elif not is_contiguous(x.shape, stride):
        return None
    rows = c.g.reshape(x, (x.shape[0], math.prod(x.shape[1:])))
    held = c.constant(weight.reshape(weight.shape[0], -1).t(), "weight")
    y = c.g.matmul(rows, held)
    if bias is not None:
        y = c.g.add(y, c.constant(bias, "bias"))
    return c.g.reshape(y, (*y.shape, *(1 for _ in window)))


def _depthwise(
    c: Importer, x: Value, weight: torch.Tensor, bias: torch.Tensor | None, options: Options
) -> Value:
    """One of each channel of sequences: of images of one row, which kernels are generated for."""
    padding = options["padding"]
    flat = {
        **options,
        "padding": padding if isinstance(padding, str) else (0, *padding),
        "stride": (1, *options["stride"]),
        "dilation": (1, *options["dilation"]),
    }
    if not isinstance(padding, str) and not isinstance(padding[0], int):
        flat["padding"] = ((0, 0), *padding)
    rows = c.g.reshape(x, (*x.shape[:2], 1, x.shape[2]))
    y = c.g.conv(rows, c.image_weight(weight.unsqueeze(2), rows), **flat)
    y = y if bias is None else c.biased_value(y, bias)
    return c.g.reshape(y, (*y.shape[:2], y.shape[3]))


def _long(
    c: Importer, x: Value, weight: torch.Tensor, bias: torch.Tensor | None, options: Options
) -> Value | None:
    """One of sequences with a long window, as a product of blocks of steps and their weights.

    A block of results depends on the steps of a few blocks, which lie side by side as a row.
    """
    if len(x.shape) != 3 or weight.shape[2] < rules().long_window_min:
        return None
    if options["stride"] != (1,) or options["dilation"] != (1,):
        return None
    groups, window = options["groups"], weight.shape[2]
    before, behind = _ends(options["padding"], window)
    batch, length = x.shape[0], x.shape[2]
    many, results = weight.shape[1], weight.shape[0] // groups
    steps = length + before + behind - window + 1
    if steps < 1:
        return None
    block = block_of_steps(batch * steps, groups, many, results, window)
    read, blocks = blocks_read(block, window), -(-steps // block)
    held = c.constant(weight_of_blocks(weight, groups, block), "weight")
    last = (blocks + read - 1) * block - length - before
    rows = between(c, c.g.permute(x, (0, 2, 1)), 1, before, last, 0.0)
    rows = c.g.reshape(rows, (batch, blocks + read - 1, block, groups, many))
    rows = c.g.permute(rows, (3, 0, 1, 2, 4))
    rows = c.g.reshape(rows, (groups, batch, blocks + read - 1, block * many))
    rows = c.g.concat([c.g.slice(rows, 2, at, at + blocks) for at in range(read)], 3)
    rows = c.g.reshape(rows, (groups, batch * blocks, read * block * many))
    y = c.g.matmul(rows, held)
    y = c.g.reshape(y, (groups, batch, blocks, block, results))
    y = c.g.permute(y, (1, 2, 3, 0, 4))
    y = c.g.reshape(y, (batch, blocks * block, groups * results))
    y = c.g.slice(y, 1, 0, steps)
    if bias is not None:
        y = c.g.add(y, c.constant(bias, "bias"))
    return c.g.permute(y, (0, 2, 1))


def _ends(padding: Any, window: int) -> tuple[int, int]:
    """How many zeros stand before and behind a sequence."""
    if isinstance(padding, str):
        both = window - 1 if padding == "same" else 0
        return both // 2, both - both // 2
    (one,) = padding
    return (one, one) if isinstance(one, int) else one


def block_of_steps(rows: int, groups: int, many: int, results: int, window: int) -> int:
    """How many steps of so many are a block, so that fewest elements move: those of the weights
    are read, those of the rows written and read."""

    def moved(block: int) -> int:
        row = blocks_read(block, window) * block * many
        return groups * row * (block * results + 2 * -(-rows // block))

    return min((1 << power for power in range(window.bit_length())), key=moved)


def blocks_read(block: int, window: int) -> int:
    """How many blocks of steps the results of one depend on."""
    return -(-(block + window - 1) // block)


def weight_of_blocks(weight: torch.Tensor, groups: int, block: int) -> torch.Tensor:
    """(K, C / groups, window) → (groups, steps read x C / groups, block x K / groups): zeros but
    for the window of each result."""
    results, many, window = weight.shape[0] // groups, *weight.shape[1:]
    read = blocks_read(block, window) * block
    made = weight.new_zeros(groups, read, many, block, results)
    apart = weight.reshape(groups, results, many, window).permute(0, 3, 2, 1)
    for step in range(block):
        made[:, step : step + window, :, step] = apart
    return made.reshape(groups, read * many, block * results)


def _dense(
    c: Importer, x: Value, weight: torch.Tensor, bias: torch.Tensor | None, options: Options
) -> Value | None:
    """One of groups of channels: a dense convolution of several groups together, or a few."""
    groups, many = options["groups"], weight.shape[1]
    results = weight.shape[0] // groups
    together = groups_together(groups, many, results, math.prod(weight.shape[2:]))
    if together is None:
        return None
    whole = dense_weight(weight, groups, together)

    def weight_of(rows: slice, of_x: Value) -> Value:
        return c.image_weight(whole[rows], of_x)

    def biased(y: Value, rows: slice) -> Value:
        return y if bias is None else c.biased_value(y, bias[rows])

    parts = _parts(groups, together, many, results)
    return _by_parts(c, x, weight_of, parts, {**options, "groups": 1}, biased)


def by_dense_values(c: Importer, x: Value, weight: Value, options: Options) -> Value | None:
    """The convolution of x by a weight that changes, of groups of channels, as dense ones or of
    wider groups; None where it is best as it is."""
    form = _form(c, x, weight, options["groups"])
    if form is None:
        return None
    together, parts, groups = form
    whole = dense_value(c, weight, options["groups"], together, x)

    def weight_of(rows: slice, of_x: Value) -> Value:
        return _sliced(c, whole, 0, rows)

    return _by_parts(c, x, weight_of, parts, {**options, "groups": groups}, lambda y, rows: y)


def gradients_by_dense_values(
    c: Importer,
    dy: Value,
    x: Value,
    weight: Value,
    extra: Sequence[int],
    options: Options,
    wanted: tuple[bool, bool],
) -> tuple[Value | None, Value | None] | None:
    """The gradients of x and of the weight, where they are ``wanted``, of a convolution that
    :func:`by_dense_values` takes; ``extra`` is the padding of the first one's result."""
    form = _form(c, x, weight, options["groups"])
    if form is None:
        return None
    together, parts, groups = form
    whole = dense_value(c, weight, options["groups"], together, x) if wanted[0] else None
    results, window = weight.shape[0] // options["groups"], weight.shape[2:]
    options = {**options, "groups": groups}
    images, weights = [], []
    for columns, rows in parts:
        of_dy = _sliced(c, dy, 1, rows)
        if whole is not None:
            of_weight = _sliced(c, whole, 0, rows)
            images.append(c.g.conv_transpose(of_dy, of_weight, output_padding=extra, **options))
        if wanted[1]:
            of_x = _sliced(c, x, 1, columns)
            made = c.g.conv_wgrad(of_dy, of_x, kernel=window, **options)
            weights.append(_of_groups(c, made, together, results))
    return _joined(c, images, 1), _joined(c, weights, 0)


Parts = list[tuple[slice, slice]]  # the channels and the results of each convolution


def _form(c: Importer, x: Value, weight: Value, groups: int) -> tuple[int, Parts, int] | None:
    """How many groups of a weight that changes are put together, the convolutions that there are
    then, and the groups of each; see :func:`groups_together`, :func:`narrow_together`."""
    if not (c.on_gpu and c.kernels) or x.dtype not in LOW_PRECISION or x.spec is None:
        return None
    if weight.dtype != x.dtype or weight.spec is None or len(x.shape) not in RANKS:
        return None
    width = weight.shape[1], weight.shape[0] // groups
    together = groups_together(groups, *width, math.prod(weight.shape[2:]))
    if together is not None:
        return together, _parts(groups, together, *width), 1
    together = narrow_together(groups, *width)
    return (
        None if together is None else (together, _parts(groups, groups, *width), groups // together)
    )


def _parts(groups: int, together: int, many: int, results: int) -> Parts:
    """Those of so many groups each."""
    return [
        (
            slice(first * many, (first + together) * many),
            slice(first * results, (first + together) * results),
        )
        for first in range(0, groups, together)
    ]


def _by_parts(
    c: Importer,
    x: Value,
    weight_of: Callable[[slice, Value], Value],
    parts: Parts,
    options: Options,
    behind: Callable[[Value, slice], Value],
) -> Value | None:
    """Convolutions of parts of the channels, their results side by side."""
    made = []
    for columns, rows in parts:
        of_x = _sliced(c, x, 1, columns)
        made.append(behind(c.g.conv(of_x, weight_of(rows, of_x), **options), rows))
    return _joined(c, made, 1)


def _joined(c: Importer, parts: list[Value], dim: int) -> Value | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return c.g.concat(parts, dim)


def _sliced(c: Importer, x: Value, dim: int, of: slice) -> Value:
    """Such elements of a dim, or all of it."""
    return x if of.stop - of.start == x.shape[dim] else c.g.slice(x, dim, of.start, of.stop)


def groups_together(groups: int, many: int, results: int, window: int) -> int | None:
    """How many groups of ``many`` channels and so many results one dense convolution has; None
    where cuDNN's engines for groups are faster.

    They are where both numbers are the same power of two and the window has several elements; other
    groups run one after the other, or are copied.
    """
    limit = rules().grouped_as_dense_max_channels
    if max(many, results) == 1 or many == 1 or not limit:
        return None
    if window > 1 and many == results and many & (many - 1) == 0:
        return None
    fitting = [n for n in range(2, groups + 1) if groups % n == 0 and n * many <= limit]
    return max(fitting, default=None)


def narrow_together(groups: int, many: int, results: int) -> int | None:
    """How many narrow groups are one, for a convolution that trains; None for as they are."""
    for most, wide, number in rules().narrow_groups:
        if many <= most:
            together = wide // many
            left = number and groups % number == 0
            if many == 1 or many != results or together < 2 or groups % together or left:
                return None
            return together
    return None


def dense_value(c: Importer, weight: Value, groups: int, together: int, x: Value) -> Value:
    """:func:`dense_weight` of a weight that changes, laid out as x is."""
    results, many, *window = weight.shape
    parts = (groups // together,) if together < groups else ()
    split = (*parts, together, results // groups)
    whole = c.g.where(
        _own_group(c, together, len(parts), len(window)),
        c.g.reshape(weight, (*split, 1, many, *window)),
        0.0,
    )
    if x.spec is not None and not is_contiguous(x.shape, x.spec.stride):
        rows = len(split)
        order = (*range(rows), *range(rows + 2, len(whole.shape)), rows, rows + 1)
        set_stride(whole, dense_strides(whole.shape, order))
    return c.g.reshape(whole, (results, together * many, *window))


def _of_groups(c: Importer, whole: Value, together: int, results: int) -> Value:
    """Of the gradient of a dense weight that of each group by the channels of its own."""
    rows, channels, *window = whole.shape
    many, parts = channels // together, rows // (together * results)
    split = (parts, together, results) if parts > 1 else (together, results)
    apart = c.g.reshape(whole, (*split, together, many, *window))
    own = c.g.where(_own_group(c, together, len(split) - 2, len(window)), apart, 0.0)
    return c.g.reshape(c.g.reduction(own, len(split)), (rows, many, *window))


def _own_group(c: Importer, together: int, ahead: int, behind: int) -> Value:
    """Where (..., together, rows, together, columns, ...) is of the same group."""
    own = torch.eye(together, dtype=torch.bool, device=c.device)
    return c.constant(own.reshape(*(1,) * ahead, together, 1, together, 1, *(1,) * behind))


def dense_weight(weight: torch.Tensor, groups: int, together: int) -> torch.Tensor:
    """(K, C / groups, ...) → (K, C of so many groups, ...), zeros beside those of each group."""
    results, many = weight.shape[0] // groups, weight.shape[1]
    whole = weight.new_zeros(weight.shape[0], together * many, *weight.shape[2:])
    for group in range(groups):
        rows = slice(group * results, (group + 1) * results)
        first = group % together * many
        whole[rows, first : first + many] = weight[rows]
    return whole
