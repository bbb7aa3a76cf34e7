"""The models of the zoo, and how a call chooses among them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from .diffusion import DIFFUSION
from .entries import Entry, said
from .language import PAIRS, SPEECH, TEXT
from .vision import ATTENTIVE, CONVOLUTIONAL

ZOO: tuple[Entry, ...] = (*CONVOLUTIONAL, *ATTENTIVE, *PAIRS, *TEXT, *SPEECH, *DIFFUSION)
DEFAULT = f"{__name__}:ZOO"


def entries(registry: str = DEFAULT) -> tuple[Entry, ...]:
    """The entries under ``module:name``, of a module that Python finds or of the working directory.

    Raises ValueError if there are none, if the module cannot be imported, or for two of a name.
    """
    module, _, name = registry.partition(":")
    if not module or module.startswith("."):
        raise ValueError(f"{registry} is no list of entries; expected MODULE:NAME of some")
    try:
        found = tuple(getattr(_imported(module), name))
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{registry} is no list of entries: {error}") from None
    if not found or not all(isinstance(each, Entry) for each in found):
        raise ValueError(f"{registry} is no list of entries; expected MODULE:NAME of some")
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{registry} has two entries '{twice}'")
    return found


def _imported(module: str) -> Any:
    """The module of that name. The console script has its own folder in ``sys.path`` in place of
    the working directory, which ``python -m``, by which the processes of the zoo start, has."""
    if "" not in sys.path:  # the working directory
        sys.path.append("")
    try:
        return importlib.import_module(module)
    except ImportError:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"{module} cannot be imported: {said(error)}") from error


def chosen(listed: Sequence[Entry], patterns: Sequence[str]) -> tuple[Entry, ...]:
    """The entries whose name matches one of the globs, in upper or lower case; all for none.

    The parts of a name with commas stand for that name. Raises ValueError for a glob that matches
    none.
    """
    low = {entry.name: entry.name.lower() for entry in listed}
    patterns = _whole(patterns, set(low.values()))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern.lower()) for name in low.values()):
            raise ValueError(f"no model matches '{pattern}'; there are {'; '.join(low)}")
    if not patterns:
        return tuple(listed)
    return tuple(
        entry
        for entry in listed
        if any(fnmatchcase(low[entry.name], pattern.lower()) for pattern in patterns)
    )


def _whole(words: Sequence[str], names: set[str]) -> list[str]:
    """Words that were divided at commas, those of a name as one."""
    found, at = [], 0
    while at < len(words):
        ends = range(len(words), at, -1)
        end = next((end for end in ends if ", ".join(words[at:end]).lower() in names), at + 1)
        found.append(", ".join(words[at:end]))
        at = end
    return found
