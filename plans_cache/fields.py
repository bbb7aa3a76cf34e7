"""Read JSON that nobody vouches for: within bounds, and field by field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NoReturn, TypeVar

MAX_INT = 2**63 - 1

T = TypeVar("T")
Read = Callable[[Any], T]


class Unexpected(Exception):
    """A value that cannot stand where it does. Its readers add the place, from inside out."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.where = ""

    def inside(self, place: str) -> Unexpected:
        """Add that the value is in ``place``, and return the error."""
        self.where = place + self.where
        return self


# -- the text --------------------------------------------------------------------------------------

_ESCAPE = re.compile(r"\\.", re.DOTALL)
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_NESTS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_AS_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")


def _bare(text: str) -> bytes:
    """``text`` without its strings."""
    if "\\" in text:
        text = _ESCAPE.sub("", text)
    return "".join(text.split('"')[::2]).encode("utf-8", "replace")


def _check_depth(bare: bytes, max_depth: int) -> None:
    nests = map(_NESTS.__getitem__, bare.translate(None, _NO_BRACKETS))
    if max(accumulate(nests), default=0) > max_depth:
        raise Unexpected(f"nested more than {max_depth} deep")


def _may_be_large(bare: bytes) -> bool:
    """Whether a number may not fit 64 bits or may not be finite: 19 digits, or an exponent of 3."""
    digits = bare.translate(_AS_DIGITS, b"+")
    return b"0" * 19 in digits or b"e000" in digits


def _int(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > MAX_INT:
        raise Unexpected(f"the number {text[:24]} does not fit 64 bits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Unexpected(f"the number {text[:24]} is too large")
    return value


def _constant(text: str) -> NoReturn:
    raise Unexpected(f"{text} is not a number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Unexpected(f"the field {twice[:40]!r} is there twice")
    return found


def load(text: str | bytes, max_bytes: int, max_depth: int) -> Any:
    """``json.loads`` within bounds: size, depth, numbers, and every name once. Raise Unexpected."""
    if len(text) > max_bytes:
        raise Unexpected(f"over {max_bytes} bytes long")
    try:
        text = text.decode() if isinstance(text, bytes) else text
        bare = _bare(text)
        _check_depth(bare, max_depth)
        every = _may_be_large(bare)  # a call for each number takes as long as all the rest
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_int if every else None,
            parse_float=_float if every else None,
            parse_constant=_constant,
        )
    except UnicodeDecodeError:
        raise Unexpected("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Unexpected(f"not JSON: {error}") from None


# -- values ----------------------------------------------------------------------------------------


# A reader takes a value of JSON and returns it as what it is, or raises Unexpected.


def wrong(value: Any, expected: str) -> Unexpected:
    """Return the error for ``value`` where ``expected`` should be."""
    shown = f"{value!r:.40}" if isinstance(value, (str, int, float)) else type(value).__name__
    return Unexpected(f"{shown}, expected {expected}")


def to_text(value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(value, "text")
    return value


def to_digest(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise wrong(value, "a SHA-256 in hexadecimal")
    return value


def to_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(value, "true or false")
    return value


def to_integer(value: Any) -> int:
    if type(value) is not int:  # True is an instance of int
        raise wrong(value, "an integer")
    return value


def to_natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise wrong(value, "an integer >= 0" if type(value) is int else "an integer")
    return value


def number_up_to(most: float) -> Read[float]:
    """Return a reader of numbers from 0 to ``most``."""

    def of(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise wrong(value, "a number >= 0")
        if value > most:
            raise wrong(value, f"at most {most:g}")
        return float(value)

    return of


def to_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(value, "an object")
    return value


def optional(read: Read[T]) -> Read[T | None]:
    """Return a reader of null, or of what ``read`` takes."""
    return lambda value: None if value is None else read(value)


def list_of(read: Read[T]) -> Read[tuple[T, ...]]:
    """Return a reader of lists whose items ``read`` takes."""

    def of(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise wrong(value, "a list")
        found: list[T] = []
        try:
            for item in value:
                found.append(read(item))
        except Unexpected as error:
            raise error.inside(f"[{len(found)}]") from None
        return tuple(found)

    return of


def named(read: Read[T]) -> Read[tuple[tuple[str, T], ...]]:
    """Return a reader of objects whose values ``read`` takes."""

    def of(value: Any) -> tuple[tuple[str, T], ...]:
        found = []
        for name, item in to_mapping(value).items():
            try:
                found.append((name, read(item)))
            except Unexpected as error:
                raise error.inside(f".{name:.40}") from None
        return tuple(found)

    return of


class Fields:
    """The fields of an object: each is taken once, :attr:`rest` is what nobody asked for."""

    def __init__(self, value: Any) -> None:
        self.rest = dict(to_mapping(value))

    def take(self, name: str, read: Read[T]) -> T:
        """Remove the field ``name`` and return what ``read`` makes of it."""
        try:
            return read(self.rest.pop(name))
        except KeyError:
            raise Unexpected(f"the field '{name}' is missing") from None
        except Unexpected as error:
            raise error.inside(f".{name}") from None
