"""Pooling and interpolation of images: rows, inference and reference."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

from ..ir.spec import TensorSpec
from . import pooling
from .base import REQUIRED, InferContext, InferRule, Result, register
from .checks import conv_order, each_dim, flag, float_operand, int_tuple, same_dtype


def _spatial_rank(call: InferContext, port: str = "x") -> int | None:
    """Return the number of spatial dims; torch pools no image without channels or elements."""
    spec = call[port]
    rank = len(spec.shape) - 2
    if not float_operand(call, port):
        return None
    if rank not in (1, 2, 3):
        call.problem(
            f"{port} '{spec.name}' has {len(spec.shape)} dims {spec.shape}",
            "3, 4 or 5: (N, C, spatial...)",
        )
        return None
    if 0 in spec.shape[1:]:
        call.problem(
            f"{port} '{spec.name}' has shape {spec.shape}", "at least one channel and one element"
        )
        return None
    return rank


def _image_order(x: TensorSpec) -> tuple[int, ...]:
    """channels_last where x is unmistakably so (torch's rule), else contiguous."""
    return conv_order(x, x)


def in_padding(size: int, windows: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether one of the windows over a dim of ``size`` holds nothing of it.

    Only one that begins before the dim can, by a step over all of it: its first tap from 0 on comes
    too late. Of such a window torch's max pooling says an index that is not there, and its gradient
    writes to that place.
    """
    first = range(-padding, 0, stride)[:windows] if size < dilation else ()
    return any(start % dilation >= size for start in first)


def _pooled_sizes(call: InferContext, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The spatial sizes of what a pool makes of an image; its attributes in canonical form."""
    rank = len(shape)
    kernel = int_tuple(call, "kernel_size", rank, 1)
    if call.attrs["stride"] is None:
        call.attrs["stride"] = call.attrs["kernel_size"]
    stride = int_tuple(call, "stride", rank, 1)
    padding = int_tuple(call, "padding", rank, 0)
    dilation = int_tuple(call, "dilation", rank, 1) if "dilation" in call.attrs else (1,) * rank
    ceil = flag(call, "ceil_mode")
    if "count_include_pad" in call.attrs:
        flag(call, "count_include_pad")
    if kernel is None or stride is None or padding is None or dilation is None or call.problems:
        return None
    out = []
    for dim in range(rank):
        reach = dilation[dim] * (kernel[dim] - 1) + 1
        size = shape[dim] + 2 * padding[dim]
        if padding[dim] > kernel[dim] // 2:
            call.problem(
                f"padding={padding[dim]} over spatial dim {dim} is more than half of "
                f"kernel_size={kernel[dim]}",
                f"padding <= {kernel[dim] // 2}",
            )
        if rank == 3 and "count_include_pad" in call.attrs and kernel[dim] > shape[dim]:
            call.problem(  # torch asks it of averages of volumes alone
                f"kernel_size={kernel[dim]} over spatial dim {dim} is more than the size "
                f"{shape[dim]} of a volume",
                f"kernel_size <= {shape[dim]}, whatever the padding",
            )
        steps, rest = divmod(size - reach, stride[dim])
        # A window that begins in the padding behind the image is left out, as torch does.
        steps += ceil and rest > 0 and (steps + 1) * stride[dim] < shape[dim] + padding[dim]
        if steps < 0:
            call.problem(
                f"the window reaches {reach} (kernel_size {kernel[dim]}, dilation {dilation[dim]}) "
                f"over spatial dim {dim}, the padded input is {size}",
                "a window no larger than the padded input",
            )
        elif not call.problems and in_padding(
            shape[dim], steps + 1, stride[dim], padding[dim], dilation[dim]
        ):
            call.problem(
                f"a window over spatial dim {dim} lies in the padding alone (size {shape[dim]}, "
                f"kernel_size {kernel[dim]}, padding {padding[dim]}, dilation {dilation[dim]})",
                "an element of x in every window",
                "dilate less, or pad less",
            )
        out.append(steps + 1)
    return None if call.problems else tuple(out)


def _pool(call: InferContext) -> list[Result] | None:
    rank = _spatial_rank(call)
    out = None if rank is None else _pooled_sizes(call, call["x"].shape[2:])
    return None if out is None else [_image_result(call["x"], out)]


def _image_result(x: TensorSpec, sizes: Sequence[int]) -> Result:
    return Result((*x.shape[:2], *sizes), x.dtype, _image_order(x))


def _adaptive_sizes(call: InferContext, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Canonical form: one size per spatial dim; None in its place stands for the input's own."""
    given = call.attrs["output_size"]
    many = each_dim(given, len(shape))
    if len(many) == len(shape):
        many = tuple(n if want is None else want for n, want in zip(shape, many, strict=True))
    call.attrs["output_size"] = many
    return int_tuple(call, "output_size", len(shape), 1)


def _adaptive_pool(call: InferContext) -> list[Result] | None:
    rank = _spatial_rank(call)
    out = None if rank is None else _adaptive_sizes(call, call["x"].shape[2:])
    return None if out is None else [_image_result(call["x"], out)]


MODES_OF_RANK = {
    1: ("nearest", "nearest-exact", "linear"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic"),
    3: ("nearest", "nearest-exact", "trilinear"),
}


def _resized(call: InferContext, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The spatial sizes of what interpolation makes of an image; one of the attributes gives it."""
    rank, mode = len(shape), call.attrs["mode"]
    if mode not in MODES_OF_RANK[rank]:
        known = ", ".join(map(repr, MODES_OF_RANK[rank]))
        call.problem(f"mode={mode!r} with {rank} spatial dims", f"one of {known}")
        return None
    if call.attrs["align_corners"] is None:
        call.attrs["align_corners"] = False
    if flag(call, "align_corners") and mode.startswith("nearest"):
        call.problem(f"align_corners=True with mode={mode!r}", "a mode that interpolates linearly")
    size, scale = call.attrs["size"], call.attrs["scale_factor"]
    if (size is None) == (scale is None):
        call.problem(f"size={size!r} and scale_factor={scale!r}", "one of them")
        return None
    if scale is None:
        out = int_tuple(call, "size", rank, 1)
        return None if call.problems else out
    many = each_dim(scale, rank)
    if len(many) != rank or not all(
        isinstance(f, numbers.Real) and not isinstance(f, bool) and 0 < float(f) < math.inf
        for f in many
    ):
        call.problem(f"scale_factor={scale!r}", f"a positive number, or {rank} of them")
        return None
    call.attrs["scale_factor"] = many = tuple(map(float, many))
    out = tuple(int(n * f) for n, f in zip(shape, many, strict=True))
    if 0 in out:
        call.problem(f"scale_factor={scale!r} makes of {tuple(shape)} sizes {out}", "sizes >= 1")
    return None if call.problems else out


def _interpolate(call: InferContext) -> list[Result] | None:
    rank = _spatial_rank(call)
    out = None if rank is None else _resized(call, call["x"].shape[2:])
    return None if out is None else [_image_result(call["x"], out)]


def _pool_backward(call: InferContext) -> list[Result] | None:
    """The gradient of x from dy; x is an operand where its elements count, else its sizes are."""
    rank = _spatial_rank(call, "dy")
    if rank is None:
        return None
    dy, x = call["dy"], call.inputs.get("x")
    if x is None:
        sizes = int_tuple(call, "input_size", rank, 1)
    else:
        sizes = x.shape[2:] if same_dtype(call, "x", "dy") else None
    if sizes is None or (x is not None and _spatial_rank(call) is None):
        return None
    if x is not None and len(x.shape) != len(dy.shape):
        call.problem(f"dy '{dy.name}' has {len(dy.shape)} dims {dy.shape}", f"{len(x.shape)} dims")
        return None
    if "mode" in call.attrs:
        out = _resized(call, sizes)
    else:
        out = (_adaptive_sizes if "output_size" in call.attrs else _pooled_sizes)(call, sizes)
    if out is None:
        return None
    like = dy if x is None else x
    if dy.shape != (*like.shape[:2], *out):
        n, c = like.shape[:2]
        call.problem(
            f"dy '{dy.name}' has shape {dy.shape}",
            f"(N, C, out...) = ({n}, {c}, {', '.join(map(str, out))}), the forward's result",
        )
        return None
    return [_image_result(like, sizes)]


_POOL: dict[str, Any] = {"kernel_size": REQUIRED, "stride": None, "padding": 0}
_MAX: dict[str, Any] = {**_POOL, "dilation": 1, "ceil_mode": False}
_AVG: dict[str, Any] = {**_POOL, "ceil_mode": False, "count_include_pad": True}
_RESIZED: dict[str, Any] = {
    "size": None,
    "scale_factor": None,
    "mode": "nearest",
    "align_corners": False,
}


def _resample(name: str, inputs: str, infer: InferRule, **attrs: Any) -> None:
    outputs = "dx" if name.endswith("_backward") else "y"
    register(name, inputs, infer, pooling.RULES[name], outputs, torch_only=True, **attrs)


_resample("max_pool", "x", _pool, **_MAX, traits="keeps_positive")
_resample("max_pool_backward", "dy x", _pool_backward, **_MAX)
_resample("avg_pool", "x", _pool, **_AVG, traits="keeps_positive")
_resample("avg_pool_backward", "dy", _pool_backward, input_size=REQUIRED, **_AVG)
_resample("adaptive_avg_pool", "x", _adaptive_pool, output_size=REQUIRED, traits="keeps_positive")
_resample(
    "adaptive_avg_pool_backward",
    "dy",
    _pool_backward,
    output_size=REQUIRED,
    input_size=REQUIRED,
)
_resample("adaptive_max_pool", "x", _adaptive_pool, output_size=REQUIRED)
_resample("adaptive_max_pool_backward", "dy x", _pool_backward, output_size=REQUIRED)
_resample("interpolate", "x", _interpolate, **_RESIZED)
_resample("interpolate_backward", "dy", _pool_backward, input_size=REQUIRED, **_RESIZED)
