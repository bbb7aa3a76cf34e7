"""Pooling and interpolation as torch has them: the call of each op, its gradient, its out variant.

A call takes the operands and the attributes in canonical form, as the reference rule of an op does.
Images with one spatial dim are pooled as such with two, the first of extent 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ..device.allocation import outside_graph_pool
from ..device.rules import rules
from ..ir.spec import channels_last_strides, contiguous_strides
from .base import LOW_PRECISION

Attrs = Mapping[str, Any]
Tensors = Sequence[Any]
Into = Callable[[Tensors, Attrs, torch.Tensor], object]

_aten: Any = torch.ops.aten
_FILL = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1, "output_size": 1}

# Mode of interpolation and number of spatial dims → the name of torch's op.
UPSAMPLE: Mapping[tuple[str, int], str] = {
    **{("nearest", rank): f"upsample_nearest{rank}d" for rank in (1, 2, 3)},
    **{("nearest-exact", rank): f"_upsample_nearest_exact{rank}d" for rank in (1, 2, 3)},
    ("linear", 1): "upsample_linear1d",
    ("bilinear", 2): "upsample_bilinear2d",
    ("bicubic", 2): "upsample_bicubic2d",
    ("trilinear", 3): "upsample_trilinear3d",
}


def _image(x: torch.Tensor) -> torch.Tensor:
    """x with two spatial dims at least, and the strides of its layout.

    Strides of dims of extent 1 are anything, but torch guesses a layout from them too. A check
    faulted on a GPU for one channel and one row, whose strides were (4, 1, 1).
    """
    x = x.unsqueeze(2) if x.dim() == 3 else x
    strides = contiguous_strides(x.shape)
    return x.as_strided(x.shape, strides) if x.is_contiguous() and x.stride() != strides else x


def _line(y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return y.squeeze(2) if like.dim() == 3 else y


def _many(attrs: Attrs, *names: str) -> list[Sequence[int]]:
    return [(_FILL[name], *attrs[name]) if len(attrs[name]) == 1 else attrs[name] for name in names]


def _pooled(kind: str, x: torch.Tensor) -> Any:
    """torch's op of ``kind`` for images as x."""
    return getattr(_aten, kind.format(max(2, x.dim() - 2)))


def _max_arguments(attrs: Attrs) -> list[Any]:
    names = ("kernel_size", "stride", "padding", "dilation")
    return [*_many(attrs, *names), attrs["ceil_mode"]]


def _avg_arguments(attrs: Attrs) -> list[Any]:
    names = ("kernel_size", "stride", "padding")
    return [*_many(attrs, *names), attrs["ceil_mode"], attrs["count_include_pad"], None]


# op → the format of its name, its arguments behind x, and whether it also hands out indices.
_POOLS: Mapping[str, tuple[str, Callable[[Attrs], list[Any]], bool]] = {
    "max_pool": ("max_pool{}d_with_indices", _max_arguments, True),
    "avg_pool": ("avg_pool{}d", _avg_arguments, False),
    "adaptive_avg_pool": ("_adaptive_avg_pool{}d", lambda a: _many(a, "output_size"), False),
    "adaptive_max_pool": ("adaptive_max_pool{}d", lambda a: _many(a, "output_size"), True),
}


def _pool(op: str) -> Callable[[Tensors, Attrs], torch.Tensor]:
    kind, arguments, indexed = _POOLS[op]

    def run(inputs: Tensors, attrs: Attrs) -> torch.Tensor:
        x = inputs[0]
        y = _pooled(kind, x)(_image(x), *arguments(attrs))
        return _line(y[0] if indexed else y, x)

    return run


def _max_backward(op: str) -> Callable[[Tensors, Attrs], torch.Tensor]:
    """By pooling x again: the indices that torch would keep take 8 bytes an element."""
    kind, arguments, _ = _POOLS[op]

    def run(inputs: Tensors, attrs: Attrs) -> torch.Tensor:
        dy, x = inputs
        image, given = _image(x), arguments(attrs)
        _, indices = _pooled(kind, x)(image, *given)
        given = given if op == "max_pool" else []
        dx = _pooled(f"{kind}_backward", x)(_image(dy), image, *given, indices)
        return _line(dx, x)

    return run


def _avg_backward(op: str) -> Callable[[Tensors, Attrs], torch.Tensor]:
    kind, arguments, _ = _POOLS[op]

    def run(inputs: Tensors, attrs: Attrs) -> torch.Tensor:
        (dy,) = inputs
        like = dy.new_empty((*dy.shape[:2], *attrs["input_size"]))  # only asked for its shape
        given = arguments(attrs) if op == "avg_pool" else []
        dx = _pooled(f"{kind}_backward", dy)(_image(dy), _image(like), *given)
        return _line(dx, dy)

    return run


def _upsampling(x: torch.Tensor, attrs: Attrs) -> tuple[str, list[Any], list[Any]]:
    """The name of torch's op, and its arguments before and behind the input's size."""
    name = UPSAMPLE[attrs["mode"], x.dim() - 2]
    scales = attrs["scale_factor"] or [None] * (x.dim() - 2)
    corners = [] if "nearest" in name else [attrs["align_corners"]]
    return name, corners, list(scales)


def sizes(shape: Sequence[int], attrs: Attrs) -> tuple[int, ...]:
    """The spatial sizes that interpolation gives to an image of spatial sizes ``shape``."""
    if attrs["size"] is not None:
        return tuple(attrs["size"])
    return tuple(int(n * scale) for n, scale in zip(shape, attrs["scale_factor"], strict=True))


def _interpolate(inputs: Tensors, attrs: Attrs) -> torch.Tensor:
    (x,) = inputs
    name, corners, scales = _upsampling(x, attrs)
    y: torch.Tensor = getattr(_aten, name)(x, sizes(x.shape[2:], attrs), *corners, *scales)
    return y


def _interpolate_backward(inputs: Tensors, attrs: Attrs) -> torch.Tensor:
    """In float32 where torch's kernels would add up in 16 bits, one term after the other: off by
    1.9e-2 in bf16 by 8 in each dim."""
    (dy,) = inputs
    name, corners, scales = _upsampling(dy, attrs)
    shape = (*dy.shape[:2], *attrs["input_size"])
    wide = dy.float() if "nearest" not in name and dy.dtype.itemsize < 4 else dy
    run = getattr(_aten, f"{name}_backward")
    dx: torch.Tensor = run(wide, dy.shape[2:], shape, *corners, *scales)
    return dx.to(dy.dtype)


#: op → its call.
RULES: Mapping[str, Callable[[Tensors, Attrs], torch.Tensor]] = {
    **{op: _pool(op) for op in _POOLS},
    **{f"{op}_backward": _max_backward(op) for op in ("max_pool", "adaptive_max_pool")},
    **{f"{op}_backward": _avg_backward(op) for op in ("avg_pool", "adaptive_avg_pool")},
    "interpolate": _interpolate,
    "interpolate_backward": _interpolate_backward,
}


def _plain(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both with the strides of a layout that torch's out variants write, if both lie in it.

    Strides of dims of extent 1 are anything, but torch's kernels guess the layout from them too,
    each tensor's from its own, and write to other places where the guesses differ.
    """
    if x.is_contiguous() and out.is_contiguous():
        strides = contiguous_strides
    elif x.dim() == 4 and _lie_channels_last(x, out):
        strides = channels_last_strides
    else:
        return None
    return x.as_strided(x.shape, strides(x.shape)), out.as_strided(out.shape, strides(out.shape))


def _lie_channels_last(*images: torch.Tensor) -> bool:
    return all(image.is_contiguous(memory_format=torch.channels_last) for image in images)


def _pool_into(op: str) -> Into:
    kind, arguments, indexed = _POOLS[op]

    def run(inputs: Tensors, attrs: Attrs, out: torch.Tensor) -> object:
        plain = _plain(_image(inputs[0]), _image(out.detach()))
        if plain is None:
            return out.copy_(RULES[op](inputs, attrs))
        x, y = plain
        into = _pooled(kind.removeprefix("_"), x).out
        if not indexed:
            return into(x, *arguments(attrs), out=y)
        indices = torch.empty_like(y, dtype=torch.int64)
        return into(x, *arguments(attrs), out=y, indices=indices)

    return run


# -- interpolation --------------------------------------------------------------------------------


def _interpolate_into(inputs: Tensors, attrs: Attrs, out: torch.Tensor) -> object:
    (x,) = inputs
    if all(size == 1 for size in x.shape[2:]):  # of whatever mode: all weights are of one element
        return out.copy_(x.expand(out.shape))
    plain = _plain(x, out.detach())
    if plain is None:
        return out.copy_(_interpolate(inputs, attrs))
    name, corners, scales = _upsampling(x, attrs)
    x, y = plain
    return getattr(_aten, name).out(x, y.shape[2:], *corners, *scales, out=y)


def weights(size: int, wanted: int, corners: bool, scale: float | None) -> torch.Tensor:
    """The matrix of linear interpolation of ``size`` elements to ``wanted``, in float32.

    It is (wanted, size), two numbers a row, which torch's kernels compute in float32 too.
    """
    options: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    at = torch.arange(wanted, **options)
    if corners:
        source = at * ((size - 1) / max(wanted - 1, 1))
    else:
        source = ((at + 0.5) * (1.0 / scale if scale else size / wanted) - 0.5).clamp_min(0)
    low = source.long().clamp_max(size - 1)
    part, high = source - low, (low + 1).clamp_max(size - 1)
    made, rows = torch.zeros(wanted, size, **options), torch.arange(wanted, device="cpu")
    made.index_put_((rows, low), 1 - part, accumulate=True)
    made.index_put_((rows, high), part, accumulate=True)
    return made


@cache
def _matrix(
    size: int,
    wanted: int,
    corners: bool,
    scale: float | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """:func:`weights` in ``dtype`` on ``device``, None where they are not exact in it.

    Made once and never let go: a CUDA graph may hold its address.
    """
    exact = weights(size, wanted, corners, scale)
    rounded = exact.to(dtype)
    if not torch.equal(rounded.float(), exact):
        return None
    return outside_graph_pool(device, lambda: rounded.to(device))


def _lengthened(
    x: torch.Tensor, dim: int, matrix: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """``matrix`` (wanted, size) times ``dim`` of x, by one product."""
    shape = (*x.shape[:dim], matrix.shape[0], *x.shape[dim + 1 :])
    out = x.new_empty(shape) if out is None else out
    x, to = _split(x, dim), _split(out, dim)
    if x.shape[2] == 1:
        torch.mm(x[:, :, 0], matrix.t(), out=to[:, :, 0])
    else:
        torch.bmm(matrix.expand(x.shape[0], *matrix.shape), x, out=to)
    return out


def _split(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x as (what is before ``dim``, ``dim``, what is behind it): a view, else RuntimeError."""
    return x.view(math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :]))


def _splits(x: torch.Tensor, dim: int) -> bool:
    try:
        _split(x, dim)
    except RuntimeError:
        return False
    return True


def _channels_last(x: torch.Tensor) -> bool:
    return x.movedim(1, -1).is_contiguous()


def enlarging(
    attrs: Attrs,
    x: torch.Tensor,
    out: torch.Tensor,
    device: torch.device,
    least: int | None = None,
) -> Into | None:
    """Linear interpolation to twice the size or more (or twice the gaps between the corners) as a
    product of matrices for each dim; None where torch's own kernel is to run. It is for tensors on
    ``device`` of the shapes, strides and dtypes of x and ``out``, which may be without memory.

    torch's kernels compute every weight anew: an H200 takes 198 us to write 44 MB of channels_last
    fp16. The products read weights that were made here, once, and are fast on tensor cores alone:
    they are for 16-bit data, which also keeps torch's TF32 switch out of it.

    *Accuracy.* What lies between the products is rounded to the data's dtype, as the result is; the
    weights must be exact in it, as they are where the size grows by a power of two. The result of
    normal data is off by 2.9e-4 in fp16, torch's by 2.1e-4, and one rounding may make it 4.9e-4; in
    bf16 by 2.3e-3, 1.7e-3 and 3.9e-3. (Weights rounded as well made it 4.0e-4 and 3.2e-3, by 7/3:
    too near to what is allowed.) A sum has two terms that are not zero, so that splitting it, as
    ``allow_fp16_reduced_precision_reduction`` lets cuBLAS do, changes nothing;
    ``allow_fp16_accumulation`` costs one rounding more a product.

    *Infinities and NaN.* A product multiplies by zero what torch's kernels do not read: one element
    that is not finite makes NaN of its whole image, in its channel, not of its neighbours alone.
    """
    last = not x.is_contiguous() or not out.is_contiguous()
    rank = x.dim() - 2
    if (
        attrs["mode"] not in ("linear", "bilinear")
        or x.dtype not in LOW_PRECISION
        or out.dtype != x.dtype
        or out.numel() < (rules().resize_by_matmul_min_elements if least is None else least)
        or math.prod(x.shape[2:]) == 1  # a copy
        or not (_channels_last(x) if last else x.is_contiguous())
        or any(
            m < 2 * n - 1 or n > rules().resize_by_matmul_max_dim
            for n, m in zip(x.shape[2:], out.shape[2:], strict=True)
        )
    ):
        return None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None  # the weights could not be copied to it
    # The fastest dim first, where the sums' results are fewest; but what is written at last must be
    # one matrix to each product, as it is not within wider rows.
    place = 1 if last else 2
    order = list(range(place + rank - 1, place - 1, -1))
    if not _splits(out.movedim(1, -1) if last else out, order[-1]):
        order.reverse()
    if not _splits(out.movedim(1, -1) if last else out, order[-1]):
        return None
    scales = attrs["scale_factor"] or [None] * rank
    made = [
        _matrix(n, m, attrs["align_corners"], scale, x.dtype, device)
        for n, m, scale in zip(x.shape[2:], out.shape[2:], scales, strict=True)
    ]
    matrices = {place + at: matrix for at, matrix in enumerate(made) if matrix is not None}
    if len(matrices) < rank:
        return None

    def run(inputs: Tensors, attrs: Attrs, out: torch.Tensor) -> object:
        if torch.are_deterministic_algorithms_enabled():  # which cuBLAS is only by a setting
            return _interpolate_into(inputs, attrs, out)
        (x,) = inputs
        to = out
        if last:
            x, to = x.movedim(1, -1), to.movedim(1, -1)
        for dim in order:
            x = _lengthened(x, dim, matrices[dim], to if dim == order[-1] else None)
        return out

    return run


#: op → its call that writes to a given tensor of the result's shape and dtype.
INTO: Mapping[str, Into] = {
    **{op: _pool_into(op) for op in _POOLS},
    "interpolate": _interpolate_into,
}
