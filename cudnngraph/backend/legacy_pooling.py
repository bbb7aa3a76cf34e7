"""Max pooling by cuDNN's own call, which its Python frontend does not have.

torch's kernel writes 8 bytes of indices beside each element of the result; cuDNN's writes the
result alone. The call is of cuDNN's older interface, the same in all of 9. Of a window of -inf
alone it makes the lowest finite number, so it is for images that hold no -inf.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ..ir.spec import ALIGNMENT_BYTES, TensorSpec
from . import env, handles, libraries

_DTYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 9}  # cudnnDataType_t
_MAX = 0  # cudnnPoolingMode_t
_KEEP_NAN = 1  # cudnnNanPropagation_t
_REFUSALS = range(2000, 4000)  # cudnnStatus_t: of parameters, and of what is not supported
_MOST = 2**31 - 1  # elements that strides reach

#: Pools an image into another tensor, on the current stream; False where cuDNN does not do it.
Pooling = Callable[[torch.Tensor, torch.Tensor], bool]


class _Descriptor:
    """One of cuDNN's, made by ``cudnnCreate<kind>Descriptor``, destroyed with this."""

    def __init__(self, library: Any, kind: str) -> None:
        self.pointer = ctypes.c_void_p()
        self._destroy = getattr(library, f"cudnnDestroy{kind}Descriptor")
        create = getattr(library, f"cudnnCreate{kind}Descriptor")
        _check(library, create(ctypes.byref(self.pointer)))

    def __del__(self) -> None:
        if self.pointer:
            self._destroy(self.pointer)


class _Error(RuntimeError):
    """An error that cuDNN returns."""


@cache
def _library() -> Any:
    """The cuDNN whose handles the frontend makes; None where it is not clear which one that is."""
    env.frontend()  # has it loaded
    copies = libraries.loaded_copies().get(libraries.CUDNN, ())
    if len(copies) != 1:
        return None
    library = ctypes.CDLL(copies[0])
    library.cudnnGetErrorString.restype = ctypes.c_char_p
    return library


def _check(library: Any, status: int) -> None:
    if status:
        raise _Error(f"cuDNN's pooling: {library.cudnnGetErrorString(status).decode()}")


def _numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_int * len(values))(*values)


def _tensor(library: Any, spec: TensorSpec, strides: Sequence[int]) -> _Descriptor:
    made = _Descriptor(library, "Tensor")
    sizes = len(spec.shape), _numbers(spec.shape), _numbers(strides)
    setting = library.cudnnSetTensorNdDescriptor(made.pointer, _DTYPES[spec.dtype], *sizes)
    _check(library, setting)
    return made


def takes(op: str, attrs: Mapping[str, Any], x: TensorSpec, y: TensorSpec) -> bool:
    """Whether :func:`pooling` is for this: images in one of torch's two layouts, or slices of such,
    and windows that cuDNN has."""
    if op != "max_pool" or x.dtype not in _DTYPES or x.dtype != y.dtype or x.numel * y.numel == 0:
        return False
    names = ("kernel_size", "stride", "padding", "dilation")
    rows = zip(x.shape[2:], y.shape[2:], *(attrs[name] for name in names), strict=True)
    if not all(d == 1 and (n + 2 * p - k) // s + 1 == m for n, m, k, s, p, d in rows):
        return False
    return len(x.shape) in (4, 5) and _strides(x, y) is not None


def _strides(*tensors: TensorSpec) -> list[list[int]] | None:
    """Strides of tensors whose dims all lie in the order of one of torch's layouts, the last one's
    elements side by side; those of extents of 1 are as if they were larger."""
    rank = len(tensors[0].shape)
    for order in ((0, *range(2, rank), 1), range(rank)):
        found = [_in_order(tensor, order) for tensor in tensors]
        if None not in found:
            return [strides for strides in found if strides is not None]
    return None


def _in_order(tensor: TensorSpec, order: Sequence[int]) -> list[int] | None:
    strides, reach = list(tensor.stride), 1
    for dim in reversed(order):
        extent, step = tensor.shape[dim], strides[dim]
        if extent == 1:
            strides[dim] = reach
        elif (
            step < reach
            or (reach == 1 and step != 1)
            or (step != reach and step * tensor.dtype.itemsize % ALIGNMENT_BYTES)
        ):
            return None
        else:
            reach = extent * step
    return strides if reach <= _MOST else None


def pooling(attrs: Mapping[str, Any], x: TensorSpec, y: TensorSpec) -> Pooling | None:
    """Make the function that max-pools tensors like ``x`` into tensors like ``y``.

    None if cuDNN's library cannot be had, or refuses.
    """
    library = _library()
    if library is None:
        return None
    try:
        window, given, made = _descriptors(library, attrs, x, y)
    except _Error:
        return None
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    factor, nothing = ctypes.byref(one), ctypes.byref(zero)
    place = ctypes.c_void_p

    def run(image: torch.Tensor, out: torch.Tensor) -> bool:
        source, target = image.data_ptr(), out.data_ptr()
        if (source | target) % ALIGNMENT_BYTES:
            return False
        with torch.cuda.device(image.device):
            handle = place(handles.handle_on_current_stream(image.device.index).backend_handle)
            status = library.cudnnPoolingForward(
                *(handle, window.pointer, factor, given.pointer, place(source)),
                *(nothing, made.pointer, place(target)),
            )
        if status in _REFUSALS:
            return False
        _check(library, status)
        return True

    return run


def _descriptors(
    library: Any, attrs: Mapping[str, Any], x: TensorSpec, y: TensorSpec
) -> tuple[_Descriptor, _Descriptor, _Descriptor]:
    """Descriptors of the windows, of x and of y."""
    window = _Descriptor(library, "Pooling")
    sizes = [_numbers(attrs[name]) for name in ("kernel_size", "padding", "stride")]
    rank = len(x.shape) - 2
    setting = library.cudnnSetPoolingNdDescriptor(window.pointer, _MAX, _KEEP_NAN, rank, *sizes)
    _check(library, setting)
    strides = _strides(x, y)
    assert strides is not None
    given, made = (_tensor(library, *each) for each in zip((x, y), strides, strict=True))
    return window, given, made
