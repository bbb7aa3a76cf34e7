"""torch.export without what it prints and logs as it gives up: the error says why."""

from __future__ import annotations

import builtins
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_log = logging.getLogger(__name__)
#: Loggers of torch that say of a failure what the error says too.
_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
)


@contextmanager
def export_quiet() -> Iterator[None]:
    """Keep what torch.export says in this thread, a partial graph on standard error among it, out
    of everything but our log at level DEBUG. One at a time: its ``print`` is that of all threads.
    """
    from torch.export import _trace

    here = threading.get_ident()

    def said(*what: Any, **options: Any) -> None:
        if threading.get_ident() == here:
            _log.debug("torch.export: %s", " ".join(map(str, what)))
        else:
            builtins.print(*what, **options)

    def others(record: logging.LogRecord) -> bool:
        if threading.get_ident() != here or record.levelno < logging.WARNING:
            return True
        _log.debug("torch.export: %s", record.getMessage())
        return False

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    module: Any = _trace
    module.print = said
    for logger in loggers:
        logger.addFilter(others)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(others)
        del module.print
