"""Torch's own TF32 switches, the older and the newer ones: read them, set them for a while."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_newer: Any = torch.backends  # its per-op switches; where they are in use, the older ones raise


def in_convolutions() -> bool:
    """Whether torch allows TF32 in convolutions, as it does by default."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return str(_newer.cudnn.conv.fp32_precision) == "tf32"


def in_matmuls() -> bool:
    """Whether torch allows TF32 in matrix products, as it does not by default."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return str(_newer.cuda.matmul.fp32_precision) == "tf32"


def switches() -> tuple[Hashable, ...]:
    """The switches of both as part of a key, read in the cheapest way."""
    try:
        return (torch._C._get_cudnn_allow_tf32(), torch._C._get_cublas_allow_tf32())
    except RuntimeError:
        return (_newer.cudnn.conv.fp32_precision, _newer.cuda.matmul.fp32_precision)


@contextmanager
def scope(allowed: bool) -> Iterator[None]:
    """Set torch's switches for a torch step, and put them back afterwards."""
    owners: list[tuple[Any, str]] = [
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cuda.matmul, "allow_tf32"),
    ]
    wanted: bool | str = allowed
    try:
        before = [getattr(owner, name) for owner, name in owners]
    except RuntimeError:
        owners = [
            (_newer.cudnn.conv, "fp32_precision"),
            (_newer.cuda.matmul, "fp32_precision"),
        ]
        wanted = "tf32" if allowed else "ieee"
        before = [getattr(owner, name) for owner, name in owners]
    try:
        for (owner, name), value in zip(owners, before, strict=True):
            if value != wanted:
                setattr(owner, name, wanted)
        yield
    finally:
        for (owner, name), value in zip(owners, before, strict=True):
            if value != wanted:
                setattr(owner, name, value)
