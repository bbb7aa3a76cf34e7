"""Shared by all lowering rules: refusals, and shapes with strides."""

from __future__ import annotations

from collections.abc import Sequence

Shape = Sequence[int]
Place = tuple[Shape, Shape]  # shape and stride


class Refused(Exception):
    """A rule knows that cuDNN cannot take this op; the reason is the message."""
