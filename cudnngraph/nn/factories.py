"""torch's functions that make tensors of a size, called from Python while a forward is traced.

A traced tensor says to the forward's own ``isinstance`` that it is a ``torch.Tensor``. The frame
that asks tells whose question it is, and a function in C has none: asked in the forward's frame
whether a size is a tensor, it would read memory that is not there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAMES = (
    *("zeros", "ones", "empty", "full", "rand", "randn", "randint"),
    *("empty_strided", "empty_permuted", "randperm", "eye", "arange", "normal"),
)


@contextmanager
def from_python() -> Iterator[None]:
    """Have these functions called by one in Python."""
    real = {name: getattr(torch, name) for name in NAMES}
    try:
        for name, function in real.items():
            setattr(torch, name, _in_python(function))
        yield
    finally:
        for name, function in real.items():
            setattr(torch, name, function)


def _in_python(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call
