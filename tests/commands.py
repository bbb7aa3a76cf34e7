"""Commands called in a test, and the tables that they print."""

from __future__ import annotations

import re
from collections.abc import Callable

Cli = Callable[..., tuple[int, str, str]]


def rows(text: str) -> list[list[str]]:
    """The rows of a plain table, cells divided by two spaces or more."""
    return [re.split(r" {2,}", line) for line in text.splitlines()]
