"""Checks of the options that :func:`fuse` and the backend of torch.compile are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from ..arguments import shown
from ..errors import PolicyError
from ..policy import Policy, with_options


def check_options(max_shapes: Any, channels_last: Any, **flags: Any) -> None:
    """Raise :class:`PolicyError` for a value that an option cannot have."""
    if type(max_shapes) is not int or not 1 <= max_shapes < 1 << 31:
        expected = "a whole number >= 1 that fits 32 bits"
        raise PolicyError(f"max_shapes={shown(max_shapes)}; expected {expected}")
    if not (channels_last is None or type(channels_last) is bool):
        raise PolicyError(f"channels_last={shown(channels_last)}; expected True, False or None")
    for name, value in flags.items():
        if type(value) is not bool:
            raise PolicyError(f"{name}={shown(value)}; expected True or False")


def check_dtype(value: Any) -> None:
    """Raise :class:`PolicyError` for what is neither None nor a floating dtype."""
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise PolicyError(f"dtype={shown(value)}; expected a floating-point torch.dtype")


def check_kwargs(value: Any) -> None:
    """Raise :class:`PolicyError` for what is neither None nor a mapping."""
    if not (value is None or isinstance(value, Mapping)):
        raise PolicyError(f"kwargs={shown(value)}; expected a mapping of arguments by name")


def policy_of(
    policy: Policy | None, options: Mapping[str, Any], where: str, own: Sequence[str]
) -> Policy:
    """Return ``policy`` with fields that are given as keywords.

    Raises :class:`PolicyError` for a name that is no field; the message lists them beside ``own``,
    the names of the other options of ``where``.
    """
    known = [field.name for field in fields(Policy)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise PolicyError(
            f"option {', '.join(unknown)} is unknown to {where}; options are {', '.join(own)}, "
            f"and the fields of a policy: {', '.join(known)}"
        )
    return with_options(policy, options)
