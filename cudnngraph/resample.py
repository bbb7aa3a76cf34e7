"""Pooling and interpolation as torch has them: the call of each op, its gradient, its out variant.

A call takes the operands and the attributes in canonical form, as the rules of
:mod:`~cudnngraph.reference` do. Images with one spatial dim are pooled as such with two, the first
of extent 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Attrs = Mapping[str, Any]
Tensors = Sequence[Any]

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
    """x with two spatial dims at least."""
    return x.unsqueeze(2) if x.dim() == 3 else x


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
    (dy,) = inputs
    name, corners, scales = _upsampling(dy, attrs)
    shape = (*dy.shape[:2], *attrs["input_size"])
    run = getattr(_aten, f"{name}_backward")
    dx: torch.Tensor = run(dy, dy.shape[2:], shape, *corners, *scales)
    return dx


#: op → its call.
RULES: Mapping[str, Callable[[Tensors, Attrs], torch.Tensor]] = {
    **{op: _pool(op) for op in _POOLS},
    **{f"{op}_backward": _max_backward(op) for op in ("max_pool", "adaptive_max_pool")},
    **{f"{op}_backward": _avg_backward(op) for op in ("avg_pool", "adaptive_avg_pool")},
    "interpolate": _interpolate,
    "interpolate_backward": _interpolate_backward,
}


def _plain(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether both lie alike without gaps, in a layout that torch's out variants write."""
    if x.is_contiguous() and out.is_contiguous():
        return True
    last = torch.channels_last
    return x.dim() == 4 and all(t.is_contiguous(memory_format=last) for t in (x, out))


def blocks(attrs: Attrs) -> bool:
    """Whether the windows of a pooling lie side by side, without padding."""
    return (
        tuple(attrs["stride"]) == tuple(attrs["kernel_size"])
        and not any(attrs["padding"])
        and all(step == 1 for step in attrs["dilation"])
        and not attrs["ceil_mode"]
    )


def _largest_of_blocks(x: torch.Tensor, kernel: Sequence[int], out: torch.Tensor) -> object:
    """A pooling whose windows lie side by side, in any strides and without indices: torch writes
    8 bytes of them for every element of the result."""
    for place, size in enumerate(kernel):
        dim = 2 + 2 * place
        x = x.narrow(dim, 0, x.shape[dim] // size * size)
        x = x.view(*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
    return torch.amax(x, [3 + 2 * place for place in range(len(kernel))], out=out)


def _pool_into(op: str) -> Callable[[Tensors, Attrs, torch.Tensor], object]:
    kind, arguments, indexed = _POOLS[op]

    def run(inputs: Tensors, attrs: Attrs, out: torch.Tensor) -> object:
        if op == "max_pool" and blocks(attrs):
            return _largest_of_blocks(inputs[0], attrs["kernel_size"], out)
        x, y = _image(inputs[0]), _image(out)
        if not _plain(x, y):
            return out.copy_(RULES[op](inputs, attrs))
        into = _pooled(kind.removeprefix("_"), x).out
        if not indexed:
            return into(x, *arguments(attrs), out=y)
        indices = torch.empty_like(y, dtype=torch.int64)
        return into(x, *arguments(attrs), out=y, indices=indices)

    return run


def _interpolate_into(inputs: Tensors, attrs: Attrs, out: torch.Tensor) -> object:
    (x,) = inputs
    if not _plain(x, out):
        return out.copy_(_interpolate(inputs, attrs))
    name, corners, scales = _upsampling(x, attrs)
    return getattr(_aten, name).out(x, out.shape[2:], *corners, *scales, out=out)


#: op → its call that writes to a given tensor of the result's shape and dtype.
INTO: Mapping[str, Callable[[Tensors, Attrs, torch.Tensor], object]] = {
    **{op: _pool_into(op) for op in _POOLS},
    "interpolate": _interpolate_into,
}
