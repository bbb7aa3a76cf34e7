"""Checks of tensors against what a graph declares: device, dtype, shape, strides, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..arguments import unreadable, without_memory
from ..errors import Problem
from ..ir.spec import ALIGNMENT_BYTES, TensorSpec, same_layout
from ..ops.base import dtype_name
from .fast_call import Form


def tensor_problems(
    spec: TensorSpec, tensor: Any, device: torch.device, aligned: bool
) -> Iterator[Problem]:
    where = f"tensor '{spec.name}'"
    unfit = unreadable(where, tensor)
    if unfit:
        yield from unfit
        return
    if tensor.device != device:
        yield Problem(where, f"is on {tensor.device}", str(device), f"x.to('{device}')")
    if tensor.dtype != spec.dtype:
        yield Problem(where, f"is {dtype_name(tensor.dtype)}", dtype_name(spec.dtype), "convert it")
    if tensor.shape != spec.shape:
        yield Problem(
            where,
            f"has shape {tuple(tensor.shape)}",
            f"{spec.shape}",
            "compile a graph of that shape",
        )
    elif tensor.stride() != spec.stride and not same_layout(
        spec.shape, tensor.stride(), spec.stride
    ):
        layout = spec.layout()
        mend = (
            f"x.contiguous(memory_format=torch.{layout}), "
            f"or declare stride={tuple(tensor.stride())}"
            if layout == "channels_last" and len(spec.shape) in (4, 5)
            else f"make it so, or declare stride={tuple(tensor.stride())}"
        )
        yield Problem(
            where, f"has stride {tuple(tensor.stride())}", f"{spec.stride}, {layout}", mend
        )
    if aligned and tensor.is_neg():
        expected = "memory that holds its numbers"
        yield Problem(where, "is negated as it is read", expected, "resolve_neg() it")
    memory = without_memory(where, tensor)
    yield from memory
    if aligned and not memory and tensor.is_cuda and tensor.data_ptr() % ALIGNMENT_BYTES:
        past = tensor.data_ptr() % ALIGNMENT_BYTES
        yield Problem(
            where,
            f"starts {past} bytes past a multiple of {ALIGNMENT_BYTES}",
            f"a pointer aligned to {ALIGNMENT_BYTES} bytes",
            "clone() it",
        )


def fit(tensors: Sequence[Any], forms: Sequence[Form], device: torch.device) -> bool:
    """Whether tensors have these shapes, strides and dtypes and are on the device."""
    if len(tensors) != len(forms):
        return False
    try:
        for tensor, (shape, stride, dtype) in zip(tensors, forms, strict=True):
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.dtype is not dtype
                or tensor.shape != shape
                or tensor.stride() != stride
                or tensor.device != device
            ):
                return False
    except RuntimeError:  # it has no shape, or no strides
        return False
    return True


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return (0, 0)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return (start, start + (last + 1) * tensor.element_size())


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    (a0, a1), (b0, b1) = _range(a), _range(b)
    return a0 < b1 and b0 < a1 and not _side_by_side(a, b)


def neighbours(tensors: Mapping[str, torch.Tensor]) -> dict[str, set[str]]:
    """For each name, the tensors whose range of addresses meets its own: they may overlap.

    The ranges are gone through in order, so that many tensors take no longer than sorting them.
    """
    found: dict[str, set[str]] = {name: set() for name in tensors}
    open_: list[tuple[int, str]] = []  # (end, name) of ranges that others may still begin in
    for start, end, name in sorted((*_range(tensor), name) for name, tensor in tensors.items()):
        if start == end:
            continue
        open_ = [each for each in open_ if each[0] > start]
        for _, other in open_:
            found[name].add(other)
            found[other].add(name)
        open_.append((end, name))
    return found


def _side_by_side(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are slices of one buffer that share no element.

    There is a pitch such that both step by multiples of it and fill intervals within it that do not
    meet: channels of a channels_last image, columns of a matrix.
    """
    origin = min(a.data_ptr(), b.data_ptr())
    both = [
        (
            tensor.data_ptr() - origin,
            tensor.element_size(),
            [
                (n, step * tensor.element_size())
                for n, step in zip(tensor.shape, tensor.stride(), strict=True)
                if n > 1
            ],
        )
        for tensor in (a, b)
    ]
    for pitch in {step for _, _, steps in both for _, step in steps if step > 0}:
        spans = []
        for start, size, steps in both:
            if any(step > pitch and step % pitch for _, step in steps):
                break
            inner = size + sum((n - 1) * step for n, step in steps if step < pitch)
            spans.append((start % pitch, start % pitch + inner))
        if len(spans) == 2 and max(stop for _, stop in spans) <= pitch:
            (a0, a1), (b0, b1) = spans
            if a1 <= b0 or b1 <= a0:
                return True
    return False
