"""Named tuples of results, which any process can unpickle: their classes are made while it runs."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

CLASSES_KEPT = 256


@lru_cache(maxsize=CLASSES_KEPT)
def result_class(name: str, fields: tuple[str, ...]) -> type[Any]:
    """Return a class of named tuples that pickle by their name and fields."""
    make: Callable[..., Any] = namedtuple
    made: Any = make(name, fields)
    made.__reduce__ = _reduced
    return made  # type: ignore[no-any-return]


def _reduced(results: Any) -> tuple[Any, ...]:
    return _restored, (type(results).__name__, results._fields, tuple(results))


def _restored(name: str, fields: tuple[str, ...], values: Sequence[Any]) -> Any:
    return result_class(name, fields)(*values)
