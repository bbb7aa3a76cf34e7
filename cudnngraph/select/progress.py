"""A bar of progress on the terminal, for what takes long enough to be noticed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[int, int], None]


@contextmanager
def progress_bar(label: str, *, after_s: float = 0.0, show: bool | None = None) -> Iterator[Tell]:
    """A function to be told ``(done, total)``; it shows a bar on stderr once ``after_s`` are over.

    ``show`` None shows it on a terminal only.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=after_s > 0)
    task = bar.add_task(label, total=None)
    start = time.perf_counter()
    started = False

    def tell(done: int, total: int) -> None:
        nonlocal started
        if not started and time.perf_counter() - start >= after_s:
            bar.start()
            started = True
        bar.update(task, completed=done, total=total)

    try:
        yield tell
    finally:
        if started:
            bar.stop()
