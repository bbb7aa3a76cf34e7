"""Set torch's own TF32 switches for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """torch's own TF32 switches for a torch step, put back afterwards."""
    newer: Any = torch.backends
    switches: list[tuple[Any, str]] = [
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cuda.matmul, "allow_tf32"),
    ]
    wanted: bool | str = allowed
    try:
        before = [getattr(owner, name) for owner, name in switches]
    except RuntimeError:  # the newer per-op switches are in use
        switches = [
            (newer.cudnn.conv, "fp32_precision"),
            (newer.cuda.matmul, "fp32_precision"),
        ]
        wanted = "tf32" if allowed else "ieee"
        before = [getattr(owner, name) for owner, name in switches]
    try:
        for (owner, name), value in zip(switches, before, strict=True):
            if value != wanted:
                setattr(owner, name, wanted)
        yield
    finally:
        for (owner, name), value in zip(switches, before, strict=True):
            if value != wanted:
                setattr(owner, name, value)
