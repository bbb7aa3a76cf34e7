"""torch's distributions, which ask whether the numbers in their arguments are allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution


@contextmanager
def unvalidated() -> Iterator[None]:
    """Have distributions not ask, but those that are told to: what they compute is the same."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
