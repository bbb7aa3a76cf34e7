"""Mixtures of experts as transformers has them: which of its implementations is traced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_log = logging.getLogger(__name__)
_GROUPED, _LOOPS = "grouped_mm", ("eager", None)


@contextmanager
def by_groups(model: nn.Module) -> Iterator[None]:
    """Have experts multiply groups of rows for a while, where they would loop over those that some
    token has chosen: how many these are depends on numbers. They are put back as they were."""
    changed: list[tuple[Callable[[Any], None], Any]] = []
    try:
        for module in model.modules():
            change, ask = (
                getattr(module, f"{verb}_experts_implementation", None) for verb in ("set", "get")
            )
            if callable(change) and callable(ask) and (before := _looping(ask)):
                try:
                    change({name: _GROUPED for name in before})
                except (ValueError, KeyError) as error:
                    _log.debug("%s keeps its experts: %s", type(module).__name__, error)
                else:
                    changed.append((change, before))
        yield
    finally:
        for change, before in reversed(changed):
            change(before)


def _looping(ask: Callable[[], Any]) -> dict[str, Any]:
    """The parts of a model whose experts are a loop, each with the name of its implementation."""
    found = ask()
    found = found if isinstance(found, dict) else {"": found}
    return {name: how for name, how in found.items() if how in _LOOPS}
